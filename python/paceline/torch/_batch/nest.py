"""Nests of lists, tuples, mappings and dataclasses, as batches and outputs are.

PyTorch's pytree takes dataclasses and mappings of other types, such as what tokenizers return, for leaves, until they are registered for the whole
process.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from paceline import Cancelled


def entries_of(node: Any) -> list[tuple[Any, Any, str]] | None:
    """What a nest holds: keys, values, and how a path goes on to each. None for a leaf. Fields of a named tuple have their names as keys."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(one.name, getattr(node, one.name), f".{one.name}") for one in dataclasses.fields(node)]
    if isinstance(node, Mapping):
        return [(key, value, f"[{key!r}]") for key, value in node.items()]
    if isinstance(node, (list, tuple)):
        names = getattr(node, "_fields", None)
        return [(names[i], one, f".{names[i]}") if names else (i, one, f"[{i}]") for i, one in enumerate(node)]
    return None


def with_entries(node: Any, new: Mapping[Any, Any]) -> Any:
    """A nest of the same type with these entries in the place of its own."""
    if dataclasses.is_dataclass(node):
        result: Any = copy.copy(node)
        for name, value in new.items():
            _set_field(result, name, value)
        return result
    if isinstance(node, Mapping):
        plain = isinstance(node, (dict, UserDict))
        result = copy.copy(node) if plain else dict(node)
        for key, value in new.items():
            result[key] = value
        return result if plain else _like(node, result)
    values = list(node)
    for place, (key, *_) in enumerate(entries_of(node) or ()):
        values[place] = new.get(key, values[place])
    if hasattr(node, "_fields"):
        return type(node)(*values)
    return values if type(node) is list else type(node)(values)


def _set_field(target: Any, name: str, value: Any) -> None:
    """Set a field with the class's own ``__setattr__``: a dataclass that is also a mapping may keep a second copy. Works for frozen ones, too."""
    try:
        setattr(target, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(target, name, value)


def _like(node: Mapping[Any, Any], contents: dict[Any, Any]) -> Any:
    """A mapping of the type of `node`. A dict, if the type makes anything else of them: a shallow copy may write through to the user's mapping."""
    kind: Any = type(node)
    try:
        made = kind(contents)
        same = (
            type(made) is kind and list(made) == list(contents) and all(made[key] is contents[key] for key in contents)
        )
        state, wanted = getattr(made, "__dict__", {}), getattr(node, "__dict__", {})
        same &= state.keys() == wanted.keys()
        same &= all(value is wanted[name] or isinstance(value, (Mapping, list)) for name, value in state.items())
    except Cancelled:  # gets a worker out of Python
        raise
    except Exception:  # the type is the user's
        return contents
    return made if same else contents
