"""Measures the blocks of a module in ordinary steps: seconds forward and backward, and bytes."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.torch._pipeline.plans import PipelinePlan


class BlockCost(NamedTuple):
    """What one block costs, as `StageBalancer` takes it. Seconds are those of a device of speed 1."""

    forward_fixed: float
    forward_per_item: float
    backward_fixed: float
    backward_per_item: float
    parameter_bytes: int
    saved_bytes_per_item: int
    boundary_bytes_per_item: int
    workspace_bytes_per_item: int


class BlockClock:
    """What one micro-batch took in each block. Glue before the first block counts to that, glue behind a block to the block."""

    def __init__(self, blocks: int, glue: Sequence[torch.Tensor]) -> None:
        self.forward = [0.0] * blocks
        self.backward = [0.0] * blocks
        self.boundary = [0] * blocks  # bytes that go into each block
        self.saved = [0] * blocks  # bytes that autograd keeps of each block
        self.reached: dict[
            int, int
        ] = {}  # parameters outside of the blocks, by index, with the block of their gradient
        self._glue = glue
        self.counts = False  # what is saved, which takes time
        self._known: set[int] = set()
        self._block = 0
        self._last = time.perf_counter()

    @property
    def block(self) -> int:
        """The last block that was entered, or the first."""
        return self._block

    def paused(self, seconds: float) -> None:
        """The lane has waited for a turn."""
        self._last += seconds

    def entered(self, index: int, tensors: Iterable[torch.Tensor]) -> None:
        if index > 0:
            self._lap(self.forward, self._block)
        self._block = index
        self.boundary[index] = sum(one.nbytes for one in tensors if one.requires_grad)

    @property
    def ran(self) -> bool:
        """Whether the micro-batch ran, as one without weight does not."""
        return any(self.forward)

    def turned(self) -> None:
        self._lap(self.forward, self._block)

    def left(self, index: int) -> None:
        """The backward of this block and of all behind it is over; that of the glue before the first block with index -1."""
        self._lap(self.backward, max(index, 0))
        for number, parameter in enumerate(self._glue):
            if number not in self.reached and parameter.grad is not None:
                self.reached[number] = max(index, 0)

    def _lap(self, seconds: list[float], index: int) -> None:
        now = time.perf_counter()
        seconds[index] += now - self._last
        self._last = now

    def knows(self, there: Iterable[torch.Tensor], *, anew: bool = False) -> None:
        """Do not count what is `there` anyway. `anew`: everything else is gone, and its addresses may come again."""
        if anew:
            self._known.clear()
        self._known.update(one.untyped_storage().data_ptr() for one in there if one.layout is torch.strided)

    def has_counted(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is not counted any more."""
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._known

    @contextlib.contextmanager
    def counting_saved(self, there: Iterable[torch.Tensor]) -> Iterator[None]:
        """Count what autograd saves, but for what is `there` anyway. This takes time, so such a micro-batch is no measure of it."""
        self.counts = True
        self.knows(there)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    self.saved[self._block] += storage.nbytes()
            return tensor.detach()  # not itself: an output that its own graph holds would be a cycle

        # Else the compiler takes `pack` for a part of what it compiles. Where it is not loaded, nothing is compiled, and it loads slowly.
        packs = torch.compiler.disable(pack) if "torch._dynamo" in sys.modules else pack
        with torch.autograd.graph.saved_tensors_hooks(packs, lambda tensor: tensor):
            yield


@dataclass
class Measured:
    """One measured step."""

    plan: PipelinePlan
    clocks: dict[int, BlockClock] = field(default_factory=dict)  # by micro-batch

    @property
    def counted(self) -> tuple[BlockClock, int]:
        """The clock that has counted what is saved, and the items of its micro-batch."""
        return next((one, self.plan.sizes[number]) for number, one in self.clocks.items() if one.counts and one.ran)

    def seconds(self, block: int) -> tuple[float, float]:
        """The medians of forward and backward of a block, without the first micro-batch that ran, which warms up."""
        ran = [(self.plan.sizes[number], one) for number, one in self.clocks.items() if one.ran]
        largest = max(size for size, _ in ran)
        used = [one for size, one in ran if size == largest and not one.counts] or [one for _, one in ran]
        return (
            statistics.median(one.forward[block] for one in used),
            statistics.median(one.backward[block] for one in used),
        )


