"""Data that a module holds in plain attributes, such as a data set, a table or a vocabulary: replicas use the user's, so that there is one of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.attributes import MOST_BYTES
from paceline.torch._replicas.buffers import alias_of_data
from paceline.torch._replicas.reach import BARE, LONGEST, SIMPLE

_MOST_BYTES = 1 << 28  # of attributes, which a proof keeps copies of. More is copied for each replica
_LARGE_BUFFER = 1 << 20  # bytes, such as a causal mask. Running statistics, whose writes are not counted, are smaller
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEEPEST = 3  # containers in containers


class Common:
    """Large tensors and arrays, and long containers of simple values, in attributes. What a forward writes is copied for each replica."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}  # what the replicas have in common, by path
        self._apart: set[str] = set()  # what a forward has written
        self._versions: dict[str, int] = {}  # of tensors
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}  # of buffers, which the user may replace
        self._kept: dict[str, torch.Tensor] = {}  # the tensors' values, in case that a forward writes to them

    def memo(self, holders: Iterable[tuple[str, Any]], home: torch.device | None) -> dict[int, Any]:
        """What stands in a replica for the data of these objects, by the identity of the user's.

        Smaller buffers are copied, also where an attribute refers to them. `home`: the replica's device, if it is the user's.
        """
        found = {}
        holders = list(holders)
        modules = [(path, one) for path, one in holders if isinstance(one, nn.Module)]
        buffers = {id(one) for _, part in modules for one in part._buffers.values()}
        large = [entry for entry in _large((path, vars(one)) for path, one in holders) if id(entry[1]) not in buffers]
        slots_of = {path: (slots, name) for path, slots, name in _large_buffers(modules, home)}
        self._slots |= slots_of
        room = _MOST_BYTES
        for path, value in [*((path, slots[name]) for path, (slots, name) in slots_of.items()), *large]:
            if path in self._apart:
                continue
            theirs = value
            if path not in slots_of:
                room -= getattr(value, "nbytes", 0)
                if room < 0:
                    break
            if isinstance(value, torch.Tensor):
                if not (value.is_cpu or value.device == home):
                    continue
                theirs = alias_of_data(value)
                if path not in self.held:
                    self._keep(path, value)
            self.held[path] = value
            found[id(value)] = theirs
        return found

    def forget(self) -> None:
        """Hold nothing, before replicas are made anew."""
        for known in (self.held, self._versions, self._slots, self._kept):
            known.clear()

    def drop(self, path: str) -> None:
        """Let go of what was held under this path and below: the user has changed that."""
        for one in [one for one in self.held if one == path or one.startswith((f"{path}.", f"{path}["))]:
            for known in (self.held, self._versions, self._slots, self._kept):
                known.pop(one, None)

    def note(self) -> None:
        """Before devices run: what is written from now on was written by them."""
        for path, (slots, name) in self._slots.items():
            one = slots.get(name)
            if path in self.held and one is not None and one is not self.held[path]:
                self.held[path] = one
                self._keep(path, one)
        for path, version in self._versions.items():
            if self.held[path]._version != version:
                self._keep(path, self.held[path])

    def _keep(self, path: str, tensor: torch.Tensor) -> None:
        self._versions[path] = tensor._version
        self._kept[path] = tensor.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what tensors held at `note`."""
        for path in self.written:
            if self.held[path].shape == self._kept[path].shape:
                self.held[path].copy_(self._kept[path])

    @property
    def written(self) -> list[str]:
        """The tensors that were written to since `note`. An array does not count writes."""
        return [path for path, version in self._versions.items() if self.held[path]._version != version]

    def part(self, paths: Iterable[str]) -> None:
        """Let each replica have its own of these, from when the replicas are made anew."""
        self._apart.update(paths)


def _large_buffers(
    modules: Iterable[tuple[str, nn.Module]], home: torch.device | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, part in modules:
        for name, one in part._buffers.items():
            if one is not None and one.device == home and _is_plain(one) and one.nbytes >= _LARGE_BUFFER:
                yield f"{path}.{name}" if path else name, part._buffers, name


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.is_leaf and not tensor.requires_grad
    return plain and tensor.layout is torch.strided and not tensor.is_inference()


def _large(holders: Iterable[tuple[str, dict[Any, Any]]], depth: int = 0) -> Iterator[tuple[str, Any]]:
    for holder, values in holders:
        for key, value in list(values.items()):
            if type(value) in SIMPLE or (not depth and key in BARE):
                continue
            path = f"{holder}.{key}" if holder else str(key)
            if isinstance(value, torch.Tensor):
                if _is_plain(value) and value.nbytes > MOST_BYTES:
                    yield path, value
            elif isinstance(value, _CONTAINERS) and len(value) > LONGEST:
                entries = (*value.keys(), *value.values()) if isinstance(value, dict) else value
                if set(map(type, entries)) <= SIMPLE:
                    yield path, value
            elif isinstance(value, (dict, list, tuple)) and depth < _DEEPEST:
                yield from _large([(path, value if isinstance(value, dict) else dict(enumerate(value)))], depth + 1)
            elif (
                type(value).__module__ == "numpy"
                and getattr(value, "nbytes", 0) > MOST_BYTES
                and value.dtype.kind != "O"
            ):
                yield path, value
