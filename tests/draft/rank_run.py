"""One process of a run under torchrun, for `test_ranks.py`; notes which samples it trains on, and may kill itself.

    rank_run.py STORE TARGET OUT NOTES SHAPES [STEP]     SIGKILL to rank 0 when STEP begins
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from eyas_draft import fixed, ragged
from eyas_draft.config import TrainConfig
from eyas_draft.train import Trainer


def main() -> None:
    store, target, out, notes = map(Path, sys.argv[1:5])
    shapes, deadly = sys.argv[5], int(sys.argv[6]) if len(sys.argv) > 6 else 0
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    now = 0
    take = ragged.RaggedStepper._pass

    def noted(self: ragged.RaggedStepper, on_host: Any, indices: tuple[int, ...]) -> Any:
        with (notes / f"rank{rank}").open("a") as sink:
            sink.writelines(f"{now} {i}\n" for i in indices)
        return take(self, on_host, indices)

    def counted(stepper: Any) -> Any:
        advance = stepper.advance

        def counting(self: Any, step: int, rate: float) -> int:
            nonlocal now
            now = step
            if step == deadly and rank == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            return int(advance(self, step, rate))
        return counting
    ragged.RaggedStepper._pass = noted  # type: ignore[method-assign]
    for stepper in (ragged.RaggedStepper, fixed.FixedStepper):
        stepper.advance = counted(stepper)  # type: ignore[method-assign]
    trainer = Trainer(TrainConfig(store, target, out, vocab_size=64, ttt_steps=3, epochs=2, tokens_per_batch=150,
                                  accumulate=4 if shapes == "fixed" else 5, precision="fp32", holdout=0.05, lr=2e-3,
                                  checkpoint_every=2, keep=9, num_layers=2, shapes=shapes))
    trainer.run()
    trainer.ranks.leave()


main()
