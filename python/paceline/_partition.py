"""Parts of GPUs as devices, and what PyTorch remembers of their streams."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from paceline._core import Error
from paceline._core import runtime as _runtime
from paceline._core.runtime import Device


def partition(device: str | Device, fractions: Sequence[float]) -> list[Device]:
    """Split a GPU's streaming multiprocessors (SMs) into parts that are devices of their own.

    The parts, ``cuda:0/0``, ``cuda:0/1``, ..., share the GPU's memory, and compute at the same time, each on its own SMs. Memory bandwidth,
    L2 cache, clock and copy engines stay the whole GPU's.

    A GPU has one split at a time, the process's. Asked for again it gives the same devices; another one takes its place if nothing uses the
    parts any more, and PyTorch forgets their streams as in `release_partitions`, which makes the GPU whole.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    fractions
        Of the GPU's SMs, one for each part; together at most 1. They are rounded to the groups of SMs that CUDA makes (8 SMs on compute
        capability 9.0 and newer), equal fractions alike; SMs beyond whole groups stay unused.

    Returns
    -------
    list of Device
        The parts. Their ``sm_count`` says what each got, ``fraction`` what was asked for.

    Raises
    ------
    InvalidArgument
        If a fraction is not positive, too small for a group (the message names the smallest that is possible) or all of them are more
        than 1 together; if `device` is itself a part; if another split of it is in use.
    Unavailable
        If the device has no parts (``host:0``), or the driver is older than CUDA 12.5.

    Examples
    --------
    >>> parts = paceline.partition("cuda:0", [0.75, 0.25])  # doctest: +SKIP
    >>> [part.sm_count for part in parts]  # of an H100's 132 # doctest: +SKIP
    [96, 32]
    """
    name = _name_of(device)
    parts = _parts_of(name)
    if parts and [part.fraction for part in parts] != [float(fraction) for fraction in fractions]:
        _forget_streams()
    return _runtime.partition(name, fractions)


def release_partitions(device: str | Device, timeout: float = 10.0) -> None:
    """End the split of a GPU. Without one nothing happens.

    Everything on the parts must be gone before, in this order: tensors that were computed there; trainers and whatever else holds
    the streams. What dropped streams still have to do is waited for. Where PyTorch has used a GPU, its cuBLAS workspaces, which it keeps
    for each stream, and its unused memory are cleared, those of the whole process: a CUDA graph of PyTorch's that was captured before may refer to them.

    Parameters
    ----------
    device
        The GPU, such as ``"cuda:0"``.
    timeout
        Seconds to wait, ``inf`` for ever.

    Raises
    ------
    InvalidArgument
        If a part is still in use; the message names it. Or if `timeout` is negative or no number.
    Timeout
        If work on a part does not come to its end. The split stays.
    """
    name = _name_of(device)
    if _parts_of(name):
        _forget_streams()
    _runtime.release_partitions(name, timeout)


def _name_of(device: str | Device) -> str:
    return device.name if isinstance(device, Device) else device


def _parts_of(name: str) -> list[Device]:
    parts: list[Device] = []
    with contextlib.suppress(Error):  # beyond the last one
        while True:
            parts.append(_runtime.find_device(f"{name}/{len(parts)}"))
    return parts


def _forget_streams() -> None:
    """What PyTorch keeps for streams, where somebody uses it on GPUs: those of the parts are about to end."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    from paceline.torch._devices import cuda

    # PyTorch's own type: a GPU that has failed takes nothing back, and the call itself says what is wrong.
    with contextlib.suppress(RuntimeError):
        cuda.release_memory(streams_end=True)
