"""Recognises errors that mean that memory ran out."""

from __future__ import annotations

import torch

# Words of errors for which PyTorch has no type: from its allocator on the host, from the driver (streams, events, pinned memory), and from
# libraries that allocate memory by themselves.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may help."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
