"""What ranks tell each other beside their gradients."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline import Error, InvalidArgument


class Row(NamedTuple):
    """What a rank tells all others at the end of a step. Everything is a number that float64 holds exactly, except for seconds."""

    batch: float  # a checksum of the sampler and of the global batch
    items: float  # of the batch that the seconds are about
    seconds: float  # of the rank's own work; negative if a GPU has not come to the end of it yet
    between: float  # seconds of its own since the step before; negative if unknown
    plan: float  # the number of the newest plan of shares; that of rank 0 counts
    loss_type: float = 0  # of every part, some items ran


class Meeting:
    """A gloo group of its own with all ranks. It takes host memory, so nothing waits for a GPU on its behalf.

    The group ends with the meeting, and at the latest before the interpreter ends: a thread of gloo that frees a tensor of Python after that
    aborts the process (pytorch/pytorch#190489).
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidArgument(
                "BalancedRanks: no process group is up, so the ranks are not known. Call torch.distributed.init_process_group() before, in a program "
                "that torchrun has started."
            )
        self._groups: list[Any] = [dist.new_group(backend="gloo")]
        weakref.finalize(self, _end, self._groups, os.getpid())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def agree(self, call: str, error: Exception | None, equal: Mapping[str, object], own: object) -> list[Any]:
        """What `own` is on each rank.

        Raises
        ------
        InvalidArgument
            On all ranks, if `equal` is not.
        Error
            If another rank has an error. `error` itself is raised on this one.
        """
        said: list[Any] = [None] * self.size
        text = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(said, (text, dict(equal), own), group=self._groups[0])
        if error is not None:
            raise error
        for rank, (theirs, settings, _) in enumerate(said):
            if theirs is not None:
                raise Error(f"{call}: rank {rank} failed, so no rank goes on. {theirs}")
            for name, value in said[0][1].items():
                if settings[name] != value:
                    raise InvalidArgument(
                        f"{call}: rank {rank} has {name}={settings[name]!r}, and rank 0 has {value!r}. Give it the same arguments on all ranks."
                    )
        return [own for _, _, own in said]

    def gather(self, mine: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Start to bring the numbers of all ranks to this one. The result waits for them."""
        found = torch.empty(self.size, len(mine), dtype=torch.float64, device="cpu")
        # dist.all_gather() calls this after 40 us of checks and records.
        work = self._groups[0].allgather([list(found)], [torch.tensor(mine, dtype=torch.float64, device="cpu")])

        def numbers() -> list[list[float]]:
            work.wait()
            rows: list[list[float]] = found.tolist()
            return rows

        return numbers

    def from_first(self, mine: Sequence[int]) -> list[int]:
        """The numbers of rank 0."""
        numbers = torch.tensor(mine, device="cpu")
        dist.broadcast(numbers, 0, group=self._groups[0])
        found: list[int] = numbers.tolist()
        return found


def _end(groups: list[Any], process: int) -> None:
    """Drop the last reference to the group, which joins its threads. A forked process, such as a worker of a DataLoader, has none of them."""
    if os.getpid() != process:
        return
    group = groups.pop()
    with contextlib.suppress(ValueError):  # destroy_process_group() has ended all groups
        dist.destroy_process_group(group)
