"""The API key: read from a file or the environment, handed to SGLang in a file of its own, never on a command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from eyas_contract import InvalidInput
from eyas_serve.config import ServeConfig


def read_key(config: ServeConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The key, or nothing where none is asked for.

    Raises:
        InvalidInput: both sources named, an unreadable or empty one, or a key given as a flag of the engine.
    """
    where, wanted = "--api-key-file/--api-key-env", "a key of one line"
    if "--api-key" in config.extra or "--admin-api-key" in config.extra:
        raise InvalidInput("--extra", "an API key as a flag, which every user of this machine can read in the process "
                           "list", "no key there", "Use --api-key-file or --api-key-env.")
    if config.api_key_file and config.api_key_env:
        raise InvalidInput(where, "both given", "one source of the key", "Leave one out.")
    if config.api_key_env:
        key, where = environment.get(config.api_key_env, ""), f"${config.api_key_env}"
    elif config.api_key_file:
        where = str(config.api_key_file)
        try:
            key = config.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(where, f"unreadable ({error})", wanted, "Check --api-key-file.") from error
    else:
        return ""
    key = key.strip()
    if len(key) < 8 or len(key.split()) != 1:
        raise InvalidInput(where, "empty" if not key else "several words, or fewer than 8 characters", wanted,
                           "Write one long random word, e.g. from `openssl rand -hex 24`.")
    return key


def write_engine_config(key: str, folder: Path) -> Path:
    """A config file for `sglang.launch_server --config` (JSON is YAML), readable by its owner alone."""
    path = folder / "engine-key.yaml"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as sink:
        json.dump({"api-key": key}, sink)
    return path
