"""A scaler of a pool whose engine a test scripts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.torch import Autoscale
from paceline.torch._pool.autoscale import Scale
from torch_support import hosts


class Scripted:
    """An engine to which comes what a test says. All of its devices together do one unit of work a second."""

    def __init__(self, count: int) -> None:
        self.jobs_of: Any = None
        self.names = hosts(count)
        self.active = list(self.names)
        self.speeds = [1 / count] * count
        self.lost = [False] * count
        self.work, self.jobs, self.waiting, self.known = 0.0, 0.0, 0.0, True
        self.covers: list[tuple[list[bool], int]] = []
        self.runs = (0.0, 0.0, 0.0)
        self.filling = 0.0
        self.restored: list[str] = []
        self.acting: Any = lambda: None  # called inside of the calls that retire and restore

    def scale_tick(self, _: float, __: float) -> tuple[Any, ...]:
        came = 1.0, self.work, self.jobs, self.waiting, self.runs, self.filling
        return *came, self.known, self.speeds, self.lost, self.covers

    def retire(
        self, name: str, unless_last: bool = False, released: bool = False, activation_seconds: float = 0.0
    ) -> bool:
        assert unless_last or not released
        assert activation_seconds == 0.0  # it serves nothing
        self.acting()
        if (unless_last and self.active == [name]) or (released and name not in self.active):
            return False
        if name in self.active:
            self.active.remove(name)
        return True

    def on_wants_devices(self, call: Any, wait_seconds: float) -> None:
        pass

    def restore(self, name: str) -> None:
        self.acting()
        self.restored.append(name)
        if name not in self.active:
            self.active.append(name)


class Known(SimpleNamespace):
    """Can be referred to weakly."""


def scripted(count: int, **options: Any) -> tuple[Scripted, Scale]:
    engine = Scripted(count)
    devices = [SimpleNamespace(name=name) for name in engine.names]
    jobs: Any = Known(engine=engine, devices=devices, ends=[], seats={}, keeps_models=False)
    engine.jobs_of = jobs  # keeps it
    scale = Scale(jobs, Autoscale(**options))
    jobs.ends[0]()  # its thread; the test looks by itself
    return engine, scale


def looked(scale: Scale, times: int = 1) -> None:
    for _ in range(times):
        scale.look()
