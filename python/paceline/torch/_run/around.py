"""What surrounds micro-batches while somebody asks for it. Otherwise it costs nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

# (device, begin, end): a context around one micro-batch, which its worker enters.
Around = Callable[[int, int, int], contextlib.AbstractContextManager[object]]


def profiled(names: Sequence[str]) -> list[Around]:
    """What the profilers that are active now show of each micro-batch: a span, a range of NVTX, or nothing."""
    shown: list[Callable[[str], Any]] = []
    if torch.autograd.profiler._is_profiler_enabled:  # in any thread
        shown.append(torch.profiler.record_function)
    if _nvtx_is_read():
        shown.append(torch.cuda.nvtx.range)
    return [_named(names, span) for span in shown]


def _nvtx_is_read() -> bool:
    """Whether Nsight Systems started the program, or ``torch.autograd.profiler.emit_nvtx`` is active in this thread.

    Nsight Systems has no interface to ask. It sets this variable, which other programs look at, too (GROMACS, NVTX.jl). Ranges are not pushed
    without need: the first one of a process may load CUPTI, which has one user only, and PyTorch's profiler then records no kernels.
    """
    if not torch.backends.cuda.is_built():  # then PyTorch has no NVTX
        return False
    emits = torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
    return emits or "NSYS_PROFILING_SESSION_ID" in os.environ


def _named(names: Sequence[str], span: Callable[[str], Any]) -> Around:
    """Profilers sum spans up by name. So a name holds the device, and not the items, which differ each time."""

    def around(device: int, begin: int, end: int) -> contextlib.AbstractContextManager[object]:
        entered: contextlib.AbstractContextManager[object] = span(f"paceline.micro_batch {names[device]}")
        return entered

    return around
