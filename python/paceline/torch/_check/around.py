"""What a function can reach outside of the module, to go back to: lists, counters, metrics, criteria with buffers."""

from __future__ import annotations

import argparse
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._devices.noise import states_of
from paceline.torch._replicas.buffers import KeptAttributes, KeptBuffers
from paceline.torch._replicas.kept_parameters import KeptParameters
from paceline.torch._replicas.reach import FUNCTIONS, LIBRARIES, SIMPLE

_DEEPEST = 3  # functions that call functions, and objects in objects
_MISSING = object()


class KeptAround:
    """The present state of what `function` refers to. Objects of libraries, such as loaders, files and threads, are `left_alone`."""

    def __init__(self, function: Any, modules: list[nn.Module]) -> None:
        """`modules` are those of the trainer, whose state is kept elsewhere."""
        # Each variable by the functions that set and get it, with its value.
        self._variables: list[tuple[Callable[[Any], None], Callable[[], Any], Any]] = []
        self._attributes = KeptAttributes()
        self.left_alone: dict[str, None] = {}  # by the names of their types
        self.generators: list[Any] = []  # of Python and NumPy; their states are kept elsewhere
        self._known = set(map(id, modules))
        self._parts: list[nn.Module] = []
        for value in self._reached(function, 0):
            self._keep(value, 0)
        parameters = [one for part in self._parts for one in part._parameters.values() if one is not None]
        self._parameters, self._buffers = KeptParameters(parameters), KeptBuffers(self._parts)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the function reaches this tensor."""
        return self._attributes.holds(tensor)

    def restore(self) -> None:
        """Put everything back."""
        for put, get, value in self._variables:
            if get() is not value:
                put(value)
        self._attributes.restore()
        with torch.no_grad():
            self._buffers.restore()
        self._parameters.restore()

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            for part in value.modules():
                if id(part) not in self._known:
                    self._known.add(id(part))
                    self._parts.append(part)
                    self._attributes.keep_module(part)
        elif _is_plain(value):
            if id(value) in self._known or depth > _DEEPEST:
                return
            self._known.add(id(value))
            self._attributes.keep(vars(value))
            for one in list(vars(value).values()):
                self._keep(one, depth + 1)
        elif states_of(value) is not None:
            self.generators.append(value)
        elif isinstance(value, tuple):
            for one in value if depth <= _DEEPEST else ():
                self._keep(one, depth + 1)
        elif not (
            self._attributes.keep(value)
            or callable(value)
            or isinstance(value, _UNCHANGING)
            or _room_of(value) == "paceline"
        ):
            self.left_alone[type(value).__name__] = None

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
            found += self._variables_of(function)
        for value in found:
            if isinstance(value, FUNCTIONS):
                if depth < _DEEPEST:
                    yield from self._reached(value, depth + 1)
            elif (
                not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) and type(value) not in SIMPLE
            ):
                yield value

    def _variables_of(self, function: types.FunctionType) -> Iterator[Any]:
        names, space = function.__code__.co_names, function.__globals__
        for name in names:
            if name in space:
                get = functools.partial(space.get, name, _MISSING)
                self._variables.append((functools.partial(space.__setitem__, name), get, space[name]))
                yield space[name]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            put, get = (
                functools.partial(setattr, cell, "cell_contents"),
                functools.partial(getattr, cell, "cell_contents", _MISSING),
            )
            self._variables.append((put, get, value))
            yield value


def _is_plain(value: Any) -> bool:
    """Whether it is an object of the user's, or a bag of values."""
    own = _room_of(value) not in _OF_OTHERS or isinstance(value, (argparse.Namespace, types.SimpleNamespace))
    return own and hasattr(value, "__dict__")


def _room_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


_UNCHANGING = (*SIMPLE, enum.Enum, torch.Generator, types.ModuleType)  # or seen to elsewhere
_OF_OTHERS = LIBRARIES | {"paceline", "builtins"}
