"""Split GPUs into parts, and clear what PyTorch keeps for the parts' streams."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from paceline._core import Error
from paceline._core import runtime as _runtime
from paceline._core.runtime import Device


def partition(device: str | Device, fractions: Sequence[float]) -> list[Device]:
    """Split a GPU's streaming multiprocessors (SMs) into parts that are devices of their own.

    The parts, ``cuda:0/0``, ``cuda:0/1``, ..., compute at the same time, each on its own SMs. They share the GPU's memory, memory
    bandwidth, L2 cache, clock and copy engines.

    A GPU has one split at a time in the whole process. A second call with the same split returns the same devices. A different split
    replaces the old one if nothing uses the old parts any more; PyTorch then drops their streams as in `release_partitions`.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    fractions
        Fractions of the GPU's SMs, one per part, together at most 1. They are rounded to the groups of SMs that CUDA makes (8 SMs on
        compute capability 9.0 and newer), equal fractions to equal numbers. SMs beyond whole groups stay unused.

    Returns
    -------
    list of Device
        The parts. ``sm_count`` is what each part got, ``fraction`` what was asked for.

    Raises
    ------
    InvalidArgument
        If a fraction is not positive or is too small for a group (the message names the smallest possible one); if the fractions sum to
        more than 1; if `device` is itself a part; if another split of it is in use.
    Unavailable
        If the device cannot be split (``host:0``), or the driver is older than CUDA 12.5.

    Examples
    --------
    >>> parts = paceline.partition("cuda:0", [0.75, 0.25])  # doctest: +SKIP
    >>> [part.sm_count for part in parts]  # of an H200's 132 # doctest: +SKIP
    [96, 32]
    """
    name = _name_of(device)
    parts = _parts_of(name)
    if parts and [part.fraction for part in parts] != [float(fraction) for fraction in fractions]:
        _forget_streams()
    return _runtime.partition(name, fractions)


def release_partitions(device: str | Device, timeout: float = 10.0) -> None:
    """End the split of a GPU. Without a split it does nothing.

    Drop everything on the parts first, in this order: tensors computed there; then trainers and other owners of the streams. The call waits
    for work left on dropped streams. If PyTorch has used a GPU, the call clears its unused memory and its cuBLAS workspaces, which it keeps
    per stream, in the whole process. CUDA graphs that PyTorch captured before may refer to them.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    timeout
        Seconds to wait; ``inf`` waits for ever.

    Raises
    ------
    InvalidArgument
        If a part is still in use; the message names it. Also if `timeout` is negative or NaN.
    Timeout
        If work on a part does not finish in time. The split then stays.
    """
    name = _name_of(device)
    if _parts_of(name):
        _forget_streams()
    _runtime.release_partitions(name, timeout)


def _name_of(device: str | Device) -> str:
    return device.name if isinstance(device, Device) else device


def _parts_of(name: str) -> list[Device]:
    parts: list[Device] = []
    with contextlib.suppress(Error):  # raised after the last part
        while True:
            parts.append(_runtime.find_device(f"{name}/{len(parts)}"))
    return parts


def _forget_streams() -> None:
    """Clear what PyTorch keeps for streams if it uses GPUs, because the parts' streams are about to end."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    from paceline.torch._devices import cuda

    # PyTorch's own error: a failed GPU cannot clear its memory. The call that follows reports what is wrong.
    with contextlib.suppress(RuntimeError):
        cuda.release_memory(streams_end=True)
