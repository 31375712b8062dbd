"""Plans the steps of a pipeline: the first few measure blocks and devices, and the balancer plans all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import DeviceGroup, OutOfMemory
from paceline._core import engine as core
from paceline._core.balance import StageBalancer, layouts
from paceline.torch._pipeline.blocks import Block, in_order_of
from paceline.torch._pipeline.measure import BlockClock, BlockCost, Measured, costs_of, speeds_of
from paceline.torch._pipeline.plans import Action, PipelinePlan

_MICRO_BATCHES = 8  # of a step that measures
_STATES = {
    "SGD": 1,
    "Adagrad": 1,
    "RMSprop": 1,
    "Lion": 1,
    "Muon": 1,
}  # copies of the parameters that an optimizer keeps
_STATES_OF_OTHERS = 2  # as Adam does
_LEAST_DIFFERENCE = 0.05  # between two devices' speeds, to be taken for more than noise
_MOST_REORDERS = 8  # of blocks, before an order that changes is the user's to mend
_GROWTH = 1.5  # of an item over those that were measured, at which blocks are measured again


class Planner:
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
        link: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self.unsettled: Callable[[], None] | None = None  # takes note of the last step when its times are there
        self.retired: set[int] = set()
        self.finds_order = False  # of the blocks, since it is not given, and they have not all run yet
        self._reorders = 0
        self.least_items = 1
        self.measured: list[Measured] = []
        self.balancer: StageBalancer | None = None
        self.costs: list[BlockCost] = []
        self._link = link  # between memories: seconds of any copy, and bytes per second. None: nothing is copied
        self._names = [device.name for device in group.devices]
        spaces = list(dict.fromkeys(device.memory_space for device in group.devices))
        self._spaces = [spaces.index(device.memory_space) for device in group.devices]
        self.blocks = blocks
        self.limits = list(limits)
        self._given: dict[str, Any] = {"schedule": schedule, "cuts": list(cuts or []), "micro_batches": micro_batches}
        inside = {id(one) for block in blocks for one in block.module.parameters()}
        self._glue = [index for index, one in enumerate(parameters) if id(one) not in inside]
        self._parameters = parameters
        self._states = _STATES_OF_OTHERS
        self._speeds = [1.0] * len(group)
        self._last: PipelinePlan | None = None  # of a step, on the present devices
        self._predicts_items: int | None = None  # the most items of a micro-batch, after memory ran out
        self._reached: dict[int, int] = {}  # blocks, by the parameters outside that belong to them
        self._measured_in = _MICRO_BATCHES if micro_batches is None else micro_batches
        self._trained: list[bool] = []  # which parameters were, when the blocks were measured
        self._measured_bytes = 0  # of an item then
        self._steps = 0  # that were recorded
        self._steps_before = 0  # the balancer's first plan
        self._moves = 0  # of balancers from before blocks were measured again

    # What `PipelineExecution` asks

    def renewed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Others have taken the place of the module's parameters, or not. Those that are not registered come last."""
        self._parameters = parameters[: len(self._parameters)]

    def reorder(self, calls: Sequence[int]) -> None:
        """Put the blocks into the order of these calls. They stay in it once all were called, or when the order has changed often."""
        in_order_of(calls, self.blocks)
        self._reorders += 1
        self.finds_order = len(calls) < len(self.blocks) and self._reorders < _MOST_REORDERS

    @property
    def glue(self) -> list[torch.Tensor]:
        """The parameters outside of the blocks."""
        return [self._parameters[index] for index in self._glue]

    def follow(self, items: int, item_bytes: int) -> None:
        """Measure the blocks again if they cost something else by now.

        So it is if items are longer, if other parameters are trained, and if the batch can tell what a micro-batch costs beside its items,
        where the first one was too small for that.
        """
        trained = [parameter.requires_grad for parameter in self._parameters]
        tiny = self.plans_micro_batches and bool(self.measured) and items >= 2 * self._measured_in
        tiny = tiny and len({step.plan.sizes[0] for step in self.measured}) == 1
        longer = 0 < _GROWTH * self._measured_bytes < item_bytes
        if self.balancer is not None and (tiny or longer or trained != self._trained):
            self._moves += self.balancer.moves
            self.balancer, self.measured = None, []
        if self.balancer is None:
            self._trained = trained
        if self.balancer is None or self._measured_bytes == 0:
            self._measured_bytes = max(self._measured_bytes, item_bytes)

    def plan(self, items: int) -> PipelinePlan:
        """What the next step runs."""
        if self.balancer is None:
            self._last = self._measuring(items)
        else:
            self.balancer.set_least_items(self.least_items)
            self._last = plan_of(self.balancer.plan(items))
        return self._last

    def predictions(self, items: int, least: int) -> PipelinePlan:
        """What a prediction runs: the stages of training, in at least as many micro-batches, none larger than in training.

        The balancer is not asked: nothing is saved for a backward, so a batch may be larger than one that trains.
        """
        if self._last is None:
            (cuts, order), count, largest = self._first_cuts(), self._given["micro_batches"] or _MICRO_BATCHES, items
        else:
            (cuts, order), count, largest = self._last[:2], len(self._last.sizes), self._last.sizes[0]
        largest = max(least, min(largest, self._predicts_items or largest))
        count = min(max(count, -(-items // largest)), max(1, items // least))
        return PipelinePlan(cuts, order, sizes_of(items, count), core.forward_only(len(cuts), count))

    def out_of_memory_predicting(self, plan: PipelinePlan) -> bool:
        """Whether predictions go on in smaller micro-batches."""
        if plan.sizes[0] == 1:
            return False
        self._predicts_items = plan.sizes[0] // 2
        return True

    @property
    def plans_micro_batches(self) -> bool:
        """Whether the user has not fixed their number."""
        return self._given["micro_batches"] is None

    @property
    def measures(self) -> Measured | None:
        """Where the next step puts what it measures of blocks, or None if all is known."""
        return None if self.balancer is not None else self._next

    def clock(self, replica: Sequence[torch.Tensor], kind: type[BlockClock] = BlockClock) -> BlockClock:
        """A clock for one micro-batch. `replica` has the parameters that get gradients."""
        return kind(len(self.blocks), [replica[index] for index in self._glue])

    def record(self, plan: PipelinePlan, record: Sequence[Sequence[Action]], *, evidence: bool) -> None:
        """Take note of a step that was committed."""
        self._steps += 1
        if self.balancer is None:
            self.add(self._next)
            return
        evidence = evidence and bool(plan.figures)  # else it ran one micro-batch at a time
        self.balancer.record([(*_seconds_of(actions), not evidence) for actions in record])

    def add(self, step: Measured) -> None:
        """Take note of a step that has measured."""
        self.measured.append(step)
        if len(self.measured) >= len(self._trials()):
            self._know()

    def out_of_memory(self, stage: int) -> bool:
        """Whether there is a plan that takes less."""
        if self.balancer is not None:
            return bool(self.balancer.out_of_memory(stage))
        if not self.plans_micro_batches or self._next.plan.sizes[0] == 1:
            return False
        self._measured_in = 2 * len(self._next.plan.sizes)
        self.measured = []
        return True

    def retire(self, device: int) -> None:
        if self.balancer is not None:
            self.balancer.retire(device)
        else:
            self.measured = []  # with devices that are no longer there
        self.retired.add(device)
        self._last = None

    def restore(self, device: int) -> None:
        if self.balancer is not None:
            self.balancer.restore(device)
        else:
            self.measured = []
        self.retired.discard(device)

    def optimized_by(self, cls: type, options: dict[str, Any]) -> None:
        """Note what the optimizer will keep for each parameter."""
        self._states = _STATES.get(cls.__name__, _STATES_OF_OTHERS)
        if cls.__name__ == "SGD" and not options.get("momentum"):
            self._states = 0

    # Measuring

    def measure(self, items: int, run: Callable[[int, bool], BlockClock]) -> None:
        """Measure the blocks before the first step, by `run(size, counts)`, which takes one micro-batch through one block after the other.

        Devices count as equally fast until steps tell.
        """
        self._measuring(items)
        plan = self._next.plan
        for count in self._counts(items):
            size = sizes_of(items, count)[0]
            clocks = {number: run(size, counts) for number, counts in enumerate((True, False))}
            self.measured.append(Measured(plan._replace(sizes=(size, size)), clocks))
        self._know()

    def _counts(self, items: int) -> list[int]:
        """The numbers of micro-batches of steps that measure. The second one is larger, or smaller if the batch allows no larger one."""
        most = max(1, items // self.least_items)
        count = min(self._measured_in, most)
        other = 2 * count if 2 * count <= most else max(1, count // 2)
        return [count, other] if self.plans_micro_batches else [count]

    def _trials(self) -> list[bool]:
        """The steps that measure: whether each stage is on the next device."""
        several = len(self._names) - len(self.retired) > 1 and len(self.blocks) > 1
        # Another size tells the fixed part of a micro-batch's time, which only the choice of their number needs.
        return [False, *([True] if several else []), *([False] if self.plans_micro_batches else [])]

    def _measuring(self, items: int) -> PipelinePlan:
        trials = self._trials()
        trial = min(len(self.measured), len(trials) - 1)
        count = self._counts(items)[-1 if trial > 0 and not trials[trial] else 0]
        if self.measured and not trials[trial]:
            plan = self.measured[0].plan
            cuts, order = plan.cuts, plan.order
        else:
            cuts, order = self._first_cuts()
        if trials[trial]:
            order = (*order[1:], order[0])
        plan = PipelinePlan(cuts, order, sizes_of(items, count), "").alone()
        self._next = Measured(plan)
        return plan

    def _first_cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where to cut while nothing but the parameters is known, so that these fit: blocks as slow as their parameters are large."""
        sizes = self.parameter_bytes({})
        blocks = [BlockCost(0.0, 1e-9 * size + 1e-6, 0.0, 0.0, size, 0, 0, 0) for size in sizes]
        given = {**self._given, "schedule": "1f1b", "micro_batches": len(self._names)}
        balancer = self._balancer(blocks, given)
        plan = plan_of(balancer.plan(len(self._names)))
        return plan.cuts, plan.order

    def _know(self) -> None:
        first = self.measured[0]
        turned = [step for step in self.measured if step.plan.order != first.plan.order]
        if turned:
            speeds = speeds_of(first, turned[0], len(self._names))
            self._speeds = speeds if max(speeds) / min(speeds) > 1 + _LEAST_DIFFERENCE else [1.0] * len(speeds)
        self._reached = first.clocks[0].reached
        classes = [_class_of(block.module, first.clocks[0].boundary[k]) for k, block in enumerate(self.blocks)]
        self.know(costs_of(self.measured, self._speeds, classes, self.parameter_bytes(self._reached)), self._speeds)

    @property
    def known(self) -> tuple[list[BlockCost], list[float]]:
        """What was measured: the costs of blocks on a device of speed 1, and the devices' speeds."""
        return self.costs, self._speeds

    def know(self, costs: Sequence[BlockCost], speeds: Sequence[float]) -> None:
        """Plan all steps from now on with these costs of blocks and speeds of devices."""
        self.costs, self._speeds = list(costs), list(speeds)
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        link = (0.0, 0.0) if self._link is None else self._link()
        self.balancer = self._balancer(self.costs, {**self._given, "link": link})
        self._steps_before = self._steps

    def layouts(self, items: int) -> list[dict[str, Any]]:
        """All ways of laying out the module for a batch of so many items, the best first. Requires: the costs are known."""
        assert self.balancer is not None
        weights = self._bytes_of_blocks(self._reached, lambda one: one.nbytes)
        gradients = self._bytes_of_blocks(self._reached, lambda one: one.nbytes if one.requires_grad else 0)
        return layouts(self.balancer, items, weight_bytes=weights, gradient_bytes=gradients)

    def pipeline_seconds(self, items: int) -> float:
        """Seconds of a step of so many items on these devices. Requires: the costs are known."""
        found = next(one for one in self.layouts(items) if one["kind"] == "pipeline")
        if not found["fits"]:
            raise OutOfMemory(found["reason"])
        return float(found["seconds"])

    def parameter_bytes(self, reached: dict[int, int]) -> list[int]:
        """Of each block, with gradients and the optimizer's state. `reached`: the blocks that parameters outside belong to."""
        return self._bytes_of_blocks(reached, self._bytes)

    def _bytes_of_blocks(self, reached: dict[int, int], of: Callable[[torch.Tensor], int]) -> list[int]:
        sizes = [sum(map(of, block.module.parameters())) for block in self.blocks]
        for number, index in enumerate(self._glue):
            sizes[reached.get(number, len(sizes) - 1)] += of(self._parameters[index])
        return sizes

    def _bytes(self, parameter: torch.Tensor) -> int:
        return parameter.nbytes * (2 + self._states if parameter.requires_grad else 1)

    def _balancer(self, blocks: Sequence[BlockCost], given: dict[str, Any]) -> StageBalancer:
        devices = [
            (name, speed, 0.0, limit, space)
            for name, speed, limit, space in zip(self._names, self._speeds, self.limits, self._spaces, strict=True)
        ]
        balancer = StageBalancer(list(blocks), devices, **given)
        for device in self.retired:
            balancer.retire(device)
        return balancer

    # What reports say

    @property
    def moves(self) -> int:
        return self._moves + (0 if self.balancer is None else self.balancer.moves)

    @property
    def recent_moves(self) -> list[dict[str, Any]]:
        moves = [] if self.balancer is None else self.balancer.recent_moves
        return [{**move, "step": move["step"] + self._steps_before} for move in moves]

    @property
    def speeds(self) -> list[float]:
        speeds = self._speeds if self.balancer is None else self.balancer.speeds
        return [speed / max(speeds) for speed in speeds]

    def memory(self, last: PipelinePlan | None) -> dict[str, dict[str, float]]:
        """For each device with a limit: the limit, and the bytes of its stage in the `last` plan."""
        used: dict[int, float] = {}
        if last is not None and last.figures:
            used = dict(zip(last.order, last.figures["bytes"], strict=True))
        return {
            name: {"limit_bytes": limit, "stage_bytes": used.get(device, 0)}
            for device, (name, limit) in enumerate(zip(self._names, self.limits, strict=True))
            if limit is not None
        }

    def explain(self) -> str:
        if self.balancer is None:
            return "Measuring the blocks: the first steps run one micro-batch after the other.\n"
        return f"{self.balancer.explain(self._steps_before).rstrip()}\n"


def sizes_of(items: int, count: int) -> tuple[int, ...]:
    """The sizes of so many micro-batches: as equal as they can be, larger ones first."""
    even, more = divmod(items, count)
    return tuple(even + (number < more) for number in range(count))


def plan_of(plan: dict[str, Any]) -> PipelinePlan:
    return PipelinePlan(tuple(plan["cuts"]), tuple(plan["order"]), tuple(plan["sizes"]), plan["schedule"], plan)


def _seconds_of(actions: Sequence[Action]) -> tuple[list[float], list[float]]:
    ordered = sorted(actions, key=lambda action: action[1])
    return (
        [finish - start for kind, _, start, finish in ordered if kind == "F"],
        [finish - start for kind, _, start, finish in ordered if kind == "B"],
    )


def _class_of(module: torch.nn.Module, boundary: int) -> tuple[Any, ...]:
    shapes = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in module.parameters())
    return type(module), shapes, boundary
