"""Outputs are never written over what was there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eyas_contract import InvalidInput
from eyas_contract.contract import write_text_atomic
from eyas_contract.outputs import lock, require_own, require_place, set_aside, with_temporary
from eyas_contract.safetensors_copy import int64, write_tensors


def test_a_folder_with_anything_else_is_refused(tmp_path: Path) -> None:
    ours = with_temporary("contract.json")
    require_own(tmp_path / "new", ours, "a new folder")
    require_own(tmp_path, ours, "a new folder")
    (tmp_path / ".contract.json.tmp").touch()
    (tmp_path / "contract.json").touch()
    require_own(tmp_path, ours, "a new folder")
    for name in "abcdefg":
        (tmp_path / name).touch()
    with pytest.raises(InvalidInput, match=r"not empty: a, b, c, d, e and 2 more.*Wanted: a new folder"):
        require_own(tmp_path, ours, "a new folder")
    with pytest.raises(InvalidInput, match="a file"):
        require_own(tmp_path / "a", ours, "a new folder")


def test_an_earlier_report_is_kept_under_one_new_number(tmp_path: Path) -> None:
    report, page = tmp_path / "bench.json", tmp_path / "bench.html"
    assert set_aside(report, page) == []
    for turn, expected in enumerate((["bench.1.json", "bench.1.html"], ["bench.2.json", "bench.2.html"])):
        report.write_text(f"report {turn}")
        page.write_text(f"page {turn}")
        assert [path.name for path in set_aside(report, page)] == expected
    page.write_text("page 2")
    (tmp_path / "bench.3.json").write_text("somebody's")
    assert [path.name for path in set_aside(report, page)] == ["bench.4.html"]
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [
        "page 0", "page 1", "page 2", "report 0", "report 1", "somebody's"]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    require_place(tmp_path / "new" / "report.json", "a JSON file", taken=(".csv",))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    for path, found in ((tmp_path / "new", "a folder"), (tmp_path / "report.csv", r"a name that ends in \.csv"),
                        (tmp_path / "file" / "report.json", "in a folder that cannot be made")):
        with pytest.raises(InvalidInput, match=f"{found}.*Wanted: a JSON file"):
            require_place(path, "a JSON file", taken=(".csv",))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not bind root
    with pytest.raises(InvalidInput, match="in a folder that cannot be written to"):
        require_place(tmp_path / "new" / "report.json", "a JSON file")


def test_a_lock_is_held_until_its_handle_is_closed(tmp_path: Path) -> None:
    handle = lock(tmp_path)
    with pytest.raises(InvalidInput, match="another process of eyas writes to it now"):
        lock(tmp_path)
    os.close(handle)
    os.close(lock(tmp_path))


def test_what_is_renamed_into_place_was_synced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut leaves the new name with nothing behind it."""
    path, synced = tmp_path / "contract.json", []
    path.write_text("old")

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        assert path.read_text() == "old"

    monkeypatch.setattr(os, "fsync", fsync)
    write_text_atomic(path, "the new text")
    assert synced == [len("the new text")]
    assert path.read_text() == "the new text"
    path.write_text("old")
    write_tensors(path, {"d2t": int64("d2t", [0, 1, 3])}, {})
    assert synced[1:] == [path.stat().st_size]
