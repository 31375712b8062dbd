"""What a trainer shows to `paceline top`: figures of its last steps, which are read without waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline import Device, Error
from paceline._core.engine import StepOutcome
from paceline._observe import Observed, resident_bytes
from paceline.torch._devices import cuda
from paceline.torch._trainer.recent_steps import RecentSteps, Step, Times
from paceline.torch._trainer.works import Works


class Look:
    """Reads the figures. Called on another thread than that of the steps, so it only reads what steps have left."""

    def __init__(self, kind: str, name: str, devices: Sequence[Device], works: Works, recent: RecentSteps) -> None:
        self._kind, self._name, self._devices, self._works, self._recent = kind, name, devices, works, recent

    def __call__(self) -> dict[str, Any]:
        if self._recent.ended:
            return {}
        steps = self._recent.steps.copy()
        known = [(step, claims) for step in steps if not step.error and (claims := claims_of(step.known))]
        items, last, busy = ([0.0] * len(self._devices) for _ in range(3))
        for _, claims in known:
            last = [0.0] * len(self._devices)
            for device, begin, end, start, finish, *_, kind in claims:
                busy[device] += finish - start
                if kind != "B":  # a pipeline runs items forward and backward
                    last[device] += end - begin
            items = [one + more for one, more in zip(items, last, strict=True)]
        seconds = _period([step for step, _ in known])
        whole = seconds * len(known)
        return {
            "kind": self._kind,
            "name": self._name,
            "steps": steps[-1].number + (not steps[-1].error) if steps else 0,
            "step_seconds": seconds,
            "since_seconds": time.perf_counter() - steps[-1].ended if steps else None,
            "devices": {
                one.name: {
                    "share": last[at],
                    "items_per_second": items[at] / busy[at] if busy[at] > 0 else 0.0,
                    "busy": min(1.0, busy[at] / whole) if whole > 0 else 0.0,
                    "retired": at in self._works.retired,
                    "memory_bytes": cuda.memory_in_use(one.index) if one.kind == "cuda" else None,
                    "limit_bytes": self._works.limits[at] if self._works.limits else None,
                }
                for at, one in enumerate(self._devices)
            },
            "host_bytes": resident_bytes(),
        }


def claims_of(known: Times | StepOutcome | None) -> Sequence[Any]:
    """What ran in a step, by what it has as `known`, if that needs no wait."""
    try:
        return known.claims if isinstance(known, Times) or (known is not None and known.settled) else ()
    except Error:  # a lost device, which the trainer reports
        return ()


def _period(steps: Sequence[Step]) -> float:
    """The mean time from step to step. On GPUs the call of a step ends before the step."""
    if len(steps) < 2:
        return sum(step.ended - step.began for step in steps)
    return (steps[-1].began - steps[0].began) / (len(steps) - 1)


def show(trainer: Any, how: str | None) -> None:
    """Show a trainer, if that is asked for. If that fails it is closed."""
    if how is None:
        return
    try:
        title = f"{type(trainer.module).__name__} on {', '.join(trainer._works.names)}"
        look = Look(type(trainer).__name__, title, trainer.group.devices, trainer._works, trainer._recent)
        trainer._lifetime.observed = look, Observed(look)
    except BaseException:
        trainer.close()
        raise
