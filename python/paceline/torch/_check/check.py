"""Runs one batch whole and in pieces, to find out whether a loss can be split, and what makes a difference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from paceline import Error, InvalidArgument
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import Items
from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._check.cause import Reader
from paceline.torch._check.probe import (
    OutsideLeaves,
    Probe,
    Probed,
    Span,
    described_sizes,
    distances,
    loss_distance,
    spans_of,
    tolerance_for,
)
from paceline.torch._check.report import Cause, CheckReport, Kind, SplitResult
from paceline.torch._check.state import close
from paceline.torch._check.weights import known_tensors
from paceline.torch._devices.noise import Noise
from paceline.torch._devices.run_draws import RandomStates, replayed_draws
from paceline.torch._replicas.batch_norm import standing_still, using_batch_statistics
from paceline.torch._replicas.buffers import KeptAttributes
from paceline.torch._replicas.compiled import is_compiled, is_compiled_function
from paceline.torch._replicas.kept_parameters import KeptParameters
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.execution import Execution
from paceline.torch._run.gradients import UserGradients
from paceline.torch._run.journal import Done
from paceline.torch._run.train_run import LossFunction, TrainRun
from paceline.torch._run.workload import Workload

_DIVIDES = (
    'with reduction="sum" the objective is the sum divided by {}: its gradient is that part of the gradient that the sum has on one device. To '
    "train on the sum itself, as for a VAE, pass total=1."
)

# The result of the trainer's own devices: items by device, objective, gradients of the module and of leaves outside of it.
Trained = tuple[dict[str, int], float, list[torch.Tensor | None]]


def check(
    execution: Execution,
    work: Workload,
    batch: Batch,
    objective: Objective,
    loss_fn: LossFunction,
    *,
    reduction: Reduction,
    micro_batch: int | None,
    tolerance: float | None,
    costs: list[float] | None,
) -> CheckReport:
    """Check on the user's own module, whose result the devices have to reproduce. `work` is for this check alone."""
    if batch.size < 2:
        raise InvalidArgument("check: the batch has one item, which cannot be split. Use a batch of at least 8.")
    execution.source.fill()
    execution.source.gather()
    execution.replicas.refresh()
    return _Check(execution, work, batch, objective, loss_fn, tolerance, reduction, micro_batch, costs).run()


class TrialRun(TrainRun):
    """A run in which items draw what they drew before. After it, `reached` has the gradients of leaves outside of the module."""

    def __init__(self, call: Call, *, leaves: OutsideLeaves, noise: Noise, **options: Any) -> None:
        super().__init__(call, **options)
        self._leaves = leaves
        self._noise = noise
        self.reached: list[torch.Tensor | None] = []
        if noise.drew:
            self.draws = replayed_draws(self.places, call.random)

    def compute(self, device: int, begin: int, end: int) -> bool:
        with self._noise.of(self.batch.rows(begin, end)):
            return super().compute(device, begin, end)

    def check(self) -> None:
        super().check()
        self.reached = self._leaves.taken()


