"""What an `Execution` has the devices of a pipeline run, if some are GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import DeviceGroup
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.stages import StageLanePlaces, StagePlaces
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.loop import PipelineWork
from paceline.torch._pipeline.placed import PlacedPassage
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._pipeline.source import Stages
from paceline.torch._pipeline.visited import visited_in
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Feature
from paceline.torch._run.recipe import Retry


class Placement:
    """Moves parameters and buffers between steps: those of a block to the device of its stage, others to that of the stage that calls them.

    The objects stay the same. Gradients and the state of optimizers, also of those that the user has made, move with their parameters.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block], places: StagePlaces) -> None:
        self._module = module
        self._blocks = blocks
        self._places = places
        self.called: dict[str, int] = {}  # modules outside of the blocks, with the last block before their first call
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        itself = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            placement = itself()
            if placement is not None:
                placement._follow(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._hook.remove)

    def follow(self, plan: PipelinePlan) -> bool:
        """Bring everything to where the plan's stages are. Returns whether anything has moved."""
        return self._move(self._wanted(plan))

    def would_move(self, plan: PipelinePlan) -> bool:
        """Whether something is not where the plan's stages are."""
        return any(one.device != device for one, device in self._wanted(plan))

    def _wanted(self, plan: PipelinePlan) -> list[tuple[torch.Tensor, torch.device]]:
        stage_of = plan.stage_of(len(self._blocks))
        wanted: dict[int, tuple[torch.Tensor, torch.device]] = {}
        for one, block in self._owned():
            device = self._places.devices[plan.order[stage_of[block]]]
            wanted.setdefault(id(one), (one, device))
        return list(wanted.values())

    def home(self) -> None:
        """Bring everything back to where the module was, as the trainer ends."""
        self._hook.remove()
        self.gather()
        for optimizer in self._optimizers:
            self._follow(optimizer)

    def gather(self) -> None:
        """Bring parameters and buffers back to where the module was, until the next plan is followed."""
        home = self._places.home
        self._move([(one, home) for one in (*self._module.parameters(), *self._module.buffers())])

    def _owned(self) -> list[tuple[torch.Tensor, int]]:
        """All parameters and buffers with their blocks, in the order of use: those that are tied belong to the first."""
        found = [
            ((index, 0), one, index)
            for index, block in enumerate(self._blocks)
            for one in (*block.module.parameters(), *block.module.buffers())
        ]
        inside = {id(part) for block in self._blocks for part in block.module.modules()}
        guess = -1  # what is registered before the blocks is probably called before them
        for name, part in self._module.named_modules():
            if id(part) in inside:
                guess = len(self._blocks) - 1
                continue
            block = self.called.get(name, guess)
            own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
            found += [((block, 1), one, max(block, 0)) for one in own]
        return [(one, block) for _, one, block in sorted(found, key=lambda entry: entry[0])]

    def _move(self, wanted: list[tuple[torch.Tensor, torch.device]]) -> bool:
        moving = [(one, device) for one, device in wanted if one.device != device]
        if not moving:
            return False
        self._places.drain()
        with torch.no_grad():
            for one, device in moving:
                gradient, one.grad = one.grad, None
                one.data = one.data.to(device)
                one.grad = None if gradient is None else gradient.to(device)
        self._places.drain()
        return True

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the state of an optimizer to its parameters. Counters stay on the host."""
        ours = {id(one) for one in self._module.parameters()}
        for parameter, state in optimizer.state.items():
            if id(parameter) not in ours:
                continue
            self._optimizers.add(optimizer)
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                    state[name] = value.to(parameter.device)


_ELSEWHERE = "Expected all tensors to be on the same device"  # PyTorch's words, for which it has no type


class Strays(Feature):
    """Looks after tensors that an operator met in another memory, from the first such error on."""

    def __init__(self) -> None:
        self.looks = False

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        if self.looks or not isinstance(error, RuntimeError) or _ELSEWHERE not in str(error):
            return None
        self.looks = True
        return Retry("a tensor is in another memory")


class PlacedStages(Stages):
    """`Stages` with memories of their own."""

    _places: StagePlaces

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: StagePlaces, replicas: LaneReplicas, blocks: list[Block]
    ) -> None:
        self._strays = Strays()
        super().__init__(group, module, places, replicas, blocks, self._strays)
        self._placement = Placement(module, blocks, places)

    def _place(self, plan: PipelinePlan, *, hooks: bool) -> bool:
        moved = self._placement.follow(plan)
        if moved:
            self._replicas.refresh(hooks=hooks)
        return moved

    def _must_run_alone(self, work: PipelineWork, whole: Batch, plan: PipelinePlan) -> bool:
        """Compiled code is compiled again for each device. Predictions need no plan for that: who compiles holds up only those behind it."""
        moves = work.seen.compiled and self._placement.would_move(plan)
        return not work.predicts and (moves or super()._must_run_alone(work, whole, plan))

    def _places_of(self, plan: PipelinePlan) -> LanePlaces:
        return StageLanePlaces(self._places, plan.lanes, plan.order[-1])

    def _passage_of(self, plan: PipelinePlan) -> PlacedPassage:
        visited, compiled = visited_in(self._replicas.named_modules, self._blocks)
        replica = self._replicas.list[0]
        called, strays = self._placement.called, self._strays.looks or self._comes_back(plan)
        return PlacedPassage(self._blocks, plan, replica, self._places, called, visited, compiled, strays=strays)

    def _comes_back(self, plan: PipelinePlan) -> bool:
        """Whether stages of one memory have another one between them. No operator fails there on a tensor that has a later copy."""
        memories = [memory for memory, _ in groupby(self._places.devices[device] for device in plan.order)]
        return len(set(memories)) < len(memories)

    def gather(self) -> None:
        self._placement.gather()

    def release(self) -> None:
        super().release()
        self._placement.home()
