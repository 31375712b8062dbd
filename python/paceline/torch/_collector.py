"""Python's garbage collector while several threads run PyTorch."""

from __future__ import annotations

import gc
import sys
import threading

_COLLECTS_IN_ALLOCATIONS = sys.version_info < (3, 12)


class Collector:
    """Keeps garbage from being collected anywhere but between two pieces of work, while devices compute on threads.

    ``Generator.get_state`` makes a Python object while it holds the generator's mutex. Up to Python 3.11 that may collect garbage
    then and there; a tensor that is freed lets go of the GIL, and the next thread to ask the same generator waits for the mutex
    without letting go of the GIL: a deadlock. A step asks so, and activation checkpointing does. Later Pythons collect between
    bytecodes only; there this does nothing.
    """

    _lock = threading.Lock()
    _pauses = 0
    _was_enabled = False

    def __enter__(self) -> None:
        if _COLLECTS_IN_ALLOCATIONS:
            with Collector._lock:
                if Collector._pauses == 0:
                    Collector._was_enabled = gc.isenabled()
                    gc.disable()
                Collector._pauses += 1

    def __exit__(self, *_: object) -> None:
        if _COLLECTS_IN_ALLOCATIONS:
            with Collector._lock:
                Collector._pauses -= 1
                if Collector._pauses == 0 and Collector._was_enabled:
                    gc.enable()

    @staticmethod
    def between_pieces() -> None:
        """Collect what Python would have collected since the last time. What is old waits for the end: it is the most, and seldom garbage."""
        if Collector._pauses and Collector._was_enabled:
            young, middle, _ = gc.get_threshold()
            allocated, collections, _ = gc.get_count()
            if 0 < young < allocated:
                gc.collect(1 if 0 < middle < collections else 0)
