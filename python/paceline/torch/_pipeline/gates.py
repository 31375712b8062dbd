"""Hands the turn of a device on to the next stage, where the forward of an unchanged module calls a block.

A micro-batch runs on one thread, a *lane*, from the first stage to the last and back, since a Python frame cannot change threads. What
moves is the right to use a device, its turn. In the forward a gate is the call of a block. In the backward it is a node of the graph that
was made at that call. Autograd runs the nodes that are ready in the reverse order of their making. So it comes to a gate's node when it has
run all nodes of the stage behind, and none of the stage before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paceline import InvalidArgument
from paceline._core.engine import Lanes
from paceline.torch._devices.meeting import MeetingOffError
from paceline.torch._pipeline.blocks import OtherOrderError
from paceline.torch._pipeline.measure import BlockClock
from paceline.torch._run.gradients import OwnStorages
from paceline.torch._run.outside import OutsideGradients

_lane = threading.local()  # its `journey` is the journey of the micro-batch that the thread carries


_TRANSFORMS = (
    "Pipeline: loss_fn or the module uses a transform of torch.func (grad, vmap, jvp, jacrev, ...). A pipeline leads a micro-batch from stage to stage "
    "where blocks are called, and measures what autograd saves, and transforms allow neither. Leave it out, or use DataParallel, which supports "
    "them. torch.func.functional_call alone works."
)


def refuse_transforms() -> None:
    """Raise if a block is called inside of a transform of ``torch.func``."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise InvalidArgument(_TRANSFORMS)


def without_transforms(error: BaseException) -> BaseException:
    """The error itself, or our refusal if a transform has refused the hooks that count what autograd saves."""
    if isinstance(error, RuntimeError) and "torch.func" in str(error) and "saved tensor hooks" in str(error):
        refusal = InvalidArgument(_TRANSFORMS)
        refusal.__cause__ = error
        return refusal.with_traceback(error.__traceback__)
    return error


