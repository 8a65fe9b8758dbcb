"""Shared command plumbing: TOML configs, exit codes, progress lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from eyas_contract.commands import duration, load_toml, progress_line, run_command
from eyas_contract.errors import InvalidInput


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Config:
    target: Path
    max_length: int = 8
    layers: tuple[int, ...] | None = None
    mode: Literal["a", "b"] = "a"
    inner: Inner = Inner()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_toml_converts_and_leaves_out_what_is_absent(tmp_path: Path) -> None:
    values = load_toml(Config, write(tmp_path, 'target = "/m"\nmax-length = 4\nlayers = [1, 2]\n[inner]\nrate = 1\n'))
    assert values == {"target": Path("/m"), "max_length": 4, "layers": (1, 2), "inner": Inner(1.0)}


def test_load_toml_names_every_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_toml(Config, write(tmp_path, 'maxlength = 4\nmax_length = "4"\nmode = "c"\n[inner]\nrat = 1\n'))
    for part in ("maxlength is unknown", "max_length is str", "mode is 'c'", "inner.rat is unknown"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", ["= 1", "a = [", None])
def test_load_toml_refuses_unreadable_files(tmp_path: Path, content: str | None) -> None:
    path = write(tmp_path, content) if content else tmp_path / "absent.toml"
    with pytest.raises(InvalidInput):
        load_toml(Config, path)


def test_run_command_turns_errors_into_text_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise InvalidInput("here", "this", "that", "Do so.")

    def stop() -> int:
        raise KeyboardInterrupt

    assert run_command(lambda: None) == 0
    assert run_command(lambda: 3) == 3
    assert run_command(fail) == 1
    assert capsys.readouterr().err == "error: here: this. Wanted: that. Do so.\n"
    assert run_command(stop) == 130


def test_progress_line() -> None:
    assert progress_line("train", 50, 200, 10.0, tokens=4000, loss=2.31234) == \
        "train: 50/200, 25 %, 400 tokens/s, ETA 30s, loss 2.312"
    assert progress_line("train", 0, 0, 0.0, tokens=0) == "train: 0/0, 0 %"
    assert [duration(s) for s in (45.2, 200, 7500)] == ["45s", "3m20s", "2h05m"]
