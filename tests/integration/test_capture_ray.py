"""Engines by Ray: a worker killed in the middle. Needs the extra `ray`; the command runs in a process of its own."""

from __future__ import annotations

import importlib.util
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import capture_settings, title

import tiny
from eyas_contract import Manifest
from eyas_extract.check import check

pytestmark = [pytest.mark.integration,
              pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra eyas-extract[ray]")]


def test_killed_ray_worker_is_started_again(tiny_target: Path, tmp_path: Path, engine_python: Path) -> None:
    """SIGKILL to Ray's worker: its engine dies with it, Ray starts both again, and no sample is lost."""
    rows = []
    for number in range(60):
        user, answer = tiny.conversation(random.Random(number))
        rows.append({"id": f"r{number}", "messages": [{"role": "user", "content": user},
                                                      {"role": "assistant", "content": answer}]})
    out = tmp_path / "store"
    command = subprocess.Popen(
        [str(Path(sys.executable).parent / "eyas-extract"), "run", "--engine", "sglang", "--ray", "local", "--target",
         str(tiny_target), "--data", str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)), "--out", str(out),
         "--device", "cpu", "--shard-tokens", "60", "--ahead", "1", "--engine-python", str(engine_python),
         "--engine-args=--chunked-prefill-size 16"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (out / "shard-000001.safetensors").is_file():
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.01)
    [worker] = [p for p in psutil.Process(command.pid).children(recursive=True) if "ray::EngineWorker" in title(p)]
    worker.send_signal(signal.SIGKILL)
    held = len(Manifest.load(out).shards)
    text = command.communicate(timeout=400)[0]
    assert command.returncode == 0, text
    manifest = Manifest.load(out)
    assert held < len(manifest.shards)
    assert [s.id for shard in manifest.shards for s in shard.samples] == [row["id"] for row in rows]
    assert not check(out).damage
    assert "1 servers lost on the way" in text
    assert not [p for p in psutil.process_iter() if str(tmp_path) in capture_settings(p)]
