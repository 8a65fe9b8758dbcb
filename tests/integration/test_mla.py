"""The MLA draft class on real SGLang on a CPU, with a DeepSeek-like target: guarded, probed, refused, exchanged."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import httpx
import mla
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from eyas_contract import EngineFailure
from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_serve import ServeConfig, Server
from eyas_serve.probe.session import probe_client
from eyas_serve.prompts import load_prompts

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def config(tiny_target: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("mla")
    target = mla.write_target(folder / "target", tiny_target)
    draft = mla.write_draft(folder / "draft", target)
    make_golden(GoldenConfig(draft, target))
    return ServeConfig(target=target, draft=draft, device="cpu", dtype="float32", port=0, engine_python=engine_python,
                       max_total_tokens=4096, acceptance_floor=0.0, steps=3, topk=2, num_draft_tokens=6)


def wrong(config: ServeConfig, folder: Path) -> Path:
    """The draft, with half of a fused pair gone and a name that nobody knows."""
    assert config.draft is not None
    shutil.copytree(config.draft, folder)
    weights = load_file(folder / "model.safetensors")
    weights["decoder.post_attention_layernorm.weight"] = weights.pop("midlayer.post_attention_layernorm.weight")
    del weights["midlayer.self_attn.kv_a_proj_with_mqa.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_served_probed_and_reloaded(config: ServeConfig, tmp_path: Path) -> None:
    assert config.draft is not None
    prompts = load_prompts(tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(3, seed=5)), config.target)
    reference = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    with Server(config) as server:
        report = probe_client(server.client, None)
        assert report.findings == [], report.text(False)
        assert {stage.verdict for stage in report.stages} == {"ok"}
        assert "Eagle3DeepseekV2ForCausalLM" in report.engine
        for prompt in prompts:
            ids = torch.tensor([prompt.input_ids])
            wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
                                        eos_token_id=None)[0, ids.shape[1]:].tolist()
            assert list(server.client.generate(ids[0].tolist(), 16, ignore_eos=True).output_ids) == wanted
        answer = httpx.post(f"{server.url}/update_weights_from_disk", timeout=60,
                            json={"model_path": str(wrong(config, tmp_path / "wrong"))}).json()
        assert not answer["success"]
        assert "kv_a_proj_with_mqa" in answer["message"]
        assert probe_client(server.client, config.draft).findings == []


def test_the_guard_refuses(config: ServeConfig, tmp_path: Path) -> None:
    faulty = dataclasses.replace(config, draft=wrong(config, tmp_path / "wrong"), preflight=False)
    with pytest.raises(EngineFailure) as caught:
        Server(faulty).start()
    for words in ("drops decoder.post_attention_layernorm.weight, midlayer.self_attn.q_a_proj.weight",
                  r"sets model\.midlayer\.post_attention_layernorm\.weight, "
                  r"model\.midlayer\.self_attn\.fused_qkv_a_proj"):
        assert re.search(words, str(caught.value)), str(caught.value)
