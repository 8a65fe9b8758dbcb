"""Outputs are never written over what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas_contract import InvalidInput
from eyas_contract.outputs import require_own, set_aside, with_temporary


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
