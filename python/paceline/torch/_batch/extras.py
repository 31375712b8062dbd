"""What ``loss_fn`` returns beside the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.items import Items
from paceline.torch._batch.joining import Piece, check_rows, joined, rows_of
from paceline.torch._batch.moving import Move
from paceline.torch._batch.objective import Objective


def parted(result: Any) -> tuple[Any, Any]:
    """The loss, and the extras or None. Only a plain pair that begins with a loss has extras."""
    if type(result) is tuple and len(result) == 2 and isinstance(result[0], (torch.Tensor, Mapping)):
        return result
    return result, None


_LARGE = 2**24  # bytes; less is not worth a word


def explain_large(extras: Any) -> str:
    """A line that names the largest of the whole batch's extras, if it is large."""
    sizes: dict[str, int] = {}

    def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
        tensor: torch.Tensor = pieces[0][2]
        sizes[path] = tensor.nbytes
        return tensor

    if extras is not None:
        joined([(0, 1, extras)], "extras", leaf, "step")
    path = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(path, 0) < _LARGE:
        return ""
    return (
        f"Large: {path} has {sizes[path] / 1e6:.0f} MB for the whole batch, which each step brings to one device and keeps until the next. If less would do, "
        "return that beside the loss, such as an argmax, or a sum with a row per item.\n"
    )


class Extras:
    """The extras of one run of a batch.

    Tensors with dimensions have one row per item, and come back in the order of the batch. 0-dimensional tensors are means over the items of
    their slice, and come back as the mean over the batch, weighted like the loss, or like the term of the same name.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._pieces: list[Piece] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, begin: int, end: int, extras: Any) -> None:
        """Take the extras of a slice, on the worker that ran it."""

        def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
            tensor: torch.Tensor = pieces[0][2]
            if tensor.dim():
                check_rows(tensor, end - begin, path, "step")
            elif not tensor.is_floating_point():
                raise InvalidArgument(
                    f"step: {path} is a 0-dim tensor of {tensor.dtype}. A 0-dim tensor is taken for the mean over its slice, which integers such "
                    "as counts are not. Return one value per item, or a mean: (prediction == target) or (prediction == target).float().mean()."
                )
            return tensor.detach()

        self._pieces.append((begin, end, joined([(begin, end, extras)], "extras", leaf, "step")))

    def whole(self, items: Items | None, move: Move) -> Any:
        """The extras of the batch, or None if there are none. `move` brings tensors to where they are put together."""
        if not self._pieces:
            return None

        def leaf(pieces: list[Piece], path: str) -> torch.Tensor:
            if any(tensor.dim() for _, _, tensor in pieces):
                return rows_of(pieces, path, move, torch.clone if items is None else items.restored, "step")
            objective = self._objective.of_extra(path)
            busy = [piece for piece in pieces if not objective.idle(*piece[:2])]
            if not busy:  # a batch without weight, which only total= allows
                return torch.full_like(pieces[0][2], torch.nan)
            parts = [move(tensor).double() * objective.share(begin, end) for begin, end, tensor in busy]
            mean: torch.Tensor = torch.stack(parts).sum().to(pieces[0][2].dtype)
            return mean

        pieces = sorted(self._pieces, key=lambda piece: piece[0])
        return joined(pieces, "extras", leaf, "step")
