"""How much memory a micro-batch takes, by its size: measured at two sizes, and predicted for others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from paceline import OutOfMemory
from paceline.torch._devices import cuda


@dataclasses.dataclass
class MemoryModel:
    """``fixed + per_item * n`` bytes, through the smallest and the largest size that were measured.

    A size is a number of items, or where items do not cost the same what they cost when all are padded to the longest. After one size all of
    it is taken to be per item, which predicts too much for larger ones, never too little.
    """

    smallest: tuple[float, int] | None = None  # size, bytes
    largest: tuple[float, int] | None = None
    _silent: int = 0

    def add(self, items: float, used: int) -> None:
        """A micro-batch of so many items, more than none, took so many bytes at most. Of one size the larger measurement counts."""
        if used <= 0:
            self._silent += 1
            return
        if self.smallest is None or self.largest is None:
            self.smallest = self.largest = (items, used)
            return
        if items <= self.smallest[0]:
            self.smallest = max((items, used), self.smallest) if items == self.smallest[0] else (items, used)
        if items >= self.largest[0]:
            self.largest = max((items, used), self.largest) if items == self.largest[0] else (items, used)

    @property
    def sizes(self) -> int:
        """How many sizes it stands on: none, one or two."""
        return 0 if self.smallest is None else 1 if self.smallest == self.largest else 2

    @property
    def wants_more(self) -> bool:
        """Whether another size is worth measuring. Not where nothing is ever seen, as of a host that only predicts."""
        return self.sizes < 2 and self._silent < 3

    @property
    def per_item(self) -> float:
        """Bytes."""
        if self.smallest is None or self.largest is None:
            return 0.0
        (few, little), (many, much) = self.smallest, self.largest
        return little / few if few == many else max(0.0, (much - little) / (many - few))

    @property
    def fixed(self) -> float:
        """Bytes, whatever the number of items."""
        if self.sizes < 2 or self.largest is None:
            return 0.0
        return max(0.0, self.largest[1] - self.per_item * self.largest[0])

    def predict(self, items: float) -> float:
        """Bytes for so many items."""
        return self.fixed + self.per_item * items

    def most(self, limit: int) -> float | None:
        """The largest size that fits, not below zero; None as long as nothing is known, or if any size does."""
        if self.per_item <= 0:
            return None
        return max(0.0, (limit - self.fixed) / self.per_item)

    def most_items(self, limit: int) -> int | None:
        """How many items fit, at least one; None as `most`."""
        most = self.most(limit)
        return None if most is None else max(1, int(most))


class Meter:
    """The bytes that a micro-batch took, when it is over."""

    used = 0


@contextlib.contextmanager
def metered(place: torch.device, limit: int, device: str) -> Iterator[Meter]:
    """On a worker, around one micro-batch.

    On a GPU: the most that PyTorch's allocator had handed out meanwhile, beyond what it had before; work of other parts of the GPU
    counts, too. The host's allocator tells nothing: there it is what autograd saves for the backward pass, which is most of what
    grows with the batch, and more than the limit fails as an allocation would.
    """
    meter = Meter()
    if place.type == "cuda":
        before = cuda.mark_memory(place.index)
        yield meter
        meter.used = max(0, cuda.peak_memory(place.index) - before)
        return
    known: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Leaves are parameters, which are there anyway.
        if not (tensor.is_leaf and tensor.requires_grad) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                # Of a view no more than it shows: a slice of the batch lies in the batch's memory.
                meter.used += min(storage.nbytes(), tensor.numel() * tensor.element_size())
                if meter.used > limit:
                    raise OutOfMemory(
                        f"{device}: a micro-batch needs more than the {limit} bytes that memory= allows it. It is run again in smaller "
                        "pieces while there are any; if this reaches you, one item alone does not fit: allow more."
                    )
        return tensor.detach()  # not itself: an output that its own graph holds would be a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield meter
