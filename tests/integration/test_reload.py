"""One real server: the probe passes on a right draft, weights are exchanged at run time, wrong ones change nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_serve import ServeConfig, Server
from eyas_serve.probe.session import ProbeReport, probe_client

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tiny_target: Path, trained_draft: Path, engine_python: Path) -> Iterator[Server]:
    config = ServeConfig(target=tiny_target, draft=trained_draft, device="cpu", dtype="float32", port=0,
                         engine_python=engine_python, max_total_tokens=4096, steps=3, topk=2, num_draft_tokens=6)
    with Server(config) as running:
        yield running


def copy(draft: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A draft with other weights."""
    shutil.copytree(draft, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file({name: value.contiguous() for name, value in weights.items()}, out / "model.safetensors",
              metadata={"format": "pt"})
    return out


def reload(server: Server, folder: Path) -> tuple[bool, str]:
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=120).json()
    return bool(answer["success"]), str(answer["message"])


def codes(report: ProbeReport) -> list[str]:
    return [finding.code for finding in report.findings]


def test_the_probe_passes_from_the_command_line_twice(server: Server) -> None:
    """Twice, and after an ordinary request of the same tokens: the radix cache must not hide rows."""
    golden = json.loads((server.config.draft / "golden.json").read_text())  # type: ignore[operator]
    server.client.generate(golden["input_ids"], 4)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-m", "eyas_serve.cli", "probe", server.url, "--json"],
                              capture_output=True, text=True, check=False)
        report = json.loads(done.stdout)
        assert done.returncode == 0, done.stderr
        assert (report["verdict"], report["findings"]) == ("pass", [])
        assert {stage["verdict"] for stage in report["stages"]} == {"ok"}
        assert report["proposals"]["same"] == report["proposals"]["of"] >= 8


def test_a_wrong_draft_is_refused_and_changes_nothing(server: Server, trained_draft: Path, tmp_path: Path) -> None:
    def unknown(weights: dict[str, torch.Tensor]) -> None:
        weights["mystery.weight"] = weights.pop("fc.weight")

    wrong = copy(trained_draft, tmp_path / "wrong", unknown)
    success, message = reload(server, wrong)
    assert not success
    assert "tensor-missing" in message
    assert "nothing was changed" in message

    other = copy(trained_draft, tmp_path / "other", lambda weights: None)
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    success, message = reload(server, other)
    assert not success
    assert "rms_norm_eps 0.5, running 1e-05" in message
    assert codes(probe_client(server.client, trained_draft)) == []


def test_a_draft_is_exchanged_with_its_vocabulary(server: Server, trained_draft: Path, tiny_target: Path,
                                                  tmp_path: Path) -> None:
    def other_draft(weights: dict[str, torch.Tensor]) -> None:
        weights["fc.weight"] = weights["fc.weight"].flip(0)
        weights["d2t"][-1] = weights["d2t"][-1] + 1
        weights["t2d"].zero_()[weights["d2t"] + torch.arange(len(weights["d2t"]))] = True

    new = copy(trained_draft, tmp_path / "new", other_draft)
    (new / "contract.json").unlink()  # its vocabulary section is the other draft's
    make_golden(GoldenConfig(new, tiny_target))
    before = codes(probe_client(server.client, new))
    success, message = reload(server, new)
    assert success, message
    assert codes(probe_client(server.client, new)) == []
    assert {"probe-fc", "probe-vocabulary"} & set(before) or "probe-weights" in before
    after = codes(probe_client(server.client, trained_draft))
    assert "probe-vocabulary" in after
    assert reload(server, trained_draft)[0]
    assert codes(probe_client(server.client, trained_draft)) == []


def test_the_targets_weights_leave_the_draft_alone(server: Server, trained_draft: Path, tiny_target: Path) -> None:
    """SGLang would load the target's layer 0, norm and head over the draft's."""
    success, message = reload(server, tiny_target)
    assert success, message
    assert codes(probe_client(server.client, trained_draft)) == []
