"""Runs one call of a trainer on its devices. It commits everything, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from paceline import DeviceGroup, Error, InvalidArgument, OutOfMemory
from paceline.torch._batch.batch import Batch, concatenate
from paceline.torch._batch.edits import Edits
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._batch.items import Items
from paceline.torch._batch.objective import Objective
from paceline.torch._devices import forward_ad
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.failures import raise_failure, warn_caller
from paceline.torch._devices.meeting import Meeting, MeetingPoint
from paceline.torch._devices.places import Places, RandomStates
from paceline.torch._devices.run_draws import UnseededDrawsWarning
from paceline.torch._replicas.batch_norm import (
    CURE,
    fails_over_one_item,
    normalised_apart,
    using_batch_statistics,
    warn_of_normalised_apart,
)
from paceline.torch._replicas.buffers import KeptBuffers
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._replicas.synchronised import synchronised
from paceline.torch._run.around import Around, profiled
from paceline.torch._run.buckets import Buckets
from paceline.torch._run.gradients import UserGradients
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.outside import OutsideGradients
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.run import Frame, PredictRun, Run, TrainRun
from paceline.torch._run.watchdog import Watchdog
from paceline.torch._run.workload import Workload

_T = TypeVar("_T")
Gradients = list[torch.Tensor | None]


class Execution:
    """Runs one call at a time. It uses the replicas' gradients freely, and writes the user's gradients at the end."""

    cure_of_norms = CURE  # that normalise over a part of the batch

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: Places, replicas: Replicas, *, synchronises: bool = False
    ) -> None:
        self.running: Run | None = None
        self.items = [0] * len(group)  # how many each device ran in the last committed step
        self.steps = 0  # how many runs that train were committed, also in earlier processes if a state was loaded
        self.failed_on: str | None = None  # the device that the last failure is to blame on, if it is one device
        self.out_of_memory = 0  # how often a step had to run again in smaller pieces
        self.extras: Any = None  # what loss_fn returned beside the loss in that step
        self.calls = 0  # how many have begun
        self.watchdog: Watchdog | None = None
        self.faults: Callable[[int], Around] | None = None  # what to inject into a call with this number, for tests
        self.ranks: Ranks | None = None  # the other processes that train the module
        self.sampler: GlobalBatchSampler | None = None  # the trainer's own; it is told what was trained on
        self.module = module
        self._names = places.names
        self.places = places
        self.replicas = replicas
        self._warned = False  # about draws without a seed
        self._outside = OutsideGradients()
        self._synchronises = synchronises  # batch normalisation, if there is any
        self._meeting_point = MeetingPoint()
        self._warned_of_norms = False  # that they normalise over a part of the batch
        self.committed: Any = None  # the last committed outcome
        self._enqueued: Any = None  # the last outcome, committed or not
        self._edits = Edits()
        self._random: RandomStates | None = None  # the generators' states when the last attempt began
        # Pinned memory that host devices have delivered to GPUs. It is kept until the GPUs have read it; PyTorch would reuse it.
        self._delivered: list[tuple[Any, Any]] = []

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
        self._random = random = RandomStates(self.places)
        self._edits.begin(whole)
        self.replicas.refresh(fn, hooks=hooks)
        least = self.follow_modules(work)
        items = None
        if order is not None:
            items = Items(order, whole, self.places.pin, costs)
        elif costs is not None:
            plan = work.step_loop.plan(costs)
            items = Items(list(plan.order), whole, self.places.pin, costs, plan)
        state = CallerState(self.places.types, len(self._names))
        work.seen.follow(self.replicas, self.module, fn, state)
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
        )

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
        """A line about modules that normalise over a part of the batch instead of the whole; empty if there are none."""
        norms = using_batch_statistics(self.replicas.norms) if self._warned_of_norms else []
        return f"{normalised_apart(norms, self.cure_of_norms)}\n" if norms else ""

    def _searches(self, work: Workload) -> bool:
        """Whether to search for sizes. Not if other sizes have to be compiled, or would draw other random numbers under fixed shares."""
        repeatable = work.fixed and self.places.any_host and work.seen.drawing.draws is not False
        return work.searches and not work.seen.tunes and not repeatable

    def _buffer_marks(self) -> list[list[tuple[int, int]]]:
        return [replica.buffer_marks() for replica in self.replicas.list]

    def repeated(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns. If memory runs out, or on `_TryAgainError`, `attempt` runs again from the same state of the generators."""
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
            except _TryAgainError as error:
                complete = error.complete
            except OutOfMemory:  # paceline's own: PyTorch may sit on memory that it does not use
                if released:
                    raise
                released, complete = True, False
            if self._random is not None:
                self._edits.run_again(complete=complete)
            # Not in the handler, where the traceback still holds what the first attempt had allocated.
            self.places.release_memory()
            if self._random is not None:
                self._random.restore()

    def train(self, work: Workload, run: TrainRun, *, keep: bool = True) -> tuple[torch.Tensor, Gradients, Any]:
        """The objective, the gradients of the batch, and the outcome.

        With `keep` the user's ``.grad``, the buffers and the balancer get the results of the step. Without, all three are as before.
        """
        # With one device the user's module itself runs, so its buffers are saved in case the step fails.
        kept = None if self.replicas.shared else KeptBuffers(self.replicas.modules)
        user = UserGradients(self.replicas, adds=not run.carries)
        try:
            run.outside = self._outside
            replicas = [replica.parameters for replica in self.replicas.list]
            parameters = [self.replicas.parameters, *replicas]
            self._outside.begin(run.loss_fn, parameters, self.replicas.shared, carries=run.carries)
            if keep and self.faults is not None:
                run.around.append(self.faults(self.calls))
            outcome = self._execute(work, run)
            user.check()
            run.part = keep and self.ranks is not None
            run.check()
            self._end_draws(run)
            if keep and run.least > 1 and outcome.micro_batches > 1 and not self._warned_of_norms:
                self._warned_of_norms = True
                warn_of_normalised_apart(using_batch_statistics(self.replicas.norms), self.cure_of_norms)
            with torch.no_grad():
                loss = self.places.to_home(run.loss())
                extras = run.extras.whole(run.items, self.places.to_home)
                totals = user.totals(run.left_out) if run.buckets is None else run.buckets.totals()
                if keep and self.ranks is not None:
                    self._check_for_ranks(outcome)
                    loss, totals = self.ranks.sum(
                        self.replicas, run.objective, loss, totals, scale=run.scale, steps=self.steps
                    )
                if keep:
                    self._commit(work, run, user, totals, outcome)
                    self.extras = extras
            if run.buckets is not None:
                self._keep_delivered(outcome, run.buckets)
            if not keep:
                self._put_back(user, kept)
            return loss, totals, outcome
        except BaseException:
            agreed = self.ranks.agreed if keep and self.ranks is not None else None
            if user.written or agreed is not None:  # interrupted in the middle of writing: a step is done or not done
                with torch.no_grad():
                    self._commit(work, run, user, totals if agreed is None else agreed[1], outcome)
                raise
            self._put_back(user, kept)
            raise
        finally:
            self.drop_gradients()

    def join(self, ranks: Ranks) -> None:
        """Train together with other processes from now on."""
        self.replicas.share()  # so that one device, too, refuses hooks on gradients of a part, and leaves .grad alone
        ranks.share(self.replicas)
        self.ranks = ranks

    def take_part(
        self, function: Callable[..., Any], objective: Objective, *, carries: bool
    ) -> tuple[torch.Tensor, Gradients]:
        """What `train` returns on a rank without items: the objective of all ranks, and its gradients."""
        assert self.ranks is not None
        self.replicas.refresh(function, hooks=carries)
        user = UserGradients(self.replicas)
        totals: Gradients = [None] * len(self.replicas.parameters)
        self.calls += 1
        self.failed_on = None
        watch = contextlib.nullcontext() if self.watchdog is None else self.watchdog.watch(self.calls, lambda: None)
        with torch.no_grad(), watch:
            try:
                loss, totals = self.ranks.sum(self.replicas, objective, None, totals, steps=self.steps)
                user.commit([None] * len(totals) if carries else totals)
            except BaseException:
                agreed = self.ranks.agreed
                if agreed is not None:  # interrupted in the middle of writing
                    user.commit([None] * len(totals) if carries else agreed[1])
                else:
                    user.restore()
                raise
            finally:
                if self.ranks.agreed is not None:
                    self.items, self.extras = [0] * len(self._names), None
                    self.steps += 1
                    if self.sampler is not None:
                        self.sampler.trained()
        return loss, totals

    def together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Around a call that all ranks make."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together(call)

    def _check_for_ranks(self, outcome: Any) -> None:
        """Raise for what only this rank knows: a device that has failed, and gradients that have no place in the sum."""
        if self.places.queues is not None:
            self.places.drain()
            _ = outcome.settled  # raises the error of a device that has failed
        shape = self._outside.reached
        if shape is not None:
            raise InvalidArgument(
                f"step: the loss reaches a tensor of shape {tuple(shape)} outside of the module. With group= the gradients of the module are summed "
                "over the ranks, and no others: make it a parameter of the module, or detach it."
            )

    def _put_back(self, user: UserGradients, kept: KeptBuffers | None) -> None:
        self._outside.restore()
        user.restore()  # last, because a tensor that was outside may be a part of the module by now
        if kept is not None:
            with torch.no_grad():
                kept.restore()

    def predict(self, work: Workload, run: PredictRun) -> Any:
        """What `fn` returned, for the whole batch."""
        self.forward(work, run)
        with torch.no_grad():
            own = self.places.owned if run.items is None else run.items.restored
            return concatenate(run.outputs, self.places.to_home, own)

    def forward(self, work: Workload, run: PredictRun) -> None:
        """Run forward, and commit what it wrote."""
        outcome = self._execute(work, run)
        self._end_draws(run)
        work.step_loop.commit(outcome)
        with torch.no_grad():
            self._commit_attributes(outcome)
            if self.module.training:  # as in plain PyTorch, running statistics follow
                self._commit_buffers(outcome)

    def drop_gradients(self) -> None:
        """Drop the replicas' gradients. The user's own stay."""
        if self.replicas.shared:
            for replica in self.replicas.list:
                replica.clear_gradients()

    def gather(self) -> None:
        """Bring the user's module to one device, until the next run."""

    def end(self) -> None:
        """Called when the workers have ended, or are left behind."""

    def release(self) -> None:
        """Drop what was kept for the devices to read. Requires: the devices have ended."""
        self.committed = self._enqueued = None
        self._delivered.clear()

    def _execute(self, work: Workload, run: Run) -> Any:
        self.running = run
        step_loop = work.step_loop
        marks = self._buffer_marks() if run.divides and run.claims is None else None
        # Version counters are cheap, but batch_norm does not count its writes. So the first run of a mode compares values.
        first = marks is not None and work.mode != run.seen.mode
        values = KeptBuffers(part for replica in self.replicas.list for part in replica.modules) if first else None
        run.queues_empty = self._queues_are_empty()
        if self.watchdog is not None and self.watchdog.call is not None:
            run.around.insert(0, self.watchdog.call.micro_batch)
        run.around[:0] = profiled(run.places.names)
        with self._level(run), run.draws.run(), self.replicas.guarded():
            outcome = self._run_devices(work, run)
        if run.draws.must_run_again() and (run.places.hosts_share or (work.fixed and run.searches)):
            complete = not run.failures
            run.failures.clear()
            raise _TryAgainError(complete=complete)
        if run.failures:
            device, begin, end, error = self._first_failure(run, outcome)
            failed = outcome.failed_device
            self.failed_on = None if failed is None else self._names[failed]
            run.failures.clear()
            try:
                if len(self._names) > 1 and forward_ad.wanted(error) is not None:
                    if not run.seen.forward_ad:
                        run.seen.forward_ad = True
                        raise _TryAgainError from error
                    error = forward_ad.refused(error)
                if self._tries_again(error):
                    raise _TryAgainError from error
                where = "what adds the gradients up" if device is None else self._where(device, outcome)
                if (
                    device is not None
                    and run.repeatable
                    and not run.synchronised
                    and is_out_of_memory(error)
                    and step_loop.shrink(outcome, isinstance(error, OutOfMemory))
                ):
                    self.out_of_memory += 1
                    raise _TryAgainError from error
                if fails_over_one_item(error) and run.least == 1 < run.batch.size:
                    work.normalises = True
                    raise _TryAgainError from error
                items = run.batch.described(begin, end) if end > begin else ""
                if end - begin == 1 < run.batch.size and type(error) in (ValueError, RuntimeError, IndexError):
                    items += ", a slice of one item (where squeeze() also drops the dimension of the items, and squeeze(-1) does not)"
                raise_failure(error, where, items, run.kept)
            finally:
                del error  # it refers to this frame, and a dropped trainer must end without the garbage collector
        if outcome.failed:
            device = outcome.failed_device
            where = "the reduction" if device is None else self._names[device]
            raise Error(f"step: {where} failed outside of user code. Nothing was committed.")
        self._enqueued = None if self.places.queues is None else outcome
        if marks is not None:
            work.mode = run.seen.mode
            work.writes_buffers = self._buffer_marks() != marks or (values is not None and values.changed)
            if work.writes_buffers and outcome.divided:
                raise _TryAgainError(complete=True)
        if run.lacks_extras:
            run.note_extras()
            raise _TryAgainError
        self._edits.check()
        return outcome

    def _run_devices(self, work: Workload, run: Run) -> Any:
        """Let the devices run everything. Returns the outcome, also of a run that has failed."""
        step_loop = work.step_loop
        calls = (run.body, run.end, self.places.queues, run.sums)
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

    def _most(self, outcome: Any) -> int:
        """The replica that ran most items of a step. What it has written goes to the user's module."""
        ran: list[int] = outcome.items
        return ran.index(max(ran))

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

    def _queues_are_empty(self) -> bool:
        """Whether the devices have finished their last step. After a failure they have, because the failed step was waited for."""
        if self._enqueued is None:
            return True
        with contextlib.suppress(Error):  # the step reports a lost device
            if not self._enqueued.settled:
                return False
        self._enqueued = None
        return True

    def _keep_delivered(self, outcome: Any, buckets: Buckets) -> None:
        """Keep pinned memory until the GPUs have read it. Memory on a GPU is kept by PyTorch itself."""
        pinned = buckets.take_pinned()
        if pinned:
            self._delivered.append((outcome, pinned))
        with contextlib.suppress(Error):  # the next step reports a lost device
            self._delivered = [entry for entry in self._delivered if not entry[0].settled]

    def _commit(self, work: Workload, run: TrainRun, user: UserGradients, totals: Gradients, outcome: Any) -> None:
        if run.carries:
            user.restore()
            run.outside_gradients = self._outside.taken()
        else:
            user.commit(totals)
            self._outside.commit()
        self._commit_buffers(outcome)
        self._commit_attributes(outcome)
        if self.committed is not outcome:
            work.step_loop.commit(outcome)
            work.launches.add(run.launches)
            self.committed = outcome
            self.items = outcome.items
            self.steps += 1
            if self.sampler is not None:
                self.sampler.trained()

    def _commit_buffers(self, outcome: Any) -> None:
        if not self.replicas.shared:
            return
        buffers = self.replicas.list[self._most(outcome)].buffers
        if buffers is not None:
            buffers.push()

    def _commit_attributes(self, outcome: Any) -> None:
        if self.replicas.shared:
            self.replicas.push_written(self._most(outcome))


class _TryAgainError(Exception):
    """Nothing was committed, and the step must run once more.

    The reason is one of these: memory ran out, and smaller pieces may fit; a device ran the forward several times, and the forward turned out to
    write buffers; the run drew random numbers, or entered a dual level, before that was prepared; something normalises over a micro-batch, which
    takes two items; items without weight have extras.
    """

    def __init__(self, *, complete: bool = False) -> None:
        super().__init__()
        self.complete = complete  # whether all items have run