class Trials:
    """Runs of one batch on the user's own module and on the devices, which leave no trace. Requires: the replicas follow the module."""

    def __init__(
        self, execution: Execution, work: Workload, batch: Batch, objective: Objective, loss_fn: LossFunction,
        tolerance: float | None,
    ) -> None:  # fmt: skip
        """`work` is for these runs alone."""
        module, places, replicas = execution.module, execution.places, execution.replicas
        self._execution, self._work, self.names = execution, work, replicas.names
        self.tolerance = tolerance_for(module, places) if tolerance is None else tolerance
        noise = Noise(batch.size, places, max(self.tolerance, 1e-9))
        # As an empty record, since the calls of compiled code cannot be seen.
        noise.recorded = is_compiled(module) or is_compiled_function(loss_fn)
        parameters, outside = replicas.parameters, OutsideLeaves(replicas.parameters)
        named = replicas.named_modules
        self.probe = Probe(module, parameters, places, batch, objective, loss_fn, noise, outside, named)
        self._attributes, self._written = KeptAttributes(replicas.all_modules), KeptParameters(parameters)

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[UserGradients]:
        """Go back in the end. Yields what finds out whether the user's parameters were used."""
        user, random = UserGradients(self._execution.replicas), RandomStates(self._execution.places)
        try:
            yield user
        finally:
            random.restore()
            user.restore()
            self.probe.outside.restore()
            self._attributes.restore()
            self._written.restore()
            self._execution.drop_gradients()

    def on_devices(self, costs: list[float] | None = None, *, alone: int | None = None, hooks: bool = False) -> Done:
        """What the devices make of the batch, or one of them `alone`. `hooks`: whether parameters may have gradient hooks."""
        probe = self.probe

        def before() -> None:
            probe.outside.clear()
            self._attributes.restore()  # so that the devices follow the module as it was
            self._written.restore()

        def trial(call: Call) -> TrialRun:
            mine = probe.objective if call.items is None else call.items.objective(probe.objective)
            options: dict[str, Any] = {"leaves": probe.outside, "noise": probe.noise}
            run = TrialRun(call, loss_fn=probe.loss_fn, objective=mine, **options)
            if alone is not None:
                run.run_alone(alone)
            return run

        asked = Asked(self._work, probe.batch, probe.loss_fn, trial, costs, hooks=hooks, before=before)
        return self._execution.train(asked, keep=False)


