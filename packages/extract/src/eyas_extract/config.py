"""What each command of eyas-extract can be told. Field names are flags, and keys of a --config file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ModelDtype = Literal["auto", "bfloat16", "float16", "float32"]
Overlong = Literal["reject", "truncate"]
StoreDtype = Literal["auto", "bf16", "fp16", "fp32", "fp8"]


@dataclass(frozen=True)
class RegenerateConfig:
    """Answers by the target itself, so that the draft learns what the target says."""

    target: Path
    """the target's Hugging Face folder"""
    prompts: Path
    """JSONL of conversations; their assistant turns are replaced, and a last user turn is answered"""
    out: Path
    """JSONL to write; beside it `<out>.lock`, and `<out>.partial` while it grows"""
    max_new_tokens: int = 512
    """most tokens of an answer"""
    turns: Literal["all", "last"] = "all"
    """regenerate every assistant turn in order, or the last only"""
    temperature: float = 0.0
    """0 is greedy"""
    top_p: float = 1.0
    """sample from the smallest set of tokens with this probability"""
    top_k: int = 0
    """sample from the k likeliest tokens; 0 for all"""
    seed: int = 0
    """of sampling"""
    batch_size: int = 256
    """conversations a batch; a batch is also what a kill can cost"""
    kv_gib: float = 4.0
    """most memory for keys and values; longer prompts make smaller batches"""
    dtype: ModelDtype = "auto"
    """of the weights; auto is the checkpoint's own"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    engine: Literal["hf", "sglang", "endpoint"] = "hf"
    """what answers: Hugging Face in this process, SGLang by token ids, or an OpenAI-compatible endpoint by text"""
    servers: tuple[str, ...] = ()
    """URLs of SGLang servers; without any, one is started"""
    endpoint: str = ""
    """base URL of an OpenAI-compatible endpoint, e.g. http://host:30000/v1"""
    model: str = ""
    """the model's name at the endpoint"""
    api_key_variable: str = "OPENAI_API_KEY"
    """environment variable with the endpoint's key, where it wants one"""
    concurrency: int = 64
    """conversations that servers answer at a time"""
    engine_python: Path | None = None
    """interpreter with sglang; default $EYAS_ENGINE_PYTHON, else this one"""
    engine_args: str = ""
    """further arguments of sglang.launch_server, as in --engine-args="--chunked-prefill-size 4096" """
    tp: int = 1
    """ranks of the engine that is started"""
    json: bool = False
    """print the summary as JSON"""


@dataclass(frozen=True)
class RunConfig:
    """Hidden states of the target on conversations, into a store."""

    target: Path
    """the target's Hugging Face folder"""
    data: Path
    """JSONL of conversations"""
    out: Path
    """the store; the same command continues one that is not complete"""
    aux_layers: tuple[int, ...] = ()
    """output of decoder layer k, 0-based; default 1, n/2 - 1, n - 4"""
    max_length: int = 4096
    """most tokens of a sample; fewer where the target has fewer positions"""
    overlong: Overlong = "reject"
    """what happens to longer ones"""
    store_dtype: StoreDtype = "auto"
    """of the stored states; auto is the model's"""
    shard_tokens: int = 16384
    """tokens a shard, about; a shard is also what a kill can cost"""
    batch_tokens: int = 4096
    """most tokens of one forward pass, padding included"""
    dtype: ModelDtype = "auto"
    """of the weights; auto is the checkpoint's own"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one"""
    engine: Literal["hf", "sglang"] = "hf"
    """what computes the states: Hugging Face in this process, or SGLang"""
    servers: tuple[str, ...] = ()
    """URLs of SGLang servers that capture (`eyas-extract engine`); without any, one is started"""
    ray: str = ""
    """have Ray start the engines: address of its cluster such as `auto`, or `local`; needs eyas-extract[ray]"""
    engines: int = 1
    """how many, through Ray"""
    engine_python: Path | None = None
    """interpreter with sglang; default $EYAS_ENGINE_PYTHON, else this one"""
    engine_args: str = ""
    """further arguments of sglang.launch_server, as in --engine-args="--chunked-prefill-size 4096" """
    tp: int = 1
    """ranks of the engine that is started"""
    encoders: int = 0
    """processes that turn conversations into tokens; 0 for as many as help"""
    ahead: int = 4
    """shards that each server computes at a time; a lost server costs these, which are done again"""
    json: bool = False
    """print the summary as JSON"""


