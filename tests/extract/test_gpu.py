"""The ring's way from a device through pinned shared memory to the writer process's files; the CPU's way beside it."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from eyas_contract import CaptureSpec, store_tensors
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import read_tensor
from eyas_extract.inside.ring import Ring
from eyas_extract.inside.sink import Piece
from eyas_extract.mask import Sample
from eyas_extract.protocol import Captor, CaptureSettings, RowsDone, read_rows, rows_file
from eyas_extract.shard_file import ShardFile

HIDDEN, AUX, LENGTHS = 512, (0, 2, 4), (700, 1, 63, 1500, 64, 900)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stored", ["BF16", "F8_E4M3"])
def test_every_row_arrives(tmp_path: Path, stored: str, device: str) -> None:
    samples = [Sample(f"s{i}", i + 1, array("i", range(n)), b"\1" * n) for i, n in enumerate(LENGTHS)]
    file = ShardFile(tmp_path, CaptureSpec(AUX, HIDDEN, "pre_norm", store_tensors(stored), 2048), samples, {})
    captor = Captor("0.0.0", "None", AUX, HIDDEN, "BF16", stored, str(tmp_path), "tp0", "")
    ring = Ring(CaptureSettings(AUX, str(tmp_path), str(tmp_path), stored, slot_mib=1, slots=3, threads=2), captor,
                device, lambda: "")
    wanted: list[torch.Tensor] = []
    broken = 3  # this sample's states have a value that is none
    for i, mark in enumerate(file.marks()):
        for at in range(0, mark.rows, 400):  # a batch each; rows before and after belong to nobody
            rows = min(400, mark.rows - at)
            states = [torch.randn(rows + 7, HIDDEN, device=device).to(torch.bfloat16) * 10 for _ in range(4)]
            if i == broken:
                states[1][3 + rows - 1, 5] = float("nan")
            ring.take(states, [Piece(mark, at, 3, rows)])
            wanted.append(torch.cat([state[3:3 + rows].float().cpu() for state in states], dim=1))
    ring.close()
    lines = [line for line in read_rows(rows_file(file.path), 0)[0] if isinstance(line, RowsDone)]
    assert sorted(line.first for line in lines) == file.bounds[:-1]
    assert [line.bad for line in lines if line.bad] == ["non-finite values in the states of layer 2"]
    found = states_in(file.path).split(LENGTHS)
    for i, (ours, theirs) in enumerate(zip(found, torch.cat(wanted).split(LENGTHS), strict=True)):
        if stored == "BF16":
            assert torch.equal(ours, theirs) or i == broken
        elif i != broken:
            assert ((ours - theirs).norm() / theirs.norm()) < 0.04


def states_in(path: Path) -> torch.Tensor:
    """Aux layers and the last side by side, float32 [T, (K + 1) * H]."""
    tensors, parts = read_header(path).tensors, []
    for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
        values = read_tensor(tensors[name]).float()
        if scales in tensors:
            scale = read_tensor(tensors[scales])
            values = (values.view(*scale.shape, -1) * scale[:, :, None]).flatten(1)
        parts.append(values)
    return torch.cat(parts, dim=1)
