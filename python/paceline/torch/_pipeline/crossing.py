"""Brings tensors from one stage's memory to another's, and their gradients back.

A tensor that crosses gets two nodes in the graph. `_Depart` is made with the turn of the stage that it comes from, `_Arrive` with that of the
stage that it goes to. In the backward `_Arrive` begins to copy the gradient back, the turn goes on, and `_Depart` waits for the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.torch._devices.stages import Sent, StagePlaces


class _Departed(NamedTuple):
    tensor: torch.Tensor  # behind its `_Depart`
    sent: Sent
    gradients: list[Sent] | None  # on their way back, from one node to the other. None: it needs none


def nothing() -> None:
    """Nobody has to know."""


class Crossings:
    """What has crossed in one micro-batch."""

    def __init__(self, places: StagePlaces) -> None:
        self._places = places
        # What needs no gradient goes over once, such as a mask for all blocks. The tensors are kept, so that no other gets their identity.
        self._cached: dict[tuple[int, torch.device], tuple[torch.Tensor, int, Sent]] = {}

    def departed(self, nest: Any, target: torch.device, back: Callable[[], None] = nothing) -> dict[int, _Departed]:
        """Begin to move the tensors of a nest of arguments, with the turn of the device that the micro-batch is about to leave.

        `back` is called when a gradient has come back.
        """
        moves = self._places.moves
        tensors = {id(one): one for one in tree_leaves(nest) if isinstance(one, torch.Tensor)}
        return {key: self._depart(one, target, back) for key, one in tensors.items() if moves(one, target)}

    def arrived(self, nest: Any, departed: dict[int, _Departed]) -> Any:
        """The nest with what had departed, with the turn of the device that it goes to."""
        if not departed:
            return nest
        there = {key: self._arrive(one) for key, one in departed.items()}
        return tree_map_only(torch.Tensor, lambda one: there.get(id(one), one), nest)

    def here(self, nest: Any) -> Any:
        """The nest on the device whose turn the thread has."""
        return self.arrived(nest, self.departed(nest, self._places.here))

    def one_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device whose turn the thread has."""
        here = self._places.here
        return self._arrive(self._depart(tensor, here)) if self._places.moves(tensor, here) else tensor

    def forget(self) -> None:
        """Drop what would keep tensors alive."""
        self._cached.clear()

    def _depart(self, tensor: torch.Tensor, target: torch.device, back: Callable[[], None] = nothing) -> _Departed:
        if tensor.requires_grad and torch.is_grad_enabled():
            gradients: list[Sent] = []
            apply: Any = _Depart.apply
            return _Departed(apply(tensor, gradients, back), self._places.send(tensor, target), gradients)
        key, version = (id(tensor), target), 0 if tensor.is_inference() else tensor._version
        known = self._cached.get(key)
        if known is None or known[1] != version:
            known = self._cached[key] = tensor, version, self._places.send(tensor, target)
        return _Departed(tensor, known[2], None)

    def _arrive(self, one: _Departed) -> torch.Tensor:
        if one.gradients is None:
            return one.sent.received()
        apply: Any = _Arrive.apply
        result: torch.Tensor = apply(one.tensor, one.sent, one.gradients, self._places)
        return result

    @contextlib.contextmanager
    def borrowed(self, module: torch.nn.Module) -> Iterator[None]:
        """While a module is called, let its own parameters and buffers be here, as copies if they live elsewhere."""
        here, moves = self._places.here, self._places.moves
        parameters, buffers = module._parameters, module._buffers
        away = {name: one for name, one in parameters.items() if one is not None and moves(one, here)}
        away_buffers = {name: one for name, one in buffers.items() if one is not None and moves(one, here)}
        if not away and not away_buffers:
            yield
            return
        copies = {name: self.one_here(one).clone() for name, one in away_buffers.items()}
        versions = {name: one._version for name, one in copies.items()}
        vars(module)["_parameters"] = {**parameters, **{name: self.one_here(one) for name, one in away.items()}}
        vars(module)["_buffers"] = {**buffers, **copies}
        try:
            yield
        finally:
            now = module._buffers
            vars(module)["_parameters"], vars(module)["_buffers"] = parameters, buffers
        for name, value in now.items():
            if name not in copies or value is None:
                buffers[name] = value
            elif isinstance(module, _BatchNorm):  # version counters do not count what it writes
                self._written_back(away_buffers[name].data, value)
            elif value is not copies[name] or value._version != versions[name]:
                self._written_back(away_buffers[name], value)

    def _written_back(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            buffer.copy_(self._places.send(value, buffer.device).received())


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradients: list[Sent], back: Callable[[], None]) -> torch.Tensor:
        ctx.gradients, ctx.back = gradients, back
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = ctx.gradients.pop().received()
        ctx.back()
        return gradient, None, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, departed: torch.Tensor, sent: Sent, gradients: list[Sent], places: StagePlaces
    ) -> torch.Tensor:
        ctx.gradients, ctx.places, ctx.source = gradients, places, departed.device
        return sent.received().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sent = ctx.places.send(gradients[0], ctx.source)
        ctx.gradients.append(sent)
        return sent.there, None, None, None


class Strays(TorchFunctionMode):
    """Brings tensors that reach an operator from elsewhere, as a long skip by closure does.

    It slows every call of PyTorch, so it is on only where an operator has failed without it. What is written in place
    is not brought, since the copy would be written.
    """

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = (
            (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")) or "out" in kwargs
        )
        if not writes and name not in _FREE:
            places = {one.device for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.dim()}
            if len(places) > 1:
                args, kwargs = self._crossings.here((args, kwargs))
        return func(*args, **kwargs)


_FREE = {"to", "type_as", "backward"}  # these take tensors of several memories
