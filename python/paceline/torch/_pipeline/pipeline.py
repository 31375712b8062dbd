"""`Pipeline`: the training step of a module that is cut into stages on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline.torch._batch.objective import Reduction
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.blocks import Blocks, blocks_of
from paceline.torch._pipeline.execution import PipelineExecution
from paceline.torch._pipeline.loop import PipelineWork
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.reports import PipelineReports, PipelineTracing
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.arguments import Memory, check_devices, memory_limits, named_devices
from paceline.torch._trainer.base import Trainer
from paceline.torch._trainer.parts import carried_out_by
from paceline.torch._trainer.works import Works

Schedule = Literal["auto", "gpipe", "1f1b"]


class Pipeline(Trainer):
    """Trains a module that is cut into stages."""

    _kind_of_reports = PipelineReports
    _kind_of_tracing = PipelineTracing
    _reports: PipelineReports

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
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"Pipeline: module is a {type(module).__name__}; a torch.nn.Module is needed.")
        check_devices(devices)
        found = blocks_of(module, blocks)
        local = devices if isinstance(devices, DeviceGroup) else DeviceGroup(named_devices(devices, module))
        owned = local is not devices
        try:
            places = Places(local, module, 600.0, "auto")
            limits = memory_limits(memory, local)
            planner = Planner(
                local,
                found,
                list(module.parameters()),
                limits,
                cuts=cuts,
                schedule=schedule,
                micro_batches=micro_batches,
            )
            works = PipelineWorks(local, places, planner)
            replicas = Replicas(module, _OneCopy(places), replicate)
            replicas.share()
            execution = PipelineExecution(local, module, places, replicas, found)
        except BaseException:
            if owned:
                local.close()
            raise
        self._assemble(module, local, owned=owned, works=works, execution=execution, reduction=reduction)

    report = carried_out_by("_reports", PipelineReports.report)
    plot_schedule = carried_out_by("_reports", PipelineReports.plot_schedule)


class _OneCopy(Places):
    """The places of a trainer whose devices share one copy of the module."""

    def __init__(self, base: Places) -> None:
        vars(self).update(vars(base))
        self.spaces = [base.home_space]

    def __len__(self) -> int:
        return 1


class PipelineWorks(Works):
    """The kinds of work of a pipeline."""

    def __init__(self, group: DeviceGroup, places: Places, planner: Planner) -> None:
        self._planner = planner
        options: dict[str, Any] = {"balance": "auto", "micro_batch": 0, "granularity": 1}
        super().__init__(group, places, [None] * len(group), options)

    def _new(self, options: dict[str, Any]) -> Workload:
        return PipelineWork(self._group, self._places, self._planner)
