"""Putting together what slices of a batch gave."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.moving import Move, moved, same
from paceline.torch._batch.nest import entries_of, with_entries

# A part of the batch: the items [begin, end), and what belongs to them.
Piece = tuple[int, int, Any]
# Makes one tensor of the tensors in the same place of all pieces. The path names the place.
Leaf = Callable[[list[Piece], str], torch.Tensor]

_SIMPLE = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
_DEEPEST = 20  # objects in objects


def concatenate(
    outputs: list[Piece],
    move: Move = same,
    own: Move = same,
    *,
    call: str = "predict",
    pad: float | None = None,
    rows_only: bool = False,
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
    rows_only
        Take nests of tensors with one row per item, and nothing else.

    Raises
    ------
    InvalidArgument
        If something cannot be put together, or in two ways. The message names it.
    """
    outputs = sorted(outputs, key=lambda entry: entry[0])

    def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
        if not rows_only and all(tensor.dim() == 0 and tensor.is_floating_point() for _, _, tensor in pieces):
            return mean_of(pieces, move).clone()
        if pad is not None:
            pieces = _padded(pieces, pad)
        return rows_of(pieces, path, move, own, call)

    return joined(outputs, "output", leaf, call, None if rows_only else PerItem(move, own))


class PerItem:
    """Puts what items have, one entry each, from the order of the pieces into that of the batch."""

    def __init__(self, move: Move, own: Move) -> None:
        """`move` and `own`: as for `concatenate`."""
        self._move, self._own = move, own

    @property
    def home(self) -> torch.device:
        """Where tensors are moved to."""
        return self._move(torch.empty(0, device="cpu")).device

    def order(self, items: int) -> list[int]:
        """For each item its place among the pieces."""
        found: list[int] = self._own(torch.arange(items, device="cpu")).tolist()
        return found

    def list(self, entries: Sequence[Any]) -> Sequence[Any]:
        """The entries in the order of the items. Their tensors are moved, and have memory of their own."""
        return [moved(entries[index], lambda one: self._move(one).clone()) for index in self.order(len(entries))]


def mean_of(pieces: list[Piece], move: Move) -> torch.Tensor:
    """The mean of the slices' means, by items."""
    if len(pieces) == 1:
        return move(pieces[0][2])
    items = sum(end - begin for begin, end, _ in pieces)
    parts = [move(tensor).double() * ((end - begin) / items) for begin, end, tensor in pieces]
    return torch.stack(parts).sum().to(pieces[0][2].dtype)


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


def joined(pieces: list[Piece], path: str, leaf: Leaf, call: str, per_item: PerItem | None = None) -> Any:
    """One nest out of nests of one structure. `leaf` makes its tensors, `per_item` its lists with one entry per item, if there may be such."""
    first = pieces[0][2]
    other = next((piece for _, _, piece in pieces if type(piece) is not type(first)), first)
    if other is not first:
        raise InvalidArgument(
            f"{call}: {path} is {type(first).__name__} in one micro-batch and {type(other).__name__} in another."
        )
    if isinstance(first, torch.Tensor):
        return leaf(pieces, path)
    if per_item is not None and _is_per_item(pieces, path, call):
        return type(first)(per_item.list([entry for _, _, piece in pieces for entry in piece]))
    if (entries := entries_of(first)) is not None:
        insides = _insides(pieces, path, call)
        new = {
            key: joined([(*span, one[key]) for span, one in insides], path + way, leaf, call, per_item)
            for key, _, way in entries
        }
        return with_entries(first, new)
    if first is None:
        return None
    if per_item is None:
        raise InvalidArgument(
            f"{call}: {path} is {type(first).__name__}, not a tensor, so it cannot be put together from slices."
        )
    if is_array(first):
        return _array_of(pieces, path, call, per_item)
    if isinstance(first, torch.device):  # where the tensors beside it are
        return per_item.home
    if all(_equal(piece, first) for _, _, piece in pieces):
        return first
    if isinstance(first, _SIMPLE) or not hasattr(first, "__dict__") or callable(first) or path.count(".") > _DEEPEST:
        other = next(piece for _, _, piece in pieces if not _equal(piece, first))
        raise InvalidArgument(
            f"{call}: {path} is {_shortened(first)} in one micro-batch and {_shortened(other)} in another. A value for the whole batch cannot be put "
            "together from slices. Return one row, or one entry of a list, per item."
        )
    result = copy.copy(first)
    insides = _insides(pieces, path, call)
    for name in vars(first):
        vars(result)[name] = joined(
            [(*span, one[name]) for span, one in insides], f"{path}.{name}", leaf, call, per_item
        )
    return result


