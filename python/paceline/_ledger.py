"""Read ledgers in order to show them. `paceline.balance.replay` checks whether they replay."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Decision:
    """One plan and the measured time of its step."""

    line: int  # in the ledger, from 1
    step: int
    batch_size: int
    shares: list[int]
    moved: bool
    predicted_seconds: float  # 0: no estimate yet
    reason: str
    measured_seconds: float | None = None  # None: the step was not recorded
    retired: list[str] = field(default_factory=list)  # devices retired since the previous decision
    restored: list[str] = field(default_factory=list)  # devices restored since the previous decision


@dataclass
class Ledger:
    """The settings of a balancer and all its decisions."""

    policy: str
    devices: list[str]
    decisions: list[Decision]
    by_cost: bool = False  # whether batches and shares count work instead of items


def read(lines: Iterable[str]) -> Ledger:
    """Parse a ledger that `paceline.balance.replay` accepts. If a step was retried, only the last try is kept."""
    ledger = Ledger("", [], [])
    retired: list[str] = []
    restored: list[str] = []
    for number, text in enumerate(lines, start=1):
        entry = json.loads(text)
        decisions = ledger.decisions
        if "options" in entry:
            ledger.policy = entry["options"]["policy"]
            ledger.devices = [device["name"] for device in entry["options"]["devices"]]
        elif "plan" in entry:
            plan = entry["plan"]
            if decisions and decisions[-1].step == plan["step"] and decisions[-1].measured_seconds is None:
                last = decisions.pop()
                retired, restored = last.retired + retired, last.restored + restored
            known = ("step", "batch_size", "shares", "moved", "predicted_seconds", "reason")
            decisions.append(Decision(number, **{key: plan[key] for key in known}, retired=retired, restored=restored))
            retired, restored = [], []
        elif "record" in entry and decisions:
            decisions[-1].measured_seconds = _seconds(entry["record"])
        elif "retire" in entry:
            retired.append(ledger.devices[entry["retire"]["device"]])
        elif "restore" in entry:
            restored.append(ledger.devices[entry["restore"]["device"]])
        elif "claims" in entry and entry["claims"].get("decided_here", True):
            ledger.by_cost |= "order" in entry["claims"]
    return ledger


@dataclass
class Stretch:
    """The consecutive steps with one split of one batch size."""

    first: Decision
    last_step: int
    steps: int
    predicted_seconds: float  # by the models of its last step
    measured_seconds: float | None  # mean


def stretches(ledger: Ledger) -> list[Stretch]:
    """Join equal consecutive decisions, in the order of their first steps."""
    found: list[Stretch] = []
    latest: dict[
        int, tuple[Stretch, list[float]]
    ] = {}  # by batch size, because the last batch of an epoch often has its own
    for decision in ledger.decisions:
        known = latest.get(decision.batch_size)
        if (
            known is None
            or decision.moved
            or decision.retired
            or decision.restored
            or known[0].first.shares != decision.shares
        ):
            known = Stretch(decision, decision.step, 0, 0.0, None), []
            latest[decision.batch_size] = known
            found.append(known[0])
        stretch, times = known
        stretch.last_step = decision.step
        stretch.steps += 1
        stretch.predicted_seconds = decision.predicted_seconds
        if decision.measured_seconds is not None:
            times.append(decision.measured_seconds)
            stretch.measured_seconds = sum(times) / len(times)
    return found


def _seconds(record: dict[str, Any]) -> float:
    """Time from the first start to the last finish. If it was not recorded, the busiest device's own time."""
    if record["step_seconds"] > 0:
        return float(record["step_seconds"])
    return float(max(sum(run[1] for run in device) for device in record["devices"]))
