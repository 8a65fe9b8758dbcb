"""The two faults that eyas began with, on real SGLang on a CPU: each caught by preflight, by guard and by probe."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file, save_file

from eyas_contract import EngineFailure
from eyas_serve import ServeConfig, Server
from eyas_serve.preflight import PreflightConfig, preflight
from eyas_serve.probe.session import ProbeReport, probe_client

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def config(tiny_target: Path, trained_draft: Path, engine_python: Path) -> ServeConfig:
    """A server with the radix cache on, as users have it; it serves a useless draft all the same."""
    return ServeConfig(target=tiny_target, draft=trained_draft, device="cpu", dtype="float32", port=0,
                       engine_python=engine_python, max_total_tokens=4096, acceptance_floor=0.0)


def unknown_layer_name(folder: Path) -> None:
    """The export wrote the decoder layer under a name that SGLang does not know."""
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "decoder_layers.0."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def one_layer_of_three(folder: Path) -> None:
    """Two of the three ids lie outside the target: it hands over one state, and `fc` is skipped."""
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 30, 58]
    config["num_aux_hidden_states"] = 3
    (folder / "config.json").write_text(json.dumps(config))


STORY: dict[str, tuple[Callable[[Path], None], str, str, Literal["report", "off"], str, str]] = {
    # preflight's code, the guard's words, the guard's mode while the probe works alone, the probe's code and words
    "unknown layer name": (unknown_layer_name, "tensor-dropped", "drops decoder_layers.0", "report",
                           "probe-weights", "midlayer."),
    "one layer instead of three": (one_layer_of_three, "aux-layer-range", "hands over one state only", "off",
                                   "probe-states-width", "1 state of width 64: the output of layer 1"),
}


@pytest.fixture(params=STORY)
def story(request: pytest.FixtureRequest, config: ServeConfig, tmp_path: Path) -> tuple[str, ServeConfig]:
    """Name of a fault, and the config of a server with it that skips the preflight."""
    assert config.draft is not None
    folder = shutil.copytree(config.draft, tmp_path / "draft")
    STORY[request.param][0](folder)
    return request.param, dataclasses.replace(config, draft=folder, preflight=False, run_dir=tmp_path / "run")


def codes(report: ProbeReport) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity == "error"}


def test_caught_three_times(story: tuple[str, ServeConfig]) -> None:
    name, config = story
    _, code, words, mode, probed, named = STORY[name]
    assert config.draft is not None
    found = preflight(PreflightConfig(config.draft, config.target, engine_version="0.5.20"))
    assert code in {finding.code for finding in found.findings if finding.severity == "error"}

    with pytest.raises(EngineFailure, match=words):
        Server(config).start()

    lines: list[str] = []
    with Server(dataclasses.replace(config, guard=mode), lines.append) as server:
        report = probe_client(server.client, None)
    said = any(words in line for line in lines)
    assert said == (mode == "report"), "a guard that only reports says the same, one that is off says nothing"
    assert probed in codes(report), report.text(False)
    assert any(named in f"{finding.where} {finding.found}" for finding in report.findings), report.text(False)
