"""The attention backend's way into SGLang, as far as a machine without a GPU shows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from eyas_serve.engine.main import ATTENTION_FLAGS, says


def test_it_fits_the_installed_sglang_and_a_draft_attends_as_triton_would(engine_python: Path) -> None:
    probe = Path(__file__).with_name("attention_probe.py")
    run = subprocess.run([str(engine_python), "-W", "ignore", str(probe)], capture_output=True, text=True, timeout=180,
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert run.stdout.strip().endswith("equal"), run.stderr[-3000:]


@pytest.mark.parametrize(("argv", "wanted"), [
    (["--attention-backend", "eyas"], True), (["--attention-backend=eyas"], True),
    (["--attention-backend", "triton", "eyas"], False), (["--speculative-draft-attention-backend", "eyas"], True),
    (["--prefill-attention-backend", "flashinfer", "--decode-attention-backend", "eyas"], True)])
def test_the_flags_are_seen(argv: list[str], wanted: bool) -> None:
    assert any(says(argv, flag, "eyas") for flag in ATTENTION_FLAGS) is wanted
