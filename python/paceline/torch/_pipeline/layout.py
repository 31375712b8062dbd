"""`layout`: which way to train a module on these devices, from what its blocks were measured to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument, OutOfMemory
from paceline.torch._batch.batch import BatchDim
from paceline.torch._batch.objective import Reduction, Weight
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._pipeline.blocks import Blocks, blocks_of
from paceline.torch._pipeline.loop import PipelineWork
from paceline.torch._pipeline.materialise import Init, unfilled
from paceline.torch._pipeline.pipeline import Pipeline
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.plans import plan_of
from paceline.torch._pipeline.replicas_source import PipelineReplicas
from paceline.torch._replicas.copies import Replicate
from paceline.torch._run.call import Asked
from paceline.torch._run.train_run import LossFunction, TrainRun
from paceline.torch._trainer.arguments import Memory, check_trains
from paceline.torch._trainer.base import Trainer
from paceline.torch._trainer.trainer import DataParallel

Kind = Literal["data parallel", "pipeline", "replicas of pipelines"]


@dataclass(frozen=True)
class Candidate:
    """One way of laying out a module on devices, with its predicted step.

    Attributes
    ----------
    kind
        ``"data parallel"``: the whole module on each device that takes part. ``"pipeline"``: one pipeline. ``"replicas of pipelines"``: several
        pipelines on devices of their own.
    fits
        Whether it fits into the devices' memory. If not, `reason` says what is missing, and there are no numbers.
    runnable
        False: planned only. Replicas of pipelines cannot run on GPUs yet.
    seconds, reduction_seconds
        Of a step, without the optimizer, and the part of it in which gradients are reduced while nothing else runs.
    bubble
        The part of the computing time in which the devices that take part wait, between 0 and 1.
    bytes, items
        By device that takes part: what it needs of its memory, and how many items of the batch it runs (in a pipeline: those of the pipeline).
    stages
        Of pipelines, by device: the first and the last of its blocks, by number.
    reason
        The numbers that decide, in words.
    """

    kind: Kind
    fits: bool
    runnable: bool
    reason: str
    seconds: float = 0.0
    reduction_seconds: float = 0.0
    bubble: float = 0.0
    bytes: Mapping[str, int] = field(default_factory=dict)
    items: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Layout:
    """The ways of training a module on devices, the best first. ``print`` shows them as a table.

    Attributes
    ----------
    candidates
        All ways. Those that fit stand first, the fastest of them first. Among ways within 1 % the simplest stands first.
    """

    def __init__(
        self, module: nn.Module, devices: DeviceGroup | list[Device], options: dict[str, Any], planner: Planner,
        items: int, found: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        self._module, self._devices, self._options, self._items = module, devices, options, items
        self._names, self._limits = [device.name for device in _all_of(devices)], planner.limits
        self._costs, self._speeds = planner.known
        self._plans = {one["kind"]: [plan_of(plan) for plan in one["pipelines"]] for one in found}
        self.candidates = tuple(self._candidate(one) for one in found)

    @property
    def best(self) -> Candidate:
        """The first candidate that fits and can run."""
        return next(one for one in self.candidates if one.fits and one.runnable)

    def trainer(self, kind: Kind | None = None) -> Trainer:
        """Make the trainer of a candidate, on the devices that take part in it. It begins with what was measured.

        Parameters
        ----------
        kind
            Default: that of the best one that can run.

        Returns
        -------
        DataParallel, Pipeline or PipelineReplicas
            ``"data parallel"`` gets of `memory` what the optimizer's state leaves.

        Raises
        ------
        InvalidArgument
            For a kind that does not fit, that cannot run, or that there is not.
        """
        if kind is not None and kind not in get_args(Kind):
            raise InvalidArgument(
                f"trainer: there is no layout {kind!r}; there are {', '.join(map(repr, get_args(Kind)))}."
            )
        chosen = self.best if kind is None else next(one for one in self.candidates if one.kind == kind)
        if not chosen.fits:
            raise InvalidArgument(f"trainer: {chosen.kind} does not fit: {chosen.reason}. Choose {self.best.kind!r}.")
        if chosen.kind == "pipeline":
            trainer = Pipeline(self._module, self._devices, **self._options)
            trainer._planner.begin_with(self._costs, self._speeds)
            return trainer
        init = self._options["init"]
        without_memory = unfilled(self._module, blocks_of(self._module, self._options["blocks"]), init)
        if without_memory is not None:
            without_memory.fill()
        devices = _all_of(self._devices)
        named = zip(self._names, self._limits, strict=True)
        limits = {name: limit for name, limit in named if limit is not None and name in chosen.bytes}
        options = {name: self._options[name] for name in ("reduction", "replicate")}
        if chosen.kind == "data parallel":
            state = sum(cost.parameter_bytes for cost in self._costs)
            state -= sum(one.nbytes * (2 if one.requires_grad else 1) for one in self._module.parameters())
            memory = {name: limit - state for name, limit in limits.items()} or None
            all_take_part = len(chosen.items) == len(devices)
            part = self._devices if all_take_part else [one for one in devices if one.name in chosen.items]
            return DataParallel(self._module, part, memory=memory, group="alone", **options)
        orders = [plan.order for plan in self._plans[chosen.kind]]
        return PipelineReplicas(
            self._module,
            [[devices[index] for index in order] for order in orders],
            costs=self._costs,
            speeds=[[self._speeds[index] for index in order] for order in orders],
            blocks=self._options["blocks"],
            memory=limits or None,
            **options,
        )

    def _candidate(self, found: dict[str, Any]) -> Candidate:
        if not found["fits"]:
            return Candidate(found["kind"], False, True, found["reason"])

        def by_device(values: Sequence[Any]) -> dict[str, Any]:
            takes_part = [bytes_ > 0 for bytes_ in found["bytes"]]
            return {name: value for name, value, part in zip(self._names, values, takes_part, strict=True) if part}

        stages = {
            self._names[device]: (first, end - 1)
            for plan in self._plans[found["kind"]]
            for device, first, end in zip(plan.order, plan.cuts, [*plan.cuts[1:], len(self._costs)], strict=True)
        }
        figures: dict[str, Any] = {
            name: found[name] for name in ("kind", "reason", "seconds", "reduction_seconds", "bubble")
        }
        figures |= {name: by_device(found[name]) for name in ("bytes", "items")}
        return Candidate(fits=True, runnable=found.get("runnable", True), stages=stages, **figures)

    def __str__(self) -> str:
        header = ["", "ms a step", *self._names]
        rows = [[one.kind, _time(one), *(self._cell(one, name) for name in self._names)] for one in self.candidates]
        limits = ["no limit" if limit is None else _size(limit) for limit in self._limits]
        table = [header, *rows, ["memory", "", *limits]]
        widths = [max(len(row[column]) for row in table) for column in range(len(header))]
        lines = [f"{type(self._module).__name__}: {len(self._costs)} blocks, {self._items} items a step"]
        for row in table:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        lines.append("")
        for one in self.candidates:
            verdict = "best" if one is self.best else "does not fit" if not one.fits else ""
            verdict = "planned" if one.fits and not one.runnable else verdict
            lines.append(f"{one.kind}{f' ({verdict})' if verdict else ''}: {one.reason}")
        return "\n".join(lines)

    def _cell(self, one: Candidate, name: str) -> str:
        if name not in one.bytes:
            return "-"
        parts = [_size(one.bytes[name])]
        if name in one.stages:
            first, last = one.stages[name]
            parts.append(f"block {first}" if first == last else f"blocks {first}-{last}")
        if one.kind != "pipeline":
            parts.append(f"{one.items[name] / self._items:.0%} of items")
        return ", ".join(parts)


def _time(one: Candidate) -> str:
    return f"{1e3 * one.seconds:.1f}" if one.fits else "does not fit"


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def layout(
    module: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    devices: str | Sequence[str | Device | torch.device] | DeviceGroup = "auto",
    *,
    weight: Weight | None = None,
    blocks: Blocks | None = None,
    memory: Memory | None = None,
    reduction: Reduction = "mean",
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    replicate: Replicate | None = None,
    init: Init | None = None,
    collate: Collate | None = None,
    batch_dim: BatchDim = 0,
    split: Split | None = None,
) -> Layout:
    """Measure the blocks of a module, and predict which way of training it on these devices is the fastest one that fits.

    The batch runs three times as the first steps of a `Pipeline` do (twice on one device), one micro-batch after the other. What blocks and
    devices take then predicts a step of data parallel, of a pipeline, and of replicas of pipelines.

    Leaves no trace: gradients (also of parameters outside of the module), buffers, the module's attributes and random generators are as
    before. What `loss_fn` changes in Python stays changed.

    Parameters
    ----------
    module, devices, blocks, replicate, init
        As for `Pipeline`.
    loss_fn, batch, weight, collate, batch_dim, split
        As for `step`. Use a batch of the size that you train with: how many items there are decides.
    memory
        How much memory each device has for everything: parameters, gradients, the optimizer's state, and what is saved of micro-batches.
        Bytes, or a fraction of its own, for all or by name. None: as for `Pipeline`.
    reduction
        As for `DataParallel`.
    optimizer
        The class of the optimizer that will train the module. Its state takes memory.

    Returns
    -------
    Layout
        ``print`` shows the table, ``trainer()`` makes the trainer, `candidates` are for programs.

    Raises
    ------
    OutOfMemory
        If no way fits. The message names the device that comes closest, its bytes, and what would help.
    InvalidArgument
        As `Pipeline` and `step`.
    Exception
        What `loss_fn` raised.

    Examples
    --------
    >>> found = layout(model, loss_fn, batch, memory=8 * 2**30)                   # doctest: +SKIP
    >>> print(found)                                                             # doctest: +SKIP
    >>> trainer = found.trainer()                                                # doctest: +SKIP
    """
    options: dict[str, Any] = {"memory": memory, "reduction": reduction, "replicate": replicate, "init": init}
    with Pipeline(module, devices, blocks=blocks, **options) as pipeline:
        planner, group = pipeline._planner, pipeline.group
        planner.optimized_by(optimizer, {})
        check_trains("layout", loss_fn)
        items = _measure(pipeline, loss_fn, batch, Options(weight, None, None, None, collate, batch_dim, split))
        found = planner.ways(items)
        if any(device.kind != "host" for device in group.devices):
            found = [_without_replicas_of_pipelines(one) for one in found]
        if not any(one["fits"] and one.get("runnable", True) for one in found):
            raise OutOfMemory(f"layout: {next(one['reason'] for one in found if one['kind'] == 'pipeline')}")
        given = devices if isinstance(devices, DeviceGroup) else list(group.devices)
        options["blocks"] = [block.module for block in planner.blocks]
        return Layout(module, given, options, planner, items, found)


def _all_of(devices: DeviceGroup | list[Device]) -> list[Device]:
    return list(devices.devices) if isinstance(devices, DeviceGroup) else devices


def _without_replicas_of_pipelines(found: dict[str, Any]) -> dict[str, Any]:
    """The same way, planned only if it has copies of the parameters on several GPUs, which nothing brings up to date."""
    if found["kind"] != "replicas of pipelines" or not found["fits"]:
        return found
    return {**found, "runnable": False, "reason": f"cannot run on GPUs yet; {found['reason']}"}


def _measure(pipeline: Pipeline, loss_fn: LossFunction, batch: Any, options: Options) -> int:
    """Run the steps that measure, and commit nothing. Returns the number of items."""
    execution, planner, work = pipeline._execution, pipeline._planner, pipeline._works.steps
    with pipeline._lifetime.between_steps("layout"):
        whole, objective, _ = pipeline._training.prepared(batch, options)
        execution.places.begin(whole)

        if pipeline._stages.unfilled is not None:
            assert isinstance(work, PipelineWork)
            pipeline._stages.measure(work, whole, loss_fn)
            return whole.size

        executor = partial(TrainRun, loss_fn=loss_fn, objective=objective)
        random = RandomStates(execution.places)
        try:
            while planner.measures:
                execution.train(Asked(work, whole, loss_fn, executor), keep=False)
                assert planner.measured is not None
                planner.add(planner.measured)
        finally:
            random.restore()
    return whole.size
