"""Batches on their way from a loader to the steps they are for, with what their losses count."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from paceline import InvalidArgument
from paceline.torch._batch.global_sampler import GlobalBatchSampler, Stamp
from paceline.torch._ranks.meeting import Meeting
from paceline.torch._trainer.arguments import check_count, is_number

Weight = Callable[[Any], Any] | None  # of this rank's items in a batch


class Taken(NamedTuple):
    """A batch that the loop has."""

    stamp: Stamp
    mine: float  # the weight of this rank's items in it
    whole: float  # the weight of all items of the optimizer's step, on all ranks
    complete: bool  # whether the optimizer's step comes after it
    alone: bool  # whether the optimizer's step is for this batch alone
    weighed: bool = False  # whether the weights are the caller's


class Loop:
    """Hands batches out, and notes what each is until the step for it begins."""

    def __init__(self, sampler: GlobalBatchSampler, meeting: Meeting) -> None:
        self.taken: deque[Taken] = deque()  # batches that were handed out, and that no step was for
        self._is_ahead = False
        self._sampler = sampler
        self._meeting = meeting

    def batches(self, loader: Iterable[Any], accumulate: int, weight: Weight) -> Iterator[Any]:
        """For a loop that is done with a batch when it takes the next one."""
        self._is_ahead = False
        for batch, taken in self._prepared(loader, accumulate, weight):
            self.taken.append(taken)
            yield batch
            with contextlib.suppress(ValueError):  # a step was for it
                self.taken.remove(taken)

    def ahead(self, loader: Iterable[Any], accumulate: int, weight: Weight) -> Iterator[Any]:
        """For a loop that takes batches before the earlier ones had their steps."""
        self._is_ahead = True
        self._sampler.begin_epoch()
        for batch, taken in self._prepared(loader, accumulate, weight):
            self.taken.append(taken)
            yield batch

    @property
    def next(self) -> Taken | None:
        """The batch that the loop is at, if its step has not begun."""
        return self.taken[0] if self.taken and not self._is_ahead else None

    def weight_of(self, weight: Any) -> float:
        """A weight as a number: negative if it is none, which all ranks then hear of."""
        if isinstance(weight, torch.Tensor) and weight.numel() == 1:
            return float(weight)
        return float(weight) if is_number(weight) else -1.0

    def whole(self, call: str, mine: list[float]) -> float:
        """The sum of the weights of all ranks, which is the same number on each."""
        rows = self._meeting.gather(mine)()
        for rank, row in enumerate(rows):
            if not all(0 <= one < float("inf") for one in row):
                raise InvalidArgument(
                    f"{call}: rank {rank} has a weight that is no number of at least 0: {row}. A weight is how much the rank's mean counts, such as the "
                    "number of its tokens."
                )
        total = sum(map(sum, rows))
        if not total > 0:
            raise InvalidArgument(
                f"{call}: the weights of all ranks are 0. The loss is divided by their sum, so skip such batches, on all ranks."
            )
        return total

    def _prepared(self, loader: Iterable[Any], accumulate: int, weight: Weight) -> Iterator[tuple[Any, Taken]]:
        """The batches of a loader, with what their losses count."""
        check_count("batches", "accumulate", accumulate)
        self.taken.clear()
        group: list[tuple[Any, Taken]] = []
        for batch in self._sampler.batches(loader, ahead=True):
            taken = self._of_items(accumulate)
            if weight is None:
                yield batch, taken
                continue
            group.append((batch, taken))
            if taken.complete:
                mine = [self.weight_of(weight(batch)) if taken.mine else 0.0 for batch, taken in group]
                whole = self.whole("batches", mine)
                for (each, taken), own in zip(group, mine, strict=True):
                    yield each, taken._replace(mine=own, whole=whole, weighed=True)
                group.clear()

    def _of_items(self, accumulate: int) -> Taken:
        """What the batch that the sampler has handed out last counts, if all items count alike."""
        sampler, stamp = self._sampler, self._sampler.current
        assert stamp is not None
        begin = stamp.position // accumulate * accumulate
        together = range(begin, min(begin + accumulate, len(sampler)))
        return Taken(
            stamp,
            mine=stamp.shares[self._meeting.rank],
            whole=sum(map(sampler.size_of, together)),
            complete=stamp.position == together[-1],
            alone=len(together) == 1,
        )


class RanksLoader:
    """A loader for frameworks that loop over it themselves, and may take batches ahead. `BalancedRanks.loader` makes it."""

    def __init__(self, loop: Loop, loader: Any, accumulate: int, weight: Weight) -> None:
        self._loop, self._loader, self._accumulate, self._weight = loop, loader, accumulate, weight

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.ahead(self._loader, self._accumulate, self._weight)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. The present epoch goes on where it is."""
        self._loader.batch_sampler.set_epoch(epoch)
