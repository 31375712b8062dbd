"""Ranks that come and go: they know each other only by sums, which an object of the caller's computes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from paceline import Cancelled, Error, InvalidArgument
from paceline.torch._devices.failures import noted
from paceline.torch._run.gradients import DTYPES
from paceline.torch._run.rank_header import Header, Whole
from paceline.torch._run.ranks import Ranks

_BITS = 0xFFFF  # of a checksum. The squares of so many bits are exact in float64, also summed over many ranks.


class Reducer(Protocol):
    """What sums tensors over the ranks that take part in a step, as torchft's manager does.

    A rank that takes part without counting, since it is yet to catch up, has its tensors replaced by zeros. So its weight counts nothing, and
    neither do its gradients.
    """

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Sum `tensor` over all ranks, in place. The result is None, or has a method ``wait`` that returns when the sum is there.

        Where it fails without raising, `should_commit` returns False.
        """

    def should_commit(self) -> bool:
        """Whether all sums of this step were complete, so that every rank may commit. Called once in a step, unless a rank has failed."""


class ReducerRanks(Ranks):
    """The ranks of a `Reducer`."""

    def __init__(self, reducer: Reducer, module: nn.Module, home: torch.device) -> None:
        super().__init__(module, home)
        for name in ("all_reduce", "should_commit"):
            if not callable(getattr(reducer, name, None)):
                raise InvalidArgument(
                    f"DataParallel: reducer is a {type(reducer).__name__} without a method {name}. It needs all_reduce(tensor), which sums over all "
                    "ranks in place, and should_commit()."
                )
        self._reducer = reducer

    def _exchange(self, header: Header, error: BaseException | None, meanwhile: Callable[[], None]) -> Whole:
        total = zlib.crc32(repr(float(header.total)).encode())
        marks = [int(mark) & _BITS for mark in (header.call, header.layout, total, header.present)]
        has_loss = header.loss_type >= 0
        mine = [header.failed, header.stop, header.weight, header.loss, has_loss, has_loss * header.loss_type]
        sums = torch.tensor([1, *mine, *marks, *(mark**2 for mark in marks)], dtype=torch.float64, device="cpu")
        with self._talking():
            meanwhile()
            self._add(sums)
        count, failed, stop, weight, loss, losses, types, *rest = sums.tolist()
        self.stop = stop > 0
        # Equal numbers have the square of their sum equal to their count times the sum of their squares.
        call, layout, denominator, present = (
            count * square == one * one for one, square in zip(rest[: len(marks)], rest[len(marks) :], strict=True)
        )
        if error is not None:
            noted(error, "no rank has committed anything")
        elif failed:
            raise Error(
                f"{self._call}: {int(failed)} of {int(count)} ranks failed, so no rank has committed anything, and .grad is as before. The "
                "processes of those ranks have raised the errors."
            )
        else:
            for same, what in ((call, "calls"), (layout, "parameters"), (denominator, "values of total")):
                if not same:
                    self._agree()  # otherwise the numbers mean nothing
                    raise InvalidArgument(
                        f"{self._call}: ranks differ in their {what}. All make the same calls in the same order, with equal modules and equal "
                        "total; a rank without items passes batch=None."
                    )
        number = types / losses if losses else 0
        dtype = next((dtype for dtype, code in DTYPES.items() if code == number), torch.float32)
        return Whole(weight, loss, dtype, present)

    def _union(self, present: list[bool]) -> list[bool]:
        counts = torch.tensor(present, dtype=torch.float64, device="cpu")
        self._add(counts)
        return [count > 0 for count in counts.tolist()]

    def _start(self, bucket: torch.Tensor) -> Any:
        return self._reducer.all_reduce(bucket)

    def _agree(self) -> None:
        with self._talking():
            complete = self._reducer.should_commit()
        if not complete:
            self._alone = False
            raise Cancelled(
                f"{self._call}: the reducer does not commit this step, since a rank is gone or has joined. Nothing was committed, and .grad is as "
                "before. Run the step again, with the batch dealt out to the ranks that there are now."
            )

    def _lost(self, error: Exception) -> Error:
        return Error(
            f"{self._call}: the reducer has failed: {error}. Nothing was committed, and .grad is as before. Whether another step works is for "
            "the reducer to say."
        )
