"""What answers requests by one version of a model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from paceline import DeviceLost, InvalidArgument
from paceline._pool_figures import NEVER_RAN, VersionFigures
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.examples import Example, Examples
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import DONE, FAILED, LOST, Work, clear_frames, code_of, of_users
from paceline.torch._pool.jobs import Evicted, Jobs, Priority
from paceline.torch._pool.needs import Needs, Place
from paceline.torch._pool.padding import Padding
from paceline.torch._pool.seats import Fetched, Seat, copies
from paceline.torch._pool.served import Answer, Served

Key = str | int | bytes | None  # requests with one key have one version


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How requests are answered: see `Pool.serve`."""

    max_batch: int
    max_delay: float = 0.0
    idempotent: bool = True
    padding: Padding | None = None
    memory: float = 0.0
    needs: Needs = ()
    autocast: torch.dtype | None = None


class Request(Work):
    """One item of a batch. The run of the batch sets its value."""

    leads = False
    cost = 1.0
    given_up = False  # whether another run cannot end otherwise
    fetched: tuple[Fetched, int] | None = None  # its answer, while it is on its way from a GPU

    def __init__(self, answerer: Answerer, kind: str, leaves: list[torch.Tensor], spec: Any) -> None:
        future: PoolFuture[Any] = PoolFuture()
        future.version = answerer.version
        super().__init__(future, answerer, answerer.jobs.figures)
        self.answerer: Answerer | None = answerer
        self.kind, self.leaves, self.spec, self.of_version = kind, leaves, spec, answerer.figures

    def run_batch(
        self, devices: list[str], evicted: Evicted, requests: list[Request]
    ) -> tuple[int, float, float | None]:
        """Called by the engine on a worker, for the first request of a batch. The engine knows no answerer, which would be a cycle.

        Returns what became of it, the seconds that say nothing of the device's speed, and those of loading the model.
        """
        assert self.answerer is not None
        self.answerer.jobs.evict(evicted)
        # A run that begins with a copy of the pool's own counts as its own, so those of users come first.
        return self.answerer._run(devices[0], sorted(requests, key=lambda one: one.own))

    def hang(self, device: str) -> None:
        """See `Work`. The thread that hangs keeps what it uses."""
        if answerer := self.answerer:
            answerer.served.drop(device)

    def end(self, device: str, seconds: float, outcome: str, message: str) -> None:
        """See `Work`."""
        if self.answerer is not None and self.future is not None:
            self.answerer.open.discard(self.future)
        self.answerer, self.leaves, self.spec = None, [], None
        if self.fetched is not None and outcome == "completed":
            try:
                self.value = self.fetched[0].of(self.fetched[1])
            except BaseException as error:
                outcome, self.error = "failed", error
        self.fetched = None
        if outcome in NEVER_RAN and not self.given_up:
            self.error = None  # of a batch, half of which would have run again
        super().end(device, seconds, outcome, message)


class Present:
    """Where requests go now. Whoever changes it does so at once for all who ask."""

    __slots__ = ("way",)

    def __init__(self, way: Any) -> None:
        self.way = way  # an `Answerer`, a `Router` or a `Gap`

    def put(self, *request: Any) -> PoolFuture[Any]:
        """Submit a request."""
        answer: PoolFuture[Any] = self.way.put(*request)
        return answer


class Gone(NamedTuple):
    """What the engine may still know of a version that is gone. It does not hold the version, which is freed after its last batch."""

    open: set[PoolFuture[Any]]
    kinds: dict[Any, str]


