"""How a version of a model gets onto devices while others serve."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline import DeviceLost, Rejected
from paceline._core.sim import batch_sizes
from paceline._pool_figures import VersionFigures
from paceline.torch._devices import cuda
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.answerer import Answerer
from paceline.torch._pool.examples import Example
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import Job, clear_frames
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.needs import Place
from paceline.torch._pool.routing import State
from paceline.torch._pool.seats import Seat
from paceline.torch._pool.served import Served
from paceline.torch._pool.watchdog import run_beside

_LOOK = 0.05  # seconds between looks at whether a device was retired
_AWAY = 20  # looks after which a device that is retired loads with its first batch: some are retired for a moment only
# Times what a batch has taken, a tenth of one device's time; but no longer than so many seconds, since the first batches may compile.
_BREAK, _LONGEST_BREAK = 9.0, 1.0
# Requests at once. Of each class of devices the pool wants three samples before it knows the speed of a kind, and two sizes for a line.
_MEASURED = (1, 8) * 3


class _AwayError(Exception):
    """The device is retired or lost. It loads with its first batch."""


class Warming:
    """Loads a version, runs each size of batches, and lets the pool measure it.

    Beside the service each job is one batch, so a request waits for one of them at most. Devices are warmed one after the other, with breaks.

    Parameters
    ----------
    made
        The version.
    state
        The versions that there are. It is warmed with requests that the live one has answered.
    call, batcher
        Names for errors, and for the kind of the jobs.
    work
        By GPU, the bytes that the largest batch took while a version was warmed. It is written to.
    """

    def __init__(self, jobs: Jobs, made: Answerer, state: State, call: str, batcher: str, work: dict[str, int]) -> None:
        self._jobs, self._made, self._live = jobs, made, state.live
        self._examples = list(state.live.examples)
        self._answering = [one.served for role, one in state.all() if role != "previous"]
        self._call, self._kind, self._work = call, f"{batcher}, warming", work

    def seats(self) -> list[Seat]:
        """The devices that may answer, without those that are retired."""
        labels, names = self._made.place()
        active = self._jobs.engine.active
        return [
            self._jobs.seats[one.name]
            for one in list(self._jobs.devices)
            if (one.name in active or one.name in self._jobs.scale.arriving)
            and (not names or one.name in names)
            and {*labels} <= {one.name, one.kind, one.device_class}
        ]

    def fits(self, seat: Seat, without: Answerer | None = None) -> bool:
        """Whether it fits beside what is on the device, or would without another version, as far as that is known.

        On a GPU the service must not be the one that runs out of memory. So there has to be room for the largest batch, too.
        """
        gone = None if without is None else without.served
        if self._made.options.memory > self._left(seat, gone):
            return False
        if seat.gpu is None:
            return True
        free = cuda.free_memory(seat.gpu) - self._largest(seat) + (0 if gone is None else gone.bytes_on(seat))
        loads = [one for one in self._answering if seat.name not in one.prepared]  # with their first batches
        return sum(one.bytes_on(seat) for one in (self._made.served, *loads)) <= free

    def beside(self, seat: Seat) -> bool:
        """Do it beside what is on the device already. False: memory is too short."""
        made = self._made
        if not self.fits(seat):
            return False
        try:
            try:
                run_beside(self._jobs.watchdog, seat, f"{made.name}, loading", functools.partial(_load, made, seat))
            except Exception as error:
                raise self._refused(seat, "loading", error) from error
            self._warm(seat)
        except Rejected as error:
            if not is_out_of_memory(error.__cause__ or error):
                raise
            made.wait()
            made.free(seat)
            seat.release_memory()
            return False
        return True

    def instead(self, seat: Seat, old: Answerer) -> None:
        """Do it in the place of a version that has no requests there any more. Meanwhile the batcher has no requests there."""

        def exchange(_: torch.device) -> bool:
            old.free(seat)
            seat.release_memory()
            self._made.served.of(seat)
            return True

        with contextlib.suppress(_AwayError):
            self._run(seat, f"loading in the place of version {old.version}", exchange, rests=False)
            self._warm(seat, old.served)

    def ahead(self, seat: Seat, goes_on: Callable[[], bool]) -> None:
        """Do it on the calling thread, for a device that takes no work. Ends early, with a part of it, once `goes_on` says so.

        A state whose bytes the pool's ``memory=`` counts comes with its first batch, as always: the engine decides which ones are there.
        """
        made, served = self._made, self._made.served
        if not self._jobs.loads_ahead(seat, served):
            return
        seat.prepare()
        with seat.entered():  # no job uses the stream
            served.of(seat)
            sizes = self._sizes(seat)
            for example in self._examples:
                if served.settles_by_size:
                    all(goes_on() and self._try(made, seat, example, size) for size in sizes)
                else:
                    any(goes_on() and self._try(made, seat, example, size) for size in reversed(sizes))
            seat.wait()

    def _left(self, seat: Seat, gone: Served | None = None) -> float:
        """Bytes of the pool's ``memory=`` that what it keeps, and what is there, leave for its batches."""
        served = self._made.served
        others = sum(
            one.resident if one in self._answering else one.holds(seat.name)  # it comes back with its next batch
            for _, one in self._jobs.all_served()
            if one not in (served, gone)
        )
        return self._jobs.memory.get(seat.name, math.inf) - served.resident - others

    def _sizes(self, seat: Seat, gone: Served | None = None) -> list[int]:
        options, left = self._made.options, self._left(seat, gone)
        return [size for size in batch_sizes(options.max_batch) if size * options.memory <= left]

    def _largest(self, seat: Seat) -> int:
        """Bytes that the largest batch takes on a GPU. If no version was warmed there, the live one runs it."""
        if seat.name not in self._work:
            with contextlib.suppress(_AwayError):
                for example in self._examples:
                    any(self._rehearse(self._live, seat, example, size) for size in reversed(self._sizes(seat)))
        return self._work.get(seat.name, 0)

    def _warm(self, seat: Seat, gone: Served | None = None) -> None:
        """Run each size, with breaks if the device serves meanwhile, and measure."""
        with contextlib.suppress(_AwayError):
            for example in self._examples:
                sizes = self._sizes(seat, gone)
                all(self._rehearse(self._made, seat, example, size, rests=gone is None) for size in sizes)
            self._measure(seat)

    def _rehearse(self, which: Answerer, seat: Seat, example: Example, size: int, *, rests: bool = True) -> bool:
        of = "" if which is self._made else f" of version {which.version}"
        return self._run(seat, f"a batch of {size}{of}", lambda _: self._try(which, seat, example, size), rests=rests)

    def _try(self, which: Answerer, seat: Seat, example: Example, size: int) -> bool:
        """Run it here. False: memory is too short for so many, which the pool will find out, too, and for more."""
        before = 0 if seat.gpu is None else cuda.mark_memory(seat.gpu)
        try:
            which.rehearse(seat, example, size)
            if seat.gpu is not None:
                took = cuda.peak_memory(seat.gpu) - before
                self._work[seat.name] = max(took, self._work.get(seat.name, 0))
        except BaseException as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            clear_frames(error)
            seat.release_memory()
            return False
        return True

    def _measure(self, seat: Seat) -> None:
        """Let requests come the usual way, on one device."""
        there = self._made.only_on([seat.name])
        there.figures = VersionFigures()  # nobody asked
        for _, leaves, spec, _ in self._examples:
            item = leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
            for count in _MEASURED:
                count = min(count, self._made.options.max_batch)
                asked: list[PoolFuture[Any]] = []
                try:
                    for _ in range(count):
                        asked.append(there.put(None, item, leaves, spec, None, "normal", True, own=True))
                    for one in asked:
                        self._wait(one, seat, f"{count} requests")
                finally:
                    for one in asked:
                        one.cancel()
                _rest(asked[-1])

    def _run(self, seat: Seat, what: str, call: Callable[[torch.device], bool], *, rests: bool) -> bool:
        """Run it on the device's worker."""
        future: PoolFuture[bool] = PoolFuture()
        future.add_done_callback(self._made.open.discard)
        job = Job(future, self._jobs, call, (), {}, 1)
        job.own = True
        try:
            self._made.open.add(future)
            self._jobs.put(
                job,
                kind=self._kind,
                priority="normal",
                deadline=None,
                wait=True,
                place=Place([seat.name], []),
            )
            self._wait(future, seat, what)
        finally:
            future._withdraw()  # after an interrupt
        if rests:
            _rest(future)
        return future.result()

    def _wait(self, future: PoolFuture[Any], seat: Seat, what: str) -> None:
        away = 0
        while not wait([future], _LOOK).done:
            away = 0 if seat.name in self._jobs.engine.active else away + 1
            if away >= _AWAY and future.cancel():
                raise _AwayError
        error = future.exception()
        if isinstance(error, (DeviceLost, Rejected)) and seat.name not in self._jobs.engine.active:
            raise _AwayError
        if error is not None:
            raise self._refused(seat, what, error) from error

    def nowhere(self) -> Rejected:
        """The error if no device may answer."""
        return Rejected(
            f"{self._call}: {self._made.name} was not taken, since no device takes work on which it may answer."
        )

    def _refused(self, seat: Seat, what: str, error: BaseException) -> Rejected:
        return Rejected(
            f"{self._call}: {self._made.name} was not taken, since {what} on {seat.name} has raised {error!r}. The service is as it was."
        )


def _load(made: Answerer, seat: Seat) -> None:
    seat.prepare()
    with seat.beside():
        made.served.of(seat)
        seat.wait()


def _rest(after: PoolFuture[Any]) -> None:
    time.sleep(min(_BREAK * after.seconds, _LONGEST_BREAK))
