"""Time and memory of `eyas-serve preflight` on a pair of Kimi-K2.5's size, written as sparse files.

    python benchmarks/preflight_scale.py [--out FILE.json]

Real config sizes (61 layers of 7168, 163840 tokens, 64 shards of 595 GB in all; an MLA draft of the full vocabulary and
a Llama draft of 32000 tokens); the numbers themselves are holes. Each run is a process of its own, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCAB, SHARDS = 7168, 61, 163840, 64
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
COMMON = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 262144, "rope_theta": 50000.0,
          "rope_scaling": YARN, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "num_attention_heads": 64}
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True}}


def write_holes(path: Path, shapes: dict[str, tuple[str, list[int]]], values: dict[str, bytes]) -> None:
    """A safetensors file whose data is a hole, but for `values`."""
    header, position = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = {"BF16": 2, "I64": 8, "BOOL": 1}[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    with path.open("wb") as sink:
        sink.write(struct.pack("<Q", len(raw)) + raw)
        sink.truncate(8 + len(raw) + position)
        for name, data in values.items():
            sink.seek(8 + len(raw) + header[name]["data_offsets"][0])
            sink.write(data)


def make_target(folder: Path) -> Path:
    """Kimi-K2.5's config and 64 shards with the headers of its experts."""
    folder.mkdir()
    text = {"model_type": "kimi_k2", "num_hidden_layers": LAYERS, "n_routed_experts": 384, **MLA, **COMMON}
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(VOCAB)}}}))
    weight_map = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        experts = {f"model.layers.{shard}.mlp.experts.{e}.{part}_proj.weight": ("BF16", [2048, 1970])
                   for e in range(384) for part in ("gate", "up", "down")}
        write_holes(folder / name, experts, {})
        weight_map |= dict.fromkeys(experts, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def layer(attention: dict[str, list[int]], inner: int) -> dict[str, tuple[str, list[int]]]:
    """A draft's tensors: one decoder layer, fc, norms."""
    shapes = {f"midlayer.self_attn.{n}.weight": s for n, s in attention.items()}
    shapes |= {f"midlayer.mlp.{n}_proj.weight": s for n, s in (("gate", [inner, HIDDEN]), ("up", [inner, HIDDEN]),
                                                               ("down", [HIDDEN, inner]))}
    shapes |= {f"midlayer.{n}.weight": [HIDDEN] for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN]}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def make_drafts(folder: Path) -> dict[str, Path]:
    """An MLA draft of the full vocabulary, and a Llama draft of 32000 tokens."""
    mla, llama = folder / "mla", folder / "llama"
    mla.mkdir()
    llama.mkdir()
    (mla / "config.json").write_text(json.dumps({
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 1,
        "intermediate_size": 18432, "draft_vocab_size": VOCAB, "tie_word_embeddings": False, **MLA, **COMMON, **IDS}))
    attention = {"q_a_proj": [1536, 2 * HIDDEN], "q_a_layernorm": [1536], "q_b_proj": [64 * 192, 1536],
                 "kv_a_proj_with_mqa": [576, 2 * HIDDEN], "kv_a_layernorm": [512], "kv_b_proj": [64 * 256, 512],
                 "o_proj": [HIDDEN, 64 * 128]}
    write_holes(mla / "model.safetensors", layer(attention, 18432) | {"lm_head.weight": ("BF16", [VOCAB, HIDDEN])}, {})
    size = 32000
    (llama / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "head_dim": 128,
        "num_key_value_heads": 64, "intermediate_size": 12288, "draft_vocab_size": size, "tie_word_embeddings": False,
        **COMMON, **IDS}))
    ids = [i if i < 100 else 100 + (i - 100) * 5 for i in range(size)]
    marked = bytearray(VOCAB)
    for token in ids:
        marked[token] = 1
    shapes = layer({"q_proj": [8192, 2 * HIDDEN], "k_proj": [8192, 2 * HIDDEN], "v_proj": [8192, 2 * HIDDEN],
                    "o_proj": [HIDDEN, 8192]}, 12288)
    shapes |= {"lm_head.weight": ("BF16", [size, HIDDEN]), "d2t": ("I64", [size]), "t2d": ("BOOL", [VOCAB])}
    write_holes(llama / "model.safetensors", shapes, {
        "d2t": struct.pack(f"<{size}q", *(t - i for i, t in enumerate(ids))), "t2d": bytes(marked)})
    return {"mla": mla, "llama": llama}


PROGRAM = """
import sys, time
from eyas_serve.cli import main
started = time.perf_counter()
try:
    main()
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    print(f"{time.perf_counter() - started:.3f} {int(peak) / 1024:.0f}", file=sys.stderr)
"""


def measure(draft: Path, target: Path, version: list[str]) -> dict[str, Any]:
    """One run of the command in a process of its own."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM, "preflight", str(draft), "--target", str(target), "--gpu",
                           "RTX PRO 6000", "--tp", "8", *version, "--json"], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    inside, peak = done.stderr.split()[-2:]
    found = json.loads(done.stdout)
    return {"verdict": found["verdict"], "codes": sorted({f["code"] for f in found["findings"]}),
            "seconds": round(seconds, 2), "seconds_in_command": float(inside), "peak_mib": int(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = make_target(folder / "target")
        size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        result: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
                                             f"Python {platform.python_version()}", "load": os.getloadavg()[0],
                                  "target_bytes": size, "runs": {}}
        for kind, draft in make_drafts(folder).items():
            for label, version in (("one version", ["--engine-version", "0.5.20"]), ("every version", [])):
                result["runs"][f"{kind} draft, {label}"] = measure(draft, target, version)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
