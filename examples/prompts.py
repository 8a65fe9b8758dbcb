"""Chat openings for the demo: what people really wrote first, from the PyPI data set `chitchat-dataset` (MIT).

Openings are joined, cleaned of duplicates and shuffled with a fixed seed; held-out ones never appear in training.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

MIN_CHARACTERS = 15
MAX_CHARACTERS = 300


def openings() -> list[str]:
    """Every distinct opening, in a fixed random order."""
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise SystemExit("chitchat-dataset is not installed: pip install --no-deps -r requirements/demo.txt")
    chats = json.loads((Path(spec.origin).parent / "dataset.json").read_text(encoding="utf-8"))
    texts: dict[str, str] = {}
    for chat in chats.values():
        if chat["messages"]:
            text = " ".join(message["text"].strip() for message in chat["messages"][0]).strip()
            if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
                texts.setdefault(text.lower(), text)
    result = [texts[key] for key in sorted(texts)]
    random.Random(0).shuffle(result)
    return result


def write_prompts(folder: Path, train: int, held_out: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl`; returns both paths."""
    texts = openings()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in (("held_out", texts[:held_out]), ("train", texts[held_out:held_out + train])):
        lines = [json.dumps({"id": f"{name}-{i}", "messages": [{"role": "user", "content": text}]})
                 for i, text in enumerate(rows)]
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths[1], paths[0]
