"""Pure decisions: what a share costs a device, how a batch is split, how a share is cut into micro-batches.

Nothing here needs a device, keeps state or looks at a clock.
"""

from paceline._core.plan import (
    CostModel,
    ItemCostFit,
    ItemSplit,
    Split,
    chunks,
    correction_floor,
    fit_item_cost,
    split_batch,
    split_even,
    split_items,
    split_padded,
    split_weighted,
)

__all__ = [
    "CostModel",
    "ItemCostFit",
    "ItemSplit",
    "Split",
    "chunks",
    "correction_floor",
    "fit_item_cost",
    "split_batch",
    "split_even",
    "split_items",
    "split_padded",
    "split_weighted",
]
