"""The decisions in a ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Decision:
    """One plan, and what was measured of its step."""

    line: int  # in the ledger, from 1
    step: int
    batch_size: int
    shares: list[int]
    moved: bool
    predicted_seconds: float  # 0: no estimate yet
    reason: str
    record: dict[str, Any] | None = None  # None: the step was not recorded
    retired: list[str] = field(default_factory=list)  # devices retired since the previous decision
    restored: list[str] = field(default_factory=list)  # devices restored since the previous decision

    @property
    def measured_seconds(self) -> float | None:
        """Time from the first start to the last finish. If it was not recorded, the busiest device's own time."""
        if self.record is None:
            return None
        if self.record["step_seconds"] > 0:
            return float(self.record["step_seconds"])
        return float(max(sum(run[1] for run in device) for device in self.record["devices"]))


@dataclass
class Ledger:
    """The settings of a balancer and all its decisions."""

    policy: str
    devices: list[str]
    by_cost: bool  # batches and shares count work instead of items
    proportional: bool  # work as `Balancer` means it: shares are parts of a fixed amount
    decisions: list[Decision] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)  # since the last decision
    restored: list[str] = field(default_factory=list)

    def add(self, line: int, entry: dict[str, Any]) -> None:
        """Add a line of this balancer. If a step was tried again, only its last try is kept."""
        match entry:
            case {"plan": plan}:
                last = self.decisions[-1] if self.decisions else None
                known = ("step", "batch_size", "shares", "moved", "predicted_seconds", "reason")
                given = {key: plan[key] for key in known}
                if last is not None and last.step == plan["step"] and last.record is None:
                    self.decisions.pop()
                    if last.moved and not (plan["moved"] or self.retired or self.restored):
                        given |= {"moved": True, "reason": last.reason}
                    self.retired, self.restored = last.retired + self.retired, last.restored + self.restored
                self.decisions.append(Decision(line, **given, retired=self.retired, restored=self.restored))
                self.retired, self.restored = [], []
            case {"record": record} if self.decisions:
                self.decisions[-1].record = record
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
            proportional = bool(options["proportional"])
            by_cost = proportional or options.get("unit", "items") != "items"
            ledgers.append(Ledger(options["policy"], names, by_cost, proportional))
        else:
            ledgers[entry.get("balancer", 0)].add(number, entry)
    return ledgers
