"""Kernels that need all multiprocessors of a GPU at once, and may fail or hang on a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from paceline.torch._devices.failures import warn_caller

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class WholeGpuKernelsWarning(UserWarning):
    """A module may run by kernels that need a whole GPU, and a device is a part of one."""


def needing_a_whole_gpu(modules: Sequence[tuple[str, nn.Module]], tensors: Iterable[torch.Tensor]) -> list[str]:
    """The modules that cuDNN may run by kernels whose blocks wait for each other: recurrent ones, and batch normalisation of channels-last tensors in training.

    Such a kernel is launched with as many blocks as the whole GPU runs at once. `tensors`: parameters and batch, which show the memory format.
    """
    if not torch.backends.cudnn.enabled:
        return []
    channels_last = any(map(is_channels_last, tensors))
    norms = (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return [
        f"{name or 'the module'} ({type(part).__name__})"
        for name, part in modules
        if isinstance(part, nn.RNNBase) or (channels_last and part.training and isinstance(part, norms))
    ]


def warn_of_whole_gpu_kernels(named: Sequence[str]) -> None:
    """Warn at the line that called this package."""
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    warn_caller(
        f"paceline: {', '.join(named[:3])}{more}: on a GPU, cuDNN may run recurrent layers, and batch normalisation of channels-last tensors in "
        "training, by kernels that need all multiprocessors at once. On a part of a GPU they may fail or hang. Run these modules under "
        "torch.backends.cudnn.flags(enabled=False), give batch normalisation contiguous tensors, or train on whole GPUs. This has not been measured.",
        WholeGpuKernelsWarning,
    )


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether this is its memory format, and no other."""
    wanted = _CHANNELS_LAST.get(tensor.dim())
    return wanted is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=wanted)
