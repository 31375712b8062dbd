"""Brings what a slice holds to where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.torch._batch.nest import entries_of, with_entries

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
        return node.to(move(torch.empty(0, device="cpu")).device)
    entries = entries_of(node)
    return node if entries is None else with_entries(node, {key: moved(value, move) for key, value, _ in entries})
