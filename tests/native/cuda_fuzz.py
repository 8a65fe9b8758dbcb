"""Random cases for the CUDA kernels against float64 references. Needs a CUDA device.

    python tests/native/cuda_fuzz.py --cases 200 --seed 0        prints one line per kernel, exit code 1 on any failure

Unused cache slots and outputs start as NaN, so a read of a wrong slot or an unwritten row cannot pass.
"""

from __future__ import annotations

import argparse
import math
import random
import sys

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
    lens = [p + t for p, t in zip(prefixes, trees, strict=True)]
    window = rng.choice([0, 0, 0, 1, 7, 100])
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
    use_mask = rng.random() < 0.85
    words = -(-top // 32) + rng.choice([0, 0, 1])
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
        parents = random_parents(t, rng) if use_mask else list(range(-1, t - 1))
        sees = ancestors(parents)
        mask[b, :t] = pack_words(sees, words)
        depth = sees.sum(1) - 1
        position = prefixes[b] + depth
        positions.append(position)
        key_position = torch.cat([torch.arange(prefixes[b]), position])
        visible = torch.cat([torch.ones(t, prefixes[b], dtype=torch.bool), sees], 1)
        if window:
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
    args = dict(
        max_tree=top,
        max_seq_len=max(lens),
        scale=scale,
        mask=mask.to(DEVICE) if use_mask else None,
        lse=lse,
        index_rows=None if flat else table_rows.to(DEVICE),
        index_start=starts.to(DEVICE) if flat else None,
        q_start=torch.tensor([0, *trees]).cumsum(0).to(torch.int32).to(DEVICE) if ragged else None,
        positions=torch.cat(positions).to(DEVICE),
        seq_lens_are_prefix=prefix_lens,
        window=window,
        k_scale=k_scale,
        config=random_config(rng),
        workspace=torch.full((1 << 28,), 255, dtype=torch.uint8, device=DEVICE),
    )
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
        f"error {error:.2e} worst row {worst:.2e} lse {lse_error:.2e}: {dtype} e4m3={e4m3} trees={trees} heads={heads}/{groups} D={dk} "
        f"page={page} prefixes={prefixes} window={window} mask={use_mask} flat={flat} ragged={ragged} {args['config']}"
    )


