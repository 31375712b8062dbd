"""What a function can reach outside of the module, to go back to: lists, counters, metrics, criteria with buffers."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.buffers import KeptAttributes, KeptBuffers
from paceline.torch._replicas.reach import LIBRARIES, SIMPLE

_DEEPEST = 3  # functions that call functions
_LONGEST = 10_000  # entries; a longer container is left alone
_CONTAINERS = (list, dict, set, deque)


class KeptAround:
    """The present state of what `function` refers to. Objects of libraries, such as loaders, files and threads, are left alone."""

    def __init__(self, function: Any, modules: list[nn.Module]) -> None:
        """`modules` are those of the trainer, whose state is kept elsewhere."""
        self._cells: list[tuple[Any, Any]] = []
        known = set(map(id, modules))
        self._attributes = KeptAttributes([])
        parts: list[nn.Module] = []
        for value in self._reached(function, 0):
            if isinstance(value, nn.Module):
                parts += [part for part in value.modules() if id(part) not in known]
            elif isinstance(value, torch.Tensor) or (type(value) in _CONTAINERS and len(value) <= _LONGEST):
                self._attributes.keep(value)
            elif type(value).__module__.partition(".")[0] not in LIBRARIES | {"paceline"} and hasattr(
                value, "__dict__"
            ):
                self._attributes.keep(vars(value))
        for part in parts:
            self._attributes.keep_module(part)
        self._buffers = KeptBuffers(parts)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the function reaches this tensor."""
        return self._attributes.holds(tensor)

    def restore(self) -> None:
        """Put everything back."""
        for cell, value in self._cells:
            cell.cell_contents = value
        self._attributes.restore()
        with torch.no_grad():
            self._buffers.restore()

    def _reached(self, function: Any, depth: int) -> Iterator[Any]:
        """What a function refers to: by its closure, its defaults, partial arguments, its object and the globals that it names."""
        found: list[Any] = []
        while isinstance(function, functools.partial):
            found += [*function.args, *function.keywords.values()]
            function = function.func
        if not isinstance(function, (types.FunctionType, types.MethodType)):  # an object that is called
            found.append(function)
            function = getattr(type(function), "__call__", None)  # noqa: B004
        found.append(getattr(function, "__self__", None))
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            found += [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
            for cell in function.__closure__ or ():
                try:
                    value = cell.cell_contents
                except ValueError:  # not bound yet
                    continue
                found.append(value)
                if type(value) in SIMPLE:
                    self._cells.append((cell, value))
        for value in found:
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                if depth < _DEEPEST:
                    yield from self._reached(value, depth + 1)
            elif (
                not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) and type(value) not in SIMPLE
            ):
                yield value
