"""From what is known of a failed engine to one message: the failing rank's exception first, then cause and remedy."""

from __future__ import annotations

from dataclasses import dataclass

from eyas_serve.failures import Cause, explain, is_consequence
from eyas_serve.handshake import READY
from eyas_serve.log import last_words
from eyas_serve.progress import Progress

SIGKILL = -9


@dataclass(frozen=True)
class Verdict:
    """Why the engine failed.

    Attributes:
        rank: of the rank at fault, or empty.
        found: for the message.
        cause: where it is a known one.
        phase: in which it happened.
    """

    rank: str
    found: str
    cause: Cause | None
    phase: str

    @property
    def remedy(self) -> str:
        """What to do, or nothing."""
        return self.cause.remedy if self.cause else ""


def judge(progress: Progress, code: int | None, oom_kills: int) -> Verdict:
    """The verdict on an engine that ended with `code` (None: it still runs, but refused or lost a rank)."""
    rank, words = _first_exception(progress)
    complaint, log_words, phase = progress.error(), last_words(progress.log.path), progress.phase()
    ended = f"died (exit code {code})" if code is not None else "lost a rank" if progress.gone else "refused"
    text = complaint if complaint and not is_consequence(complaint) else words or complaint
    unexplained = not text or is_consequence(text)
    if unexplained:
        rank = progress.victim() or rank
        lost = _lost(progress, oom_kills)
        text = f"{lost}; {text}" if lost and text else lost or text or log_words
    if rank in progress.ranks and progress.ranks[rank].phase != READY:
        phase = progress.ranks[rank].phase
    head = f"{rank}: " if rank and not text.startswith("rank ") else ""
    found = f"the engine {ended} in {phase}: {head}{text.rstrip('.')}"
    if complaint and log_words.splitlines()[0][:60] not in found and complaint[:60] not in log_words:
        found += f"\nlast words of its log:\n{log_words}\n"
    cause = explain("\n".join(said for said in (text, words, log_words) if not is_consequence(said)), phase)
    if cause is None and unexplained:
        cause = _killed(progress, code, oom_kills)
    if cause:
        found += f"\nThat is: {cause.meaning}"
    return Verdict(rank or progress.victim(), found, cause, phase)


def _first_exception(progress: Progress) -> tuple[str, str]:
    known = [(exception.rank, exception.error) for exception in progress.exceptions() if exception.error]
    if not known:
        return "", ""
    return next((pair for pair in known if not is_consequence(pair[1])), known[0])


def _lost(progress: Progress, oom_kills: int) -> str:
    if not progress.gone:
        return ""
    name = progress.victim()
    why = "killed for want of main memory" if oom_kills else "gone without a word, killed from outside"
    return f"rank {name} (pid {progress.ranks[name].pid}) is {why}; the others wait for it"


def _killed(progress: Progress, code: int | None, oom_kills: int) -> Cause | None:
    if oom_kills:
        return Cause("host_out_of_memory", f"the kernel ended {oom_kills} process(es) for want of main memory",
                     "Give the machine or the container more memory, or load with fewer ranks at a time; see `dmesg`.")
    if progress.gone or code == SIGKILL:
        return Cause("killed", "a process was killed from outside", "See `dmesg` and who may have killed it: a job "
                     "scheduler's limits, a container's memory.")
    return None
