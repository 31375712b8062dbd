"""Collectives over the devices of a group: one array per device, in place, without copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from paceline._core.comm import Communicator as _Communicator
from paceline._core.runtime import DeviceGroup

__all__ = ["Array", "Communicator", "ReduceOp", "SupportsDLPack", "Transport"]

# What is done to the elements, and what moves data between GPUs; `Communicator` says how.
ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max"]
Transport: TypeAlias = Literal["auto", "nccl", "copies"]


class SupportsDLPack(Protocol):
    """An array that lends its memory by DLPack: `torch.Tensor`, `numpy.ndarray`, `jax.Array`, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule that describes the array's memory."""


# The buffer protocol has no type before Python 3.12; these are what the standard library has of it.
Array: TypeAlias = "SupportsDLPack | memoryview | bytearray | Any"


class Communicator:
    """Reduce and move arrays over all devices of a group.

    Every method takes a list (or tuple) with one array for each device, in the order of the group and in that device's
    memory. An array is anything that lends its memory by DLPack (torch, CuPy, NumPy, ...) or, on the host, the buffer
    protocol (`array.array`, `memoryview`): contiguous, of float32, float64, float16, bfloat16 (by DLPack only), int32
    or int64. Of its shape only the number of elements matters. Results are written into the arrays that are passed;
    torch's version counters do not see that.

    Host devices: nothing is copied. Sums run in the order of the devices (half types in float32, rounded once), so the
    result is the same to the bit in every run. Integer sums wrap; an integer mean is truncated towards zero. A NaN
    gives NaN, in min and max too. The call returns when the result is there.

    GPUs, parts of one GPU, and both beside host devices: ``"sum"`` and ``"mean"`` of floating-point elements. What
    shares memory is reduced first (half types in float32, rounded once), then the memories, by NCCL or by copies. The
    work is enqueued in the order of each array's current stream, as an operator of torch would be: what you enqueue
    next finds the result, and the call does not wait for the GPUs. It does wait where the group has host devices, and
    for arrays whose library does not tell its stream (no DLPack C exchange API).
    Errors that show later are raised by `wait` or the next call, which then does nothing; the call after it makes new
    connections.

    The GIL is released meanwhile. One call at a time per group.

    Parameters
    ----------
    group
        The devices.
    transport
        What moves data between GPUs: ``"nccl"``; ``"copies"`` through the first GPU's memory; or ``"auto"``, NCCL where
        it is found. `description` says which, and why.
    timeout
        Seconds that NCCL may take: for a collective, from the moment when every GPU has come to it; for making the
        connections; for a call to return.

    Raises
    ------
    InvalidArgument
        By every method, before anything is written, if an array is missing, too many, of another size or type than
        the others, not contiguous, read-only, on another device, requires grad, or overlaps another. The message says
        which one, why, and what to do. Also a `ValueError`.
    Unavailable
        If the group or the communicator is closed, or what is asked for cannot be had here: why.
    Timeout, Error
        If NCCL hangs or fails: on which device, and what to try. `Timeout` is also a `TimeoutError`.

    Examples
    --------
    >>> from array import array
    >>> from paceline import Communicator, DeviceGroup
    >>> a, b = array("f", [1, 2]), array("f", [10, 20])
    >>> with DeviceGroup(["host:0", "host:1"]) as group:
    ...     Communicator(group).all_reduce([a, b])
    >>> a, b
    (array('f', [11.0, 22.0]), array('f', [11.0, 22.0]))
    """

    __slots__ = ("_core", "_group")

    def __init__(self, group: DeviceGroup, *, transport: Transport = "auto", timeout: float = 60.0) -> None:
        if any(not device.name.startswith("host:") for device in group.devices):
            from paceline._nccl import find_installed_nccl

            find_installed_nccl()
        self._core = _Communicator(group, transport, timeout)
        self._group = group

    @property
    def group(self) -> DeviceGroup:
        """The group whose workers do the work."""
        return self._group

    def __repr__(self) -> str:
        return f"<paceline.Communicator of {self._group!r}>"

    def all_reduce(self, buffers: Sequence[Array], op: ReduceOp = "sum") -> None:
        """Make every array the element-wise `op` over all arrays.

        Parameters
        ----------
        buffers
            One array per device; each holds its device's values before and the result after.
        op
            ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
        """
        self._core.all_reduce(buffers, op)

    def reduce_scatter(self, inputs: Sequence[Array], outputs: Sequence[Array], op: ReduceOp = "sum") -> None:
        """Give each device its part of the reduced arrays.

        Parameters
        ----------
        inputs
            One array per device, each of ``len(group)`` equal parts; only read.
        outputs
            One array per device of the size of a part: the d-th gets the d-th part. It may be that part of an input.
        op
            ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
        """
        self._core.reduce_scatter(inputs, outputs, op)

    def all_gather(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Give every device all arrays, one after the other.

        Parameters
        ----------
        inputs
            One array per device; only read.
        outputs
            One array per device, ``len(group)`` times as large. An input may be its own part of an output.
        """
        self._core.all_gather(inputs, outputs)

    def broadcast(self, buffers: Sequence[Array], root: int = 0) -> None:
        """Make every array equal to that of one device.

        Parameters
        ----------
        buffers
            One array per device.
        root
            Index in the group of the device whose array is copied.
        """
        self._core.broadcast(buffers, root)

    def wait(self) -> None:
        """Wait until all that was enqueued so far is done, and raise what has failed."""
        self._core.wait()

    def close(self) -> None:
        """Give back streams, memory and connections; also done when the object goes. Every later call is refused."""
        self._core.close()

    @property
    def description(self) -> str:
        """How data gets from one memory to another: ``"NCCL 2.30.7 (/usr/lib/libnccl.so.2)"``."""
        return self._core.description()
