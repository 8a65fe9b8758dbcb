"""The launch flags of a server that decide whether a draft works, from named values or from a command line."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from eyas_contract.errors import InvalidInput

_ALIASES = {"speculative_draft_model": "speculative_draft_model_path", "tp": "tp_size",
            "tensor_parallel_size": "tp_size", "max_model_len": "context_length"}


@dataclass(frozen=True)
class ServerFlags:
    """Flags by SGLang's names, `-` as `_`; None where not given."""

    speculative_algorithm: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_attention_backend: str | None = None
    speculative_draft_model_quantization: str | None = None
    speculative_token_map: str | None = None
    attention_backend: str | None = None
    page_size: int | None = None
    context_length: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    mem_fraction_static: float | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    json_model_override_args: str | None = None

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ServerFlags:
        """Pick the known flags out of a launch command (`--flag value` or `--flag=value`); others are passed over.

        Raises:
            InvalidInput: a known flag whose value is missing or no number (every fault named).
        """
        kinds = {f.name: str(f.type).split(" |")[0] for f in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        faults = []
        words = list(argv)
        for at, word in enumerate(words):
            if not word.startswith("--"):
                continue
            flag, given, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _ALIASES.get(name, name)
            if name not in kinds:
                continue
            if not given:
                value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
            try:
                values[name] = {"int": int, "float": float, "str": str}[kinds[name]](value)
            except ValueError:
                faults.append(f"--{flag} {value!r}")
            if value == "":
                faults.append(f"--{flag} without a value")
        if faults:
            raise InvalidInput("server flags", "; ".join(faults), "a number or a name after each flag, by the server",
                               "Correct the launch command.")
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_command(cls, text: str) -> ServerFlags:
        """The same from the text of a shell command."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise InvalidInput("launch command", f"unbalanced quotes ({error})", "a shell command", "Correct it.") \
                from error
        return cls.from_argv(words)

    def over(self, other: ServerFlags) -> ServerFlags:
        """These flags, and `other`'s where these give none."""
        chosen = {f.name: getattr(self, f.name) if getattr(self, f.name) is not None else getattr(other, f.name)
                  for f in dataclasses.fields(self)}
        return ServerFlags(**chosen)