def _inside(node: Any) -> dict[Any, Any]:
    """What a nest or an object holds."""
    entries = entries_of(node)
    if entries is None:
        return dict(getattr(node, "__dict__", {}))
    return {key: value for key, value, _ in entries}


def _insides(pieces: list[Piece], path: str, call: str) -> list[tuple[tuple[int, int], dict[Any, Any]]]:
    """What each piece holds. Raises if they have not the same entries."""
    found = [((begin, end), _inside(piece)) for begin, end, piece in pieces]
    first = found[0][1]
    other = next((inside for _, inside in found if inside.keys() != first.keys()), None)
    if other is not None:
        listed = isinstance(pieces[0][2], (list, tuple))
        one, two = (
            f"{len(each)} of them" if listed else ", ".join(map(repr, each)) or "none" for each in (first, other)
        )
        raise InvalidArgument(
            f"{call}: {path} has other entries in one micro-batch than in another: {one} and {two}. "
            "Return the same for every slice, whatever its items are, or a list with one entry per item."
        )
    return found


def _array_of(pieces: list[Piece], path: str, call: str, per_item: PerItem) -> Any:
    """The rows of NumPy arrays, of any type."""
    import numpy as np

    for begin, end, piece in pieces:
        if not piece.ndim or len(piece) != end - begin or piece.shape[1:] != pieces[0][2].shape[1:]:
            raise InvalidArgument(
                f"{call}: {path} is an array of shape {piece.shape} for {plural(end - begin, 'item')}. Return arrays whose dimension 0 is the item, with rows of "
                "one shape, or a list with one entry per item."
            )
    rows = np.concatenate([piece for _, _, piece in pieces])
    return rows[per_item.order(len(rows))]


def _is_per_item(pieces: list[Piece], path: str, call: str) -> bool:
    """Whether all are lists with one entry per item, and not nests of tensors with one row per item.

    Both may be so where slices have as many items as a list has entries. A tuple is a nest then, and a list is refused.
    """
    if not all(type(piece) in (list, tuple) and len(piece) == end - begin for begin, end, piece in pieces):
        return False
    if len({len(piece) for _, _, piece in pieces}) > 1:
        return True
    kinds = {_kind_of([(b, e, piece[index]) for b, e, piece in pieces]) for index in range(len(pieces[0][2]))}
    if "other" in kinds or ("same" in kinds and "rows" not in kinds):
        return True
    if len(pieces) > 1 and type(pieces[0][2]) is list and len(kinds) == 1 and pieces[0][2][0] is not None:
        raise InvalidArgument(
            f"{call}: {path} is a list of {len(pieces[0][2])} tensors for slices of as many items, so it may be one tensor per item, or tensors for the whole "
            "slice. Return a tuple for the latter, and for the former torch.stack, or a list of dictionaries."
        )
    return False


def _kind_of(pieces: list[Piece]) -> Literal["rows", "same", "nothing", "other"]:
    """What is in one place of a nest in all pieces: tensors with one row per item, a value that is the same, None or means, or something else."""
    nodes = [piece for _, _, piece in pieces]
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes):
        return "other"
    if isinstance(first, torch.Tensor) or is_array(first):
        if all(node.ndim and len(node) == end - begin for begin, end, node in pieces):
            return "rows"
        means = isinstance(first, torch.Tensor) and first.is_floating_point() and all(node.ndim == 0 for node in nodes)
        return "nothing" if means else "other"
    if first is None:
        return "nothing"
    if isinstance(first, _SIMPLE):
        return "same" if all(_equal(node, first) for node in nodes) else "other"
    insides = [_inside(node) for node in nodes]
    if any(inside.keys() != insides[0].keys() for inside in insides):
        return "other"
    kinds = {
        _kind_of([(b, e, inside[key]) for (b, e, _), inside in zip(pieces, insides, strict=True)]) for key in insides[0]
    }
    if "other" in kinds:
        return "other"
    return "rows" if "rows" in kinds else "same"


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    except Exception:  # their own comparison
        return False


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_array(value: Any) -> bool:
    """Whether it is one of NumPy's, if the program uses it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
