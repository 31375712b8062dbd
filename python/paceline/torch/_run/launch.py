"""Compares the time that Python takes to enqueue a micro-batch with the time that a GPU takes to run it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.sim import launch_rate

_RECENT = 32  # steps of each device; so the first ones, which compile and allocate, are soon forgotten
# Devices take turns under Python's lock while they enqueue. To stay busy, a device needs a micro-batch that lasts longer than all devices
# take to enqueue theirs. Three times as long leaves room for uneven times.
_TIMES = 3.0
_HELD_UP = 2.0  # enqueuing waits for a GPU if it takes this many times as long as on an empty queue


class Launch(NamedTuple):
    """A micro-batch that was enqueued."""

    device: int
    seconds: float
    room: bool | None  # whether the devices had finished all earlier work; None: not known


class LaunchClock:
    """How long the workers of GPUs take to enqueue a micro-batch.

    Only a device whose queue is empty shows what Python takes. A queue holds about a thousand kernels, and a worker that adds to a full
    queue waits for the GPU.
    """

    def __init__(self, gpus: Sequence[bool]) -> None:
        self._gpus = gpus
        self._recent: list[deque[Launch]] = [deque(maxlen=_RECENT) for _ in gpus]
        self._count = 0

    def add(self, launches: Iterable[Launch]) -> None:
        """Note the launches of a committed step. Busy times do not count other steps either."""
        for launch in launches:
            if self._gpus[launch.device]:
                self._count += 1
                if launch.room is not None:
                    self._recent[launch.device].append(launch)

    def explain(self, busy_seconds: Sequence[float]) -> str:
        """A line if Python cannot keep the GPUs busy, or waits for them, else nothing. `busy_seconds`: of each device, in all these steps."""
        recent = [launch for launches in self._recent for launch in launches.copy()]  # another thread may train
        free = [launch.seconds for launch in recent if launch.room]
        held = [launch.seconds for launch in recent if not launch.room]
        if not free:
            return ""
        launch = statistics.median(free)
        if len(held) > len(free):  # the GPUs still have work when Python adds more, so Python keeps them busy
            return _held_up(launch, statistics.median(held))
        mean = sum(busy for busy, gpu in zip(busy_seconds, self._gpus, strict=True) if gpu) / self._count
        needed = _TIMES * len(self._gpus) * launch
        if mean >= needed:
            return ""
        return (
            f"Launch-bound: a micro-batch takes a GPU {1e3 * mean:.2f} ms and Python {1e3 * launch:.2f} ms to enqueue (and what loss_fn waits "
            f"for), and {len(self._gpus)} devices share Python's lock: with less than {1e3 * needed:.2f} ms the GPUs wait for it, and a split "
            "shows that more than their speeds. Use larger micro-batches; captured CUDA graphs launch without Python."
            f"{_in_processes(mean, launch, sum(self._gpus))}\n"
        )


def _in_processes(mean: float, launch: float, gpus: int) -> str:
    """What a process for each GPU would gain, by how many operators threads of one process start together on a host where that was measured."""
    alone = launch * launch_rate(gpus) / (gpus * launch_rate(1))
    pace = max(mean, alone)
    if gpus < 2 or pace > 0.9 * max(mean, launch):
        return ""
    return f" Launching sets the pace: {gpus} processes (paceline run) would take about {1e3 * pace:.2f} ms."


def _held_up(free: float, held: float) -> str:
    if held < _HELD_UP * free:
        return ""
    return (
        f"Queue full: to enqueue a micro-batch takes Python {1e3 * held:.2f} ms while the GPUs still have work and {1e3 * free:.2f} ms when they "
        "have none: it waits for them, for room in their queues or for a result that loss_fn reads. The GPUs set the pace, not Python.\n"
    )
