"""Run by SGLang's interpreter: the attention backend's way in, and a draft's own attention.

A draft's steps are compared with attention over the slots that SGLang lists for its Triton backend, by its own kernels
under Triton's interpreter; the native calls are replaced by their contract in float64. What is left is what is tested:
that the calls are given the right queries, keys, lengths and masks.
"""

# ruff: noqa: E402 -- SGLang can only be imported on a CPU once its process is prepared

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from eyas_serve.engine.cpu import prepare_cpu

prepare_cpu()

import torch
from sglang.kernels.ops.speculative.cache_locs import (
    assign_draft_cache_locs_contiguous,
    generate_draft_decode_kv_indices,
)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import draft_utils, eagle_utils
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from torch import Tensor

from eyas_serve.engine import attention, draft_attention

POOL, ROWS, COLUMNS, HEADS = 400, 8, 96, 4
SIZES = {"gqa": (2, 16, 16), "mla": (1, 24, 16)}  # key/value heads, widths of keys and values


def fits() -> None:
    """What our backend uses of the installed SGLang is there, and the tree is built in one launch."""
    attention.register()
    assert ATTENTION_BACKENDS["eyas"] is attention.EyasAttnBackend
    assert set(HookRegistry._hooks) == {attention.BUILD, attention.VERIFY, draft_attention.CHOICE}
    for method in (attention.TritonAttnBackend.forward_extend, attention.TritonAttnBackend.forward_decode):
        assert list(inspect.signature(method).parameters)[:6] == ["self", "q", "k", "v", "layer", "forward_batch"]
    for name, parameters in (("init_forward_metadata", ["self", "forward_batch"]),
                             ("init_forward_metadata_out_graph", ["self", "forward_batch", "in_capture"])):
        assert list(inspect.signature(getattr(attention.TritonAttnBackend, name)).parameters) == parameters
    source = inspect.getsource(attention.TritonAttnBackend)
    for name in ("num_draft_tokens", "speculative_num_steps", "topk", "req_to_token", "token_to_kv_pool", "use_mla",
                 "_set_kv_buffer", "device", "max_context_len", "is_draft_runner", "sliding_window_size", "dcp_size",
                 "page_size"):
        assert f"self.{name}" in source or f"def {name}" in source, name
    theirs = {name for name in vars(TritonMultiStepDraftBackend) if not name.startswith("_")}
    assert theirs - {"common_template"} <= set(dir(draft_attention.EyasMultiStepDraftBackend)), theirs
    built: list[tuple[Any, Any]] = []
    attention.native.tree_build = lambda *lists, **options: built.append((lists, options))
    links = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(3)]
    tree = [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([5, 6]),
            torch.zeros(2 * 3 * 3, dtype=torch.bool), torch.zeros(6, dtype=torch.int64), *links, 2, 2, 3, 1]
    attention.build_tree(*tree)
    assert built[-1][1]["words"] is None, "no backend, no words"
    attention.WORDS.reserve(4, 3, "cpu")
    attention.build_tree(*tree)
    assert len(built) == 2, "one launch a round"
    words, options = built[-1][1]["words"], built[-1][1]
    assert (words.data_ptr(), tuple(words.shape)) == (attention.WORDS.buffer.data_ptr(), (2, 3, 1))
    assert options["tree_mask"] is tree[3]
    assert options["mask_mode"] == 1
    assert options["retrive_next_sibling"] is links[2]


