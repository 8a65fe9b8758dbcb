"""Random attention launches on a CUDA device, each against a float64 reference. Returns None, or what differs.

Unused cache slots and outputs start as NaN, so a read of a wrong slot or an unwritten row cannot pass.
"""

from __future__ import annotations

import math
import random

import torch

from eyas_native import cuda

DEVICE = "cuda"
TOLERANCE = {"bfloat16": 6e-3, "float16": 1.5e-3}  # ||out - ref|| / ||ref||: probabilities and result rounded once each
NAN = float("nan")


def random_parents(n: int, rng: random.Random) -> list[int]:
    width = rng.choice([1, 2, 6, n])
    return [-1] + [rng.randrange(max(0, i - width), i) for i in range(1, n)]


def ancestors(parents: list[int]) -> torch.Tensor:
    """bool [n, n]: node i sees itself and its ancestors."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for i, p in enumerate(parents):
        if p >= 0:
            sees[i] |= sees[p]
    return sees


def pack_words(sees: torch.Tensor, words: int) -> torch.Tensor:
    bits = torch.zeros(sees.shape[0], words * 32, dtype=torch.int64)
    bits[:, : sees.shape[1]] = sees
    values = (bits.view(sees.shape[0], words, 32) << torch.arange(32)).sum(-1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def attention_reference(q, k, v, visible, scale):
    """float64 [T, H, Dv] and natural log-sum-exp [T, H]; k [L, G, D], v [L, G, Dv], visible [T, L]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("thd,lhd->thl", q.double(), k) * scale
    s.masked_fill_(~visible[:, None, :], -math.inf)
    return torch.einsum("thl,lhd->thd", s.softmax(-1), v), s.logsumexp(-1)


def random_config(rng: random.Random) -> cuda.TileConfig:
    return cuda.TileConfig(
        smem_bytes=rng.choice([0, 101376]),
        num_splits=rng.choice([0, 0, 1, 2, 3, 7, 40]),
        stages=rng.choice([0, 0, 2]),
        overlap=rng.random() < 0.5,
    )


def random_choice(queries: int, keys: int) -> torch.Tensor:
    """bool [queries, keys]: what each query of a draft's step sees behind the prefix, the first key always."""
    sees = torch.rand(queries, keys) < 0.3
    sees[:, 0] = True
    return sees


