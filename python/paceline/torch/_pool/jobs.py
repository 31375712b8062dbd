"""The jobs of one pool: how they reach the engine, on which devices, and what becomes of them when the program ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, SupportsFloat, SupportsIndex

from paceline import Device, DeviceGroup, InvalidArgument, Unavailable
from paceline._core.engine import Pool as Engine
from paceline._observe import Observed, check_observe
from paceline._pool_figures import text_of
from paceline._pool_question import PRIORITIES
from paceline._pool_question import Place as PlaceFunction
from paceline.torch._devices import cuda
from paceline.torch._pool.figures import Figures
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import Work
from paceline.torch._pool.look import Look
from paceline.torch._pool.needs import ANY, Needs, Place, place_of
from paceline.torch._pool.placing import placing_of
from paceline.torch._pool.seats import Seat
from paceline.torch._pool.served import Served
from paceline.torch._pool.tenants import OWN
from paceline.torch._pool.watchdog import Watchdog

Priority = Literal["interactive", "normal", "batch", "background"]
Placement = Literal["auto", "any", "weighted", "round_robin", "least_outstanding", "earliest_finish"] | PlaceFunction
Evicted = list[tuple[str, str]]  # devices, and models that leave their memory


def name_of(fn: Any) -> str:
    """What jobs are called that take about the same time."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def _futures(after: Any) -> list[PoolFuture[Any]]:
    if isinstance(after, PoolFuture):
        return [after]
    if not isinstance(after, Iterable):
        raise InvalidArgument(
            f"submit: after= is a {type(after).__name__}; give a future of this pool, or a list of them."
        )
    return list(after)