def softmax_over(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [T, H, Dk], keys [L, G, Dk], values [L, G, Dv], seen bool [T, L] -> [T, H, Dv]."""
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, keys.repeat_interleave(group, 1)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("htl,lhd->thd", weights, values.repeat_interleave(group, 1))


launches: list[tuple[int, ...]] = []  # the addresses that a recorded graph would keep


def tree_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Tensor, seq_lens: Tensor, *, max_tree: int,
                   scale: float, index_rows: Tensor, workspace: Tensor, max_seq_len: int, mask: Tensor | None = None,
                   q_start: Tensor | None = None, seq_lens_are_prefix: bool = False, tree_keys: int = 0) -> None:
    """The contract of `eyas_native.cuda.tree_attn_gqa`."""
    batch = seq_lens.shape[0]
    launches.append((k.data_ptr(), index.data_ptr(), seq_lens.data_ptr(), index_rows.data_ptr(), workspace.data_ptr(),
                     0 if mask is None else mask.data_ptr()))
    starts = [b * max_tree for b in range(batch + 1)] if q_start is None else q_start.tolist()
    assert q_start is not None or q.shape[0] == batch * max_tree
    assert (seq_lens.dtype, index_rows.dtype, workspace.numel()) == (torch.int64, torch.int64, 64)
    for b in range(batch):
        rows = starts[b + 1] - starts[b]
        covered = tree_keys or rows
        total = int(seq_lens[b]) + (covered if seq_lens_are_prefix else 0)
        assert rows <= max_tree
        assert 0 < covered <= total <= max_seq_len
        seen = torch.ones(rows, total, dtype=torch.bool)
        for i in range(rows):
            for j in range(covered):
                seen[i, total - covered + j] = j <= i + covered - rows if mask is None else bool(
                    int(mask[b, i, j // 32]) >> j % 32 & 1)
        slots = index[index_rows[b], :total].long()
        out[starts[b]:starts[b + 1]] = softmax_over(q[starts[b]:starts[b + 1]], k[slots], v[slots], seen, scale)


def plan(kind: str, **_: Any) -> dict[str, int]:
    return {"workspace_bytes": 64}


class Pool:
    """A cache of one layer."""

    def __init__(self, kind: str) -> None:
        heads, width, self.values = SIZES[kind]
        self.mla, self.dtype = kind == "mla", torch.float64
        self.k = torch.randn(POOL, heads, width, dtype=torch.float64)
        self.v = self.k[..., :self.values] if self.mla else torch.randn(POOL, heads, width, dtype=torch.float64)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, loc: Any, k: Tensor, v: Tensor, *_: Any) -> None:
        self.k[loc.loc] = k.view(-1, *self.k.shape[1:])
        if not self.mla:
            self.v[loc.loc] = v.view(-1, *self.v.shape[1:])


def triton_init(self: Any, runner: Any, *_: Any, **__: Any) -> None:
    """What of Triton's backend ours reads (their names are looked for in its source by `fits`)."""
    vars(self).update(
        num_draft_tokens=runner.nodes, topk=runner.topk, speculative_num_steps=5, device="cpu",
        req_to_token=runner.req_to_token, token_to_kv_pool=runner.pool, use_mla=runner.pool.mla,
        max_context_len=COLUMNS, is_draft_runner=runner.is_draft, sliding_window_size=None, dcp_size=1,
        page_size=1)


def make_runner(kind: str, topk: int, nodes: int) -> Any:
    table = torch.randperm(POOL)[:ROWS * 48].view(ROWS, 48).int()
    table = torch.cat((table, torch.zeros(ROWS, COLUMNS - 48, dtype=torch.int32)), 1)
    table[0] = 0  # where SGLang's padding points
    config = SimpleNamespace(hf_text_config=SimpleNamespace(), hf_config=SimpleNamespace())
    return SimpleNamespace(pool=Pool(kind), topk=topk, nodes=nodes, req_to_token=table, dtype=torch.float64,
                           model_config=config, draft_attention_backend=None, is_draft=True)


def make_layer(kind: str) -> Any:
    heads, width, values = SIZES[kind]
    return SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=heads, qk_head_dim=width, v_head_dim=values,
                           scaling=0.3, attn_type=AttentionType.DECODER, k_scale=None, v_scale=None)


def new_tokens(kind: str, count: int) -> list[Tensor]:
    heads, width, values = SIZES[kind]
    return [torch.randn(count, size, dtype=torch.float64) for size in (HEADS * width, heads * width, heads * values)]


