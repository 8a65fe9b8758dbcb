"""The guard's checks on small stand-ins for SGLang's draft classes."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eyas_contract import EngineFailure
from eyas_serve import plugin
from eyas_serve.guard import layout
from eyas_serve.guard.captured import check_hand_over
from eyas_serve.guard.forward import check_width
from eyas_serve.guard.shared import check_shared
from eyas_serve.guard.state import GUARD
from eyas_serve.guard.vocabulary import vocabulary_faults
from eyas_serve.guard.weights import audit_weights
from eyas_serve.handshake import STATUS_DIR, read_all

TARGET_IDS = torch.tensor([0, 1, 2, 5, 6, 9, 13, 14])
OFFSETS = TARGET_IDS - torch.arange(8)


@pytest.fixture(autouse=True)
def sglang_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang's default loader, and a folder for the handshake."""
    module = types.ModuleType("sglang.srt.model_loader.weight_utils")
    module.default_weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(STATUS_DIR, str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.20")
    GUARD.status.error, GUARD.status.checks = "", []


class Config(types.SimpleNamespace):
    """Stands in for a config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class LlamaForCausalLMEagle3(nn.Module):
    """Loads as SGLang's class of this name does: unknown names are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 4)
        self.model.fc = nn.Linear(12, 4, bias=False)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.config = Config(draft_vocab_size=8, vocab_size=16, hidden_size=4, intermediate_size=6,
                             num_attention_heads=2, model_type="llama")
        self.hot_token_id: torch.Tensor | None = None
        self.load_lm_head_from_target = False

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if "d2t" in name:
                self.hot_token_id = tensor + torch.arange(tensor.shape[0])
            key = name if name in parameters else f"model.{name}"
            if key in parameters:
                loader = getattr(parameters[key], "weight_loader", None)
                loader = loader or sys.modules["sglang.srt.model_loader.weight_utils"].default_weight_loader
                loader(parameters[key], tensor)


def checkpoint(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = {"fc.weight": torch.ones(4, 12), "lm_head.weight": torch.ones(8, 4), "d2t": OFFSETS,
               "t2d": torch.isin(torch.arange(16), TARGET_IDS), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def load(model: LlamaForCausalLMEagle3, tensors: dict[str, torch.Tensor]) -> str:
    """What the guard says; nothing where it is content."""
    try:
        audit_weights(LlamaForCausalLMEagle3.load_weights, model, iter(tensors.items()))
    except EngineFailure as error:
        return str(error)
    return ""


def test_a_whole_checkpoint_passes_and_is_loaded(tmp_path: Path) -> None:
    model = LlamaForCausalLMEagle3()
    assert load(model, checkpoint()) == ""
    assert torch.equal(model.model.fc.weight, torch.ones(4, 12))
    assert not hasattr(model.model.fc.weight, "weight_loader")
    assert "weights" in next(iter(read_all(tmp_path).values())).checks
    assert load(model, {"fc.weight": torch.zeros(4, 12)}) == "", "a later, partial update"
    assert "mystery" in load(model, {"mystery": torch.zeros(1)})


def test_every_fault_is_named_at_once_and_told_to_the_launcher(tmp_path: Path) -> None:
    tensors = checkpoint(**{"lm_head.weight": None, "d2t": None, "decoder.q": torch.ones(2)})
    text = load(LlamaForCausalLMEagle3(), tensors)
    assert "drops decoder.q" in text
    assert "sets lm_head.weight" in text
    assert "d2t is missing" in text
    assert next(iter(read_all(tmp_path).values())).error == text


def cut(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """As SGLang's layers load: the rows there is room for."""
    parameter.data.copy_(tensor[:len(parameter)])


def test_a_tensor_that_sglang_would_cut_is_named() -> None:
    model = LlamaForCausalLMEagle3()
    model.model.fc.weight.weight_loader = cut  # type: ignore[assignment]
    text = load(model, checkpoint(**{"fc.weight": torch.ones(8, 12)}))
    assert "cuts or pads without a word: fc.weight [8, 12], not [4, 12]" in text
    model.quant_config = object()  # type: ignore[assignment]
    assert load(model, checkpoint(**{"fc.weight": torch.ones(8, 12)})) == "", "packed numbers have their own shapes"


def test_what_sglang_pads_itself_is_compared_as_it_was_written() -> None:
    model = LlamaForCausalLMEagle3()
    model.config.num_attention_heads, model.config.original_num_attention_heads = 4, 2
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].self_attn = nn.Module()
    model.model.layers[0].self_attn.o_proj = nn.Linear(8, 4, bias=False)
    name = "layers.0.self_attn.o_proj.weight"
    model.model.layers[0].self_attn.o_proj.weight.weight_loader = lambda p, t: p.data.fill_(1)
    model.config.head_dim = 2
    assert load(model, checkpoint() | {name: torch.ones(4, 4)}) == ""
    assert "o_proj.weight [4, 8], not [4, 4]" in load(model, {name: torch.ones(4, 8)})


def test_a_head_shared_by_the_target_may_be_absent() -> None:
    model = LlamaForCausalLMEagle3()
    model.load_lm_head_from_target = True
    assert load(model, checkpoint(**{"lm_head.weight": None, "d2t": None})) == ""


def test_lone_half_of_a_fused_pair_is_dropped_and_a_pair_is_not() -> None:
    class Mla(LlamaForCausalLMEagle3):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            halves: list[torch.Tensor] = []

            def rest() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    if name.startswith("midlayer"):
                        halves.append(tensor)
                        if len(halves) == 2:
                            self.model.fc.weight.weight_loader(self.model.fc.weight, torch.cat(halves))  # type: ignore[operator]
                        continue
                    yield name, tensor

            LlamaForCausalLMEagle3.load_weights(self, rest())

    def audited(tensors: dict[str, torch.Tensor]) -> None:
        audit_weights(Mla.load_weights, Mla(), iter(tensors.items()))

    pair = {"midlayer.q_a_proj.weight": torch.ones(2, 12), "midlayer.kv_a_proj_with_mqa.weight": torch.ones(2, 12)}
    audited(checkpoint(**{"fc.weight": None}) | pair)
    with pytest.raises(EngineFailure, match=r"drops midlayer\.q_a_proj\.weight"):
        audited(checkpoint() | dict(list(pair.items())[:1]))


@pytest.mark.parametrize(("ids", "words"), [
    (TARGET_IDS, ""),
    (None, "d2t is missing"),
    (TARGET_IDS[:4], "4 entries, not 8"),
    (TARGET_IDS + torch.arange(8), "absolute target ids"),
    (torch.tensor([0, 1, 2, 5, 6, 9, 13, 13]), "1 repeated"),
    (torch.tensor([0, 1, 2, 5, 6, 9, 13, -2]), "1 target ids outside"),
])
def test_vocabulary_map(ids: torch.Tensor | None, words: str) -> None:
    faults = "; ".join(vocabulary_faults(ids, 8, 16))
    assert words in faults
    assert bool(faults) == bool(words)


def test_absolute_ids_that_stay_in_range_are_found_too() -> None:
    ids = torch.arange(0, 1000, 2)[:200]
    assert "absolute" in vocabulary_faults(ids + torch.arange(200), 200, 1000)[0]
    few = torch.arange(0, 60, 2)[:4]
    marked = torch.isin(torch.arange(1000), few)
    assert "absolute" in vocabulary_faults(few + torch.arange(4), 4, 1000, marked)[0]
    assert "other tokens than t2d" in vocabulary_faults(few + 1, 4, 1000, marked)[0]
    assert vocabulary_faults(few, 4, 1000, marked) == []


def test_evenly_spaced_tokens_are_offsets_where_t2d_agrees() -> None:
    """Offsets 0, 5, 10, ... look like ids; the mask says that they are none."""
    ids = torch.arange(0, 1200, 6)
    assert "absolute" in vocabulary_faults(ids, 200, 1200)[0]
    assert vocabulary_faults(ids, 200, 1200, torch.isin(torch.arange(1200), ids)) == []


def test_a_full_vocabulary_needs_no_map() -> None:
    assert vocabulary_faults(None, 16, 16) == []
    assert vocabulary_faults(None, None, 16) == []


def forward(width: int, extend: bool = True, rows: int = 3) -> None:
    mode = types.SimpleNamespace(is_extend=lambda include_draft_extend_v2: extend, name="EXTEND")
    spec = types.SimpleNamespace(hidden_states=torch.zeros(rows, width))
    model = types.SimpleNamespace(fc=nn.Linear(12, 4), num_aux_hidden_states=3)
    check_width(model, None, None, types.SimpleNamespace(spec_info=spec, forward_mode=mode))


@pytest.mark.parametrize(("width", "cause"), [(4, "one state only"), (8, "captured 2 of 3 layers"),
                                              (10, "another hidden size")])
def test_width_names_its_cause(width: int, cause: str) -> None:
    with pytest.raises(EngineFailure, match=cause):
        forward(width)


def test_width_of_decode_steps_and_idle_batches_is_free() -> None:
    forward(12)
    forward(4, extend=False)
    forward(4, rows=0)


def test_shared_parts_must_be_finite() -> None:
    model = LlamaForCausalLMEagle3()
    model.hot_token_id = TARGET_IDS
    worker = types.SimpleNamespace(draft_runner=types.SimpleNamespace(model=model), hot_token_id=TARGET_IDS)
    check_shared(None, worker)
    model.model.embed_tokens.weight.data[3] = torch.nan
    worker.hot_token_id = None
    with pytest.raises(EngineFailure, match=r"embed_tokens holds NaN.*d2t is missing"):
        check_shared(None, worker)


def hand_over(width: int, rows: int = 5, hook: bool = True) -> None:
    """A first prompt of 5 tokens, whose target hands over states of a width."""
    GUARD.status.checks = []
    target = types.SimpleNamespace(set_eagle3_layers_to_capture=None) if hook else types.SimpleNamespace()
    runner = types.SimpleNamespace(model=target, model_config=types.SimpleNamespace(hidden_size=4))
    draft = LlamaForCausalLMEagle3()
    draft.model.num_aux_hidden_states = 3  # type: ignore[assignment]
    draft.config.hidden_size = 4
    worker = types.SimpleNamespace(draft_runner=types.SimpleNamespace(model=draft),
                                   target_worker=types.SimpleNamespace(model_runner=runner))
    check_hand_over(worker, types.SimpleNamespace(extend_lens=[2, 3]), torch.zeros(rows, width))


@pytest.mark.parametrize(("arguments", "words"), [
    ({"width": 12, "hook": False}, "states-missing"), ({"width": 4}, r"one state only(.|\n)*1 of 3 states"),
    ({"width": 8}, "2 of 3 states"), ({"width": 15}, "3 states of 5, expected 4"),
    ({"width": 12, "rows": 3}, "states of 3 rows")])
def test_what_a_target_hands_over(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineFailure, match=words):
        hand_over(**arguments)


def test_a_right_hand_over_passes_padding_included() -> None:
    hand_over(12)
    assert GUARD.status.checks == ["hand-over"]
    hand_over(12, rows=8)


def test_a_guard_that_only_reports_goes_on_and_says_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(GUARD, "mode", "report")
    GUARD.status.remarks = []
    hand_over(4)
    hand_over(4)
    model = LlamaForCausalLMEagle3()
    before = model.lm_head.weight.detach().clone()
    assert load(model, checkpoint(**{"lm_head.weight": None})) == ""
    assert torch.equal(model.lm_head.weight, before), "unset weights are what they would be without a guard"
    assert torch.equal(model.model.fc.weight, torch.ones(4, 12))
    remarks = next(iter(read_all(tmp_path).values())).remarks
    assert ["one state only" in remarks[0], "sets lm_head.weight" in remarks[1], len(remarks)] == [True, True, 2]


def test_an_unknown_sglang_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    with pytest.raises(SystemExit, match=r"0\.9\.0.*0\.5\.16 to 0\.5\.23"):
        plugin.activate()


def test_the_guard_is_off_where_eyas_did_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    monkeypatch.delenv(STATUS_DIR)
    plugin.activate()
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(SystemExit):
        plugin.activate()


def test_missing_targets_are_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0.5.20")
        with pytest.raises(EngineFailure, match=r"LlamaForCausalLMEagle3\.load_weights"):
            layout.require_targets()