def attention_case(rng: random.Random, mla: bool) -> str | None:
    """One random launch; None when it agrees with the reference, else what differs."""
    dtype = rng.choice([torch.bfloat16, torch.float16])
    e4m3 = rng.random() < 0.3
    batch, ragged, prefix_lens = rng.randint(1, 4), rng.random() < 0.5, rng.random() < 0.5
    top = rng.choice([1, 2, 5, 16, 33, 64, rng.randint(65, 256)])
    trees = [rng.randint(1, top) if ragged else top for _ in range(batch)]
    top = max(trees)
    heads = rng.choice([8, 16, 64, 128, 3]) if mla else 0
    groups = 1 if mla else rng.choice([1, 2, 4, 8])
    heads = heads or groups * rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16])
    if top * heads > 4096:
        heads = groups
    dk = 576 if mla else rng.choice([64, 96, 128, 128, 192, 256])
    dv = 512 if mla else dk
    page = rng.choice([1, 1, 2, 3, 16, 64])
    prefixes = [rng.choice([0, 1, 31, rng.randint(0, 300), rng.randint(0, 3000)]) for _ in range(batch)]
    tree_keys = rng.choice([0, 0, 1, 20, rng.randint(1, 256)])
    masked = [tree_keys or t for t in trees]  # keys that the mask covers
    lens = [p + t for p, t in zip(prefixes, masked, strict=True)]
    window = 0 if tree_keys else rng.choice([0, 0, 0, 1, 7, 100])
    scale, k_scale, v_scale = rng.choice([1.0, 3.0]) / math.sqrt(dk), 1.0, 1.0

    pages = [-(-n // page) for n in lens]
    total = sum(pages) + 3
    order = torch.randperm(total)[: sum(pages)].to(torch.int32).split(pages)
    if e4m3:
        k_scale, v_scale = 0.5, 0.5 if mla else 2.0
        cache = torch.full((2, total, page, groups, dk), NAN).to(torch.float8_e4m3fn).to(DEVICE)
    else:
        cache = torch.full((2, total, page, groups, dk), NAN, dtype=dtype, device=DEVICE)
    q = (torch.randn(sum(trees), heads, dk, device=DEVICE) * rng.choice([0.3, 1.0, 4.0])).to(dtype)
    out = torch.full((sum(trees), heads, dv), NAN, dtype=dtype, device=DEVICE)
    lse = torch.full((sum(trees), heads), NAN, device=DEVICE)
    use_mask = tree_keys > 0 or rng.random() < 0.85
    one_mask = random_choice(top, tree_keys) if tree_keys and rng.random() < 0.5 else None
    words = -(-(tree_keys or top) // 32) + rng.choice([0, 0, 1])
    mask = torch.zeros(batch, top, words, dtype=torch.int32)
    expected, expected_lse, positions, start = [], [], [], 0
    for b in range(batch):
        n, t = lens[b], trees[b]
        rows = torch.randn(2, pages[b], page, groups, dk, device=DEVICE)
        cache[:, order[b].long().to(DEVICE)] = rows.to(cache.dtype)
        if n % page:  # what lies behind the request's end must not be read
            cache[:, int(order[b][-1]), n % page :] = torch.full((1,), NAN).to(cache.dtype).to(DEVICE)
        used = cache[:, order[b].long().to(DEVICE)].flatten(1, 2)[:, :n].float()
        k = used[0] * k_scale
        v = used[0, :, :, :dv] * v_scale if mla else used[1] * v_scale
        if tree_keys:
            sees = random_choice(t, tree_keys) if one_mask is None else one_mask[:t]
        else:
            sees = ancestors(random_parents(t, rng) if use_mask else list(range(-1, t - 1)))
        mask[b, :t] = pack_words(sees, words)
        position = prefixes[b] + sees.sum(1) - 1  # of a tree's nodes
        positions.append(position)
        visible = torch.cat([torch.ones(t, prefixes[b], dtype=torch.bool), sees], 1)
        if window:
            key_position = torch.cat([torch.arange(prefixes[b]), position])
            visible &= position[:, None] - key_position[None, :] < window
        ref = attention_reference(q[start : start + t], k, v, visible.to(DEVICE), scale)
        expected.append(ref[0])
        expected_lse.append(ref[1])
        start += t
    ref, ref_lse = torch.cat(expected), torch.cat(expected_lse)

    flat = rng.random() < 0.5
    longest = max(pages)
    table = torch.full((batch + 2, longest + 5), 2**30, dtype=torch.int32)
    table_rows = torch.randperm(batch + 2)[:batch]
    for b in range(batch):
        table[table_rows[b], : pages[b]] = order[b]
    starts = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)[:-1]
    one = mask if one_mask is None else pack_words(one_mask, words)[None]
    device_mask = one.to(DEVICE).expand(batch, -1, -1)
    config, kind = random_config(rng), "mla" if mla else "gqa"
    plan = cuda.attention_plan(
        kind, batch=batch, max_tree=top, num_q_heads=heads, num_kv_heads=groups, max_seq_len=max(lens), head_dim=dk,
        dtype=str(dtype).rsplit(".", 1)[-1], kv_dtype="float8_e4m3fn" if e4m3 else None, window=window, config=config,
    )  # fmt: skip
    args = {
        "max_tree": top,
        "max_seq_len": max(lens),
        "scale": scale,
        "mask": device_mask if use_mask else None,
        "tree_keys": tree_keys,
        "lse": lse,
        "index_rows": None if flat else table_rows.to(DEVICE),
        "index_start": starts.to(DEVICE) if flat else None,
        "q_start": torch.tensor([0, *trees]).cumsum(0).to(torch.int32).to(DEVICE) if ragged else None,
        "positions": None if tree_keys else torch.cat(positions).to(DEVICE),
        "seq_lens_are_prefix": prefix_lens,
        "window": window,
        "k_scale": k_scale,
        "config": config,
        "workspace": torch.full((max(16, plan["workspace_bytes"]),), 255, dtype=torch.uint8, device=DEVICE),
    }
    index = (torch.cat(order) if flat else table).to(DEVICE)
    seq_lens = torch.tensor(prefixes if prefix_lens else lens).to(DEVICE)
    if page == 1:
        cache = cache.flatten(1, 2)
    if mla:
        cuda.tree_attn_mla(q, cache[0], out, index, seq_lens, **args)
    else:
        cuda.tree_attn_gqa(q, cache[0], cache[1], out, index, seq_lens, v_scale=v_scale, **args)
    torch.cuda.synchronize()
    error = ((out.double() - ref).norm() / ref.norm()).item()
    worst = ((out.double() - ref).norm(dim=-1) / ref.norm(dim=-1).clamp_min(0.05)).max().item()
    lse_error = (lse.double() - ref_lse).abs().max().item()
    limit = TOLERANCE[str(dtype).rsplit(".", 1)[-1]]
    if error < limit and worst < 4 * limit and lse_error < 2e-3:
        return None
    return (
        f"error {error:.2e} worst row {worst:.2e} lse {lse_error:.2e}: {dtype} e4m3={e4m3} "
        f"trees={trees} heads={heads}/{groups} D={dk} "
        f"page={page} prefixes={prefixes} window={window} mask={use_mask} "
        f"tree_keys={tree_keys} flat={flat} ragged={ragged} {args['config']}"
    )


def graph_case(rng: random.Random) -> str | None:
    """A captured launch replayed with other lengths, cache and mask contents."""
    heads, groups, d, t, top = 16, 2, 128, 16, 3000
    k, v = (torch.randn(2 * top, groups, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    q, out = (
        torch.randn(2 * t, heads, d, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(2 * t, heads, d, device=DEVICE, dtype=torch.bfloat16),
    )
    index = torch.randperm(2 * top, device=DEVICE).to(torch.int32).view(2, top)
    lens = torch.tensor([t, t], device=DEVICE)
    mask = torch.zeros(2, t, 1, dtype=torch.int32, device=DEVICE)
    space = torch.empty(1 << 26, dtype=torch.uint8, device=DEVICE)
    options: cuda.Options = {"max_tree": t, "max_seq_len": top, "scale": 0.1, "mask": mask, "workspace": space}
    options["config"] = cuda.TileConfig(overlap=rng.random() < 0.5)

    def launch() -> None:
        cuda.tree_attn_gqa(q, k, v, out, index, lens, **options)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        now = [rng.randint(t, top) for _ in range(2)]
        sees = [ancestors(random_parents(t, rng)) for _ in range(2)]
        lens.copy_(torch.tensor(now))
        mask.copy_(torch.stack([pack_words(s, 1) for s in sees]))
        q.normal_()
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        for b in range(2):
            slots = index[b, : now[b]].long()
            visible = torch.cat([torch.ones(t, now[b] - t, dtype=torch.bool), sees[b]], 1).to(DEVICE)
            ref, _ = attention_reference(q[b * t : b * t + t], k[slots], v[slots], visible, 0.1)
            error = ((out[b * t : b * t + t].double() - ref).norm() / ref.norm()).item()
            if not error < TOLERANCE["bfloat16"]:
                return f"graph replay: error {error:.2e} at lengths {now} {options['config']}"
    return None


def combine_case(rng: random.Random) -> str | None:
    n, rows, d = rng.randint(1, 9), rng.randint(1, 70), rng.choice([64, 96, 512])
    outs, lses = torch.randn(n, rows, d, device=DEVICE, dtype=torch.float16), torch.randn(n, rows, device=DEVICE) * 5
    empty = torch.rand(n, rows, device=DEVICE) < 0.2
    lses[empty], outs[empty] = -math.inf, NAN
    out, lse = torch.full((rows, d), NAN, device=DEVICE, dtype=torch.float16), torch.empty(rows, device=DEVICE)
    cuda.lse_combine(outs, lses, out, lse)
    weights = torch.nan_to_num(lses.double().softmax(0))
    ref = (weights[..., None] * torch.nan_to_num(outs.double())).sum(0)
    want = lses.double().logsumexp(0)
    good = torch.isfinite(want)
    error = ((out.double() - ref).norm() / ref.norm().clamp_min(1e-9)).item()
    if error < 1e-3 and torch.equal(torch.isfinite(lse), good) and (lse.double() - want)[good].abs().sum() < 1e-3:
        return None
    return f"lse_combine error {error:.2e} n={n} rows={rows} D={d}"
