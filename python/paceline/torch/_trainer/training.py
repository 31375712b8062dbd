"""Gradients of one batch: what `step` and the runs of `batch` have in common."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch, BatchDim
from paceline.torch._batch.items import Cost, costs_of
from paceline.torch._batch.objective import Objective, Reduction, Total, Weight, already_backward
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._batch.terms import Terms, objective_over
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.carried import Carried
from paceline.torch._run.graph_run import GraphRun
from paceline.torch._run.group_ranks import GroupRanks
from paceline.torch._run.journal import Done
from paceline.torch._run.train_run import LossFunction, TrainRun
from paceline.torch._trainer.arguments import check_scaler, check_trains
from paceline.torch._trainer.claims import ClaimScript
from paceline.torch._trainer.function_proof import FunctionProver
from paceline.torch._trainer.global_batch import FunctionRun, GlobalBatch, RunFunction
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.proofs import Proofs, Proved, Wanted
from paceline.torch._trainer.recent_steps import RecentSteps
from paceline.torch._trainer.works import kind_of


class Training(Part):
    """Trains on batches: as the balancer plans, or as the claims that are replayed say."""

    def __init__(
        self, core: Core, recent: RecentSteps, reduction: Reduction, proofs: Proofs, after_run: Callable[[], None]
    ) -> None:
        super().__init__(core)
        self._after_run = after_run
        self.reduction: Reduction = reduction
        self._proofs = proofs
        self._places, self._replicas = core.execution.places, core.execution.replicas
        self._recent = recent
        self._scripts: dict[str, ClaimScript] = {}  # the ledgers that are being replayed, by kind of work

    def prepared(self, batch: Any, options: Options) -> tuple[Batch, Objective, list[float] | None]:
        """The batch, the objective over it and the items' costs."""
        whole = options.whole(batch)
        return whole, self._objective(batch, whole.size, options), self.costs(options.cost, batch, whole)

    def has_weight(self, batch: Any, options: Options) -> bool:
        """Whether this process has items that count."""
        if batch is None:
            return False
        return bool(
            self._objective(batch, options.whole(batch).size, options._replace(total=None), part=True).magnitude
        )

    def _objective(self, batch: Any, size: int, options: Options, *, part: bool = False) -> Objective:
        pin, check = self._places.pin, self._places.check_values
        return objective_over(batch, size, self.reduction, options.weight, pin, check, options.total, part)

    def _prepared(self, batch: Any, options: Options) -> tuple[Batch | None, Objective, list[float] | None]:
        """The batch to train on, the objective over it, and the items' costs. With other ranks it may have no items, and the batch be None."""
        if self._execution.sampler is not None:
            self._execution.sampler.check_handed_out()
        ranks = self._execution.ranks
        if ranks is None:
            return self.prepared(batch, options)
        if isinstance(ranks, GroupRanks) and ranks.dealt is not None:
            ranks.dealt.check_ledger()
        whole = None if batch is None else options.whole(batch)
        objective = self._objective(batch, 0 if whole is None else whole.size, options, part=True)
        costs = None if whole is None else self.costs(options.cost, batch, whole)
        if isinstance(objective, Terms):
            objective.divide(ranks.weights(objective.described, objective.weights))
        return whole, objective, costs

    def _runs(self, objective: Objective) -> bool:
        """Whether this process runs its items now. In statistics over the batch of all ranks, items without weight count, too."""
        ranks = self._execution.ranks
        return ranks is None or bool(objective.magnitude or (objective.size and self._execution.meets_ranks()))

    def costs(self, cost: Cost | None, batch: Any, whole: Batch) -> list[float] | None:
        """What each item of the `whole` batch costs, if `cost` says it."""
        if cost is None:
            return None
        if why := self._execution.source.without_costs:
            raise InvalidArgument(f"cost=: {why}")
        costs = costs_of(cost, batch, whole.size, self._places.check_values)
        if costs is not None and whole.in_order:
            raise InvalidArgument(
                "cost= together with split=, which cuts neighbouring items: by cost, slices hold items from anywhere in the batch. Pass a list of "
                "samples, with collate=."
            )
        if costs is not None and self._works.options["granularity"] > 1:
            raise InvalidArgument(
                "cost= together with granularity=, which counts items: by cost, devices get other numbers of them. Make the trainer without "
                "it, or with micro_batch= or memory=, which limit batches with costs, too."
            )
        return costs

    def step(self, loss_fn: LossFunction, batch: Any, options: Options, *, carries: bool = False) -> torch.Tensor:
        """Carry out `DataParallel.step`, or `DataParallel.loss`, which `carries` the gradients, inside of an exclusive call."""
        call = "loss" if carries else "step"
        check_trains(call, loss_fn)
        check_scaler(call, options.scaler)
        whole, objective, costs = self._prepared(batch, options)
        scale = self._scale_of(options.scaler)
        if carries:
            self._replicas.share()

        def run_of(call: Call, objective: Objective) -> TrainRun:
            given: Any = {
                "loss_fn": loss_fn,
                "objective": objective,
                "scale": scale,
                "carries": carries,
                "finite": call.passage is None or not any(self._places.on_gpu),
            }
            graphs = self._execution.graphs
            return TrainRun(call, **given) if graphs is None else GraphRun(call, graphs, **given)

        loss, gradients, outside = self._ran(loss_fn, whole, objective, scale, costs, run_of, carries=carries)
        if not carries:
            return already_backward(loss)
        leaves = zip(self._replicas.parameters, gradients, strict=True)
        found = [*((leaf, gradient) for leaf, gradient in leaves if leaf.requires_grad), *outside]
        named = zip(self._replicas.names, self._replicas.parameters, strict=True)
        wanted = [name for name, leaf in named if leaf.requires_grad]
        carried = Carried(wanted, [leaf for leaf, _ in found], [gradient for _, gradient in found], scale)
        return carried.loss(loss)

    def _ran(
        self,
        fn: Callable[..., Any],
        whole: Batch | None,
        objective: Objective,
        scale: torch.Tensor | None,
        costs: list[float] | None,
        run_of: Callable[[Call, Objective], TrainRun],
        *,
        carries: bool = False,
        name: str | None = None,
        parameters: list[nn.Parameter] | None = None,
    ) -> Proved:
        """What a step gives, or a run with a `name`: from the devices, from a proof, or from other ranks alone."""
        kind, execution = kind_of(name), self._execution
        if whole is None or not self._runs(objective):
            with self._recent.step(kind, execution):
                done = execution.take_part(objective, carries=carries)
            return done.loss, done.totals, []
        run = None if name is None else (name, None if parameters is None else frozenset(map(id, parameters)))
        if self._proofs.due(fn, whole, objective, carries=carries, run=run):
            wanted = Wanted(scale, costs, carries, self.reduction, kind)
            if name is not None:
                wanted = wanted._replace(prover_of=partial(FunctionProver, parameters=parameters))
            with self._recent.step(kind, execution) if self._proofs.runs_step else contextlib.nullcontext():
                proved = self._proofs.step(fn, whole, objective, wanted)
            if proved is not None:
                return proved
        done = self._train(kind, whole, objective, costs, fn, run_of, hooks=carries)
        return done.loss, done.totals, done.run.outside_gradients

    def batch(
        self,
        batch: Any,
        *,
        weight: Weight | None = None,
        cost: Cost | None = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
    ) -> GlobalBatch:
        """Take `step` apart, for several optimizers, adversarial networks, several losses, or a backward of your own.

        The library owns the split, the weights and the reduction. Your function runs forward and backward. Every run of the batch commits
        its gradients, or raises and commits none of them. Between runs anything may happen, such as a step of an optimizer.

        Parameters
        ----------
        batch, weight, cost, total, collate, batch_dim, split
            As for `step`. With `cost` every run of the batch deals out its items by cost, and by the times that this run has measured.

        Returns
        -------
        GlobalBatch
            ``run(fn)`` calls ``fn(module, micro_batch)`` on all devices, and raises what `step` does. It ends with its ``with`` block.

        Raises
        ------
        InvalidArgument
            For a batch, weight or costs that cannot be used.

        Examples
        --------
        Networks that are trained against each other are parts of one module:

        >>> trainer = DataParallel(nn.ModuleDict({"generator": G, "critic": C}))      # doctest: +SKIP
        >>> def criticise(networks, micro_batch):
        ...     real, noise = micro_batch.data
        ...     fake = networks["generator"](noise).detach()
        ...     micro_batch.backward(bce(networks["critic"](real), 1) + bce(networks["critic"](fake), 0))
        >>> with trainer.batch((images, noise)) as global_batch:                     # doctest: +SKIP
        ...     global_batch.run(criticise, parameters=C); critic_optimizer.step()
        ...     global_batch.run(generate, parameters=G); generator_optimizer.step()
        """
        together = self._execution.together
        with self._lifetime.exclusive("batch"), together("batch"):
            options = Options(weight, cost, total, None, collate, batch_dim, split)
            whole, objective, costs = self._prepared(batch, options)

        def start(fn: RunFunction, wanted: list[nn.Parameter] | None, scaler: Any, name: str) -> torch.Tensor:
            with self._lifetime.between_steps("run"), together(f"run {name}"):
                check_trains("run", fn)
                check_scaler("run", scaler)
                scale = self._scale_of(scaler)

                def run_of(call: Call, objective: Objective) -> TrainRun:
                    return FunctionRun(call, fn, objective, scale, wanted)

                loss, *_ = self._ran(fn, whole, objective, scale, costs, run_of, name=name, parameters=wanted)
                loss = already_backward(loss)
            self._after_run()  # outside of the call, so that a callback may use the trainer
            return loss

        return GlobalBatch(0 if whole is None else whole.size, start)

    def replay_claims(self, path: str | os.PathLike[str] | None, *, run: str | None = None) -> None:
        """Run the steps that follow as those of a ledger ran: the same items on the same devices, in the same pieces and order.

        From the same parameters, with the same batches and as many threads per device, gradients on host devices are the same bit for bit,
        whatever the devices' speeds are now. Random draws from the same state of the caller's generator are the same, too, except those
        that `UnseededDrawsWarning` names. Gradients of tensors outside of the module may differ in their last bits: devices add to them in
        the order in which they finish. Nothing is measured during a replay, and the balancer stays as it is. Steps that are proved are not in
        a ledger, so the trainer needs the same `prove`.

        Parameters
        ----------
        path
            What `write_ledger` wrote, on as many devices. None: from now on steps are balanced again.
        run
            The name of a run of `batch`, whose runs these claims are for. Default: the claims are for `step`.

        Raises
        ------
        InvalidArgument
            If it is no such ledger. `step` and the run raise it for a batch of another size, and when all steps have run.
        OSError
            If the file cannot be read.
        """
        with self._lifetime.exclusive("replay_claims"):
            if path is None:
                self._scripts.pop(kind_of(run), None)
            else:
                self._scripts[kind_of(run)] = ClaimScript(path, self._works.names, run)

    def _scale_of(self, scaler: Any) -> torch.Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self._places.home))
        return scale

    def _train(
        self,
        kind: str,
        whole: Batch,
        objective: Objective,
        costs: list[float] | None,
        fn: Callable[..., Any],
        run_of: Callable[[Call, Objective], TrainRun],
        *,
        hooks: bool,
    ) -> Done:
        """Run the batch as the balancer plans this kind of work, or as the claims say that are replayed for this kind.

        `hooks`: whether parameters may have gradient hooks.
        """
        self._places.begin(whole)
        execution, script = self._execution, self._scripts.get(kind)
        work, claims = self._works.of(kind), None
        if script is not None:
            work, claims = self._works.of(f"replay {kind}"), script.peek(whole.size, by_cost=costs is not None)
        of_kind = (whole.size, whole.item_shapes)

        def executor(call: Call) -> TrainRun:
            run = run_of(call, objective if call.items is None else call.items.objective(objective))
            if claims is not None:
                run.claims, run.pieces = claims.micro_batches, claims.pieces
            # One device alone runs the whole batch as one micro-batch, so norms and buffers do what they do on one device. It does not
            # run alone where a new size may be compiled.
            elif work.alone is not None and call.items is None and not call.seen.tunes:
                run.trial_of = work.alone
                if (alone := work.alone.device(of_kind, execution.items)) is not None:
                    run.run_alone(alone)
            return run

        order = claims.order if claims is not None else None
        before = execution.committed
        with self._recent.step(kind, execution) as step:
            try:
                done = execution.train(Asked(work, whole, fn, executor, costs, order, hooks))
            finally:  # also after an interrupt: if it comes while gradients are written, the run is done
                step.attempts = execution.attempts
                if execution.committed is not before:
                    step.outcome = execution.committed
                    if script is not None:
                        script.advance()
            trials = done.run.trial_of
            if trials is not None and done.run.alone:
                busy = sum(finish - start for _, _, _, start, finish, *_ in done.outcome.claims)
                trials.add_alone(done.run.seconds, busy)
            elif trials is not None:
                trials.add(of_kind, whole.size, done.run.seconds)
            return done
