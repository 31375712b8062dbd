"""What can be reached from a module's plain Python attributes, besides its registered parameters, buffers and submodules."""

from __future__ import annotations

import copyreg
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

BARE = frozenset(vars(nn.Module()))  # attributes of every module, such as its tables of parameters and hooks
SIMPLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size}
)
# Entries. Longer containers, such as vocabularies, are not compared entry by entry: that would cost more than the step.
LONGEST = 256
_DEEPEST = 4  # level down to which objects are compared; in `cfg.a.b.p`, cfg has level 0
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_SEQUENCES = (list, tuple, set, frozenset, deque)


class Handle:
    """Something that copies of a module share, such as a pool: `copy.deepcopy` does not copy it, and the walk does not enter it."""

    def __deepcopy__(self, memo: object) -> Handle:
        return self


# Types that the walk does not enter: `copy.deepcopy` does not copy them, or they hold nothing of interest.
CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, torch.Generator, Handle)


class Reach:
    """A walk through everything that `copy.deepcopy` copies.

    On one device all of this takes part in the graph, or the forward reads it, whether it is registered or not.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: list[tuple[str, nn.Module]] = []  # registered ones first, in their order
        self.unregistered: dict[str, torch.Tensor] = {}  # parameters, and other tensors that require a gradient
        # Plain objects, such as configurations, in attributes and in containers, down to level _DEEPEST.
        self.objects: dict[str, Any] = {}
        self.seen: set[int] = set()
        self._functions = False  # whether there are any
        self._own = {id(parameter) for parameter in root.parameters()}
        for name, part in root.named_modules():
            self.modules.append((name, part))
            self.seen.add(id(part))
        self.registered = len(self.modules)  # how many of the modules are registered
        # self.modules grows during this loop, by modules in lists, by modules in these modules, and so on.
        for name, part in self.modules:
            for key, value in _copied_attributes(part).items():
                if key not in BARE:
                    self._visit(f"{name}.{key}" if name else key, value, 0)

    @property
    def leads_out(self) -> bool:
        """Whether there is a parameter or a module that is not registered."""
        return bool(self.unregistered) or len(self.modules) > self.registered

    @property
    def leads_on(self) -> bool:
        """Whether there is one of these, or a function, which may refer to them."""
        return self.leads_out or self._functions

    def _visit(self, path: str, value: Any, depth: int) -> None:
        if type(value) in SIMPLE or isinstance(value, CLOSED) or id(value) in self.seen or id(value) in self._own:
            return
        self.seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf):
                self.unregistered[path] = value
        elif isinstance(value, nn.Module):
            self._add_module(path, value)
        elif isinstance(value, (dict, *_SEQUENCES)):
            depth = depth + 1 if len(value) <= LONGEST else _DEEPEST + 1
            entries = list(value.items() if isinstance(value, dict) else enumerate(value))
            if not {type(one) for _, one in entries} <= SIMPLE:
                for key, one in entries:
                    self._visit(f"{path}[{key!r}]", one, depth)
        elif isinstance(value, types.FunctionType):
            self._functions = True
        elif isinstance(value, types.MethodType):
            self._visit(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._visit(path, one, depth + 1)
        else:
            own = not str(type(value).__module__).startswith("torch.") and not has_slots(type(value))
            if depth <= _DEEPEST and own and hasattr(value, "__dict__"):
                self.objects[path] = value
            for name, one in attributes_of(value):
                self._visit(f"{path}.{name}", one, depth + 1)

    def _add_module(self, path: str, module: nn.Module) -> None:
        for name, part in module.named_modules():
            if name and id(part) in self.seen:
                continue
            self.seen.add(id(part))
            inner = f"{path}.{name}" if name else path
            self.modules.append((inner, part))
            for key, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in self._own and id(parameter) not in self.seen:
                    self.seen.add(id(parameter))
                    self.unregistered[f"{inner}.{key}"] = parameter


def _copied_attributes(part: nn.Module) -> dict[str, Any]:
    """The attributes that copying takes along. A class may leave some out, such as the trainer of a `LightningModule`."""
    attributes, own = dict(vars(part)), getattr(type(part), "__getstate__", None)
    if own is None or own is getattr(object, "__getstate__", None) or hasattr(part, "__deepcopy__"):
        return attributes
    state: Any = own(part)
    return (
        {key: value for key, value in attributes.items() if state.get(key) is value}
        if type(state) is dict
        else attributes
    )


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of outer functions that the function refers to, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue


def held_by(function: types.FunctionType) -> list[Any]:
    """What the function refers to by its closure and its defaults."""
    held = [one for _, one in closure_of(function)]
    return [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def unwrapped(function: Any) -> Any:
    """What `functools.partial` was given."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: Any) -> str:
    """What messages call it."""
    function = unwrapped(function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def has_slots(kind: type) -> bool:
    """Whether instances have attributes outside of ``__dict__``. False for the standard library, which only caches values there."""
    return bool(copyreg._slotnames(kind)) and kind.__module__.partition(".")[0] not in LIBRARIES  # type: ignore[attr-defined]


def attributes_of(value: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        yield from list(vars(value).items())
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        if hasattr(value, name):
            yield name, getattr(value, name)
