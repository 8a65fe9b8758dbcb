"""Every fault that the probe names, each on a record computed with that one part spoilt. No server, seconds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import handmade
import pytest
import torch
from probing import PREFIX, Bench, Served, theta
from torch import Tensor

from eyas_contract import EngineFailure
from eyas_contract.engines import Finding
from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_serve.probe.compare import compare
from eyas_serve.probe.faults import find_faults, same_proposals
from eyas_serve.probe.record import read_record
from eyas_serve.probe.session import ProbeReport

Spoil = Callable[[Served], None]


@pytest.fixture(scope="module")
def draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose every part matters: noise on all weights, EAGLE-3.1's fc_norm on."""
    folder = tmp_path_factory.mktemp("draft")
    ids = tuple(range(3, 330, 3))
    contract = handmade.make_contract(tiny_target, ids)
    assert contract.draft is not None
    contract = dataclasses.replace(contract, draft=dataclasses.replace(contract.draft, fc_norm=True))
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    plain = handmade.make_contract(tiny_target, ids)
    for name, value in handmade.make_weights(tiny_target, plain).items():
        noisy = value.is_floating_point()
        weights[name] = value + 0.1 * value.std().clamp(min=0.5) * torch.randn_like(value) if noisy else value
    weights |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.rand(64) for i in range(3)}
    handmade.write_draft(folder, contract, weights)
    make_golden(GoldenConfig(folder, tiny_target))
    return folder


@pytest.fixture(scope="module")
def bench(draft: Path, tiny_target: Path) -> Bench:
    return Bench(draft, tiny_target)


def findings(bench: Bench, served: Served, path: Path, dtype: torch.dtype = torch.float32) -> list[Finding]:
    record, next_token = bench.record(served, path / "record.safetensors", dtype)
    stages = compare(record, bench.golden)
    result = find_faults(record, bench.golden, stages, next_token)
    text = ProbeReport("test", result, tuple(stages)).text(False)
    assert all(stage.name in text for stage in stages)
    return result


def scaled(name: str, by: float = 1.5) -> Spoil:
    """A weight whose halves differ from training."""
    def spoil(served: Served) -> None:
        served.weights[name][::2] *= by
    return spoil


def random(name: str) -> Spoil:
    def spoil(served: Served) -> None:
        served.weights[name] = torch.randn_like(served.weights[name])
    return spoil


def filled(name: str, value: float) -> Spoil:
    def spoil(served: Served) -> None:
        served.weights[name] = torch.full_like(served.weights[name], value)
    return spoil


def put(**changes: object) -> Spoil:
    def spoil(served: Served) -> None:
        for name, value in changes.items():
            setattr(served, name, value)
    return spoil


def norms(*names: str) -> Spoil:
    def spoil(served: Served) -> None:
        served.changes["norms"] = names
    return spoil


def embedding(served: Served) -> None:
    served.embedding = served.embedding.roll(1, dims=0)


def head(served: Served) -> None:
    served.head = torch.randn_like(served.head)


def one_row(served: Served) -> None:
    served.map[7] += 1


def no_map(served: Served) -> None:
    served.map = torch.arange(len(served.map))


def absolute(served: Served) -> None:
    served.map = served.map + torch.arange(len(served.map))


def other_target(served: Served) -> None:
    served.states, served.next_token = torch.randn(64, 192), 1


def swapped(served: Served) -> None:
    served.layers = (served.layers[1], served.layers[0], served.layers[2])


