"""A draft spread over processes by FSDP2, and its checkpoints: every process writes what it holds.

One shell module holds the draft, and a whole unrolled pass is one call of the shell: weights are gathered once a pass,
gradients summed and scattered once, and everything inside sees plain tensors. Between passes each process keeps its
share of weights, gradients and moments.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas_contract import CorruptFile
from eyas_contract.contract import read_json, write_text_atomic
from eyas_draft.ranks import Ranks
from eyas_draft.sums import require_whole

R = TypeVar("R")
STATE = "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Shell(nn.Module):
    """Holds the draft; its forward pass is whatever is to run with whole weights."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, compute: Callable[[], R]) -> R:
        """Run `compute`; tensors to be differentiated must stand in its result or in tuples of it."""
        return compute()


def shell_of(draft: nn.Module, ranks: Ranks) -> Shell:
    """The draft in a shell, spread over the processes where there are several (or a group of one)."""
    shell = Shell(draft)
    if ranks.shared:
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        spread: Any = fully_shard(shell, mesh=mesh, reshard_after_forward=False)
        spread.set_gradient_divide_factor(1.0)  # sums: the loss is already divided by the batches of a step
        spread.set_force_sum_reduction_for_comms(True)
    return shell


@contextmanager
def whole(shell: Shell) -> Iterator[None]:
    """Whole weights inside the block, for measuring."""
    if not isinstance(shell, FSDPModule):
        yield
        return
    shell.unshard()
    try:
        yield
    finally:
        shell.reshard()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as `model.<name>`, moments as `exp_avg.<name>` and so on: flat, by name, whatever the sharding."""
    flat: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        flat[f"model.{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        flat |= {f"{kind}.{name}": state[kind] for kind in MOMENTS if kind in state}
    return flat


def write(folder: Path, tensors: dict[str, Tensor], plain: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint together; it has its name once it is whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    save(tensors, checkpoint_id=temporary)
    if ranks.first:
        write_text_atomic(temporary / STATE, json.dumps(plain) + "\n")
        temporary.replace(folder)
    ranks.wait()


def read_plain(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    return dict(read_json(folder / STATE, "a checkpoint of eyas-draft train"))


def read_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, on the CPU, in one process without a group.

    Raises:
        CorruptFile: it cannot be read.
    """
    with _damage_named(folder):
        metadata = FileSystemReader(folder).read_metadata()
        _require_parts(folder, metadata, slice(None))
        known = metadata.state_dict_metadata
        tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in known.items()
                   if isinstance(value, TensorStorageMetadata)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
            load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def read_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors (each process its share) from a checkpoint, written by any number of processes.

    Raises:
        CorruptFile: it cannot be read.
    """
    with _damage_named(folder):
        mine = slice(dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else slice(None)
        _require_parts(folder, FileSystemReader(folder).read_metadata(), mine)
        load(tensors, checkpoint_id=folder)


def _require_parts(folder: Path, metadata: Metadata, mine: slice) -> None:
    """Compare the sums of some of a checkpoint's parts, each an archive of its own within a file.

    Raises:
        ValueError: a part that is not what was written.
    """
    parts = (metadata.storage_data or {}).values()
    for part in sorted(parts, key=lambda part: (part.relative_path, part.offset))[mine]:
        with (folder / part.relative_path).open("rb") as file:
            file.seek(part.offset)
            require_whole(io.BytesIO(file.read(part.length)))


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Whatever a cut or overwritten checkpoint makes torch raise, as CorruptFile."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError,
            CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        what = str(first).partition("\n")[0]  # torch adds a traceback
        raise CorruptFile(str(folder), f"unreadable ({type(first).__name__}: {what})",
                          "a checkpoint of eyas-draft train",
                          "Delete this folder to go on from the checkpoint before it.") from error


def fill(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy whole values into tensors, of which each process holds its share; a weight that never had a gradient (it is
    used by nothing) may have no moments."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in values and not name.startswith("model."):
                continue
            value = values[name].to(tensor.device, tensor.dtype)
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)
