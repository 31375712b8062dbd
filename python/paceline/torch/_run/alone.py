"""Measures while training whether one device alone would be faster. In small steps devices hinder each other."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from paceline._words import plural

_FIRST_TRIAL = 32  # steps; by then shares have settled
_NEXT_TRIAL = 4  # the next trial comes after this many times the steps of the last trial
_TRIES = 6  # steps of a device in a trial; the first step allocates and does not count
_MOST_DEVICES = 2  # in a trial; one of many devices alone takes many times as long as all together
_RECENT = 50  # steps
_MOST_SECONDS = 20e-3  # per step; in longer steps devices hinder each other little, and a trial would cost more
_OTHER_KIND = 8  # after so many steps in a row with other kinds of batches, the kind of the last one is watched
_CLEARLY = 0.9  # of the time, or less, is clearly faster


class Alone(NamedTuple):
    """Medians of the steps that a device ran alone, in seconds."""

    step: float
    computing: float  # the part of the step in which the device ran the batch


class Measured(NamedTuple):
    """What is known of one kind of batch."""

    size: int  # of the batch
    together: float  # median seconds of a usual step
    alone: dict[int, Alone]  # by device


class AloneTrials:
    """Runs a few small steps on one device alone, ever more seldom, and compares them with usual steps.

    The times of devices that work side by side do not show how long one would take alone. On the host each operator takes Python's lock.
    If operators are small, handing the lock over takes most of the time. For example, one device took 2.2 ms alone for a batch of 4 items,
    and two devices with 2 items took 5.6 ms each.
    """

    def __init__(self, without: Collection[int] = ()) -> None:
        """Try all devices except those in `without`."""
        self.steps_alone = 0  # how many steps one device has run
        self._without = frozenset(without)
        self._kind: Hashable = None
        self._size = 0
        self._others = 0  # steps with other kinds of batches since the last step of this kind
        self._start()

    def _start(self) -> None:
        self._steps = 0
        self._next = _FIRST_TRIAL
        self._usual: deque[float] = deque(maxlen=_RECENT)
        self._waiting: list[int] = []  # devices that are yet to run alone in this trial
        self._tries: list[Alone] = []  # of the first of the waiting devices
        self._found: dict[int, Alone] = {}

    def device(self, kind: Hashable, items: Sequence[int]) -> int | None:
        """The device that should run the next step alone; None: all devices should. `items`: what each device ran in the last step."""
        if kind != self._kind or self._steps < self._next:
            return None
        if not self._waiting:
            devices = set(range(len(items))) - self._without
            self._waiting = sorted(devices, key=lambda device: (-items[device], device))[:_MOST_DEVICES]
        return self._waiting[0]

    def add(self, kind: Hashable, size: int, seconds: float) -> None:
        """Note a usual step."""
        if kind != self._kind:
            self._others += 1
            if self._kind is not None and self._others < _OTHER_KIND:
                return
            self._kind, self._size = kind, size
            self._start()
        self._others = 0
        self._steps += 1
        self._usual.append(seconds)
        if self._steps >= self._next and statistics.median(self._usual) > _MOST_SECONDS:
            self._next = self._steps * _NEXT_TRIAL

    def add_alone(self, seconds: float, computing: float) -> None:
        """Note a step that the `device` ran alone."""
        self.steps_alone += 1
        self._tries.append(Alone(seconds, computing))
        if len(self._tries) < _TRIES:
            return
        self._found[self._waiting.pop(0)] = Alone(*map(statistics.median, zip(*self._tries[1:], strict=True)))
        self._tries = []
        if not self._waiting:
            self._next = self._steps * _NEXT_TRIAL

    @property
    def measured(self) -> Measured | None:
        """The result so far. None before the first trial."""
        usual, found = self._usual.copy(), self._found.copy()  # another thread may train
        return Measured(self._size, statistics.median(usual), found) if usual and found else None

    def explain(self, names: list[str]) -> str:
        """A line if one device, or no trainer at all, would be clearly faster, else nothing."""
        found = self.measured
        if found is None:
            return ""
        device, alone = min(found.alone.items(), key=lambda entry: entry[1].step)
        if alone.computing > _CLEARLY * found.together:
            return ""
        one_is_faster = alone.step <= _CLEARLY * found.together
        cure = (
            f"One device would be faster: DataParallel(model, devices=['{names[device]}']). " if one_is_faster else ""
        )
        return (
            f"Small steps: a batch of {plural(found.size, 'item')} takes {1e3 * found.together:.2f} ms as usual, and took "
            f"{1e3 * alone.step:.2f} ms on {names[device]} alone (medians). {cure}Plain PyTorch would be faster{' still' if cure else ''}: "
            f"{1e3 * (alone.step - alone.computing):.2f} ms of a step are the trainer's own work. Larger batches would make use of all devices.\n"
        )
