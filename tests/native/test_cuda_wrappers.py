"""The CUDA wrappers without a GPU: the struct mirrors, and errors that name the argument."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from on_host import cuda_on_host

from eyas_native import cuda, cuda_abi, cuda_attention, cuda_core, cuda_memory, cuda_tree, cuda_verify
from eyas_native.driver import DeviceArray
from eyas_native.errors import ArgumentError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_any_device() -> Iterator[None]:
    """CPU tensors pass for CUDA's, so that the checks behind the device's are reached."""
    with cuda_on_host():
        yield


@pytest.mark.parametrize("name", ["eyas_attn", "eyas_gather", "eyas_verify"])
def test_structs_mirror_the_header(name: str, tmp_path: Path) -> None:
    mirror = {"eyas_attn": cuda_abi.Attention, "eyas_gather": cuda_abi.Gather, "eyas_verify": cuda_abi.Verify}[name]
    fields = [field[0] for field in mirror._fields_]
    prints = "".join(f'printf("%zu ", offsetof({name}, {field}));' for field in fields)
    source = tmp_path / "offsets.c"
    headers = "".join(f"#include {h}\n" for h in ("<stddef.h>", "<stdio.h>", '"eyas/cuda_api.h"'))
    source.write_text(f'{headers}int main() {{ {prints} printf("%zu", sizeof({name})); }}')
    subprocess.run(["cc", f"-I{ROOT / 'native/include'}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    out = subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True).stdout
    assert [int(x) for x in out.split()] == [*(getattr(mirror, f).offset for f in fields), ctypes.sizeof(mirror)]


def test_abi_version_is_the_headers() -> None:
    header = (ROOT / "native/include/eyas/cuda_api.h").read_text()
    assert f"#define EYAS_CUDA_ABI {cuda_abi.ABI_VERSION} " in header


def test_every_fault_is_named_at_once() -> None:
    q, out = torch.zeros(3, 8, 128, dtype=torch.float32), torch.zeros(3, 8, 64)
    k = torch.zeros(16, 2, 128, dtype=torch.float64)
    lens = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ArgumentError) as error:
        cuda.tree_attn_gqa(q, k, k, out, torch.zeros(1, 16), lens, max_tree=3, max_seq_len=16, scale=1.0)
    text = str(error.value)
    for part in ("q is on cpu", "q is float32", "k is float64", "seq_lens is int32"):
        assert part in text


WORDS = torch.zeros(1, 4, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tree_keys": 20}, "mask is missing, wanted with tree_keys"),
        ({"tree_keys": 257, "mask": WORDS}, "tree_keys is 257, wanted 1 to 256"),
        ({"tree_keys": -1}, "tree_keys is -1"),
        ({"tree_keys": 33, "mask": WORDS}, r"mask has shape \[1, 4, 1\], wanted packed rows \[1, 4, 2\]"),
        ({"tree_keys": 20, "mask": WORDS[:, :3]}, r"mask has shape \[1, 3, 1\]"),
        ({"tree_keys": 20, "mask": WORDS, "window": 8, "positions": torch.zeros(4, dtype=torch.int64)},
         "window is given, wanted none with tree_keys; positions are given"),
    ],
)  # fmt: skip
def test_tree_keys_are_named(on_any_device: None, change: cuda.Options, named: str) -> None:
    q, cache = torch.zeros(4, 8, 576, dtype=torch.bfloat16), torch.zeros(64, 1, 576, dtype=torch.bfloat16)
    index, lens = torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    options: cuda.Options = {"max_tree": 4, "max_seq_len": 64, "scale": 1.0, **change}
    with pytest.raises(ArgumentError, match=named):
        cuda.prepare_mla(q, cache, q[..., :512], index, lens, **options)
    with pytest.raises(ArgumentError, match=named):
        cuda.prepare_gqa(q[..., :128], cache[..., :128], cache[..., :128], q[..., :128], index, lens, **options)


def test_tree_keys_reach_the_kernel_with_one_mask_for_all(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[cuda_abi.Attention] = []
    monkeypatch.setattr(cuda_attention, "run", lambda name, struct, *rest: given.append(struct._obj))
    q, cache = torch.zeros(8, 8, 128, dtype=torch.bfloat16), torch.zeros(64, 2, 128, dtype=torch.bfloat16)
    index, lens = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    cuda.prepare_gqa(q, cache, cache, torch.empty_like(q), index, lens, max_tree=4, max_seq_len=64, scale=1.0,
                     mask=WORDS.expand(2, -1, -1), tree_keys=20, seq_lens_are_prefix=True)  # fmt: skip
    struct = given[0]
    found = (struct.tree_keys, struct.max_tree, struct.mask_words, struct.mask_stride_batch, struct.seq_lens_are_prefix)
    assert found == (20, 4, 1, 0, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"num_nodes": 257}, "num_nodes is 257"),
        ({"mask_mode": 4}, "mask_mode is 4"),
        ({"topk": 0}, "topk, depth are 0, 2"),
        ({"seq_lens": None}, "seq_lens is a NoneType"),
        ({"words": torch.zeros(1, 4, 2, dtype=torch.int32)}, r"words has shape \[1, 4, 2\], wanted \[1, 4, 1\]"),
        ({"words": torch.zeros(1, 4, 1, dtype=torch.int64)}, "words is int64"),
    ],
)
def test_tree_build_names_the_argument(change: dict[str, object], named: str) -> None:
    whole = torch.zeros(1, 4, dtype=torch.int64)
    arguments = {
        "parent_list": torch.zeros(1, 3, dtype=torch.int64), "selected_index": torch.zeros(1, 3, dtype=torch.int64),
        "seq_lens": torch.zeros(1, dtype=torch.int64), "topk": 2, "depth": 2, "num_nodes": 4, "mask_mode": 3,
        "tree_mask": torch.zeros(1, 4, 1, dtype=torch.int32), "positions": torch.zeros(4, dtype=torch.int64),
        "retrive_index": whole, "retrive_next_token": whole, "retrive_next_sibling": whole,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=named):
        cuda.tree_build(**(arguments | change))


BITS, BYTES = (partial(torch.zeros, dtype=kind) for kind in (torch.bool, torch.uint8))
FROM_MASK = {
    "tree_mask": torch.zeros(1, 4, 4, dtype=torch.bool), "seq_lens": torch.zeros(1, dtype=torch.int64),
    "positions": torch.zeros(4, dtype=torch.int64),
    **{f"retrive_{name}": torch.zeros(1, 4, dtype=torch.int64) for name in ("index", "next_token", "next_sibling")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tree_mask": torch.zeros(1, 4, 4)}, "tree_mask is float32"),
        ({"tree_mask": torch.zeros(16, dtype=torch.bool)}, r"tree_mask has shape \[16\]"),
        ({"tree_mask": [[[1]]]}, "tree_mask is a list"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32)}, "seq_lens is int32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \[3\], wanted \[4\]"),
        ({"retrive_next_sibling": torch.zeros(4)}, "retrive_next_sibling is float32"),
        ({"invalid": torch.zeros(2, dtype=torch.int32)}, r"invalid has shape \[2\], wanted \[1\]"),
    ],
)
def test_tree_from_mask_names_the_argument(on_any_device: None, change: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        cuda.tree_from_mask(**(FROM_MASK | change))


@pytest.mark.parametrize(
    ("mask", "faults", "named"),
    [
        (BITS(1, 3, 4), BYTES(1, 3), "tree_mask has rows of 4, wanted 3"),
        (BITS(1, 257, 257), BYTES(1, 257), "1 trees of 257 nodes"),
        (BITS(0, 3, 3), BYTES(0, 3), "0 trees of 3 nodes"),
        (BITS(1, 3, 3), BYTES(1, 4), r"faults has shape \[1, 4\]"),
        (BITS(1, 3, 3), torch.zeros(1, 3, dtype=torch.int32), "faults is int32"),
        (BITS(1, 3, 6)[:, :, ::2], BYTES(1, 3), "tree_mask is not packed"),
        (BITS(2, 6, 3)[:, ::2], BYTES(2, 3), "tree_mask is not contiguous"),
    ],
)
def test_tree_validate_names_the_argument(
    on_any_device: None, mask: torch.Tensor, faults: torch.Tensor, named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        cuda.tree_validate(mask, faults)


def test_tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(ArgumentError, match="tree_mask is on cpu, wanted a CUDA device"):
        cuda.tree_from_mask(**FROM_MASK)
    with pytest.raises(ArgumentError, match="tree_mask is on cpu, wanted a CUDA device"):
        cuda.tree_validate(FROM_MASK["tree_mask"], torch.zeros(1, 4, dtype=torch.uint8))


def on_device(number: int, *shape: int, dtype: str = "int32") -> DeviceArray:
    """An array that is nowhere, told to be on a CUDA device as torch's tensors are."""
    return DeviceArray(4096, shape, dtype, torch.device("cuda", number))


