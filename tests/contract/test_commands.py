"""Config files under flags, exit codes, progress lines."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from eyas_contract import EyasError, InvalidInput
from eyas_contract.commands import Progress, duration, expand_config, run_command


@dataclass(frozen=True)
class Config:
    store: Path
    lr: float = 1e-3
    layers: tuple[int, ...] = ()
    verify: bool = True


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('store = "s"\nlr = 0.5\nlayers = [1, 2]\nverify = false\n', encoding="utf-8")
    words = expand_config(["train", "--lr", "2", "--config", str(file), "--json"], {"train": Config})
    wanted = ["train", "--store=s", "--lr=0.5", "--layers", "1", "2", "--no-verify", "--lr", "2", "--json"]
    assert words == wanted
    assert expand_config(["train", "--lr", "2", f"--config={file}", "--json"], {"train": Config}) == wanted


def test_a_value_that_begins_with_a_dash_stays_a_value(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('store = "--page-size 1"\n', encoding="utf-8")
    assert expand_config(["train", "--config", str(file)], {"train": Config}) == ["train", "--store=--page-size 1"]


@dataclass(frozen=True)
class Placed:
    url: Annotated[str, "by its place"]
    every: float = 5.0


def test_what_has_no_flag_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('url = "http://x"\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"unknown keys \['url'\].*keys of \['every'\]"):
        expand_config(["watch", "--config", str(file)], {"watch": Placed})


@dataclass(frozen=True)
class Flags:
    topk: int | None = None
    page_size: int | None = None


@dataclass(frozen=True)
class Nested:
    draft: Path
    server: Flags = Flags()


@pytest.mark.parametrize("text", ["topk = 4\npage-size = 16\n", "[server]\ntopk = 4\npage-size = 16\n"])
def test_fields_of_a_nested_config_are_flags_too(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'draft = "d"\n{text}', encoding="utf-8")
    words = expand_config(["check", "--config", str(file)], {"check": Nested})
    assert words == ["check", "--draft=d", "--topk=4", "--page-size=16"]


@pytest.mark.parametrize(("text", "name"), [("[server]\ncolour = 1", r"server\.colour"), ("server = 3", "'server'"),
                                            ("[draft]\na = 1\n[other]\n", "'other'")])
def test_bad_tables(tmp_path: Path, text: str, name: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=name):
        expand_config(["check", "--config", str(file)], {"check": Nested})


def test_no_config_is_untouched() -> None:
    assert expand_config(["train", "--lr", "2"], {"train": Config}) == ["train", "--lr", "2"]
    assert expand_config([], {"train": Config}) == []


@pytest.mark.parametrize(("text", "message"), [("colour = 1\nsize = 2", r"\['colour', 'size'\]"), ("lr =", "not TOML")])
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        expand_config(["train", "--config", str(file)], {"train": Config})
    with pytest.raises(InvalidInput, match="no such file"):
        expand_config(["train", "--config", str(tmp_path / "b.toml")], {"train": Config})
    with pytest.raises(InvalidInput, match="no file name"):
        expand_config(["train", "--config"], {"train": Config})
    for first in (["--config", "a.toml"], ["--config=a.toml"]):
        with pytest.raises(InvalidInput, match=r"before the command.*after it, one of train\. Move it"):
            expand_config([*first, "train"], {"train": Config})


def test_an_error_of_many_lines_says_what_was_wanted_on_a_line_of_its_own() -> None:
    """Findings end in a line break, and others' messages in a full stop."""
    assert str(EyasError("here", "two\n  a\n  b\n", "c", "Do d.")) == "here: two\n  a\n  b\nWanted: c. Do d."
    assert str(EyasError("here", "No protocol.", "c", "Do d.")) == "here: No protocol. Wanted: c. Do d."


def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise InvalidInput("here", "a", "b", "Do c.")

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run_command(lambda: None) == 0
    assert run_command(fail) == 1
    assert capsys.readouterr().err == "error: here: a. Wanted: b. Do c.\n"
    assert run_command(interrupt) == 130
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_progress_line() -> None:
    stream = io.StringIO()
    progress = Progress(1000, "tokens", "train", already=500, every=0.0, stream=stream)
    progress.update(250, "loss 2.0")
    assert "750/1,000 tokens" in stream.getvalue()
    assert progress.line(10.0, "loss 2.0") == "train:   75 %  750/1,000 tokens  25.0/s  ETA 0:10  loss 2.0"
    assert duration(4000) == "1:06:40"
    assert duration(75) == "1:15"


def test_a_reader_that_goes_is_no_error() -> None:
    script = ("import sys\nfrom eyas_contract.commands import run_command\n"
              "sys.exit(run_command(lambda: print('x' * 10_000_000)))")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
