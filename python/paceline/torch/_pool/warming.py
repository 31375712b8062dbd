"""How a version of a model gets onto devices while others serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline import DeviceLost, Rejected
from paceline._core.sim import batch_sizes
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.answerer import Answerer, Example
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import Job, clear_frames
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.needs import Place
from paceline.torch._pool.seats import Seat

_LOOK = 0.05  # seconds between looks at whether a device was retired
_AWAY = 20  # looks after which a device that is retired loads with its first batch: some are retired for a moment only
_BREAK, _LONGEST_BREAK = (
    3.0,
    1.0,
)  # times what a batch has taken: a quarter of one device's time; and seconds, since the first batches may compile
# Requests at once. Of each class of devices the pool wants three samples before it knows the speed of a kind, and two sizes for a line.
_MEASURED = (1, 8) * 3


class Warming:
    """Loads a version, runs each size of batches, and lets the pool measure it.

    Beside the service each job is one batch, so a request waits for one of them at most. Devices are warmed one after the other, with breaks.

    Parameters
    ----------
    made
        The version.
    examples
        Requests that were answered before, one of each kind.
    """

    def __init__(self, jobs: Jobs, made: Answerer, examples: Sequence[Example]) -> None:
        self._jobs, self._made, self._examples = jobs, made, examples

    def seats(self) -> list[Seat]:
        """The devices that may answer, without those that are retired."""
        labels, names = self._made.place()
        active = self._jobs.engine.active
        return [
            self._jobs.seats[one.name]
            for one in list(self._jobs.devices)
            if one.name in active
            and (not names or one.name in names)
            and {*labels} <= {one.name, one.kind, one.device_class}
        ]

    def beside(self, seat: Seat, others: float) -> bool:
        """Do it beside what is on the device already, which keeps so many bytes. False: memory is too short."""
        made = self._made
        if others + made.served.resident + made.options.memory > self._cap(seat):
            return False
        try:
            try:
                with ThreadPoolExecutor(1, "paceline publish") as thread:
                    thread.submit(_load, made, seat).result()
            except Exception as error:
                raise self._refused(seat, "loading", error) from error
            for example in self._examples:
                all(
                    self._run(seat, f"a batch of {size}", self._rehearsal(seat, example, size))
                    for size in self._sizes(seat)
                )
            self._measure(seat)
        except Rejected as error:
            if not is_out_of_memory(error.__cause__ or error):
                raise
            made.served.free(seat)
            seat.release_memory()
            return False
        return True

    def instead(self, seat: Seat, old: Answerer) -> None:
        """Do it in the place of a version that has no requests there any more. Meanwhile nothing else runs on the device."""

        def exchange(device: torch.device) -> bool:
            old.served.free(seat)
            seat.release_memory()
            self._made.served.of(seat)
            for example in self._examples:
                all(self._rehearsal(seat, example, size)(device) for size in self._sizes(seat))
            return True

        if not self._run(seat, f"loading in the place of version {old.version}", exchange, rests=False):
            old.served.free(seat)
        self._measure(seat)

    def _cap(self, seat: Seat) -> float:
        return self._jobs.memory.get(seat.name, math.inf)

    def _sizes(self, seat: Seat) -> list[int]:
        options, left = self._made.options, self._cap(seat) - self._made.served.resident
        return [size for size in batch_sizes(options.max_batch) if size * options.memory <= left]

    def _rehearsal(self, seat: Seat, example: Example, size: int) -> Callable[[torch.device], bool]:
        def rehearse(_: torch.device) -> bool:
            """False: memory is too short for so many, which the pool will find out, too, and for more."""
            try:
                self._made.rehearse(seat, example, size)
            except BaseException as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                clear_frames(error)
                seat.release_memory()
                return False
            return True

        return rehearse

    def _measure(self, seat: Seat) -> None:
        """Let requests come the usual way, on one device."""
        there = self._made.only_on([seat.name])
        for _, leaves, spec in self._examples:
            item = leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)
            for count in _MEASURED:
                count = min(count, self._made.options.max_batch)
                asked = [there.put(None, item, leaves, spec, None, "normal", True) for _ in range(count)]
                try:
                    if not all(self._ended(one, seat, f"{count} requests") for one in asked):
                        return
                finally:
                    for one in asked:
                        one.cancel()
                _rest(asked[-1])

    def _run(self, seat: Seat, what: str, call: Callable[[torch.device], bool], *, rests: bool = True) -> bool:
        """Run it on the device's worker. False: the call says so, or the device was retired."""
        future: PoolFuture[Any] = PoolFuture()
        self._jobs.put(
            Job(future, self._jobs, call, (), {}, 1),
            kind=f"{self._made.name}, warming",
            priority="normal",
            deadline=None,
            wait=True,
            place=Place([seat.name], []),
        )
        try:
            if not self._ended(future, seat, what):
                return False
        finally:
            future.cancel()  # after an interrupt
        if rests:
            _rest(future)
        return bool(future.result())

    def _ended(self, future: PoolFuture[Any], seat: Seat, what: str) -> bool:
        """Wait for it. False: the device was retired, or is lost."""
        away = 0
        while not wait([future], _LOOK).done:
            away = 0 if seat.name in self._jobs.engine.active else away + 1
            if away >= _AWAY and future.cancel():
                return False
        error = future.exception()
        if error is None:
            return True
        if isinstance(error, (DeviceLost, Rejected)) and seat.name not in self._jobs.engine.active:
            return False
        raise self._refused(seat, what, error) from error

    def _refused(self, seat: Seat, what: str, error: BaseException) -> Rejected:
        return Rejected(
            f"publish: {self._made.name} was not taken, since {what} on {seat.name} has raised {error!r}. The service is as it was."
        )


def _load(made: Answerer, seat: Seat) -> None:
    seat.prepare()
    with seat.beside():
        made.served.of(seat)
        seat.wait()


def _rest(after: PoolFuture[Any]) -> None:
    time.sleep(min(_BREAK * after.seconds, _LONGEST_BREAK))
