"""Brings tensors from one stage's memory to another's, and their gradients back.

A tensor that crosses gets two nodes in the graph. `_Depart` is made with the turn of the stage that it comes from, `_Arrive` with that of the
stage that it goes to. In the backward `_Arrive` begins to copy the gradient back, the turn goes on, and `_Depart` waits for the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline import InvalidArgument
from paceline.torch._devices.stages import Sent, StagePlaces

Arrive = Callable[[], torch.Tensor]  # called with the turn of the device that a tensor goes to. Returns it there


def nothing() -> None:
    """Nobody has to know."""


class _Chain:
    """A tensor that needs a gradient, and its copies. Each copy was made from the one before.

    So gradients are added up as on one device. Autograd adds to a tensor's gradient in the reverse order of the tensor's uses. The next copy
    is the last use of each copy, so what comes back from there is what the others are added to.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.last = tensor
        self.leaving: tuple[torch.Tensor, Sent, list[Sent]] | None = None


class _Link(NamedTuple):
    tensor: torch.Tensor
    version: int  # when the next copy was made
    chain: _Chain


class Shared:
    """The modules, by identity, that all lanes use: what is compiled, and what is in it. One lane at a time gives them tensors of its own.

    No gate is in them, so who has the lock waits for no turn.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = set(map(id, modules))
        self.lock = threading.RLock()


class Crossings:
    """What has crossed in one micro-batch. Tensors are kept until `forget`, so that no other one gets their identity."""

    def __init__(self, places: StagePlaces, shared: Shared) -> None:
        self._places = places
        self._shared = shared
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, int, Sent]] = {}  # of what needs no gradient
        self._chains: dict[int, _Link] = {}  # by the identity of each copy
        self._keeps_chains = True

    def moves(self, tensor: torch.Tensor, target: torch.device) -> bool:
        """Whether something else takes the tensor's place on a device: a copy there, or the last of its copies."""
        return self._places.moves(tensor, target) or (self._has_later_copy(tensor) and torch.is_grad_enabled())

    def departed(self, nest: Any, target: torch.device, back: Callable[[], None] = nothing) -> dict[int, Arrive]:
        """Begin to move tensors of arguments, with the turn of the device that the micro-batch is about to leave. `back` is called when a gradient is back."""
        tensors = {id(one): one for one in tree_leaves(nest) if isinstance(one, torch.Tensor)}
        return {key: self._depart(one, target, back) for key, one in tensors.items() if self.moves(one, target)}

    def arrived(self, nest: Any, departed: dict[int, Arrive]) -> Any:
        """The nest with what had departed, with the turn of the device that it goes to."""
        if not departed:
            return nest
        there = {key: arrive() for key, arrive in departed.items()}
        return tree_map_only(torch.Tensor, lambda one: there.get(id(one), one), nest)

    def here(self, nest: Any) -> Any:
        """The nest on the device whose turn the thread has."""
        return self.arrived(nest, self.departed(nest, self._places.here))

    def one_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device whose turn the thread has."""
        here = self._places.here
        return self._depart(tensor, here)() if self.moves(tensor, here) else tensor

    def are_apart(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether these cannot be used together as they are."""
        sized = [one for one in tensors if one.dim()]
        return len({one.device for one in sized}) > 1 or any(map(self._has_later_copy, sized))

    def turn_back(self) -> None:
        """The forward is over. What checkpoints run again is used once, so nothing is kept that has a graph."""
        self._keeps_chains = False
        self.forget()

    def forget(self) -> None:
        """Drop what would keep tensors alive."""
        self._copies.clear()
        self._chains.clear()

    def _depart(self, tensor: torch.Tensor, target: torch.device, back: Callable[[], None] = nothing) -> Arrive:
        if tensor.requires_grad and torch.is_grad_enabled():
            return self._depart_on(self._chain_of(tensor), target, back)
        key, version = (id(tensor), target), 0 if tensor.is_inference() else tensor._version
        known = self._copies.get(key)
        if known is None or known[1] != version:
            known = self._copies[key] = tensor, version, self._places.send(tensor, target)
        return known[2].received

    def _has_later_copy(self, tensor: torch.Tensor) -> bool:
        link = self._chains.get(id(tensor))
        return link is not None and link.chain.last is not tensor

    def _chain_of(self, tensor: torch.Tensor) -> _Chain:
        link = self._chains.get(id(tensor))
        if link is not None and (tensor is link.chain.last or tensor._version == link.version):
            return link.chain
        return _Chain(tensor)  # also of a tensor that was written to since it was copied

    def _depart_on(self, chain: _Chain, target: torch.device, back: Callable[[], None]) -> Arrive:
        if chain.leaving is None and chain.last.device != target:
            gradients: list[Sent] = []  # on their way back, from one node to the other
            apply: Any = _Depart.apply
            chain.leaving = apply(chain.last, gradients, back), self._places.send(chain.last, target), gradients
            self._link(chain)
        return lambda: self._arrive(chain)

    def _arrive(self, chain: _Chain) -> torch.Tensor:
        if chain.leaving is not None:
            leaving, chain.leaving = chain.leaving, None
            apply: Any = _Arrive.apply
            chain.last = apply(*leaving, self._places)
            self._link(chain)
        return chain.last

    def _link(self, chain: _Chain) -> None:
        if self._keeps_chains:
            self._chains[id(chain.last)] = _Link(chain.last, chain.last._version, chain)

    @contextlib.contextmanager
    def borrowed(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """While modules are called, let their own parameters and buffers be here, as copies if they live elsewhere."""
        with contextlib.ExitStack() as stack:
            for module in modules:
                if id(module) in self._shared.modules:
                    stack.enter_context(self._shared.lock)
                stack.enter_context(self._borrowed(module))
            yield

    @contextlib.contextmanager
    def _borrowed(self, module: torch.nn.Module) -> Iterator[None]:
        here, moves = self._places.here, self.moves
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
                self._copies.pop((id(away_buffers[name]), here), None)
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

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the calls inside alone."""
        above = list(dropwhile(lambda mode: mode is not self, _get_current_function_mode_stack()))
        for _ in above:
            _pop_mode()
        for mode in above[1:]:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in above[1:]:
                _pop_mode()
            for mode in above:
                _push_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _takes_copies(func, kwargs):
            tensors = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
            if self._crossings.are_apart(tensors):
                _refuse_statistics(func, args, kwargs)
                args, kwargs = self._crossings.here((args, kwargs))
        return func(*args, **kwargs)


_FREE = {"to", "type_as", "backward"}  # these take tensors of several memories
_FREE |= {"register_hook", "size", "dim", "numel", "stride", "is_contiguous"}  # these are about the tensor itself
_OPERATORS = {"T", "H", "mT", "mH", "real", "imag"}  # among the attributes


def _refuse_statistics(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise for normalisation that would write its running statistics to copies."""
    name = getattr(func, "__name__", "")
    in_training = kwargs.get("training", kwargs.get("use_input_stats", args[5] if len(args) > 5 else False))
    statistics = [
        one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, torch.Tensor) and not one.requires_grad
    ]
    if name in ("batch_norm", "instance_norm") and in_training and statistics:
        raise InvalidArgument(
            f"Pipeline: {name} is called as a function on another device than that of its running statistics, which it would not reach. Call it in the "
            "forward of the module that owns them, outside of the blocks or in one of them, or use nn.BatchNorm."
        )


def _takes_copies(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of PyTorch does the same with copies of its tensors."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ in _OPERATORS
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")) or "out" in kwargs
    return not writes and name not in _FREE
