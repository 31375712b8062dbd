"""What callers say of a batch, beside the function that runs over it."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch, BatchDim
from paceline.torch._batch.items import Cost
from paceline.torch._batch.objective import Total, Weight
from paceline.torch._batch.samples import Collate, Samples
from paceline.torch._batch.splits import Split


class Options(NamedTuple):
    """How a batch is cut into items, how much these count, and what they cost."""

    weight: Weight | None = None
    cost: Cost | None = None
    total: Total | None = None
    scaler: Any = None
    collate: Collate | None = None
    batch_dim: BatchDim = 0
    split: Split | None = None

    def whole(self, batch: Any, *, gradients: bool = False) -> Batch:
        """The batch. `gradients`: whether its tensors may require them.

        Raises
        ------
        InvalidArgument
            If the batch cannot be cut in this way.
        """
        if self.collate is None:
            return Batch(batch, self.batch_dim, gradients=gradients, split=self.split)
        if self.split is not None:
            raise InvalidArgument(
                "split= together with collate=, whose batch is a list of samples, one per item. Give one of them."
            )
        if self.batch_dim != 0:
            raise InvalidArgument(
                "batch_dim= together with collate=, whose batch is a list of samples, one per item. What collate makes of some samples is not cut, so "
                "its tensors may have any layout. Leave batch_dim= out."
            )
        return Samples(batch, self.collate)
