"""Says which trial of a search runs its next rung on which of some unequal devices, so that all trials end soonest.

There is no clock and no thread here, so a simulation can ask it, too. trial_search.py does what it says.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from paceline.plan import split_items

LAST_RUNS = 3  # whose median is a device's speed: one odd run does not count, and a slower device is known after two
FIT_ROUNDS = 20
OVERDUE = 0.1  # a run that lasts longer than predicted is taken to last this part of the prediction more


class Schedule:
    """Says which trial runs its next rung on which device.

    All that is left of the trials is dealt out by `paceline.plan.split_items`: longest first, to whoever ends it first, and then better by exchanges. A device
    that is idle starts the longest trial of its part. If its part is empty, faster devices end what waits sooner, and it stays idle. That is decided anew for
    each rung, so nothing is bound to a device for longer.

    A rung takes cost * the pace of its kind * the pace of the device. Both are fitted to the runs that have ended. A device that has run nothing is taken to
    be as fast as the fastest one.

    Parameters
    ----------
    reach
        The part of the trials of a rung that goes on to the next one: 1 if none is pruned.
    paces
        Seconds of a unit of cost, by device, if they are known before.
    """

    def __init__(self, reach: float = 1.0, paces: Mapping[str, float] | None = None) -> None:
        self._reach = reach
        self._seen: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=LAST_RUNS))
        self._known = dict(paces or {})
        self._left: dict[Hashable, tuple[str, list[float]]] = {}  # kind, and the costs of the rungs that are left
        self._runs: dict[str, tuple[Hashable, float]] = {}  # by device: the trial, and when its rung began

    def add(self, trial: Hashable, kind: str, costs: Sequence[float]) -> None:
        """One more trial. `costs` are those of its rungs, in a unit that is the same for all trials of its `kind`."""
        if not all(cost > 0 for cost in costs):
            raise ValueError(
                f"The costs of a trial of {kind} are {list(costs)}. They must be positive, and rungs must ascend."
            )
        self._left[trial] = kind, list(costs)

    def starts(self, now: float, devices: Sequence[str]) -> list[tuple[Any, str]]:
        """Which trials start their next rung now, of the devices that may start something."""
        running = {trial for trial, _ in self._runs.values()}
        waiting = [trial for trial in self._left if trial not in running]
        if not waiting or not devices:
            return []
        kinds, paces = self._paces()
        unknown_kind = math.exp(statistics.fmean(map(math.log, kinds.values()))) if kinds else 1.0
        fastest = min(paces.values(), default=1.0)

        def work(trial: Hashable) -> list[float]:
            kind, costs = self._left[trial]
            pace = kinds.get(kind, unknown_kind)
            return [pace * cost * self._reach**number for number, cost in enumerate(costs)]

        models = []
        for name in devices:
            pace, busy = paces.get(name, fastest), 0.0
            if name in self._runs:
                trial, began = self._runs[name]
                rung, *later = (pace * part for part in work(trial))
                busy = max(began + rung - now, OVERDUE * rung) + sum(later)
            models.append((busy, pace))
        whole = [sum(work(trial)) for trial in waiting]
        found = []
        for name, part in zip(devices, split_items(whole, models).items, strict=True):
            if part and name not in self._runs:
                trial = waiting[max(part, key=whole.__getitem__)]
                self._runs[name] = trial, now
                found.append((trial, name))
        return found

    def ended(self, device: str, seconds: float, *, goes_on: bool) -> None:
        """The rung that runs on `device` has ended. If the trial `goes_on` and has another rung, it waits."""
        trial, _ = self._runs.pop(device)
        kind, costs = self._left[trial]
        self._seen[kind, device].append(max(seconds, 1e-9) / costs.pop(0))
        if not (goes_on and costs):
            del self._left[trial]

    def broke_off(self, device: str, *, goes_on: bool) -> None:
        """The rung that runs on `device` did not end. If the trial `goes_on`, it waits to run that rung again."""
        trial, _ = self._runs.pop(device)
        if not goes_on:
            del self._left[trial]

    def ideal_seconds(self, done: Mapping[str, float]) -> float:
        """How long everything would have taken if no device had been idle. `done`: by device, the seconds of its runs."""
        _, paces = self._paces()
        weights = {name: 1.0 / paces[name] for name in done if name in paces}
        return sum(done[name] * weight for name, weight in weights.items()) / sum(weights.values()) if weights else 0.0

    def _paces(self) -> tuple[dict[str, float], dict[str, float]]:
        """Those of kinds and of devices: the least squares of the logarithms, by turns."""
        logs = {key: math.log(statistics.median(each)) for key, each in self._seen.items()}
        kinds = dict.fromkeys((kind for kind, _ in logs), 0.0)
        seen = dict.fromkeys((device for _, device in logs), 0.0)
        devices = seen | {device: math.log(pace) for device, pace in self._known.items()}
        for _ in range(FIT_ROUNDS):
            for kind in kinds:
                kinds[kind] = statistics.fmean(log - devices[d] for (k, d), log in logs.items() if k == kind)
            for device in seen:
                devices[device] = statistics.fmean(log - kinds[k] for (k, d), log in logs.items() if d == device)
        return {k: math.exp(log) for k, log in kinds.items()}, {d: math.exp(log) for d, log in devices.items()}
