"""Runs one call of a pipeline of which some devices are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from torch import nn

from paceline import DeviceGroup
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.stages import StageLanePlaces, StagePlaces
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.execution import PipelineExecution
from paceline.torch._pipeline.placed import PlacedPassage
from paceline.torch._pipeline.placement import Placement
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.replicas import LaneReplicas

_ELSEWHERE = "Expected all tensors to be on the same device"  # PyTorch's words, for which it has no type


class PlacedExecution(PipelineExecution):
    """A `PipelineExecution` whose stages have memories of their own."""

    places: StagePlaces
    cannot_check = "it runs the module on one device as well, and its stages are on several. Check it with devices=['host:0', 'host:1'] before."

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: StagePlaces, replicas: LaneReplicas, blocks: list[Block]
    ) -> None:
        super().__init__(group, module, places, replicas, blocks)
        self._placement = Placement(module, blocks, places)
        self._strays = False  # whether an operator has failed since a tensor was elsewhere

    def _place(self, plan: PipelinePlan, fn: Callable[..., Any], *, hooks: bool) -> None:
        if self._placement.follow(plan):
            self.replicas.refresh(fn, hooks=hooks)

    def _places_of(self, plan: PipelinePlan) -> LanePlaces:
        return StageLanePlaces(self.places, plan.lanes, plan.order[-1])

    def _passage_of(self, plan: PipelinePlan) -> PlacedPassage:
        outside = outside_of(self.replicas.named_modules, self.blocks)
        replica = self.replicas.list[0]
        strays = self._strays or self._comes_back(plan)
        return PlacedPassage(self.blocks, plan, replica, self.places, self._placement, outside, strays=strays)

    def _comes_back(self, plan: PipelinePlan) -> bool:
        """Whether stages of one memory have another one between them. No operator fails there on a tensor that has a later copy."""
        memories = [memory for memory, _ in groupby(self.places.devices[device] for device in plan.order)]
        return len(set(memories)) < len(memories)

    def _tries_again(self, error: BaseException) -> bool:
        if self._strays or not isinstance(error, RuntimeError) or _ELSEWHERE not in str(error):
            return False
        self._strays = True
        return True

    def release(self) -> None:
        super().release()
        self._placement.home()


def outside_of(modules: list[tuple[str, nn.Module]], blocks: list[Block]) -> list[tuple[str, nn.Module]]:
    """The modules with tensors of their own that may be called on another device than theirs: all but those that are in one block only."""
    block_of: dict[int, int] = {}  # by identity of modules and tensors; -1: of several
    for index, block in enumerate(blocks):
        parts = list(block.module.modules())
        for one in (*parts, *block.module.parameters(), *block.module.buffers()):
            block_of[id(one)] = index if block_of.get(id(one), index) == index else -1
    for _, part in modules:
        if id(part) not in block_of:
            for one in _own(part):
                block_of[id(one)] = -1
    return [
        (name, part)
        for name, part in modules
        if _own(part) and (block_of.get(id(part), -1) < 0 or any(block_of[id(one)] < 0 for one in _own(part)))
    ]


def _own(part: nn.Module) -> list[Any]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
