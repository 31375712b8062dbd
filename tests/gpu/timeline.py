"""What ran on a GPU when: kernels by PyTorch's profiler, and how much of paceline's sums ran while the user's kernels did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

OURS = "paceline_reduce"  # what the kernels of cuda/reduce.cu begin with


class Kernel(NamedTuple):
    """A kernel and its time, in microseconds."""

    name: str
    begin: float
    end: float


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """The kernels of one call, copies left out; none where the profiler sees no GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith("Mem")
    ]


def hidden(kernels: Sequence[Kernel]) -> float | None:
    """The part of paceline's sums that ran while other kernels ran; None if no sum ran."""
    sums = union((each.begin, each.end) for each in kernels if OURS in each.name)
    others = union((each.begin, each.end) for each in kernels if OURS not in each.name)
    total = sum(end - begin for begin, end in sums)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in sums
        for other_begin, other_end in others
    )
    return both / total if total > 0 else None


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans that do not overlap, in their order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
