"""Whether a loss can be split at all: one batch, whole and in pieces, and what made the difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paceline import Error, InvalidArgument
from paceline.torch._batch import Batch
from paceline.torch._batch_norm import standing_still, uses_batch_statistics
from paceline.torch._check_fit import READINGS, couples_items, read_raw
from paceline.torch._check_report import Cause, CheckReport, SplitResult
from paceline.torch._dropout import dropout_names, without_dropout
from paceline.torch._execution import Execution, Workload
from paceline.torch._gradients import UserGradients
from paceline.torch._items import Items
from paceline.torch._objective import Objective, Reduction
from paceline.torch._places import RandomStates
from paceline.torch._probe import Probe, Probed, Span, distances, sizes_told, spans_of
from paceline.torch._run import LossFunction, TrainRun

# What the trainer's own devices made of the batch: sizes by device, objective, gradients.
Trained = tuple[dict[str, int], float, list[torch.Tensor | None]]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_TENSOR_CORES = 5e-3  # float32 on GPUs, where convolutions round to 10 bits by default


def tolerance_for(module: nn.Module, home: torch.device) -> float:
    """What differences come from rounding alone, by the least precise type that computes."""
    types = {parameter.dtype for parameter in module.parameters()}
    worst = max((_TOLERANCE.get(dtype, 0.0) for dtype in types), default=0.0) or _TOLERANCE[torch.float32]
    if torch.is_autocast_enabled(home.type):
        worst = max(worst, _TOLERANCE.get(torch.get_autocast_dtype(home.type), 0.0))
    return max(worst, _TENSOR_CORES) if home.type == "cuda" and torch.float32 in types else worst


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
    """Check on the replica that is where the module is; `work` is for this check alone."""
    execution.replicas.refresh()
    places, replicas = execution.places, execution.replicas
    replica = replicas.list[places.devices.index(places.home)]
    probe, by_cost = Probe(replica, places, batch, objective, loss_fn), None
    if costs is not None:
        plan = work.stepper.plan_items(costs)
        items = Items(list(plan.order), batch, places.pin, costs)
        spans = [span for span in pairwise(plan.bounds) if span[0] < span[1]]
        by_cost = Probe(replica, places, items.batch, items.objective(objective), loss_fn), spans

    def attempt() -> Trained:
        frame = execution.frame(work, batch, loss_fn, costs)
        mine = objective if frame.items is None else frame.items.objective(objective)
        run = TrainRun(frame, loss_fn=loss_fn, objective=mine, scale=None, names=replicas.names)
        loss, gradients, outcome = execution.train(work, run, keep=False)
        return dict(zip(places.names, outcome.items, strict=True)), loss.item(), gradients

    user = UserGradients(replicas)
    random = RandomStates(places)
    try:
        report = Check(
            probe,
            batch.size,
            replicas.names,
            objective,
            reduction,
            micro_batch,
            tolerance_for(execution.module, places.home) if tolerance is None else tolerance,
            lambda: execution.repeated(attempt),
            by_cost,
        ).run()
        user.check()
        return report
    finally:
        random.restore()
        user.restore()
        execution.drop_gradients()


class Check:
    """One check. `train` runs the batch on the trainer's devices and commits nothing; `by_cost` are the slices that costs give them."""

    def __init__(
        self,
        probe: Probe,
        items: int,
        names: Sequence[str],
        objective: Objective,
        reduction: Reduction,
        micro_batch: int | None,
        tolerance: float,
        train: Callable[[], Trained],
        by_cost: tuple[Probe, list[Span]] | None = None,
    ) -> None:
        if items < 2:
            raise InvalidArgument("check: the batch has one item, which cannot be split. Use a batch of at least 8.")
        self._probe = probe
        self._items = items
        self._names = names
        self._objective = objective
        self._reduction = reduction
        self._micro_batch = micro_batch
        self._tolerance = tolerance
        self._train = train
        self._by_cost = by_cost
        self._causes: list[Cause] = []

    def run(self) -> CheckReport:
        """Compare, and where there is a difference look for its causes, the certain ones first."""
        first = self._probe.split([(0, self._items)])
        with contextlib.ExitStack() as quiet:
            if first.drew and not self._silence(quiet):
                return self._report([])
            whole = self._whole()
            again = self._whole()
            if self._compare("again", whole, again).largest > self._tolerance:
                self._add(
                    "not repeatable",
                    "the same batch gave two results, from the same parameters, buffers and random generators: loss_fn or the module keeps "
                    "state in Python, or draws from elsewhere than PyTorch. Nothing can be said of splits.",
                )
                return self._report([])
            splits = [self._split(whole, sizes) for sizes in self._sizes()]
            self._explain(whole, splits)
            if self._by_cost is not None:
                splits.append(self._dealt_out(whole, *self._by_cost))
        # With dropout its masks differ; what was found on the way differs there, too.
        if not first.drew:
            splits.append(self._on_devices(whole))
            if splits[-1].largest > self._tolerance and not self._causes:
                self._add(
                    "devices",
                    "the trainer's devices gave another result than the same slices one after the other: loss_fn or the module shares "
                    "state between the threads of the devices.",
                )
        return self._report(splits)

    def _dealt_out(self, whole: Probed, probe: Probe, spans: list[Span]) -> SplitResult:
        """The slices that the devices are given by costs, one after the other: items from anywhere in the batch, by cost."""
        result = self._tried(f"by cost, {sizes_told([end - begin for begin, end in spans])}", whole, probe, spans)
        if result.largest > self._tolerance and not self._causes:
            raised = f" It raised {result.error}." if result.error is not None else ""
            self._add(
                "order",
                "slices of neighbouring items give the result of the whole batch, and items dealt out by cost, in another order, do not: loss_fn or "
                f"the module goes by the place of an item in the batch, or pairs it with its neighbours.{raised} Put what belongs to an item "
                "into the batch, or step without cost=.",
            )
        return result

    def _silence(self, quiet: contextlib.ExitStack) -> bool:
        """Whether switching dropout off leaves nothing random."""
        dropouts = dropout_names(self._probe.module)
        quiet.enter_context(without_dropout(self._probe.module))
        named = f" ({', '.join(dropouts[:3])}{', ...' if len(dropouts) > 3 else ''})" if dropouts else ""
        if self._whole().drew:
            self._add(
                "random draws",
                "loss_fn or the module draws random numbers outside of dropout. Another split draws others, so that "
                "nothing can be compared. Draw them before the step and pass them in the batch.",
                dropouts,
            )
            return False
        self._add(
            "random draws",
            f"dropout{named} draws other masks for another split, as it does in every step. The rest was compared without it.",
            dropouts,
        )
        return True

    def _explain(self, whole: Probed, splits: list[SplitResult]) -> None:
        self._note_buffers(splits)
        if max(split.largest for split in splits) <= self._tolerance:
            return
        norms = [part for part in self._probe.module.modules() if uses_batch_statistics(part)]
        with standing_still(norms):
            if norms:
                calm = self._whole()
                splits = [self._split(calm, sizes) for sizes in self._sizes()]
                if max(split.largest for split in splits) <= self._tolerance:
                    return
            errors = [split for split in splits if split.error is not None]
            if errors:
                self._add(
                    "error",
                    f"loss_fn works on the whole batch and raises on a slice ({errors[0].name}): {errors[0].error}. It must take any number of items.",
                )
                return
            self._read()

    def _read(self) -> None:
        """From what ``loss_fn`` returns by itself: how that of the whole is made of that of two parts."""
        whole = self._probe.raw([(0, self._items)]).gradients
        # Several cuts: at one of them the two parts may have as much of everything as they have items.
        for cut in sorted({sizes[0] for sizes in self._sizes()} | {max(1, self._items // 3)}):
            parts = [self._probe.raw([span]).gradients for span in ((0, cut), (cut, self._items))]
            weight = self._objective.share(0, cut)
            reading = read_raw(whole, *parts, items=cut / self._items, weight=weight, rounding=self._tolerance)
            text = READINGS.get((reading, self._reduction))
            if text is not None:
                self._add(*text)
                return
        try:
            coupled = couples_items(self._probe, self._items, self._tolerance)
        except Exception:  # the batch cannot be put together anew, or loss_fn refuses it
            coupled = None
        if coupled is None:
            self._add("unknown", "the items of the batch influence each other, or their number influences the result.")
        elif coupled:
            self._add(
                "coupled items",
                "the loss of an item depends on which other items are with it, as in contrastive and pairwise losses, or by statistics "
                "over the batch. Such a loss is no sum over items, and no split of it is exact.",
            )
        else:
            self._add(
                "batch size",
                "the result depends on how many items are in a slice: code that reads the batch size, or a term that is counted once for "
                "each slice, such as a regulariser in a sum. Divide by what belongs to the item, or add such a term to the gradients after the step.",
            )

    def _note_buffers(self, splits: list[SplitResult]) -> None:
        changed = sorted({name for split in splits for name in split.buffers})
        norms = [name for name, part in self._probe.module.named_modules() if uses_batch_statistics(part)]
        owners = list(dict.fromkeys([*norms, *(name.rpartition(".")[0] for name in changed)]))
        if not owners:
            return
        parts = dict(self._probe.module.named_modules())
        told = ", ".join(f"{name or 'the module'} ({type(parts[name]).__name__})" for name in owners[:3])
        more = ", ..." if len(owners) > 3 else ""
        normalising = (
            "normalises over the micro-batch instead of the batch, and its running statistics"
            if norms
            else "keeps buffers that"
        )
        self._add(
            "running statistics",
            f"{told}{more} {normalising} depend on the split."
            + (" Use GroupNorm or LayerNorm, or evaluation mode for these." if norms else ""),
            owners,
        )

    def _sizes(self) -> list[list[int]]:
        """Halves, unequal parts, and small pieces with a short one at the end; without pieces of one item where that can be."""
        n = self._items
        most = max(1, n * 3 // 4)
        small = self._micro_batch or max(min(2, n // 2), n // 6)
        pieces = [small] * (n // small) + ([n % small] if n % small else [])
        if self._micro_batch is None and len(pieces) > 2 and pieces[-1] == 1:
            pieces = [*pieces[:-2], pieces[-2] + 1]
        found = [[n // 2, n - n // 2], [most, n - most], pieces]
        return [sizes for index, sizes in enumerate(found) if len(sizes) > 1 and sizes not in found[:index]]

    def _whole(self) -> Probed:
        return self._probe.split([(0, self._items)])

    def _split(self, whole: Probed, sizes: list[int]) -> SplitResult:
        return self._tried(sizes_told(sizes), whole, self._probe, spans_of(sizes))

    def _tried(self, name: str, whole: Probed, probe: Probe, spans: Sequence[Span]) -> SplitResult:
        try:
            return self._compare(name, whole, probe.split(spans))
        except Exception as error:  # of loss_fn, which just worked on the whole batch
            return SplitResult(name, 0.0, {}, (), f"{type(error).__name__}: {error}")

    def _on_devices(self, whole: Probed) -> SplitResult:
        try:
            shares, loss, gradients = self._train()
        except Error:  # ours: of a device, or of what no trainer could run
            raise
        except Exception as error:
            return SplitResult("the devices", 0.0, {}, (), f"{type(error).__name__}: {error}")
        name = ", ".join(f"{device} {items}" for device, items in shares.items() if items)
        return SplitResult(
            name, _relative(whole.loss, loss), distances(whole.gradients, gradients, self._names), (), None
        )

    def _compare(self, name: str, whole: Probed, other: Probed) -> SplitResult:
        buffers = [
            key
            for key, value in whole.buffers.items()
            if key not in other.buffers or not _close(value, other.buffers[key], self._tolerance)
        ]
        differences = distances(whole.gradients, other.gradients, self._names)
        return SplitResult(name, _relative(whole.loss, other.loss), differences, tuple(buffers), None)

    def _add(self, kind: Any, text: str, modules: Sequence[str] = ()) -> None:
        self._causes.append(Cause(kind, text, tuple(modules)))

    def _report(self, splits: list[SplitResult]) -> CheckReport:
        return CheckReport(self._items, tuple(splits), tuple(self._causes), self._tolerance)


def _relative(wanted: float, got: float) -> float:
    if wanted != wanted or got != got:
        return float("inf")
    return abs(got - wanted) / max(abs(wanted), 1e-300) if got != wanted else 0.0


def _close(wanted: torch.Tensor, got: torch.Tensor, tolerance: float) -> bool:
    if wanted.shape != got.shape or not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(wanted, got)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return torch.allclose(wanted, got, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
