"""Buffers on their way between the user's module and the replicas, and kept for the case that a step fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Slots = dict[str, Any]  # a module's own buffers, by name; an entry may be None


class Buffers:
    """The buffers of a replica: the user's values before each step, and back into the user's module after it.

    Copied every time: nothing says cheaply what a step wrote. Version counters do not count what batch normalisation writes
    to its statistics, nor what is written through ``.data``.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Of pairs of the user's module and the replica's."""
        self._pairs = [(ours._buffers, theirs._buffers, name) for ours, theirs in modules for name in ours._buffers]

    def pull(self) -> None:
        """The user's values into the replica."""
        _copy(self._pairs)

    def push(self) -> None:
        """The replica's values back into the user's module."""
        _copy((theirs, ours, name) for ours, theirs, name in self._pairs)


class KeptBuffers:
    """The buffers of modules as they are now, to go back to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [
            (owner._buffers, name, buffer, None if buffer is None else buffer.clone())
            for owner in modules
            for name, buffer in owner._buffers.items()
        ]

    @property
    def changed(self) -> bool:
        """Whether one was set or written to, by whatever means. NaN counts as changed."""
        return any(
            slots.get(name) is not buffer
            or (
                buffer is not None
                and value is not None
                and buffer.layout is torch.strided
                and not torch.equal(buffer, value)
            )
            for slots, name, buffer, value in self._kept
        )

    def restore(self) -> None:
        """The same tensors as then, with the same values."""
        for slots, name, buffer, value in self._kept:
            slots[name] = buffer
            if buffer is not None and value is not None and not _overlaps(buffer):
                buffer.copy_(value)


class KeptAttributes:
    """The attributes of modules as they are now: what a forward stores there for later, and counts."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(vars(part), dict(vars(part))) for part in modules]

    def restore(self) -> None:
        """The same objects as then."""
        for attributes, before in self._kept:
            attributes.clear()
            attributes.update(before)


def _copy(pairs: Iterable[tuple[Slots, Slots, str]]) -> None:
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for source, target, name in pairs:
        value, old = source.get(name), target.get(name)
        if value is old:
            continue
        if value is None:
            target[name] = None
        elif old is None or old.shape != value.shape or old.dtype != value.dtype:
            target[name] = value.clone()
        elif _overlaps(old):
            if not torch.equal(old, value):
                target[name] = value.clone()
        else:
            sources.append(value)
            targets.append(old)
    if targets:
        torch._foreach_copy_(targets, sources)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after `expand`: such a tensor cannot be written."""
    return 0 in tensor.stride()