class Journey:
    """The way of one micro-batch through the stages and back."""

    def __init__(
        self, passage: Any, lanes: Lanes, micro_batch: int, *, trains: bool, watcher: BlockClock | None = None
    ) -> None:
        """`passage`: the `Passage` that it is a part of. `watcher` is told where the micro-batch is."""
        self._passage, self._lanes, self._micro_batch = passage, lanes, micro_batch
        self._blocks, self._stage_of = passage.blocks, passage.stage_of
        self._trains, self._watcher = trains, watcher
        self._leaf: torch.Tensor | None = None
        self._gates: list[torch.Tensor] = []
        self.block = -1  # the last one that was called
        self.stage = 0
        self.backward = False
        self._calls: list[int] = []  # of blocks, in order
        self._strays = False  # the calls are in another order than the blocks, and only noted
        self._around: Callable[[str], contextlib.AbstractContextManager[object]] | None = None
        self._around_action = contextlib.ExitStack()  # what is around the present action
        self._arrive(0)

    def _arrive(self, stage: int) -> None:
        """The thread has got the turn of a stage."""

    @contextlib.contextmanager
    def surrounded(self, around: Callable[[str], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
        """Let every action, from this one on, be in a context that `around` makes from the name of its device."""
        self._around = around
        self._begin_action(0)
        yield
        self._around_action.close()

    def _begin_action(self, stage: int) -> None:
        if self._around is not None:
            self._around_action.enter_context(self._around(self._passage.names[stage]))

    def enter(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a block runs on these arguments: bring the micro-batch to its stage. Returns the arguments that it runs on."""
        refuse_transforms()
        stage = self._stage_of[index]
        name = self._blocks[index].name
        if self.backward:
            if stage != self.stage:
                raise InvalidArgument(
                    f"Pipeline: activation checkpointing runs {name} again, which is in stage {stage}, in the backward of stage {self.stage}. A "
                    "checkpointed region has to lie within one stage: checkpoint each block by itself, with use_reentrant=False."
                )
            return args, kwargs
        if (self._passage.reorders and index < self.block and index not in self._calls) or self._strays:
            self._strays = index not in self._calls
        self._calls.append(index)
        if self._strays:
            return args, kwargs
        if index <= self.block:
            last = self._blocks[self.block].name
            raise InvalidArgument(
                f"Pipeline: the forward calls {name} {'again' if index == self.block else f'after {last}'}. Each block runs once, in the order of "
                "the blocks, in a call of loss_fn. Give blocks= in the order of the forward; a module that loops over its blocks, or a loss_fn that "
                "calls the module twice, cannot be cut: use DataParallel."
            )
        self.block = index
        while self.stage < stage:
            self._on()
        if self._watcher is not None:
            self._mark(-1 - index)
            self._watcher.entered(index, (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)))
        return args, kwargs

    def run(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Bring the micro-batch to the stage of a block, and call the block."""
        args, kwargs = self.enter(index, args, kwargs)
        return call(*args, **kwargs)

    def check_order(self) -> int:
        """After a forward: raise if the blocks were called in another order than theirs. Returns how many were called."""
        if self._strays:
            raise OtherOrderError(self._calls)
        return len(self._calls)

    def turn_back(self) -> list[torch.Tensor]:
        """Between forward and backward. Returns the roots that the backward needs beside the loss."""
        self.check_order()
        last = self._stage_of[-1]
        while self.stage < last:  # blocks that the forward did not call
            self._on()
        if self._watcher is not None:
            self._watcher.turned()
        self._move("B", last)
        self.backward = True
        gates, self._gates = self._gates, []
        return gates

    def end(self) -> None:
        """After forward and backward, on the thread that still has the turn of stage 0."""
        if self.backward:
            if self._watcher is not None:
                self._watcher.left(-1)
            self._passage.separate()

    def paused(self, seconds: float) -> None:
        """So much time was spent on something else than the micro-batch."""
        if self._watcher is not None:
            self._watcher.paused(seconds)

    def forget(self) -> None:
        """Drop what would keep a graph alive."""
        self._gates.clear()

    def back(self, gate: int) -> None:
        """Autograd has come to a gate."""
        if gate < 0:
            if self._watcher is not None:
                self._watcher.left(-1 - gate)
            return
        self._passage.separate()
        self._move("B", gate - 1)
        self.stage = gate - 1

    def _on(self) -> None:
        self._mark(self.stage + 1)
        self._move("F", self.stage + 1)
        self.stage += 1

    def _mark(self, gate: int) -> None:
        """Put a gate into the graph, of which nothing depends on it and it on nothing. Its place in the order is all that counts."""
        if not self._trains:
            return
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            if self._leaf is None:
                self._leaf = torch.empty(0, requires_grad=True)
            apply: Any = _Gate.apply
            self._gates.append(apply(self._leaf, self, gate))

    def _move(self, kind: str, stage: int) -> None:
        self._around_action.close()
        began = time.perf_counter()
        now = self._lanes.advance(self._micro_batch)
        if now is None:
            raise MeetingOffError
        self.paused(time.perf_counter() - began)
        if now[:2] != (stage, kind):
            raise RuntimeError(
                f"pipeline: micro-batch {self._micro_batch} got the turn of {now} instead of {kind} of stage {stage}"
            )
        self._arrive(stage)
        self._begin_action(stage)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, journey: Journey, gate: int) -> torch.Tensor:
        ctx.journey, ctx.gate = journey, gate
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.journey.back(ctx.gate)
        return None, None, None


class Separated:
    """`OwnStorages` of the parameters that all stages share. A stage looks after each backward, before the next one may add."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.outside: OutsideGradients | None = None  # the run's other tensors that get gradients
        self._own = OwnStorages(parameters, midway=True)
        self._outside: dict[int, torch.Tensor] = {}  # those that are known
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self.outside is not None:
                new = {id(one): one for one in self.outside.tensors if id(one) not in self._outside}
                self._own.add(new.values())
                self._outside |= new
            self._own.separate()


@contextlib.contextmanager
def travelling(journey: Journey) -> Iterator[None]:
    """While the calling thread carries a micro-batch."""
    _lane.journey = journey
    try:
        yield
    finally:
        del _lane.journey


def journey_here() -> Journey | None:
    """The journey of the micro-batch that the calling thread carries."""
    return getattr(_lane, "journey", None)


class OnLanes:
    """What a run calls on the thread of a lane: it is about the micro-batch that the thread carries."""

    def turn_back(self) -> list[torch.Tensor]:
        """Between forward and backward. Returns the roots that the backward needs beside the loss."""
        return self._journey_here.turn_back()

    def end(self) -> None:
        """After forward and backward."""
        self._journey_here.end()

    def surrounded(
        self, around: Callable[[str], contextlib.AbstractContextManager[Any]]
    ) -> contextlib.AbstractContextManager[Any]:
        """Let every part of the micro-batch be in a context that `around` makes from the name of its device."""
        return self._journey_here.surrounded(around)

    @property
    def _journey_here(self) -> Journey:
        journey: Journey = _lane.journey
        return journey


@contextlib.contextmanager
def gated(lanes: Iterable[Sequence[torch.nn.Module]]) -> Iterator[None]:
    """Let the calls of these modules pass through gates: for each lane, its blocks in order.

    The gate is around the whole call, hooks of the user included: PyTorch calls `_compiled_call_impl` of a module in the place of all that.
    """
    with calls_replaced((module, _gated, index) for modules in lanes for index, module in enumerate(modules)):
        yield


@contextlib.contextmanager
def calls_replaced(modules: Iterable[tuple[torch.nn.Module, Callable[[Any, Any], Any], Any]]) -> Iterator[None]:
    """For each module, in the place of its call: what a function makes of something about the module, and of its call.

    What somebody else has put in that place meanwhile, such as ``module.compile()``, stays.
    """
    before = []
    replaced = set()
    for module, make, about in modules:
        if id(module) in replaced:
            continue  # lanes share what is compiled
        replaced.add(id(module))
        made = make(about, module._compiled_call_impl or module._call_impl)
        before.append((module, vars(module).get("_compiled_call_impl"), made))
        vars(module)["_compiled_call_impl"] = made
    try:
        yield
    finally:
        for module, call, made in reversed(before):
            if vars(module).get("_compiled_call_impl") is not made:
                continue
            if call is None:
                del vars(module)["_compiled_call_impl"]
            else:
                vars(module)["_compiled_call_impl"] = call


def _gated(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def gated_call(*args: Any, **kwargs: Any) -> Any:
        journey = journey_here()
        return call(*args, **kwargs) if journey is None else journey.run(index, call, args, kwargs)

    return gated_call
