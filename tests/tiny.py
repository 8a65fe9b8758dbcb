"""A tiny but real target: a Llama of 8 layers with its own tokenizer and ChatML template, trained for seconds.

Its language is made of counting and copying rules, so greedy answers are varied yet predictable, and a draft trained
on them is accepted. Written once a machine into a cache folder; every test reads it and none changes it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 8, 4, 2, 16
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue",
    "stone", "river", "cloud", "bird", "count", "copy", "from", "to", "up", "down", "say", "list", "the", "a", "and",
    "then", "is",
]
NUMBERS = WORDS[:11]


def conversation(rng: random.Random) -> tuple[str, str]:
    """One prompt and its only right answer."""
    if rng.random() < 0.5:
        start, end = sorted(rng.sample(range(11), 2))
        return f"count from {NUMBERS[start]} to {NUMBERS[end]}", " ".join(NUMBERS[start:end + 1])
    words = [rng.choice(WORDS[11:18]) for _ in range(rng.randint(2, 5))]
    return "copy " + " ".join(words), " and then ".join(words)


def conversations(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows of a prompts file: `{"id", "messages"}` with the user's turn only."""
    rng = random.Random(seed)
    return [{"id": f"tiny-{seed}-{i}", "messages": [{"role": "user", "content": conversation(rng)[0]}]}
            for i in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges but whole words for WORDS; ChatML special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    merges: list[tuple[str, str]] = []
    for word in [*("Ġ" + w for w in WORDS), *WORDS, "user", "assistant", "system"]:
        left = word[0]
        for char in word[1:]:
            if left + char not in pieces:
                pieces.append(left + char)
                merges.append((left, char))
            left += char
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = CHATML
    return tokenizer


def train_target(out: Path, steps: int = 400) -> None:
    """Train the tiny target (fp32, about 20 s on 2 cores) and save it as a Hugging Face folder."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 63) // 64 * 64, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    rng = random.Random(1)
    for _ in range(steps):
        texts = []
        for _ in range(32):
            user, answer = conversation(rng)
            texts.append(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)


def target_folder() -> Path:
    """The cached tiny target, made on first use; safe when several processes ask at once."""
    version = "tiny-target-v1"
    out = Path(tempfile.gettempdir()) / f"eyas-tests-{os.getuid()}" / version
    if not (out / "config.json").is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent))
        train_target(work)
        try:
            work.rename(out)
        except OSError:
            shutil.rmtree(work)
    return out
