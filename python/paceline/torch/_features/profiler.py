"""Spans of micro-batches in PyTorch's profiler and in Nsight Systems, while one of them records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Feature

Span = Callable[[str], contextlib.AbstractContextManager[Any]]


class Profiler(Feature):
    """Shows each micro-batch to the profilers that are active when a call begins: a span, a range of NVTX, or nothing."""

    def bind(self, call: Call) -> Bound | None:
        recorded, read = self.key(call)
        spans: list[Span] = [torch.profiler.record_function] if recorded else []
        spans += [torch.cuda.nvtx.range] if read else []
        return _Spans(spans) if spans else None

    def key(self, call: Call) -> tuple[bool, bool]:
        return torch.autograd.profiler._is_profiler_enabled, _nvtx_is_read()  # the first one in any thread


class _Spans(Bound):
    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    @contextlib.contextmanager
    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Iterator[None]:
        """Profilers sum spans up by name. So a name holds the device, and not the items, which differ each time."""
        with contextlib.ExitStack() as stack:
            for span in self._spans:
                stack.enter_context(span(f"paceline.micro_batch {run.places.names[device]}"))
            yield


def _nvtx_is_read() -> bool:
    """Whether Nsight Systems started the program, or ``torch.autograd.profiler.emit_nvtx`` is active in this thread.

    Nsight Systems has no interface to ask. It sets this variable, which other programs look at, too (GROMACS, NVTX.jl). Ranges are not pushed
    without need: the first one of a process may load CUPTI, which has one user only, and PyTorch's profiler then records no kernels.
    """
    if not torch.backends.cuda.is_built():  # then PyTorch has no NVTX
        return False
    emits = torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
    return emits or "NSYS_PROFILING_SESSION_ID" in os.environ
