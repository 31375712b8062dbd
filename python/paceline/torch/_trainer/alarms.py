"""Calls back when a device idles, memory grows, a device is throttled, or steps take long."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch.utils.hooks import RemovableHandle

from paceline import Device, InvalidArgument
from paceline._core.runtime import device_health
from paceline._observe import resident_bytes
from paceline._words import require
from paceline.torch._devices import cuda
from paceline.torch._trainer.arguments import check_count, is_number
from paceline.torch._trainer.works import Works

Kind = Literal["busy", "memory_growth", "throttled", "step_seconds"]

# Limits of a GPU's clock that say that something is wrong. A power cap and set clocks are settings.
_SLOWDOWNS = ("heat", "overheating", "a slowdown by the hardware", "the power supply's brake")
_LEAST_THROTTLED = 0.05  # of the time; less costs less than the noise of a step


@dataclasses.dataclass(frozen=True)
class Alarm:
    """What `DataParallel.on_alarm` calls back with. ``str(alarm)`` is a sentence for a log.

    Attributes
    ----------
    kind
        ``"busy"``, ``"memory_growth"``, ``"throttled"`` or ``"step_seconds"``.
    device
        The name of the device or, for memory, of the memory space. None for the trainer as a whole.
    value, limit
        What was measured, and the limit that it has passed. Fractions, but seconds for ``"step_seconds"``.
    step
        How many steps had run.
    """

    kind: Kind
    device: str | None
    value: float
    limit: float
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


class Sample(NamedTuple):
    """Everything that alarms compare, at one moment."""

    seconds: float
    report: Mapping[str, Any]
    memory: dict[str, int]  # bytes in use, by memory space
    health: dict[str, dict[str, Any]]  # by device, if throttling is asked for
    steps_alone: int  # in which the trainer had one device run everything, to measure it


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one callback. None: no alarm."""

    busy: float | None
    memory_growth: float | None
    throttled: bool
    step_seconds: float | None

    def alarms(self, first: Sample, last: Sample, now: Sample) -> Iterator[Alarm]:
        """The alarms since the `last` sample. Memory is compared with the `first` one."""
        step = now.report["steps"]
        steps = step - last.report["steps"]
        spent = now.report["step_seconds"] - last.report["step_seconds"]
        if self.step_seconds is not None and steps and spent / steps > self.step_seconds:
            text = f"a step takes {spent / steps:.3g} s, more than {self.step_seconds:g} s (mean of {steps})"
            yield Alarm("step_seconds", None, spent / steps, self.step_seconds, step, text)
        for name, device in now.report["devices"].items():
            before = last.report["devices"][name]
            busy = device["busy_seconds"] - before["busy_seconds"]
            whole = busy + device["idle_seconds"] - before["idle_seconds"]
            judged = not self.cannot_judge(("busy", name), last, now)
            if self.busy is not None and judged and whole > 0 and busy / whole < self.busy:
                text = f"{name} computes in {busy / whole:.0%} of the time of the steps, less than {self.busy:.0%}"
                yield Alarm("busy", name, busy / whole, self.busy, step, text)
            if self.throttled:
                part, why = _throttled(last.health[name], now.health[name], now.seconds - last.seconds)
                if part >= _LEAST_THROTTLED:
                    text = f"{name} is throttled in {part:.0%} of the time: {why}"
                    yield Alarm("throttled", name, part, _LEAST_THROTTLED, step, text)
        most = math.inf if self.memory_growth is None else self.memory_growth
        for space, used in now.memory.items():
            growth = used / max(1, first.memory[space]) - 1
            if growth > most:
                text = f"memory of {space} has grown by {growth:.0%} to {used / 2**30:.2f} GiB, by more than {most:.0%}"
                yield Alarm("memory_growth", space, growth, most, step, text)

    def cannot_judge(self, key: tuple[Kind, str | None], last: Sample, now: Sample) -> bool:
        """Whether the time between two samples says nothing about an alarm of this kind."""
        kind, device = key
        return kind == "busy" and (
            now.steps_alone != last.steps_alone or bool(now.report["devices"][device]["retired"])
        )


class AfterStep(Protocol):
    """What is called after each step. `sample` reads the figures that alarms compare."""

    def after_step(self, sample: Callable[[Limits], Sample]) -> None: ...


class Watch:
    """One callback: its limits, its samples, and which of its alarms are on."""

    def __init__(self, callback: Callable[[Alarm], object], limits: Limits, every: int) -> None:
        self._callback = callback
        self._limits = limits
        self._every = every
        self._steps = 0
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._on: set[tuple[Kind, str | None]] = set()

    def after_step(self, sample: Callable[[Limits], Sample]) -> None:
        """Call back if it is time, and if an alarm has come up since the last time."""
        self._steps += 1
        if self._steps % self._every:
            return
        now, last = sample(self._limits), self._last
        self._last = now
        # The first steps compile and allocate, so they only give something to compare with.
        if self._first is None or last is None:
            self._first = now
            return
        found = {(alarm.kind, alarm.device): alarm for alarm in self._limits.alarms(self._first, last, now)}
        self._on = {key for key in self._on if key in found or self._limits.cannot_judge(key, last, now)}
        for key, alarm in found.items():
            if key not in self._on:
                self._on.add(key)  # each by itself: a callback may raise, and then the others are called next time
                self._callback(alarm)


