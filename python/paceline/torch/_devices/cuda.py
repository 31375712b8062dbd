"""What is asked of ``torch.cuda``, in one place: everything else of this package names no kind of device."""

from __future__ import annotations

import contextlib

import torch

_LEGACY_STREAM = 1  # cudaStreamLegacy: PyTorch calls the default stream 0, which elsewhere means none


def device(index: int) -> torch.device:
    """The GPU with this number, which PyTorch and paceline count alike."""
    return torch.device("cuda", index)


def current_stream(index: int) -> int:
    """The calling thread's stream on that GPU, as CUDA calls it."""
    return torch.cuda.current_stream(index).cuda_stream or _LEGACY_STREAM


def on_stream(index: int, handle: int) -> contextlib.AbstractContextManager[None]:
    """What the calling thread does inside runs on this stream of that GPU."""
    return torch.cuda.stream(_stream(index, handle))


def _stream(index: int, handle: int) -> torch.cuda.Stream:
    if handle == _LEGACY_STREAM:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)


def keep_for(tensor: torch.Tensor, index: int, handle: int) -> None:
    """PyTorch gives the tensor's memory to nobody before this stream has done what it was given so far."""
    tensor.record_stream(_stream(index, handle))


def is_capturing() -> bool:
    """Whether what the calling thread does now is captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


class CopyStream:
    """Brings host memory to a GPU while the stream that needs it still computes."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(index)

    def bring(self, tensor: torch.Tensor, handle: int) -> torch.Tensor:
        """A copy on the GPU that the stream of that handle may use from now on.

        PyTorch's allocator of pinned memory takes the staging copy back when the GPU has read it, and `record_stream` keeps the
        memory of the result until the compute stream is done with it: fresh memory needs no wait.
        """
        compute = _stream(self._index, handle)
        staged = tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()
        with torch.cuda.stream(self._stream):
            there = staged.to(self._device, non_blocking=True)
        compute.wait_stream(self._stream)
        there.record_stream(compute)
        return there


def generator(index: int) -> torch.Generator:
    """The generator that every thread and stream of that GPU draws from."""
    torch.cuda.init()
    return torch.cuda.default_generators[index]


def pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that GPUs copy from while the host goes on."""
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that GPUs read while the host goes on."""
    return tensor.pin_memory()


def prepare_worker(index: int) -> None:
    """Of a thread that computes on that GPU."""
    torch.cuda.set_device(index)


def mark_memory(index: int) -> int:
    """The bytes that PyTorch has handed out on a GPU; `peak_memory` counts from here."""
    torch.cuda.reset_peak_memory_stats(index)
    return torch.cuda.memory_allocated(index)


def peak_memory(index: int) -> int:
    """The most that it had handed out since `mark_memory`."""
    return torch.cuda.max_memory_allocated(index)


def release_memory(streams_end: bool) -> None:
    """Let PyTorch give back what nobody uses.

    Where streams are about to end, with the workspaces that cuBLAS has for each stream. These are the whole process's, and captured
    graphs may refer to them: not without need.
    """
    if streams_end:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
