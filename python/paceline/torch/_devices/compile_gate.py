"""Lets code that may compile run alone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from typing import Any

_PATIENCE_SECONDS = 60.0  # with another call that compiles


class CompileGate:
    """Lets the first call of a size run alone in compiled modules, and all others together. Dynamo is not thread-safe while it compiles.

    A capture runs alone, too: PyTorch captures one graph at a time, and a draw elsewhere would break it.
    """

    _inside = threading.local()  # its `one` is the gate that the thread is inside of

    def __init__(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._running: Counter[Any] = Counter()  # how many threads of each call are inside
        self._compiling: Counter[Any] = Counter()  # of these, those with a first call

    @classmethod
    def of_call(cls) -> CompileGate:
        """The gate for a call on this thread: that of the process, as what PyTorch keeps while it compiles is.

        A call of a loss function, which is inside a gate, cannot wait for those that are inside, as they may wait for it: they may share a lock
        of the user's. So it has a gate of its own. Usually whoever calls is inside alone, as the first call also compiles what it calls.
        """
        global _of_process
        if getattr(cls._inside, "one", None) is not None:
            return cls()
        if _of_process._process != os.getpid():  # a forked child, which has none of the threads that were inside
            _of_process = cls()
        return _of_process

    @contextlib.contextmanager
    def enter(self, first: bool, call: Any) -> Any:
        """Yield whether a thread of this `call` had to wait. Then its time says nothing about the device's speed.

        Threads of one call wait for each other for as long as it takes. Another call is waited for only so long: what compiles may be a loss that
        waits for this call, which it has given to another thread.
        """
        with self._condition:
            waited = self._holds_up(first)
            begin = time.monotonic()
            while self._holds_up(first):
                left = None if self._holds_up(first, call) else begin + _PATIENCE_SECONDS - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._condition.wait(left)
            self._running[call] += 1
            self._compiling[call] += first
        self._inside.one = self
        try:
            yield waited
        finally:
            self._inside.one = None
            with self._condition:
                for inside, count in ((self._running, 1), (self._compiling, int(first))):
                    inside[call] -= count
                    if not inside[call]:
                        del inside[call]
                self._condition.notify_all()

    def _holds_up(self, first: bool, call: Any = None) -> bool:
        """Whether a thread, or one of this `call`, has to be over first."""
        inside = self._running if first else self._compiling
        return bool(sum(inside.values()) if call is None else inside.get(call))


_of_process = CompileGate()
