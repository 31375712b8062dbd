"""The future of a job of a pool."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, LOGGER, PENDING
from typing import Any, Generic, TypeVar

from paceline import Cancelled, DeviceLost, Error, Expired, InvalidArgument, OutOfMemory, Rejected, Timeout
from paceline._core.engine import Pool as Engine

_T = TypeVar("_T")

_ERRORS: dict[str, type[Error]] = {
    "rejected": Rejected,
    "expired": Expired,
    "cancelled": Cancelled,
    "out_of_memory": OutOfMemory,
    "device_lost": DeviceLost,
    "timeout": Timeout,
}
_check_may_wait = Engine.check_may_wait
_woken_before = contextlib.suppress(RuntimeError)
# Guards the states of all futures. A thread holds it for a moment, and asks for no other lock meanwhile.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class PoolFuture(Future[_T], Generic[_T]):
    """The result of a job, as `concurrent.futures` has it, so its ``wait`` and ``as_completed`` take it, and ``asyncio.wrap_future``.

    `result` and `exception` refuse to wait on a worker: in a job, in a callback or in a step, which keeps its device meanwhile. ``wait``,
    ``as_completed`` and ``asyncio.wrap_future`` cannot tell: there they may wait for ever.

    Attributes
    ----------
    device
        The name of the device that ran the job, ``"host:1"``. Empty until the job has ended, and if it never ran.
    seconds
        How long the run took, a batch as a whole.
    version
        Of a request: the number of the version of the model that answers it. It is fixed by the submit.
    """

    device = ""
    seconds = 0.0
    version = 0
    _job: Any = None  # what the engine knows it by
    _cause: BaseException | None = None  # what a job that it comes after has raised
    _begun = False
    _asked = False  # whether the user has cancelled it
    _is_watched = False  # whether `__getattr__` has made something
    # Of the standard library. `__getattr__` makes the rest when it is asked for.
    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    # Made when the first comes.
    _callbacks: list[Callable[[Future[_T]], object]] | None = None
    _sleepers: list[threading.Lock] | None = None  # each is released at the end

    def __init__(self) -> None:
        # The constructor of the standard library would make a `Condition` and two lists, which are ten objects to the garbage collector. Thousands of requests
        # then make it walk through all objects of the process, which holds every thread for a tenth of a second.
        pass

    def __getattr__(self, name: str) -> Any:
        """What ``wait`` and ``as_completed`` of the standard library need."""
        if name not in ("_condition", "_waiters"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with _lock:
            self._is_watched = True
            return self.__dict__.setdefault(name, threading.Condition() if name == "_condition" else [])

    def done(self) -> bool:
        """Whether it has a result or an error, or was cancelled."""
        return self._state != PENDING

    def cancelled(self) -> bool:
        """Whether the user has cancelled it in time."""
        return self._state == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """Whether the job runs."""
        return self._begun and not self.done()

    def result(self, timeout: float | None = None) -> _T:
        """What the job has returned.

        Raises
        ------
        BaseException
            What the job has raised, with its traceback.
        Rejected, Expired, Cancelled
            If it never ran: it was not taken, its deadline came first, its pool was closed, or what it comes `after` did not complete, whose error is then the cause.
        concurrent.futures.CancelledError
            After `cancel`.
        concurrent.futures.TimeoutError
            After `timeout` seconds.
        InvalidArgument
            On a worker, if the job has not ended.
        Timeout
            If it ran for longer than the pool's ``hang_seconds``.
        Unavailable
            In a process that was forked from that of the pool, if the job has not ended.
        """
        try:
            error = self.exception(timeout)
            if error is not None:
                raise error
            found: _T = self._result
            return found
        finally:
            del self  # the traceback of what is raised refers to this frame
            error = None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` raises, or None."""
        if self._state == PENDING:
            self._check_wait()
            sleeper = threading.Lock()
            sleeper.acquire()
            with _lock:
                if self.done():
                    sleeper.release()
                elif self._sleepers is None:
                    self._sleepers = [sleeper]
                else:
                    self._sleepers.append(sleeper)
            in_time = sleeper.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            if not in_time and not self.done():
                self._forget(sleeper)
                raise WaitTimeoutError
        if self._state == CANCELLED_AND_NOTIFIED:
            raise CancelledError
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Call ``fn(future)`` when the job has ended, on the thread that tells it; at once if it has."""
        with _lock:
            if not self.done():
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(fn)
                return
        self._call(fn)

    def cancel(self) -> bool:
        """Cancel a job that waits. False: it runs, or has ended."""
        if not self.done() and self._job is not None:
            self._asked = True
            Engine.cancel(self._job)
        return self.cancelled()

    def _withdraw(self) -> None:
        """Called after an error of the submit: cancel what the engine has taken nevertheless, and end what it has not."""
        if self._job is None:
            self._end("cancelled", "It was not submitted.", None, None)
        else:
            self.cancel()

    def _check_wait(self) -> None:
        if self._job is None or self.done():
            return
        try:
            _check_may_wait(self._job)
        except InvalidArgument:
            raise InvalidArgument(
                "result: a job, a step, a placement or a callback waits for a job of a pool, and keeps what that pool may need to go on. Give submit "
                "after=, or the future a callback."
            ) from None

    def _end(self, outcome: str, message: str, error: BaseException | None, value: Any) -> None:
        """Called by the pool; again after an interrupt, which may come anywhere in it. Then it does what is left."""
        # Not made under the lock, where the collector might run code that asks for another one.
        if error is None and outcome != "completed":
            error = _ERRORS.get(outcome, Error)(message)
        with _lock:
            again, condition = self.done(), self._condition if self._is_watched else None
            if condition is None:  # one that is made later sees the state
                self._settle(outcome, error, value)
        if condition is not None:
            # Who holds it looks at the state, and adds a waiter. In between nothing may change.
            with condition:
                with _lock:
                    self._settle(outcome, error, value)
                for waiter in self._waiters:
                    if not again or self not in waiter.finished_futures:
                        getattr(waiter, self._word())(self)
        while self._sleepers and (sleeper := self._next_sleeper()) is not None:
            with _woken_before:  # an interrupt came after it was woken
                sleeper.release()
            self._forget(sleeper)
        # Each is taken out before it is called, so an interrupt in one of them leaves the others to be called.
        while self._callbacks:
            self._call(self._callbacks.pop(0))

    def _settle(self, outcome: str, error: BaseException | None, value: Any) -> None:
        """Set the state, unless it is set. Requires the lock."""
        if self.done():
            return
        if outcome == "completed":
            self._result, self._state = value, FINISHED
        elif outcome == "cancelled" and self._asked:
            self._state = CANCELLED_AND_NOTIFIED
        else:
            self._exception, self._state = error, FINISHED
            self._chain()

    def _note_failure(self, before: Future[Any]) -> None:
        """A job that this one comes after has ended. If it has failed, its error is the cause that this one is cancelled."""
        error = CancelledError() if before.cancelled() else before.exception()
        with _lock:
            self._cause = self._cause or error
            self._chain()

    def _chain(self) -> None:
        if self._cause is not None and isinstance(self._exception, Cancelled):
            self._exception.__cause__ = self._cause

    def _next_sleeper(self) -> threading.Lock | None:
        with _lock:  # one that waits no longer takes its own out
            return self._sleepers[-1] if self._sleepers else None

    def _forget(self, sleeper: threading.Lock) -> None:
        with _lock:
            if self._sleepers and sleeper in self._sleepers:  # otherwise it is woken just now
                self._sleepers.remove(sleeper)

    def _word(self) -> str:
        """How the standard library's waiters are told."""
        return "add_cancelled" if self.cancelled() else "add_result" if self._exception is None else "add_exception"

    def _call(self, fn: Callable[[Future[_T]], object]) -> None:
        try:
            fn(self)
        except Exception:
            LOGGER.exception("exception calling callback for %r", self)
