"""The settings of every subcommand: frozen dataclasses whose docstrings are the help texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas_draft.trackers import Name


@dataclass(frozen=True)
class TrainConfig:
    """Train a draft from a store of hidden states.

    Attributes:
        store: folder written by eyas-extract.
        target: Hugging Face folder of the target, the one the store was extracted from.
        out: run folder; an interrupted run in it is continued.
        vocab_size: rows of the draft's head, the most frequent trained tokens; 0 for the target's vocabulary.
        kind: llama (served as LlamaForCausalLMEagle3), or mla with the target's latent sizes
            (Eagle3DeepseekV2ForCausalLM); auto is mla where the target's config has them all (DeepSeek-V3, Kimi-K2).
        num_layers: decoder layers of the draft.
        intermediate_size: width of the feed-forward; 0 for the target's.
        fc_norm: normalise each aux state before fc (EAGLE-3.1).
        norm_output: feed the normed state to the next step (EAGLE-3.1).
        init: start from the target's last layer, or from random weights.
        warm_start: folder of a published draft whose weights are taken instead, in either naming dialect; the draft
            vocabulary is the run's own, and rows of the head go over by target token.
        ttt_steps: unrolled steps.
        decay: step i weighs decay^i in the loss.
        loss: ce, kl, tv, lk-alpha, lk-lambda, choice, or a mix such as ce=0.5,choice=0.5 (see objectives.py).
        epochs: passes over the store.
        max_steps: optimiser steps after which the run ends, in the midst of an epoch too; 0 for all epochs.
        tokens_per_batch: packed tokens of one forward pass, prompts included.
        accumulate: forward passes per optimiser step.
        lr: peak learning rate.
        warmup: share of the steps over which the rate rises; then it falls as a cosine to final_lr * lr.
        final_lr: where the cosine ends, as a share of lr.
        weight_decay: of AdamW.
        beta2: second-moment decay of AdamW (the first is 0.9).
        clip: largest norm of the gradient.
        precision: bf16 computes in bfloat16 with float32 master weights; fp32 computes in float32.
        seed: of weights, order and held-out samples.
        device: cpu, cuda, cuda:1, ...
        holdout: share of the samples held out to measure on.
        fraction: share of the other samples that is trained on, for `eyas-draft advise`.
        chain: draft steps of the expected acceptance length.
        decode_prompts: held-out prompts decoded for real at every checkpoint, by the reference decoder; the best
            checkpoint goes by that then. 0 for none: it goes by the expected acceptance length.
        decode_tokens: longest answer of those.
        checkpoint_every: optimiser steps between checkpoints, each with a measurement; 0 for the end of each epoch.
        keep: newest checkpoints kept, beside the best.
        max_bad_samples: samples with NaN or infinite states passed over before the run stops, by all processes
            together; theirs are added up at every checkpoint.
        max_bad_steps: steps with a gradient that is not finite left out before the run stops (fixed shapes only; the
            other way stops at the first).
        shapes: fixed packs every batch to one shape and lets a GPU run ahead; ragged takes batches as they come;
            auto is fixed on GPUs in bf16. With several processes fixed puts the whole draft in each and ragged spreads
            it; auto spreads one that takes more than a tenth of a GPU, or where they cannot share the batches equally.
        compile: fuse elementwise chains with torch.compile (GPU, fixed shapes).
        cuda_graph: record a step once and replay it (GPU, fixed shapes).
        resident: whether the whole store is put on the device (fixed shapes); auto puts it on a GPU that it fits.
        verify_store: compare every shard with its digests when first read.
        log_seconds: seconds between progress lines where there is no terminal.
        log_to: also send the numbers of metrics.jsonl to these; extras of eyas-draft by the same names.
    """

    store: Path
    target: Path
    out: Path
    vocab_size: int = 6144
    kind: Literal["auto", "llama", "mla"] = "auto"
    num_layers: int = 1
    intermediate_size: int = 0
    fc_norm: bool = False
    norm_output: bool = False
    init: Literal["target", "random"] = "target"
    warm_start: Path | None = None
    ttt_steps: int = 7
    decay: float = 0.8
    loss: str = "ce"
    epochs: int = 6
    max_steps: int = 0
    tokens_per_batch: int = 2048
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.03
    final_lr: float = 0.0
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 0.5
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0
    device: str = "cpu"
    holdout: float = 0.03
    fraction: float = 1.0
    chain: int = 3
    decode_prompts: int = 0
    decode_tokens: int = 128
    checkpoint_every: int = 0
    keep: int = 2
    max_bad_samples: int = 10
    max_bad_steps: int = 10
    shapes: Literal["auto", "fixed", "ragged"] = "auto"
    compile: bool = True
    cuda_graph: bool = True
    resident: Literal["auto", "yes", "no"] = "auto"
    verify_store: bool = True
    log_seconds: float = 10.0
    log_to: tuple[Name, ...] = ()


FREE_ON_RESUME = ("store", "target", "out", "warm_start", "keep", "verify_store", "log_seconds", "log_to", "compile",
                  "cuda_graph", "resident", "max_bad_samples", "max_bad_steps")
"""Fields of TrainConfig that may change when a run is continued: they do not change its result."""


@dataclass(frozen=True)
class VocabConfig:
    """Report what a draft vocabulary of a given size would cover.

    Attributes:
        store: folder written by eyas-extract.
        vocab_size: rows of the draft's head; 0 for the target's vocabulary.
        target: Hugging Face folder of the target, to show the lost tokens as text.
        chain: draft steps of the ceiling.
        verify_store: compare every shard with its digests.
    """

    store: Path
    vocab_size: int = 6144
    target: Path | None = None
    chain: int = 3
    verify_store: bool = True


@dataclass(frozen=True)
class PlanConfig:
    """Tell what a run will need, from configs alone: GPU memory, hours, sizes of checkpoints.

    Attributes:
        target: Hugging Face folder of the target (its config.json is enough).
        store: folder written by eyas-extract; or
        tokens: how many tokens there will be,
        trained_share: of which this share is the assistant's,
        mean_length: in samples of so many tokens.
        gpus: processes that share the run; memory is that of a draft spread over them.
        gpu: name of the device, for its peak: H200, H100, A100, B200, RTX PRO 6000.
        mfu: share of the peak that is reached.
        flops_per_second: a measured rate instead.
        resident: the store lies on the device.
        vocab_size: as in train, or the target's where that is smaller.
        kind: as in train.
        num_layers: as in train.
        intermediate_size: as in train.
        fc_norm: as in train.
        norm_output: as in train.
        ttt_steps: as in train.
        epochs: as in train.
        tokens_per_batch: as in train.
        accumulate: as in train.
    """

    target: Path
    store: Path | None = None
    tokens: int = 0
    trained_share: float = 0.7
    mean_length: int = 1024
    gpus: int = 1
    gpu: str = "H200"
    mfu: float = 0.4
    flops_per_second: float = 0.0
    resident: bool = False
    vocab_size: int = TrainConfig.vocab_size
    kind: Literal["auto", "llama", "mla"] = TrainConfig.kind
    num_layers: int = TrainConfig.num_layers
    intermediate_size: int = TrainConfig.intermediate_size
    fc_norm: bool = TrainConfig.fc_norm
    norm_output: bool = TrainConfig.norm_output
    ttt_steps: int = TrainConfig.ttt_steps
    epochs: int = TrainConfig.epochs
    tokens_per_batch: int = TrainConfig.tokens_per_batch
    accumulate: int = TrainConfig.accumulate


@dataclass(frozen=True)
class PlotConfig:
    """Draw loss, accuracy, acceptance length and speed of runs.

    Attributes:
        runs: run folders.
        out: picture to write (png, svg or pdf). Needs matplotlib.
    """

    runs: tuple[Path, ...]
    out: Path = Path("training.png")


@dataclass(frozen=True)
class AdviseConfig:
    """Tell what more data or more epochs would bring, from short runs on fractions of a store.

    Attributes:
        runs: run folders, alike but for --fraction and --epochs; best with a constant rate (--final-lr 1).
    """

    runs: tuple[Path, ...]


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained draft as SGLang reads it.

    Attributes:
        run: run folder of eyas-draft train.
        out: draft folder to write.
        checkpoint: the best by held-out acceptance length, or the last.
        engine_version: SGLang's version, which decides how layer ids are written; empty for the newest known.
        golden: write the golden record too, from the run's store; eyas-serve probe compares servers with it.
    """

    run: Path
    out: Path
    checkpoint: Literal["best", "last"] = "best"
    engine_version: str = ""
    golden: bool = True


