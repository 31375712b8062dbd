"""The order of a step: prepare, plan and run on the devices, try again where that may help, commit everything or nothing."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import Error, OutOfMemory
from paceline.torch._batch.edits import Edits
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.caller_state import NOTHING, NoGrad
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.flat_gradients import FlatGradients
from paceline.torch._run.graphs import Graphs
from paceline.torch._run.journal import Done, Gradients, Journal
from paceline.torch._run.outside import OutsideGradients
from paceline.torch._run.participants import of_forward, of_part, of_step
from paceline.torch._run.rank_steps import LastBackward, check_sums, open_sums
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.recipe import Retry, RetryError
from paceline.torch._run.source import Source
from paceline.torch._run.train_run import TrainRun

_T = TypeVar("_T")
_PROOFS = 8  # that are kept to be told of


class Execution:
    """Runs one call at a time. It uses the replicas' gradients freely meanwhile, and writes the user's at the end."""

    def __init__(self, module: nn.Module, places: Places, replicas: Replicas, source: Source) -> None:
        self.module, self.places, self.replicas, self.source = module, places, replicas, source
        self.features = source.features
        self.items = [0] * len(places)  # how many each device ran in the last committed step
        self.steps = 0  # how many runs that train were committed, also in earlier processes if a state was loaded
        self.resumed = False  # whether they were, so that the first steps here are not the first ones of the run
        self.extras: Any = None  # what loss_fn returned beside the loss in that step
        self.committed: Any = None  # the last committed outcome
        self.proofs: deque[Any] = deque(maxlen=_PROOFS)  # the last ones
        self.running: Executor | None = None
        self.failed_on: str | None = None  # the device that the last failure is to blame on, if it is one device
        self.out_of_memory = 0  # how often a step had to run again in smaller pieces
        self.calls = 0  # how many have begun
        self.attempts = 0  # of the present call
        self.graphs: Graphs | None = None  # set if micro-batches are captured
        self.ranks: Ranks | None = None  # the other processes that train the module
        self._early: LastBackward | None = None  # set if its gradients are sent to them while backward goes on
        self.sampler: GlobalBatchSampler | None = None  # the trainer's own; it is told what was trained on
        self.flat = FlatGradients(replicas, places) if places.queues is not None and len(places) > 1 else None
        self.outside = OutsideGradients()
        itself = weakref.proxy(self)  # a dropped trainer must end without the garbage collector
        self._of_steps, self._of_parts = Journal(of_step(itself)), Journal(of_part(itself))
        self._of_forwards = Journal(of_forward(itself))
        self._edits = Edits()
        self._enqueued: Any = None  # the last outcome, committed or not
        self._random: RandomStates | None = None  # the generators' states when the present attempt began

    # What a trainer calls.

    def train(self, asked: Asked, *, keep: bool = True) -> Done:
        """The objective and the gradients of the batch. `asked.executor` makes a `TrainRun`.

        With `keep` the user's ``.grad``, the buffers and the balancer get the results of the step. Without, all three are as before.
        """
        return self._repeated(asked, lambda call: self._train(call, keep), keep=keep)

    def forward(self, asked: Asked) -> Any:
        """Run forward, and commit what it wrote. Returns what `asked.executor` made."""
        return self._repeated(asked, self._forward)

    def take_part(self, objective: Objective, *, carries: bool) -> Done:
        """What `train` returns on a rank without items: the objective of all ranks, and its gradients."""
        ranks, replicas = self.ranks, self.replicas
        assert ranks is not None
        replicas.refresh(hooks=carries)
        self.calls, self.failed_on = self.calls + 1, None
        none: Gradients = [None] * len(replicas.parameters)
        part = Done(None, None, torch.empty(0, device="cpu"), none, [0] * len(self.places), carries=carries)

        def summed(done: Done) -> tuple[torch.Tensor, Gradients]:
            return ranks.sum(replicas, objective, None, none, steps=self.steps)

        with self.features.around_call(self.calls, lambda: self.running):
            return self.settle(self._of_parts, None, lambda: part, summed)

    def rehearse(self, asked: Asked) -> None:
        """Prepare a call as often as it takes, and run nothing."""
        self._repeated(asked, lambda call: None)

    # The order of a step.

    def _repeated(self, asked: Asked, attempt: Callable[[Call], _T], *, keep: bool = False) -> _T:
        """What `attempt` returns, as often as it takes. Each attempt starts from the same state of the generators."""
        self._random = None
        self.calls, self.attempts, self.failed_on = self.calls + 1, 0, None
        retries: dict[str, int] = {}
        try:
            with self.features.around_call(self.calls, lambda: self.running):
                while True:
                    self.attempts += 1
                    try:
                        if asked.before is not None:
                            asked.before()
                        return attempt(self.prepare(asked, keep=keep))
                    except RetryError as error:
                        retry = error.retry
                        if retries.get(retry.reason, 0) == retry.most:
                            raise Error(
                                f"step: run {retry.most + 1} times for one reason, without success: {retry.reason}. Nothing was committed. Please report this."
                            ) from error.__cause__
                    except OutOfMemory:  # paceline's own: PyTorch may sit on memory that it does not use
                        retry = Retry("memory that PyTorch had kept", out_of_memory=True)
                        if retry.reason in retries:
                            raise
                    retries[retry.reason] = retries.get(retry.reason, 0) + 1
                    if self.ranks is not None:
                        self.ranks.run_again(memory=retry.out_of_memory)
                    self._go_back(retry)
        finally:
            self._edits.end()

    def prepare(self, asked: Asked, *, keep: bool = False) -> Call:
        """Bring the replicas up to date with the module, bind the features, and let the source plan."""
        self.source.begin(asked)
        self.places.separate_generators()
        self._random = random = RandomStates(self.places)
        self._edits.begin(asked.batch)
        self.replicas.refresh(hooks=asked.hooks)
        call = Call(asked, self.replicas, self.places, random, number=self.calls, keep=keep)
        call.flat = self.flat
        call.seen.follow(self.replicas, self.module, asked.fn, call.state, captures=self.graphs is not None)
        self.features.recipe_of(call)
        self.source.plan(call)
        return call

    def _train(self, call: Call, keep: bool) -> Done:
        run: TrainRun = call.asked.executor(call)
        ranks = self.ranks if keep else None
        run.part = ranks is not None

        def attempt() -> Done:
            if ranks is not None:
                open_sums(ranks, run, self._early, self.steps)
            outcome = self._execute(run)
            self._of_steps.check()
            run.check()
            for check in run.recipe.check:
                check(run, outcome)
            with NoGrad():
                extras = run.extras.whole(run.items, self.places.to_home)
                loss, totals = self.places.to_home(run.loss()), run.sink.totals()
                return Done(run, outcome, loss, totals, outcome.items, extras, carries=run.carries)

        def summed(done: Done) -> Any:
            assert ranks is not None
            check_sums(ranks, run, done.outcome)
            return ranks.close(run.objective, done.loss, done.totals, scale=run.scale, steps=self.steps)

        try:
            done = self.settle(self._of_steps, run, attempt, None if ranks is None else summed, keep=keep)
            run.seconds = time.perf_counter() - call.began
            return done
        finally:
            if self._early is not None:
                self._early.end()
            self.drop_gradients()

    def _forward(self, call: Call) -> Any:
        run = call.asked.executor(call)

        def attempt() -> Done:
            outcome = self._execute(run)
            for check in run.recipe.check:
                check(run, outcome)
            return Done(run, outcome, torch.empty(0, device="cpu"), [], [])

        self.settle(self._of_forwards, run, attempt)
        return run

    def settle(
        self,
        journal: Journal,
        run: Any,
        attempt: Callable[[], Done],
        summed: Callable[[Done], tuple[torch.Tensor, Gradients]] | None = None,
        *,
        keep: bool = True,
    ) -> Done:
        """Commit what an attempt returns, or put everything back. With other ranks: what is `summed` over them, or what all have agreed on."""
        ranks, done = None if summed is None else self.ranks, None
        try:
            journal.prepare(run)
            done = attempt()
            with NoGrad():
                if summed is not None:
                    loss, totals = summed(done)
                    done = done._replace(loss=loss, totals=totals)
                if keep:
                    journal.commit(done)
                else:
                    journal.rollback()
            return done
        except BaseException:
            agreed = None if ranks is None else ranks.agreed
            if done is not None and keep and (journal.begun or agreed is not None):  # interrupted: done, or not done
                with NoGrad():
                    journal.commit(done if agreed is None else done._replace(loss=agreed[0], totals=agreed[1]))
            else:
                journal.rollback()
            raise
        finally:
            journal.release()

    def _execute(self, run: Executor) -> Any:
        """Run everything, on all devices. Raises what the user's code has raised, or why the run does not count."""
        self.running = run
        run.queues_empty = self._queues_are_empty()
        outcome = self.source.run(run)
        failed = bool(run.failures) or outcome.failed
        self._enqueued = None if failed or self.places.queues is None else outcome
        for retry in run.recipe.retry:
            if (again := retry(run, outcome, failed=failed)) is not None:
                run.failures.clear()
                raise RetryError(again)
        cause = outcome.take_cause() if outcome.failed else None
        if cause is not None:  # raised where the body catches nothing
            run.failures.insert(0, (outcome.failed_device, 0, 0, cause))
        del cause
        if run.failures:
            self._fail(run, outcome)
        if outcome.failed:
            device = outcome.failed_device
            where = "the reduction" if device is None else self.places.names[device]
            raise Error(f"step: {where} failed outside of user code. Nothing was committed.")
        self._edits.check()
        return outcome

    def _fail(self, run: Executor, outcome: Any) -> None:
        """Raise the first failure, or why it may not come again."""
        device, begin, end, error = self.source.failing.first(run, outcome)
        others = self.source.failing.others(run, device, begin, end)
        failed = outcome.failed_device
        self.failed_on = None if failed is None else self.places.names[failed]
        run.failures.clear()
        run.failed_device = device
        mended: Retry | BaseException = error
        try:
            mended = self.features.mend(run, error, outcome)
            if isinstance(mended, Retry):
                self.out_of_memory += mended.out_of_memory
                raise RetryError(mended) from error
            self.source.failing.fail(run, outcome, (device, begin, end), mended, others)
        finally:
            # They refer to this frame, and a dropped trainer must end without the garbage collector.
            del error, others, mended

    def _go_back(self, retry: Retry) -> None:
        """Put everything back that the last attempt has moved."""
        if self._random is not None:
            self._edits.run_again(complete=retry.complete)
        # Not in the handler, where the traceback still holds what the first attempt had allocated.
        if retry.out_of_memory:
            gc.collect()  # as cycles of the user's objects may, too
            self.places.release_memory()
        if self._random is not None:
            self._random.restore()
        for replica in self.replicas.list:
            if replica.written is not None:
                replica.written.undo()

    def _queues_are_empty(self) -> bool:
        """Whether the devices have finished their last step. After a failure they have, because the failed step was waited for."""
        if self._enqueued is None:
            return True
        with contextlib.suppress(Error):  # the step reports a lost device
            if not self._enqueued.settled:
                return False
        self._enqueued = None
        return True

    # What is written in the end.

    def push(self, outcome: Any, *, buffers: bool = True) -> None:
        """Give the user's module what the forwards have written."""
        if buffers:
            self.source.pushing.buffers(outcome)
        self.source.pushing.attributes(outcome, [] if self.running is None else self.running.ran)

    def drop_gradients(self) -> None:
        """Drop the replicas' gradients. The user's own stay."""
        if self.flat is not None:
            self.flat.drop_sums()
        self.replicas.clear_gradients()

    def join(self, ranks: Ranks, *, synchronised: bool) -> None:
        """Train together with other processes from now on. `synchronised`: norms meet over all of them."""
        self.replicas.share()  # so that one device, too, refuses hooks on gradients of a part, and leaves .grad alone
        ranks.share(self.replicas, synchronised=synchronised)
        self.ranks = ranks
        if ranks.early and self.graphs is None and self.places.devices == [self.places.home]:
            self._early = LastBackward(self.replicas)

    def together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Around a call that all ranks make."""
        return NOTHING if self.ranks is None else self.ranks.together(call)

    def meets_ranks(self) -> bool:
        """Whether norms are over the batch of all ranks, in calls that all make. Looks at the module as it is now."""
        if self.ranks is None or self.ranks.rounds is None:
            return False
        self.replicas.refresh(hooks=True)
        return self.synchronised

    # Life.

    @property
    def synchronised(self) -> bool:
        """Whether the module, as it is now, has batch normalisation that is over the batch of all devices."""
        return self.features.constraints(self.replicas, None).undivided

    def release(self) -> None:
        """Drop what was kept for the devices to read. Requires: the devices have ended."""
        self.committed = self._enqueued = None
        self._of_steps.end()
        if self.graphs is not None:
            self.graphs.clear()
        if self.flat is not None:
            self.flat.release()
        if self._early is not None:
            self._early.release()
        self.source.release()

    def explain(self) -> str:
        """Lines about gradients that are summed early, features, graphs and proofs; empty if there is nothing to say."""
        text = "" if self.flat is None else self.flat.explain()
        text += self.features.explain() + ("" if self.graphs is None else self.graphs.explain())
        return text + "".join(f"Proof: {proof.text}.\n" for proof in self.proofs.copy())
