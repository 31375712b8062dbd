"""Versions of what a batcher serves: which one answers a request, and how that changes while requests come."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline import InvalidArgument, Rejected, Unavailable
from paceline._core.engine import Pool as Engine
from paceline.torch._pool.answerer import Answerer, Gone, Present
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import Job, clear_frames
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.routing import (
    WHOLE,
    Gap,
    OnShadow,
    Router,
    State,
    Version,
    cancel_copies,
    check_sum,
    part_of,
    without_copies,
)
from paceline.torch._pool.seats import Seat
from paceline.torch._pool.warming import Warming

_NONE_BEFORE = "rollback: there is no version before this one, or it was retired. Publish it again."


class Versions:
    """The versions of one batcher.

    Parameters
    ----------
    present
        Where the batcher's requests go: to the first one. It is written to.
    make
        Makes another one of a model, by its number and options.
    """

    def __init__(self, jobs: Jobs, present: Present, make: Callable[[Any, int, Mapping[str, Any]], Answerer]) -> None:
        live: Answerer = present.way
        self._jobs, self.name, self._make, self._present = jobs, live.name, make, present
        self._state = self._settled = State(live)  # now, and before what goes on
        self._gone: list[Gone] = []
        self._cold: set[int] = set()  # versions that have left their devices to another one
        self._last = live.version  # the last number that was taken
        self._lock = threading.RLock()  # around each change of the state
        self._publishing = threading.Lock()  # one at a time is loaded
        self.bringing: Answerer | None = None  # the version that is loaded onto the devices
        self.exchanging = False  # whether it takes the place of the live one, device by device
        self._work: dict[str, int] = {}  # see `Warming`
        self._known: PoolFuture[Any] = PoolFuture()  # by which the engine knows the pool
        jobs.endpoints[self.name] = self

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
        part = part_of("publish", weight)
        if (shadow and part < WHOLE) or (on_shadow is not None and not shadow):
            raise InvalidArgument(
                "publish: a version in the shadow answers nobody, so it has no weight=, and no other version has on_shadow=."
            )
        if not (on_shadow is None or callable(on_shadow)):
            raise InvalidArgument(f"publish: on_shadow= is a {type(on_shadow).__name__}, not a function.")
        self._check_may_wait()  # before the lock, whose holder may wait for a device
        with self._publishing:
            check_sum("publish", self._state, part)
            made = self._make(model, self._last + 1, options)
            self._last = made.version
            with self._freed_unless_taken(made):
                self._bring("publish", made, part == WHOLE and not shadow, allow_gap)
                with self._lock:
                    if shadow:
                        shadows = (*self._state.shadows, (made, on_shadow))
                        self._set(dataclasses.replace(self._state, shadows=shadows))
                    else:
                        self._answer_by("publish", made, part)
            return Version(made.version, self.name)

    def promote(self, version: Version | int | None, weight: float, allow_gap: bool) -> Version:
        """See `Batcher.promote`."""
        part = part_of("promote", weight)
        with self._lock:
            self._check_quiet("promote")
            if version is None:
                others = [one.version for role, one in self._state.all() if role in ("candidate", "shadow")]
                if not others:
                    raise InvalidArgument("promote: there is no candidate. Say which version.")
                version = max(others)
            found = self._find("promote", version)
        with self._warmed_again("promote", found, part, allow_gap), without_copies(found), self._lock:
            self._find("promote", found.version)  # it may have been retired meanwhile
            self._answer_by("promote", found, part)
        return Version(found.version, self.name)

    def rollback(self, allow_gap: bool) -> Version:
        """See `Batcher.rollback`."""
        with self._lock:
            self._check_quiet("rollback")
            if self._state.candidates:
                self._set(dataclasses.replace(self._state, candidates=()))
                return Version(self._state.live.version, self.name)
            found = self._state.previous
        if found is None:
            raise InvalidArgument(_NONE_BEFORE)
        with self._warmed_again("rollback", found, WHOLE, allow_gap), self._lock:
            self._check_quiet("rollback")
            if found not in (self._state.previous, self._state.live):  # it had to leave for another one
                raise InvalidArgument(_NONE_BEFORE)
            self._set(State(found, shadows=self._state.shadows))
        return Version(found.version, self.name)

    def retire(self, version: Version | int) -> None:
        """See `Batcher.retire`."""
        with self._lock:
            self._check_quiet("retire")
            found = self._find("retire", version)
            if found is self._state.live:
                raise InvalidArgument(f"retire: version {found.version} is live. Promote another one before.")
            self._set(self._state.without(found))
        cancel_copies(found)

    def report(self) -> list[dict[str, Any]]:
        """See `Batcher.versions`."""
        state = self._state
        parts = {one.version: part for one, part in state.candidates}
        parts[state.live.version] = WHOLE - sum(parts.values())
        return [
            {"number": one.version, "role": role, "weight": parts.get(one.version, 0) / WHOLE, **one.figures.report()}
            for role, one in state.all()
        ]

    def answering(self) -> list[Answerer]:
        """Those that requests go to, also in the shadow, and the one that is loaded for that."""
        found = [one for role, one in self._state.all() if role != "previous"]
        made = self.bringing
        return found if made is None or made in found else [*found, made]

    def warming(self, call: str, made: Answerer) -> Warming:
        """What loads a version."""
        return Warming(self._jobs, made, self._state, call, self.name, self._work)

    # With the lock.

    def _set(self, state: State) -> None:
        for role, one in state.all():
            if role != "previous":
                one.present = None
                self._cold.discard(one.version)
        self._turn_to(Router(state) if state.candidates or state.shadows else state.live, state)
        kept = [one for _, one in state.all()]
        gone = [one for _, one in self._settled.all() if one not in kept]
        self._settled = state
        self._forget(*gone)

    def _forget(self, *gone: Answerer) -> None:
        """Let the engine forget versions that are gone: now, or when what they still have to do has ended.

        One with a run that was given up and goes on: with the first call afterwards.
        """
        left = [one.left(self._present) for one in gone]
        self._gone += left
        for one in left:
            for future in list(one.open):
                future.add_done_callback(self._forget_later)
        engine = self._jobs.engine
        self._gone = [one for one in self._gone if one.open or not all(map(engine.forget, list(one.kinds.values())))]

    def _forget_later(self, _: object) -> None:
        with self._lock:
            self._forget()

    def _turn_to(self, way: Answerer | Router | Gap, state: State) -> None:
        self._present.way, self._state = way, state  # no interrupt comes in between

    def _answer_by(self, call: str, found: Answerer, part: int) -> None:
        self._check_quiet(call)
        state, without = self._state, self._state.without(found)
        if part == WHOLE:
            previous = without.previous if state.live is found else state.live
            return self._set(State(found, (), without.shadows, previous))
        if state.live is found:
            raise InvalidArgument(f"{call}: version {found.version} is live. It has what the candidates leave.")
        check_sum(call, without, part)
        self._set(dataclasses.replace(without, candidates=(*without.candidates, (found, part))))

    def _find(self, call: str, version: Version | int) -> Answerer:
        try:
            wanted = version if isinstance(version, Version) else (operator.index(version), self.name)
        except TypeError:
            raise InvalidArgument(
                f"{call}: the version is {version!r}; it must be a number, or what publish has returned."
            ) from None
        for _, one in self._state.all():
            if (one.version, self.name) == wanted:
                return one
        of = "" if wanted[1] == self.name else f" of {wanted[1]}"
        raise InvalidArgument(f"{call}: {self.name} has no version {wanted[0]}{of}, or not any more.")

    def _check_quiet(self, call: str) -> None:
        if self._jobs.closed:
            raise Unavailable(f"{call}: the pool is closed.")
        if self.exchanging:
            raise Unavailable(
                f"{call}: versions are just exchanged device by device. Wait until that call has returned."
            )

    # How a version gets onto the devices.

    def _check_may_wait(self) -> None:
        if self._jobs.closed:
            raise Unavailable(f"{self.name}: the pool is closed.")
        with self._lock:
            if self._known._job is None:
                job = Job(self._known, self._jobs, lambda _: None, (), {}, 1)
                job.own = True
                self._jobs.put(job, kind=f"{self.name}, publishing", priority="normal", deadline=None, wait=False)
                self._known.cancel()
        try:
            Engine.check_may_wait(self._known._job)
        except InvalidArgument:
            raise InvalidArgument(
                "this call is in a job, a step or a callback, and would keep a device that it waits for"
            ) from None

    @contextlib.contextmanager
    def _freed_unless_taken(self, made: Answerer) -> Iterator[None]:
        """Around what loads it."""
        try:
            self.bringing = made
            yield
        except BaseException as error:
            if all(one is not made or role == "previous" for role, one in self._state.all()):
                clear_frames(error)  # they refer to what it has loaded, and somebody may keep the error
                made.wait()  # after an interrupt, for a batch that still warms it
                self._free(made)
                with self._lock:
                    if all(one is not made for _, one in self._state.all()):
                        self._forget(made)
            raise
        finally:
            self.bringing = None

    def _free(self, gone: Answerer) -> None:
        """Free it on all devices, also where one is retired."""
        for seat in list(self._jobs.seats.values()):
            gone.free(seat)

    @contextlib.contextmanager
    def _warmed_again(self, call: str, found: Answerer, part: int, allow_gap: bool) -> Iterator[None]:
        """Load it if it is cold. In the block it is taken; otherwise it leaves again."""
        if found.version not in self._cold:
            yield
            return
        self._check_may_wait()
        with self._publishing:
            if found.version not in self._cold:
                yield
                return
            self._find(call, found.version)
            check_sum(call, self._state.without(found), part)
            with self._freed_unless_taken(found):
                self._bring(call, found, part == WHOLE, allow_gap)
                yield

    def _bring(self, call: str, made: Answerer, whole: bool, allow_gap: bool) -> None:
        """Load it onto all devices that may answer, and warm it there, beside the others where they fit."""
        warming = self.warming(call, made)
        seats = warming.seats()
        if not seats:
            raise warming.nowhere()
        short = [seat for seat in seats if not warming.fits(seat, without=self._state.previous)]
        if short:  # before the previous version is let go for nothing
            self._check_exchange(call, made, short, len(seats) > 1, whole, allow_gap)
        beside: list[str] = []
        apart: list[Seat] = []
        for seat in seats:
            while not (fits := warming.beside(seat)) and self._let_previous_go(made):
                pass
            if fits:
                beside.append(seat.name)
            else:
                apart.append(seat)
        if apart:
            with self._jobs.engine.keeping([*beside, *(one.name for one in apart)]) as there:
                if not there:
                    raise warming.nowhere()
                beside, apart = [one for one in beside if one in there], [one for one in apart if one.name in there]
                if apart:
                    self._exchange(call, made, warming, beside, apart, whole, allow_gap)

    def _let_previous_go(self, made: Answerer) -> bool:
        with self._lock:
            previous = self._state.previous
            if previous is None or previous.version in {made.version, *self._cold}:
                return False
            self._set(self._state.without(previous))
        previous.leave(self._present)
        self._free(previous)
        return True

    def _exchange(
        self,
        call: str,
        made: Answerer,
        warming: Warming,
        beside: list[str],
        apart: list[Seat],
        whole: bool,
        allow_gap: bool,
    ) -> None:
        """Where only one version fits: on half of these devices while the others answer by the old version, and then on the rest."""
        half = (len(apart) + 1) // 2
        first, left = apart[:half], apart[half:]
        stay = [*beside, *(one.name for one in left)]
        then = [*beside, *(one.name for one in first)]
        gap = Gap(self._present, self._check_may_wait)
        end: State | None = None
        try:
            with self._lock:
                self._check_exchange(call, made, apart, bool(stay), whole, allow_gap)
                old = self._state.live
                self.exchanging, end = True, State(old, previous=self._state.previous)
            self._pass_to(old.only_on(stay) if stay else gap, State(old))
            for seat in first:
                warming.instead(seat, old)
            if stay:
                if not {*then} & {*self._jobs.engine.active}:  # they are lost
                    raise warming.nowhere()
                self._pass_to(made.only_on(then), State(made, previous=old))
            while left:
                warming.instead(left[0], old)
                left = left[1:]
            end = State(made, previous=old)
            self._free(old)
        except BaseException:
            if end is not None and end.live is made:
                self._free(old)  # the rest
            elif end is not None:
                made.wait()  # after an interrupt, for what still loads or warms it
                if self._state.live is made:
                    for seat in left[:1]:
                        made.free(seat)
                    back = [*beside, *(one.name for one in left)]
                    self._pass_to(old.only_on(back) if back else gap, State(old))
                for seat in apart:
                    made.free(seat)
            raise
        finally:  # also if another interrupt comes meanwhile
            if end is not None:
                with self._lock:
                    self.exchanging = False
                    if end.live is made:
                        self._cold.add(old.version)
                    way = self._present.way
                    self._set(end)
                    if isinstance(way, Answerer) and way is not end.live:
                        way.left(self._present)  # a thread that has read this way may still submit there
                gap.over.set()

    def _pass_to(self, way: Answerer | Gap, state: State) -> None:
        """Let requests go there, and wait until those before have ended."""
        with self._lock:
            before = self._present.way
            self._turn_to(way, state)
        assert isinstance(before, Answerer)
        before.leave(self._present)

    def _check_exchange(
        self, call: str, made: Answerer, apart: list[Seat], others: bool, whole: bool, allow_gap: bool
    ) -> None:
        """Raise if these devices cannot exchange versions. `others`: whether others can answer meanwhile."""
        if whole and not self._state.candidates and not self._state.shadows and (others or allow_gap):
            return
        where = ", ".join(one.name for one in apart)
        raise Rejected(
            f"{call}: {made.name} was not taken, since it does not fit into the memory of {where} beside the versions that are there. "
            + (
                "Devices can exchange one version for another. So all requests must go to the new one, and candidates and shadows must be retired."
                if others
                else "No other device could answer while they are exchanged. With allow_gap=True requests wait meanwhile."
            )
        )
