"""Pure decisions: what a share costs a device, how a batch is split, which device gets which items.

Nothing here needs a device, keeps state or looks at a clock.
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
