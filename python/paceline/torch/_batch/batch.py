"""Splitting a batch: any nest of tuples, lists, mappings and dataclasses with tensors in it."""

from __future__ import annotations

import copy
import functools
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._batch.moving import Move, moved, same
from paceline.torch._batch.nest import entries_of, with_entries
from paceline.torch._batch.splits import Leaf as OwnLeaf
from paceline.torch._batch.splits import Offsets, Split, cutters_of, leaf_of

# The first function takes items out of a tensor, the second brings a tensor to where it is needed.
Slicer = Callable[[Move, Move], Any]
# Which dimension is the item: of all tensors, or a nest for a nest of tensors. None: a tensor that is not cut.
BatchDim = int | Mapping[Any, Any] | Sequence[Any] | None
_SAMPLES = "a list of samples, one per item (the DataLoader's collate_fn=list makes it), goes in with collate="
_MANY = 4  # tensors that may be one item each


class Batch:
    """A batch that can be cut along its items.

    Tensors with dimensions are cut along dimension 0, as views. What cannot be items goes along unchanged. With `gradients` tensors that are cut
    may require gradients. `batch_dim` says where tensors have the item in another dimension; their slices are contiguous copies. `split` cuts
    the batch, or objects of the types that it names.

    Raises
    ------
    InvalidArgument
        If there is nothing to cut, if two leaves disagree about the number of items, or if a leaf looks like items but
        is not a tensor, or if `batch_dim` does not fit. The message names the leaf.
    """

    cut_inside = ""  # how it was cut, if that may be what the caller did not mean

    def __init__(
        self, data: Any, batch_dim: BatchDim = 0, *, gradients: bool = False, split: Split | None = None
    ) -> None:
        self._gradients = gradients
        self._cutters = cutters_of(split, data)
        self._offsets: dict[int, Offsets] = {}
        self.in_order = False  # whether it can be cut into neighbouring items only
        self.leaves: list[torch.Tensor] = []  # the tensors that are cut: views with the item first
        self._sized: list[tuple[str, int]] = []
        self._dims: list[int] = []  # where the user's tensors have the item
        self.places: dict[torch.device, str] = {}  # where tensors are, and the path of the first tensor there
        self._item_shapes: list[tuple[torch.Size, torch.dtype]] = []
        # May have one entry for each item: its path, its length, and what it is.
        self._uncut: list[tuple[str, int | None, str]] = []
        slicer = self._slicer(data, "batch", batch_dim)
        if not self._sized:
            raise InvalidArgument(
                f"batch: no tensor with dimensions in it ({_described(data)}), so there are no items to split. Pass tensors whose dimension 0 "
                f"is the item; torch.from_numpy and torch.as_tensor make them. For objects of another type say split= how to cut them; {_SAMPLES}."
            )
        first_path, self.size = self._sized[0]
        if len(self._sized) > 1:
            self._check_sizes()
        if self.size == 0:
            raise InvalidArgument(
                f"batch: {first_path} has no items (its dimension {self._dims[0]} is 0). Skip empty batches; with group= pass None."
            )
        for path, length, kind in self._uncut:
            if self.size > 1 and length in (self.size, None):
                raise InvalidArgument(
                    f"batch: {path} is {kind}{f' of {length}, as many as there are items' if length else ', which seems to hold items'}, and cannot be "
                    "split: every slice would get all of it. Pass a tensor: numbers by torch.as_tensor, other objects by a tensor of their indices that "
                    f"loss_fn looks up. Or say split= how to cut objects of that type; {_SAMPLES}. batch_dim= has None for what belongs to the "
                    "whole batch."
                )
        if slicer is None:  # cannot happen where a leaf has a size; for the type checker
            raise InvalidArgument("batch: nothing to split.")
        self._slice = slicer
        if (
            len(self.leaves) >= _MANY
            and isinstance(data, (list, tuple))
            and len(data) == len(self.leaves)
            and len({(leaf.dtype, leaf.dim()) for leaf in self.leaves}) == 1
            and self.leaves[0].dim() > 1
        ):
            self.cut_inside = f"whose {len(data)} tensors were cut along dimension {self._dims[0]} (if each of them is an item: {_SAMPLES})"
        # For each thread what its slice is cut from, the slice, and how many of its changes are counted.
        self._views: dict[int, list[tuple[torch.Tensor, torch.Tensor, list[int]]]] = {}
        self.item_shapes = tuple(self._item_shapes)  # the shape of one item and the type, of every tensor that is cut

    def _check_sizes(self) -> None:
        """Raise if two tensors have different numbers of items."""
        first_path, _ = self._sized[0]
        for (path, size), (shape, _), dim in zip(self._sized, self._item_shapes, self._dims, strict=True):
            if size != self.size:
                time = first_path if self._item_shapes[0][0][:1] == (size,) else path
                turns = size in self._item_shapes[0][0][:1] or self.size in shape[:1]
                turn = f" If {time} is [time, batch], pass {time}.transpose(0, 1)." if turns else ""
                leading = self.leaves[0].movedim(0, self._dims[0]).shape[:2]
                if leading.numel() == size and len(leading) == 2:
                    turn += f" If {path} is flattened, pass it in the shape {list(leading)} of {first_path}, and flatten it in loss_fn."
                raise InvalidArgument(
                    f"batch: {path} has {plural(size, 'item')} along dimension {dim}, but {first_path} has {self.size}. All tensors of a batch need the "
                    f"same length there; make what belongs to the whole batch 0-dimensional, or give it to loss_fn by a closure.{turn} "
                    f"batch_dim= says where tensors have the item in another dimension. Of what no tensor of the batch can hold, {_SAMPLES}."
                )

    def padded_to(self, begin: int, end: int) -> float | None:
        """What the shapes of items ``[begin, end)`` depend on besides `item_shapes`. None if they depend on nothing else."""
        return None

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        """Items ``[begin, end)``, in the same nest. `move` brings each tensor to where it is needed."""
        return self._slice(lambda tensor: tensor[begin:end], move)

    def slice_apart(self, begin: int, end: int, move: Move = same) -> Any:
        """Like `slice`, for devices that run at once. Each thread has one such slice at a time.

        Views share one counter of changes in place. So a change of one slice would fail the backward of another one, which saved other items.
        Here each slice has its own, but for tensors that share memory within the batch.
        """
        self.next_slice()
        return self._slice(lambda tensor: self.apart(tensor, tensor[begin:end]), move)

    def next_slice(self) -> None:
        """Let go of the slice that this thread has taken."""
        self.count_edits()
        self._views[threading.get_ident()] = []

    def apart(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """The `view` of a tensor of the batch, with a counter of its own."""
        plain = type(tensor) is torch.Tensor and not view.requires_grad and not view.is_inference()
        if not plain or (len(self.leaves) > 1 and tensor.untyped_storage().data_ptr() in self._shared_memory):
            return view
        own = view.data
        self._views[threading.get_ident()].append((tensor, own, [own._version]))
        return own

    @functools.cached_property
    def _shared_memory(self) -> set[int]:
        """The addresses of memory that several tensors have in common."""
        addresses = [one.untyped_storage().data_ptr() for one in self.leaves if type(one) is torch.Tensor]
        return {one for one in addresses if addresses.count(one) > 1}

    def count_edits(self, *, of_all: bool = False) -> None:
        """Count changes in place of this thread's slice, or `of_all` threads', as changes of the tensors that were cut.

        Before each backward, because graphs that reach these tensors by a closure have to notice.
        """
        for views in list(self._views.values()) if of_all else [self._views.get(threading.get_ident(), [])]:
            for tensor, view, seen in views:
                if view._version != seen[0]:
                    seen[0] = view._version
                    torch.autograd.graph.increment_version(tensor)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """The indices of items ``[begin, end)`` in the caller's batch."""
        return torch.arange(begin, end, device="cpu")

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are cut, with the item first, each with its path."""
        found = zip(self._sized, self.leaves, self._dims, strict=True)
        return [(f"{path}.movedim({dim}, 0)" if dim else path, leaf) for (path, _), leaf, dim in found]

    @property
    def structure(self) -> Any:
        """The nest: where its tensors are, how many dimensions they have and of which type, but not how large they are."""
        return tuple(
            [(path, len(shape), dtype) for (path, _), (shape, dtype) in zip(self._sized, self.item_shapes, strict=True)]
        )

    def gathered(self, rows: torch.Tensor, move: Move = same) -> Any:
        """Like `slice`, for items from anywhere in the batch. `rows` has their indices."""

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            there = rows if tensor.device == rows.device else rows.to(tensor.device, non_blocking=True)
            return tensor.index_select(0, there)

        return self.cut(gather, move)

    def cut(self, take: Move, move: Move = same) -> Any:
        """The same nest, with what `take` makes of each tensor with items."""
        return self._slice(take, move)

    def part(self, begin: int, end: int) -> Batch:
        """Items ``[begin, end)`` as a batch of their own, which counts them from 0."""
        there = copy.copy(self)
        there.size = end - begin
        there._slice = lambda take, move: self._slice(lambda tensor: take(tensor[begin:end]), move)
        return there

    def described(self, begin: int, end: int) -> str:
        """The items of a slice in words."""
        items = f"items {begin} to {end - 1} of the batch" if end - begin > 1 else f"item {begin} of the batch"
        return f"{items}, {self.cut_inside}" if self.cut_inside else items

    def _slicer(self, node: Any, path: str, dim: BatchDim) -> Slicer | None:
        """A function that cuts `node`, or None if `node` goes along unchanged."""
        plain = type(node) is torch.Tensor and not self._cutters and not node.is_nested
        own = None if plain else leaf_of(node, path, self._cutters, self._offsets)
        if own is not None:
            return self._own(node, own, path, dim)
        if isinstance(node, torch.Tensor):
            return self._tensor(node, path, dim)
        entries = entries_of(node)
        if entries is not None:
            return self._nest(node, entries, path, dim)
        shape = getattr(node, "shape", None)
        if dim is None:
            return None
        if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
            self._uncut.append((path, shape[0], f"an array ({type(node).__name__})"))
        elif _holds_tensors(node):
            self._uncut.append((path, None, f"an object ({type(node).__name__})"))
        return None

    def _own(self, node: Any, leaf: OwnLeaf, path: str, dim: BatchDim) -> Slicer:
        for place in leaf.places:
            self.places.setdefault(place, path)
        if dim is None:
            return lambda take, move: moved(node, move)
        if dim != 0:
            raise InvalidArgument(
                f"batch_dim: {dim!r} for {path}, a {type(node).__name__}, which has no dimension to choose. Leave it out there."
            )
        self.in_order |= leaf.in_order
        # Its items are cut wherever those of a tensor with their indices are.
        index = torch.arange(leaf.size, device="cpu")
        self.leaves.append(index)
        self._sized.append((path, leaf.size))
        self._dims.append(0)
        self._item_shapes.append((torch.Size(()), index.dtype))
        return lambda take, move: leaf.cut(take(index), move)

    def _tensor(self, node: torch.Tensor, path: str, dim: BatchDim) -> Slicer | None:
        if node.layout is not torch.strided:
            raise InvalidArgument(
                f"batch: {path} is sparse ({node.layout}), and PyTorch does not cut such tensors into slices. Pass {path}.to_dense(). If that "
                "takes too much memory, pass torch.arange(items) in its place, and let loss_fn select its rows: "
                "sparse.index_select(0, indices)."
            )
        self.places.setdefault(node.device, path)
        if node.requires_grad and (node.dim() == 0 or not self._gradients):
            raise InvalidArgument(
                f"batch: {path} requires grad. Gradients of inputs are not collected from the devices; pass {path}.detach()."
            )
        if dim is None:
            return lambda take, move: move(node)
        if node.dim() == 0:
            # Operators accept a 0-dimensional host tensor on any device. One on a GPU has to be on the right GPU.
            return None if node.device.type == "cpu" else lambda take, move: move(node)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -node.dim() <= dim < node.dim():
            raise InvalidArgument(
                f"batch_dim: {dim!r} for {path}, a tensor of shape {tuple(node.shape)}. Give the dimension that is the item, or None for a tensor that "
                "belongs to the whole batch."
            )
        there = dim % node.dim()
        front = node.movedim(there, 0) if there else node
        self.leaves.append(front)
        self._sized.append((path, front.shape[0]))
        self._dims.append(there)
        self._item_shapes.append((front.shape[1:], node.dtype))
        if there == 0:
            return lambda take, move: move(take(node))
        # Recurrent layers want contiguous states.
        return lambda take, move: move(take(front).movedim(0, there).contiguous())

    def _nest(self, node: Any, entries: list[tuple[Any, Any, str]], path: str, dim: BatchDim) -> Slicer | None:
        keys, ordered = [key for key, *_ in entries], isinstance(node, (list, tuple))
        dims = _dims_of(dim, keys, path, ordered=ordered)
        parts = []
        for (key, value, way), inner in zip(entries, dims, strict=True):
            slicer = self._slicer(value, path + way, inner)
            if slicer is not None:
                parts.append((key, slicer))
        if parts:
            return lambda take, move: with_entries(node, {key: slicer(take, move) for key, slicer in parts})
        if ordered and node and not hasattr(node, "_fields") and dim is not None and not _is_constant(node):
            self._uncut.append((path, len(node), f"a {type(node).__name__} of {type(node[0]).__name__}"))
        return None


def _dims_of(dim: BatchDim, keys: Sequence[Any], path: str, *, ordered: bool = False) -> list[Any]:
    """The part of `dim` for each entry of a nest. Entries that a mapping does not name have the item in dimension 0."""
    if isinstance(dim, Mapping):
        unknown = [key for key in dim if key not in keys]
        if unknown:
            raise InvalidArgument(
                f"batch_dim: it names {unknown[0]!r}, which {path} does not have. It has {', '.join(map(repr, keys)) or 'nothing'}."
            )
        return [dim.get(key, 0) for key in keys]
    if isinstance(dim, (list, tuple)):
        if not ordered or len(dim) != len(keys):
            raise InvalidArgument(
                f"batch_dim: {dim!r} for {path}, which has {', '.join(map(repr, keys)) or 'nothing'}. Give one entry for each, a mapping, or one number "
                "for all."
            )
        return list(dim)
    return [dim] * len(keys)


def _is_constant(node: Sequence[Any]) -> bool:
    """Whether a sequence is a tuple of numbers, of such tuples or of nothing: a size or a range. DataLoaders make tensors of the items' numbers."""
    number = (numbers.Number, type(None))
    return isinstance(node, tuple) and all(
        isinstance(one, number)
        or (isinstance(one, torch.Tensor) and not one.dim())
        or (isinstance(one, tuple) and _is_constant(one))
        for one in node
    )


def _holds_tensors(node: Any) -> bool:
    """Whether an object of an unknown type has tensors with dimensions, or says by ``to`` that it can move: a graph, a set of boxes."""
    if isinstance(node, type) or callable(node):
        return False
    tensors = [one for one in getattr(node, "__dict__", {}).values() if isinstance(one, torch.Tensor)]
    return callable(getattr(node, "to", None)) or any(one.dim() for one in tensors)


def _described(data: Any) -> str:
    """What the caller passed, in a few words."""
    if isinstance(data, (list, tuple)):
        return f"a {type(data).__name__} of {', '.join(sorted({type(entry).__name__ for entry in data})) or 'nothing'}"
    return f"a {type(data).__name__}"
