"""Reads from the bytecode of a hook what it can change besides its arguments. A hook that only looks needs no watching."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections import deque
from typing import Any, NamedTuple

import torch

from paceline.torch._replicas.reach import LONGEST, closure_of

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OF_CONTAINERS = frozenset(name for kind in _CONTAINERS for name in dir(kind) if not name.startswith("__"))
_LOOKING = frozenset({"get", "keys", "values", "items", "index", "count", "copy", "training"})
# Attributes that change nothing, in any of the usual types.
_HARMLESS = _LOOKING | {name for name in dir(torch.Tensor) if not name.endswith("_")} - _OF_CONTAINERS
_REFLECTING = {"setattr", "delattr", "getattr", "globals", "locals", "vars", "map"}
_REFLECTING |= {"exec", "eval", "compile", "__import__"}


class Effects(NamedTuple):
    """What a hook may do. True also means: not known."""

    keeps: bool  # stores something outside of its own variables
    in_place: bool  # writes into an existing tensor


_ANYTHING = Effects(True, True)
_NONE = Effects(False, False)


def effects(content: Any, seen: set[int] | None = None) -> Effects:
    """The effects of calling a hook, and what it wraps or calls. What cannot be called has none: `_of_code` handles attributes."""
    seen = set() if seen is None else seen
    if isinstance(content, (types.FunctionType, types.MethodType, functools.partial)):
        if id(content) in seen:
            return _NONE
        seen.add(id(content))
    if isinstance(content, functools.partial):
        return _either(*(effects(one, seen) for one in (content.func, *content.args, *content.keywords.values())))
    if isinstance(content, types.MethodType):
        return effects(content.__func__, seen)
    if isinstance(content, types.FunctionType):
        if str(content.__module__).startswith("torch."):
            return _NONE
        steps = [one for code in codes_of(content.__code__) for one in dis.get_instructions(code)]
        names = {one.argval for one in steps if "GLOBAL" in one.opname}
        outside = [content.__globals__.get(name, getattr(builtins, name, None)) for name in names]
        outside += [inside for _, inside in closure_of(content)]
        outside += [*(content.__defaults__ or ()), *(content.__kwdefaults__ or {}).values()]
        return _either(_of_code(content.__code__), *(effects(one, seen) for one in outside))
    if isinstance(content, types.BuiltinFunctionType):
        known = content.__module__ == "builtins" and content.__name__ not in _REFLECTING
        return _NONE if known else _ANYTHING
    if isinstance(content, type):
        return _NONE if content.__module__ == "builtins" and content is not map else _ANYTHING
    if isinstance(content, _CONTAINERS) and type(content).__module__ in ("builtins", "collections"):
        inside = list(content.values() if isinstance(content, dict) else content)[-LONGEST:]
        return _ANYTHING if any(callable(one) for one in inside) else _NONE
    return _ANYTHING if callable(content) and not isinstance(content, torch.Tensor) else _NONE


def _either(*found: Effects) -> Effects:
    return Effects(any(one.keeps for one in found), any(one.in_place for one in found))


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """The code itself and that of the functions inside of it."""
    inner = [one for constant in code.co_consts if isinstance(constant, types.CodeType) for one in codes_of(constant)]
    return [code, *inner]


def _of_code(whole: types.CodeType) -> Effects:
    keeps = in_place = False
    for code in codes_of(whole):
        if any(isinstance(constant, tuple) and "out" in constant for constant in code.co_consts):
            return _ANYTHING  # the keyword out, as in torch.add(a, b, out=c)
        for one in dis.get_instructions(code):
            name = one.opname
            if name.startswith("IMPORT"):
                return _ANYTHING
            augments = name.startswith("INPLACE") or (name == "BINARY_OP" and one.argrepr.endswith("="))
            if augments or name in ("STORE_SUBSCR", "STORE_SLICE"):
                keeps = in_place = True
            elif name.startswith(("STORE_GLOBAL", "STORE_ATTR", "STORE_NAME", "DELETE_")):
                keeps = True
            elif name == "STORE_DEREF":
                keeps |= one.argval in code.co_freevars
            elif name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")) and one.argval not in _HARMLESS:
                keeps = True
                in_place |= one.argval not in _OF_CONTAINERS
    return Effects(keeps, in_place)
