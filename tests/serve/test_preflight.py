"""The command: verdict, exit codes, JSON, flags, launch files."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import drafts
import pytest

from eyas_contract.engines.codes import CODES
from eyas_serve.cli import main


@dataclass
class Done:
    """How a run of the command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """The command within this process, which spares its start-up."""
    out, err, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", ["eyas-serve", *map(str, words)]):
        try:
            main()
        except SystemExit as end:
            return Done(int(end.code or 0), out.getvalue(), err.getvalue())
        finally:
            signal.signal(signal.SIGTERM, before)
    raise AssertionError("the command must end with an exit code")


def test_as_a_process_of_its_own(pair: tuple[Path, Path]) -> None:
    done = subprocess.run([sys.executable, "-c", "from eyas_serve.cli import main; main()", "preflight", str(pair[0]),
                           "--target", str(pair[1]), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert as_json(Done(0, done.stdout, done.stderr))["verdict"] == "pass"


def test_launch_refuses_json_and_names_its_own_flag(pair: tuple[Path, Path]) -> None:
    for words in (("launch", "--json"), ("--json", "launch")):
        done = run(*words, "--target", pair[1], "--draft", pair[0])
        assert (done.returncode, "--json-events" in done.stderr) == (2, True)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return drafts.draft().write(tmp_path / "draft"), drafts.target().write(tmp_path / "target")


def as_json(done: Done) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(done.stdout)
    assert set(plain) == {"verdict", "engine", "findings"}
    for finding in plain["findings"]:
        assert set(finding) == {"code", "severity", "where", "found", "wanted", "consequence", "remedy"}
        assert finding["code"] in CODES
    return plain


def test_pass_in_json(pair: tuple[Path, Path]) -> None:
    done = run("preflight", pair[0], "--target", pair[1], "--engine-version", "0.5.20", "--json")
    assert done.returncode == 0, done.stderr
    assert as_json(done)["verdict"] == "pass"
    assert as_json(done)["engine"] == "sglang 0.5.20"


def test_fail_with_the_worst_first(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = drafts.draft(rope_theta=10000.0)
    del folder.tensors["lm_head.weight"]
    done = run("preflight", folder.write(tmp_path / "bad"), "--target", pair[1], "--engine-version", "0.5.20")
    assert done.returncode == 1
    assert done.stdout.startswith("fail for sglang 0.5.20: 1 error, 1 warning,")
    order = [done.stdout.index(word) for word in ("ERROR head-missing", "WARNING rope-differs", "NOTE ")]
    assert order == sorted(order)
    assert "found:" in done.stdout
    assert "do:" in done.stdout


def test_flags_and_launch_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    launch = tmp_path / "launch.txt"
    launch.write_text("python3 -m sglang.launch_server --context-length 9000 --speculative-algorithm EAGLE3 "
                      "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n")
    arguments = ["preflight", pair[0], "--target", pair[1], "--engine-version", "0.5.20", "--json"]
    found = as_json(run(*arguments, "--launch", launch))
    assert [f["code"] for f in found["findings"] if f["severity"] == "error"] == ["positions-short"]
    over = as_json(run(*arguments, "--launch", launch, "--context-length", "4096"))
    assert over["verdict"] == "pass"
    flagged = as_json(run(*arguments, "--speculative-algorithm", "EAGLE", "--gpu", "RTX PRO 6000", "--tp", "2",
                          "--attention-backend", "fa3"))
    assert {f["code"] for f in flagged["findings"] if f["severity"] == "error"} == {"algorithm", "backend-gpu"}


def test_a_launch_file_of_another_encoding(pair: tuple[Path, Path], tmp_path: Path) -> None:
    launch = tmp_path / "launch.txt"
    launch.write_bytes("python3 -m sglang.launch_server --context-length 9000 # für alle\n".encode("latin-1"))
    found = as_json(run("preflight", pair[0], "--target", pair[1], "--engine-version", "0.5.20", "--json", "--launch",
                        launch))
    assert "positions-short" in {finding["code"] for finding in found["findings"]}


def test_vllm_and_an_unknown_version(pair: tuple[Path, Path]) -> None:
    found = as_json(run("preflight", pair[0], "--target", pair[1], "--engine", "vllm", "--engine-version", "9.9.9",
                        "--json"))
    assert found["verdict"] == "warn"
    assert {"engine-version-unknown", "aux-layer-convention"} <= {f["code"] for f in found["findings"]}


@pytest.mark.parametrize("words", [["/nowhere"], ["--engine-version", "newest"], ["--launch", "/nowhere"],
                                   ["--training-record", "/nowhere"]])
def test_exit_code_2_where_nothing_can_be_checked(words: list[str], pair: tuple[Path, Path]) -> None:
    draft = [] if words == ["/nowhere"] else [pair[0]]
    done = run("preflight", *draft, *words, "--target", pair[1])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_broken_file_is_exit_code_2(pair: tuple[Path, Path]) -> None:
    (pair[0] / "model.safetensors").write_bytes(b"\xff" * 100)
    done = run("preflight", pair[0], "--target", pair[1])
    assert done.returncode == 2
    assert "a whole safetensors file" in done.stderr


def test_wrong_usage_is_exit_code_2(pair: tuple[Path, Path]) -> None:
    assert run("preflight", pair[0]).returncode == 2
    assert run("preflight", pair[0], "--target", pair[1], "--engine", "tgi").returncode == 2


def test_a_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("Decode batch, accept len: 1.00, accept rate: 0.00\n" * 3)
    done = run("read-log", log, "--json")
    assert done.returncode == 1
    assert [f["code"] for f in as_json(done)["findings"]] == ["log-acceptance-one"]
    log.write_text("Decode batch, accept len: 2.75, accept rate: 0.58\n")
    assert run("read-log", log).returncode == 0
    assert run("read-log", tmp_path / "absent").returncode == 2
