"""Pure decisions: the cost of a share on a device, the split of a batch, the device of each item.

Nothing here needs a device, keeps state or reads a clock.
"""

from paceline._core.plan import (
    CostModel,
    ItemCostFit,
    ItemSplit,
    Split,
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
    "correction_floor",
    "fit_item_cost",
    "split_batch",
    "split_even",
    "split_items",
    "split_padded",
    "split_weighted",
]
