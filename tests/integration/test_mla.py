"""An MLA draft of a DeepSeek-like target, trained here, on real SGLang on a CPU: served, probed, refused, exchanged."""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import deepseek
import tiny
from eyas_contract import EngineFailure
from eyas_draft.config import EvalConfig, ExportConfig, TrainConfig
from eyas_draft.evaluate import evaluate
from eyas_draft.export import export
from eyas_draft.train import Trainer
from eyas_extract.config import RegenerateConfig, RunConfig
from eyas_extract.regenerate import regenerate
from eyas_extract.run import run
from eyas_serve import ServeConfig, Server
from eyas_serve.acceptance import Acceptance
from eyas_serve.probe.session import probe_client
from eyas_serve.prompts import load_prompts

pytestmark = pytest.mark.integration
TREE = {"steps": 3, "topk": 2, "num_draft_tokens": 6}
NEW = 24


def trained(target: Path) -> Path:
    """A draft of the target, from its own answers: its kind follows the target."""
    work = target.parent
    asked = tiny.write_jsonl(work / "prompts.jsonl", tiny.conversations(100, seed=1))
    regenerate(RegenerateConfig(target, asked, work / "answers.jsonl", max_new_tokens=NEW, device="cpu"))
    run(RunConfig(target, work / "answers.jsonl", work / "store", device="cpu", encoders=1))
    Trainer(TrainConfig(work / "store", target, work / "run", vocab_size=160, epochs=8, tokens_per_batch=512, lr=3e-3,
                        ttt_steps=3, fc_norm=True, norm_output=True), io.StringIO()).run()
    export(ExportConfig(work / "run", work / "draft"))
    return work / "draft"


@pytest.fixture(scope="module")
def config(tiny_target: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("mla")
    target = deepseek.write_target(folder / "target", tiny_target)
    return ServeConfig(target=target, draft=trained(target), device="cpu", dtype="float32", port=0,
                       engine_python=engine_python, max_total_tokens=4096, **TREE)


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
    held_out = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(16, seed=5))
    prompts = load_prompts(held_out, config.target)
    plain = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    decoded = evaluate(EvalConfig(config.draft, config.target, held_out, max_new_tokens=NEW, **TREE), io.StringIO())
    with Server(config) as server:
        report = probe_client(server.client, None)
        assert report.findings == [], report.text(False)
        assert {stage.verdict for stage in report.stages} == {"ok"}
        assert "Eagle3DeepseekV2ForCausalLM" in report.engine
        answers = [server.client.generate(list(prompt.input_ids), NEW) for prompt in prompts]
        assert [list(answer.output_ids) for answer in answers] == decoded["outputs"]
        for prompt, answer in zip(prompts[:3], answers, strict=False):
            ids = torch.tensor([prompt.input_ids])
            greedy = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
            assert list(answer.output_ids) == greedy[0, ids.shape[1]:].tolist()
        served = Acceptance.of(answer.histogram for answer in answers)
        assert served.length > 1.4
        assert served.length == pytest.approx(decoded["acceptance_length"], abs=0.1)
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
