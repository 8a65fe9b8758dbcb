"""`pytorch_model.bin` read without torch, and nothing run that such a file holds."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import drafts
import pytest
import torch
from drafts import Tensor

from eyas_contract import CorruptFile, EyasError, InvalidInput
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.engines import check, verdict
from eyas_contract.fingerprint import weights_fingerprint
from eyas_contract.torch_zip import read_torch_zip

DTYPES = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}


def as_torch(tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good draft saved by torch."""
    made = drafts.draft()
    out = tmp_path / "draft"
    tensors, made.tensors = made.tensors, {}
    made.write(out)
    torch.save({name: as_torch(tensor) for name, tensor in tensors.items()}, out / "pytorch_model.bin")
    return out


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


def test_a_trainers_arguments_are_no_weights(folder: Path, target: Path) -> None:
    before = weights_fingerprint(folder)
    (folder / "training_args.bin").write_bytes(pickle.dumps(io.BytesIO()))
    assert verdict(check(folder, target)) == "pass"
    assert weights_fingerprint(folder) == before


def test_names_shapes_and_bytes_are_those_of_torch(folder: Path) -> None:
    read = read_checkpoint(folder)
    for name, tensor in drafts.draft().tensors.items():
        info = read[name]
        assert (info.dtype, list(info.shape)) == (tensor.dtype, tensor.shape)
        assert info.file.read_bytes()[info.start:info.end] == tensor.data


def test_a_draft_saved_by_torch_is_checked_like_any_other(folder: Path, target: Path) -> None:
    assert verdict(check(folder, target)) == "pass"
    state = torch.load(folder / "pytorch_model.bin")
    del state["lm_head.weight"]
    state["d2t"] += torch.arange(96)
    torch.save(state, folder / "pytorch_model.bin")
    assert {"head-missing", "d2t-absolute"} <= {f.code for f in check(folder, target)}


def test_slices_of_one_storage_and_parameters(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"state_dict": OrderedDict(second=whole[1:], one=torch.nn.Parameter(whole[0]))}, path)
    read = read_torch_zip(path)
    raw = path.read_bytes()
    assert torch.frombuffer(bytearray(raw[read["second"].start:read["second"].end]), dtype=torch.float32).tolist() \
        == list(range(4, 12))
    assert read["one"].shape == (4,)
    torch.save({"turned": whole.T}, path)
    with pytest.raises(InvalidInput, match="not contiguous"):
        read_torch_zip(path)


class Harm:
    """Runs a command when unpickled by a careless reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os
        return os.system, (f"touch {self.mark}",)


def zipped(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
    return path


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = zipped(tmp_path / "pytorch_model.bin", pickle.dumps({"a": Harm(mark)}))
    with pytest.raises(InvalidInput, match="system"):
        read_torch_zip(path)
    assert not mark.exists()


@pytest.mark.parametrize("pickled", [
    b"", b"garbage", pickle.dumps([1, 2]), pickle.dumps({"a": 1})[:-3], b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0fx.",
    b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI2\nI3\nI4\ntR.", b"cbuiltins\neval\n(S'1'\ntR.",
    b"(" * 100_000 + b"."])
def test_pickles_made_to_hurt(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        read_torch_zip(zipped(tmp_path / "x.bin", pickled))


def test_files_that_are_no_archives(tmp_path: Path, folder: Path) -> None:
    whole = (folder / "pytorch_model.bin").read_bytes()
    path = tmp_path / "x.bin"
    for raw in (b"", b"PK", whole[:len(whole) // 2], b"\0" * 1000):
        path.write_bytes(raw)
        with pytest.raises(CorruptFile):
            read_torch_zip(path)
    with pytest.raises(CorruptFile, match=r"data\.pkl"):
        read_torch_zip(zipped(path, b"\0" * 17 * 2**20, zipfile.ZIP_DEFLATED))


def test_any_cut_or_flipped_byte_gets_an_answer(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        first = archive.infolist()[0]
    for at in [*range(0, first.header_offset + 2500, 7), *range(len(whole) - 2500, len(whole), 7)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:])
        try:
            read_torch_zip(path)
        except EyasError:
            continue