@dataclass(frozen=True)
class PlanConfig(RunConfig):
    """What a run with the same flags will need: bytes, disk, time. Writes nothing."""

    probe: bool = True
    """load the target and time one batch"""


@dataclass(frozen=True)
class RepairConfig(RunConfig):
    """Damaged shards of the store --out set aside and extracted again, with the flags that the store was made with."""


@dataclass(frozen=True)
class EngineConfig:
    """An SGLang server that captures, for `run --servers`, until it is interrupted."""

    target: Path
    """the target's Hugging Face folder"""
    root: Path
    """it writes shards of stores below this folder, which all machines must share, and nothing else"""
    aux_layers: tuple[int, ...] = ()
    """output of decoder layer k, 0-based; default 1, n/2 - 1, n - 4"""
    store_dtype: StoreDtype = "auto"
    """of the stored states; auto is the model's"""
    dtype: ModelDtype = "auto"
    """of the weights; auto is the checkpoint's own"""
    device: str = "auto"
    """cpu, cuda, ...; auto is cuda where there is one"""
    tp: int = 1
    """ranks"""
    port: int = 30000
    """where it listens; for other machines add --engine-args="--host 0.0.0.0" """
    engine_python: Path | None = None
    """interpreter with sglang; default $EYAS_ENGINE_PYTHON, else this one"""
    engine_args: str = ""
    """further arguments of sglang.launch_server, shell-quoted"""


@dataclass(frozen=True)
class StatsConfig:
    """What a store holds."""

    store: Path
    """the store"""
    json: bool = False
    """print as JSON"""


@dataclass(frozen=True)
class MergeConfig:
    """Complete stores of one target and capture into a new one; shards are linked, not copied, on one disk."""

    stores: tuple[Path, ...]
    """the stores, in order"""
    out: Path
    """the new store"""
    json: bool = False
    """print as JSON"""


@dataclass(frozen=True)
class SplitConfig:
    """A complete store cut in two by samples, such as for training and evaluation."""

    store: Path
    """the store"""
    first: Path
    """store of the first samples"""
    second: Path
    """store of the others"""
    share: float = 0.95
    """of the samples that go to the first"""
    json: bool = False
    """print as JSON"""


@dataclass(frozen=True)
class ShowConfig:
    """The tokens of one sample, those that are trained on marked."""

    target: Path
    """the target's Hugging Face folder"""
    data: Path | None = None
    """JSONL of conversations; or"""
    store: Path | None = None
    """a store"""
    index: int = 0
    """which sample, from 0"""
    id: str = ""
    """which sample, by its id"""
    max_length: int = 4096
    """most tokens of a sample"""
    overlong: Overlong = "reject"
    """what happens to longer ones"""
    json: bool = False
    """print as JSON"""


@dataclass(frozen=True)
class CheckFilesConfig:
    """Another tool's hidden states, one safetensors file a sample, judged before training; exit code 1 for faults."""

    folder: Path
    """files with input_ids, aux_hidden_states and last_hidden_state"""
    target: Path
    """the target's folder; with its weights, it is proved which side of the final norm the last state was taken"""
    prompts: Path | None = None
    """JSON, sample number -> token ids with which the sample must begin"""
    teacher: Path | None = None
    """JSON, {"top1": [...]}: the target's own next tokens for the first file"""
    json: bool = False
    """print as JSON"""


@dataclass(frozen=True)
class CheckConfig:
    """Checksums, shapes, counts and values of a store; exit code 1 where something is damaged."""

    store: Path
    """the store"""
    data: Path | None = None
    """also compare its tokens with those of this input; needs --target"""
    target: Path | None = None
    """the target's Hugging Face folder"""
    json: bool = False
    """print as JSON"""