def gather_case(rng: random.Random) -> str | None:
    dtype = rng.choice([torch.bfloat16, torch.float16])
    count, width, rows = rng.randint(1, 8), 8 * rng.choice([1, 5, 64, 129, 512, 896]), rng.choice([1, 7, 64, 300])
    norm, out_dtype = (
        rng.choice(list(cuda.NORMS)),
        rng.choice([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    )
    pool = 400
    sources = [torch.randn(pool, width + 8, device=DEVICE, dtype=dtype)[:, :width] for _ in range(count)]
    residuals = [
        torch.randn(pool, width + 8, device=DEVICE, dtype=dtype)[:, :width] if rng.random() < 0.3 else None
        for _ in sources
    ]
    index = torch.randint(0, pool, (rows,), device=DEVICE, dtype=rng.choice([torch.int32, torch.int64]))
    weight = torch.randn(count * width, device=DEVICE, dtype=dtype)
    dynamic = out_dtype == torch.float8_e4m3fn and rng.random() < 0.5
    row_scale = torch.full((rows,), NAN, device=DEVICE) if dynamic else None
    out = torch.full((rows, count * width), NAN).to(out_dtype).to(DEVICE)
    use_index = rng.random() < 0.8
    cuda.hidden_gather(
        sources,
        index if use_index else None,
        out,
        residuals=residuals,
        norm=norm,
        weight=weight,
        eps=1e-5,
        out_scale=0.25 if out_dtype == torch.float8_e4m3fn else 1.0,
        row_scale=row_scale,
    )
    torch.cuda.synchronize()
    picked = index.long() if use_index else torch.arange(rows, device=DEVICE)
    parts = [(s if r is None else s + r)[picked].double() for s, r in zip(sources, residuals, strict=True)]
    if norm == "per_source":
        parts = [p * (p.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for p in parts]
    ref = torch.cat(parts, -1)
    if norm == "whole":
        ref = ref * (ref.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    if norm != "none":
        ref = ref * weight.double()
    got = out.float().double()
    if out_dtype == torch.float8_e4m3fn:
        got = got * (row_scale.double()[:, None] if dynamic else 0.25)
        ref = ref if dynamic else ref.clamp(-112, 112)
    if rows == 0:
        return None
    error = ((got - ref).norm() / ref.norm()).item()
    limit = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float8_e4m3fn: 4e-2}[out_dtype]
    exact = norm == "none" and out_dtype == dtype and all(r is None for r in residuals)
    if exact:
        limit = 0.0
    if error <= limit:
        return None
    return f"error {error:.2e}: {dtype}->{out_dtype} sources={count} width={width} rows={rows} norm={norm} dynamic={dynamic}"


def tree_reference(parents: list[int], seq_len: int, b: int):
    n = len(parents)
    sees = ancestors(parents)
    positions = [seq_len + int(sees[i].sum()) - 1 for i in range(n)]
    child = [next((j for j in range(i + 1, n) if parents[j] == i), -1) for i in range(n)]
    sibling = [next((j for j in range(i + 1, n) if parents[j] == parents[i]), -1) if i else -1 for i in range(n)]
    return sees, positions, [b * n + i for i in range(n)], child, sibling


def random_score_table(n: int, topk: int, depth: int, rng: random.Random):
    """Parents, selected entries and parent list as SGLang's draft loop makes them."""
    parent_list = [-1, *range(topk)]
    for step in range(1, depth - 1):
        base = topk + topk * topk * (step - 1)
        chosen = sorted(rng.sample(range(topk * topk), topk))
        parent_list += [base + c for c in chosen]
    parent_list = parent_list[: topk * (depth - 1) + 1] if depth > 1 else []
    flat_parent = {i: None for i in range(topk)}
    for step in range(1, depth):
        for j in range(topk * topk):
            entry = topk + topk * topk * (step - 1) + j
            flat_parent[entry] = parent_list[entry // topk]
    chosen: list[int] = []
    for entry in sorted(flat_parent):
        if len(chosen) == n - 1:
            break
        p = flat_parent[entry]
        if (p is None or p in chosen) and (rng.random() < 0.7 or len(flat_parent) - entry <= n - 1 - len(chosen)):
            chosen.append(entry)
    parents = [-1] + [0 if flat_parent[e] is None else chosen.index(flat_parent[e]) + 1 for e in chosen]
    return parents, chosen, parent_list


def tree_case(rng: random.Random) -> str | None:
    """Build, greedy verify, commit and KV move of one random batch, each bit for bit against Python."""
    topk, depth = rng.randint(1, 8), rng.randint(1, 8)
    tables = [random_score_table(rng.choice([4, 16, 32, 64, 200]), topk, depth, rng)]
    n = len(tables[0][1]) + 1
    batch = rng.randint(1, 5)
    while len(tables) < batch:
        table = random_score_table(n, topk, depth, rng)
        if len(table[1]) + 1 == n:
            tables.append(table)
        elif rng.random() < 0.3:
            tables.append(tables[0])
    lens = [rng.randint(0, 500) for _ in range(batch)]
    mode = rng.choice([0, 1, 3] + ([2] if n <= 32 else []))
    dev = {"device": DEVICE, "dtype": torch.int64}
    positions, (index, child, sibling) = (
        torch.full((batch * n,), -7, **dev),
        (torch.full((batch, n), -7, **dev) for _ in range(3)),
    )
    width = (n + 31) // 32
    kind = {
        0: torch.bool,
        1: torch.bool,
        3: torch.int32,
        2: torch.uint8 if n <= 8 else torch.int16 if n <= 16 else torch.int32,
    }[mode]
    size = {0: n * n * batch + n * sum(lens), 1: batch * n * n, 2: batch * n, 3: batch * n * width}[mode]
    mask = torch.ones(size, dtype=kind, device=DEVICE)
    invalid = torch.full((batch,), 9, dtype=torch.int32, device=DEVICE)
    cuda.tree_build(
        torch.tensor([t[2] for t in tables], **dev),
        torch.tensor([t[1] for t in tables], **dev),
        torch.tensor(lens, **dev),
        topk=topk,
        depth=depth,
        num_nodes=n,
        mask_mode=mode,
        tree_mask=mask,
        positions=positions,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        invalid=invalid,
    )
    torch.cuda.synchronize()
    refs = [tree_reference(t[0], lens[b], b) for b, t in enumerate(tables)]
    for name, got, want in (
        ("positions", positions, [p for r in refs for p in r[1]]),
        ("index", index, [r[2] for r in refs]),
        ("child", child, [r[3] for r in refs]),
        ("sibling", sibling, [r[4] for r in refs]),
        ("invalid", invalid, [0] * batch),
    ):
        if got.tolist() != want:
            return f"tree_build {name}: {got.tolist()} wanted {want}"
    if mode == 0:
        want = torch.cat(
            [torch.cat([torch.ones(n, lens[b], dtype=torch.bool), r[0]], 1).flatten() for b, r in enumerate(refs)]
        )
    elif mode == 1:
        want = torch.cat([r[0].flatten() for r in refs])
    else:
        want = torch.cat([pack_words(r[0], width) for r in refs]).flatten()
    got = (
        mask.cpu()
        if mode < 2
        else mask.cpu().to(torch.int64)
        & (0xFF if n <= 8 and mode == 2 else 0xFFFF if n <= 16 and mode == 2 else 2**32 - 1)
    )
    if not torch.equal(got, want if mode < 2 else want.to(torch.int64) & (2**32 - 1)):
        return f"tree_build mask mode {mode} n={n}"

    tokens = torch.randint(0, 4, (batch, n), **dev)
    target = torch.randint(0, 4, (batch, n), **dev)
    width = rng.randint(1, min(depth + 1, n))
    predicts = torch.zeros(batch * n, dtype=torch.int32, device=DEVICE)
    accepted = torch.full((batch, width), 77, dtype=torch.int32, device=DEVICE)
    count = torch.full((batch,), 77, dtype=torch.int32, device=DEVICE)
    cuda.verify_greedy(predicts, accepted, count, tokens, index, child, sibling, target)
    want_predicts, want_accepted, want_count = [0] * (batch * n), [], []
    for b, r in enumerate(refs):
        last, path = 0, [0]
        while len(path) < width:
            c = r[3][last]
            while c >= 0 and tokens[b, c] != target[b, last]:
                c = r[4][c]
            if c < 0:
                break
            want_predicts[b * n + last] = int(target[b, last])
            path.append(c)
            last = c
        want_predicts[b * n + last] = int(target[b, last])
        want_accepted.append([b * n + i for i in path] + [-1] * (width - len(path)))
        want_count.append(len(path) - 1)
    if predicts.tolist() != want_predicts or accepted.tolist() != want_accepted or count.tolist() != want_count:
        return f"verify_greedy {accepted.tolist()} wanted {want_accepted}"

    slots = torch.randperm(batch * n + 9, device=DEVICE)[: batch * n]
    lens_out, bonus = torch.empty(batch, dtype=torch.int32, device=DEVICE), torch.empty(batch, **dev)
    outs = [torch.full((batch, width), 5, **dev) for _ in range(4)]
    cuda.accept_commit(
        predicts,
        accepted,
        count,
        slots,
        accept_lens=lens_out,
        tokens=outs[0],
        src_loc=outs[1],
        tgt_loc=outs[2],
        rows=outs[3],
        bonus=bonus,
    )
    buffers = [
        torch.randn(batch * n + 9, 8 * rng.choice([1, 16, 72]), device=DEVICE, dtype=torch.bfloat16) for _ in range(3)
    ]
    wanted = [x.clone() for x in buffers]
    for b in range(batch):
        for i in range(want_count[b] + 1):
            node = want_accepted[b][i]
            for x, y in zip(wanted, buffers, strict=True):
                x[slots[b * n + i]] = y[slots[node]]
    cuda.kv_move(
        torch.tensor([x.data_ptr() for x in buffers], **dev),
        torch.tensor([x.shape[1] * 2 for x in buffers], **dev),
        outs[2],
        outs[1],
    )
    torch.cuda.synchronize()
    want_tokens = [[want_predicts[i] if i >= 0 else -1 for i in row] for row in want_accepted]
    if (
        outs[0].tolist() != want_tokens
        or outs[3].tolist() != want_accepted
        or lens_out.tolist() != [c + 1 for c in want_count]
    ):
        return f"accept_commit tokens {outs[0].tolist()} wanted {want_tokens}"
    if bonus.tolist() != [row[c] for row, c in zip(want_tokens, want_count, strict=True)]:
        return f"accept_commit bonus {bonus.tolist()}"
    if not all(torch.equal(x, y) for x, y in zip(buffers, wanted, strict=True)):
        return f"kv_move batch={batch} n={n}"
    return None


def target_only_case(rng: random.Random) -> str | None:
    """Many requests with one tree and fresh coins: first tokens must follow the target's distribution (chi-square)."""
    n, vocab, batch = 6, rng.choice([7, 130, 1500]), 20000
    parents = [-1, 0, 0, 0, 1, 4]
    _, _, _, child, sibling = tree_reference(parents, 0, 0)
    probs = torch.rand(1, n, vocab, device=DEVICE).pow(3)
    probs = probs / probs.sum(-1, keepdim=True)
    tokens = torch.stack([torch.randperm(vocab, device=DEVICE)[:n] for _ in range(1)]).repeat(batch, 1)
    ids = torch.arange(batch * n, device=DEVICE).view(batch, n)
    predicts = torch.full((batch * n,), -1, dtype=torch.int32, device=DEVICE)
    accepted = torch.empty(batch, 4, dtype=torch.int32, device=DEVICE)
    count = torch.empty(batch, dtype=torch.int32, device=DEVICE)
    cuda.verify_target_only(
        predicts,
        accepted,
        count,
        tokens,
        ids,
        torch.tensor(child, device=DEVICE).repeat(batch, 1),
        torch.tensor(sibling, device=DEVICE).repeat(batch, 1),
        torch.rand(batch, n, device=DEVICE),
        torch.rand(batch, device=DEVICE),
        probs.repeat(batch, 1, 1),
    )
    torch.cuda.synchronize()
    first = predicts.view(batch, n)[:, 0]
    if first.min() < 0 or first.max() >= vocab:
        return f"target_only: token out of range {first.min().item()}..{first.max().item()}"
    seen = torch.bincount(first.long(), minlength=vocab).double()
    expected = probs[0, 0].double() * batch
    big = expected >= 5
    chi = ((seen - expected)[big].square() / expected[big]).sum().item()
    freedom = int(big.sum()) - 1
    if chi > freedom + 6 * math.sqrt(2 * freedom) + 6:
        return f"target_only: chi-square {chi:.0f} for {freedom} degrees of freedom, vocabulary {vocab}"
    return None


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

    def launch() -> None:
        cuda.tree_attn_gqa(
            q, k, v, out, index, lens, max_tree=t, max_seq_len=top, scale=0.1, mask=mask, workspace=space
        )

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
                return f"graph replay: error {error:.2e} at lengths {now}"
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


KERNELS = {
    "tree_attn_gqa": (lambda rng: attention_case(rng, mla=False), 1.0),
    "tree_attn_mla": (lambda rng: attention_case(rng, mla=True), 0.5),
    "hidden_gather": (gather_case, 1.0),
    "tree": (tree_case, 1.0),
    "target_only": (target_only_case, 0.03),
    "graph": (graph_case, 0.02),
    "lse_combine": (combine_case, 0.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KERNELS))
    args = parser.parse_args()
    failed = 0
    for name, (case, share) in KERNELS.items():
        if args.only not in (None, name):
            continue
        faults, count = [], max(1, round(args.cases * share))
        for i in range(count):
            torch.manual_seed(args.seed * 100003 + i)
            fault = case(random.Random(args.seed * 100003 + i))
            if fault:
                faults.append(f"  case {i}: {fault[:600]}")
        failed += len(faults)
        print(f"{name}: {count - len(faults)} of {count} agree", *faults[:6], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
