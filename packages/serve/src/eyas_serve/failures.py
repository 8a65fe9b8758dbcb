"""Known causes of a failed start: what an engine's words mean, with the numbers in them, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What an error is.

    Attributes:
        name: for machines, e.g. `out_of_memory`.
        meaning: for people, with the numbers.
        remedy: what to do.
    """

    name: str
    meaning: str
    remedy: str


def explain(text: str, phase: str = "") -> Cause | None:
    """The known cause that `text` (an exception, or the end of a log) speaks of; `phase` sharpens the remedy."""
    for pattern, cause in _CAUSES:
        match = re.search(pattern, text)
        if match:
            return cause(text, phase) if callable(cause) else cause
    return None


# A rank that only lost its peer: another one failed first.
_CONSEQUENCE = re.compile(r"[Cc]onnection (?:closed|reset) by peer|peer closed|Broken pipe|ncclRemoteError|"
                          r"remote process exited|Socket (?:Timeout|closed)|recvValue failed|heartbeat|EOFError|"
                          r"other ranks that didn't finish loading")


def is_consequence(text: str) -> bool:
    """Whether an error says no more than that a peer went away."""
    return bool(_CONSEQUENCE.search(text))


def _out_of_memory(text: str, phase: str) -> Cause:
    numbers = re.search(r"Tried to allocate ([\d.]+ \w+)\.(?: GPU (\d+))? ?has a total capacity of ([\d.]+ \w+) of "
                        r"which ([\d.]+ \w+) is free", text)
    used = re.search(r"this process has ([\d.]+ \w+) memory in use", text)
    meaning = "out of GPU memory"
    if numbers:
        meaning += f": {numbers[1]} more wanted, {numbers[4]} of {numbers[3]} free on GPU {numbers[2] or '?'}"
        meaning += f", {used[1]} held by this process" if used else ""
    if "graph" in phase:
        remedy = "Graphs need room beside the KV cache: lower --mem-fraction (by 0.05) or --cuda-graph-max-bs."
    elif "loading" in phase:
        remedy = "The weights do not fit: more GPUs (--tp), a quantised target, or end what else runs on this GPU."
    else:
        remedy = "Lower --mem-fraction (by 0.05); see with nvidia-smi what else runs on this GPU."
    return Cause("out_of_memory", meaning, remedy)


def _no_cache_room(text: str, phase: str) -> Cause:
    return Cause("no_room_for_kv_cache", "the weights leave no room for a KV cache",
                 "Raise --mem-fraction (weights count in it), use more GPUs (--tp), or lower --max-total-tokens.")


def _nccl(text: str, phase: str) -> Cause:
    last = re.search(r"Last error:\s*\n?(.+)", text)
    meaning = "NCCL failed" + (f": {last[1].strip()}" if last else "")
    if "/dev/shm" in text and "No space left" in text:
        return Cause("nccl", meaning, "Shared memory is too small: give the container --shm-size=32g or --ipc=host.")
    return Cause("nccl", meaning, "Put NCCL_DEBUG = \"INFO\" under [environment], see the log. "
                 "Without working P2P try NCCL_P2P_DISABLE = \"1\", with NVSwitch faults NCCL_NVLS_ENABLE = \"0\", "
                 "with several networks NCCL_SOCKET_IFNAME.")


_CAUSES: tuple[tuple[str, Cause | Callable[[str, str], Cause]], ...] = (
    (r"OutOfMemoryError|CUDA out of memory|cudaErrorMemoryAllocation", _out_of_memory),
    (r"Not enough memory\. Please try to (?:increase|decrease)|Loaded weights .*not enough|max_total_num_tokens.*<= 0",
     _no_cache_room),
    (r"NCCL error|nccl\w+Error|ProcessGroupNCCL.*(?:timeout|Timeout)|NCCL WARN", _nccl),
    (r"[Aa]ddress already in use|EADDRINUSE|Errno 98", Cause(
        "port_taken", "a port that the engine wants is taken", "Stop what listens there (`ss -ltnp`; a server left "
        "over?) or choose another --port; for the ranks' own rendezvous give --dist-init-addr 127.0.0.1:FREE.")),
    (r"no kernel image is available|invalid device function|sm_\d+ is not compatible|not compiled (?:for|with) sm",
     Cause("no_kernels", "a library has no kernels for this GPU", "Install torch, sglang-kernel and flashinfer built "
           "for it (`python -c 'import torch; print(torch.cuda.get_arch_list(), torch.cuda.get_device_capability())'`; "
           "SM120 needs CUDA 12.8 or later), or a backend that has them: --extra '--attention-backend triton'.")),
    (r"(?:Backend|backend)[^\n]{0,80}(?:requires|not supported|does not support|unsupported)|(?:not supported|"
     r"unsupported)[^\n]{0,60}backend|only supports? [^\n]{0,60}backend", Cause(
         "unsupported_backend", "this attention backend does not serve this GPU, model or tree",
         "Name another one: --extra '--attention-backend triton' (trees on any GPU), flashinfer (not MLA trees) or fa3 "
         "(SM80 to SM90).")),
    (r"`trust_remote_code=True`", Cause(  # in quotes, as transformers asks for it: SGLang logs the setting itself
        "remote_code", "the model brings code of its own", "Read that code; then start with --trust-remote-code.")),
    (r"driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver|invalid device ordinal", Cause(
        "no_gpu", "the GPUs asked for are not there for this CUDA", "Compare `nvidia-smi` and CUDA_VISIBLE_DEVICES "
        "with --tp, and the driver with torch's CUDA; without a GPU give --device cpu.")),
    (r"HeaderTooLarge|InvalidHeader|SafetensorError|MetadataIncompleteBuffer|header too large", Cause(
        "broken_checkpoint", "a weights file is not whole", "Compare file sizes with the source's; a file of about 130 "
        "bytes is a git-LFS pointer: run `git lfs pull`.")),
    (r"No space left on device", Cause(
        "disk_full", "a disk or /dev/shm is full", "See `df -h`; a container's /dev/shm grows with --shm-size.")),
    (r"Bus error", Cause("shared_memory", "a memory map lost its backing: /dev/shm too small, or a disk failed",
                         "Give the container --shm-size=32g or --ipc=host; see `dmesg`.")),
    (r"error: (?:unrecognized arguments|ambiguous option|argument --|the following arguments)", Cause(
        "wrong_flags", "SGLang does not know one of its flags", "Correct --extra; `python -m sglang.launch_server "
        "--help` lists what this version has.")),
)
