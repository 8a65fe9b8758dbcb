"""Real kills and a really full disk: what was committed stays, and the end is the same bytes as undisturbed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from eyas_contract import Manifest
from eyas_extract.check import check

RunJobs = Callable[[list[dict[str, Any]]], list[int]]
KILLER = Path(__file__).parent / "killer.py"


@pytest.fixture(scope="module")
def run_jobs() -> Iterator[RunJobs]:
    """Runs jobs in order, one process for all since its imports are what takes time; returns their exit statuses."""
    with subprocess.Popen([sys.executable, str(KILLER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdin
        assert process.stdout

        def inner(jobs: list[dict[str, Any]]) -> list[int]:
            codes = []
            for job in jobs:
                process.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                codes.append(int(process.stdout.readline()))  # type: ignore[union-attr]
            return codes

        yield inner


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "config.resolved.json"}


@pytest.fixture(scope="module")
def data(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers with broken lines between them."""
    lines = answers.read_bytes().splitlines()
    for at in (30, 21, 20, 7, 0):
        lines.insert(at, b'{"broken": ')
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_bytes(b"\n".join([*lines, b"{}"]) + b"\n")
    return path


def moments(calls: Path, seed: int, earliest: float) -> list[int]:
    """Five random moments of a run that makes as many calls as the file says; loading the target is a large share."""
    draw = random.Random(seed)
    return [int(draw.uniform(earliest, 0.99) * int(calls.read_text())) for _ in range(5)]


def run_argv(target: Path, data: Path, out: Path) -> list[str]:
    return ["run", "--target", str(target), "--data", str(data), "--out", str(out), "--shard-tokens", "250",
            "--batch-tokens", "128"]


def test_run_killed_at_every_step_and_at_random_moments(run_jobs: RunJobs, tiny_target: Path, data: Path,
                                                          tmp_path: Path) -> None:
    undisturbed, stepwise, randomly = (tmp_path / name for name in ("undisturbed", "stepwise", "randomly"))
    calls = tmp_path / "calls"
    assert run_jobs([{"argv": run_argv(tiny_target, data, undisturbed), "calls": str(calls)}]) == [0]
    jobs: list[dict[str, Any]] = [{"argv": run_argv(tiny_target, data, stepwise), "at": n}
                                  for n in (2, 4, 6, 7, 3, 4, 5, 6, 7, 8, 9, 10)]
    jobs += [{"argv": run_argv(tiny_target, data, stepwise)}]
    jobs += [{"argv": run_argv(tiny_target, data, randomly), "call": moment}
             for moment in moments(calls, 5, 0.85)]
    jobs += [{"argv": run_argv(tiny_target, data, randomly)}] * 2
    codes = run_jobs(jobs)
    assert codes[:13] == [-9] * 12 + [0]
    assert codes[13] == -9  # later ones may find the work done before their moment comes
    assert codes[18:] == [0, 0]
    wanted = contents(undisturbed)
    assert sum(name.startswith("shard") for name in wanted) > 3
    assert len(wanted["rejects.jsonl"].splitlines()) == 6
    for folder in (stepwise, randomly):
        found = contents(folder)
        found.pop("summary.json"), wanted.pop("summary.json", None)
        assert found == wanted
        assert not check(folder).damage


def test_regenerate_killed_at_every_step_and_at_random_moments(run_jobs: RunJobs, tiny_target: Path,
                                                                 tmp_path: Path) -> None:
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", [*tiny.conversations(30, seed=2), {"id": "bad"}])

    def argv(name: str) -> list[str]:
        return ["regenerate", "--target", str(tiny_target), "--prompts", str(prompts), "--out", str(tmp_path / name),
                "--max-new-tokens", "20", "--batch-size", "4", "--temperature", "0.7"]

    calls = tmp_path / "calls"
    assert run_jobs([{"argv": argv("undisturbed"), "calls": str(calls)}]) == [0]
    jobs: list[dict[str, Any]] = [{"argv": argv("stepwise"), "at": n} for n in (1, 2, 1, 2, 3, 4)]
    jobs += [{"argv": argv("stepwise")}] * 2
    jobs += [{"argv": argv("randomly"), "call": moment} for moment in moments(calls, 6, 0.5)]
    jobs += [{"argv": argv("randomly")}]
    codes = run_jobs(jobs)
    assert codes[:8] == [-9] * 6 + [0, 0]
    assert codes[8] == -9
    assert codes[13] == 0
    wanted = (tmp_path / "undisturbed").read_bytes()
    assert [json.loads(line)["id"] for line in wanted.splitlines()] == [f"tiny-2-{i}" for i in range(30)]
    for name in ("stepwise", "randomly"):
        assert (tmp_path / name).read_bytes() == wanted
        assert json.loads((tmp_path / f"{name}.rejects.jsonl").read_text())["line"] == 31
        assert not (tmp_path / f"{name}.partial").exists()


def test_full_disk(run_jobs: RunJobs, tiny_target: Path, data: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: the write fails half-way, as on a full one, whoever runs the test."""
    undisturbed, out, log = tmp_path / "undisturbed", tmp_path / "out", tmp_path / "log"
    argv = run_argv(tiny_target, data, out)
    codes = run_jobs([{"argv": run_argv(tiny_target, data, undisturbed)}, {"argv": argv, "at": 30},
                      {"argv": argv, "file_limit": 100_000, "log": str(log)}])
    assert codes == [0, -9, 1]
    assert "no room to write" in log.read_text()
    assert "What was committed is whole" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not list(out.glob(".shard*"))
    halfway = Manifest.load(out)
    assert 0 < halfway.num_samples < Manifest.load(undisturbed).num_samples
    assert not check(out).damage
    assert run_jobs([{"argv": argv}]) == [0]
    assert {k: v for k, v in contents(out).items() if k != "summary.json"} == {
        k: v for k, v in contents(undisturbed).items() if k != "summary.json"}
