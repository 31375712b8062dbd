"""Brings what a forward writes to attributes of its own module back to the user's module."""

from __future__ import annotations

import operator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.attributes import Attributes, is_of_a_forward
from paceline.torch._replicas.reach import BARE, LONGEST, SIMPLE

_NOTHING = object()


class Written:
    """The attributes of a replica, compared by identity in passes of C code to find those that its forwards have set.

    The user's module gets these values, as it would on one device. If the user then sets them, that counts as a change.
    """

    def __init__(self, attributes: Attributes, counterparts: dict[int, Any]) -> None:
        self._attributes = attributes
        theirs = [counterparts.get(id(one), one) for one in attributes.holders]
        self._apart = [one is not ours for one, ours in zip(theirs, attributes.holders, strict=True)]
        self._dicts: list[dict[str, Any]] = list(map(vars, theirs))
        self.note()

    def note(self) -> None:
        """Note the present values, after the replica was given new ones."""
        self._lengths = list(map(len, self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def has(self, index: int, name: str) -> bool:
        """Whether a forward has set the attribute of this holder since `note`, or has put a tensor with a graph into it."""
        values = dict(self._dicts[index])  # one call of C code, so the replica's device cannot change it meanwhile
        if name not in values or not self._apart[index] or name in BARE or callable(values[name]):
            return False  # a function that a forward has looked up and stored is not a result of it
        begin, length = sum(self._lengths[:index]), self._lengths[index]
        before = dict(zip(values, self._values[begin : begin + length], strict=False))
        return before.get(name, _NOTHING) is not values[name] or is_of_a_forward(values[name])

    def push(self, home: torch.device) -> None:
        """Give the user's module what was written: simple values, and tensors without a graph."""
        now = list(chain.from_iterable(map(dict.values, self._dicts)))
        if list(map(len, self._dicts)) == self._lengths and all(map(operator.is_, now, self._values)):
            return
        if not self._attributes.same:  # loss_fn has changed the user's module; the replicas have to follow that first
            return
        found: dict[int, dict[str, Any]] = {}
        begin = 0
        for index, (values, length) in enumerate(zip(self._dicts, self._lengths, strict=True)):
            before = self._values[begin : begin + length]
            begin += length
            if not self._apart[index] or (len(values) == length and all(map(operator.is_, values.values(), before))):
                continue
            # A dict keeps the order of its names, and new names come last.
            olds = chain(before, repeat(_NOTHING))
            for (name, value), old in zip(values.items(), olds):  # noqa: B905
                settled = _NOTHING if value is old or name in BARE else _settled(value, home)
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