class _Check(Trials):
    """One check."""

    def __init__(
        self, execution: Execution, work: Workload, batch: Batch, objective: Objective, loss_fn: LossFunction,
        tolerance: float | None, reduction: Reduction, micro_batch: int | None, costs: list[float] | None,
    ) -> None:  # fmt: skip
        super().__init__(execution, work, batch, objective, loss_fn, tolerance)
        self.reduction, self.micro_batch, self.causes, self._costs = reduction, micro_batch, list[Cause](), costs
        # These normalise over the whole batch on the devices, which run at the same time. They stand still for slices that run one after the other.
        together = using_batch_statistics(execution.replicas.norms) if execution.synchronised else []
        self.norms = [norm for _, norm in together]
        self.by_cost: tuple[Probe, list[Span]] | None = None  # the slices that the costs give
        if costs is not None:
            work.constrain(execution.features.constraints(execution.replicas, work), execution.replicas)
            plan = work.step_loop.plan(costs)
            items = Items(list(plan.order), batch, execution.places.pin, costs)
            spans = [span for span in pairwise(plan.bounds) if span[0] < span[1]]
            ordered = dataclasses.replace(self.probe, batch=items.batch, objective=items.objective(objective))
            self.by_cost = ordered, spans

    def run(self) -> CheckReport:
        with self.leaving_no_trace() as user:
            report = self._compared()
            user.check()
            return report

    def _train(self) -> Trained:
        places = self._execution.places
        try:
            done = self.on_devices(self._costs)
        finally:
            self._execution.source.gather()
        found = [None if one is None else places.to_home(one) for one in (*done.totals, *done.run.reached)]
        return dict(zip(places.names, done.outcome.items, strict=True)), done.loss.item(), found

    def _compared(self) -> CheckReport:
        """Compare, and look for the causes of a difference, the certain ones first."""
        whole, again = self._twice()
        if self._cannot_tell():
            return self._report([])
        if self._compare("again", whole, again).largest > self.tolerance:
            self._add(
                "not repeatable",
                "the same batch gave two results, from the same parameters, buffers and random generators: loss_fn or the module keeps "
                "state in Python, or draws from a generator that is neither PyTorch's nor the global one of Python or NumPy. Nothing can "
                "be said of splits.",
            )
            return self._report([])
        like = next(iter(self.probe.parameters), torch.empty(0, device="cpu"))
        for self.probe.noise.interleaved in (False, True):
            self.causes.clear()
            with standing_still(self.norms, like):
                calm = self._whole() if self.norms else whole
                splits = self._splits(calm)
                if self._cannot_tell():
                    return self._report([])
                self._note_draws()
                self._explain(calm, splits)
            # Items that got the draws of other items may look coupled without being so.
            kinds = {cause.kind for cause in self.causes}
            if not self.probe.noise.has_blocks or not kinds & {"coupled items", "unknown"}:
                break
        if self.by_cost is not None:
            splits.append(self._dealt_out(whole, *self.by_cost))
        splits.append(self._on_devices(whole))
        if self._cannot_tell():
            return self._report([])
        if splits[-1].largest > self.tolerance and not self._blamed:
            self._add(
                "devices",
                "the trainer's devices gave another result than the module itself with the same slices one after the other: loss_fn reads "
                "from the original module what a forward has written to the module that loss_fn is given, or shares state between the threads of the devices, or the copies of the module that the devices run are not what the "
                "module is: see whether replicate= or copy.deepcopy leaves something out.",
            )
        return self._report(splits)

    def _twice(self) -> list[Probed]:
        """Run the whole batch twice: the first run records its draws, and the second replays them."""
        runs = [self._whole(), self._whole()]
        self.probe.outside.settle()
        inside = len(self.names)
        for run in runs:
            run.gradients[inside:] = self.probe.outside.lasting(run.gradients[inside:])
        return runs

    @property
    def _blamed(self) -> bool:
        """Whether a cause was found that explains other gradients."""
        return any(cause.kind not in ("random draws", "shared draws") for cause in self.causes)

    def _cannot_tell(self) -> bool:
        """Whether something was drawn that could not be repeated for a part of the batch."""
        if not self.probe.noise.lost:
            return False
        self.causes.clear()
        self._add(
            "unknown draws",
            f"loss_fn or the module draws random numbers that cannot be repeated for a part of the batch ({', '.join(self.probe.noise.lost)}). "
            "Another split draws others, so nothing can be compared. Draw them, and mix items with each other, before the step, and pass them "
            "in the batch.",
        )
        return True

    def _note_draws(self) -> None:
        """Add the random draws to the causes. Each item drew the same in every split. Shared draws were the same in every slice."""
        if not self.probe.noise.drew:
            return
        if self.probe.noise.shared:
            shared = ", ".join(list(self.probe.noise.shared)[:3])
            self._add(
                "shared draws",
                f"all items of a slice share a random draw ({shared}), as noise on weights is. One device draws it once for the whole batch, a split "
                "once for each micro-batch: the expected gradient is the same, that of one step is not. The rest was compared with one draw for all.",
            )
        else:
            self._add(
                "random draws",
                f"loss_fn or the module draws random numbers ({', '.join(self.probe.noise.operators)}), and another split draws others, as every step "
                "does. Splits were compared with the same draws for each item.",
            )

    def _splits(self, whole: Probed, probe: Probe | None = None) -> list[SplitResult]:
        splits = {described_sizes(sizes): spans_of(sizes) for sizes in self._sizes()}
        return [self._tried(name, whole, partial((probe or self.probe).split, spans)) for name, spans in splits.items()]

    def _dealt_out(self, whole: Probed, probe: Probe, spans: list[Span]) -> SplitResult:
        """Run the slices that the devices get by cost, one after the other. They have items from anywhere in the batch."""
        name = f"by cost, {described_sizes([end - begin for begin, end in spans])}"
        result = self._tried(name, whole, lambda: probe.split(spans))
        if result.largest > self.tolerance and not self._blamed:
            raised = f" It raised {result.error}." if result.error is not None else ""
            self._add(
                "order",
                "slices of neighbouring items give the result of the whole batch, and items dealt out by cost, in another order, do not: loss_fn or "
                f"the module goes by the place of an item in the batch, or pairs it with its neighbours.{raised} Put what belongs to an item "
                "into the batch, or step without cost=.",
            )
        return result

    def _explain(self, whole: Probed, splits: list[SplitResult]) -> None:
        self._note_buffers(splits)
        if _largest(splits) <= self.tolerance:
            return
        norms = [part for _, part in using_batch_statistics(self.probe.modules)]
        with standing_still(norms, next(iter(self.probe.parameters), torch.empty(0, device="cpu"))):
            if norms:
                calm = self._whole()
                splits = self._splits(calm)
                if _largest(splits) <= self.tolerance:
                    return
            errors = [split for split in splits if split.error is not None]
            if errors:
                self._add(
                    "error",
                    f"loss_fn works on the whole batch and raises on a slice ({errors[0].name}): {errors[0].error}. It must take any number of items.",
                )
                return
            for name, probe in self.probe.terms():
                if name and _largest(self._splits(probe.split([(0, probe.batch.size)]), probe)) <= self.tolerance:
                    continue
                kind, text = Reader(probe, self._sizes(), self.reduction, self.tolerance).read()
                self._add(kind, f"term {name!r}: {text}" if name else text)

    def _note_buffers(self, splits: list[SplitResult]) -> None:
        changed = sorted({name for split in splits for name in split.buffers})
        norms = [name for name, _ in using_batch_statistics(self.probe.modules)]
        owners = list(dict.fromkeys([*norms, *(name.rpartition(".")[0] for name in changed)]))
        if not owners:
            return
        parts = dict(self.probe.modules)
        modules = ", ".join(f"{name or 'the module'} ({type(parts[name]).__name__})" for name in owners[:3])
        more = ", ..." if len(owners) > 3 else ""
        text = f"{modules}{more} keeps buffers that depend on the split."
        if norms:
            text = (
                f"{modules}{more} normalises over the micro-batch instead of the batch, and its running statistics depend on the split. "
                f"{self._execution.source.cure}"
            )
        self._add("running statistics", text, owners)

    def _sizes(self) -> list[list[int]]:
        """Halves, unequal parts, and small pieces with a short one at the end. Pieces of one item are avoided if possible."""
        n = self.probe.batch.size
        most = max(1, n * 3 // 4)
        small = self.micro_batch or max(min(2, n // 2), n // 6)
        pieces = [small] * (n // small) + ([n % small] if n % small else [])
        if self.micro_batch is None and len(pieces) > 2 and pieces[-1] == 1:
            pieces = [*pieces[:-2], pieces[-2] + 1]
        found = [[n // 2, n - n // 2], [most, n - most], pieces]
        return [sizes for index, sizes in enumerate(found) if len(sizes) > 1 and sizes not in found[:index]]

    def _whole(self) -> Probed:
        return self.probe.split([(0, self.probe.batch.size)])

    def _tried(self, name: str, whole: Probed, run: Callable[[], Probed]) -> SplitResult:
        try:
            return self._compare(name, whole, run())
        except Exception as error:  # raised by loss_fn, which has just worked on the whole batch
            return SplitResult(name, 0.0, {}, (), f"{type(error).__name__}: {error}")

    def _on_devices(self, whole: Probed) -> SplitResult:
        try:
            shares, loss, gradients = self._train()
        except Error:  # an error of this library: a device failed, or no trainer could run this
            raise
        except Exception as error:
            return SplitResult("the devices", 0.0, {}, (), f"{type(error).__name__}: {error}")
        name = ", ".join(f"{device} {items}" for device, items in shares.items() if items)
        return self._compare(name, whole, Probed(loss, gradients, whole.buffers))

    def _compare(self, name: str, whole: Probed, other: Probed) -> SplitResult:
        buffers = [
            key for key, value in whole.buffers.items() if not close(value, other.buffers.get(key), self.tolerance)
        ]
        differences = distances(whole.gradients, other.gradients, self._gradient_names())
        return SplitResult(name, loss_distance(whole, other), differences, tuple(buffers), None)

    def _gradient_names(self) -> list[str]:
        """The names of the gradients. A leaf outside of the module has the name that loss_fn has for it."""
        leaves = self.probe.outside.leaves
        if not leaves:
            return list(self.names)
        known = {id(one): name for name, one in known_tensors(self.probe.loss_fn, self.probe.module)}
        return [*self.names, *(f"{known.get(id(leaf), tuple(leaf.shape))} (not of the module)" for leaf in leaves)]

    def _add(self, kind: Kind, text: str, modules: Sequence[str] = ()) -> None:
        self.causes.append(Cause(kind, text, tuple(modules)))

    def _report(self, splits: list[SplitResult]) -> CheckReport:
        objective = self.probe.objective
        divided_by = "the sum of the weights" if objective.is_weighted else "the number of items"
        notes = (_DIVIDES.format(divided_by),) if objective.divides_sums else ()
        return CheckReport(self.probe.batch.size, tuple(splits), tuple(self.causes), self.tolerance, notes)


def _largest(splits: Sequence[SplitResult]) -> float:
    return max(split.largest for split in splits)
