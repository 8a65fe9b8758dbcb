"""The tables against the installed SGLang's own classes: a table that rots fails here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import drafts
import pytest
from drafts import Folder, bf16, ones

from eyas_contract.engines import sglang, sglang_targets
from eyas_contract.engines.hardware import BACKENDS, PAGED_TREES
from eyas_contract.engines.loaders import loader
from eyas_contract.engines.wanted import tensors

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("EYAS_ENGINE_PYTHON", ROOT / ".venv" / "engine" / "bin" / "python"))
LAYERS = 12
IDS: list[list[int] | None] = [None, [1, 5, 8], [2, 6, 9], [3, 5, 12], [0, 4, 7]]

pytestmark = pytest.mark.skipif(not PYTHON.is_file(), reason=f"no SGLang interpreter at {PYTHON}")


@functools.cache
def samples() -> dict[str, tuple[str, Folder]]:
    """Drafts whose names the loader must sort as the table does."""
    def change(folder: Folder, old: str = "", new: str = "", **config: Any) -> Folder:
        if old:
            folder.rename(old, new)
        folder.config |= config
        return folder

    with_fc_norm = change(drafts.draft(), fc_norm=True)
    with_fc_norm.tensors |= {f"fc_norm.{i}.weight": ones(64) for i in range(3)}
    old_fc_norm = change(drafts.draft(), use_aux_norm=True)
    old_fc_norm.tensors |= {f"aux_norm_{n}.weight": ones(64) for n in ("low", "mid", "high")}
    with_input_norm = change(drafts.draft(), norm_before_fc=True)
    with_input_norm.tensors["input_norm.weight"] = ones(192)
    strange = drafts.draft()
    strange.tensors |= {"input_norm.weight": ones(192), "fc_norm.0.weight": ones(64), "fusion.weight": ones(64),
                        "midlayer.self_attn.q_norm.weight": ones(16), "model.lm_head.weight": bf16([96, 64])}
    four = drafts.draft(num_aux_hidden_states=4)
    four.tensors["fc.weight"] = bf16([64, 256])
    mla_norm = drafts.mla_draft(fc_norm=True)
    mla_norm.tensors |= {f"fc_norm.{i}.weight": ones(64) for i in range(3)}
    mla_strange = drafts.mla_draft()
    mla_strange.tensors |= {"model.norm.weight": ones(64), "input_norm.weight": ones(192)}
    return {
        "plain": ("llama", drafts.draft()), "layers.0": ("llama", change(drafts.draft(), "midlayer.", "layers.0.")),
        "model.midlayer": ("llama", change(drafts.draft(), "midlayer.", "model.midlayer.")),
        "model.layers.0": ("llama", change(drafts.draft(), "midlayer.", "model.layers.0.")),
        "model.fc": ("llama", change(drafts.draft(), "fc.", "model.fc.")),
        "decoder_layers.0": ("llama", change(drafts.draft(), "midlayer.", "decoder_layers.0.")),
        "no head": ("llama", change(drafts.draft(full=True), "lm_head.", "head.")),
        "shared head": ("llama", change(drafts.draft(full=True), "lm_head.", "head.", draft_vocab_size=None)),
        "fc_norm": ("llama", with_fc_norm), "aux_norm": ("llama", old_fc_norm), "strange": ("llama", strange),
        "input_norm": ("llama", with_input_norm), "four states": ("llama", four),
        "mla": ("mla", drafts.mla_draft()),
        "mla layers.0": ("mla", change(drafts.mla_draft(), "midlayer.", "layers.0.")),
        "mla model.": ("mla", change(drafts.mla_draft(), "midlayer.", "model.midlayer.")),
        "mla fc_norm": ("mla", mla_norm), "mla strange": ("mla", mla_strange),
        "mla two layers": ("mla", drafts.mla_draft(num_hidden_layers=2)),
    }


@functools.cache
def refused() -> dict[str, tuple[str, Folder, str]]:
    """Drafts that the class itself does not build or load, as the checks say, and its words."""
    short, mla_short = drafts.draft(), drafts.mla_draft()
    for folder in (short, mla_short):  # the target lends its own, but only after the file's has been loaded
        folder.tensors["embed_tokens.weight"] = bf16([96, 64])
    return {"gelu": ("llama", drafts.draft(hidden_act="gelu_pytorch_tanh"), "Only silu"),
            "short embedding": ("llama", short, "org_vocab_size=256"),
            "mla short embedding": ("mla", mla_short, "org_vocab_size=256")}


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What the installed classes do, asked once in their own interpreter."""
    request = {
        "drafts": [{"kind": kind, "config": folder.config,
                    "tensors": {n: [t.dtype, t.shape] for n, t in folder.tensors.items()}}
                   for kind, folder, *_ in (*samples().values(), *refused().values())],
        "hooks": [{"architecture": name, "layers": LAYERS, "ids": ids} for name in sglang_targets.HOOKS for ids in IDS]
        + [{"architecture": name, "layers": 0, "ids": None} for name in sorted(sglang_targets.WITHOUT_HOOK)]}
    done = subprocess.run([str(PYTHON), str(Path(__file__).with_name("engines_installed.py"))], text=True,
                          input=json.dumps(request), capture_output=True, cwd="/",
                          env={**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "0"})
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.rpartition("ANSWER")[2])
    return result


