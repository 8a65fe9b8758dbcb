"""A draft's own steps with eyas-native's CUDA kernels: `--attention-backend eyas`, or a draft's own flag.

In a round SGLang's draft takes `num_steps - 1` decode steps, each with `topk` tokens a request. Their keys lie behind
the request's prefix in `req_to_token`, branch after branch: token j of step i is slot `prefix + j * num_steps + i`, and
sees the prefix and its own branch's slots up to step i (`assign_draft_cache_locs_contiguous` and
`generate_draft_decode_kv_indices` in `sglang/kernels/ops/speculative/cache_locs.py`, page size 1). SGLang's Triton
backend copies the prefix's slots for every branch and reads its keys as often. Here a step is one call with `topk`
queries a request, whose last keys are the round's slots under a constant mask: the prefix is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention import attention_registry

from eyas_serve.engine.attention import NAME, EyasAttnBackend, Workspaces, require_plain

if TYPE_CHECKING:
    from torch import Tensor

CHOICE = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def step_keys(topk: int, num_steps: int, step: int) -> int:
    """Slots of the round up to the last branch's token of this step; what lies behind them is not yet written."""
    return (topk - 1) * num_steps + step + 1


def step_mask(topk: int, num_steps: int, step: int) -> list[list[int]]:
    """For each branch the round's slots that it sees in a step, as unsigned 32-bit words, lowest slot first."""
    words = (step_keys(topk, num_steps, step) + 31) // 32
    rows = [((1 << (step + 1)) - 1) << (branch * num_steps) for branch in range(topk)]
    return [[row >> (32 * word) & 0xFFFFFFFF for word in range(words)] for row in rows]


class DraftStepBackend(EyasAttnBackend):
    """Attention of one step of a round.

    Args:
        model_runner: SGLang's runner of the draft.
        topk, num_steps, step: branches a request, steps a round, and which of them this is, from 0.
        workspaces: scratch memory, shared by the steps.
    """

    def __init__(self, model_runner: Any, topk: int, num_steps: int, step: int, workspaces: Workspaces | None) -> None:
        super().__init__(model_runner, skip_prefill=True)
        self.branches, self.round_keys = topk, step_keys(topk, num_steps, step)
        words = torch.tensor([step_mask(topk, num_steps, step)], dtype=torch.uint32)
        self.round_mask = words.view(torch.int32).to(self.device)  # [1, topk, words], the same for all requests
        self.workspaces = workspaces or self.workspaces

    def forward_decode(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **options: Any) -> Tensor:
        """q [requests * topk, H * Dqk], a request's branches side by side -> [requests * topk, H * Dv]."""
        require_plain(layer, options)
        self.store(k, v, layer, forward_batch, save_kv_cache)
        mask = self.round_mask.expand(forward_batch.seq_lens.shape[0], -1, -1)
        return self.attend(q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim), layer, forward_batch,
                           max_tree=self.branches, tree_keys=self.round_keys, seq_lens_are_prefix=True, mask=mask)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing: the kernels read the batch's own tensors."""


class EyasMultiStepDraftBackend:
    """The steps of a round, as SGLang's draft worker and its graph runner want them.

    Args:
        model_runner: SGLang's runner of the draft.
        topk, speculative_num_steps: branches a request and steps a round; the last step only picks tokens.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends: list[DraftStepBackend] = []
        for step in range(speculative_num_steps - 1):
            shared = self.attn_backends[0].workspaces if self.attn_backends else None
            self.attn_backends.append(DraftStepBackend(model_runner, topk, speculative_num_steps, step, shared))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: masks and workspaces keep their addresses anyway."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing: the kernels read the batch's own tensors."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing: a recorded graph reads lengths and rows from the runner's buffers, refilled before each replay."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing."""


def with_ours(create: Callable[..., Any], factory: Any, backend_name: str, backend_map: dict[str, Any],
              *arguments: Any, **options: Any) -> Any:
    """Around SGLang's choice of a draft's backend by name, which it makes from one map for decoding and one for
    extending: the maps with `eyas` in them. Later versions want a name beside the backend, to stamp it with."""
    runner = factory.draft_model_runner

    def make() -> Any:
        ours = EyasMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps) if (
            backend_map["triton"] == factory._create_triton_decode_backend) else EyasAttnBackend(runner)
        return (NAME, ours) if hasattr(attention_registry, "attn_backend_wrapper_for_draft_decode") else ours

    return create(factory, backend_name, {**backend_map, NAME: make}, *arguments, **options)
