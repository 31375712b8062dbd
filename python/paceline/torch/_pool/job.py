"""A job of a pool."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline import DeviceLost
from paceline._page.pool import Run
from paceline._pool_figures import NEVER_RAN, VersionFigures
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.figures import Figures
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.seats import entered, hand_over, marks_of

# What a body tells the engine (pool_py.cpp).
DONE, FAILED, OUT_OF_MEMORY, LOST = 0, -1, -2, -3

_OWN = __name__.rpartition(".")[0] + "."  # modules of pools


class Work:
    """What the engine runs. It keeps the exception with its traceback, and hands the result over when the run is over.

    It keeps `keeps`, the pool's jobs, until then. So a pool that nobody else knows ends its jobs first.
    """

    # In the class, since there are thousands of them a second.
    value: Any = None
    error: BaseException | None = None
    ran: tuple[str, float] | None = None  # device and seconds of its last run, if the engine ends it by another one
    leads = True  # whether the seconds of its run are not those of another work, too
    kind, priority = "", "normal"
    thread: int | None = None  # that runs it
    on_timeout: Callable[[], None] | None = None  # called when its run has been given up, before it ends
    enqueued: tuple[Sequence[str], int] | None = None  # devices and jobs of its run, which GPUs are still at
    _counted = False
    _begun: float | None = None
    _run_begun = 0.0  # its last run
    of_version: VersionFigures | None = None  # if it is a request
    own = False  # of the pool, not of its users: a copy of a request in the shadow, or what warms a version. Only its time counts

    def __init__(self, future: PoolFuture[Any], keeps: Any, figures: Figures) -> None:
        self.future: PoolFuture[Any] | None = future
        self._keeps, self._figures = keeps, figures
        self._submitted = time.monotonic()

    def begin(self, devices: Sequence[str] = ()) -> None:
        """Called on the worker, before each run. `devices`: of the run, if it leads it."""
        if self.enqueued is not None:
            self._end_run("failed", None)  # on a GPU, after the call
        self.thread, self._run_begun = threading.get_ident(), time.monotonic()
        if devices:
            self._figures.begin_run(self, devices, self._run_begun)
            if self._counted:  # it was given up before it began
                self._figures.end_run(self)
        future = self.future
        if self._begun is None and future is not None:
            self._begun = self._run_begun
            future._begun = True  # when the figures have it, for who asks them next

    def note_run(self, devices: Sequence[str], jobs: int, outcome: str, *, ends_later: bool = False) -> None:
        """Note its run, of so many jobs of users, which is over, or `ends_later`, when GPUs have done it. One that was given up was noted then."""
        if ends_later:
            self.enqueued, self.thread = (devices, jobs), None
        else:
            run = None if self.future is None else self.run_until_now(devices, jobs, outcome)
            self._figures.end_run(self, run)

    def _end_run(self, outcome: str, seconds: float | None) -> None:
        """Note the run that GPUs were still at, which has ended after so many seconds, or now."""
        noted, self.enqueued = self.enqueued, None
        if noted is not None and outcome != "timeout":
            run = self.run_until_now(*noted, "completed" if outcome == "completed" else "failed")
            self._figures.end_run(self, run if seconds is None else run._replace(ended=run.begun + seconds))

    def run_until_now(self, devices: Sequence[str], jobs: int, outcome: str) -> Run:
        """Its run, as it is noted."""
        waited = (self._begun or self._submitted) - self._submitted
        return Run(devices, self.kind, self._run_begun, time.monotonic(), jobs, waited, outcome)

    def hang(self, device: str) -> None:
        """Called before its run there is given up, which goes on."""

    def end(self, device: str, seconds: float, outcome: str, message: str) -> None:
        """Called by the engine, when nothing of it runs any more; again if an interrupt comes in between. Then it does what is left."""
        future = self.future
        if future is None:
            return
        if self.error is not None:
            _forget_own_frames(self.error)
            if outcome in NEVER_RAN:  # after a run that failed
                outcome = "failed"
        future.device, future.seconds = device, seconds = self.ran or (device, seconds)
        if not self._counted:
            self._counted = True
            if outcome == "timeout" and self.on_timeout is not None:
                self.on_timeout()
            if self.enqueued is not None:
                self._end_run(outcome, seconds)
            waited = None if self._begun is None else self._begun - self._submitted
            if self.of_version is not None:
                self.of_version.count(outcome, waited)
                if self.leads and outcome == "completed":
                    self.of_version.count_run(seconds)
            if not self.own:
                self._figures.count(outcome, self.priority, waited, device, leads=self.leads)
                if outcome in NEVER_RAN:
                    self._figures.runs.never_ran(self.kind, outcome, self._submitted)
        self._figures.end_run(self)
        future._end(outcome, message, self.error, self.value)
        self.future = self.value = self.error = self._keeps = None


class Job(Work):
    """A function that runs once; if it is `idempotent`, again when its device is lost."""

    def __init__(
        self,
        future: PoolFuture[Any],
        jobs: Any,
        fn: Any,
        args: Any,
        kwargs: Any,
        gang: int,
        *,
        idempotent: bool = False,
    ) -> None:
        super().__init__(future, jobs, jobs.figures)
        self._fn, self._args, self._kwargs, self._gang, self._idempotent = fn, args, kwargs, gang, idempotent
        self._inputs = marks_of([fn, *args, *kwargs.values()], lambda: jobs.gpus)

    def run(self, devices: list[str], evicted: list[tuple[str, str]]) -> int:
        """Called by the engine on a worker. Never raises."""
        self.begin(devices)
        self.error = None
        seats = [self._keeps.seats[name] for name in devices]
        try:
            self._keeps.evict(evicted)
            seats[0].prepare()
            with seats[0].entered() if self._gang == 1 else entered(seats):
                for seat in seats if self._inputs else ():
                    seat.follow(self._inputs)
                place = seats[0].device if self._gang == 1 else [seat.device for seat in seats]
                self.value = self._fn(place, *self._args, **self._kwargs)
        except BaseException as error:
            self.error = error
            self.note_run(devices, of_users([self]), "failed")
            if is_out_of_memory(error):
                seats[0].release_memory()
            return code_of(error, 1, devices)
        self.note_run(devices, of_users([self]), "completed", ends_later={seat.gpu for seat in seats} != {None})
        return DONE

    def run_batch(
        self, devices: list[str], evicted: list[tuple[str, str]], _: list[Work]
    ) -> tuple[int, float, float | None]:
        """The same for a job that may run again, which the engine knows as a batch of one."""
        return self.run(devices, evicted), 0.0, None

    def end(self, device: str, seconds: float, outcome: str, message: str) -> None:
        """See `Work`."""
        self._fn = self._args = self._kwargs = None
        if self._idempotent and outcome in NEVER_RAN:
            self.error = None  # of a device that was lost, after which another one would have run it
        self._inputs = []
        if self.value is not None and outcome == "completed" and self._keeps is not None and self._keeps.gpus:
            hand_over(self.value)
        super().end(device, seconds, outcome, message)


def of_users(works: Iterable[Work]) -> int:
    """How many of them are not the pool's own."""
    return sum(not one.own for one in works)


def _forget_own_frames(error: BaseException) -> None:
    """Let the traceback begin in the function that a pool has called. The frames before refer to the pool, and a batch's to all of its requests."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith(_OWN):
        with contextlib.suppress(RuntimeError):  # it runs
            trace.tb_frame.clear()  # the next frame refers to it
        trace = trace.tb_next
    error.__traceback__ = trace


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames of its traceback hold, and of those that it was raised in or from, such as the activations of a batch."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]


def code_of(error: BaseException, requests: int, devices: Sequence[str]) -> int:
    """What the engine is told of an exception on these devices. Out of memory halves the device's batches, so it cannot help a single request."""
    if requests > 1 and is_out_of_memory(error):
        return OUT_OF_MEMORY
    where = getattr(error, "device", None)  # in an error of a user's function there is none
    return LOST if isinstance(error, DeviceLost) and (not where or where in devices) else FAILED