@pytest.mark.parametrize("name", refused())
def test_the_class_refuses_what_the_checks_refuse(name: str, answer: dict[str, Any]) -> None:
    assert refused()[name][2] in answer["drafts"][len(samples()) + list(refused()).index(name)]["error"]


@pytest.mark.parametrize("name", samples())
def test_names_are_taken_as_the_table_says(name: str, answer: dict[str, Any]) -> None:
    version = sglang.parse_version(answer["version"])
    kind, folder = samples()[name]
    found = answer["drafts"][list(samples()).index(name)]
    table = loader("sglang", version, "mla" if kind == "mla" else "llama")
    assert table is not None
    if not table.multi_layer and folder.config["num_hidden_layers"] != 1:
        assert "1 layer" in found["error"]
        return
    wanted = tensors(folder.config, table)
    placed = {stored: table.place(stored) for stored in folder.tensors}
    expected = {stored: where == "d2t" or where in wanted for stored, where in placed.items()}
    pair = [n for n in folder.tensors if "q_a_proj" in n or "kv_a_proj_with_mqa" in n]
    for stored in pair[:1]:  # the MLA loader keeps the first of the two until the second comes
        expected[stored] = False
    assert found["taken"] == expected
    missing = {where for where in wanted if where not in placed.values()}
    assert bool(missing - {"embed_tokens.weight"}) == bool(set(found["unfilled"]) - {"model.embed_tokens.weight"})
    assert found["head_from_target"] == (folder.config["draft_vocab_size"] is None)


def test_the_hooks_capture_what_the_table_says(answer: dict[str, Any]) -> None:
    version = sglang.parse_version(answer["version"])
    asked = set()
    for case in answer["hooks"]["answers"]:
        name = case["architecture"]
        how = sglang_targets.rule(name, version)
        assert case["hook"] == (how != sglang_targets.NO_HOOK), name
        if not case["hook"]:
            continue
        asked.add(name)
        ids = tuple(case["ids"]) if case["ids"] is not None else None
        captured = tuple(i - 1 for i in case["boundaries"])
        assert captured == sglang.layer_ids_from_engine(ids, name, LAYERS, version), case
        if how == sglang_targets.MARKS_NOTHING:
            assert not case["marked"], name
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM",
            "KimiK25ForConditionalGeneration", "GptOssForCausalLM", "Glm4MoeForCausalLM", "Gemma3ForCausalLM",
            "MiniMaxM2ForCausalLM", "Llama4ForConditionalGeneration"} <= asked


def test_no_registered_target_is_missing_from_the_tables(answer: dict[str, Any]) -> None:
    """A class with a hook that the table does not know would be answered as unknown."""
    known = set(sglang_targets.HOOKS) | sglang_targets.WITHOUT_HOOK
    drafts_and_others = ("MTP", "NextN", "Eagle", "Draft", "DFlash", "DSpark", "Assistant", "Reward", "Classification",
                         "Embedding", "Bert", "CLIP", "Whisper", "Contriever", "Vision", "ASR", "MindSpore")
    unknown = [name for name in answer["hooks"]["classes"] if name not in known
               and not any(part in name for part in drafts_and_others)]
    assert unknown == []
    assert len(answer["hooks"]["classes"]) > 100


def test_the_backends_are_those_of_the_installed_version(answer: dict[str, Any]) -> None:
    version = sglang.parse_version(answer["version"])
    table = {name for name, backend in BACKENDS.items() if backend.since and version >= backend.since
             and (backend.until is None or version <= backend.until)}
    assert set(answer["backends"]["draft"]) == table - {"eyas"}, "eyas comes by a hook, and is tested with it"
    assert set(answer["backends"]["paged"]) == {name for name, since in PAGED_TREES.items() if version >= since}
