"""kv_write, kv_move and hidden_gather."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import DTYPES

import eyas_native


@pytest.mark.parametrize("source", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pool", DTYPES.values(), ids=DTYPES)
def test_kv_write_equals_torch(source: torch.dtype, pool: torch.dtype) -> None:
    fused = torch.randn(300, 3, 40).to(source)
    k, v = fused[..., :24], fused[..., 24:]
    k_buffer, v_buffer = torch.zeros(500, 3, 24, dtype=pool), torch.zeros(500, 3, 16, dtype=pool)
    loc = torch.randperm(500)[:300]
    wanted_k, wanted_v = k_buffer.clone(), v_buffer.clone()
    wanted_k[loc], wanted_v[loc] = k.to(pool), v.to(pool)
    eyas_native.kv_write(k, v, k_buffer, v_buffer, loc)
    assert torch.equal(k_buffer, wanted_k)
    assert torch.equal(v_buffer, wanted_v)


def test_conversion_rounds_as_torch_at_the_edges() -> None:
    values = [0.0, -0.0, 1e-45, 6e-8, 65504.0, 65520.0, 1e38, 3.4e38, float("inf"), float("nan"), 1 + 2**-8, 1 + 2**-9]
    row = torch.tensor([value * sign for value in values for sign in (1, -1)])
    for dtype in (torch.bfloat16, torch.float16):
        buffer = torch.zeros(1, 1, row.numel(), dtype=dtype)
        eyas_native.kv_write(row.view(1, 1, -1), row.view(1, 1, -1), buffer, buffer.clone(), torch.tensor([0]))
        torch.testing.assert_close(buffer.view(-1), row.to(dtype), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=20, unique_by=lambda pair: pair[0]))
def test_kv_move_overlapping(moves: list[tuple[int, int]]) -> None:
    tgt, src = (torch.tensor([move[side] for move in moves], dtype=torch.int64) for side in (0, 1))
    buffers = [torch.randn(20, 2, 5), torch.randn(20, 3).bfloat16(), torch.arange(20)]
    by_address = [buffer.clone() for buffer in buffers]
    wanted = [buffer.clone() for buffer in buffers]
    for buffer, before in zip(wanted, buffers, strict=True):
        buffer[tgt] = before[src]
    pointers = np.array([buffer.data_ptr() for buffer in by_address], dtype=np.uint64)
    strides = np.array([buffer.stride(0) * buffer.itemsize for buffer in by_address], dtype=np.uint64)
    eyas_native.kv_move(buffers, tgt, src)
    eyas_native.kv_move(pointers, tgt, src, strides=strides)
    for moved, other, right in zip(buffers, by_address, wanted, strict=True):
        assert torch.equal(moved, right)
        assert torch.equal(other, right)


def test_kv_move_of_large_pools() -> None:
    buffers = [torch.randn(4000, 3, 64) for _ in range(6)]
    tgt, src = torch.arange(1000), torch.arange(500, 1500)
    wanted = [torch.cat([buffer[500:1500], buffer[1000:]]) for buffer in buffers]
    eyas_native.kv_move(buffers, tgt, src)
    assert all(torch.equal(moved, right) for moved, right in zip(buffers, wanted, strict=True))


@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32, None])
def test_hidden_gather_equals_torch(out_dtype: torch.dtype, index_dtype: torch.dtype | None) -> None:
    layers = torch.randn(50, 3, 96).bfloat16()
    sources = [layers[:, i] for i in range(3)]  # rows of one layer are not next to each other
    index = None if index_dtype is None else torch.randint(0, 50, (70,), dtype=index_dtype)
    rows = slice(None) if index is None else index.long()
    wanted = torch.cat([source[rows] for source in sources], dim=-1).to(out_dtype)
    out = torch.empty_like(wanted)
    eyas_native.hidden_gather(sources, index, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("norm", ["per_source", "whole"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_hidden_gather_with_norm(norm: str, dtype: torch.dtype) -> None:
    sources = [(torch.randn(20, 100) * 3 ** (i + 1)).to(dtype) for i in range(3)]
    weight = torch.randn(300).to(dtype)
    out = torch.empty(20, 300)
    eyas_native.hidden_gather(sources, None, out, norm=norm, weight=weight, eps=1e-5)
    x = torch.stack([source.double() for source in sources], dim=1)
    axes = (2,) if norm == "per_source" else (1, 2)
    x = x / (x.pow(2).mean(axes, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), x.flatten(1) * weight.double(), rtol=1e-5, atol=1e-5)


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("norm", ["none", "per_source", "whole"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_hidden_gather_with_residuals(dtype: torch.dtype, norm: str) -> None:
    """The sum is rounded as the dtype's own addition is; what follows is compared in float64."""
    sources = [torch.randn(20, 36).to(dtype) for _ in range(3)]
    residuals = [torch.randn(20, 72).to(dtype)[:, ::2].contiguous(), None, torch.randn(20, 72).to(dtype)[:, :36]]
    index, weight = torch.randint(0, 20, (30,)), torch.randn(108).to(dtype)
    sums = [s if r is None else s + r for s, r in zip(sources, residuals, strict=True)]
    out = torch.empty(30, 108, dtype=dtype if norm == "none" else torch.float32)
    eyas_native.hidden_gather(sources, index, out, residuals=residuals, norm=norm, weight=weight, eps=1e-5)
    if norm == "none":
        assert torch.equal(out, torch.cat(sums, dim=-1)[index])
        return
    x = torch.stack([one.double() for one in sums], dim=1)[index]
    x = x / (x.pow(2).mean((2,) if norm == "per_source" else (1, 2), keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), x.flatten(1) * weight.double(), rtol=1e-5, atol=1e-5)


