"""Digests that tell one target from another: tokenizer, chat template, weights.

The weights' fingerprint covers each weight file's safetensors header (names, dtypes, shapes, metadata), its size
and 64 KiB samples spread over its data: seconds for 500 GB, and any re-training or re-quantisation changes it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from eyas_contract.checkpoint_files import pickled_files
from eyas_contract.errors import InvalidInput

SAMPLE_BYTES = 64 * 1024
SAMPLES_PER_FILE = 16


def tokenizer_sha256(folder: Path) -> str:
    """SHA-256 of `tokenizer.json`, or of the other tokenizer files where there is none; empty without any."""
    for group in (("tokenizer.json",), ("tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")):
        present = [folder / name for name in group if (folder / name).is_file()]
        if present:
            hasher = hashlib.sha256()
            for path in present:
                hasher.update(path.read_bytes())
            return hasher.hexdigest()
    return ""


def chat_template(folder: Path) -> str:
    """The chat template's text: `chat_template.jinja`, else the field of `tokenizer_config.json`; may be empty.

    Raises:
        InvalidInput: a file that is not text, or no JSON object.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    config = folder / "tokenizer_config.json"
    if config.is_file():
        try:
            plain = json.loads(_text(config))
        except (ValueError, RecursionError) as error:
            raise _unreadable(config, f"not JSON ({error})") from error
        if not isinstance(plain, dict):
            raise _unreadable(config, f"a JSON {type(plain).__name__}")
        value = plain.get("chat_template", "")
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"not UTF-8 ({error})") from error


def _unreadable(path: Path, found: str) -> InvalidInput:
    return InvalidInput(str(path), found, "a tokenizer's file as Hugging Face writes it, by eyas-contract",
                        "Restore the file.")


def chat_template_sha256(folder: Path) -> str:
    """SHA-256 of the chat template's text; empty text where the folder has none."""
    text = chat_template(folder)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() if text else ""


def weights_fingerprint(folder: Path) -> str:
    """Fingerprint of all `*.safetensors` (else weights in `*.bin`) of a folder; empty where it has none.

    Raises:
        InvalidInput: a link that leads to nothing.
    """
    files = sorted(folder.glob("*.safetensors")) or pickled_files(folder)
    if not files:
        return ""
    hasher = hashlib.sha256()
    for path in files:
        if not path.exists():
            raise InvalidInput(str(path), "a broken link", "a weight file, by eyas-contract",
                               "Fetch the file, or remove the link.")
        size = path.stat().st_size
        hasher.update(f"{path.name}:{size}\n".encode())
        step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
        with path.open("rb") as source:
            for start in range(0, size, step):
                source.seek(start)
                hasher.update(source.read(SAMPLE_BYTES))
            source.seek(max(0, size - SAMPLE_BYTES))
            hasher.update(source.read(SAMPLE_BYTES))
    return hasher.hexdigest()
