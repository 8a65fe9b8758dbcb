"""Random trees, verifications and gathers on a CUDA device against Python references. Returns None, or what differs."""

from __future__ import annotations

import math
import random

import torch
from cuda_cases import DEVICE, NAN, ancestors, pack_words, random_parents

import eyas_native
from eyas_native import cuda


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
    return f"error {error:.2e}: {dtype}->{out_dtype} sources={count} width={width} rows={rows} {norm} {dynamic}"


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
    flat_parent = dict.fromkeys(range(topk))
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
    words = torch.full((batch, n, width), -7, dtype=torch.int32, device=DEVICE) if rng.random() < 0.5 else None
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
        words=words,
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
    if words is not None and not torch.equal(words.cpu(), torch.stack([pack_words(r[0], width) for r in refs])):
        return f"tree_build words, mode {mode} n={n}"
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


def from_mask_case(rng: random.Random) -> str | None:
    """tree_from_mask and tree_validate of random masks, some of them broken, against the CPU backend bit for bit."""
    n, batch = rng.choice([1, 2, 9, 16, 33, 64, 130, 256]), rng.randint(1, 6)
    masks = torch.stack([ancestors(random_parents(n, rng)) for _ in range(batch)])
    lens = torch.tensor([rng.randint(0, 1 << 20) for _ in range(batch)])
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    results = []
    for device, call in (("cpu", eyas_native.tree_from_mask), (DEVICE, cuda.tree_from_mask)):
        out = {name: torch.full((batch, n), -7, device=device) for name in names}
        out["positions"] = torch.full((batch * n,), -7, device=device)
        call(masks.to(device), lens.to(device), **out)
        results.append(out)
    differing = [name for name in results[0] if not torch.equal(results[0][name], results[1][name].cpu())]
    for _ in range(rng.randint(0, 2 * n)):
        b, i, j = rng.randrange(batch), rng.randrange(n), rng.randrange(n)
        masks[b, i, j] = ~masks[b, i, j]
    orphans = [int(any(not masks[b, i, :i].any() for i in range(1, n))) for b in range(batch)]
    on_device, invalid = masks.to(DEVICE), torch.full((batch,), 9, dtype=torch.int32, device=DEVICE)
    codes = torch.full((batch, n), 77, dtype=torch.uint8, device=DEVICE)
    cuda.tree_validate(on_device, codes)
    cuda.tree_from_mask(on_device, lens.to(DEVICE), **results[1], invalid=invalid)
    found, wanted = eyas_native.tree_faults(codes), eyas_native.tree_validate(masks)
    if found != wanted:
        return f"tree_validate: {found[:3]} wanted {wanted[:3]}, {batch} trees of {n} nodes"
    if differing or invalid.tolist() != orphans:
        return f"tree_from_mask: {differing}, invalid {invalid.tolist()} wanted {orphans}, {batch} trees of {n} nodes"
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


def rejection_case(rng: random.Random) -> str | None:
    """Random trees and distributions: the CPU's answer, and over many draws the target's distribution (chi-square)."""
    n, vocab, batch, replacement = 6, rng.choice([7, 130, 1500]), 20000, rng.random() < 0.5
    parents = [-1, 0, 0, 0, 1, 4]
    _, _, _, child, sibling = tree_reference(parents, 0, 0)
    target, draft = (torch.rand(2, n, vocab, device=DEVICE).pow(3) + 1e-6)
    target, draft = (x / x.sum(-1, keepdim=True) for x in (target, draft))
    tokens = torch.zeros(batch, n, dtype=torch.int64, device=DEVICE)
    tokens[:, 1:4] = torch.multinomial(draft[0].expand(batch, -1), 3, replacement=replacement)
    tokens[:, 4] = torch.multinomial(draft[1], batch, replacement=True)
    tokens[:, 5] = torch.multinomial(draft[4], batch, replacement=True)
    links = [torch.arange(batch * n, device=DEVICE).view(batch, n)]
    links += [torch.tensor(x, device=DEVICE).repeat(batch, 1) for x in (child, sibling)]
    inputs = [torch.rand(batch, n, device=DEVICE), torch.rand(batch, device=DEVICE),
              target.repeat(batch, 1, 1), draft.repeat(batch, 1, 1)]
    results = []
    for device, call in (("cuda", cuda.verify_rejection), ("cpu", eyas_native.verify_rejection)):
        count = batch if device == "cuda" else 500
        out = [torch.full((count * n,), -1, dtype=torch.int32, device=device),
               torch.empty(count, 4, dtype=torch.int32, device=device),
               torch.empty(count, dtype=torch.int32, device=device)]
        call(*out, *(x[:count].to(device).contiguous() for x in (tokens, *links, *inputs)), replacement=replacement)
        results.append([x.cpu() for x in out])
    same = (results[0][1][:500] == results[1][1]).all(1).double().mean().item()
    if same < 0.99:  # float32 sums decide a coin in some ten thousand differently
        return f"rejection: {same:.4f} of the paths equal the CPU's, vocabulary {vocab}, replacement {replacement}"
    seen = torch.bincount(results[0][0].view(batch, n)[:, 0].long(), minlength=vocab).double()
    expected = target[0].double().cpu() * batch
    big = expected >= 5
    chi, freedom = ((seen - expected)[big].square() / expected[big]).sum().item(), int(big.sum()) - 1
    if chi > freedom + 6 * math.sqrt(2 * freedom) + 6:
        return f"rejection: chi-square {chi:.0f} for {freedom} degrees of freedom, vocabulary {vocab}"
    return None