def speeds_of(first: Measured, turned: Measured, devices: int) -> list[float]:
    """The devices' relative speeds, from two steps whose stages were on different devices, each one further.

    The ratios of neighbours multiply to 1 around the circle. What they miss of that is noise, and divided evenly.
    """
    speeds = [1.0] * devices
    order, blocks = first.plan.order, len(next(iter(first.clocks.values())).forward)
    stage_of = first.plan.stage_of(blocks)
    found: list[float | None] = []
    for stage in range(len(order)):
        ours = [block for block in range(blocks) if stage_of[block] == stage]
        both = [(sum(first.seconds(block)), sum(turned.seconds(block))) for block in ours]
        ratios = [math.log(one / other) for one, other in both if one > 0 < other]  # a forward may leave blocks out
        found.append(statistics.median(ratios) if ratios else None)
    drift = statistics.fmean([log for log in found if log is not None] or [0.0])
    logs = [drift if log is None else log for log in found]
    slow = 0.0  # log of the time of the present device, over the first one's
    for stage, log in enumerate(logs[:-1]):
        slow -= log - drift
        speeds[order[stage + 1]] = math.exp(-slow)
    return speeds


def costs_of(
    steps: Sequence[Measured], speeds: Sequence[float], classes: Sequence[Any], parameter_bytes: Sequence[int]
) -> list[BlockCost]:
    """The costs of all blocks. Blocks of one class have one cost, but for their parameters: their times are put together.

    The glue of the first and the last block makes them classes of their own. With steps of two sizes of micro-batches a fixed part is known.
    """
    blocks = len(classes)
    keys = [(one, index == 0, index == blocks - 1) for index, one in enumerate(classes)]
    samples: dict[Any, list[list[tuple[int, float]]]] = {key: [[], []] for key in keys}
    for step in steps:
        stage_of = step.plan.stage_of(blocks)
        for block, key in enumerate(keys):
            speed = speeds[step.plan.order[stage_of[block]]]
            for kind, seconds in enumerate(step.seconds(block)):
                samples[key][kind].append((step.plan.sizes[0], seconds * speed))
    bytes_of = _bytes_of(steps[0], keys)
    lines = {key: (*_line(forward), *_line(backward)) for key, (forward, backward) in samples.items()}
    return [BlockCost(*lines[key], parameter_bytes[block], *bytes_of[key]) for block, key in enumerate(keys)]


def _bytes_of(step: Measured, keys: Sequence[Any]) -> dict[Any, tuple[int, int, int]]:
    clock, items = step.counted
    found: dict[Any, tuple[int, int, int]] = {}
    for block, key in enumerate(keys):
        saved, boundary = -(-clock.saved[block] // items), -(-clock.boundary[block] // items)
        # While a block runs backward, there are the gradients of what it got and of what it gave.
        most = max(saved, found.get(key, (0, 0, 0))[0]), max(boundary, found.get(key, (0, 0, 0))[1])
        found[key] = (*most, 2 * most[1])
    return found


def _line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds as fixed + per item, neither negative."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    sizes = sorted(by_size)
    medians = [statistics.median(by_size[size]) for size in sizes]
    if len(sizes) < 2:
        return 0.0, medians[0] / sizes[0]
    slope = (medians[-1] - medians[0]) / (sizes[-1] - sizes[0])
    slope = min(max(slope, 0.0), medians[-1] / sizes[-1])  # so that the fixed part is not negative
    return max(0.0, medians[-1] - slope * sizes[-1]), slope
