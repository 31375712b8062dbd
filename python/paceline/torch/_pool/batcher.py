"""Requests that are answered in batches."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline import DeviceLost, InvalidArgument
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.job import DONE, FAILED, LOST, NEVER_RAN, Work, clear_frames, code_of
from paceline.torch._pool.jobs import Evicted, Jobs, Priority
from paceline.torch._pool.needs import Needs, Place
from paceline.torch._pool.padding import Padding
from paceline.torch._pool.progress import watched
from paceline.torch._pool.seats import Fetched, Seat
from paceline.torch._pool.served import Answer, Served
from paceline.torch._replicas.reach import Handle

# How many batches `map` keeps ahead for each device: one runs, one is ready, and the next one fills.
_AHEAD = 3


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


class _Request(Work):
    """One item of a batch. The run of the batch sets its value."""

    def __init__(self, batcher: Batcher, kind: str, leaves: list[torch.Tensor], spec: Any) -> None:
        future: PoolFuture[Any] = PoolFuture()
        super().__init__(future, batcher, batcher._jobs.figures)
        self.batcher: Batcher | None = batcher
        self.kind, self.leaves, self.spec = kind, leaves, spec
        self.leads = False
        self.given_up = False  # whether another run cannot end otherwise
        self.fetched: tuple[Fetched, int] | None = None  # its answer, while it is on its way from a GPU

    def run_batch(
        self, devices: list[str], evicted: Evicted, requests: list[_Request]
    ) -> tuple[int, float, float | None]:
        """Called by the engine on a worker, for the first request of a batch. The engine knows no batcher, which would be a cycle.

        Returns what became of it, the seconds that say nothing of the device's speed, and those of loading the model.
        """
        assert self.batcher is not None
        self.batcher._jobs.evict(evicted)
        return self.batcher._run(devices[0], requests)

    def hang(self, device: str) -> None:
        """See `Work`. The thread that hangs keeps what it uses."""
        if batcher := self.batcher:
            batcher._served.drop(device)

    def end(self, device: str, seconds: float, outcome: str, message: str) -> None:
        """See `Work`."""
        self.batcher, self.leaves, self.spec = None, [], None
        if self.fetched is not None and outcome == "completed":
            try:
                self.value = self.fetched[0].of(self.fetched[1])
            except BaseException as error:
                outcome, self.error = "failed", error
        self.fetched = None
        if outcome in NEVER_RAN and not self.given_up:
            self.error = None  # of a batch, half of which would have run again
        super().end(device, seconds, outcome, message)


class Batcher(Handle):
    """Answers requests in batches of what waits. `Pool.serve` makes it.

    Requests are items: tensors in host memory, or nests of tensors, without a dimension for the batch. Do not change them until they are answered.
    Only requests of equal structure, shapes and types share a batch; with ``pad=`` lengths may differ. Each such kind is measured and queued on its own, and
    kept until the pool ends: give requests of many lengths ``pad=``.

    Threads: any. Copies of a module that holds a batcher hold the same one.
    """

    def __init__(self, jobs: Jobs, served: Served, name: str, options: BatchOptions) -> None:
        self._jobs, self._name = jobs, name
        self._served, self._options, self._padding = served, options, options.padding
        self._max_batch, self._idempotent = options.max_batch, options.idempotent
        self._kinds: dict[Any, str] = {}  # by the structure, shapes and types of a request
        self._values: dict[str, list[Any]] = {}  # by kind: what its tensors are padded with
        self._placed: tuple[int, Place] | None = None  # for so many devices
        self._lock = threading.RLock()  # a finalizer may submit while it is held

    def __repr__(self) -> str:
        return f"<paceline.torch.Batcher {self._name}, batches of up to {self._max_batch}>"

    def __call__(
        self, item: Any, *, deadline: float | None = None, priority: Priority = "interactive", wait: bool = True
    ) -> PoolFuture[Any]:
        """Submit one item. Its answer is the item's part of what the model returns for a batch, in memory of its own.

        Parameters
        ----------
        item
            A tensor, or a nest of tensors in lists, tuples and dictionaries.
        deadline, priority, wait
            As for `Pool.submit`.

        Raises
        ------
        InvalidArgument
            For an item that is no nest of tensors in host memory.
        Unavailable
            If the pool is closed.
        """
        if type(item) is torch.Tensor:
            leaves, spec = [item], None
        else:
            leaves, spec = pytree.tree_flatten(item)
        bad = [one for one in leaves if not isinstance(one, torch.Tensor) or one.device.type != "cpu"]
        if bad or not leaves:
            one = bad[0] if bad else None
            what = f"a tensor on {one.device}" if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise InvalidArgument(
                f"{self._name}: a request has {what if bad else 'no tensor'}. It must be a tensor in host memory, or a nest of such tensors: devices copy "
                "their batches from there."
            )
        request = _Request(self, self._kind_of(leaves, spec), leaves, spec)
        future = request.future
        assert future is not None
        self._jobs.put(
            request,
            kind=request.kind,
            deadline=deadline,
            priority=priority,
            wait=wait,
            place=self._place(),
            cost=1.0 if self._padding is None else self._padding.cost_of(item, leaves),
            batched=True,
        )
        return future

    async def ask(self, item: Any, *, deadline: float | None = None, priority: Priority = "interactive") -> Any:
        """The answer, for asyncio. Cancelling the task cancels a request that waits. A full queue raises `Rejected`.

        Raises
        ------
        InvalidArgument
            In a job, whose device it would keep.
        """
        future = self(item, deadline=deadline, priority=priority, wait=False)
        try:
            future._check_wait()  # the loop of a job would wait for the job's own device
        except BaseException:
            future.cancel()
            raise
        return await asyncio.wrap_future(future)

    def map(
        self,
        items: Iterable[Any],
        *,
        priority: Priority = "batch",
        progress: bool = False,
        total: int | None = None,
    ) -> Iterator[Any]:
        """The answers to all items, in their order, on all devices of the pool.

        Items are read when they are needed: some batches for each device are ahead of the answer that is asked for. The first request that
        fails raises its error in its place. What then waits is cancelled, as when the loop is left.

        Parameters
        ----------
        items
            Any iterable. Its elements are requests.
        priority
            As for `Pool.submit`.
        progress
            Whether to write to ``sys.stderr`` how many are done, and what each device does: redrawn in place on a terminal if rich is installed, else a
            line every ten seconds.
        total
            The number of items, for the progress. Default: ``len(items)``, if it has a length.
        """
        answers = self._answers(items, priority)
        if not progress:
            return answers
        if total is None:
            with contextlib.suppress(TypeError):  # a generator
                total = len(items)  # type: ignore[arg-type]
        return watched(answers, total, self._jobs.devices_now)

    def _answers(self, items: Iterable[Any], priority: Priority) -> Iterator[Any]:
        most = _AHEAD * self._max_batch * len(self._jobs.devices)
        waiting: deque[PoolFuture[Any]] = deque()
        try:
            for item in items:
                waiting.append(self(item, priority=priority))
                if len(waiting) >= most:
                    yield _next_of(waiting)
            while waiting:
                yield _next_of(waiting)
        finally:
            for future in waiting:
                future.cancel()

    def _place(self) -> Place:
        """Where requests may run. Devices are added, and none is taken away."""
        placed, devices = self._placed, len(self._jobs.devices)
        if placed is None or placed[0] != devices:
            placed = self._placed = devices, self._jobs.place_of(self._options.needs)
        return placed[1]

    def _kind_of(self, leaves: list[torch.Tensor], spec: Any) -> str:
        """The engine's name for requests that may share a batch."""
        padding = self._padding
        shapes = (leaf.shape if padding is None else padding.shape_of(leaf) for leaf in leaves)
        key = spec, *((shape, leaf.dtype, leaf.layout) for shape, leaf in zip(shapes, leaves, strict=True))
        kind = self._kinds.get(key)
        if kind is None:
            with self._lock:
                kind = self._kinds.get(key)
                if kind is None:
                    kind = f"{self._name}, shape {len(self._kinds)}"
                    if padding is not None:
                        self._values[kind] = padding.values(leaves, spec)
                    self._jobs.engine.add_batches(
                        kind,
                        max_batch=self._max_batch,
                        max_delay=self._options.max_delay,
                        padded=padding is not None,
                        memory=self._options.memory,
                        model=self._name if self._served.resident else "",
                        resident=self._served.resident,
                    )
                    self._kinds[key] = kind
        return kind

    def _run(self, device: str, requests: list[_Request]) -> tuple[int, float, float | None]:
        """Answer them. Called on a worker, for requests of one kind."""
        if any(one.given_up for one in requests):  # the engine runs a batch that has failed again in halves
            for one in requests:
                one.error = one.error or DeviceLost(
                    f"{self._name}: a device was lost at this batch, which may not run again. Say idempotent=True if it may."
                )
            return FAILED, 0.0, None
        for one in requests:
            one.begin()
            one.error, one.fetched, one.leads = None, None, False
        begun, seat, answered = time.monotonic(), self._jobs.seats[device], False
        try:
            with contextlib.ExitStack() as stack:
                try:
                    seat.prepare()
                    stack.enter_context(seat.entered())
                    answer, loaded = self._served.of(seat)
                except BaseException as error:
                    if device in self._served.prepared and is_out_of_memory(error):
                        raise  # it has answered, so the batch fails, and not the device
                    return self._without(device, requests, error), 0.0, None
                answers, excluded = self._answer(seat, answer, requests)
                answered = True
                excluded += self._hand_out(seat, answers, answer, requests)
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
        if seat.gpu is not None and not self._idempotent:
            # The GPU may be lost before it has done the batch, which must not run elsewhere then.
            for one in requests:
                one.given_up = True
        requests[0].note_run([device], len(requests), "completed", ends_later=seat.gpu is not None)
        return DONE, excluded, loaded

    def _answer(self, seat: Seat, answer: Answer, requests: Sequence[_Request]) -> tuple[Any, float]:
        """Their answers, and the seconds that say nothing of the device's speed."""
        kind, spec, dtype = requests[0].kind, requests[0].spec, self._options.autocast
        rows = [one.leaves for one in requests]
        with torch.inference_mode():
            if self._padding is None:
                batch = [seat.stacked(leaves) for leaves in zip(*rows, strict=True)]
            else:
                batch = self._padding.stack(seat, rows, self._values[kind])
            given = batch[0] if spec is None else pytree.tree_unflatten(batch, spec)
            casts = contextlib.nullcontext() if dtype is None else torch.autocast(seat.device.type, dtype)
            with self._served.running(seat.name, kind, tuple(one.shape for one in batch)) as excluded, casts:
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
                    f"{self._name}: the model returned {what} for {count} requests. It must return tensors, or a nest of them, whose "
                    "dimension 0 is the request."
                )
        return [leaf.detach() for leaf in leaves], spec

    def _hand_out(self, seat: Seat, answers: Any, answer: Answer, requests: Sequence[_Request]) -> float:
        """Give each its answer. Returns the seconds of running some of them alone."""
        alone = 0.0
        leaves, spec = self._checked(answers, len(requests))
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
        self, device: str, begun: float, requests: Sequence[_Request], error: BaseException, *, again: bool
    ) -> int:
        requests[0].note_run([device], len(requests), "failed")
        ran = device, time.monotonic() - begun
        for request in requests:
            request.error, request.given_up, request.ran = error, not again, None if again else ran
        return code_of(error, len(requests)) if again else FAILED

    def _without(self, device: str, requests: Sequence[_Request], error: BaseException) -> int:
        """The device could not be prepared: it is retired, and others answer, unless it is the last one."""
        for request in requests:
            request.error, request.given_up = error, True
        if requests[0].future is None:  # the run was given up, and its end says nothing of the device
            return FAILED
        if not self._jobs.engine.retire(device, unless_last=True):
            return FAILED
        try:
            warnings.warn(
                f"{self._name}: {device} is retired from the pool, since what prepares it for requests has raised {error!r}. The other devices answer.",
                RuntimeWarning,
                stacklevel=1,
            )
        except RuntimeWarning:  # warnings are errors
            return FAILED
        for request in requests:
            request.error, request.given_up = None, False
        return LOST


def _next_of(waiting: deque[PoolFuture[Any]]) -> Any:
    answer = waiting[0].result()  # an interrupt leaves it to be cancelled with the others
    waiting.popleft()
    return answer
