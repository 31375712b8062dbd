"""Measures the memory that a micro-batch takes, and recognises errors that mean that memory ran out. The engine acts on both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paceline import OutOfMemory
from paceline.torch._devices import cuda
from paceline.torch._devices.out_of_memory import is_out_of_memory as is_out_of_memory


class Meter:
    """The bytes that a micro-batch took. Read it when the micro-batch is over."""

    used = 0


@contextlib.contextmanager
def metered(place: torch.device, limit: int | None, device: str) -> Iterator[Meter]:
    """Measure one micro-batch, on its worker.

    On a GPU this is the peak of PyTorch's allocator during the micro-batch, minus what was in use before. Work of other parts of the GPU
    counts, too. The host's allocator has no such figures. There the meter counts what autograd saves for the backward pass, which is most of
    what grows with the batch. If that exceeds the limit, the micro-batch fails like an allocation.
    """
    meter = Meter()
    if place.type == "cuda":
        before = cuda.mark_memory(place.index)
        yield meter
        meter.used = max(0, cuda.peak_memory(place.index) - before)
        return
    known: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Leaves are parameters, which take their memory in any case.
        if not (tensor.is_leaf and tensor.requires_grad) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                # A view counts only what it shows, because a slice of the batch lies in the batch's memory.
                meter.used += min(storage.nbytes(), tensor.numel() * tensor.element_size())
                if limit is not None and meter.used > limit:
                    raise OutOfMemory(
                        f"{device}: a micro-batch needs more than the {limit} bytes that memory= allows it. It is run again in smaller "
                        "pieces while there are any; if this reaches you, one item alone does not fit: allow more."
                    )
        return tensor.detach()  # not itself: an output that its own graph holds would be a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield meter
