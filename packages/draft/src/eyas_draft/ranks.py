"""The processes of one run: `torchrun` starts them, this says which of them one is.

Every process takes every k-th of a step's batches, so what a step learns from depends on `accumulate` alone and not on
how many processes share it: a run may go on with more or fewer of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eyas_contract import InvalidInput


@dataclass(frozen=True)
class Ranks:
    """One process among its fellows.

    Attributes:
        rank: this one, from 0.
        world: how many.
        device: where this one computes.
        shared: whether there is a process group, of one process too.
    """

    rank: int
    world: int
    device: torch.device
    shared: bool

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Join the group that torchrun's environment describes; alone without one.

        Raises:
            InvalidInput: a numbered device, where every process takes its own, or one that is not there; half of
                torchrun's environment.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls(0, 1, usable_device(device), False)
        if ":" in device:
            raise InvalidInput("--device", device, "cuda or cpu under torchrun: every process takes the device of its "
                               "local rank", "Leave the number out.")
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:  # a scheduler's WORLD_SIZE, say
            raise InvalidInput("the environment", f"WORLD_SIZE without {', '.join(missing)}", "all that torchrun sets, "
                               "or no WORLD_SIZE", "Start the command by torchrun, or unset WORLD_SIZE.")
        place = usable_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), place, True)

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def passes(self, accumulate: int) -> int:
        """Of each process in a step of `accumulate` batches: its share, or one more that is empty."""
        return -(-accumulate // self.world)

    def share(self, plans: Iterator[list[int]], accumulate: int) -> Iterator[list[int]]:
        """Every k-th of a step's batches, from this process's on, filled up with empty ones to `passes`."""
        while step := list(islice(plans, accumulate)):
            mine = step[self.rank::self.world]
            yield from mine
            yield from [[]] * (self.passes(accumulate) - len(mine))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.shared:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """One value of every process, in their order."""
        if not self.shared:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all are here."""
        if self.shared:
            dist.barrier()

    def leave(self) -> None:
        """End the group."""
        if self.shared and dist.is_initialized():
            dist.destroy_process_group()


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises InvalidInput where torch knows none, or cannot put a tensor there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        raise InvalidInput("--device", f"{name} ({str(error).partition(chr(10))[0]})", "a device of this machine: cpu, "
                           f"or a CUDA device, of which torch sees {torch.cuda.device_count()}", "Give --device cpu, "
                           "or install a torch and a driver for this machine's GPUs.") from error
    return device