def test_tensors_of_another_device_than_torchs_current_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    monkeypatch.setattr(cuda_tree, "run", lambda name, *arguments: launches.append(name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    masks, faults = ([on_device(i, *shape, dtype="uint8") for i in (0, 1)] for shape in ((1, 4, 4), (1, 4)))
    cuda.tree_validate(masks[1], faults[1], stream=0)
    assert launches == ["eyas_tree_validate"]
    with pytest.raises(ArgumentError, match="tree_mask is on cuda:0, wanted cuda:1, torch's current device"):
        cuda.tree_validate(masks[0], faults[0], stream=0)
    with pytest.raises(ArgumentError, match="faults is on cuda:0, wanted cuda:1, torch's current device"):
        cuda.tree_validate(masks[1], faults[0], stream=0)
    assert len(launches) == 1


def test_faults_of_arrays_without_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the array is none of torch's"))
    with pytest.raises(ArgumentError, match="tree_mask is int32"):
        cuda.tree_validate(DeviceArray(4096, (1, 4, 4), "int32"), DeviceArray(4096, (1, 4), "uint8"), stream=0)


def test_a_prepared_launch_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    monkeypatch.setattr(cuda_attention, "run", lambda name, *arguments: launches.append(name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, cache = on_device(0, 4, 8, 128, dtype="float16"), on_device(0, 64, 2, 128, dtype="float16")
    launch = cuda.prepare_gqa(q, cache, cache, q, on_device(0, 1, 64), on_device(0, 1, dtype="int64"), max_tree=4,
                              max_seq_len=64, scale=1.0)  # fmt: skip
    launch(stream=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ArgumentError, match="prepared for cuda:0, launched from cuda:1"):
        launch(stream=0)
    assert launches == ["eyas_tree_attn_gqa_plan", "eyas_tree_attn_gqa"]


def test_a_page_of_one_token_is_a_slot_of_a_combined_cache(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[cuda_abi.Attention] = []
    monkeypatch.setattr(cuda_attention, "run", lambda name, struct, *rest: given.append(struct._obj))
    q, index = torch.zeros(4, 8, 128, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.int32)
    for page in (1, 16):
        k, v = torch.zeros(64, 2, page, 2, 128, dtype=torch.bfloat16).unbind(1)
        cuda.prepare_gqa(q, k, v, q, index, torch.tensor([10]), max_tree=4, max_seq_len=64, scale=1.0)
    slots, pages = given
    assert (slots.page_size, slots.kv_stride_token) == (1, 2 * 2 * 128)
    assert (pages.page_size, pages.kv_stride_page, pages.kv_stride_token) == (16, 2 * 16 * 2 * 128, 2 * 128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index": torch.zeros(1, 64, dtype=torch.int32)}, "kv_index has 1 rows, wanted 2 as seq_lens, or index_rows"),
        ({"index": torch.zeros(64, dtype=torch.int32), "index_start": torch.zeros(1, dtype=torch.int32)},
         "index_start has 1 entries, wanted 2 as seq_lens"),
        ({"lse": torch.zeros(8, 16)[:, :8]}, "lse is not contiguous"),
    ],
)  # fmt: skip
def test_what_attention_cannot_address_is_named(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, torch.Tensor], named: str
) -> None:
    monkeypatch.setattr(cuda_attention, "run", lambda *arguments: None)
    q, cache = torch.zeros(8, 8, 128, dtype=torch.bfloat16), torch.zeros(64, 2, 128, dtype=torch.bfloat16)
    good = {"index": torch.zeros(2, 64, dtype=torch.int32), "lse": torch.zeros(8, 8)}

    def prepare(index: torch.Tensor, **options: torch.Tensor) -> None:
        cuda.prepare_gqa(q, cache, cache, q, index, torch.tensor([10, 10]), max_tree=4, max_seq_len=64, scale=1.0,
                         **options)  # fmt: skip

    prepare(**good)
    prepare(index=good["index"][:1], index_rows=torch.zeros(2, dtype=torch.int64))
    prepare(index=good["index"][0], index_start=torch.zeros(3, dtype=torch.int32))  # [B + 1], as others have it
    with pytest.raises(ArgumentError, match=named):
        prepare(**(good | change))


def test_gathered_sources_have_the_outputs_rows(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "run", lambda *arguments: None)
    sources = [torch.zeros(rows, 16, dtype=torch.float16) for rows in (9, 8, 7)]
    out = torch.zeros(8, 48, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=r": sources\[2\] has 7 rows, wanted out's 8, or an index"):
        cuda.hidden_gather(sources, None, out, stream=0)
    cuda.hidden_gather(sources, None, out[:7], stream=0)
    cuda.hidden_gather(sources, torch.zeros(8, dtype=torch.int32), out, stream=0)


INTS, LONGS = (partial(torch.zeros, dtype=kind) for kind in (torch.int32, torch.int64))
VERIFY = {"predicts": INTS(8), "accept_index": INTS(2, 3), "accept_token_num": INTS(2), "candidates": LONGS(2, 4),
          **{f"retrive_{name}": LONGS(2, 4) for name in ("index", "next_token", "next_sibling")}}  # fmt: skip
COINS = {"uniform": torch.zeros(2, 4), "uniform_final": torch.zeros(2), "target_probs": torch.zeros(2, 4, 5)}
CALLS = {
    "verify_greedy": VERIFY | {"target_predict": LONGS(2, 4)},
    "verify_target_only": VERIFY | COINS,
    "verify_rejection": VERIFY | COINS | {"draft_probs": torch.zeros(2, 4, 5)},
    "accept_commit": {name: VERIFY[name] for name in ("predicts", "accept_index", "accept_token_num")}
    | {"out_cache_loc": LONGS(8), "accept_lens": INTS(2), "bonus": LONGS(2)}
    | {name: LONGS(2, 3) for name in ("tokens", "src_loc", "tgt_loc", "rows")},
    "kv_move": {"buffers": LONGS(3), "slot_bytes": LONGS(3), "tgt_loc": LONGS(2, 3), "src_loc": LONGS(2, 3)},
}


@pytest.mark.parametrize("call", CALLS)
def test_tables_with_gaps_between_rows_are_named(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    launches: list[str] = []
    for module in (cuda_verify, cuda_memory):
        monkeypatch.setattr(module, "run", lambda name, *arguments: launches.append(name))
    good = CALLS[call]
    getattr(cuda, call)(**good, stream=0)
    assert launches == [f"eyas_{call}"]
    for name, t in good.items():
        if t.dim() > 1:
            gaps = torch.cat([t, t], dim=-1)[..., : t.shape[-1]]
            with pytest.raises(ArgumentError, match=f": {name} is not contiguous"):
                getattr(cuda, call)(**(good | {name: gaps}), stream=0)
    assert len(launches) == 1


GATHERED = {"sources": [torch.zeros(9, 16, dtype=torch.float16)], "index": INTS(8),
            "out": torch.zeros(8, 16, dtype=torch.float16)}  # fmt: skip


@pytest.mark.parametrize("call", [*CALLS, "hidden_gather"])
@pytest.mark.parametrize("wrong", [[1], torch.tensor(1), torch.zeros(1).double()], ids=["list", "0-d", "f64"])
def test_arguments_of_another_kind_are_named(on_any_device: None, call: str, wrong: object) -> None:
    """Whichever it is, and whatever follows from its shape."""
    good = CALLS.get(call, GATHERED)
    for name in good.keys() - {"sources"}:
        with pytest.raises(ArgumentError, match=f"{name} (is|has shape) "):
            getattr(cuda, call)(**(good | {name: wrong}), stream=0)


def test_a_commit_of_no_request_is_refused(on_any_device: None) -> None:
    none = {name: t[:0] for name, t in CALLS["accept_commit"].items()}
    with pytest.raises(ArgumentError, match="accept_index has no rows"):
        cuda.accept_commit(**none, stream=0)


def test_missing_library_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EYAS_CUDA_LIBRARY", str(tmp_path / "libeyas_cuda.so"))
    monkeypatch.setattr(cuda_core, "library", cuda_core.library.__wrapped__)
    with pytest.raises(OSError, match=r"libeyas_cuda.so: no such file \(.+\)\. Wanted: the CUDA library"):
        cuda.attention_plan("mla", batch=1, max_tree=4, num_q_heads=8, num_kv_heads=1, max_seq_len=99)
    assert "no such file" in cuda.status()


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __getattr__(self, name: str) -> object:
            return lambda *arguments: b"CUDA's own words" if name == "eyas_cuda_error_text" else 35

    monkeypatch.setattr(cuda_core, "library", Library)
    assert cuda.status().startswith("no CUDA driver here")
    with pytest.raises(cuda.LaunchError, match=r"attn_mla_plan: no CUDA driver.*own words.*cudaError 35"):
        cuda.attention_plan("mla", batch=1, max_tree=4, num_q_heads=8, num_kv_heads=1, max_seq_len=99)
