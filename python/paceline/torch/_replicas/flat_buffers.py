"""Buffers of replicas in other memories: one flat tensor per element type, which the queues fill before each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from paceline.torch._devices.places import Places
from paceline.torch._replicas.buffers import Buffers, Pair, any_differs, copy_all, copy_slots, lies_like

_ALIGNMENT = 16  # bytes that a kernel loads at a time
# Types that a copy of bytes carries.
_DTYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
)
Flat = dict[torch.dtype, torch.Tensor]
BUCKET = 0  # what buffers are awaited with
Copy = tuple[int, int, int, int, int]  # memory space, to, from, bytes, bucket


class _Piece(NamedTuple):
    """Where a buffer lies in the flat tensor of its type, in elements."""

    dtype: torch.dtype
    begin: int
    shape: torch.Size

    def of(self, flat: Flat) -> torch.Tensor:
        """That part. Through ``.data`` it has a version counter of its own: a write to it is no write to the others."""
        end = self.begin + math.prod(self.shape)
        return flat[self.dtype][self.begin : end].view(self.shape).data


class FarBuffers(Buffers):
    """The buffers of one replica in another memory. `FlatBuffers.pull` brings the values of all such replicas."""

    def __init__(self, flat: FlatBuffers, device: int, pairs: list[Pair]) -> None:
        super().__init__(pairs)
        self.device = device
        self.values: Flat = {}
        self.parts: list[torch.Tensor | None] = []  # for each pair its part of `values`, if it has one
        self._flat = flat

    def pull(self, *, anew: bool = False) -> None:
        """Put the parts in their places again, and copy what has none."""
        others = []
        for (ours, theirs, name), part in zip(self.pairs, self.parts, strict=True):
            if part is None:
                others.append((ours, theirs, name))
            elif theirs.get(name) is not part:
                theirs[name] = part
        copy_slots(others, self._flat.place(self.device), anew=anew)

    def push(self) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        others: list[Pair] = []
        for (ours, theirs, name), part, value in zip(self.pairs, self.parts, self._flat.landed(self), strict=True):
            old = ours.get(name)
            if old is not None and value is not None and theirs.get(name) is part and lies_like(old, value):
                targets.append(old)
                sources.append(value)
            else:
                others.append((theirs, ours, name))
        copy_all(targets, sources)
        copy_slots(others, self._flat.home)

    @property
    def differ(self) -> bool:
        parted = zip(self.pairs, self.parts, strict=True)
        return self._flat.differ(self) or any_differs(pair for pair, part in parted if part is None)


class FlatBuffers:
    """The buffers of all replicas in other memories than the user's module.

    At home the user's values are packed into one flat tensor per element type. The queues copy it together with the parameters, so workers
    wait for both at once. The buffers of a replica are parts of flat tensors of its own. After a step, one copy per type brings those of
    one replica home. Tensors that are not plain contiguous memory at home are copied one by one.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.home = places.home
        self._far: list[FarBuffers] = []
        self._layout: list[_Piece | None] | None = None
        # As many as one memory has replicas: a collective brings a source to one address of each memory.
        self._packed: list[Flat] = []
        self._landing: Flat = {}
        self.copies: list[Copy] = []  # what the queues have to copy

    def add(self, device: int, pairs: list[Pair]) -> FarBuffers:
        """The buffers of a device's replica."""
        self._far.append(FarBuffers(self, device, pairs))
        return self._far[-1]

    def place(self, device: int) -> torch.device:
        """Where a replica's buffers are."""
        return self._places.devices[device]

    def pull(self, *, anew: bool) -> bool:
        """Pack the user's values for the next step, which brings them, `anew` into new tensors. Returns whether `copies` has changed."""
        if not self._far:
            return False
        values: list[Any] = [ours.get(name) for ours, _, name in self._far[0].pairs]
        layout, sizes = _laid_out(values, self.home)
        moved = anew or layout != self._layout
        if moved:
            self._allocate(layout, sizes)
        flat = [(piece, one) for piece, one in zip(layout, values, strict=True) if piece is not None]
        for packed in self._packed:
            copy_all([piece.of(packed) for piece, _ in flat], [one for _, one in flat])
        return moved

    def landed(self, far: FarBuffers) -> list[torch.Tensor | None]:
        """For each pair the replica's value, at home."""
        for dtype, flat in far.values.items():
            self._landing[dtype].copy_(flat, non_blocking=True)
        return [None if piece is None else piece.of(self._landing) for piece in self._layout or ()]

    def differ(self, far: FarBuffers) -> bool:
        """Whether the replica has other values than it was given."""
        self.landed(far)
        return any(not torch.equal(flat, self._packed[0][dtype]) for dtype, flat in self._landing.items())

    def _allocate(self, layout: list[_Piece | None], sizes: dict[torch.dtype, int]) -> None:
        spaces = [self._places.spaces[far.device] for far in self._far]
        nth = [spaces[:index].count(space) for index, space in enumerate(spaces)]
        if layout != self._layout:
            self._layout = layout
            # Gaps are copied and compared, too, so they are zero.
            self._packed = [_zeros(sizes, self.home) for _ in range(max(nth) + 1)]
            self._landing = _zeros(sizes, self.home)
        if any(far.values and self._places.must_pin(far.device) for far in self._far):
            self._places.drain()  # PyTorch does not know that the queues may still write to its pinned memory
        self.copies = []
        for far, space, source in zip(self._far, spaces, nth, strict=True):
            far.values = {dtype: self._places.empty_for(far.device, count, dtype) for dtype, count in sizes.items()}
            far.parts = [None if piece is None else piece.of(far.values) for piece in layout]
            for dtype, flat in far.values.items():
                self.copies.append(
                    (space, flat.data_ptr(), self._packed[source][dtype].data_ptr(), flat.nbytes, BUCKET)
                )
        if torch.are_deterministic_algorithms_enabled():
            self._places.drain()  # PyTorch has filled the memory on the devices' streams, which the copies do not wait for


def _laid_out(values: Iterable[Any], home: torch.device) -> tuple[list[_Piece | None], dict[torch.dtype, int]]:
    """Where each buffer lies, None if it is copied by itself; and the elements of each flat tensor."""
    layout: list[_Piece | None] = []
    ends: dict[torch.dtype, int] = {}
    for value in values:
        plain = value is not None and value.layout is torch.strided and value.device == home and value.dtype in _DTYPES
        if not plain or not value.is_contiguous() or value.numel() == 0 or value.is_conj() or value.is_neg():
            layout.append(None)
            continue
        unit = max(1, _ALIGNMENT // value.dtype.itemsize)
        begin = ends.get(value.dtype, 0)
        layout.append(_Piece(value.dtype, begin, value.shape))
        ends[value.dtype] = begin + -(-value.numel() // unit) * unit
    return layout, ends


def _zeros(sizes: dict[torch.dtype, int], place: torch.device) -> Flat:
    return {dtype: torch.zeros(count, dtype=dtype, device=place) for dtype, count in sizes.items()}