def decode_steps(kind: str, topk: int, batch: int, steps: int) -> None:
    """All steps of a round, each against attention over the slots that SGLang lists for Triton."""
    runner, layer = make_runner(kind, topk, topk + 1), make_layer(kind)
    lens, rows = torch.tensor([7, 1, 20][:batch]), torch.tensor([3, 1, 6][:batch])
    bs, table = batch * topk, runner.req_to_token
    slots = torch.empty(bs * steps, dtype=torch.int64)
    assign_draft_cache_locs_contiguous[(batch,)](rows, table, lens, slots, COLUMNS, topk, steps)
    indices, indptr = torch.zeros(steps, bs * COLUMNS, dtype=torch.int64), torch.zeros(steps, bs + 1, dtype=torch.int32)
    generate_draft_decode_kv_indices[(steps, batch, topk)](
        rows, table, lens, indices, indptr, lens.repeat_interleave(topk), COLUMNS, indices.shape[1], indptr.shape[1],
        4, 8, 16, 1)
    places = per_step_draft_out_cache_loc(slots, batch, topk, steps)
    backend = draft_attention.EyasMultiStepDraftBackend(runner, topk, steps)
    backend.init_cuda_graph_state(batch, bs)
    assert len(backend.attn_backends) == steps - 1
    assert len({id(step.workspaces) for step in backend.attn_backends}) == 1
    for step, ours in enumerate(backend.attn_backends):
        forward = SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens=lens, req_pool_indices=rows,
                                  out_cache_loc=places[step])
        backend.init_forward_metadata_out_graph(forward)
        ours.forward(*new_tokens(kind, bs), layer, forward)
        q, k, v = new_tokens(kind, bs)
        found = ours.forward(q, k, v, layer, forward).view(bs, HEADS, -1)
        assert launches[-2] == launches[-1], "what a graph recorded stays where it is"
        assert launches[-1][1:4] == (table.data_ptr(), lens.data_ptr(), rows.data_ptr()), "the runner's own buffers"
        assert torch.equal(runner.pool.k[places[step]].flatten(1), k), "the step's own keys are in the cache"
        for query in range(bs):
            listed = indices[step, indptr[step, query]:indptr[step, query + 1]]
            assert listed.shape[0] == lens[query // topk] + step + 1
            wanted = softmax_over(q[query].view(1, HEADS, -1), runner.pool.k[listed], runner.pool.v[listed],
                                  torch.ones(1, listed.shape[0], dtype=torch.bool), layer.scaling)
            torch.testing.assert_close(found[query:query + 1], wanted, rtol=1e-12, atol=1e-12)


def draft_extension(kind: str, extended: list[int], padding: int) -> None:
    """Chains behind prefixes; `padding` further requests are what SGLang fills a recorded graph's batch with."""
    runner, layer = make_runner(kind, 4, max(extended)), make_layer(kind)
    prefix, rows = torch.tensor([9, 2, 21][:len(extended)]), torch.tensor([2, 7, 4][:len(extended)])
    slots = [runner.req_to_token[row, start:start + count].long()
             for row, start, count in zip(rows, prefix, extended, strict=True)]
    lengths = [*extended, *[max(extended)] * padding]
    zeros = torch.zeros(padding, dtype=torch.int64)
    forward = SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2, seq_lens=torch.cat((prefix + torch.tensor(extended), zeros + 1)),
        req_pool_indices=torch.cat((rows, zeros)), extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        out_cache_loc=torch.cat((*slots, torch.zeros(padding * max(extended), dtype=torch.int64))))
    q, k, v = new_tokens(kind, sum(lengths))
    backend = attention.EyasAttnBackend(runner)
    backend.init_forward_metadata_out_graph(forward)
    found = backend.forward(q, k, v, layer, forward).view(sum(lengths), HEADS, -1)
    assert found.isfinite().all()
    first = 0
    for row, start, count, new in zip(rows, prefix, extended, slots, strict=True):
        seen = torch.cat((runner.req_to_token[row, :start].long(), new))
        causal = torch.ones(count, len(seen), dtype=torch.bool).tril(int(start))
        mine = slice(first, first + count)
        assert torch.equal(runner.pool.k[new].flatten(1), k[mine])
        wanted = softmax_over(q[mine].view(count, HEADS, -1), runner.pool.k[seen], runner.pool.v[seen], causal,
                              layer.scaling)
        torch.testing.assert_close(found[mine], wanted, rtol=1e-12, atol=1e-12)
        first += count


def preparation() -> None:
    """Triton prepares what Triton attends to, and nothing else is prepared."""
    triton: list[tuple[ForwardMode, bool | None]] = []
    attention.TritonAttnBackend.init_forward_metadata = lambda self, batch: triton.append((batch.forward_mode, None))
    attention.TritonAttnBackend.init_forward_metadata_out_graph = lambda self, batch, in_capture: triton.append(
        (batch.forward_mode, in_capture))
    backend = attention.EyasAttnBackend(make_runner("gqa", 4, 16))
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND_V2):
        forward = SimpleNamespace(forward_mode=mode)
        backend.init_forward_metadata(forward)
        backend.init_forward_metadata_out_graph(forward, in_capture=True)
        backend.init_forward_metadata_out_graph(forward)
    assert triton == [(mode, how) for mode in (ForwardMode.EXTEND, ForwardMode.DECODE) for how in (None, True, False)]


