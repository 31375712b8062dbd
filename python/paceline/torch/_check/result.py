"""What one run of a batch made of it, and the batch as it was before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from paceline.torch._batch.batch import Batch
from paceline.torch._check.state import Snapshot


@dataclasses.dataclass
class Result:
    """What a run made of the batch. `found` is the state that it left, `written` has the values of the parameters that it wrote, if they are known."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    outside: list[torch.Tensor | None]
    extras: Any
    found: Snapshot
    written: Mapping[int, torch.Tensor | None]
    joined: Mapping[Any, Mapping[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # buffers, by rules

    @property
    def finite(self) -> bool:
        """Whether there is anything to compare with."""
        gradients = (one for one in self.gradients if one is not None and one.layout is torch.strided)
        return math.isfinite(self.loss.item()) and all(bool(one.isfinite().all()) for one in gradients)


class Edited:
    """The tensors of a batch that ``loss_fn`` may change in place, so that each run begins with the same values."""

    def __init__(self, batch: Batch, *, leaves: bool = False) -> None:
        """`leaves`: whether tensors that require gradients may be changed, too, as where none are wanted."""
        tensors = [one for _, one in batch.tensors() if not one.is_inference() and (leaves or not one.requires_grad)]
        self._batch = batch
        self._kept = [(one, one._version, one.detach().clone()) for one in tensors]
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def note(self) -> None:
        """After the run that counts: remember what it has left."""
        self._after = [(one, one.detach().clone()) for one, version, _ in self._kept if one._version != version]
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Before another run."""
        self._batch.count_edits(of_all=True)
        for one, version, values in self._kept:
            if one._version != version:
                one.copy_(values)

    @torch.no_grad()
    def end(self) -> None:
        """Leave the batch as the run that counts has left it."""
        self.begin()
        for one, values in self._after:
            one.copy_(values)
