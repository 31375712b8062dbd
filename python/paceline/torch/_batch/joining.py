"""Putting together what slices of a batch gave."""

from __future__ import annotations

import copy
import dataclasses
import enum
import operator
import sys
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.moving import Move, moved, same, set_field

# A part of the batch: the items [begin, end), and what belongs to them.
Piece = tuple[int, int, Any]
# Makes one tensor of the tensors in the same place of all pieces. The path names the place.
Leaf = Callable[[list[Piece], str], torch.Tensor]
# Puts entries, one per item, from the order of the pieces into that of the batch.
Order = Callable[[list[Any]], list[Any]]

_SIMPLE = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def concatenate(
    outputs: list[Piece], move: Move = same, own: Move = same, *, call: str = "predict", pad: float | None = None
) -> Any:
    """Put the outputs of slices back together along dimension 0, in the order of the items.

    Parameters
    ----------
    outputs
        ``(begin, end, output)`` for slices that cover the batch. `output` is a tensor or an array with one row per item, a list or tuple with one
        entry per item, or a nest or an object of these. A 0-dim floating-point tensor is taken for the mean over its slice. All else has to be the same in all slices.
    move
        Brings each tensor to where all of them are put together.
    own
        Applied to each tensor that is put together. If there is only one slice, `torch.cat`, which copies, does not run.
    call
        What errors name.
    pad
        What fills rows up to the width of the widest slice. None: other widths are an error.

    Raises
    ------
    InvalidArgument
        If something cannot be put together. The message names it.
    """
    outputs = sorted(outputs, key=lambda entry: entry[0])

    def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
        if all(tensor.dim() == 0 and tensor.is_floating_point() for _, _, tensor in pieces):
            return mean_of(pieces, move).clone()
        if pad is not None:
            pieces = _padded(pieces, pad)
        return rows_of(pieces, path, move, own, call)

    return joined(outputs, "output", leaf, call, lambda entries: in_order(entries, move, own))


def mean_of(pieces: list[Piece], move: Move) -> torch.Tensor:
    """The mean of the slices' means, by items."""
    if len(pieces) == 1:
        return move(pieces[0][2])
    items = sum(end - begin for begin, end, _ in pieces)
    parts = [move(tensor).double() * ((end - begin) / items) for begin, end, tensor in pieces]
    return torch.stack(parts).sum().to(pieces[0][2].dtype)


def in_order(entries: list[Any], move: Move, own: Move) -> list[Any]:
    """One entry per item, with tensors that are moved and have memory of their own, in the order in which `own` would put rows."""
    order = own(torch.arange(len(entries))).tolist()
    return [moved(entries[index], lambda one: move(one).clone()) for index in order]


def _padded(pieces: list[Piece], value: float) -> list[Piece]:
    """The same with rows that are filled up at their ends to one shape."""
    shapes = [piece.shape[1:] for _, _, piece in pieces]
    if len(set(map(len, shapes))) > 1:  # `rows_of` raises
        return pieces
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    filled = []
    for begin, end, piece in pieces:
        ends = [(0, most - size) for most, size in zip(widest, piece.shape[1:], strict=True)]
        places = [place for pair in reversed(ends) for place in pair]
        filled.append((begin, end, torch.nn.functional.pad(piece, places, value=value) if any(places) else piece))
    return filled


def rows_of(pieces: list[Piece], path: str, move: Move, own: Move, call: str) -> torch.Tensor:
    """The rows of all pieces, one piece after the other."""
    first = pieces[0][2]
    for begin, end, piece in pieces:
        check_rows(piece, end - begin, path, call)
        if piece.shape[1:] != first.shape[1:]:
            raise InvalidArgument(
                f"{call}: {path} has rows of shape {tuple(first.shape[1:])} in one micro-batch and {tuple(piece.shape[1:])} in another, "
                "so they make no tensor. With cost= or collate= micro-batches are padded to their own longest item, and generate() ends with the longest "
                "of its slice. predict(..., pad=value) fills rows up. Or return a list with one entry per item, or rows of a fixed size."
            )
    return own(move(first) if len(pieces) == 1 else torch.cat([move(piece) for _, _, piece in pieces]))


def check_rows(tensor: torch.Tensor, items: int, path: str, call: str) -> None:
    """Raise if the tensor does not have one row per item."""
    if tensor.dim() == 0 or tensor.shape[0] != items:
        raise InvalidArgument(
            f"{call}: {path} has shape {tuple(tensor.shape)} for {plural(items, 'item')}. Return tensors whose dimension 0 is the item; "
            "a value for the whole batch cannot be put together from slices."
        )


def joined(pieces: list[Piece], path: str, leaf: Leaf, call: str, order: Order | None = None) -> Any:
    """One nest out of nests of one structure. `leaf` makes its tensors, `order` its lists with one entry per item, if there may be such."""

    def inner(part: Callable[[Any], Any], name: str) -> Any:
        parts = [(begin, end, part(piece)) for begin, end, piece in pieces]
        return joined(parts, f"{path}{name}", leaf, call, order)

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
    if order is not None and _is_per_item(pieces):
        return type(first)(order([entry for _, _, piece in pieces for entry in piece]))
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
    if order is not None and is_array(first):
        return leaf([(begin, end, torch.from_numpy(piece)) for begin, end, piece in pieces], path).numpy()
    if order is not None and isinstance(first, _SIMPLE):
        other = next((piece for _, _, piece in pieces if piece != first), first)
        if other == first:
            return first
        raise InvalidArgument(
            f"{call}: {path} is {first!r} in one micro-batch and {other!r} in another. A value for the whole batch cannot be put together from "
            "slices. Return one row, or one entry of a list, per item."
        )
    if order is not None and hasattr(first, "__dict__") and not callable(first):
        result = copy.copy(first)
        for name in vars(first):
            vars(result)[name] = inner(operator.attrgetter(name), f".{name}")
        return result
    raise InvalidArgument(
        f"{call}: {path} is {type(first).__name__}, not a tensor, so it cannot be put together from slices."
    )


def _is_per_item(pieces: list[Piece]) -> bool:
    """Whether all are lists with one entry per item, and not nests of tensors with one row per item."""
    if not all(type(piece) in (list, tuple) and len(piece) == end - begin for begin, end, piece in pieces):
        return False
    same_length = len({len(piece) for _, _, piece in pieces}) == 1
    return not (same_length and all(_has_rows(entry, end - begin) for begin, end, piece in pieces for entry in piece))


def _has_rows(node: Any, items: int) -> bool:
    """Whether all that the node holds are tensors and arrays with one row per item."""
    if isinstance(node, torch.Tensor) or is_array(node):
        return bool(node.ndim and len(node) == items)
    if isinstance(node, (list, tuple)):
        inside = list(node)
    elif isinstance(node, (dict, UserDict)):
        inside = list(node.values())
    else:
        inside = [one for one in getattr(node, "__dict__", {}).values() if not isinstance(one, _SIMPLE)]
    inside = [one for one in inside if one is not None]
    return bool(inside) and all(_has_rows(one, items) for one in inside)


def is_array(value: Any) -> bool:
    """Whether it is one of NumPy's, if the program uses it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _described_entries(node: Any) -> str:
    return ", ".join(map(repr, node)) or "none" if isinstance(node, (dict, UserDict)) else f"{len(node)} of them"
