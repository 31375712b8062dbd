"""What surrounds micro-batches while somebody asks for it. Otherwise it costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

# (device, begin, end): a context around one micro-batch, which its worker enters.
Around = Callable[[int, int, int], contextlib.AbstractContextManager[object]]


def profiling() -> bool:
    """Whether one of PyTorch's profilers is active, in any thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def spans(names: Sequence[str]) -> Around:
    """Spans for the profiler, which sums them up by name. So a name holds the device, and not the items, which differ each time."""

    def span(device: int, begin: int, end: int) -> contextlib.AbstractContextManager[object]:
        return torch.profiler.record_function(f"paceline.micro_batch {names[device]}")

    return span
