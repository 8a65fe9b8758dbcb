"""eyas-contract: what was trained and what is served, as one checked record. Standard library only."""

from eyas_contract.capture import CaptureSpec, TensorSpec, default_aux_layer_ids, store_tensors
from eyas_contract.contract import Contract, compare, require_equal
from eyas_contract.draft import DraftSpec, MlaSizes, draft_tensors
from eyas_contract.errors import (
    ContractMismatch,
    CorruptFile,
    EngineFailure,
    EyasError,
    InvalidInput,
    Mismatch,
)
from eyas_contract.store import Manifest, SampleRecord, ShardRecord, TensorRecord
from eyas_contract.target import Rope, TargetSpec
from eyas_contract.vocab import VocabMap

__version__ = "0.1.0"

__all__ = [
    "CaptureSpec", "Contract", "ContractMismatch", "CorruptFile", "DraftSpec", "EngineFailure", "EyasError",
    "InvalidInput", "Manifest", "Mismatch", "MlaSizes", "Rope", "SampleRecord", "ShardRecord", "TargetSpec",
    "TensorRecord", "TensorSpec", "VocabMap", "compare", "default_aux_layer_ids", "draft_tensors", "require_equal",
    "store_tensors",
]
