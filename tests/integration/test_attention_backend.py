"""The attention backend's way into SGLang, as far as a machine without a GPU shows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from eyas_serve.engine.main import says

PROBE = """
from eyas_serve.engine.cpu import prepare_cpu
prepare_cpu()
import inspect
from eyas_serve.engine import attention
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins.hook_registry import HookRegistry
attention.register()
assert ATTENTION_BACKENDS["eyas"] is attention.EyasAttnBackend
assert set(HookRegistry._hooks) == {attention.BUILD, attention.VERIFY}
parameters = list(inspect.signature(attention.TritonAttnBackend.forward_extend).parameters)
assert parameters[:6] == ["self", "q", "k", "v", "layer", "forward_batch"], parameters
names = inspect.getsource(attention.TritonAttnBackend)
for name in ("num_draft_tokens", "req_to_token", "token_to_kv_pool", "use_mla", "_set_kv_buffer", "max_context_len",
             "is_draft_runner", "sliding_window_size", "dcp_size", "page_size"):
    assert f"self.{name}" in names or f"def {name}" in names, name

import torch
built = []
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
assert options["tree_mask"] is tree[3] and options["mask_mode"] == 1 and options["retrive_next_sibling"] is links[2]
print("fits")
"""


def test_it_fits_the_installed_sglang(engine_python: Path) -> None:
    run = subprocess.run([str(engine_python), "-W", "ignore", "-c", PROBE], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert run.stdout.strip().endswith("fits"), run.stderr[-3000:]


@pytest.mark.parametrize(("argv", "wanted"), [
    (["--attention-backend", "eyas"], True), (["--attention-backend=eyas"], True),
    (["--attention-backend", "triton", "eyas"], False), (["--speculative-draft-attention-backend", "eyas"], False)])
def test_the_flag_is_seen(argv: list[str], wanted: bool) -> None:
    assert says(argv, "--attention-backend", "eyas") is wanted