def test_e4m3_is_rounded_as_torch_does_and_saturates() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    thirds = torch.cat([every.float() / 3, every.float() * 1.01])  # places that a half does not reach
    for source in (every, thirds):
        out = torch.empty(1, source.numel(), dtype=E4M3)
        eyas_native.hidden_gather([source[None]], None, out)
        wanted = source.float().clamp(-448, 448).to(E4M3)
        number = ~source.isnan()
        assert torch.equal(out[0].view(torch.uint8)[number], wanted.view(torch.uint8)[number])
        assert out[0].float()[~number].isnan().all()


@pytest.mark.parametrize("norm", ["none", "whole"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_hidden_gather_to_e4m3_with_a_scale_per_row(dtype: torch.dtype, norm: str) -> None:
    """Each value within half a step of e4m3 of the float64 one; the scale is that row's largest magnitude over 448."""
    sources = [(torch.randn(20, 50) * 10.0 ** (i - 2)).to(dtype) for i in range(4)]
    sources[0][3], sources[1][3], sources[2][3], sources[3][3] = 0, 0, 0, 0
    weight, out, scale = torch.randn(200).to(dtype), torch.empty(20, 200, dtype=E4M3), torch.empty(20)
    eyas_native.hidden_gather(sources, None, out, norm=norm, weight=weight, row_scale=scale)
    x = torch.cat([source.double() for source in sources], dim=-1)
    if norm == "whole":
        x = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    wanted = x.abs().amax(-1).clamp(min=1e-12) / 448
    torch.testing.assert_close(scale.double(), wanted, rtol=1e-5, atol=0)
    error = (out.double() * wanted[:, None] - x).abs()
    assert (error <= 1e-4 * x.abs() + torch.maximum(x.abs() / 16, wanted[:, None] * 2.0**-10)).all()
    assert (out[3].float() == 0).all()
    eyas_native.hidden_gather(sources, None, out, norm=norm, weight=weight, out_scale=0.5)
    error = (out.double() / 2 - x.clamp(-224, 224)).abs()
    assert (error <= 1e-4 * x.abs() + torch.maximum(x.abs() / 16, torch.tensor(2.0**-11))).all()


def test_bad_scales_and_residuals_are_named() -> None:
    source, scaled = torch.zeros(4, 8), torch.zeros(4, 8, dtype=E4M3)
    bad: list[tuple[str, torch.Tensor, dict[str, object]]] = [
        ("out_scale", scaled, {"out_scale": 0.0}),
        ("row_scale", torch.zeros(4, 8), {"row_scale": torch.zeros(4)}),
        ("row_scale", scaled, {"row_scale": torch.zeros(3)}),
        ("row_scale", scaled, {"row_scale": torch.zeros(4, dtype=torch.float64)}),
        ("residuals", scaled, {"residuals": [None, None]}),
        (r"residuals\[0\]", scaled, {"residuals": [torch.zeros(3, 8)]}),
        (r"residuals\[0\]", scaled, {"residuals": [source.bfloat16()]}),
    ]
    for words, out, arguments in bad:
        with pytest.raises(eyas_native.ArgumentError, match=words):
            eyas_native.hidden_gather([source], None, out, **arguments)  # type: ignore[arg-type]
    with pytest.raises(eyas_native.ArgumentError, match=r"sources\[0\]"):
        eyas_native.hidden_gather([scaled], None, torch.zeros(4, 8))


def test_bad_arguments_are_named() -> None:
    k, pool = torch.zeros(2, 1, 4), torch.zeros(8, 1, 4)
    for loc in ([0, 8], [-1, 0]):
        with pytest.raises(eyas_native.ArgumentError, match="loc: slot"):
            eyas_native.kv_write(k, k, pool, pool, torch.tensor(loc))
    with pytest.raises(eyas_native.ArgumentError, match="v has shape"):
        eyas_native.kv_write(k, torch.zeros(3, 1, 5), pool, pool, torch.tensor([0, 1]))
    with pytest.raises(eyas_native.ArgumentError, match="contiguous last axis"):
        eyas_native.kv_write(k, torch.zeros(2, 1, 8)[..., ::2], pool, pool, torch.tensor([0, 1]))
    with pytest.raises(eyas_native.ArgumentError, match="src_loc"):
        eyas_native.kv_move([pool, torch.zeros(4, 4)], torch.tensor([0]), torch.tensor([5]))
    with pytest.raises(eyas_native.ArgumentError, match="tgt_loc"):
        eyas_native.kv_move([pool.data_ptr()], torch.tensor([-1]), torch.tensor([5]), strides=[16])
    with pytest.raises(eyas_native.ArgumentError, match="slots with gaps"):
        eyas_native.kv_move([torch.zeros(8, 2, 4)[:, :, :2]], torch.tensor([0]), torch.tensor([5]))
    source = torch.zeros(4, 8)
    for index in ([4], [-1]):
        with pytest.raises(eyas_native.ArgumentError, match="index"):
            eyas_native.hidden_gather([source], torch.tensor(index), torch.zeros(1, 8))
    with pytest.raises(eyas_native.ArgumentError, match=r"sources\[1\]"):
        eyas_native.hidden_gather([source, torch.zeros(4, 7)], None, torch.zeros(4, 16))
    with pytest.raises(eyas_native.ArgumentError, match="16 on axis 1, by the sources"):
        eyas_native.hidden_gather([source, source], None, torch.zeros(4, 15))
    with pytest.raises(eyas_native.ArgumentError, match="sources"):
        eyas_native.hidden_gather([], None, torch.zeros(4, 16))
    with pytest.raises(eyas_native.ArgumentError, match="weight"):
        eyas_native.hidden_gather([source], None, torch.zeros(4, 8), norm="whole")
    with pytest.raises(eyas_native.ArgumentError, match="norm"):
        eyas_native.hidden_gather([source], None, torch.zeros(4, 8), norm="other")
    read_only = np.zeros((4, 8), dtype=np.float32)
    read_only.flags.writeable = False
    with pytest.raises(eyas_native.ArgumentError, match="out: a read-only array"):
        eyas_native.hidden_gather([source], None, read_only)
    with pytest.raises(eyas_native.ArgumentError, match="out: a tensor on meta"):
        eyas_native.hidden_gather([source], None, torch.zeros(4, 8, device="meta"))
