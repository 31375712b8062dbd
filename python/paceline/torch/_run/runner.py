"""Runs one call of a trainer on its devices, and runs it again where that may help. It commits nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from torch import nn

from paceline import Error, InvalidArgument, OutOfMemory
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.edits import Edits
from paceline.torch._batch.items import Items
from paceline.torch._devices import forward_ad
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.compiling import compiled_for_each, has_compiled, seed_graph_trees
from paceline.torch._devices.failures import Failure, raise_failure, warn_caller
from paceline.torch._devices.meeting import Meeting, MeetingPoint
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._devices.run_draws import UnseededDrawsWarning
from paceline.torch._devices.whole_gpu_kernels import needing_a_whole_gpu, warn_of_whole_gpu_kernels
from paceline.torch._replicas.batch_norm import CURE, fails_over_one_item, normalised_apart, using_batch_statistics
from paceline.torch._replicas.buffers import KeptBuffers
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._replicas.synchronised import synchronised
from paceline.torch._run.again import TryAgainError
from paceline.torch._run.around import profiled
from paceline.torch._run.flat_gradients import FlatGradients
from paceline.torch._run.graphs import Graphs
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.run import Frame, Run
from paceline.torch._run.watchdog import Watchdog
from paceline.torch._run.workload import Workload

_T = TypeVar("_T")


class Runner:
    """Runs one call at a time. What a run computes is left in the run and in the replicas."""

    cure_of_norms = CURE  # that normalise over a part of the batch

    def __init__(self, module: nn.Module, places: Places, replicas: Replicas, *, synchronises: bool) -> None:
        self.running: Run | None = None
        self.failed_on: str | None = None  # the device that the last failure is to blame on, if it is one device
        self.out_of_memory = 0  # how often a step had to run again in smaller pieces
        self.calls = 0  # how many have begun
        self.watchdog: Watchdog | None = None
        self.module, self._names = module, places.names
        self.places = places
        self.replicas = replicas
        self._warned = False  # about draws without a seed
        self._synchronises = synchronises  # batch normalisation, if there is any
        self._meeting_point = MeetingPoint()
        self._warned_of_kernels = False  # that they need a whole GPU
        self._warned_of_norms = False  # that they normalise over a part of the batch
        self._enqueued: Any = None  # the last outcome, committed or not
        self._edits = Edits()
        self.graphs: Graphs | None = None  # set if micro-batches are captured
        self._random: RandomStates | None = None  # the generators' states when the last attempt began
        self.flat = FlatGradients(replicas, places) if places.queues is not None and len(places) > 1 else None

    def frame(
        self,
        work: Workload,
        whole: Batch,
        fn: Callable[..., Any],
        costs: list[float] | None = None,
        order: list[int] | None = None,
        *,
        hooks: bool = False,
    ) -> Frame:
        """What a run starts from. Brings the replicas up to date with the module.

        With `costs` a plan orders the items by cost. A given `order` takes the place of a plan. `hooks`: whether parameters may have
        gradient hooks, since gradients of slices are not theirs to see.
        """
        self.places.separate_generators()
        self._random = random = RandomStates(self.places)
        self._edits.begin(whole)
        self.replicas.refresh(hooks=hooks)
        if self.places.any_part and not self._warned_of_kernels:
            tensors = [*self.replicas.parameters, *(tensor for _, tensor in whole.tensors())]
            if named := needing_a_whole_gpu(self.replicas.named_modules, tensors):
                self._warned_of_kernels = True
                warn_of_whole_gpu_kernels(named)
        least = self.follow_modules(work)
        items = None
        if order is not None:
            items = Items(order, whole, self.places.pin, costs)
        elif costs is not None:
            plan = work.step_loop.plan(costs)
            items = Items(list(plan.order), whole, self.places.pin, costs, plan)
        state = CallerState(self.places.types, len(self._names))
        work.seen.follow(self.replicas, self.module, fn, state, captures=self.graphs is not None)
        if work.seen.compiler_captures and self.places.share_gpu:
            raise InvalidArgument(
                "torch.compile with CUDA graphs of its own (mode='reduce-overhead' or 'max-autotune') together with several parts of one GPU. PyTorch "
                "keeps the memory of such graphs in a way that one thread for each GPU may use, and ends the process if there are two. Use "
                "mode='max-autotune-no-cudagraphs' or no mode, or whole GPUs."
            )
        synchronised = self.synchronised
        if synchronised:
            self._check_synchronised(work, costs)
        batch = whole if items is None else items.batch
        may_divide = least == 1 and work.writes_buffers is not True and not synchronised
        searches = items is None and may_divide and self._searches(work)
        divides = may_divide and (work.corrects or searches)
        return Frame(
            batch,
            self.replicas.list,
            work.seen,
            state,
            random,
            self.places,
            work.limits,
            items,
            searches,
            least,
            divides,
            synchronised,
            flat=self.flat,
        )

    def fill(self) -> None:
        """Give the module memory and values, if it has none yet."""

    @property
    def synchronised(self) -> bool:
        """Whether the module, as it is now, has batch normalisation that is over the batch of all devices."""
        return self._synchronises and bool(using_batch_statistics(self.replicas.norms))

    def _check_synchronised(self, work: Workload, costs: list[float] | None) -> None:
        if costs is not None:
            raise InvalidArgument(
                "batch_norm='synchronised' together with cost=, which deals items out to several micro-batches of a device. Statistics of the batch "
                "need one. Leave cost= out, or use batch_norm='apart'."
            )
        if work.seen.compiled and len(self._names) > 1:
            raise InvalidArgument(
                "batch_norm='synchronised' together with torch.compile: devices wait for each other inside of the forward, and a compiled forward "
                "runs alone while it compiles. Train without torch.compile, or use batch_norm='apart'."
            )

    @contextlib.contextmanager
    def _meeting(self, run: Run, shares: list[int]) -> Iterator[None]:
        """Let the devices meet in the normalisations of this run. A device that has all items has their statistics by itself."""
        parts = [len(part) for part in run.claims] if run.claims is not None else [int(share > 0) for share in shares]
        if max(parts) > 1:
            raise InvalidArgument(
                "batch_norm='synchronised': the ledger that is replayed has several micro-batches of a device in one step. Statistics of the batch "
                "need one. Replay it with batch_norm='apart', as it was written."
            )
        if sum(parts) < 2:
            yield
            return
        pairs = [
            (name, replica.counterparts.get(id(part), part))
            for replica in self.replicas.list
            for name, part in self.replicas.norms
        ]
        self._meeting_point.now = run.meeting = Meeting(
            self._names, (device for device, count in enumerate(parts) if count)
        )
        try:
            with synchronised(pairs, self._meeting_point):
                yield
        finally:
            self._meeting_point.now = None

    def follow_modules(self, work: Workload) -> int:
        """Before a plan: fit the micro-batches to the modules as they are now. Returns the least items of a micro-batch.

        Batch normalisation in training fails over one item. With it, or with a forward that writes buffers, the result depends on the number of
        micro-batches, so each device gets only one. So it does if batch normalisation is synchronised, which takes any number of items.
        """
        alone = not self.synchronised and bool(using_batch_statistics(self.replicas.norms))
        least = 2 if work.normalises or alone else 1
        corrections = None
        if work.corrects:
            writes = self.replicas.any_buffers if work.writes_buffers is None else work.writes_buffers
            corrections = False if writes or least > 1 or self.synchronised else None
        if work.given != (least, corrections):
            work.step_loop.set_least_items(least)
            if work.corrects:
                work.step_loop.set_corrections(corrections)
            work.given = (least, corrections)
        return least

    def explain(self) -> str:
        """Lines about gradients that are summed early, and about modules that normalise over a part of the batch; empty if there is nothing to say."""
        text = "" if self.flat is None else self.flat.explain()
        norms = using_batch_statistics(self.replicas.norms) if self._warned_of_norms else []
        return text + (f"{normalised_apart(norms, self.cure_of_norms)}\n" if norms else "")

    def _searches(self, work: Workload) -> bool:
        """Whether to search for sizes. Not if other sizes have to be compiled, or would draw other random numbers under fixed shares."""
        repeatable = work.fixed and self.places.any_host and work.seen.drawing.draws is not False
        return work.searches and not work.seen.tunes and not repeatable

    def _buffer_marks(self) -> list[list[tuple[int, int]]]:
        return [replica.buffer_marks() for replica in self.replicas.list]

    def repeated(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns. If memory runs out, or on `TryAgainError`, `attempt` runs again from the same state of the generators."""
        self._random = cast("RandomStates | None", None)  # `frame`, which an attempt calls, sets it
        self.calls += 1
        self.failed_on = None
        try:
            if self.watchdog is None:
                return self._repeated(attempt)
            with self.watchdog.watch(self.calls, lambda: self.running):
                return self._repeated(attempt)
        finally:
            self._edits.end()

    def _repeated(self, attempt: Callable[[], _T]) -> _T:
        released = False
        while True:
            try:
                return attempt()
            except TryAgainError as error:
                complete, out_of_memory = error.complete, error.out_of_memory
            except OutOfMemory:  # paceline's own: PyTorch may sit on memory that it does not use
                if released:
                    raise
                released, complete, out_of_memory = True, False, True
            if self._random is not None:
                self._edits.run_again(complete=complete)
            # Not in the handler, where the traceback still holds what the first attempt had allocated.
            if out_of_memory:
                gc.collect()  # as cycles of the user's objects may, too
                self.places.release_memory()
            if self._random is not None:
                self._random.restore()
            for replica in self.replicas.list:
                if replica.written is not None:
                    replica.written.undo()

    def _execute(self, work: Workload, run: Run) -> Any:
        self.running = run
        step_loop = work.step_loop
        common = self.replicas.common
        if common is not None:
            common.note()
        marks = self._buffer_marks() if run.divides and run.claims is None else None
        # Version counters are cheap, but batch_norm does not count its writes. So the first run of a mode compares values.
        first = marks is not None and work.mode != run.seen.mode
        values = KeptBuffers(self.replicas.modules) if first and not self.replicas.shared else None
        run.queues_empty = self._queues_are_empty()
        if self.watchdog is not None and self.watchdog.call is not None:
            run.around.insert(0, self.watchdog.call.micro_batch)
        run.around[:0] = profiled(run.places.names)
        try:
            with self._level(run), run.draws.run(), self._compiling(run):
                outcome = self._run_devices(work, run)
        finally:
            for replica in run.replicas:
                if replica.arrivals is not None:
                    replica.arrivals.end()
        if common is not None and (written := common.written):  # by forwards, each of which wrote to the same
            self.places.drain()
            common.restore()
            self.replicas.hold_apart(written)
            if not run.failures and not outcome.failed:
                raise TryAgainError(complete=True)
        if run.draws.must_run_again() and (run.places.hosts_share or (work.fixed and run.searches)):
            complete = not run.failures
            run.failures.clear()
            raise TryAgainError(complete=complete)
        cause = outcome.take_cause() if outcome.failed else None
        if cause is not None:  # raised where the body catches nothing
            run.failures.insert(0, (outcome.failed_device, 0, 0, cause))
        del cause
        if run.failures:
            device, begin, end, error = self._first_failure(run, outcome)
            others = [
                Failure(self._where_too(one[0]), run.batch.described(*one[1:3]) if one[2] > one[1] else "", one[3])
                for one in run.failures
                if one[:3] != (device, begin, end)
            ]
            failed = outcome.failed_device
            self.failed_on = None if failed is None else self._names[failed]
            run.failures.clear()
            try:
                if len(self._names) > 1 and forward_ad.wanted(error) is not None:
                    if not run.seen.forward_ad:
                        run.seen.forward_ad = True
                        raise TryAgainError from error
                    error = forward_ad.refused(error)
                if self._tries_again(error):
                    raise TryAgainError from error
                where = self._where_too(None) if device is None else self._where(device, outcome)
                if (
                    device is not None
                    and run.repeatable
                    and not run.synchronised
                    and is_out_of_memory(error)
                    and step_loop.shrink(outcome, isinstance(error, OutOfMemory))
                ):
                    self.out_of_memory += 1
                    raise TryAgainError(out_of_memory=True) from error
                if fails_over_one_item(error) and run.least == 1 < run.batch.size:
                    work.normalises = True
                    raise TryAgainError from error
                items = run.batch.described(begin, end) if end > begin else ""
                if end - begin == 1 < run.batch.size and type(error) in (ValueError, RuntimeError, IndexError):
                    items += ", a slice of one item (where squeeze() also drops the dimension of the items, and squeeze(-1) does not)"
                raise_failure(Failure(where, items, error), others, run.kept)
            finally:
                # They refer to this frame, and a dropped trainer must end without the garbage collector.
                del error, others
        if outcome.failed:
            device = outcome.failed_device
            where = "the reduction" if device is None else self._names[device]
            raise Error(f"step: {where} failed outside of user code. Nothing was committed.")
        self._enqueued = None if self.places.queues is None else outcome
        if marks is not None:
            work.mode = run.seen.mode
            work.writes_buffers = self._buffer_marks() != marks or (first and self._wrote_buffers(values, outcome))
            if work.writes_buffers and outcome.divided:
                raise TryAgainError(complete=True)
        if run.lacks_extras:
            run.note_extras()
            raise TryAgainError
        if run.repeatable and run.seen.waits and not run.seen.waits_at_once and has_compiled():
            raise TryAgainError(complete=True)
        self._edits.check()
        return outcome

    def _wrote_buffers(self, before: KeptBuffers | None, outcome: Any) -> bool:
        """Whether buffers have other values than before the run. Replicas began with those of the user's module."""
        if before is not None:
            return before.changed
        ran = [replica.buffers for replica, items in zip(self.replicas.list, outcome.items, strict=True) if items]
        return any(buffers is not None and buffers.differ for buffers in ran)

    def _run_devices(self, work: Workload, run: Run) -> Any:
        """Let the devices run everything. Returns the outcome, also of a run that has failed."""
        step_loop = work.step_loop
        queues = self.places.queues
        calls = (run.body, run.end, queues, None if queues is None else run.sums())
        plan = run.items.plan if run.items is not None else None
        if plan is None:
            shapes = run.batch.item_shapes
            speed = work.kind((shapes, run.seen.mode, self.replicas.generation)) if run.searches else 0
            plan = step_loop.plan(run.batch.size, work.kind(shapes), speed, run.searches)
        run.plan = plan
        with self._meeting(run, plan.shares) if run.synchronised else contextlib.nullcontext():
            return step_loop.run(plan, *calls, run.claims, run.pieces)

    def _first_failure(self, run: Run, outcome: Any) -> tuple[int | None, int, int, BaseException]:
        failed = outcome.failed_device
        return next((one for one in run.failures if one[0] == failed), run.failures[0])

    def _tries_again(self, error: BaseException) -> bool:
        """Whether the run has been changed such that it may succeed where this error came."""
        return False

    def _where(self, device: int, outcome: Any) -> str:
        """Where the first failure was, in words."""
        return self._names[device]

    def _where_too(self, device: int | None) -> str:
        """Where another failure was, in words."""
        return "what adds the gradients up" if device is None else self._names[device]

    def _end_draws(self, run: Run) -> None:
        unseeded = run.draws.finish()
        if unseeded and not self._warned:
            self._warned = True
            warn_caller(
                f"random numbers drawn by {unseeded} come from a generator that all host devices share, whoever is first: the same seed gives "
                "others in each run. Nothing else is wrong with them. One device draws the same in each run.",
                UnseededDrawsWarning,
            )

    def _level(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return forward_ad.held(run.seen.forward_ad) if len(self._names) > 1 else contextlib.nullcontext()

    @contextlib.contextmanager
    def _compiling(self, run: Run) -> Iterator[None]:
        if not run.seen.compiled:
            yield
            return
        with compiled_for_each(len(self._names), run.state.contexts):
            yield
        seed_graph_trees()  # a worker may have loaded them, and the caller's thread may want to use them, too

    def _queues_are_empty(self) -> bool:
        """Whether the devices have finished their last step. After a failure they have, because the failed step was waited for."""
        if self._enqueued is None:
            return True
        with contextlib.suppress(Error):  # the step reports a lost device
            if not self._enqueued.settled:
                return False
        self._enqueued = None
        return True
