"""Measures the blocks of a module on the device "meta" one after the other. Each has memory for its turn only.

The forward of the unchanged module runs. Where it calls a block, the block gets memory, runs forward and, at once, backward, and loses its
memory again. What the block returns goes on without a graph. Modules outside of the blocks have memory while they are called.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline import InvalidArgument
from paceline.torch._batch.extras import parted
from paceline.torch._devices.caller_state import outside_autocast
from paceline.torch._pipeline.blocks import Block, OtherOrderError
from paceline.torch._pipeline.gates import calls_replaced, refuse_transforms
from paceline.torch._pipeline.measure import BlockClock
from paceline.torch._run.outside import leaves_of

_ON_META = re.compile(r"\bmeta (device|tensor)|\bdevice\W*meta\b|'Meta'", re.IGNORECASE)  # in errors of PyTorch
_TIMED = 3  # blocks of a class: the fewest whose median is no outlier


class _Known(NamedTuple):
    """What a block of a class took."""

    forward: float
    backward: float
    saved: int
    wants: list[bool]  # whether each tensor that it returns needs a gradient


class Chain:
    """The blocks of a module, and what of it lies outside of them. `glue`: the parameters outside, in the order of `BlockClock.reached`."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[Block],
        outside: Sequence[tuple[str, nn.Module]],
        glue: Sequence[torch.Tensor],
        *,
        reorders: bool,
    ) -> None:
        self._module = module
        self._blocks = blocks
        self._outside = [part for _, part in outside if [*part._parameters, *part._buffers]]
        numbers = {id(one): number for number, one in enumerate(glue)}
        self._numbers = {
            id(part): [numbers[id(one)] for one in part.parameters(recurse=False) if id(one) in numbers]
            for part in self._outside
        }
        self._reorders = reorders
        self._memory = _Memory()
        self._all_at_once = False  # whether everything outside of the blocks has memory all the time

    def run(self, fn: Callable[[nn.Module, Any], Any], part: Any, *, counts: bool) -> BlockClock:
        """One micro-batch. `counts`: what is saved, which takes time, so it is no measure of it."""
        try:
            return self._run(fn, part, counts=counts)
        except RuntimeError as error:
            if not _ON_META.search(str(error)):
                raise
            cause = error
        if not self._all_at_once:  # the forward uses a parameter outside of the call of its module, as of a tied head
            self._all_at_once = True
            return self.run(fn, part, counts=counts)
        raise InvalidArgument(
            f"Pipeline: the blocks cannot be measured one at a time on the device 'meta': {str(cause).splitlines()[0]}. The forward uses a tensor of a block outside of "
            "its call, or makes tensors on 'meta'. Give the module memory before: module.to_empty(device='cpu'), fill it, and leave out init=."
        ) from cause

    def _run(self, fn: Callable[[nn.Module, Any], Any], part: Any, *, counts: bool) -> BlockClock:
        self._clock = BlockClock(len(self._blocks), [])
        self._there = [one for one in tree_leaves(part) if isinstance(one, torch.Tensor)]
        self._known: dict[Any, list[_Known]] = {}
        self._inside = False
        self._calls: list[int] = []
        calls: list[tuple[nn.Module, Any, Any]] = [
            (block.module, self._call(self._block), index) for index, block in enumerate(self._blocks)
        ]
        calls += [(part, self._call(self._visit), part) for part in self._outside]
        caches_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would keep casts of what has lost its memory
        try:
            with contextlib.ExitStack() as stack:
                if self._all_at_once:
                    stack.enter_context(_Memory().lent(self._outside))
                if counts:
                    stack.enter_context(self._clock.counting_saved(self._there))
                stack.enter_context(calls_replaced(calls))
                loss, _ = parted(fn(self._module, part))
                if self._reorders and self._calls != sorted(self._calls) and len(set(self._calls)) == len(self._calls):
                    raise OtherOrderError(self._calls)
                self._clock.turned()
                self._through_glue(loss, len(self._blocks) - 1)
        finally:
            torch.set_autocast_cache_enabled(caches_casts)
            self._memory = _Memory()
        return self._clock

    def _call(self, function: Callable[..., Any]) -> Callable[[Any, Callable[..., Any]], Callable[..., Any]]:
        return lambda about, call: lambda *args, **kwargs: function(about, call, args, kwargs)

    def _visit(self, part: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module outside of the blocks."""
        self._clock.reached |= dict.fromkeys(self._numbers[id(part)], self._clock.block)
        began = time.perf_counter()
        with _Memory().lent([part]) as own:
            self._clock.knows(own)
            self._clock.paused(time.perf_counter() - began)
            return call(*args, **kwargs)

    def _block(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a block."""
        refuse_transforms()
        if self._inside or torch._C._current_graph_task_id() != -1:  # a checkpoint runs it again
            with self._memory.lent(self._blocks[index].module.modules()):
                return call(*args, **kwargs)
        self._through_glue((args, kwargs), max(index - 1, 0))
        self._calls.append(index)
        self._clock.entered(index, _tensors((args, kwargs)))
        began = time.perf_counter()
        self._inside = True
        try:
            return self._turn(index, call, args, kwargs)
        finally:
            self._inside = False
            self._clock.paused(time.perf_counter() - began)

    def _turn(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, or only its forward if its class is known. Puts what it takes into the clock."""
        module, clock = self._blocks[index].module, self._clock
        known = self._known.setdefault(
            (type(module), *map(_like, [*module.parameters(), *_tensors((args, kwargs))])), []
        )
        with self._memory.lent(module.modules()) as own:
            if len(known) < (1 if clock.counts else _TIMED):
                out, took = self._measured(index, own, call, args, kwargs)
                known.append(took)
            else:
                with torch.no_grad():
                    out = call(*args, **kwargs)
        took = known[index % len(known)]
        clock.forward[index] += took.forward
        clock.backward[index] += took.backward
        clock.saved[index] += took.saved
        counted = [clock.has_counted(one) for one in _tensors(out)]
        wants = iter(took.wants)
        out = tree_map_only(torch.Tensor, lambda one: _cut(one, next(wants)), out)
        if clock.counts:
            clock.knows(
                [*self._there, *(one for one, was in zip(_tensors(out), counted, strict=True) if was)], anew=True
            )
        return out

    def _measured(
        self, index: int, own: Sequence[torch.Tensor], call: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, _Known]:
        """What the block returns, and what it took forward and backward."""
        clock = self._clock
        counted = [clock.has_counted(one) for one in _tensors((args, kwargs))]
        args, kwargs = tree_map_only(torch.Tensor, lambda one: _cut(one, one.requires_grad), (args, kwargs))
        if clock.counts:
            carried = [one for one, was in zip(_tensors((args, kwargs)), counted, strict=True) if was]
            clock.knows([*self._there, *own, *carried], anew=True)
        saved = clock.saved[index]
        began = time.perf_counter()
        out = call(*args, **kwargs)
        forward = time.perf_counter() - began
        wants = [one.requires_grad for one in _tensors(out)]
        backward = 0.0 if clock.counts else _backward([one for one in _tensors(out) if one.requires_grad])
        took = _Known(forward, backward, clock.saved[index] - saved, wants)
        clock.saved[index] = saved
        return out, took

    def _through_glue(self, values: Any, index: int) -> None:
        """Run the backward of what lies between the block before and these values. Its time is the block's with this index."""
        if self._clock.counts:
            return
        began = time.perf_counter()
        seconds = _backward([one for one in _tensors(values) if one.grad_fn is not None])
        self._clock.backward[index] += seconds
        self._clock.paused(time.perf_counter() - began)


class _Memory:
    """Memory for modules on "meta". Modules alike that have it one after the other get the same."""

    def __init__(self) -> None:
        self._like: Any = None
        self._made: list[torch.Tensor] = []

    @contextlib.contextmanager
    def lent(self, parts: Iterable[nn.Module]) -> Iterator[list[torch.Tensor]]:
        """Let parameters and buffers of these modules have memory with some finite values. Yields them."""
        slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (own, name, one)
            for part in parts
            for own in (part._parameters, part._buffers)
            for name, one in own.items()
            if one is not None and one.is_meta
        ]
        if not slots:
            yield []
            return
        first: dict[int, int] = {}  # ties: where each tensor comes first
        like = [(name, first.setdefault(id(one), at), *_like(one)) for at, (_, name, one) in enumerate(slots)]
        if like != self._like:
            self._like, self._made = like, []  # what was lent before goes first
            made = {id(one): _filled(one) for _, _, one in slots}
            self._made = [made[id(one)] for _, _, one in slots]
        lent = self._made
        for (own, name, _), one in zip(slots, lent, strict=True):
            own[name] = one
        try:
            yield lent
        finally:
            for own, name, before in slots:
                own[name] = before


def _backward(roots: Sequence[torch.Tensor]) -> float:
    """Run the backward, also where it comes again, as it does through long skips. Returns its seconds. No gradient is left anywhere."""
    if not roots:
        return 0.0
    before = {id(leaf): (leaf, leaf.grad) for root in roots for leaf in leaves_of(root)}
    for leaf, _ in before.values():
        leaf.grad = None
    gradients = [torch.ones_like(one) for one in roots]
    began = time.perf_counter()
    try:
        with outside_autocast():
            torch.autograd.backward(roots, gradients, retain_graph=True)
        return time.perf_counter() - began
    finally:
        for leaf, gradient in before.values():
            leaf.grad = gradient


def _filled(one: torch.Tensor) -> torch.Tensor:
    """Memory with finite values: weights small and of both signs, so that nothing overflows and routers choose. No seed decides anything."""
    new = torch.empty_like(one, device="cpu", requires_grad=False)
    with torch.no_grad():
        if isinstance(one, nn.Parameter) and one.is_floating_point() and one.dim() > 1:
            bound = 1 / math.sqrt(max(1, one[0].numel()))
            new.copy_(torch.empty_like(new, dtype=torch.float32).uniform_(-bound, bound))
        else:
            new.fill_(1 if one.is_floating_point() else 0)
    if not isinstance(one, nn.Parameter):
        return new
    parameter = nn.Parameter(new, one.requires_grad)
    parameter.__class__ = type(one)
    return parameter


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _like(one: torch.Tensor) -> tuple[Any, ...]:
    return tuple(one.shape), one.dtype, one.requires_grad


def _cut(one: torch.Tensor, wants: bool) -> torch.Tensor:
    """The same without what came before. It may be written to in place, as no leaf may."""
    return one.detach().requires_grad_().clone() if wants else one.detach()
