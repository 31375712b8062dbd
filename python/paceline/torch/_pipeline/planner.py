"""What a pipeline's `StagePlanner` gets to know by PyTorch: what blocks are, and what measuring steps took in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import DeviceGroup, OutOfMemory
from paceline._core.engine import StagePlanner
from paceline.plan import BlockCost, StageDevice
from paceline.torch._pipeline.blocks import Block, in_order_of
from paceline.torch._pipeline.measure import BlockClock, Measured
from paceline.torch._pipeline.plans import Action, PipelinePlan, plan_of

# Copies of the parameters that an optimizer keeps.
_STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Muon": 1}
_STATES_OF_OTHERS = 2  # as Adam does
_MOST_REORDERS = 8  # of blocks, before an order that changes is the user's to mend
_GROWTH = 1.5  # of an item over those that were measured, at which blocks are measured again


class Planner(StagePlanner):
    """The closed loop of a pipeline."""

    def __init__(
        self,
        group: DeviceGroup,
        blocks: list[Block],
        parameters: Sequence[torch.Tensor],
        limits: Sequence[int | None],
        *,
        cuts: Sequence[int] | None,
        schedule: str,
        micro_batches: int | None,
        link: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        """`link`: between memories, seconds of any copy and bytes per second. Asked when blocks are known."""
        # The loop and the outcome of the last step until its times are there.
        self.unsettled: tuple[Any, Any] | None = None
        self.failure: BaseException | None = None  # why these never come: what another thread than `stepping` has found
        self.stepping = 0  # the thread that steps
        self.settling = threading.RLock()  # while a thread does that; a signal handler may come in
        self.retired: set[int] = set()
        self.finds_order = False  # of the blocks, since it is not given, and they have not all run yet
        self._reorders = 0
        self.plans_micro_batches = micro_batches is None  # whether the user has not fixed their number
        self.link, self.schedule = link, schedule
        self._names = [device.name for device in group.devices]
        self.blocks = blocks
        self.limits = list(limits)
        inside = {id(one) for block in blocks for one in block.module.parameters()}
        self._glue = [index for index, one in enumerate(parameters) if id(one) not in inside]
        self._parameters = parameters
        self._states = _STATES_OF_OTHERS
        self._reached: dict[int, int] = {}  # blocks, by the parameters outside that belong to them
        self._trained: list[bool] = []  # which parameters were, when the blocks were measured
        self._measured_bytes = 0  # of an item then
        self._item_bytes = [(0, 0)] * len(blocks)  # bytes per item: saved, and coming in
        self._classes = list(range(len(blocks)))
        spaces = list(dict.fromkeys(device.memory_space for device in group.devices))
        self._spaces = [spaces.index(device.memory_space) for device in group.devices]
        # While nothing but the parameters is known, blocks are as slow as their parameters are large.
        guesses = [
            BlockCost(forward_per_item=1e-9 * size + 1e-6, backward_per_item=0.0, parameter_bytes=size)
            for size in self.parameter_bytes({})
        ]
        super().__init__(
            guesses,
            self.stage_devices([1.0] * len(self._names)),
            micro_batches=micro_batches,
            cuts=list(cuts or []),
            schedule=schedule,
        )

    # What `Stages` asks

    def renewed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Others have taken the place of the module's parameters, or not. Those that are not registered come last."""
        self._parameters = parameters[: len(self._parameters)]

    def reorder(self, calls: Sequence[int]) -> None:
        """Put the blocks into the order of these calls. They stay in it once all were called, or when the order has changed often."""
        in_order_of(calls, self.blocks)
        self._reorders += 1
        self.finds_order = len(calls) < len(self.blocks) and self._reorders < _MOST_REORDERS
        self._measure_again()

    @property
    def glue(self) -> list[torch.Tensor]:
        """The parameters outside of the blocks."""
        return [self._parameters[index] for index in self._glue]

    def follow(self, item_bytes: int, least: int) -> None:
        """Measure the blocks again if items are longer by now, or other parameters are trained. `least`: the fewest items of a micro-batch."""
        self.set_least_items(least)
        trained = [parameter.requires_grad for parameter in self._parameters]
        longer = 0 < _GROWTH * self._measured_bytes < item_bytes
        if not self.measures and (longer or trained != self._trained):
            self._measure_again()
        if self.measures:
            self._trained = trained
        if self.measures or self._measured_bytes == 0:
            self._measured_bytes = max(self._measured_bytes, item_bytes)

    def _measure_again(self) -> None:
        self.set_bytes(self._block_bytes({}))
        self.measure_again()

    def plan_step(self, items: int) -> PipelinePlan:
        """What the next step runs. If it measures, one micro-batch at a time."""
        plan = plan_of(self.plan(items))
        if self.measures:
            plan = plan.alone()
            self._next = Measured(plan)
        return plan

    def plan_prediction(self, items: int, least: int) -> PipelinePlan:
        """What a prediction runs."""
        return plan_of(self.predict(items, least))._replace(figures=None)

    def smaller_predictions(self, plan: PipelinePlan) -> bool:
        """After a prediction ran out of memory: whether the next ones have smaller micro-batches."""
        return self.out_of_memory_predicting(plan.sizes[0])

    @property
    def measured(self) -> Measured | None:
        """Where the step that was planned puts what it measures of blocks, or None if all is known."""
        return self._next if self.measures else None

    def clock(self, replica: Sequence[torch.Tensor], kind: type[BlockClock] = BlockClock) -> BlockClock:
        """A clock for one micro-batch. `replica` has the parameters that get gradients."""
        return kind(len(self.blocks), [replica[index] for index in self._glue])

    def note(self, plan: PipelinePlan, record: Sequence[Sequence[Action]], *, evidence: bool) -> None:
        """Take note of a step that was committed."""
        if self.measures:
            self.add(self._next)
        else:  # it says nothing of a step that ran one micro-batch at a time
            self.record(record, not evidence or plan.figures is None)

    def add(self, step: Measured) -> None:
        """Take note of a step that has measured."""
        if self.recorded == 0:
            clock, items = step.counted
            keys = [_class_of(block.module, clock.boundary[index]) for index, block in enumerate(self.blocks)]
            keys = [(key, index == 0, index == len(keys) - 1) for index, key in enumerate(keys)]  # with glue
            self._classes = [keys.index(key) for key in keys]
            self._reached = clock.reached
            self._item_bytes = clock.bytes_of(self._classes, items)
        self.set_link(*self.link())
        self.record_samples(step.samples, self._block_bytes(self._reached), self._classes)

    def retire(self, device: Any) -> None:
        super().retire(device)
        self.retired.add(device)

    def restore(self, device: Any) -> None:
        super().restore(device)
        self.retired.discard(device)

    def optimized_by(self, cls: type, options: dict[str, Any]) -> None:
        """Note what the optimizer will keep for each parameter."""
        self._states = _STATES.get(cls.__name__, _STATES_OF_OTHERS)
        if cls.__name__ == "SGD" and not options.get("momentum"):
            self._states = 0
        if self.measures:
            self.set_bytes(self._block_bytes(self._reached))

    def measure(self, items: int, run: Callable[[int, bool], BlockClock]) -> None:
        """Measure the blocks before the first step, by `run(size, counts)`, which takes one micro-batch through one block after the other.

        Devices count as equally fast until steps tell.
        """
        clocks: dict[int, dict[int, BlockClock]] = {}
        while self.measures:
            plan = self.plan_step(items)
            size = plan.sizes[0]
            if size not in clocks:
                clocks[size] = {number: run(size, counts) for number, counts in enumerate((True, False))}
            self.add(Measured(plan._replace(sizes=(size, size)), clocks[size]))

    def begin_with(self, costs: Sequence[BlockCost], speeds: Sequence[float]) -> None:
        """Plan all steps from now on with these costs of blocks and speeds of devices."""
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self.set_link(*self.link())
        self.know(costs, speeds)

    def ways(self, items: int) -> list[dict[str, Any]]:
        """All ways of laying out the module for a batch of so many items, the best first. Requires: the costs are known."""
        weights = self._bytes_of_blocks(self._reached, lambda one: one.nbytes)
        gradients = self._bytes_of_blocks(self._reached, lambda one: one.nbytes if one.requires_grad else 0)
        return self.layouts(items, weight_bytes=weights, gradient_bytes=gradients)

    def pipeline_seconds(self, items: int) -> float:
        """Seconds of a step of so many items on these devices. Requires: the costs are known."""
        found = next(one for one in self.ways(items) if one["kind"] == "pipeline")
        if not found["fits"]:
            raise OutOfMemory(found["reason"])
        return float(found["seconds"])

    def parameter_bytes(self, reached: dict[int, int]) -> list[int]:
        """Of each block, with gradients and the optimizer's state. `reached`: the blocks that parameters outside belong to."""
        return self._bytes_of_blocks(reached, self._bytes)

    def _block_bytes(self, reached: dict[int, int]) -> list[tuple[int, int, int, int]]:
        """Of parameters, and per item what is saved, what comes in, and the gradients of what a block got and gave."""
        own = zip(self.parameter_bytes(reached), self._item_bytes, strict=True)
        return [(parameters, saved, boundary, 2 * boundary) for parameters, (saved, boundary) in own]

    def _bytes_of_blocks(self, reached: dict[int, int], of: Callable[[torch.Tensor], int]) -> list[int]:
        sizes = [sum(map(of, block.module.parameters())) for block in self.blocks]
        for number, index in enumerate(self._glue):
            sizes[reached.get(number, len(sizes) - 1)] += of(self._parameters[index])
        return sizes

    def _bytes(self, parameter: torch.Tensor) -> int:
        return parameter.nbytes * (2 + self._states if parameter.requires_grad else 1)

    # What reports say

    def stage_devices(self, speeds: Sequence[float] | None = None) -> list[StageDevice]:
        """The devices as planners see them, with these speeds or those that were measured."""
        figures = zip(self._names, speeds or self.speeds, self.limits, self._spaces, strict=True)
        return [
            StageDevice(name, speed=speed, memory_bytes=limit, memory_space=space)
            for name, speed, limit, space in figures
        ]

    def another(self, like: int, speed: float, number: int) -> StageDevice:
        """A device that is not there: like this one, but so many times as fast. `number`: of such devices. A GPU has a memory of its own."""
        name, space = self._names[like], self._spaces[like]
        if not name.startswith("host"):
            space = len(self._spaces) + number
        return StageDevice(
            f"another {name}", speed=speed * self.speeds[like], memory_bytes=self.limits[like], memory_space=space
        )

    @property
    def costs(self) -> list[BlockCost]:
        """Of the blocks, if they are known."""
        return [] if self.measures else self.known[0]

    def memory(self, last: PipelinePlan | None) -> dict[str, dict[str, float]]:
        """For each device with a limit: the limit, and the bytes of its stage in the `last` plan."""
        used: dict[int, float] = {}
        if last is not None and last.figures is not None:
            used = dict(zip(last.order, last.figures.bytes, strict=True))
        return {
            name: {"limit_bytes": limit, "stage_bytes": used.get(device, 0)}
            for device, (name, limit) in enumerate(zip(self._names, self.limits, strict=True))
            if limit is not None
        }


def _class_of(module: torch.nn.Module, boundary: int) -> tuple[Any, ...]:
    shapes = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in module.parameters())
    return type(module), shapes, boundary
