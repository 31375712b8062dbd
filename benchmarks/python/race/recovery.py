"""How fast a trainer recovers when a device becomes slow: in the step of the change, and in the steps after it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

GOAL_STEPS = 2
GOAL_MICRO_BATCHES = 1.0


class Hit(NamedTuple):
    """One step compared with the ideal, in which all devices finish together at the speeds that they had in that step."""

    seconds: float
    ideal_seconds: float
    longest_micro_batch_seconds: float
    largest_micro_batch: int  # items; a whole share if the trainer had no reason to hold any back

    @property
    def late_micro_batches(self) -> float:
        """How long after the ideal the step ended, in units of its longest micro-batch."""
        return (self.seconds - self.ideal_seconds) / self.longest_micro_batch_seconds


def last_step(events: Sequence[Mapping[str, Any]]) -> Hit:
    """Read `DataParallel.events`: the forward and backward passes of the last step, without the reduction."""
    last = max(event["step"] for event in events if event["kind"] == "step")
    pieces = [event for event in events if event["kind"] == "micro_batch" and event["step"] == last]
    items: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for piece in pieces:
        items[piece["device"]] += piece["end"] - piece["begin"]
        busy[piece["device"]] += piece["duration_seconds"]
    begin = min(piece["start_seconds"] for piece in pieces)
    return Hit(
        seconds=max(piece["start_seconds"] + piece["duration_seconds"] for piece in pieces) - begin,
        ideal_seconds=sum(items.values()) / sum(items[device] / busy[device] for device in items),
        longest_micro_batch_seconds=max(piece["duration_seconds"] for piece in pieces),
        largest_micro_batch=max(piece["end"] - piece["begin"] for piece in pieces),
    )


def summary(steps: Sequence[int | None], hits: Sequence[Hit]) -> dict[str, Any]:
    """Both figures with their goals, over several times that a device became slow."""
    typical = statistics.median(math.inf if count is None else count for count in steps)
    late = [hit.late_micro_batches for hit in hits]
    return {
        "steps": {
            "median": None if math.isinf(typical) else typical,
            "each": list(steps),
            "goal": GOAL_STEPS,
            "met": typical <= GOAL_STEPS,
        },
        "step_that_is_hit": {
            "late_micro_batches": round(statistics.median(late), 3),
            "each": [round(value, 3) for value in late],
            "over_ideal": round(statistics.median(hit.seconds / hit.ideal_seconds for hit in hits), 3),
            "longest_micro_batch_ms": round(
                1e3 * statistics.median(hit.longest_micro_batch_seconds for hit in hits), 2
            ),
            "largest_micro_batch_items": statistics.median_high(hit.largest_micro_batch for hit in hits),
            "goal": GOAL_MICRO_BATCHES,
            "met": statistics.median(late) <= GOAL_MICRO_BATCHES,
        },
    }


def text(found: Mapping[str, Any]) -> str:
    """The figures as two lines."""
    steps, hit = found["steps"], found["step_that_is_hit"]
    typical = "never" if steps["median"] is None else f"{steps['median']:g} steps"
    return (
        f"recovery after a busy loop starts: {typical} (goal {steps['goal']}: {_met(steps)}), the median of {steps['each']}\n"
        f"the step that is hit ends {hit['late_micro_batches']:.2f} micro-batches after the ideal (goal {hit['goal']:g}: {_met(hit)}); "
        f"it takes {hit['over_ideal']:.2f} times as long, its largest micro-batch is {hit['largest_micro_batch_items']} items"
    )


def _met(figure: Mapping[str, Any]) -> str:
    return "met" if figure["met"] else "missed"
