"""Versions of what a batcher serves: which one answers a request, and how that changes while requests come."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paceline import InvalidArgument, Rejected, Unavailable
from paceline._core.engine import Pool as Engine
from paceline.torch._pool.answerer import Answerer
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import Job, clear_frames
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.routing import WHOLE, Gap, OnShadow, Router, State
from paceline.torch._pool.seats import Seat
from paceline.torch._pool.warming import Warming

_LOOK = 0.005  # seconds between looks at whether the last request has ended


class Version(NamedTuple):
    """A version of a served model. `Batcher.publish` makes it.

    Attributes
    ----------
    number
        As in ``future.version`` of the requests that it answers. What `Pool.serve` was given is version 1.
    endpoint
        The name of the batcher.
    """

    number: int
    endpoint: str


class Versions:
    """The versions of one batcher.

    Parameters
    ----------
    live
        The first one.
    make
        Makes another one of a model, by its number and options.
    use
        Lets requests go to what it is given from now on.
    """

    def __init__(
        self,
        jobs: Jobs,
        live: Answerer,
        make: Callable[[Any, int, Mapping[str, Any]], Answerer],
        use: Callable[[Answerer | Router | Gap], None],
    ) -> None:
        self._jobs, self._name, self._make, self._use = jobs, live.name, make, use
        self._state = State(live)
        self._way: Answerer | Router | Gap = live  # of a request
        self._cold: set[int] = set()  # versions that have left their devices to another one
        self._numbers = itertools.count(2)
        self._lock = threading.RLock()  # around each change of the state
        self._publishing = threading.Lock()  # one at a time is loaded
        self._exchanging = self._allow_gap = False

    def publish(
        self,
        model: Any,
        weight: float,
        shadow: bool,
        on_shadow: OnShadow | None,
        allow_gap: bool,
        options: Mapping[str, Any],
    ) -> Version:
        """See `Batcher.publish`."""
        part = _part_of("publish", weight)
        if (shadow and part < WHOLE) or (on_shadow is not None and not shadow):
            raise InvalidArgument(
                "publish: a version in the shadow answers nobody, so it has no weight=, and no other version has on_shadow=."
            )
        self._check_may_wait()  # before the lock, whose holder may wait for a device
        with self._publishing:
            _check_sum("publish", self._state, part)
            made = self._make(model, next(self._numbers), options)
            try:
                self._bring(made, part == WHOLE and not shadow, allow_gap)
                with self._lock:
                    if shadow:
                        shadows = (*self._state.shadows, (made, on_shadow))
                        self._set(dataclasses.replace(self._state, shadows=shadows))
                    else:
                        self._answer_by("publish", made, part)
                    self._allow_gap = allow_gap
            except BaseException as error:
                clear_frames(error)  # which may refer to what is freed
                for seat in list(self._jobs.seats.values()):
                    made.served.free(seat)
                raise
            return Version(made.version, self._name)

    def promote(self, version: Version | int | None, weight: float) -> Version:
        """See `Batcher.promote`."""
        part = _part_of("promote", weight)
        with self._lock:
            self._check_quiet("promote")
            others = [one for role, one in self._state.all() if role in ("candidate", "shadow")]
            if version is None and not others:
                raise InvalidArgument("promote: there is no candidate. Say which version.")
            newest = max(others, key=lambda one: one.version, default=None)
            found = newest if version is None else self._find("promote", version)
        assert found is not None
        del others, newest
        self._warm_again(found, part == WHOLE)
        with self._lock:
            self._answer_by("promote", found, part)
        return Version(found.version, self._name)

    def rollback(self) -> Version:
        """See `Batcher.rollback`."""
        with self._lock:
            self._check_quiet("rollback")
            if self._state.candidates:
                self._set(dataclasses.replace(self._state, candidates=()))
                return Version(self._state.live.version, self._name)
            found = self._state.previous
        if found is None:
            raise InvalidArgument("rollback: there is no version before this one, or it was retired. Publish it again.")
        self._warm_again(found, True)
        with self._lock:
            self._check_quiet("rollback")
            self._set(State(found, shadows=self._state.shadows))
        return Version(found.version, self._name)

    def retire(self, version: Version | int) -> None:
        """See `Batcher.retire`."""
        with self._lock:
            self._check_quiet("retire")
            found = self._find("retire", version)
            if found is self._state.live:
                raise InvalidArgument(f"retire: version {found.version} is live. Promote another one before.")
            self._set(self._state.without(found))

    def report(self) -> list[dict[str, Any]]:
        """See `Batcher.versions`."""
        state = self._state
        parts = {one.version: part for one, part in state.candidates}
        parts[state.live.version] = WHOLE - sum(parts.values())
        return [
            {"number": one.version, "role": role, "weight": parts.get(one.version, 0) / WHOLE}
            for role, one in state.all()
        ]

    # With the lock.

    def _set(self, state: State) -> None:
        self._turn_to(Router(state) if state.candidates or state.shadows else state.live, state)

    def _turn_to(self, way: Answerer | Router | Gap, state: State) -> None:
        self._way, self._state = way, state
        self._use(way)

    def _answer_by(self, call: str, found: Answerer, part: int) -> None:
        self._check_quiet(call)
        state, without = self._state, self._state.without(found)
        if part == WHOLE:
            previous = without.previous if state.live is found else state.live
            return self._set(State(found, (), without.shadows, previous))
        if state.live is found:
            raise InvalidArgument(f"{call}: version {found.version} is live. It has what the candidates leave.")
        _check_sum(call, without, part)
        self._set(dataclasses.replace(without, candidates=(*without.candidates, (found, part))))

    def _find(self, call: str, version: Version | int) -> Answerer:
        wanted = (version, self._name) if isinstance(version, int) else version
        for _, one in self._state.all():
            if (one.version, self._name) == wanted:
                return one
        raise InvalidArgument(f"{call}: {self._name} has no version {wanted}, or not any more.")

    def _check_quiet(self, call: str) -> None:
        if self._exchanging:
            raise Unavailable(
                f"{call}: versions are just exchanged device by device. Wait until that call has returned."
            )

    # How a version gets onto the devices.

    def _check_may_wait(self) -> None:
        future: PoolFuture[Any] = PoolFuture()
        job = Job(future, self._jobs, lambda _: None, (), {}, 1)
        self._jobs.put(job, kind=f"{self._name}, publishing", priority="normal", deadline=None, wait=False)
        try:
            Engine.check_may_wait(future._job)
        except InvalidArgument:
            raise InvalidArgument(
                "this call is in a job, a step or a callback, and would keep a device that it waits for"
            ) from None
        finally:
            future.cancel()

    def _warm_again(self, found: Answerer, whole: bool) -> None:
        if found.version in self._cold:
            self._check_may_wait()
            try:
                with self._publishing:
                    self._bring(found, whole, self._allow_gap)
            except BaseException as error:
                clear_frames(error)
                raise

    def _bring(self, made: Answerer, whole: bool, allow_gap: bool) -> None:
        """Load it onto all devices that may answer, and warm it there, beside the others where they fit."""
        warming = Warming(self._jobs, made, list(self._state.live.examples.values()))
        beside: list[str] = []
        apart: list[Seat] = []
        for seat in warming.seats():
            while not (fits := warming.beside(seat, self._resident_but(made))) and self._let_previous_go(made):
                pass
            if fits:
                beside.append(seat.name)
            else:
                apart.append(seat)
        if apart:
            self._exchange(made, warming, beside, apart, whole, allow_gap)
        self._cold.discard(made.version)

    def _resident_but(self, made: Answerer) -> float:
        """The bytes that other versions keep on a device."""
        with self._lock:
            others = {one.version: one.served.resident for _, one in self._state.all()}
        return sum(kept for version, kept in others.items() if version not in {made.version, *self._cold})

    def _let_previous_go(self, made: Answerer) -> bool:
        with self._lock:
            previous = self._state.previous
            if previous is None or previous.version in {made.version, *self._cold}:
                return False
            gone = weakref.ref(previous)
            self._set(self._state.without(previous))
        del previous
        self._wait_for(gone)
        return True

    def _exchange(
        self, made: Answerer, warming: Warming, beside: list[str], apart: list[Seat], whole: bool, allow_gap: bool
    ) -> None:
        """Where only one version fits: on half of these devices while the others answer by the old version, and then on the rest."""
        half = (len(apart) + 1) // 2
        first, second = apart[:half], apart[half:]
        stay = [*beside, *(one.name for one in second)]
        with self._lock:
            if not whole or self._state.candidates or self._state.shadows or not (stay or allow_gap):
                raise Rejected(self._no_room(made, apart, alone=not stay))
            self._exchanging, old, before = True, self._state.live.only_on(None), self._state.previous
        gap = Gap(lambda *request: self._way.put(*request), self._check_may_wait)
        left: list[Seat] = []
        try:
            self._pass_to(old.only_on(stay) if stay else gap, State(old))
            for seat in first:
                warming.instead(seat, old)
            if second:
                left = second
                self._pass_to(made.only_on([*beside, *(one.name for one in first)]), State(made, previous=old))
            while left:
                warming.instead(left[0], old)
                left = left[1:]
            with self._lock:
                self._cold.add(old.version)
                self._set(State(made, previous=old))
        except BaseException:
            if left:  # the new version answers elsewhere
                made.served.free(left[0])
                self._pass_to(old.only_on([*beside, *(one.name for one in left)]), State(old))
            for seat in apart:
                made.served.free(seat)
            with self._lock:
                self._set(State(old, previous=before))
            raise
        finally:
            self._exchanging = False
            gap.over.set()

    def _pass_to(self, way: Answerer | Gap, state: State) -> None:
        """Let requests go there, and wait until those before have ended."""
        with self._lock:
            gone = weakref.ref(self._way)
            self._turn_to(way, state)
        del way, state
        self._wait_for(gone)

    def _wait_for(self, gone: weakref.ref[Any]) -> None:
        """Requests keep what answers them until they have ended."""
        while gone() is not None:
            if self._jobs.closed:
                raise Unavailable("publish: the pool was closed.")
            time.sleep(_LOOK)

    def _no_room(self, made: Answerer, apart: list[Seat], *, alone: bool) -> str:
        where = ", ".join(one.name for one in apart)
        return (
            f"publish: {made.name} was not taken, since it does not fit into the memory of {where} beside the versions that are there. "
            + (
                "No other device could answer while they are exchanged. With allow_gap=True requests wait meanwhile."
                if alone
                else "Devices can exchange one version for another. So all requests must go to the new one, and candidates and shadows must be retired."
            )
        )


def _part_of(call: str, weight: float) -> int:
    part = round(weight * WHOLE) if isinstance(weight, (int, float)) and 0 < weight <= 1 else 0
    if part == WHOLE and weight < 1:
        part = WHOLE - 1  # a candidate
    if part == 0:
        raise InvalidArgument(f"{call}: weight={weight!r} must be from a millionth to 1.")
    return part


def _check_sum(call: str, state: State, part: int) -> None:
    if part < WHOLE <= part + sum(one for _, one in state.candidates):
        raise InvalidArgument(
            f"{call}: weight={part / WHOLE} is not there. The live version has what the candidates leave, which must be more than nothing."
        )
