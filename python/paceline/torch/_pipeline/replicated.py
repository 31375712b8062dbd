"""Replicas of pipelines: one batch in parts, each of which passes through a pipeline of its own on devices of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline import Device, DeviceGroup
from paceline.plan import BlockCost
from paceline.torch._batch.objective import Reduction
from paceline.torch._devices.lanes import SharedPlaces
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.arguments import check_on_host
from paceline.torch._pipeline.blocks import Blocks, blocks_of
from paceline.torch._pipeline.pipeline import PipelineWorks, StagesTrainer
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.replicas_execution import ReplicasExecution
from paceline.torch._pipeline.replicas_plan import ReplicasPlanner
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._trainer.arguments import Memory, memory_limits
from paceline.torch._trainer.proofs import prove_of


class PipelineReplicas(StagesTrainer):
    """Trains `module` on several pipelines at once, each with a part of every batch. `Layout.trainer` makes these.

    Each pipeline has a copy of the module, which shares the parameters, on devices of its own. The parts are as large as makes all pipelines
    finish at the same time. At the end of a step the gradients are added up, and committed if all pipelines have succeeded. So a gradient
    equals that of one device up to the order of floating-point sums.

    It has the calls of `Pipeline`. ``report()["pipeline"]["stages"]`` lists the stages of all pipelines, one after the other. Batch
    normalisation updates the running statistics with those of the pipeline that ran most items.

    Parameters
    ----------
    module, blocks, memory, reduction, replicate
        As for `Pipeline`.
    pipelines
        The devices of each pipeline. No device is in two of them.
    costs, speeds
        What `layout` has measured: of the blocks, and of all devices in order.
    """

    _planner: ReplicasPlanner

    def __init__(
        self,
        module: nn.Module,
        pipelines: Sequence[Sequence[Device]],
        *,
        costs: Sequence[BlockCost],
        speeds: Sequence[Sequence[float]],
        blocks: Blocks | None = None,
        memory: Memory | None = None,
        reduction: Reduction = "mean",
        replicate: Replicate | None = None,
    ) -> None:
        proves = prove_of(None)
        found = blocks_of(module, blocks)
        local = DeviceGroup([device for devices in pipelines for device in devices])
        groups: list[DeviceGroup] = []
        try:
            check_on_host("replicas of pipelines", local)
            groups += [DeviceGroup(list(devices)) for devices in pipelines]
            limits = iter(memory_limits("PipelineReplicas", memory, local))
            planners = []
            for group, own_speeds in zip(groups, speeds, strict=True):
                own_limits = [next(limits) for _ in group.devices]
                planner = Planner(
                    group, found, list(module.parameters()), own_limits, cuts=None, schedule="auto", micro_batches=None
                )
                planner.know(costs, own_speeds)
                planners.append(planner)
            self._planner = ReplicasPlanner(groups, planners)
            places = Places(local, module, 600.0, "auto")
            works = PipelineWorks(local, places, self._planner)
            replicas = LaneReplicas(module, SharedPlaces(places, len(groups)), replicate)
            execution = ReplicasExecution(local, module, places, replicas, found, groups)
        except BaseException:
            for group in (local, *groups):
                group.close()
            raise
        options: dict[str, Any] = {"reduction": reduction, "prove": proves}
        self._assemble(module, local, owned=True, works=works, execution=execution, **options)
