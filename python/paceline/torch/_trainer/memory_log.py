"""The memory of a run over time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from copy import copy

from paceline import Device
from paceline._observe import resident_bytes
from paceline.torch._devices import cuda
from paceline.torch._trainer.thinned import Thinned

_EVERY = 0.1  # seconds; reading takes some 20 us


class MemoryLog:
    """The resident memory of the process, and what PyTorch has reserved of each GPU, by step. It reads them at most ten times a second, and waits for nothing."""

    def __init__(self, devices: Sequence[Device]) -> None:
        spaces = {one.memory_space: one.index for one in devices if one.kind == "cuda"}
        self.names = ["this process (resident)", *(f"{name} (reserved by PyTorch)" for name in spaces)]
        self._gpus = list(spaces.values())
        self._due = 0.0
        self._last = [0.0] * len(self.names)
        self._rows = [Thinned(max) for _ in self.names]

    def after_step(self, step: int) -> None:
        """Note what is in use after a step. `step`: its number in the history, which has none of the steps that were dropped with a lost device."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _EVERY
            with contextlib.suppress(RuntimeError, OSError):  # of a GPU that is lost, which steps report; no /proc
                self._last = [resident_bytes(), *map(cuda.reserved_memory, self._gpus)]
        for rows, value in zip(self._rows, self._last, strict=True):
            rows.put(step, value)

    def __copy__(self) -> MemoryLog:
        made = MemoryLog([])
        made._rows = [copy(one) for one in self._rows]
        return made

    def of(self, first: int, steps: int) -> list[float] | None:
        """The most of each in these steps. None if nothing is known."""
        found = [rows.of(first, steps) for rows in self._rows]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None