class Alarms:
    """The alarms of one trainer."""

    def __init__(self, report: Callable[[], Mapping[str, Any]], works: Works, devices: Sequence[Device]) -> None:
        self._report = report
        self.works = works
        self.devices = devices
        self._watches: OrderedDict[int, AfterStep] = OrderedDict()
        self.recent: deque[tuple[float, Alarm]] = deque(maxlen=64)  # with the moment of each, by time.perf_counter

    def on_alarm(
        self,
        callback: Callable[[Alarm], object],
        *,
        busy: float | None = 0.7,
        memory_growth: float | None = 0.5,
        throttled: bool = True,
        step_seconds: float | None = None,
        every: int = 20,
    ) -> RemovableHandle:
        """Call back when a device idles, memory grows, a device is throttled, or steps take long.

        Each alarm is called once, and again only after it has gone. The first `every` steps raise none, since first steps compile and
        allocate. The callback runs on the thread of `step`, `loss` or a run of `batch`, after that is committed. It may use the trainer, for instance `retire`.
        What it raises comes out of that call. A limit of None means no such alarm.

        Parameters
        ----------
        callback
            ``callback(alarm)`` with an `Alarm`: ``kind``, ``device``, ``value``, ``limit``, ``step``, and a sentence as ``str(alarm)``.
        busy
            A device that works and computes in less than this fraction of the time of the steps.
        memory_growth
            Memory in use has grown by more than this fraction since the first `every` steps: the resident memory of the process, and what
            PyTorch has allocated on each GPU.
        throttled
            Whether to call back if a device is held back in 5 % of the time or more. GPUs: by heat, the hardware, or the power supply's brake;
            power caps are settings and do not count. Host: by the CPU quota of the cgroup, or by a hypervisor.
        step_seconds
            The mean time of a step, in seconds.
        every
            Figures are read, and compared with those before, after every so many steps and runs of `batch`. With GPUs this waits for them.

        Returns
        -------
        torch.utils.hooks.RemovableHandle
            ``remove()`` ends the calls.

        Raises
        ------
        InvalidArgument
            For a callback or a limit that cannot be used.

        Examples
        --------
        >>> trainer.on_alarm(lambda alarm: logging.warning("%s", alarm), step_seconds=2.0)  # doctest: +SKIP
        """
        if not callable(callback):
            raise InvalidArgument(
                f"on_alarm: callback is a {type(callback).__name__}; a function that takes an Alarm is needed."
            )
        for name, value, most in (
            ("busy", busy, 1.0),
            ("memory_growth", memory_growth, math.inf),
            ("step_seconds", step_seconds, math.inf),
        ):
            bounds = "above 0 and at most 1" if most == 1.0 else "above 0"
            fits = value is None or (is_number(value) and 0 < value <= most)
            require(fits, "on_alarm", name, value, f"it must be a number {bounds}, or None")
        check_count("on_alarm", "every", every)

        def noted(alarm: Alarm) -> None:
            self.recent.append((time.perf_counter(), alarm))
            callback(alarm)

        return self.also(Watch(noted, Limits(busy, memory_growth, throttled, step_seconds), every))

    def also(self, watch: AfterStep) -> RemovableHandle:
        """Call something else after each step."""
        handle = RemovableHandle(self._watches)
        self._watches[handle.id] = watch
        return handle

    def after_step(self) -> None:
        """Look after a step that was committed."""
        for watch in list(self._watches.values()):
            watch.after_step(self._sample)

    def _sample(self, limits: Limits) -> Sample:
        memory = {"host": resident_bytes()}
        for device in self.devices:
            if device.kind == "cuda":
                memory[device.memory_space] = cuda.memory_in_use(device.index)
        health = {}
        for device in self.devices if limits.throttled else ():  # a millisecond each
            health[device.name] = {**device_health(device.name), "core_count": len(device.cores)}
        alone = self.works.steps.alone
        steps_alone = 0 if alone is None else alone.steps_alone
        return Sample(time.monotonic(), self._report(), memory, health, steps_alone)


def _throttled(before: dict[str, Any], after: dict[str, Any], seconds: float) -> tuple[float, str]:
    """The largest part of the time in which something held the device back, and what that was."""
    found = [(0.0, "")]
    for limit in _SLOWDOWNS:
        limited = [health.get("limited_seconds", {}).get(limit) for health in (before, after)]
        if None not in limited and seconds > 0:
            found.append(((limited[1] - limited[0]) / seconds, limit))
    if "quota" in before and "quota" in after:
        periods, used_up = (after["quota"][key] - before["quota"][key] for key in ("periods", "throttled"))
        found.append((used_up / periods if periods else 0.0, "the CPU quota of its cgroup was used up"))
    if "cores" in before and "cores" in after and seconds > 0 and after["core_count"]:
        stolen = after["cores"]["stolen_seconds"] - before["cores"]["stolen_seconds"]
        found.append((stolen / after["core_count"] / seconds, "the hypervisor gave it to other machines"))
    return max(found)
