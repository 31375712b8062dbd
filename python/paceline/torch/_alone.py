"""Whether one device alone would be faster, which is measured while training: in small steps devices hinder each other."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from paceline._words import plural

_FIRST_TRIAL = 32  # steps: by then shares have settled
_NEXT_TRIAL = 4  # times as many steps as there were at the last trial
_TRIES = 6  # steps of a device in a trial; the first one, which allocates, does not count
_MOST_DEVICES = 2  # in a trial: of many devices each alone takes many times as long as all together
_RECENT = 50  # steps
_MOST_SECONDS = 20e-3  # of a step: in longer ones devices hinder each other little, and a trial would cost more
_OTHER_KIND = 8  # steps in a row with another kind of batch: those are what is watched from then on
_CLEARLY = 0.9  # of the time, or less


class Alone(NamedTuple):
    """Medians of the steps that a device ran alone, in seconds."""

    step: float
    computing: float  # the part of it in which the device ran the batch


class Measured(NamedTuple):
    """What is known of one kind of batch."""

    size: int  # of the batch
    together: float  # seconds of a step as usual, the median
    alone: dict[int, Alone]  # by device


class AloneTrials:
    """Runs a few small steps on one device alone, ever more seldom, and compares them with steps as usual.

    The times of devices that work side by side do not tell how long one would take alone. On the host each operator takes Python's lock;
    where operators are small, handing the lock over takes most of the time (seen: 2.2 ms alone for a batch of 4 items, 5.6 ms each for two
    devices with 2 items).
    """

    def __init__(self, without: Collection[int] = ()) -> None:
        """Of all devices `without` these."""
        self._without = frozenset(without)
        self._kind: Hashable = None
        self._size = 0
        self._others = 0  # steps with other batches since the last one of this kind
        self._start()

    def _start(self) -> None:
        self._steps = 0
        self._next = _FIRST_TRIAL
        self._usual: deque[float] = deque(maxlen=_RECENT)
        self._waiting: list[int] = []  # devices that are yet to run alone in this trial
        self._tries: list[Alone] = []  # of the first of them
        self._found: dict[int, Alone] = {}

    def device(self, kind: Hashable, items: Sequence[int]) -> int | None:
        """The device that should run the next step, of this kind of batch, alone; None: all should. `items`: of each in the last step."""
        if kind != self._kind or self._steps < self._next:
            return None
        if not self._waiting:
            devices = set(range(len(items))) - self._without
            self._waiting = sorted(devices, key=lambda device: (-items[device], device))[:_MOST_DEVICES]
        return self._waiting[0]

    def add(self, kind: Hashable, size: int, seconds: float) -> None:
        """A step as usual."""
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
        """A step of the `device`."""
        self._tries.append(Alone(seconds, computing))
        if len(self._tries) < _TRIES:
            return
        self._found[self._waiting.pop(0)] = Alone(*map(statistics.median, zip(*self._tries[1:], strict=True)))
        self._tries = []
        if not self._waiting:
            self._next = self._steps * _NEXT_TRIAL

    @property
    def measured(self) -> Measured | None:
        """None before the first trial."""
        return Measured(self._size, statistics.median(self._usual), self._found) if self._found else None

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
