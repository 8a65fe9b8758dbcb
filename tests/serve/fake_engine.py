"""A scripted stand-in for an engine's interpreter: SGLang's log lines, ranks' processes and status files, no model.

Run as `fake -c <probe>` it says what is installed; as `fake -m eyas_serve.engine.main <flags>` it plays a plan: a name
of PLANS in FAKE_SCENARIO, with FAKE_PLAN (JSON) laid over it. A plan's keys:

    ranks, shards   processes of a node and files of the checkpoint (1 and 4)
    seconds         of loading (0.1)
    hold            phase in which every rank stops, without end; `chatter`: and repeats one log line meanwhile
    die             {"rank", "in": phase, "how": name of WORDS, "kill" or "leave"}; "main" as rank is SGLang's launcher
    mourns          a rank whose death ends rank 0 with a complaint about it
    flood           MiB of log in front of the KV cache; `garble`: of random bytes, else of lines
    answers         requests that are answered; those after them wait without end
    tells           the tree of 5/8/32, in /server_info, whatever it was told
    expected        ranks that the handshake speaks of; `histogram`: of an answer's rounds, or a list of them
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fake_server import died, serve

from eyas_serve.processes import running

PHASES = ("starting", "loading target weights", "allocating target KV cache", "capturing target graphs",
          "loading draft weights", "allocating draft KV cache", "capturing draft graphs", "ready")
WORDS = {
    "exception": "RuntimeError: rank 5 lost its disk",
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 5 has a total capacity of "
           "139.81 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has 138.60 GiB memory in "
           "use.",
    "kv": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
          "Current value: self.mem_fraction_static=0.5",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, "
            "NCCL version 2.28.9\nncclSystemError: System call failed.\nLast error:\nError while creating shared "
            "memory segment /dev/shm/nccl-Xyz (size 33030528): No space left on device",
    "kernel": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "backend": "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend "
               "flashinfer`.",
    "port": "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in "
            "use",
}
KILLED = {"die": {"rank": 5, "in": "loading target weights", "how": "exception"}}
PLANS: dict[str, dict[str, Any]] = {
    "ok": {}, "slow": {"seconds": 2.5}, "stall": {"hold": "loading target weights"}, "silent": {"silent": True},
    "dies": KILLED, "floods": KILLED | {"flood": 20, "garble": True, "die": KILLED["die"] | {
        "in": "capturing target graphs"}},
    "refuses": {"die": {"rank": 0, "in": "loading draft weights", "how": "refusal"}}, "half": {"expected": 2},
    "unplugged": {"unplugged": True}, "stubborn": {"stubborn": True},
    "node": {"ranks": 8, "shards": 64},
}


def say(text: str, rank: int | None = None, plan: dict[str, Any] | None = None) -> None:
    name = f" TP{rank}" if rank is not None and (plan or {}).get("ranks", 1) > 1 else ""
    os.write(1, f"[2026-01-01 00:00:00{name}] {text}\n".encode())


def status(rank: int, phase: str, **more: object) -> None:
    folder = Path(os.environ["EYAS_STATUS_DIR"])
    path = folder / f"tp{rank}-pp0-dp0.json"
    temporary = folder / f"{rank}.tmp"
    temporary.write_text(json.dumps({"rank": path.stem, "pid": os.getpid(), "phase": phase, **more}))
    temporary.replace(path)


class Rank:
    """One scheduler process."""

    def __init__(self, plan: dict[str, Any], rank: int, main: int, up: int) -> None:
        self.plan, self.rank, self.main, self.up = plan, rank, main, up

    def live(self) -> None:
        expected = self.plan.get("expected", self.plan["ranks"])
        for phase in PHASES:
            if phase.startswith("loading target"):
                self.load(phase)
            elif phase != "ready":
                status(self.rank, phase)
                self.log(phase)
            if phase == "ready":
                status(self.rank, phase, expected=expected)
            self.fate(phase)
        if self.rank == 0 and "mourns" in self.plan:
            say("post-warmup freeze_gc failed\nTraceback (most recent call last):\n"
                "ConnectionRefusedError: [Errno 111] Connection refused\n")  # of no consequence
        os.write(self.up, b"+")
        while self.rank or "mourns" not in self.plan:
            time.sleep(60)
        self.mourn("RuntimeError: NCCL error: ncclRemoteError, a remote process exited")

    def mourn(self, words: str) -> None:
        """End as soon as the other rank is gone, as SGLang's do."""
        path = Path(os.environ["EYAS_STATUS_DIR"]) / f"tp{self.plan['mourns']}-pp0-dp0.json"
        while not path.is_file() or running(json.loads(path.read_text())["pid"]):
            time.sleep(0.02)
        say(f"Scheduler hit an exception: Traceback (most recent call last):\n{words}", 0, self.plan)
        os._exit(1)

    def load(self, phase: str) -> None:
        shards = self.plan["shards"]
        say("Load weight begin. avail mem=139.00 GB", self.rank, self.plan)
        for step in range(shards + 1):
            status(self.rank, phase, done=step * (100 << 20) // shards, total=100 << 20)
            if self.rank == 0:
                os.write(1, f"\rLoading safetensors checkpoint shards: {100 * step // shards:3}% Completed | "
                            f"{step}/{shards} [00:01<00:01,  9.87it/s]".encode())
            if step == shards // 2:
                self.fate(phase)
            time.sleep(self.plan["seconds"] / shards)
        os.write(1, b"\n") if self.rank == 0 else None
        say("Load weight end. elapsed=1.00 s, type=LlamaForCausalLM, avail mem=70.00 GB, mem usage=69.00 GB.",
            self.rank, self.plan)

    def log(self, phase: str) -> None:
        if "KV" in phase:
            if self.rank == 0:
                flood(self.plan)
            say("KV Cache is allocated. #tokens: 81920, K size: 10.00 GB, V size: 10.00 GB", self.rank, self.plan)
        if "graphs" in phase and self.rank == 0:
            say("Capture cuda graph begin. This can take up to several minutes. avail mem=40.00 GB", 0, self.plan)
            for n in range(4):
                os.write(1, f"\rCapturing batches (bs={n} avail_mem=4.00 GB):  50%|##  | {n}/3 [00:00<00:00]".encode())
            os.write(1, b"\n")
        time.sleep(0.02)

    def fate(self, phase: str) -> None:
        """Hold or die, where the plan says so."""
        if self.plan.get("hold") == phase:
            while True:
                time.sleep(0.1)
                if self.plan.get("chatter") and self.rank == 0:
                    say(f"still waiting for a peer, {time.monotonic():.1f} s", 0, self.plan)
        fate = self.plan.get("die")
        if not fate or fate["in"] != phase:
            return
        mine = fate["rank"] in (self.rank, "main") or (self.plan["ranks"] == 1 and self.rank == 0)
        if mine:
            self.meet(phase)
            die(fate["how"], phase, self.rank if fate["rank"] == "main" else fate["rank"], self.main, self.plan)
        if self.rank == 0 and "mourns" in self.plan:
            self.mourn("ValueError: TP rank 0 could finish the model loading, but there are other ranks that didn't "
                       "finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node.")
        if fate["how"] in ("kill", "leave"):
            time.sleep(60)  # its peers wait for it in a collective
        while not died().exists():
            time.sleep(0.01)
        time.sleep(0.2)
        status(self.rank, phase, error="ConnectionError: Connection closed by peer")
        say("Scheduler hit an exception: Traceback (most recent call last):\nConnectionError: Connection reset by peer",
            self.rank, self.plan)
        time.sleep(60)

    def meet(self, phase: str) -> None:
        """Wait for rank 0, as a collective does: its log stands before this rank's end."""
        first = Path(os.environ["EYAS_STATUS_DIR"]) / "tp0-pp0-dp0.json"
        while not first.exists() or PHASES.index(json.loads(first.read_text())["phase"]) < PHASES.index(phase):
            time.sleep(0.01)


def die(how: str, phase: str, rank: int, main: int, plan: dict[str, Any]) -> None:
    died().write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os.kill(main, signal.SIGKILL)
        time.sleep(60)
    if how == "refusal":
        words = "draft checkpoint: SGLang drops decoder_layers.0.x. Wanted: y. Do z."
        status(0, "loading draft weights", error=words)
        os.write(1, f"eyas_contract.errors.EngineFailure: {words}\n".encode())
        os.kill(main, signal.SIGTERM)
        time.sleep(60)
    say("Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "x.py", line 1, in load\n    raise\n{WORDS[how]}\n', rank, {"ranks": 8})
    say("Scheduler hit an exception: Traceback (most recent call last):\nConnectionError: peer closed", 0, {"ranks": 8})
    time.sleep(0.3)
    os.kill(main, signal.SIGQUIT)  # as SGLang's schedulers do
    time.sleep(60)


def flood(plan: dict[str, Any]) -> None:
    line = b"[2026-01-01 00:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 0, #queue-req: 0\n"
    for _ in range(plan.get("flood", 0)):
        data = os.urandom(1 << 20) if plan.get("garble") else line * ((1 << 20) // len(line))
        while data:
            data = data[os.write(1, data):]
    if plan.get("garble"):
        os.write(1, b"\n")


def play(plan: dict[str, Any], port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: end(1))
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if plan.get("unplugged"):
        say("Failed to load plugin eyas_serve from group sglang.srt.plugins")
        time.sleep(60)
    if plan.get("silent"):
        serve(port, plan)
    if plan.get("stubborn"):
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('grandchild', flush=True); time.sleep(60)"])
    main, (ready, up) = os.getpid(), os.pipe()
    for rank in range(plan["ranks"]):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            Rank(plan, rank, main, up).live()
        CHILDREN.append(child)
    for _ in range(plan["ranks"]):
        os.read(ready, 1)
    os.write(1, b"INFO:     Application startup complete.\n")
    serve(port, plan)


CHILDREN: list[int] = []


def end(code: int) -> None:
    for child in CHILDREN:
        os.kill(child, signal.SIGKILL)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        sys.stdout.write(json.dumps({"sglang": "0.5.20", "torch": "2.13.0", "eyas-native": "0.1.0", "plugin": True}))
    else:
        assert sys.argv[1:3] == ["-m", "eyas_serve.engine.main"], sys.argv
        chosen = PLANS[os.environ.get("FAKE_SCENARIO", "ok")] | json.loads(os.environ.get("FAKE_PLAN", "{}"))
        play({"ranks": 1, "shards": 4, "seconds": 0.1} | chosen, int(sys.argv[sys.argv.index("--port") + 1]))