def room() -> None:
    """A target's masks suffice for the largest batch that SGLang may record: with 6 ranks in two halves, 72 for 64."""
    runner = make_runner("gqa", 4, 16)
    runner.is_draft, runner.req_to_token_pool = False, SimpleNamespace(size=64)
    masks = attention.EyasAttnBackend(runner).mask_words
    assert masks is not None
    assert masks.shape[0] >= 72
    assert masks.shape[1:] == (16, 1)


def chosen(factory_class: Any, name: str) -> tuple[Any, Any]:
    """What the draft worker would get by this name: the backend of its steps and that of its extension."""
    factory = object.__new__(factory_class)
    vars(factory).update(draft_model_runner=make_runner("gqa", 4, 16), topk=4, speculative_num_steps=3,
                         draft_attn_backend=name, qsa_profile=None, server_args=SimpleNamespace(
                             decode_attention_backend=None, prefill_attention_backend=None, attention_backend="triton",
                             speculative_attention_mode="prefill"))
    for kind in ("decode", "prefill"):
        made = SimpleNamespace(attn_backends=[])
        setattr(factory, f"_create_triton_{kind}_backend",
                lambda made=made: ("triton", made) if hasattr(draft_utils, "attention_backends") else made)
    return factory.create_decode_backend(), factory.create_draft_extend_backend()


def said(kind: type[Exception], call: Callable[[], object]) -> str:
    """What an error of this kind says."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def selection() -> None:
    """SGLang's factory, with our hook applied by SGLang."""
    if hasattr(draft_utils, "attention_backends"):  # 0.5.20 asks the process's context instead of its arguments
        draft_utils.attention_backends = lambda: ("triton", "triton")
        draft_utils.get_spec = lambda: SimpleNamespace(speculative_attention_mode="prefill")
    HookRegistry.apply_hooks()
    steps, extension = chosen(draft_utils.DraftBackendFactory, "eyas")
    assert type(steps) is draft_attention.EyasMultiStepDraftBackend
    assert type(extension) is attention.EyasAttnBackend
    assert [backend.round_keys for backend in steps.attn_backends] == [10, 11]
    for backend in chosen(draft_utils.DraftBackendFactory, "triton"):
        assert type(backend) is SimpleNamespace
    assert "another" in said(ValueError, lambda: chosen(draft_utils.DraftBackendFactory, "another"))


def refusals() -> None:
    """A draft's faults are named."""
    runner = make_runner("gqa", 80, 300)
    runner.dtype = torch.float32
    del eagle_utils.sgl_build_tree_kernel_efficient
    text = said(attention.EngineFailure, lambda: attention.EyasAttnBackend(runner))
    for words in ("draft", "torch.float64 cache beside torch.float32", "trees of 300 nodes", "without sglang.srt",
                  "rounds of 400 drafted tokens"):
        assert words in text, text


torch.manual_seed(0)
fits()
attention.native.status = lambda: "available"
attention.native.attention_plan = plan
attention.native.tree_attn_gqa = tree_attention
attention.native.tree_attn_mla = lambda q, cache, out, *rest, **options: tree_attention(
    q, cache, cache[..., :out.shape[2]], out, *rest, **options)
attention.TritonAttnBackend.__init__ = triton_init
eagle_utils.sgl_build_tree_kernel_efficient = lambda: None  # SGLang imports it where there is a GPU
assert draft_attention.step_mask(4, 10, 2) == [[7, 0], [7 << 10, 0], [7 << 20, 0], [3 << 30, 1]], "across two words"
for kind in SIZES:
    for shape in ((1, 1, 3), (1, 3, 5), (4, 1, 4), (4, 3, 5), (9, 1, 4)):
        decode_steps(kind, *shape)
    for extended, padding in (([6], 0), ([5, 5, 5], 0), ([6, 6], 2), ([3, 1, 4], 0)):
        draft_extension(kind, extended, padding)
preparation()
room()
selection()
refusals()
print("equal")
