"""One device's module."""

from __future__ import annotations

import operator
from typing import Any

import torch

from paceline.torch._replicas.arrivals import Arrivals
from paceline.torch._replicas.attributes import Change, carry
from paceline.torch._replicas.buffers import Buffers, Pair
from paceline.torch._replicas.copies import Copied
from paceline.torch._replicas.parametrized import forget
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.written import Written

_requires_grad = operator.attrgetter("requires_grad")
_training = operator.attrgetter("training")


class Replica:
    """One device's module. Its `parameters` are in the order of the user's parameters."""

    def __init__(self, copied: Copied, reach: Reach, parameters: list[torch.Tensor], *, shared: bool) -> None:
        self.module = copied.module
        self.shared = shared  # False: this is the user's module itself
        self.counterparts = copied.counterparts
        self.seen = copied.seen
        self.written: Written | None = None
        self.arrivals: Arrivals | None = None  # set where parameters come from another memory space, in several buckets
        self.parameters: list[torch.Tensor] = [copied.counterparts[id(parameter)] for parameter in parameters]
        pairs = [(ours, copied.counterparts.get(id(ours), ours)) for _, ours in reach.modules]
        self.modules = [theirs for _, theirs in pairs]
        self.buffer_pairs: list[Pair] = [
            (one._buffers, other._buffers, name) for one, other in pairs for name in one._buffers
        ]
        self.buffers = Buffers(self.buffer_pairs) if self.shared else None
        self._buffer_slots = [(one._buffers, name) for one in self.modules for name in one._buffers]
        self._module_ids = set(map(id, self.modules))

    def forget_cached(self) -> None:
        """Drop what ``parametrize.cached()`` holds, before a micro-batch and after a backward: the graph of the values may be gone."""
        forget(self._module_ids)

    def carry(self, changes: list[Change], holders: list[Any], common: dict[int, Any]) -> dict[int, Any]:
        """Make changes of attributes of the user's `holders` on this replica, too. Returns all counterparts, old and new."""
        memo = common | self.counterparts
        carry(changes, holders, memo)
        return memo

    def buffer_marks(self) -> list[tuple[int, int]]:
        """Marks that change when a buffer is set or written to, except through ``.data`` or by batch normalisation."""
        found = (slots.get(name) for slots, name in self._buffer_slots)
        return [(id(buffer), 0 if buffer is None or buffer.is_inference() else buffer._version) for buffer in found]

    def follow(self, requires_grad: list[bool], training: list[bool], *, anew: bool) -> None:
        """Take over ``requires_grad``, the training mode and the buffers of the user's module, the latter `anew` or in place."""
        if list(map(_requires_grad, self.parameters)) != requires_grad:
            for parameter, wanted in zip(self.parameters, requires_grad, strict=True):
                parameter.requires_grad_(wanted)
        if list(map(_training, self.modules)) != training:
            for module, mode in zip(self.modules, training, strict=True):
                module.training = mode
        if self.buffers is not None:
            self.buffers.pull(anew=anew)

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
