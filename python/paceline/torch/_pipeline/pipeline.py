"""`Pipeline`: the training step of a module that is cut into stages on the devices of one machine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline._observe import check_observe
from paceline._words import require, require_one_of
from paceline.torch._batch.objective import Reduction
from paceline.torch._devices.places import Places, places_of
from paceline.torch._devices.stages import StagePlaces
from paceline.torch._pipeline.blocks import Blocks, blocks_of
from paceline.torch._pipeline.loop import PipelineWork
from paceline.torch._pipeline.materialise import Init, unfilled
from paceline.torch._pipeline.placed_source import PlacedStages
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.reports import PipelineReports, PipelineTracing
from paceline.torch._pipeline.source import Stages
from paceline.torch._pipeline.stages_proof import StageProofs
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._run.execution import Execution
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.arguments import (
    Memory,
    check_count,
    check_devices,
    check_module,
    group_of,
    is_whole,
    memory_limits,
)
from paceline.torch._trainer.base import Trainer
from paceline.torch._trainer.observed import show
from paceline.torch._trainer.parts import carried_out_by
from paceline.torch._trainer.proofs import Prove, prove_of
from paceline.torch._trainer.works import Works


def check_cuts(cuts: Any, blocks: int) -> None:
    """Raise if cuts are not the first blocks of stages."""
    if cuts is None:
        return
    is_list = isinstance(cuts, Sequence) and not isinstance(cuts, str)
    require(is_list, "Pipeline", "cuts", cuts, "give a list of the first blocks of the stages: [0, 3]")
    if (
        not all(map(is_whole, cuts))
        or not cuts
        or cuts[0] != 0
        or any(b <= a for a, b in pairwise(cuts))
        or cuts[-1] >= blocks
    ):
        raise InvalidArgument(
            f"Pipeline: cuts is {list(cuts)!r} for {blocks} blocks. Give the number of the first block of each stage, beginning with 0, each "
            f"greater than the one before and less than {blocks}."
        )


def check_whole_gpus(group: DeviceGroup) -> None:
    """Raise for parts of GPUs."""
    for device in group.devices:
        if device.part is not None:
            raise InvalidArgument(
                f"Pipeline: {device.name} is a part of a GPU. A tensor that a stage reaches by closure may come from another part. It lies in the "
                "same memory, so no operator fails, and nothing tells that this part has to wait for it. Use whole GPUs, or DataParallel on parts."
            )


def check_on_host(call: str, group: DeviceGroup) -> None:
    """Raise if a device is a GPU."""
    gpus = [device.name for device in group.devices if device.kind != "host"]
    if gpus:
        raise InvalidArgument(
            f"{call}: {gpus[0]} is a GPU, and this runs on host devices only so far. Use Pipeline or DataParallel on GPUs."
        )


Schedule = Literal["auto", "gpipe", "1f1b"]
_PLAN = "report()['pipeline'], explain() and plot_schedule() have the plan"
_MISSING = {  # calls of `DataParallel` that trainers with stages do not have, and why
    "batch": "its runs would be planned one by one, and stages hold the activations of one loss. Use loss() for each loss, or DataParallel.",
    "write_ledger": f"cuts and schedules are not decisions about items, which a ledger holds. {_PLAN}.",
    "replay_claims": "each device runs all items, so there is nothing that a device claims. The same cuts= and micro_batches= repeat a run.",
    "state_dict": "the weights are module.state_dict(), and the state of the training run is training_state().",
    "load_state_dict": "the weights are module.load_state_dict(state), and the state of the training run is load_training_state(state).",
}


class StagesTrainer(Trainer):
    """What trainers with stages have in common."""

    _kind_of_reports = PipelineReports
    what_if = carried_out_by("_reports", PipelineReports.what_if)
    _kind_of_proofs = StageProofs
    _kind_of_tracing = PipelineTracing
    _reports: PipelineReports
    _planner: Any

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise AttributeError(f"{type(self).__name__} has no {name}(): {_MISSING[name]}")
        return object.__getattribute__(self, name)  # which raises as ever, or once more what a property has raised

    report = carried_out_by("_reports", PipelineReports.report)
    plot_schedule = carried_out_by("_reports", PipelineReports.plot_schedule)

    def optimizer(
        self, cls: type[torch.optim.Optimizer], parameters: Iterable[Any] | None = None, /, **options: Any
    ) -> torch.optim.Optimizer:
        self._planner.optimized_by(cls, options)
        made = super().optimizer(cls, parameters, **options)
        source = weakref.ref(self._execution.source)

        def before_load(optimizer: Any, state: Any) -> None:
            owner = source()
            if owner is not None:
                owner.fill()  # a state goes to where its parameters are

        made.register_load_state_dict_pre_hook(before_load)
        return made

    optimizer.__doc__ = Trainer.optimizer.__doc__


class Pipeline(StagesTrainer):
    """Trains `module` cut into stages on several devices of this machine, with exactly the gradient of one.

    For a module that fits on no single device, or whose parameters take long to send. Where the module fits, `DataParallel` is usually
    faster: stages wait for each other at the beginning and at the end of a step. `layout` measures which way is faster.

    The module stays as it is, and `loss_fn` is written as for one device. Its *blocks*, such as the layers of a transformer, are divided among
    the devices: a run of neighbouring blocks is a *stage*. `step` cuts the batch into micro-batches, and each stage works on another one.
    The first two or three steps run one micro-batch after the other and measure the blocks and the devices. From then on the cuts, the order of the
    devices, the number of micro-batches and how many of them are in flight are planned for the least time within the devices' memory, and
    planned again when a device becomes faster or slower.

    Parameters
    ----------
    module
        The module to train. Its forward calls its blocks one after the other, each once. What lies between them, before and after may be any
        code: masks, caches, tied weights and long skips are allowed. As with `DataParallel` the devices run a copy that shares the parameters.
    devices
        As for `DataParallel`, but for parts of GPUs. Devices that do not pay are left out. Stages on GPUs have not run on a GPU yet.
    blocks
        Where the module may be cut: the name of a list of modules in it (``"transformer.h"``), or a list of modules in the order of the forward.
        None: the parts of one class in lists and sequences that have most of the parameters, with parts of other classes beside them that have at
        least a quarter as many: the layers of encoder and decoder. On host devices the first call finds out in which order the forward calls them.
    cuts
        The first blocks of the stages, in place of planned cuts: ``[0, 6, 9]`` for three stages.
    schedule
        ``"gpipe"``: all forwards, then all backwards. ``"1f1b"``: one forward, one backward, after a warm-up that is planned. ``"auto"``: the
        faster one that fits.
    micro_batches
        How many micro-batches a batch is cut into, in place of a planned number.
    memory
        How much memory each device has for its stage: bytes, or a fraction of its own, for all or by name. None: what is free on a GPU, less
        a sixteenth of all; no limit on the host. It holds the parameters of the
        stage with their gradients and the optimizer's state, and what is saved of each micro-batch in flight.
    reduction
        As for `DataParallel`.
    replicate
        As for `DataParallel`.
    init
        ``init(name, part)`` fills a part of the module whose parameters or buffers are on the device ``"meta"``, after memory was allocated for
        it: a block, or a module outside of the blocks, which fills what it has itself. `name` is its name in the module. For modules that were
        made without memory. Tied parameters stay tied; `init` fills them once for each part that has them. Or the path of a ``state_dict`` that
        ``torch.save`` has written. The module is filled in the first call that runs it, loads it or saves it, and `init` is called then. If that is a
        step on host devices, blocks are measured before: one after the other, each with memory for its turn only and with values that are not
        `init`'s. Then the stages are planned, and only then filled. Loading the state of an optimizer that `optimizer` has made fills the module, too;
        load that of another one after the first step. With GPUs the module is filled in host memory at once.
    group
        Only ``"alone"``: stages are devices of one process.
    prove
        Whether `step`, `loss` and `predict` prove that their result does not depend on the number of micro-batches. Before the first step of each kind of work, and
        before its steps 1,000, 10,000 and so on, the batch passes through the stages twice, one micro-batch at a time: as many as planned, and about twice
        as many. Both runs are thrown away after loss, extras, gradients, buffers, and parameters that a forward writes were compared. ``"warn"``,
        ``"raise"``, False and None as for `DataParallel`. Of a `predict` the outputs are compared. Not proved: steps of modules without memory before the
        first one has filled them, and ``micro_batches=1``, which is the whole batch.
    observe
        As for `DataParallel`.

    Raises
    ------
    InvalidArgument
        For arguments that cannot be used, and for modules that cannot be cut: without blocks, or compiled as a whole.

    Notes
    -----
    *Exact* means: the gradient of a step is that of plain accumulation of the same micro-batches, in order, on one device, bit for bit
    on host devices, wherever the cuts lie, whatever the order of the devices and the number of micro-batches in flight.
    ``report()["micro_batches"]`` has their sizes. So batch normalisation, too, does what it does in plain accumulation (but for its running
    statistics inside of activation checkpointing, which updates them again in the backward). If the step draws
    random numbers, it draws those that ``Pipeline(devices=["host:0"])`` draws. Autocast casts at each use, as with ``cache_enabled=False``.

    Several micro-batches are under way at once. So what a forward leaves for the next one is exact within one stage only: a buffer that one
    stage writes and another one reads, or a count in an attribute, has what it had for some earlier micro-batch. The steps that measure blocks
    warn of attributes that a forward reads and changes, and of buffers that several blocks share.

    `step` refuses a forward that calls a block twice or out of order, and activation checkpointing over more than one stage (checkpoint each
    block by itself, with ``use_reentrant=False``). Compile blocks (``block.compile()``), not the module.

    If memory runs out, the step runs again with fewer micro-batches in flight, then with other cuts. After 64 steps, what did not fit is tried
    again, since another program may have used the memory; if it still does not fit, the next try comes after twice as many steps.

    With GPUs the parameters, buffers, gradients and optimizer states of a stage lie on its device until `close`, in the same objects. So only the
    trainer can run the module until then. The loss and what `predict` returns are where the module was. Exact then means: to the bit on GPUs of
    one architecture whose kernels are deterministic, but for random draws, since each GPU has a generator of its own.

    Examples
    --------
    >>> with Pipeline(model, devices="auto") as trainer:                         # doctest: +SKIP
    ...     optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-4)
    ...     for batch in loader:
    ...         loss = trainer.step(lambda module, b: loss_fn(module(b[0]), b[1]), batch)
    ...         optimizer.step(); optimizer.zero_grad()
    """

    _planner: Planner

    def __init__(
        self,
        module: nn.Module,
        devices: str | Sequence[str | Device | torch.device] | DeviceGroup = "auto",
        *,
        blocks: Blocks | None = None,
        cuts: Sequence[int] | None = None,
        schedule: Schedule = "auto",
        micro_batches: int | None = None,
        memory: Memory | None = None,
        reduction: Reduction = "mean",
        replicate: Replicate | None = None,
        init: Init | None = None,
        group: Literal["alone"] = "alone",
        prove: Prove | None = None,
        observe: Literal["socket"] | None = None,
    ) -> None:
        check_module("Pipeline", module)
        check_devices("Pipeline", devices)
        check_observe("Pipeline", observe)
        proves = prove_of(prove)
        require_one_of("Pipeline", "reduction", reduction, *get_args(Reduction))
        if group != "alone":
            raise InvalidArgument(
                "Pipeline: group=, and stages are devices of one process: several processes would sum the gradients of parameters that lie on "
                "different devices in each. Use DataParallel(group=) for several machines, or one process."
            )
        require_one_of("Pipeline", "schedule", schedule, *get_args(Schedule))
        if micro_batches is not None:
            check_count("Pipeline", "micro_batches", micro_batches)
        found = blocks_of(module, blocks)
        check_cuts(cuts, len(found))
        proves = None if micro_batches == 1 else proves  # as on one device, whatever the loss is
        without_memory = unfilled(module, found, init)
        local = group_of("Pipeline", devices, module, brings=False)
        try:
            check_whole_gpus(local)
            if cuts is not None and len(cuts) > len(local):
                raise InvalidArgument(
                    f"Pipeline: cuts is {list(cuts)!r}, and each stage needs a device of its own: there are {len(local)} devices. Leave out cuts, "
                    "or name more devices; several host devices may share a core."
                )
            on_gpus = any(device.kind == "cuda" for device in local.devices)
            at_end = []
            if without_memory is not None and on_gpus:
                at_end.append(without_memory.fill())
                without_memory = None
            known = nn.Module() if without_memory is not None else module  # what has to be where the devices are
            places = StagePlaces(local, module) if on_gpus else places_of(local, known)
            limits = memory_limits("Pipeline", memory, local)
            if isinstance(places, StagePlaces):
                free = places.free_bytes(module)
                limits = [one if given is None else given for given, one in zip(limits, free, strict=True)]
            planner = Planner(
                local,
                found,
                list(module.parameters()),
                limits,
                cuts=cuts,
                schedule=schedule,
                micro_batches=micro_batches,
                **({"link": places.slowest_link} if isinstance(places, StagePlaces) else {}),
            )
            planner.finds_order = blocks is None and not on_gpus
            self._planner = planner
            works = PipelineWorks(local, places, planner)
            replicas = LaneReplicas(module, places, replicate)
            self._stages = (
                PlacedStages(local, module, places, replicas, found)
                if isinstance(places, StagePlaces)
                else Stages(local, module, places, replicas, found)
            )
            self._stages.unfilled, self._stages.at_end = without_memory, at_end
            execution = Execution(module, places, replicas, self._stages)
        except BaseException:
            local.close()
            raise
        options: dict[str, Any] = {"reduction": reduction, "prove": proves}
        self._assemble(module, local, works=works, execution=execution, **options)
        show(self, observe)


class PipelineWorks(Works):
    """The kinds of work of a pipeline."""

    def __init__(self, group: DeviceGroup, places: Places, planner: Any) -> None:
        self._planner = planner
        options: dict[str, Any] = {"balance": "auto", "micro_batch": 0, "granularity": 1}
        super().__init__(group, places, [None] * len(group), options)

    def of(self, kind: str, *, whole: bool = False) -> Workload:
        work = super().of(kind, whole=whole)
        if kind == "predict":
            cast(PipelineWork, work).predicts = True
        return work

    def _new(self, options: dict[str, Any], *, limited: bool = True) -> Workload:
        return PipelineWork(self._group, self._places, self._planner)
