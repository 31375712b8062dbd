"""A job of a pool, and the future that tells how it ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from paceline import Cancelled, Error, Expired, Rejected
from paceline._core.engine import Pool as Engine

_T = TypeVar("_T")

# What a body tells the engine (pool_py.cpp).
DONE, FAILED, OUT_OF_MEMORY = 0, -1, -2


class PoolFuture(Future[_T], Generic[_T]):
    """The result of a job, as `concurrent.futures` has it. It may be awaited: ``await asyncio.wrap_future(future)``.

    Attributes
    ----------
    device
        The name of the device that ran the job, "host:1". Empty until then, and if it never ran.
    seconds
        How long the run took, a batch as a whole.
    """

    device = ""
    seconds = 0.0
    _cancel: Callable[[], bool] | None = None  # asks the pool
    _asked = False  # whether the user has cancelled it
    _pool: object = None
    _job: Any = None  # what the engine knows it by

    def result(self, timeout: float | None = None) -> _T:
        """What the job has returned. Raises what it has raised. Waiting is refused on a worker: in a job, a callback, or a step."""
        self._check_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the job has raised, or None."""
        self._check_wait()
        return super().exception(timeout)

    def submitted(self, pool: object, job: Any, cancel: Callable[[], bool]) -> None:
        """Called once, by the pool."""
        self._pool, self._job, self._cancel = pool, job, cancel

    def _check_wait(self) -> None:
        if not self.done():
            Engine.check_may_wait()

    def cancel(self) -> bool:
        """Cancel a job that waits. False: it runs, or has ended."""
        if self.cancelled():
            return True
        self._asked = True
        if self._cancel is not None and self._cancel():
            return True
        self._asked = False
        return self.cancelled()

    def end(self, device: str, seconds: float, outcome: str, message: str, error: BaseException | None, value: Any) -> None:
        """Called once, by the pool."""
        self.device, self.seconds = device, seconds
        if outcome == "cancelled" and self._asked:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif outcome == "completed":
            self.set_result(value)
        else:
            kinds = {"rejected": Rejected, "expired": Expired, "cancelled": Cancelled}
            self.set_exception(error if error is not None and outcome == "failed" else kinds.get(outcome, Error)(message))


class Work:
    """What the engine runs: it keeps the exception with its traceback, and hands the result over when the run is over."""

    def __init__(self, future: PoolFuture[Any], call: Callable[[list[str]], Any]) -> None:
        self.future, self._call = future, call
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self, devices: list[str]) -> int:
        try:
            self.value = self._call(devices)
        except BaseException as error:
            self.error = error
            return code_of(error)
        return DONE

    def end(self, device: str, seconds: float, outcome: str, message: str) -> None:
        value, error = self.value, self.error
        self.value = self.error = None
        self.future.end(device, seconds, outcome, message, error, value)
        del error  # its traceback refers to this frame


def code_of(error: BaseException) -> int:
    """What the engine is told of an exception."""
    return OUT_OF_MEMORY if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else FAILED
