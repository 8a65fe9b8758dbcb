"""The rows' way into shard files: neighbours in one call, a line a sample, files closed once they are whole."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas_contract import CaptureSpec, EngineFailure, store_tensors
from eyas_extract.inside import sink as sink_module
from eyas_extract.inside.ring import Ring
from eyas_extract.inside.sink import Part, Piece, Sink, runs
from eyas_extract.inside.slots import Layout
from eyas_extract.mask import Sample
from eyas_extract.protocol import Captor, CaptureSettings, Mark, RowsDone, read_rows, rows_file
from eyas_extract.shard_file import ShardFile

HIDDEN = 4
CAPTURE = CaptureSpec((0, 1), HIDDEN, "pre_norm", store_tensors("F32"), 64)
LENGTHS = (3, 5, 2)


def shard(folder: Path) -> ShardFile:
    samples = [Sample(f"s{i}", i + 1, array("i", range(length)), b"\1" * length) for i, length in enumerate(LENGTHS)]
    return ShardFile(folder, CAPTURE, samples, {})


def rows(count: int) -> dict[str, np.ndarray]:
    values = np.arange(count, dtype=np.float32)[:, None]
    return {"aux_hidden_states": np.tile(values, 2 * HIDDEN).view(np.uint8),
            "last_hidden_state": np.tile(-values, HIDDEN).view(np.uint8)}


def send(sink: Sink, marks: list[Mark], bad: dict[int, set[str]] | None = None) -> None:
    """All samples of a file in one buffer."""
    parts, at, file = [], 0, None
    for mark in marks:
        expected = sink.expect(Piece(mark, 0, at, mark.rows), b"{}\n")
        assert expected is not None
        file, turn = expected
        parts.append(Part(mark, turn, 0, at, mark.rows))
        at += mark.rows
    assert file is not None
    sink.write(file, parts, rows(at), bad or {})


def lines(file: ShardFile) -> list[RowsDone]:
    raw = rows_file(file.path).read_bytes().splitlines(keepends=True)
    rows_file(file.path).write_bytes(b"".join(raw[1:]))  # without the captor's, which is none here
    return [line for line in read_rows(rows_file(file.path), 0)[0] if isinstance(line, RowsDone)]


def test_whole_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = sink_module._pwrite

    def counted(file: int, block: np.ndarray, offset: int) -> None:
        calls.append(offset)
        write(file, block, offset)

    monkeypatch.setattr(sink_module, "_pwrite", counted)
    file, sink = shard(tmp_path), Sink(tmp_path)
    send(sink, file.marks(), {1: {"all-zero states of layer 1"}})
    assert len(calls) == 2  # one a tensor, for three samples
    assert lines(file) == [RowsDone(0, 3), RowsDone(3, 5, bad="all-zero states of layer 1"), RowsDone(8, 2)]
    assert not sink.shards  # closed: whoever deletes it gets its room back
    records, _ = file.finish({})
    found = np.frombuffer(file.path.read_bytes()[-8 * (len(LENGTHS) + 1) - 4 * HIDDEN * 10:][:4 * HIDDEN * 10],
                          np.float32)
    assert found.reshape(10, HIDDEN)[:, 0].tolist() == [-float(i) for i in range(10)]
    assert len(records) == 5


def test_files_that_are_given_up_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "OPEN_FILES", 2)
    sink = Sink(tmp_path)
    for _ in range(5):
        mark = shard(tmp_path).marks()[0]
        expected = sink.expect(Piece(mark, 0, 0, 3), b"{}\n")
        assert expected is not None
        sink.write(expected[0], [Part(mark, expected[1], 0, 0, 3)], rows(3), {})
    assert len(sink.shards) == 2


def test_outside_the_root(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert Sink(tmp_path / "in").expect(Piece(shard(tmp_path).marks()[0], 0, 0, 3), b"") is None


def test_what_is_no_shard_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"something else")
    assert Sink(tmp_path).expect(Piece(Mark(str(path), 0, 3), 0, 0, 3), b"") is None
    assert path.read_bytes() == b"something else"


@pytest.mark.parametrize("request_id", ["a", "eyas:", "eyas:a", "eyas:a:b:c:d", "eyas:a:1:2:3x"])
def test_requests_of_others_have_no_mark(request_id: str) -> None:
    assert Mark.parse(request_id) is None
    assert Mark.parse(Mark("/a:b", 1, 2, 3).request_id()) == Mark("/a:b", 1, 2, 3)


def test_a_writer_that_fails_lets_nobody_wait(tmp_path: Path) -> None:
    """Here it cannot make a report; its rank would wait for a free slot for ever."""
    file = shard(tmp_path)
    rows_file(file.path).mkdir()
    captor = Captor("0", "Fake", (0, 1), HIDDEN, "F32", "F32", str(tmp_path), "tp0", "")
    ring = Ring(CaptureSettings((0, 1), str(tmp_path), str(tmp_path), "F32", slot_mib=0, slots=2, threads=2), captor,
                "cpu", lambda: "")
    try:
        ring.take([torch.ones(3, HIDDEN)] * 3, [Piece(file.marks()[0], 0, 0, 3)])
        assert ring.writer.wait(timeout=30) == 1
        with pytest.raises(EngineFailure, match="exit code 1"):
            ring.take([torch.ones(3, HIDDEN)] * 3, [Piece(file.marks()[0], 0, 0, 3)])
    finally:
        ring.writer.kill()


def test_runs() -> None:
    assert runs([(0, 10, 3), (3, 13, 2), (7, 15, 1), (8, 20, 1)]) == [[0, 10, 5], [7, 15, 1], [8, 20, 1]]


def test_layout_fields_do_not_overlap() -> None:
    layout = Layout(rows=100, layers=3, hidden=8, itemsize=1, scaled=True, slots=2)
    ends = 0
    for offset, size, (height, width) in layout.fields().values():
        assert offset >= ends
        assert offset % 4096 == 0
        ends = offset + size * height * width
    assert ends <= layout.slot_bytes
    assert layout.slot_bytes % 4096 == 0