FAULTS: dict[str, tuple[Spoil, str, str]] = {
    "boundary ids read as outputs": (put(layers=(2, 4, 7)), "probe-states-layer",
                                     "chunk 0 is the output of layer 2.*layer 1"),
    "last chunk one too low": (put(layers=(1, 3, 5)), "probe-states-layer", "chunk 2 is the output of layer 5"),
    "chunks swapped": (swapped, "probe-states-layer", "chunk 0 is the output of layer 3"),
    "one layer instead of three": (put(only=True), "probe-states-width",
                                   "1 state of width 64: the output of layer 7.*3 states of width 64"),
    "another target": (other_target, "probe-target", "none of the 3 states.*next token differs"),
    "not shifted": (put(shift=False), "probe-input", "not shifted"),
    "embedding": (embedding, "probe-embedding", "embed_tokens"),
    "fc random": (random("fc.weight"), "probe-weights", "output of fc.*random or never set"),
    "fc unset": (filled("fc.weight", 0.0), "probe-weights", "output of fc.*zeros"),
    "fc off": (scaled("fc.weight"), "probe-fc", "output of fc"),
    "fc_norm ignored": (norms(), "probe-norm", "fc_norm.0.*does not apply"),
    "fc_norm weight": (scaled("fc_norm.1.weight"), "probe-norm", "fc_norm.1"),
    "norm_output": (norms("fc_norm", "norm_output"), "probe-norm", "handed to the next step.*norm_output"),
    "input_layernorm": (scaled(PREFIX + "input_layernorm.weight"), "probe-norm", "input_layernorm"),
    "hidden_norm": (scaled(PREFIX + "hidden_norm.weight"), "probe-norm", "hidden_norm"),
    "hidden_norm unset": (filled(PREFIX + "hidden_norm.weight", float("nan")), "probe-weights", "hidden_norm.*NaN"),
    "post_attention_layernorm": (scaled(PREFIX + "post_attention_layernorm.weight"), "probe-norm",
                                 "post_attention_layernorm"),
    "norm_before_residual": (norms("fc_norm", "norm_before_residual"), "probe-norm", "norm_before_residual"),
    "final norm": (scaled("norm.weight"), "probe-norm", "the final norm"),
    "theta": (theta(5e5), "probe-rope", "theta is about 500000.*theta 10000"),
    "q_proj": (random(PREFIX + "self_attn.q_proj.weight"), "probe-attention", "right at position 0.*q_proj"),
    "o_proj": (random(PREFIX + "self_attn.o_proj.weight"), "probe-weights", "self_attn.*random"),
    "v_proj": (scaled(PREFIX + "self_attn.v_proj.weight", 0.5), "probe-attention", "self_attn"),
    "mlp": (scaled(PREFIX + "mlp.down_proj.weight", 3.0), "probe-layer", "mlp"),
    "head random": (head, "probe-head", "lm_head"),
    "one row of d2t": (one_row, "probe-vocabulary", "1 of 109 entries.*draft id 7 to 25.*draft id 7 is target id 24"),
    "d2t missing": (no_map, "probe-vocabulary", "d2t is missing"),
    "d2t absolute": (absolute, "probe-vocabulary", "taken for offsets"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(bench: Bench, tmp_path: Path, name: str) -> None:
    spoil, code, words = FAULTS[name]
    served = bench.served()
    torch.manual_seed(1)
    spoil(served)
    found = findings(bench, served, tmp_path)
    assert {finding.code for finding in found} == {code}, found
    texts = [" ".join((f.where, f.found, f.wanted, f.remedy)) for f in found]
    assert any(re.search(words, text) for text in texts), texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_server_passes(bench: Bench, tmp_path: Path, dtype: torch.dtype) -> None:
    assert findings(bench, bench.served(), tmp_path, dtype) == []
    record, _ = bench.record(bench.served(), tmp_path / "record.safetensors", dtype)
    assert same_proposals(record, bench.golden) == (16, 16)
    served = bench.served()
    no_map(served)
    record, _ = bench.record(served, tmp_path / "record.safetensors", dtype)
    assert same_proposals(record, bench.golden)[0] < 2


def test_layers_are_told_apart_in_half_precision(bench: Bench, tmp_path: Path) -> None:
    served = bench.served()
    served.layers = (1, 4, 6)
    found = findings(bench, served, tmp_path, torch.bfloat16)
    assert [finding.code for finding in found] == ["probe-states-layer"]
    assert "chunk 1 is the output of layer 4" in found[0].found


def test_two_independent_faults_are_both_named(bench: Bench, tmp_path: Path) -> None:
    served = bench.served()
    served.layers = (1, 3, 7)
    theta(5e5)(served)
    one_row(served)
    embedding(served)
    codes = {finding.code for finding in findings(bench, served, tmp_path)}
    assert codes == {"probe-states-layer", "probe-rope", "probe-vocabulary", "probe-embedding"}


def test_a_near_tie_of_the_target_is_a_warning(bench: Bench, tmp_path: Path) -> None:
    served = bench.served()
    served.next_token = (bench.golden.golden.next_id + 1) % 300
    assert [(f.code, f.severity) for f in findings(bench, served, tmp_path)] == [("probe-target", "warning")]


def test_rows_hidden_by_a_cache_are_refused(bench: Bench, tmp_path: Path) -> None:
    served = bench.served()
    served.after = lambda tensors: tensors.update({n: v[60:] for n, v in tensors.items() if v.shape[0] == 64})
    with pytest.raises(EngineFailure, match="4 rows from 60 to 63"):
        bench.record(served, tmp_path / "record.safetensors")


def test_a_hostile_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.safetensors"
    for content in (b"", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}"):
        path.write_bytes(content)
        with pytest.raises((EngineFailure, ValueError)):
            read_record(path, 64)


def test_a_layer_that_was_never_loaded(bench: Bench, tmp_path: Path) -> None:
    """As SGLang leaves it: norms are ones, which is nearly right; the matrices hold zeros of fresh memory."""
    served = bench.served()
    for name, value in served.weights.items():
        if name.startswith(PREFIX):
            served.weights[name] = torch.ones_like(value) if value.dim() == 1 else torch.zeros_like(value)
    found = findings(bench, served, tmp_path)
    assert {finding.code for finding in found} == {"probe-weights"}
    assert [words in " ".join(f"{f.where} {f.found}" for f in found) for words in
            ("input_layernorm", "hidden_norm", "weights are ones", "self_attn", "zeros")] == [True] * 5
