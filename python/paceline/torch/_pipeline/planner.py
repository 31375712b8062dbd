"""Plans the steps of a pipeline from what was measured of its blocks and devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline import DeviceGroup, InvalidArgument
from paceline._core import engine as core
from paceline.torch._pipeline.plans import PipelinePlan


class Planner:
    """The closed loop of a pipeline: block costs and speeds in, plans out."""

    def __init__(
        self,
        group: DeviceGroup,
        blocks: int,
        *,
        cuts: Sequence[int] | None,
        schedule: str,
        micro_batches: int | None,
    ) -> None:
        self.retired: set[int] = set()
        self.least_items = 1
        self.moves = 0
        self.recent_moves: deque[dict[str, Any]] = deque(maxlen=16)
        self.speeds = [1.0] * len(group)
        self._blocks = blocks
        self._cuts = cuts
        self._schedule = schedule
        self._micro_batches = micro_batches
        self._devices = len(group)

    def plan(self, items: int) -> PipelinePlan:
        """The plan of a step of so many items."""
        count = min(self._micro_batches or 8, max(1, items // self.least_items))
        stages = min(self._devices, self._blocks)
        cuts = tuple(self._cuts or (self._blocks * s // stages for s in range(stages)))
        even, more = divmod(items, count)
        sizes = tuple(even + (m < more) for m in range(count))
        schedule = core.gpipe(len(cuts), count) if self._schedule == "gpipe" else core.one_f_one_b(len(cuts), count, [1] * len(cuts))
        return PipelinePlan(cuts, tuple(range(len(cuts))), sizes, schedule)

    def record(self, plan: PipelinePlan, record: Any) -> bool:
        return False

    def memory(self) -> dict[str, dict[str, float]]:
        return {}

    def explain(self) -> str:
        return ""

    def out_of_memory(self, plan: PipelinePlan, stage: int) -> bool:
        return False

    def retire(self, device: int) -> None:
        self.retired.add(device)

    def restore(self, device: int) -> None:
        self.retired.discard(device)
