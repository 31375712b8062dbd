"""The life of a trainer: it is open, in one call at a time, and closed; and what happens when it is dropped or the program ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from paceline import DeviceGroup, Error, Timeout, Unavailable
from paceline._core.runtime import on_a_worker
from paceline.torch._devices.caller_state import CallerThreads
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.execution import Execution
from paceline.torch._run.executor import Executor
from paceline.torch._save.background import Saver
from paceline.torch._trainer.recent_steps import RecentSteps
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.works import Works

_PATIENCE = 600.0  # with calls of other threads
_SECONDS = 3.0  # the program's end waits so long for a worker that is inside an operator or a sleep
_SECONDS_TO_LEAVE = 0.2  # for a daemon thread to release what its step held; releasing may end inside of PyTorch


class Lifetime:
    """Whether a trainer is open, inside a call, abandoned by one, or closed."""

    def __init__(
        self,
        group: DeviceGroup,
        execution: Execution,
        works: Works,
        gaps: StepGaps,
        recent: RecentSteps,
    ) -> None:
        self.group = group
        self.places = execution.places
        self.works = works
        self.saver = Saver()
        # States of optimizers that lie on the devices.
        self.shards: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.unsharded: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # optimizers, and why
        self._execution = execution
        self._gaps = gaps
        self.recent = recent
        self.observed: Any = None  # what it shows to `paceline top`, and the handle of that
        self._lock = threading.Lock()
        self._freed = threading.Condition()  # notified when it is released
        self._waiting = 0  # for that
        self._caller: threading.Thread | None = None  # the thread of the present call
        self._call: str | None = None  # its name
        self.entered = False  # whether any call was made
        self._abandoned = False  # by a second Ctrl-C: workers were still inside when the call ended
        threads = self._limited_threads()
        # This runs when the trainer is dropped without close(). _close_all handles the end of the program.
        self._finalizer = weakref.finalize(self, _finalize, group, threads)
        self._finalizer.atexit = False
        _open.add(self)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called yet."""
        return self._finalizer.alive

    @property
    def replicas(self) -> Replicas:
        """The replicas of the trainer."""
        return self._execution.replicas

    def close(self) -> None:
        """End the workers and give the caller its PyTorch threads back. A second call does nothing.

        A `DeviceGroup` that was passed in stays open. A step that runs in another thread is cancelled: it ends once every worker has left
        its micro-batch. If a save is being written, `close` waits for it, and raises its error.
        """
        self._end()
        self.saver.finish()

    def _end(self) -> None:
        running = self._execution.running
        if running is not None and running.on_a_worker:
            raise Unavailable(
                "close: called by loss_fn on a worker, which cannot wait for its own end. Leave the step first, by an exception if need be."
            )
        self._cancel()
        self._finalizer()
        CallerThreads.here().settle()
        self._execution.source.end()
        self._release_if_idle()

    def leave(self, raised: bool) -> None:
        """End the ``with`` block of a trainer, which an exception may have `raised` out of."""
        if not raised:
            return self.close()
        if not self.group.busy:
            self._end()
            return self.saver.join()  # an error of a save would hide the exception that is on its way
        # A second Ctrl-C left the block: workers are inside user code, and whoever pressed it does not want to wait for them.
        self._cancel()
        ended = self._finalizer.detach()
        if ended is not None:
            group, threads = ended[2]
            with contextlib.suppress(Timeout):
                _finalize(group, threads, timeout=0.0)
        return None

    def exclusive(self, call: str, *, waits: bool = False) -> contextlib.AbstractContextManager[None]:
        """Let one call in at a time, since the replicas and their gradients belong to the trainer and not to the call.

        `waits`: for the same call of another thread to end. A call inside of another one is an error.
        """
        return _Exclusive(self, call, _PATIENCE if waits else 0.0)

    def _begin(self, call: str) -> CallerThreads | None:
        """Inside of the lock: a call begins. Returns what to release at its end."""
        self._check_open(call)  # it may have been closed meanwhile
        if self.group.busy:
            raise Unavailable(
                f"{call}: an earlier step of this trainer has not ended: its workers are still inside user code. Wait for it, or close "
                "the trainer."
            )
        if self._abandoned:  # the workers of the abandoned call have gone on to write gradients
            self._execution.drop_gradients()
        return self._limited_threads()

    def _leave(self) -> None:
        """The call of this thread is over."""
        self._abandoned = self.group.busy
        if self._abandoned and self._execution.running is not None:
            _abandoned_runs.add(self._execution.running)
        self._execution.running = self._caller = self._call = None
        self._unlock()

    def _enter(self, call: str, patience: float) -> None:
        """Take the lock for this call, or raise. `patience`: seconds to wait for the same call of another thread.

        The limit is for a thread that the present call has started, and waits for.
        """
        if not self._lock.acquire(False):
            self._wait(call, patience)
        self._caller, self._call, self.entered = threading.current_thread(), call, True

    def _wait(self, call: str, patience: float) -> None:
        self._check_open(call)
        # A worker that waits for a call which waits for that worker's turn would wait for ever.
        deadline = time.monotonic() + (0.0 if on_a_worker() else patience)
        with self._freed:
            self._waiting += 1  # before the lock is tried, so that who frees it after that knows
            try:
                while not self._lock.acquire(blocking=False):
                    running, left = self._execution.running, deadline - time.monotonic()
                    inside = self._caller is threading.current_thread() or (running is not None and running.on_a_worker)
                    if inside or left <= 0 or self._call not in (None, call):  # None: somebody is about to leave
                        raise Unavailable(
                            f"{call}: this trainer is in the middle of another call, in another thread or around this one (loss_fn must "
                            "not call the trainer). One call at a time."
                        )
                    self._freed.wait(left)
            finally:
                self._waiting -= 1

    def _check_open(self, call: str) -> None:
        if not self._finalizer.alive:
            CallerThreads.here().settle()
            raise Unavailable(f"{call}: the trainer is closed. Make a new one.")

    def _limited_threads(self) -> CallerThreads | None:
        """Hold the calling thread's PyTorch at one thread, until what is returned is released."""
        if not self.places.any_host:
            return None
        threads = CallerThreads.here()
        threads.hold()
        return threads

    @contextlib.contextmanager
    def between_steps(self, call: str, *, waits: bool = False) -> Iterator[None]:
        """Like `exclusive`, for work that the devices do between two steps: this time does not count as waiting."""
        with self.exclusive(call, waits=waits):
            self._gaps.interrupted()
            yield

    @contextlib.contextmanager
    def if_idle(self) -> Iterator[bool]:
        """Yield whether the workers may be given work. If so, no other call of this trainer gets them within the ``with`` block."""
        if on_a_worker() or not self._finalizer.alive or not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield not self.group.busy
        finally:
            self._unlock()

    def _free(self) -> None:
        self._lock.release()
        if self._waiting:
            with self._freed:
                self._freed.notify_all()

    def _unlock(self) -> None:
        self._free()
        if not self._finalizer.alive:  # another thread has closed the trainer meanwhile
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        """Release what the devices hold. If a call or a worker is still inside, the call does it when it leaves."""
        if self.places.holds and not self.group.busy and self._lock.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._free()

    def _release(self) -> None:
        """Release everything that the devices hold for this trainer. Its figures stay."""
        with contextlib.suppress(Error):  # a lost device, which an earlier call has reported
            for work in self.works.all():
                work.step_loop.settle()
        self.recent.settle()
        self.places.drain()  # a late device may still write to memory that is about to be released
        with contextlib.ExitStack() as last_first:  # each one is called, whatever another one raises
            last_first.callback(self.places.close)
            last_first.callback(self._execution.replicas.release)
            last_first.callback(self._execution.release)
            for shards in alive(self.shards):
                last_first.callback(_gather, shards)

    def _cancel(self) -> None:
        self.recent.ended = True
        if self.observed is not None:
            self.observed[1].close()
        for work in self.works.all():
            work.step_loop.cancel()