class _Engine(Engine):
    """Retires no device while versions of a model are exchanged there: requests may be placed on this device alone, and would wait for it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[list[str]] = []

    def retire(
        self,
        device: str,
        unless_last: bool = False,
        released: bool = False,
        activation_seconds: SupportsFloat | SupportsIndex = 0.0,
    ) -> bool:
        # No lock is held: jobs may end in the call, and their callbacks may want any.
        if not self._keeps(device):
            retired = super().retire(device, unless_last, released, activation_seconds)
            if not retired or not self._keeps(device):
                return retired
            self.restore(device)  # an exchange has begun meanwhile
        if not unless_last:
            raise Unavailable(
                f"retire: versions of a model are just exchanged on {device}. Wait until publish, promote or rollback has returned."
            )
        return False

    def _keeps(self, device: str) -> bool:
        return any(device in one for one in list(self._kept))

    @contextlib.contextmanager
    def keeping(self, devices: Sequence[str]) -> Iterator[list[str]]:
        """Retire none of the devices in the block. Yields those that take work."""
        kept: list[str] = []
        try:
            self._kept.append(kept)
            kept += [one for one in self.active if one in devices]
            yield kept
        finally:
            with contextlib.suppress(ValueError):
                self._kept.remove(kept)


class Jobs:
    """What a pool and its batchers share. Jobs keep it until they have ended, so a pool that nobody knows any more ends them first."""

    scale: Any = None  # the pool's `Scale`, which releases devices
    has_tenants = False

    def __init__(
        self,
        group: DeviceGroup,
        placement: Placement,
        budget: float,
        memory: Mapping[str, float],
        hang_seconds: float | None,
        observe: str | None = None,
    ) -> None:
        check_observe("Pool", observe)
        self.devices = list(group.devices)
        self.memory = dict(memory)
        self.placing, self._placement = placing_of(placement), placement
        self.engine = _Engine(group, self.placing.weak() if self.placing else placement, budget, self.memory)
        self.seats = {one.name: Seat(one, self.engine.stream) for one in group.devices}
        self.served: weakref.WeakValueDictionary[str, Served] = weakref.WeakValueDictionary()  # by the batcher's name
        self.endpoints: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # the `Versions` of each
        self._adding = threading.RLock()  # a device, or what is served
        self._again: set[str] = set()  # kinds of jobs that may run again
        self.watchdog = None if hang_seconds is None else Watchdog(self, hang_seconds)
        self.ends = [] if self.watchdog is None else [self.watchdog.end]  # of threads, once it is closed
        self.figures = Figures([one.name for one in group.devices])
        self.copies: set[PoolFuture[Any]] = set()  # of requests, for versions in the shadow
        self.closing = self.closed = False
        self._process = os.getpid()
        self._batchers = 0  # that were served
        _open.add(self)
        self.look = Look(self)
        try:
            self._observed = None if observe is None else Observed(self.look)
        except BaseException:
            self.engine.close(True)
            raise

    def put(
        self,
        work: Work,
        *,
        kind: str,
        priority: str,
        deadline: float | None,
        wait: bool,
        not_before: float = 0.0,
        gang: int = 1,
        after: PoolFuture[Any] | Iterable[PoolFuture[Any]] = (),
        place: Place = ANY,
        cost: float = 1.0,
        memory: float = 0.0,
        tenant: str = "",
        charge: float = 0.0,
        batched: bool = False,
    ) -> None:
        """Give the engine a piece of work, and its future what the engine knows it by."""
        if priority not in PRIORITIES:
            raise InvalidArgument(f"submit: priority is {priority!r}; it must be one of {', '.join(PRIORITIES)}.")
        if after != ():
            after = _futures(after)
        if after and not all(isinstance(one, PoolFuture) and one._job is not None for one in after):
            raise InvalidArgument("submit: after= has something else than futures of this pool.")
        future = work.future
        assert future is not None
        work.kind, work.priority = kind, priority
        if work.own and self.has_tenants:
            tenant = OWN
        elif tenant:
            self.has_tenants = True
        arguments = (
            work,
            kind,
            PRIORITIES.index(priority),
            math.inf if deadline is None else deadline,
            not_before,
            gang,
            [one._job for one in after] if after else [],
            place.labels,
            place.names,
            cost,
            memory,
            tenant,
            charge,
            work.own,
            wait,
            batched,
        )
        # An interrupt comes between two instructions of Python, so not between the engine's yes and the note of it.
        try:
            any(map(functools.partial(setattr, future, "_job"), itertools.starmap(self.engine.submit, (arguments,))))
        except TypeError:  # it lists what the engine takes
            raise InvalidArgument(
                f"submit: kind={kind!r} must be a string, deadline={deadline!r} and not_before={not_before!r} numbers of seconds, gang={gang!r} a whole "
                f"number, and wait={wait!r} True or False."
            ) from None
        for one in after:
            one.add_done_callback(future._note_failure)

    def kind_that_may_run_again(self, kind: str, memory: float) -> str:
        """The engine's name for idempotent jobs of a kind, which need so many bytes: it runs batches again elsewhere, here of one job."""
        name = f"{kind}, idempotent" + (f", {memory:.17g} bytes" if memory else "")
        if name not in self._again:
            self._check_process("submit")
            with self._adding:
                if name not in self._again:
                    self.engine.add_batches(
                        name, max_batch=1, max_delay=0.0, padded=False, memory=memory, model="", resident=0.0
                    )
                    self._again.add(name)
        return name

    @property
    def gpus(self) -> set[int]:
        """The numbers of the GPUs that are devices, or of which parts are."""
        return {seat.gpu for seat in list(self.seats.values()) if seat.gpu is not None}

    def place_of(self, needs: Needs) -> Place:
        """Where jobs with these needs may run, of the devices that there are now."""
        return place_of(needs, self.devices, self.memory) if needs else ANY

    def serve(self, name: str, served: Served) -> None:
        """Let the devices answer requests, and those that are added later."""
        self._check_process("serve")
        with self._adding:
            for seat in list(self.seats.values()):
                served.add(seat)
            self.served[name] = served

    def add(self, device: Device, memory: float | None) -> None:
        """One more device."""
        self._check_process("add")
        with self._adding:
            if device.name in self.seats:
                raise InvalidArgument(
                    f"add: the pool has {device.name} already. restore() takes back a device that is retired."
                )
            seat = Seat(device, self.engine.stream)
            for _, served in self.all_served():
                served.add(seat)
            self.seats[device.name] = seat  # before its figures, whose readers want it, and the first job
            self.figures.add(device.name)
            try:
                self.engine.add(device, memory)
            except BaseException:
                if device.name in self.engine.active:  # an interrupt is raised after the call
                    self._joined(device, memory)
                else:
                    self.figures.remove(device.name)
                    del self.seats[device.name]
                raise
            self._joined(device, memory)

    def _joined(self, device: Device, memory: float | None) -> None:
        if memory is not None:
            self.memory[device.name] = memory
        self.devices.append(device)

    def _check_process(self, call: str) -> None:
        """A lock may be held for ever in a forked process."""
        if os.getpid() != self._process:
            raise Unavailable(f"{call}: the pool's workers are in another process, the parent.")

    def versions(self) -> list[Any]:
        """The `Versions` of each batcher that somebody knows."""
        return [one for known in self.endpoints.valuerefs() if (one := known()) is not None]

    def versions_now(self) -> dict[str, list[dict[str, Any]]]:
        """The figures of each version, where there are several, by the batcher's name."""
        found = {one.name: one.report() for one in self.versions()}
        return {name: versions for name, versions in found.items() if len(versions) > 1}

    def all_served(self) -> list[tuple[str, Served]]:
        """What is served now, with its name. Any thread may serve more meanwhile."""
        return [(known.key, one) for known in self.served.valuerefs() if (one := known()) is not None]

    @property
    def keeps_models(self) -> bool:
        """Whether anything that is served keeps something on devices."""
        return any(one.keeps for _, one in self.all_served())

    def _beside(self, seat: Seat) -> list[str]:
        """The other devices in its memory."""
        return [one.name for one in list(self.seats.values()) if one.space == seat.space and one is not seat]

    def limits(self, seat: Seat) -> bool:
        """Whether the engine decides by the pool's ``memory=`` which states are in the memory of the device."""
        return not self.memory.keys().isdisjoint((seat.name, *self._beside(seat)))

    def loads_ahead(self, seat: Seat, served: Served) -> bool:
        """Whether a device that comes back loads it before, and not with its first batch."""
        return served.keeps and not (served.resident and self.limits(seat))

    def unload(self, seat: Seat) -> None:
        """Free what models keep on a device that runs nothing. What other devices in its memory use stays."""
        others = self._beside(seat)
        for name, served in self.all_served():
            served.free(seat)
            if served.resident and self.limits(seat) and not any(map(served.holds, others)):
                self.engine.unload(seat.name, name)
        seat.release_memory()

    def evict(self, models: Evicted) -> None:
        """Let devices forget models. Called on a worker, before what needs the memory."""
        for device, name in models:
            served = self.served.get(name)
            if served is not None:
                served.drop(device)

    @contextlib.contextmanager
    def numbered(self) -> Iterator[int]:
        """The number of one more batcher, which is taken unless the block raises."""
        self._check_process("serve")
        with self._adding:
            yield self._batchers + 1
            self._batchers += 1

    def devices_now(self) -> dict[str, dict[str, Any]]:
        """The figures of each device, whether it takes no work, being ``retired``, released or lost, and whether it is ``released``."""
        active = self.engine.active  # first: it raises in a forked process, where a lock may be held for ever
        away = self.scale.away if self.scale is not None else ()
        return {
            name: {**one, "retired": name not in active, "released": name not in active and name in away}
            for name, one in self.figures.devices().items()
        }

    def explain(self, devices: Mapping[str, Mapping[str, Any]]) -> str:
        """The text of `Pool.explain`, with these figures."""
        counts = {name: (one["jobs"], one["runs"], one["busy_seconds"]) for name, one in devices.items()}
        served = [one.explain() for _, one in self.all_served()]
        outcomes = self.figures.report()["outcomes"]
        ends = ", ".join(f"{count} {name}" for name, count in outcomes.items() if count and name != "completed")
        short = f"Jobs that did not complete: {ends}.\n" if ends else ""
        versions = [text_of(name, of) for name, of in self.versions_now().items()]
        return "".join((self.engine.explain(counts), short, *versions, *served, self.scale.explain()))

    def report(self) -> dict[str, Any]:
        """What `Pool.report` says of all that is not the engine's."""
        placement = {"name": self._placement, "failures": 0, "last_failure": None}
        if self.placing is not None:
            placement = {name: getattr(self.placing, name) for name in placement}
        hangs = [] if self.watchdog is None else list(self.watchdog.hangs)
        return {"placement": placement, "hangs": hangs, "versions": self.versions_now(), **self.figures.report()}

    def close(self, cancel: bool) -> None:
        """Wait until every job has ended. In another process than that of the pool it does nothing."""
        if os.getpid() == self._process:
            for one in list(self.copies):  # nobody waits for them
                one.cancel()
            before, self.closing = self.closing, True  # from before the wait, which may be long
            try:
                self.engine.close(cancel)
            except InvalidArgument:  # in a job: it is as open as before
                self.closing = before
                raise
            for end in self.ends:
                end()
            hung = [] if self.watchdog is None else list(self.watchdog.hung)
            if self.gpus and not self.closed and all(self.seats[name].gpu is None for name in hung):
                # Giving memory back waits for what a GPU does, which may be for ever. The workspaces of cuBLAS stay: they belong to the whole process,
                # and graphs of a trainer may use them. A GPU that has failed gives nothing back. PyTorch then raises, and its jobs have said so.
                with contextlib.suppress(RuntimeError):
                    cuda.release_memory(False)
                self.engine.release()
            self.closed = True
            if self._observed is not None:
                self._observed.close()


_open: weakref.WeakSet[Jobs] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the jobs before the interpreter ends. After an error nobody waits for what has not started."""
    # In an interactive session it is that of some earlier line.
    failed = getattr(sys, "last_type", None) is not None and not hasattr(sys, "ps1")
    for jobs in list(_open):
        with contextlib.suppress(Exception):
            jobs.close(cancel=failed)
