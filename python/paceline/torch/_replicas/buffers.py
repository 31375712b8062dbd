"""Copies buffers between the user's module and the replicas, and keeps their values in case a step fails."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Slots = dict[str, Any]  # a module's own buffers, by name; an entry may be None


class Buffers:
    """The buffers of a replica. They get the user's values before each step, and the user's module gets theirs after it.

    All are copied every time, because there is no cheap way to know what a step wrote. Version counters do not count what batch
    normalisation writes to its statistics, nor what is written through ``.data``.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Take pairs of a user's module and the replica's module."""
        self._pairs = [(ours._buffers, theirs._buffers, name) for ours, theirs in modules for name in ours._buffers]

    def pull(self, *, anew: bool = False) -> None:
        """Copy the user's values into the replica, or `anew` into new tensors, so that graphs of earlier forwards keep the old ones."""
        if anew:
            for source, target, name in self._pairs:
                value = source.get(name)
                target[name] = (
                    None if value is None else value.to(getattr(target.get(name), "device", value.device), copy=True)
                )
        else:
            _copy(self._pairs)

    def push(self) -> None:
        """Copy the replica's values into the user's module."""
        _copy((theirs, ours, name) for ours, theirs, name in self._pairs)


class KeptBuffers:
    """The present buffers of modules, to go back to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: list[tuple[Slots, str, Any, Any]] = [
            (owner._buffers, name, buffer, None if buffer is None else buffer.clone())
            for owner in modules
            for name, buffer in owner._buffers.items()
        ]

    @property
    def changed(self) -> bool:
        """Whether a buffer was set or written to, by whatever means. NaN counts as changed."""
        if any(slots.get(name) is not buffer for slots, name, buffer, _ in self._kept):
            return True
        pairs = [(buffer, value) for *_, buffer, value in self._kept if buffer is not None]
        return any(buffer.layout is torch.strided and not torch.equal(buffer, value) for buffer, value in pairs)

    def restore(self) -> None:
        """Put the same tensors back, with the same values."""
        for slots, name, buffer, value in self._kept:
            slots[name] = buffer
            if buffer is not None and not _overlaps(buffer):
                buffer.copy_(value)


class KeptAttributes:
    """The present attributes of modules, to go back to: a forward may store things there, or count. Containers get back what they held."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # containers by identity, each with a copy
        for part in modules:
            self._keep(vars(part))

    def _keep(self, container: Any) -> None:
        if id(container) in self._kept or not isinstance(container, (dict, list, set, deque)):
            return
        self._kept[id(container)] = container, copy.copy(container)
        for value in container.values() if isinstance(container, dict) else container:
            self._keep(value)

    def restore(self) -> None:
        """Put the same objects back, into attributes and into containers."""
        for container, before in self._kept.values():
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(before)
            else:
                container.extend(before)


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
    """Whether elements share memory, as after `expand`. PyTorch does not write to such a tensor."""
    return 0 in tensor.stride()
