"""The end of trainers: one that is dropped, and those that are open when the program ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

from paceline import DeviceGroup, Timeout
from paceline.torch._devices.caller_state import CallerThreads
from paceline.torch._run.run import Run

if TYPE_CHECKING:
    from paceline.torch._trainer.lifetime import Lifetime

_SECONDS = 3.0  # for a worker that is inside an operator or a sleep when the program ends
_SECONDS_TO_LEAVE = 0.2  # for a daemon thread to let go of what its step had, which may end inside of PyTorch

open_trainers: weakref.WeakSet[Lifetime] = weakref.WeakSet()
abandoned_runs: weakref.WeakSet[Run] = weakref.WeakSet()  # left by a second Ctrl-C; workers may still be inside


def finalize(group: DeviceGroup | None, any_host: bool, timeout: float = 10.0) -> None:
    """End the workers of a trainer that had a group of its own, and give the caller its threads back."""
    try:
        if group is not None:
            group.close(timeout)
    finally:
        if any_host:
            CallerThreads.restore()


@atexit.register
def _close_all() -> None:
    """Workers must have left Python before the interpreter goes down: PyTorch does not survive a thread that is ended inside of it."""
    trainers = list(open_trainers)
    callers = [trainer._caller for trainer in trainers if trainer._running is not None]
    for run in [*(trainer._running for trainer in trainers), *abandoned_runs]:
        if run is not None:
            run.interrupt()
    for trainer in trainers:
        with contextlib.suppress(Timeout):  # inside an operator or a sleep: ends with the process
            trainer.group.close(_SECONDS)
            # A daemon thread that was waiting for the step now leaves it. Never released: nothing follows.
            trainer._lock.acquire(timeout=_SECONDS)
    for caller in callers:
        if caller is not None and caller is not threading.current_thread():
            caller.join(_SECONDS_TO_LEAVE)
