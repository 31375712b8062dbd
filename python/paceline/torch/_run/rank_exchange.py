"""How ranks reach each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline import Error
from paceline.torch._run.rank_header import Header, Opening, Whole


class Exchange:
    """What a kind of ranks says how to do. `Ranks` says when."""

    def _post(self, header: Header) -> Opening:
        """Start to exchange the headers that open a step. For those that send early."""
        raise TypeError("Exchange._post is for subclasses")

    def _exchange(self, header: Header, error: BaseException | None, meanwhile: Callable[[], None]) -> Whole:
        """Raise on every rank unless all are in the same call and have succeeded."""
        raise TypeError("Exchange._exchange is for subclasses")

    def _union(self, present: list[bool]) -> list[bool]:
        """Which gradients there are on any rank."""
        raise TypeError("Exchange._union is for subclasses")

    def _tell(self, numbers: list[int]) -> list[int]:
        """The numbers of rank 0."""
        raise TypeError("Exchange._tell is for subclasses")

    def _start(self, bucket: torch.Tensor) -> Any:
        """Start to sum a bucket over all ranks, in place. The result is None, or has a method ``wait`` that returns when the sum is there."""
        raise TypeError("Exchange._start is for subclasses")

    def _add(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        work = self._start(tensor)
        if work is not None and hasattr(work, "wait"):
            work.wait()

    def _agree(self) -> None:
        """Raise, on all ranks, unless the sums were complete."""

    def _lost(self, error: Exception) -> Error:
        """What to raise for an error of the exchange."""
        raise TypeError("Exchange._lost is for subclasses")
