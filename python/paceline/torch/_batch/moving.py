"""Brings what a slice holds to where it is needed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

Move = Callable[[torch.Tensor], torch.Tensor]


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def moved(node: Any, move: Move) -> Any:
    """The nest with its tensors moved. Objects with a method ``to``, such as packed sequences, are moved by it."""
    if isinstance(node, torch.Tensor) and not node.is_nested:
        return move(node)
    if move is same:
        return node
    if callable(getattr(node, "to", None)):
        return node.to(move(torch.empty(0)).device)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        result: Any = copy.copy(node)
        for field in dataclasses.fields(node):
            set_field(result, field.name, moved(getattr(node, field.name), move))
        return result
    if isinstance(node, Mapping):
        return {key: moved(value, move) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        values = [moved(value, move) for value in node]
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    return node


def set_field(target: Any, name: str, value: Any) -> None:
    """Set a field with the class's own ``__setattr__``: a dataclass that is also a mapping may keep a second copy. Works for frozen ones, too."""
    try:
        setattr(target, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(target, name, value)
