"""Read ledgers in order to show them. `paceline.balance.replay` checks whether they replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
    by_cost: bool  # batches and shares count work instead of items
    decisions: list[Decision] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)  # since the last decision
    restored: list[str] = field(default_factory=list)

    def add(self, line: int, entry: dict[str, Any]) -> None:
        """Add a line of this balancer. If a step was tried again, only its last try is kept."""
        match entry:
            case {"plan": plan}:
                last = self.decisions[-1] if self.decisions else None
                if last is not None and last.step == plan["step"] and last.measured_seconds is None:
                    self.decisions.pop()
                    self.retired, self.restored = last.retired + self.retired, last.restored + self.restored
                known = ("step", "batch_size", "shares", "moved", "predicted_seconds", "reason")
                given = {key: plan[key] for key in known}
                self.decisions.append(Decision(line, **given, retired=self.retired, restored=self.restored))
                self.retired, self.restored = [], []
            case {"record": record} if self.decisions:
                self.decisions[-1].measured_seconds = _seconds(record)
            case {"retire": {"device": device}}:
                self.retired.append(self.devices[device])
            case {"restore": {"device": device}}:
                self.restored.append(self.devices[device])


def read(lines: Iterable[str]) -> list[Ledger]:
    """Parse a ledger that `paceline.balance.replay` accepts. Returns one `Ledger` per balancer that wrote it."""
    ledgers: list[Ledger] = []
    for number, text in enumerate(lines, start=1):
        entry = json.loads(text)
        if "options" in entry:
            options = entry["options"]
            names = [device["name"] for device in options["devices"]]
            ledgers.append(Ledger(options["policy"], names, options["proportional"]))
        else:
            ledgers[entry.get("balancer", 0)].add(number, entry)
    return ledgers


class Stretch:
    """The consecutive steps with one split of one batch size."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self.first = decisions[0]
        self.last_step = decisions[-1].step
        self.steps = len(decisions)
        self.predicted_seconds = decisions[-1].predicted_seconds  # by the models of its last step
        times = [one.measured_seconds for one in decisions if one.measured_seconds is not None]
        self.measured_seconds = sum(times) / len(times) if times else None


def stretches(ledger: Ledger) -> list[Stretch]:
    """Join equal consecutive decisions, in the order of their first steps."""
    found: list[list[Decision]] = []
    latest: dict[int, list[Decision]] = {}  # by batch size, because the last batch of an epoch often has its own
    for decision in ledger.decisions:
        known = latest.get(decision.batch_size)
        changed = decision.moved or decision.retired or decision.restored
        if known is None or changed or known[0].shares != decision.shares:
            known = latest[decision.batch_size] = []
            found.append(known)
        known.append(decision)
    return [Stretch(decisions) for decisions in found]


def _seconds(record: dict[str, Any]) -> float:
    """Time from the first start to the last finish. If it was not recorded, the busiest device's own time."""
    if record["step_seconds"] > 0:
        return float(record["step_seconds"])
    return float(max(sum(run[1] for run in device) for device in record["devices"]))
