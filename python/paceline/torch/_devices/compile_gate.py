"""Lets code that may compile run alone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
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
        # Thread, call and whether it is a first one, of those that are inside.
        self._stays: list[tuple[int, Any, bool]] = []

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

    @staticmethod
    def forget(thread: int) -> None:
        """Let nobody wait any more for a thread that is inside the gate of the process. Its run was given up."""
        gate = _of_process
        with gate._condition:
            gate._stays = [one for one in gate._stays if one[0] != thread]
            gate._condition.notify_all()

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
            stay = threading.get_ident(), call, first
            self._stays.append(stay)
        self._inside.one = self
        try:
            yield waited
        finally:
            self._inside.one = None
            with self._condition:
                with contextlib.suppress(ValueError):  # forgotten
                    self._stays.remove(stay)
                self._condition.notify_all()

    def _holds_up(self, first: bool, call: Any = None) -> bool:
        """Whether a thread, or one of this `call`, has to be over first."""
        return any((first or compiles) and call in (None, of) for _, of, compiles in self._stays)


_of_process = CompileGate()