@dataclass(frozen=True)
class VerifyConfig:
    """Compare an exported draft, read afresh, with the trainer's weights on samples of the store.

    Attributes:
        run: run folder.
        draft: exported folder.
        store: folder written by eyas-extract.
        target: Hugging Face folder of the target.
        checkpoint: which checkpoint was exported.
        samples: how many samples to compare on.
    """

    run: Path
    draft: Path
    store: Path
    target: Path
    checkpoint: Literal["best", "last"] = "best"
    samples: int = 4


@dataclass(frozen=True)
class EvalConfig:
    """Measure a draft by real tree speculative decoding with the Hugging Face target.

    Attributes:
        draft: exported draft folder.
        target: Hugging Face folder of the target.
        prompts: JSONL, one conversation a line (`messages` or `conversations`); the assistant's last turn is dropped.
        steps: draft steps of a round (--speculative-num-steps).
        topk: branches (--speculative-eagle-topk).
        num_draft_tokens: nodes verified in a round, root included (--speculative-num-draft-tokens); 0: steps + 1.
        max_new_tokens: longest answer.
        limit: prompts read; 0 for all.
        batch_size: prompts decoded together.
        dtype: of both models.
        device: cpu, cuda, ...
        ops: tree and attention operations of eyas_native, or their plain torch statement.
        compare_greedy: also decode without the draft and compare token for token.
        out: report file (JSON), answers included; the numbers are printed either way.
    """

    draft: Path
    target: Path
    prompts: Path
    steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 0
    max_new_tokens: int = 128
    limit: int = 0
    batch_size: int = 32
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    ops: Literal["native", "torch"] = "native"
    compare_greedy: bool = False
    out: Path | None = None
