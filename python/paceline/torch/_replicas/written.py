"""Brings what a forward writes to attributes of its own module back to the user's module."""

from __future__ import annotations

import copy
import operator
from collections import deque
from itertools import chain
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.attributes import Attributes, is_of_a_forward
from paceline.torch._replicas.buffers import holds_the_same, refill
from paceline.torch._replicas.reach import BARE, LONGEST, SIMPLE

_NOTHING = object()


class Written:
    """The attributes of a replica, compared by identity in passes of C code to find those that its forwards have set.

    The user's module gets these values, as it would on one device. If the user then sets them, that counts as a change.
    """

    def __init__(self, attributes: Attributes, counterparts: dict[int, Any], resets: bool = False) -> None:
        """`resets`: whether `reset` will be called."""
        self._attributes = attributes
        self._resets = resets
        theirs = [counterparts.get(id(one), one) for one in attributes.holders]
        self._apart = [one is not ours for one, ours in zip(theirs, attributes.holders, strict=True)]
        self._dicts: list[dict[str, Any]] = list(map(vars, theirs))
        self.note()

    def note(self) -> None:
        """Note the present values, after the replica was given new ones."""
        self._before = list(map(dict.copy, self._dicts))
        self._containers = [
            (value, copy.copy(value))
            for values, apart in zip(self._dicts, self._apart, strict=True)
            for name, value in (values.items() if self._resets and apart else ())
            if type(value) in (list, dict, set, deque) and name not in BARE and len(value) <= LONGEST
        ]

    def reset(self) -> None:
        """Put back what lists and dictionaries held when they were noted."""
        for container, before in self._containers:
            if not holds_the_same(container, before):
                refill(container, before)

    def undo(self) -> None:
        """Put the noted values back, since what was run does not count."""
        for values, before, apart in zip(self._dicts, self._before, self._apart, strict=True):
            if apart and not (len(values) == len(before) and all(map(operator.is_, values.values(), before.values()))):
                values.clear()
                values.update(before)

    def has(self, index: int, name: str) -> bool:
        """Whether a forward has set the attribute of this holder since `note`, or has put a tensor with a graph into it."""
        value = self._dicts[index].get(name, _NOTHING)
        if value is _NOTHING or not self._apart[index] or name in BARE or callable(value):
            return False  # a function that a forward has looked up and stored is not a result of it
        return self._before[index].get(name, _NOTHING) is not value or is_of_a_forward(value)

    @property
    def changed(self) -> bool:
        """Whether a forward has set something since `note`."""
        now, then = (chain.from_iterable(map(dict.values, dicts)) for dicts in (self._dicts, self._before))
        return list(map(len, self._dicts)) != list(map(len, self._before)) or not all(map(operator.is_, now, then))

    def raised(self) -> dict[tuple[int, str], tuple[int, int]]:
        """The whole numbers that forwards have changed since `note`: by holder and name, what they were and by how much they were raised."""
        return {
            (index, name): (before[name], value - before[name])
            for index, (values, before) in enumerate(zip(self._dicts, self._before, strict=True))
            for name, value in (values.items() if self._apart[index] else ())
            if type(value) is int and type(before.get(name)) is int and value != before[name]
        }

    def put(self, place: tuple[int, str], value: int) -> None:
        """Set a number as if a forward had set it."""
        if self._apart[place[0]]:
            self._dicts[place[0]][place[1]] = value

    def push(self, home: torch.device) -> None:
        """Give the user's module what was written: simple values, and tensors without a graph."""
        if not self._attributes.same:  # loss_fn has changed the user's module; the replicas have to follow that first
            return
        found: dict[int, dict[str, Any]] = {}
        for index, (values, before) in enumerate(zip(self._dicts, self._before, strict=True)):
            same = len(values) == len(before) and all(map(operator.is_, values.values(), before.values()))
            for name, value in () if same or not self._apart[index] else values.items():
                settled = _NOTHING
                if value is not before.get(name, _NOTHING) and name not in BARE:
                    settled = _settled(value, home)
                if settled is not _NOTHING:
                    found.setdefault(index, {})[name] = settled
        if found:
            self._attributes.take(found)
        self.note()


def _settled(value: Any, home: torch.device) -> Any:
    """The value to give to the user's module, or _NOTHING for tensors with a graph and for objects, which belong to the replica."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, torch.Tensor):
        if value.requires_grad or isinstance(value, nn.Parameter):
            return _NOTHING
        return value.detach() if value.device == home else value.to(home)
    if type(value) in (tuple, list) and len(value) <= LONGEST:
        parts = [_settled(one, home) for one in value]
        return _NOTHING if any(part is _NOTHING for part in parts) else type(value)(parts)
    return _NOTHING