class _Exclusive:
    """Around one call of a trainer. A class, since every step enters it."""

    def __init__(self, lifetime: Lifetime, call: str, patience: float) -> None:
        self._lifetime, self._call, self._patience = lifetime, call, patience

    def __enter__(self) -> None:
        lifetime = self._lifetime
        lifetime._enter(self._call, self._patience)
        try:
            self._threads = lifetime._begin(self._call)
        except BaseException:
            lifetime._leave()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._lifetime._leave()
        finally:
            if self._threads is not None:  # this thread's own
                self._threads.leave()


_open: weakref.WeakSet[Lifetime] = weakref.WeakSet()
_abandoned_runs: weakref.WeakSet[Executor] = weakref.WeakSet()  # a second Ctrl-C left them; workers may still be inside


def alive(weak: weakref.WeakKeyDictionary[Any, Any]) -> list[Any]:
    """The keys of now. Another thread may add one, which would end an iteration over the dictionary itself."""
    return [one for known in weak.keyrefs() if (one := known()) is not None]


def _gather(shards: Any) -> None:
    with contextlib.suppress(torch.OutOfMemoryError):  # then they stay where they are until the optimizer needs them
        shards.gather()


def _finalize(group: DeviceGroup, threads: CallerThreads | None, timeout: float = 10.0) -> None:
    """End the work of a trainer, and give the thread that has made it its PyTorch threads back."""
    try:
        group.close(timeout)
    finally:
        if threads is not None:
            threads.release()


@atexit.register
def _close_all() -> None:
    """Get the workers out of Python before the interpreter ends: PyTorch crashes if a thread is ended inside of it."""
    lifetimes = list(_open)
    callers = [lifetime._caller for lifetime in lifetimes if lifetime._execution.running is not None]
    for run in [*(lifetime._execution.running for lifetime in lifetimes), *_abandoned_runs]:
        if run is not None:
            run.interrupt()
    for lifetime in lifetimes:
        with contextlib.suppress(Timeout):  # a worker inside an operator or a sleep ends with the process
            lifetime.group.close(_SECONDS)
            # A daemon thread that was waiting for the step leaves it now. The lock stays taken, since nothing follows.
            lifetime._lock.acquire(timeout=_SECONDS)
    for caller in callers:
        if caller is not None and caller is not threading.current_thread():
            caller.join(_SECONDS_TO_LEAVE)
