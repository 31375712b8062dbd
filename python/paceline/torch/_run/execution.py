"""Runs one call of a trainer on its devices. It commits everything, or nothing."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline import DeviceGroup, InvalidArgument
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._batch.joining import concatenate
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.places import Places
from paceline.torch._replicas.batch_norm import using_batch_statistics, warn_of_normalised_apart
from paceline.torch._replicas.buffer_rules import BufferRules, put
from paceline.torch._replicas.buffers import KeptBuffers, SharedBuffers
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.around import Around
from paceline.torch._run.gradients import UserGradients
from paceline.torch._run.outside import OutsideGradients
from paceline.torch._run.ranks import Ranks
from paceline.torch._run.run import PredictRun
from paceline.torch._run.runner import Runner
from paceline.torch._run.train_run import TrainRun
from paceline.torch._run.workload import Workload

Gradients = list[torch.Tensor | None]
_PROOFS = 8  # that are kept to be told of


class Execution(Runner):
    """Uses the replicas' gradients freely while a call runs, and writes the user's gradients at the end."""

    # The cure of norms over micro-batches where `check` has found out: there is no device yet whose statistics count.
    cure_of_running_statistics = (
        "Use DataParallel(..., batch_norm='synchronised'), GroupNorm or LayerNorm, or evaluation mode for these."
    )

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: Places, replicas: Replicas, *, synchronises: bool = False
    ) -> None:
        super().__init__(module, places, replicas, synchronises=synchronises)
        self.items = [0] * len(group)  # how many each device ran in the last committed step
        self.steps = 0  # how many runs that train were committed, also in earlier processes if a state was loaded
        self.resumed = False  # whether they were, so that the first steps here are not the first ones of the run
        self.extras: Any = None  # what loss_fn returned beside the loss in that step
        self.faults: Callable[[int], Around] | None = None  # what to inject into a call with this number, for tests
        self.ranks: Ranks | None = None  # the other processes that train the module
        self.sampler: GlobalBatchSampler | None = None  # the trainer's own; it is told what was trained on
        self._outside = OutsideGradients()
        self._kept: tuple[int, KeptBuffers] | None = None  # with the replicas' generation
        self.buffer_rules: BufferRules | None = None  # for buffers that do not come from one device
        self._joined: tuple[Any, list[Any]] | None = None  # what they say of an outcome
        self.committed: Any = None  # the last committed outcome
        self.proofs: deque[Any] = deque(maxlen=_PROOFS)  # the last ones
        self._took_part = 0  # the number of the last call that was committed without items of this rank

    def train(self, work: Workload, run: TrainRun, *, keep: bool = True) -> tuple[torch.Tensor, Gradients, Any]:
        """The objective, the gradients of the batch, and the outcome.

        With `keep` the user's ``.grad``, the buffers and the balancer get the results of the step. Without, all three are as before.
        """
        # With one device the user's module itself runs, so its buffers are saved in case the step fails.
        kept = None if self.replicas.shared else self._kept_buffers()
        user = UserGradients(self.replicas, adds=not run.carries)
        try:
            run.outside = self._outside
            replicas = [replica.parameters for replica in self.replicas.list]
            parameters = [self.replicas.parameters, *replicas]
            refused = keep and self.ranks is not None
            self._outside.begin(run.loss_fn, parameters, self.replicas.shared, carries=run.carries, refused=refused)
            if keep and self.faults is not None:
                self._inject(run, self.faults(self.calls))
            shared = SharedBuffers(self.replicas.sparse)
            outcome = self._execute(work, run)
            shared.check()
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
                totals = user.totals(run.left_out) if run.flat is None else run.flat.totals()
                if keep and self.ranks is not None:
                    self._check_for_ranks(outcome)
                    loss, totals = self.ranks.sum(
                        self.replicas, run.objective, loss, totals, scale=run.scale, steps=self.steps
                    )
                if keep:
                    self._commit(work, run, user, totals, outcome, extras)
            if not keep:
                self._put_back(user, kept)
            return loss, totals, outcome
        except BaseException:
            agreed = self.ranks.agreed if keep and self.ranks is not None else None
            if user.written or agreed is not None:  # interrupted in the middle of writing: a step is done or not done
                with torch.no_grad():
                    self._commit(work, run, user, totals if agreed is None else agreed[1], outcome, extras)
                raise
            self._put_back(user, kept)
            raise
        finally:
            self.drop_gradients()

    def _inject(self, run: TrainRun, faults: Around) -> None:
        run.around.append(faults)

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
        self.replicas.refresh(hooks=carries)
        user = UserGradients(self.replicas)
        totals: Gradients = [None] * len(self.replicas.parameters)
        self.calls += 1
        self.failed_on = None
        watch = contextlib.nullcontext() if self.watchdog is None else self.watchdog.watch(self.calls, lambda: None)
        with torch.no_grad(), watch:
            try:
                loss, totals = self.ranks.sum(self.replicas, objective, None, totals, steps=self.steps)
                self._commit_part(user, totals, carries=carries)
            except BaseException:
                agreed = self.ranks.agreed
                if agreed is None:
                    user.restore()
                else:  # interrupted in the middle of writing
                    self._commit_part(user, agreed[1], carries=carries)
                raise
        return loss, totals

    def together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Around a call that all ranks make."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together(call)

    def _check_for_ranks(self, outcome: Any) -> None:
        """Raise for what only this rank knows: a device that has failed, and gradients that have no place in the sum."""
        if self.places.queues is not None:
            self.places.drain()
            _ = outcome.settled  # raises the error of a device that has failed
        refuse_outside_of_ranks(self._outside.reached)

    def _kept_buffers(self) -> KeptBuffers:
        """The present buffers, in memory that is allocated once for the modules as they are now."""
        if self._kept is None or self._kept[0] != self.replicas.generation:
            self._kept = self.replicas.generation, KeptBuffers(self.replicas.modules)
        else:
            self._kept[1].note()
        return self._kept[1]

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
            return concatenate(run.outputs, self.places.to_home, own, pad=run.pad)

    def forward(self, work: Workload, run: PredictRun) -> None:
        """Run forward, and commit what it wrote."""
        outcome = self._execute(work, run)
        self._end_draws(run)
        try:
            self._commit_forward(outcome)
        except BaseException:  # interrupted in the middle of writing
            self._commit_forward(outcome)
            raise
        work.step_loop.commit(outcome)

    @torch.no_grad()
    def _commit_forward(self, outcome: Any) -> None:
        self._commit_attributes(outcome)
        if self.module.training:  # as in plain PyTorch, running statistics follow
            self._commit_buffers(outcome)

    def drop_gradients(self) -> None:
        """Drop the replicas' gradients. The user's own stay."""
        if self.flat is not None:
            self.flat.drop_sums()
        if self.replicas.shared:
            for replica in self.replicas.list:
                replica.clear_gradients()

    def gather(self) -> None:
        """Bring the user's module to one device, until the next run."""

    def end(self) -> None:
        """Called when the workers have ended, or are left behind."""

    def release(self) -> None:
        """Drop what was kept for the devices to read. Requires: the devices have ended."""
        self.committed = self._enqueued = self._kept = self._joined = None
        if self.graphs is not None:
            self.graphs.clear()
        if self.flat is not None:
            self.flat.release()

    def explain(self) -> str:
        """Lines about norms over a part of the batch, and about graphs; empty if there are none."""
        proofs = "".join(f"Proof: {proof.text}.\n" for proof in self.proofs)
        return super().explain() + ("" if self.graphs is None else self.graphs.explain()) + proofs

    def _most(self, outcome: Any) -> int:
        """The replica that ran most items of a step. What it has written goes to the user's module."""
        ran: list[int] = outcome.items
        return ran.index(max(ran))

    def _commit(
        self, work: Workload, run: TrainRun, user: UserGradients, totals: Gradients, outcome: Any, extras: Any
    ) -> None:
        """Write everything. An interrupted call is repeated, so what must not be done twice is marked before, with no call in between."""
        user.commit([None] * len(totals) if run.carries else totals)
        if run.carries:
            run.outside_gradients = self._outside.taken()
        else:
            self._outside.commit()
        self.push(outcome)
        if self.committed is not outcome:
            items = outcome.items
            self.committed, self.items, self.extras = outcome, items, extras
            self.steps += 1
            work.step_loop.commit(outcome)
            work.launches.add(run.launches)
        if self.sampler is not None:
            self.sampler.trained()

    def _commit_part(self, user: UserGradients, totals: Gradients, *, carries: bool) -> None:
        """Write everything on a rank without items. An interrupted call is repeated, as for `_commit`."""
        user.commit([None] * len(totals) if carries else totals)
        if self._took_part != self.calls:
            items = [0] * len(self._names)
            self._took_part, self.items, self.extras = self.calls, items, None
            self.steps += 1
        if self.sampler is not None:
            self.sampler.trained()

    def push(self, outcome: Any) -> None:
        """Give the user's module what the forwards have written."""
        self._commit_buffers(outcome)
        self._commit_attributes(outcome)

    def _commit_buffers(self, outcome: Any) -> None:
        if not self.replicas.shared:
            return
        buffers = self.replicas.list[self._most(outcome)].buffers
        if buffers is None:
            return
        # Once for an outcome: a commit that was interrupted is repeated, and then the user's buffers are not those before the step.
        if self.buffer_rules is not None and (self._joined is None or self._joined[0] is not outcome):
            home = self.places.devices.index(self.places.home)
            self._joined = outcome, self.buffer_rules.joined(self.replicas, outcome.items, home, self.places.to_home)
        buffers.push()
        if self._joined is not None:
            put(self._joined[1])

    def _commit_attributes(self, outcome: Any) -> None:
        if self.replicas.shared:
            self.replicas.push_written(self._most(outcome), [] if self.running is None else self.running.ran, outcome)


def refuse_outside_of_ranks(shape: torch.Size | None) -> None:
    """Raise for a tensor of this shape that got a gradient, which would be that of this rank's part."""
    if shape is not None:
        raise InvalidArgument(
            f"step: the loss reaches a tensor of shape {tuple(shape)} outside of the module. With group= the gradients of the module are summed "
            "over the ranks, and no others: make it a parameter of the module, or detach it."
        )
