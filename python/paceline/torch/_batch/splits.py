"""Parts of a batch that are cut in ways of their own: packed sequences, nested tensors, and types of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from paceline import InvalidArgument
from paceline.torch._batch.moving import Move, moved


class Splitter(Protocol):
    """Cuts objects of one type. Workers call `slice` at the same time, so it must not change `data`.

    If `loss_fn` changes its slices in place, `slice` has to return copies, since items may run twice.
    """

    def length(self, data: Any) -> int:
        """The number of items."""

    def slice(self, data: Any, begin: int, end: int) -> Any:
        """Items ``[begin, end)``. Tensors in the result are brought to the device, and objects with a method ``to`` by that."""


Cutter = Callable[[Any, int, int], Any] | Splitter
# How to cut the batch, or objects of certain types in its nest.
Split = Cutter | Mapping[type, Cutter]


class Leaf:
    """A part of the batch with items."""

    in_order = False  # whether it can be cut into neighbouring items only
    places: tuple[torch.device, ...] = ()
    size: int

    def cut(self, rows: torch.Tensor, move: Move) -> Any:
        """The items whose indices are `rows`, on the host, where they are needed."""
        raise TypeError("Leaf.cut is for subclasses")


def leaf_of(node: Any, path: str, cutters: Mapping[type, Cutter], offsets: dict[int, Offsets]) -> Leaf | None:
    """How to cut `node`, if it is no plain tensor. Nested tensors that share their `offsets` share those of their slices, too.

    Raises
    ------
    InvalidArgument
        If `node` has no number of items, or cannot be cut.
    """
    for kind, cutter in cutters.items():
        if isinstance(node, kind):
            return _Own(node, path, cutter)
    nested = isinstance(node, torch.Tensor) and node.is_nested
    if not nested and not isinstance(node, PackedSequence):
        return None
    if (node if nested else node.data).requires_grad:
        raise InvalidArgument(
            f"batch: {path} requires grad. Gradients of inputs are not collected from the devices; detach it."
        )
    if not nested:
        return _Packed(node)
    return _Jagged(node, path, offsets) if node.layout == torch.jagged else _Nested(node)


def cutters_of(split: Split | None, batch: Any) -> Mapping[type, Cutter]:
    """The cutters by type. One that is given without a type is for the batch itself."""
    cutters = {} if split is None else split if isinstance(split, Mapping) else {type(batch): split}
    for kind, cutter in cutters.items():
        cuts = callable(cutter) or all(callable(getattr(cutter, name, None)) for name in ("length", "slice"))
        if not isinstance(kind, type) or not cuts:
            raise InvalidArgument(
                f"split: {cutter!r} for {kind!r}. Give a function split(batch, begin, end), an object with length(batch) and slice(batch, begin, end), or a "
                "mapping from types in the batch to these."
            )
    return cutters


class _Own(Leaf):
    """An object of a type that the user's `split` is for."""

    in_order = True

    def __init__(self, node: Any, path: str, cutter: Any) -> None:
        self._node = node
        self._slice = getattr(cutter, "slice", cutter)
        length = getattr(cutter, "length", None)
        if length is None and not hasattr(node, "__len__"):
            raise InvalidArgument(
                f"split: {path} is a {type(node).__name__}, whose number of items is not known: it has no len(). Give an object with "
                "length(batch) and slice(batch, begin, end) in place of the function."
            )
        self.size = int(len(node) if length is None else length(node))

    def cut(self, rows: torch.Tensor, move: Move) -> Any:
        begin = int(rows[0])
        if not _neighbours(rows):  # only `check` asks for such rows; a step with costs is refused earlier
            raise InvalidArgument("split: the items of a slice are no neighbours.")
        return moved(self._slice(self._node, begin, begin + len(rows)), move)


class _Packed(Leaf):
    """A packed sequence. Its slices are packed again, with their items in the order of the batch."""

    def __init__(self, node: PackedSequence) -> None:
        self._padded, self._lengths = pad_packed_sequence(node, batch_first=True)
        self.size = len(self._lengths)
        self.places = (node.data.device,)

    def cut(self, rows: torch.Tensor, move: Move) -> Any:
        lengths = self._lengths[rows]
        padded = _taken(self._padded, rows)[:, : int(lengths.max())]
        return moved(pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False), move)


class _Nested(Leaf):
    """A nested tensor with torch.strided layout."""

    def __init__(self, node: torch.Tensor) -> None:
        self._items = node.unbind()
        self.size = len(self._items)
        self.places = (node.device,)

    def cut(self, rows: torch.Tensor, move: Move) -> Any:
        return torch.nested.as_nested_tensor([move(self._items[row]) for row in rows.tolist()])


class _Jagged(Leaf):
    """A nested tensor with torch.jagged layout. Its ragged dimension is the one after the items."""

    def __init__(self, node: Any, path: str, shared: dict[int, Offsets]) -> None:
        if node.lengths() is not None or node._ragged_idx != 1:
            raise InvalidArgument(
                f"batch: {path} is a nested tensor with holes, or with its ragged dimension elsewhere than after the items. Pass {path}.contiguous(), "
                "or transpose it in loss_fn."
            )
        self._values = node.values()
        self._offsets = shared.setdefault(id(node.offsets()), Offsets(node.offsets()))
        self.size = len(self._offsets.bounds) - 1
        self.places = (node.device,)

    def cut(self, rows: torch.Tensor, move: Move) -> Any:
        bounds = self._offsets.bounds
        if _neighbours(rows):
            # A copy, since what loss_fn changes in place would be changed twice if the items run twice.
            values = self._values[bounds[int(rows[0])] : bounds[int(rows[-1]) + 1]].clone()
        else:
            values = torch.cat([self._values[bounds[row] : bounds[row + 1]] for row in rows.tolist()])
        return torch.nested.nested_tensor_from_jagged(move(values), self._offsets.of(rows, move))


class Offsets:
    """The offsets of jagged tensors. PyTorch takes two such tensors for equal in shape only if they share this very tensor."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self._kept = offsets  # whose identity has to stay
        self.bounds: list[int] = offsets.tolist()
        self._lengths = offsets.cpu().diff()
        self._made: dict[tuple[torch.device, bytes], torch.Tensor] = {}

    def of(self, rows: torch.Tensor, move: Move) -> torch.Tensor:
        """The offsets of a slice, the same tensor for all that are cut alike."""
        key = move(self._lengths[:0]).device, rows.numpy().tobytes()
        if key not in self._made:
            offsets = torch.nn.functional.pad(self._lengths[rows].cumsum(0), (1, 0))
            self._made.setdefault(key, move(offsets))
        return self._made[key]


def _neighbours(rows: torch.Tensor) -> bool:
    return bool((rows.diff() == 1).all())


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if _neighbours(rows):
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return tensor.index_select(0, rows.to(tensor.device))
