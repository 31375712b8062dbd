"""One call of a trainer, run on its devices: everything is committed, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import DeviceGroup, Error, OutOfMemory
from paceline._core.engine import Stepper
from paceline.torch._batch import Batch, concatenate
from paceline.torch._batch_norm import uses_batch_statistics
from paceline.torch._buckets import Buckets
from paceline.torch._buffers import KeptBuffers
from paceline.torch._caller_state import CallerState
from paceline.torch._failures import raise_failure
from paceline.torch._gradients import UserGradients
from paceline.torch._items import Items
from paceline.torch._launch import LaunchClock
from paceline.torch._memory import MemoryCaps, is_out_of_memory
from paceline.torch._micro_batch_size import MicroBatchSizes, SizeSearch
from paceline.torch._places import Places, RandomStates
from paceline.torch._replicas import Replicas
from paceline.torch._run import Frame, PredictRun, Run, Seen, TrainRun

_T = TypeVar("_T")
Gradients = list[torch.Tensor | None]


class Workload:
    """One kind of work: its times, the sizes that have run and the memory that it needs say nothing of another kind."""

    def __init__(
        self, group: DeviceGroup, places: Places, limits: list[int | None] | None = None, **options: Any
    ) -> None:
        self.stepper = Stepper(group, **options)
        self.seen = Seen(len(group))
        self.caps: MemoryCaps = MemoryCaps(places, limits)
        self.launches = LaunchClock(places.on_gpu)
        self.sizes: MicroBatchSizes | None = None  # where the size of micro-batches is searched for


class Execution:
    """Runs the work of one call at a time. The replicas' gradients are its own; the user's are written in the end."""

    def __init__(self, group: DeviceGroup, module: nn.Module, places: Places, replicas: Replicas) -> None:
        self.running: Run | None = None
        self.items = [0] * len(group)  # that each device ran in the last step that was committed
        self.module = module
        self._names = places.names
        self.places = places
        self.replicas = replicas
        self.committed: Any = None  # the last outcome that was
        self._enqueued: Any = None  # the last outcome, committed or not
        # What host devices have delivered to GPUs, until these have read it: PyTorch would hand it on.
        self._delivered: list[tuple[Any, Any]] = []

    def frame(
        self,
        work: Workload,
        whole: Batch,
        fn: Callable[..., Any],
        costs: list[float] | None = None,
        order: list[int] | None = None,
    ) -> Frame:
        """What a run starts from, with the replicas as the module is now, and with `costs` the items as planned by them, or in an `order`."""
        self.replicas.refresh()
        items = None
        if order is not None:
            items = Items(order, whole, self.places.pin, costs)
        elif costs is not None:
            plan = work.stepper.plan_items(costs)
            items = Items(list(plan.order), whole, self.places.pin, costs, plan)
        work.seen.follow(self.replicas, self.module, fn, self.places.types)
        state = CallerState(self.places.types, len(self._names))
        batch = whole if items is None else items.batch
        search = self._search(work, whole) if items is None else None
        return Frame(batch, self.replicas.list, work.seen, state, self.places, work.caps, items, search)

    def _search(self, work: Workload, batch: Batch) -> SizeSearch | None:
        """None where other sizes cost compilation, or would normalise over other items."""
        if work.sizes is None or work.seen.tunes or any(map(uses_batch_statistics, self.replicas.norms)):
            return None
        return work.sizes.of((batch.size, batch.item_shapes, work.seen.mode, self.replicas.generation))

    def _buffer_marks(self) -> list[list[tuple[int, int]]]:
        return [replica.buffer_marks() for replica in self.replicas.list]

    def repeated(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns. Where memory ran out it is made again from where it began, in smaller pieces."""
        random = RandomStates(self.places)
        released = False
        while True:
            try:
                return attempt()
            except _TryAgainError:
                pass
            except OutOfMemory:  # paceline's own: PyTorch may sit on memory that it does not use
                if released:
                    raise
                released = True
            # Not in the handler, where the traceback still holds what the first attempt had allocated.
            self.places.release_memory()
            random.restore()

    def train(self, work: Workload, run: TrainRun, *, keep: bool = True) -> tuple[torch.Tensor, Gradients, Any]:
        """The objective, the gradients of the batch, and the outcome.

        With `keep` the user's ``.grad``, the buffers and the balancer have them too; without, all three are as before.
        """
        # With one device the user's module itself runs, so its buffers are kept for the case that the step fails.
        kept = None if self.replicas.shared else KeptBuffers(self.module)
        user = UserGradients(self.replicas)
        marks = [] if run.search is None else self._buffer_marks()
        try:
            outcome = self._execute(work.stepper, run)
            user.check()
            run.check()
            if run.search is not None and self._buffer_marks() != marks:
                run.search.stop()
            with torch.no_grad():
                loss = run.loss()
                totals = user.totals(run.left_out) if run.buckets is None else run.buckets.totals()
                if keep:
                    self._commit(work, run, user, totals, outcome)
            if run.buckets is not None:
                self._keep_delivered(outcome, run.buckets)
            if not keep:
                _put_back(user, kept)
            return loss, totals, outcome
        except BaseException:
            if user.written:  # interrupted in the middle of writing: a step is done or not done
                with torch.no_grad():
                    self._commit(work, run, user, totals, outcome)
                raise
            _put_back(user, kept)
            raise
        finally:
            self.drop_gradients()

    def predict(self, work: Workload, run: PredictRun) -> Any:
        """What `fn` returned, for the whole batch."""
        outcome = self._execute(work.stepper, run)
        work.stepper.commit(outcome)
        with torch.no_grad():
            if self.module.training:  # as in plain PyTorch, running statistics follow
                self._commit_buffers(outcome)
            output = concatenate(run.outputs, self.places.to_home, self.places.owned)
            return output if run.items is None else run.items.restored(output)

    def drop_gradients(self) -> None:
        """Those of the replicas; the user's own stay."""
        if self.replicas.shared:
            for replica in self.replicas.list:
                replica.clear_gradients()

    def release(self) -> None:
        """Let go of what was kept for the devices to read; they have ended."""
        self.committed = self._enqueued = None
        self._delivered.clear()

    def _execute(self, stepper: Stepper, run: Run) -> Any:
        self.running = run
        run.queues_empty = self._queues_are_empty()
        calls = (run.body, run.finish, self.places.queues, run.sums)
        if run.items is None or run.items.plan is None:
            outcome = stepper.run(run.batch.size, *calls, run.claims)
        else:
            outcome = stepper.run_items(run.items.plan, *calls)
        if run.failures:
            device, begin, end, error = run.failures[0]
            run.failures.clear()
            try:
                if is_out_of_memory(error) and run.caps.shrink(device, begin, end, run.batch, error):
                    raise _TryAgainError from error
                told = run.batch.told(begin, end) if end > begin else ""
                raise_failure(error, self._names[device], told, run.kept)
            finally:
                del error  # which refers to this frame: a dropped trainer shall end without the garbage collector
        if outcome.failed_at is not None:
            raise Error(
                f"step: {self._names[outcome.failed_at[0]]} failed outside of user code. Nothing was committed."
            )
        self._enqueued = outcome
        return outcome

    def _queues_are_empty(self) -> bool:
        """Whether the devices have done what they were given last. After a failure they have: it was waited for."""
        with contextlib.suppress(Error):  # a device that was lost says so in the step
            if self._enqueued is not None and not self._enqueued.settled:
                return False
        self._enqueued = None
        return True

    def _keep_delivered(self, outcome: Any, buckets: Buckets) -> None:
        """Until the GPUs have read it. PyTorch keeps what lies on a GPU by itself."""
        pinned = buckets.take_pinned()
        if pinned:
            self._delivered.append((outcome, pinned))
        with contextlib.suppress(Error):  # a device that was lost says so at the next step
            self._delivered = [entry for entry in self._delivered if not entry[0].settled]

    def _commit(self, work: Workload, run: TrainRun, user: UserGradients, totals: Gradients, outcome: Any) -> None:
        user.commit(totals)
        self._commit_buffers(outcome)
        if self.committed is not outcome:
            work.stepper.commit(outcome, run.pieces)
            work.launches.add(run.launches)
            if run.search is not None:
                run.search.add(run.timed)
            self.committed = outcome
            self.items = outcome.items

    def _commit_buffers(self, outcome: Any) -> None:
        if not self.replicas.shared:
            return
        ran = outcome.items
        buffers = self.replicas.list[ran.index(max(ran))].buffers
        if buffers is not None:
            buffers.push()


class _TryAgainError(Exception):
    """Memory ran out, and smaller pieces may fit: nothing was committed, and the step can be run once more."""


def _put_back(user: UserGradients, kept: KeptBuffers | None) -> None:
    user.restore()
    if kept is not None:
        with torch.no_grad():
            kept.restore()
