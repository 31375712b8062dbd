"""The ranks of a process group over gloo, one process each: of DistributedDataParallel, and of paceline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from race import model
from race.job import Job

if TYPE_CHECKING:  # only the rival's own process imports it
    from paceline.torch import BalancedRanks

_kept: list[nn.Module] = []


class InMemory(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items in memory, which a loader fetches in one piece, because loading data is not part of this race."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._data = inputs, labels

    def __len__(self) -> int:
        return len(self._data[1])

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        chosen = torch.tensor(indices)
        return tuple(tensor[chosen] for tensor in self._data)


def in_memory(job: Job) -> InMemory:
    """The items of all batches of the job, in their order."""
    pairs = model.batches(job.folder, job.batch)
    return InMemory(torch.cat([inputs for inputs, _ in pairs]), torch.cat([labels for _, labels in pairs]))


def meet(job: Job) -> None:
    """Join the process group, once. The ranks stay together until the parent ends their processes."""
    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=job.rank,
            world_size=job.parts,
            timeout=timedelta(seconds=60),
        )


def replicate(module: nn.Module, job: Job) -> nn.Module:
    """This rank's replica.

    The replica is never freed. Freeing a reducer frees its process group, and ~ProcessGroupGloo then waits, holding the GIL, for a thread
    of gloo that may wait for the GIL (seen with PyTorch 2.13).
    """
    meet(job)
    # Gradients that are views of the buckets save a copy.
    _kept.append(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))
    return _kept[-1]


class OwnTime:
    """The processor time that `BalancedRanks` takes itself, without the loader. While it waits for other ranks it takes none."""

    def __init__(self, ranks: BalancedRanks) -> None:
        self.seconds = 0.0
        self._ranks: Any = ranks
        for name in ("_begin", "weigh", "_backward_begins", "_end"):
            setattr(ranks, name, self._counted(getattr(ranks, name)))
        self._ranks._clock.stop = self._counted(self._ranks._clock.stop)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return self._each(self._ranks.batches(_Loader(loader, self)), 1)

    def _counted(self, call: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += sign * (time.thread_time() - begin)

        return counted

    def _each(self, batches: Iterator[Any], sign: int) -> Iterator[Any]:
        return iter(self._counted(lambda: next(batches, None), sign), None)


class _Loader:
    """A loader whose time is not counted."""

    def __init__(self, loader: DataLoader[Any], time: OwnTime) -> None:
        self.batch_sampler, self._loader, self._time = loader.batch_sampler, loader, time

    def __iter__(self) -> Iterator[Any]:
        return self._time._each(self._time._counted(iter, -1)(self._loader), -1)