class Answerer:
    """Answers requests by one version of a model.

    Requests hold it until they have ended. So once nobody else knows it, what it keeps on the devices is freed after its last batch.

    Attributes
    ----------
    open
        The futures of what has not ended: its requests, and the jobs that warm it.
    copied
        Whether it may get copies of requests, in the shadow.
    figures
        What became of its requests. Copies of requests, in the shadow, count as its own. What warms it counts nowhere.
    present
        Where requests that come now go instead, since `leave`.
    """

    copied = True
    present: Present | None = None

    def __init__(self, jobs: Jobs, served: Served, name: str, options: BatchOptions, version: int) -> None:
        self.jobs, self.served, self.name, self.options, self.version = jobs, served, name, options, version
        self.examples, self.figures = Examples(), VersionFigures()
        self.open: set[PoolFuture[Any]] = set()
        self._padding, self._max_batch, self._idempotent = options.padding, options.max_batch, options.idempotent
        self._kinds: dict[Any, str] = {}  # by the structure, shapes and types of a request
        self._values: dict[str, list[Any]] = {}  # by kind: what its tensors are padded with
        self._only: list[str] | None = None
        self._placed: tuple[int, Place] | None = None  # for so many devices
        self._lock = threading.RLock()  # a finalizer may submit while it is held

    def only_on(self, devices: list[str] | None) -> Answerer:
        """The same for some of the devices. It shares everything but `present`."""
        other = copy.copy(self)
        other._only, other._placed, other.present = devices, None, None
        return other

    def leave(self, present: Present) -> None:
        """Let later requests go the present way, and wait until those of this version have ended."""
        self.left(present)
        self.wait()

    def left(self, present: Present) -> Gone:
        """Let later requests go the present way for good."""
        with self._lock:
            self.present = present
        return Gone(self.open, self._kinds)

    def wait(self) -> None:
        """Wait until all that is open now has ended."""
        with self._lock:
            now = set(self.open)
        wait_for(now)

    def free(self, seat: Seat) -> None:
        """Free what it keeps on a device where nobody uses it any more, and let the engine know."""
        self.served.free(seat)
        if self.served.resident:
            self.jobs.engine.unload(seat.name, self.name)

    def put(
        self,
        key: Key,
        item: Any,
        leaves: list[torch.Tensor],
        spec: Any,
        deadline: float | None,
        priority: Priority,
        wait: bool,
        tenant: str = "",
        own: bool = False,
    ) -> PoolFuture[Any]:
        """Submit a request. `own`: see `Work`."""
        request = Request(self, self.kind_of(leaves, spec), leaves, spec)
        request.own = own
        if self._padding is not None:
            request.cost = self._padding.cost_of(item, leaves)
        future = request.future
        assert future is not None
        placed = self._placed
        if placed is None or placed[0] != len(self.jobs.devices):  # devices are added, and none is taken away
            placed = self._placed = len(self.jobs.devices), self.place()
        try:
            with self._lock:
                if (present := self.present) is None:
                    self.open.add(future)
            if present is not None:
                return present.put(key, item, leaves, spec, deadline, priority, wait, tenant, own)
            self.jobs.put(
                request,
                kind=request.kind,
                deadline=deadline,
                priority=priority,
                wait=wait,
                place=placed[1],
                cost=request.cost,
                tenant=tenant,
                batched=True,
            )
        except BaseException:
            future._withdraw()  # for `wait`
            if future._job is None:  # otherwise it stays until its batch has ended
                self.open.discard(future)
            raise
        return future

    def place(self) -> Place:
        """Where requests may run, of the devices that there are now."""
        labels, names = self.jobs.place_of(self.options.needs)
        if self._only is not None:
            names = [one for one in self._only if not names or one in names]
            assert names, "no names would mean all devices"
        return Place(labels, names)

    def rehearse(self, seat: Seat, example: Example, size: int) -> None:
        """Answer a batch of one request many times, on the worker of the device, and drop the answers."""
        answer, *_ = self.served.of(seat)
        kind = self.kind_of(example.leaves, example.spec)
        for _ in range(self.served.rehearsals):
            answers, _ = self._answer(seat, answer, [example._replace(kind=kind)] * size)
            self._checked(answers, size)

    def kind_of(self, leaves: list[torch.Tensor], spec: Any) -> str:
        """The engine's name for requests that may share a batch."""
        padding = self._padding
        shape_of = torch.Tensor.size if padding is None else padding.shape_of
        key = spec, *[(shape_of(leaf), leaf.dtype, leaf.layout) for leaf in leaves]
        kind = self._kinds.get(key)
        if kind is None:
            with self._lock:
                kind = self._kinds.get(key)
                if kind is None:
                    kind = f"{self.name}, shape {len(self._kinds)}"
                    if padding is not None:
                        self._values[kind] = padding.values(leaves, spec)
                    self.jobs.engine.add_batches(
                        kind,
                        max_batch=self._max_batch,
                        max_delay=self.options.max_delay,
                        padded=padding is not None,
                        memory=self.options.memory,
                        model=self.name if self.served.resident else "",
                        resident=self.served.resident,
                    )
                    self._kinds[key] = kind
        return kind

    def _run(self, device: str, requests: list[Request]) -> tuple[int, float, float | None]:
        """Answer them. Called on a worker, for requests of one kind."""
        if any(one.given_up for one in requests):  # the engine runs a batch that has failed again in halves
            for one in requests:
                one.error = one.error or DeviceLost(
                    f"{self.name}: a device was lost at this batch, which may not run again. Say idempotent=True if it may."
                )
            return FAILED, 0.0, None
        for one in requests:
            one.begin([device] if one is requests[0] else ())
            one.error, one.fetched, one.leads = None, None, False
        begun, seat, answered = time.monotonic(), self.jobs.seats[device], False
        try:
            with contextlib.ExitStack() as stack:
                try:
                    seat.prepare()
                    stack.enter_context(seat.entered())
                    answer, loaded, waited = self.served.of(seat)
                except BaseException as error:
                    if device in self.served.prepared and is_out_of_memory(error):
                        raise  # it has answered, so the batch fails, and not the device
                    return self._without(device, requests, error), 0.0, None
                answers, excluded = self._answer(seat, answer, requests)
                answered = True
                excluded += waited + self._hand_out(seat, answers, answer, requests)
        except BaseException as error:
            by_chance = answered and isinstance(error, InvalidArgument)  # it may look right in halves
            again = self._idempotent and not by_chance
            answers = None
            if again and len(requests) > 1:
                clear_frames(error)
            if is_out_of_memory(error):
                seat.release_memory()
            return self._failed(device, begun, requests, error, again=again), 0.0, None
        requests[0].leads = True
        self.examples.keep(requests)
        if seat.gpu is not None and not self._idempotent:
            # The GPU may be lost before it has done the batch, which must not run elsewhere then.
            for one in requests:
                one.given_up = True
        requests[0].note_run([device], of_users(requests), "completed", ends_later=seat.gpu is not None)
        return DONE, excluded, loaded

    def _answer(self, seat: Seat, answer: Answer, requests: Sequence[Request | Example]) -> tuple[Any, float]:
        """Their answers, and the seconds that say nothing of the device's speed."""
        kind, spec, dtype = requests[0].kind, requests[0].spec, self.options.autocast
        rows = [one.leaves for one in requests]
        with torch.inference_mode():
            if self._padding is None:
                batch = [seat.stacked(leaves) for leaves in zip(*rows, strict=True)]
            else:
                batch = self._padding.stack(seat, rows, self._values[kind])
            given = batch[0] if spec is None else pytree.tree_unflatten(batch, spec)
            casts = contextlib.nullcontext() if dtype is None else torch.autocast(seat.device.type, dtype)
            with self.served.running(seat.name, kind, tuple(one.shape for one in batch)) as excluded, casts:
                return answer(given), excluded

    def _checked(self, answers: Any, count: int) -> tuple[list[torch.Tensor], Any]:
        leaves, spec = pytree.tree_flatten(answers)
        for leaf in leaves:
            if not (isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count):
                what = (
                    f"a tensor of shape {tuple(leaf.shape)}"
                    if isinstance(leaf, torch.Tensor)
                    else f"a {type(leaf).__name__}"
                )
                raise InvalidArgument(
                    f"{self.name}: the model returned {what} for {count} requests. It must return tensors, or a nest of them, whose "
                    "dimension 0 is the request."
                )
        return [leaf.detach() for leaf in leaves], spec

    def _hand_out(self, seat: Seat, answers: Any, answer: Answer, requests: Sequence[Request]) -> float:
        """Give each its answer. Returns the seconds of running some of them alone."""
        alone = 0.0
        leaves, spec = self._checked(answers, len(requests))
        if self._padding is None and seat.gpu is None:
            for request, *values in zip(requests, *map(copies, leaves), strict=True):
                request.value = pytree.tree_unflatten(values, spec)
            return alone
        if self._padding is None:
            found = [list(seat.fetched(leaf).unbind()) for leaf in leaves]
        else:

            def run(some: Sequence[int]) -> tuple[list[torch.Tensor], Any]:
                nonlocal alone
                seat.wait()
                begun = time.monotonic()
                some_answers, _ = self._answer(seat, answer, [requests[index] for index in some])
                seat.wait()
                alone += time.monotonic() - begun
                return self._checked(some_answers, len(some))

            given = [one.leaves for one in requests]
            found = self._padding.cut(requests[0].kind, leaves, spec, given, run, seat.fetched)
        # Copies: a view would keep the answers of the whole batch. They are no inference tensors, so autograd takes them.
        fetched = Fetched(found, spec, seat.mark())
        for index, request in enumerate(requests):
            if seat.gpu is None:
                request.value = fetched.of(index)
            else:
                request.fetched = fetched, index
        return alone

    def _failed(
        self, device: str, begun: float, requests: Sequence[Request], error: BaseException, *, again: bool
    ) -> int:
        requests[0].note_run([device], of_users(requests), "failed")
        ran = device, time.monotonic() - begun
        for request in requests:
            request.error, request.given_up, request.ran = error, not again, None if again else ran
        return code_of(error, len(requests), [device]) if again else FAILED

    def _without(self, device: str, requests: Sequence[Request], error: BaseException) -> int:
        """The device could not be prepared: it counts as lost, and others answer, unless it is the last one."""
        requests[0].note_run([device], of_users(requests), "failed")
        for request in requests:
            request.error, request.given_up = error, True
        if requests[0].future is None:  # the run was given up, and its end says nothing of the device
            return FAILED
        if not self.jobs.scale.retire_useless(device):
            return FAILED
        try:
            warnings.warn(
                f"{self.name}: {device} is lost to the pool, since what prepares it for requests has raised {error!r}. The other devices answer. restore({device!r}) takes it back.",
                RuntimeWarning,
                stacklevel=1,
            )
        except RuntimeWarning:  # warnings are errors
            return FAILED
        for request in requests:
            request.error, request.given_up = None, False
        return LOST
