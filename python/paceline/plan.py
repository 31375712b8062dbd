"""Pure decisions: the cost of a share on a device, the split of a batch, the device of each item, the stages of a pipeline.

Nothing here needs a device, keeps state or reads a clock.
"""

from paceline._core.plan import (
    BlockCost,
    CostModel,
    ItemCostFit,
    ItemSplit,
    PipelineTimes,
    Split,
    StageDevice,
    StagePlan,
    correction_floor,
    fit_item_cost,
    gpipe,
    one_f_one_b,
    pipeline_times,
    plan_stages,
    split_batch,
    split_even,
    split_items,
    split_padded,
    split_weighted,
)
from paceline._pool_question import PoolCandidate, PoolQuestion

__all__ = [
    "BlockCost",
    "CostModel",
    "ItemCostFit",
    "ItemSplit",
    "PipelineTimes",
    "PoolCandidate",
    "PoolQuestion",
    "Split",
    "StageDevice",
    "StagePlan",
    "correction_floor",
    "fit_item_cost",
    "gpipe",
    "one_f_one_b",
    "pipeline_times",
    "plan_stages",
    "split_batch",
    "split_even",
    "split_items",
    "split_padded",
    "split_weighted",
]
