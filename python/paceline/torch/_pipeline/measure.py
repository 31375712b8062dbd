"""Measures the blocks of a module in ordinary steps: seconds forward and backward, and bytes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.torch._pipeline.plans import PipelinePlan


class BlockClock:
    """What one micro-batch took in each block. Glue before the first block counts to that, glue behind a block to the block."""

    def __init__(self, blocks: int, glue: Sequence[torch.Tensor]) -> None:
        self.forward = [0.0] * blocks
        self.backward = [0.0] * blocks
        self.boundary = [0] * blocks  # bytes that go into each block
        self.saved = [0] * blocks  # bytes that autograd keeps of each block
        # Parameters outside of the blocks, by index, with the block of their gradient.
        self.reached: dict[int, int] = {}
        self._glue = glue
        self.counts = False  # what is saved, which takes time
        self._known: set[int] = set()
        self.block = 0  # the last one that was entered, or the first
        self._last = time.perf_counter()

    def paused(self, seconds: float) -> None:
        """The lane has waited for a turn."""
        self._last += seconds

    def entered(self, index: int, tensors: Iterable[torch.Tensor]) -> None:
        if index > 0:
            self._lap(self.forward, self.block)
        self.block = index
        self.boundary[index] = sum(one.nbytes for one in tensors if one.requires_grad)

    @property
    def ran(self) -> bool:
        """Whether the micro-batch ran, as one without weight does not."""
        return any(self.forward)

    def turned(self) -> None:
        self._lap(self.forward, self.block)

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

    def bytes_of(self, classes: Sequence[int], items: int) -> list[tuple[int, int]]:
        """What is saved of an item in each block, and what goes into it: the most in a block of its class. `items`: of the micro-batch."""
        of_class: dict[int, tuple[int, int]] = {}
        for block, own in enumerate(classes):
            saved, boundary = of_class.get(own, (0, 0))
            of_class[own] = max(saved, -(-self.saved[block] // items)), max(boundary, -(-self.boundary[block] // items))
        return [of_class[own] for own in classes]

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
                    self.saved[self.block] += storage.nbytes()
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

    @property
    def samples(self) -> list[tuple[int, int, bool, int, float]]:
        """(block, device, whether it is the backward, items, seconds) each. The first micro-batch that ran has counted what is saved, and warmed up."""
        ran = [(self.plan.sizes[number], one) for number, one in self.clocks.items() if one.ran]
        stage_of = self.plan.stage_of(len(ran[0][1].forward))
        return [
            (block, self.plan.order[stage_of[block]], kind == 1, size, seconds)
            for size, one in [timed for timed in ran if not timed[1].counts] or ran
            for kind, times in enumerate((one.forward, one.backward))
            for block, seconds in enumerate(times)
        ]
