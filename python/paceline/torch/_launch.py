"""What Python takes to enqueue a micro-batch, against what a GPU takes to run it."""

from __future__ import annotations

import statistics
from collections import deque

_RECENT = 32  # micro-batches of each device; the first of them, which compile and allocate, are soon gone
# Devices take turns under Python's lock while they enqueue. A device that is to stay busy needs its micro-batch to last longer than all of
# them take to enqueue theirs; three times that leaves room for what is not even.
_TIMES = 3.0


class LaunchClock:
    """How long the workers of GPUs take to enqueue a micro-batch; the devices work on meanwhile."""

    def __init__(self, names: list[str], gpus: list[bool]) -> None:
        self._names = names
        self._gpus = gpus
        self._recent: list[deque[float]] = [deque(maxlen=_RECENT) for _ in names]
        self._count = [0] * len(names)

    def note(self, device: int, seconds: float) -> None:
        """On the device's worker: it has enqueued a micro-batch."""
        if self._gpus[device]:
            self._recent[device].append(seconds)
            self._count[device] += 1

    def explain(self, busy_seconds: list[float]) -> str:
        """A line if Python cannot keep the GPUs busy, else nothing. `busy_seconds`: of each device, since the trainer was made."""
        launch = [statistics.median(recent) for recent in self._recent if recent]
        micro_batches = sum(self._count)
        if not launch:
            return ""
        mean = sum(busy for busy, gpu in zip(busy_seconds, self._gpus, strict=True) if gpu) / micro_batches
        needed = _TIMES * len(self._names) * statistics.median(launch)
        if mean >= needed:
            return ""
        return (
            f"Launch-bound: a micro-batch takes a GPU {1e3 * mean:.2f} ms and Python {1e3 * statistics.median(launch):.2f} ms to enqueue, and "
            f"{len(self._names)} devices share Python's lock: with less than {1e3 * needed:.2f} ms the GPUs wait for it, and a split shows that more "
            "than their speeds. Use larger micro-batches; captured CUDA graphs launch without Python.\n"
        )
