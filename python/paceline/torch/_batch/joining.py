"""Putting together what slices of a batch gave."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.moving import Move, same, set_field

# A part of the batch: the items [begin, end), and what belongs to them.
Piece = tuple[int, int, Any]
# Makes one tensor of the tensors in the same place of all pieces. The path names the place.
Leaf = Callable[[list[Piece], str], torch.Tensor]


def concatenate(outputs: list[Piece], move: Move = same, own: Move = same, *, call: str = "predict") -> Any:
    """Put the outputs of slices back together along dimension 0, in the order of the items.

    Parameters
    ----------
    outputs
        ``(begin, end, output)`` for slices that cover the batch; `output` is a tensor or a nest of them.
    move
        Brings each tensor to where all of them are put together.
    own
        Applied to each tensor that is put together. If there is only one slice, `torch.cat`, which copies, does not run.
    call
        What errors name.

    Raises
    ------
    InvalidArgument
        If a leaf is not a tensor with one row per item. The message names it.
    """
    outputs = sorted(outputs, key=lambda entry: entry[0])
    return joined(outputs, "output", lambda pieces, path: rows_of(pieces, path, move, own, call), call)


def rows_of(pieces: list[Piece], path: str, move: Move, own: Move, call: str) -> torch.Tensor:
    """The rows of all pieces, one piece after the other."""
    first = pieces[0][2]
    for begin, end, piece in pieces:
        check_rows(piece, end - begin, path, call)
        if piece.shape[1:] != first.shape[1:]:
            raise InvalidArgument(
                f"{call}: {path} has rows of shape {tuple(first.shape[1:])} in one micro-batch and {tuple(piece.shape[1:])} in another, "
                "so they make no tensor. With cost= or collate= micro-batches are padded to their own longest item: pad what the function "
                "returns to one width, or reduce it to one row of fixed size per item."
            )
    return own(move(first) if len(pieces) == 1 else torch.cat([move(piece) for _, _, piece in pieces]))


def check_rows(tensor: torch.Tensor, items: int, path: str, call: str) -> None:
    """Raise if the tensor does not have one row per item."""
    if tensor.dim() == 0 or tensor.shape[0] != items:
        raise InvalidArgument(
            f"{call}: {path} has shape {tuple(tensor.shape)} for {plural(items, 'item')}. Return tensors whose dimension 0 is the item; "
            "a value for the whole batch cannot be put together from slices."
        )


def joined(pieces: list[Piece], path: str, leaf: Leaf, call: str) -> Any:
    """One nest out of nests of one structure. `leaf` makes its tensors."""

    def inner(part: Callable[[Any], Any], name: str) -> Any:
        return joined([(begin, end, part(piece)) for begin, end, piece in pieces], f"{path}{name}", leaf, call)

    first = pieces[0][2]
    other = next((piece for _, _, piece in pieces if type(piece) is not type(first)), first)
    if other is not first:
        raise InvalidArgument(
            f"{call}: {path} is {type(first).__name__} in one micro-batch and {type(other).__name__} in another."
        )
    if isinstance(first, torch.Tensor):
        return leaf(pieces, path)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        result: Any = copy.copy(first)
        for field in dataclasses.fields(first):
            set_field(result, field.name, inner(operator.attrgetter(field.name), f".{field.name}"))
        return result
    if isinstance(first, (dict, UserDict, list, tuple)):
        entries = set(first) if isinstance(first, (dict, UserDict)) else len(first)
        for _, _, piece in pieces:
            if (set(piece) if isinstance(piece, (dict, UserDict)) else len(piece)) != entries:
                raise InvalidArgument(
                    f"{call}: {path} has other entries in one micro-batch than in another: {_described_entries(first)} and "
                    f"{_described_entries(piece)}. Return the same for every slice, whatever its items are."
                )
    if isinstance(first, (dict, UserDict)):
        result = copy.copy(first)
        for key in first:
            result[key] = inner(operator.itemgetter(key), f"[{key!r}]")
        return result
    if isinstance(first, (list, tuple)):
        values = [inner(operator.itemgetter(index), f"[{index}]") for index in range(len(first))]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    if first is None:
        return None
    raise InvalidArgument(
        f"{call}: {path} is {type(first).__name__}, not a tensor, so it cannot be put together from slices."
    )


def _described_entries(node: Any) -> str:
    return ", ".join(map(repr, node)) or "none" if isinstance(node, (dict, UserDict)) else f"{len(node)} of them"
