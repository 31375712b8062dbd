"""Pools that work on the devices of a trainer, beside its steps. What they ask of a device waits for a micro-batch."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_LONGEST = 0.02  # seconds of a micro-batch: a fifth of what an interactive request is content to wait


class Beside:
    """The open pools of a trainer. Any thread may add one, or close it.

    What they mean for steps does not depend on whether requests come. So the first one waits no longer than later ones, and sizes do not follow the load.
    """

    def __init__(self) -> None:
        self._pools: tuple[weakref.ref[Any], ...] = ()
        self._lock = threading.Lock()

    def add(self, jobs: Any) -> None:
        """One more, which says by `closing` when it ends."""
        with self._lock:
            self._pools = (*(one for one in self._pools if one() is not None), weakref.ref(jobs))

    @property
    def longest(self) -> float:
        """Seconds that a micro-batch may take; 0: any time."""
        return _LONGEST if any(not getattr(one(), "closing", True) for one in self._pools) else 0.0
