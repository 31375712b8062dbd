"""Collectives over the devices of a group: one array per device, in place, without copying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from paceline._core.comm import Communicator as _Communicator
from paceline._core.runtime import DeviceGroup

__all__ = ["Array", "Communicator", "ReduceOp", "SupportsDLPack", "Transport"]

# The operations on elements, and the ways to move data between GPUs; see `Communicator`.
ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max"]
Transport: TypeAlias = Literal["auto", "nccl", "copies"]


class SupportsDLPack(Protocol):
    """An array that shares its memory through DLPack: `torch.Tensor`, `numpy.ndarray`, `jax.Array`, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule that describes the array's memory."""


# The buffer protocol has no type before Python 3.12. These are the standard library's classes with it.
Array: TypeAlias = "SupportsDLPack | memoryview | bytearray | Any"


class Communicator:
    """Reduce and move arrays over all devices of a group.

    Every method but `send` takes a list (or tuple) with one array per device, in the order of the group. Each array lies in the memory
    of its device. An array is anything that shares its memory through DLPack (torch, CuPy, NumPy, ...) or, on the host,
    through the buffer protocol (`array.array`, `memoryview`). It must be contiguous, of float32, float64, float16, bfloat16
    (DLPack only), int32 or int64. Only its number of elements matters, not its shape. Results are written into the given
    arrays; torch's version counters do not notice.

    Host devices: nothing is copied. Sums run in the order of the devices (half types in float32, rounded once), so the
    result is the same to the bit in every run. Integer sums wrap; an integer mean is truncated towards zero. A NaN
    gives NaN, also for min and max. The call returns when the result is there.

    GPUs, parts of one GPU, and mixed groups: devices that share memory are reduced first, then the memories, by NCCL or by
    copies. The operations mean the same as on the host; parts of one GPU give the same bits. Between memories a
    floating-point result is rounded after each of these stages. ``"min"`` and ``"max"`` of floating-point elements always
    go by copies, because NCCL drops NaNs. The call enqueues the work in the order of each array's current stream, like an
    operator of torch: work that you enqueue next finds the result, and the call does not wait for the GPUs. It waits only if
    the group has host devices, or if an array's library does not tell its stream (no DLPack C exchange API).
    Errors that appear later are raised by `wait` or by the next call, which then does nothing. The call after it makes new
    connections.

    Calls release the GIL. One call at a time per group.

    Parameters
    ----------
    group
        The devices.
    transport
        What moves data between GPUs: ``"nccl"``; ``"copies"`` through the first GPU's memory; or ``"auto"``: NCCL if it is found, otherwise
        copies. `description` says which one is used, and why.
    timeout
        The limit in seconds for NCCL: for a collective, counted from the moment when every GPU has reached it; for making the connections;
        and for a call to return. `wait`, and a call that waits, may take twice as long: once for the earlier work of the arrays' streams,
        and once for the collectives.

    Raises
    ------
    InvalidArgument
        Every method raises it, before anything is written, if an array is missing or surplus, differs from the others in size or type, is
        not contiguous, is read-only, is on another device, requires grad, or overlaps another array. The message says which one, why, and
        what to do. Also a `ValueError`.
    Unavailable
        If the group or the communicator is closed, or if the request is impossible here. The message says why.
    Timeout, Error
        If NCCL hangs or fails. The message names the device and what to try. `Timeout` is also a `TimeoutError`.

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
            One array per device, which holds the device's values before the call and the result after it.
        op
            ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
        """
        self._core.all_reduce(buffers, op)

    def reduce_scatter(self, inputs: Sequence[Array], outputs: Sequence[Array], op: ReduceOp = "sum") -> None:
        """Reduce the arrays and give each device its part of the result.

        Parameters
        ----------
        inputs
            One array per device, made of ``len(group)`` equal parts. Only read.
        outputs
            One array per device, with the size of one part. The d-th array gets the d-th part. It may be that part of an input.
        op
            ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
        """
        self._core.reduce_scatter(inputs, outputs, op)

    def all_gather(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Give every device all arrays, concatenated.

        Parameters
        ----------
        inputs
            One array per device. Only read.
        outputs
            One array per device, ``len(group)`` times as large as an input. An input may be its own part of an output.
        """
        self._core.all_gather(inputs, outputs)

    def broadcast(self, buffers: Sequence[Array], root: int = 0) -> None:
        """Copy one device's array to all devices.

        Parameters
        ----------
        buffers
            One array per device.
        root
            The index of the device whose array is copied.
        """
        self._core.broadcast(buffers, root)

    def send(self, input: Array, output: Array, *, source: int, target: int) -> None:
        """Copy an array of one device to an array of another. The other devices have no part in it.

        GPUs copy, whatever the transport. The call waits for the result only if one of the two devices is on the host.

        Parameters
        ----------
        input
            An array in the memory of device `source`. Only read.
        output
            An array in the memory of device `target`, of the same size and type.
        source, target
            The indices of the devices in the group.
        """
        self._core.send(input, output, source, target)

    def wait(self) -> None:
        """Wait until all work enqueued so far is done, and raise errors that occurred.

        Raises
        ------
        Timeout
            If it takes longer than twice this communicator's `timeout`. The message names the late device. The call then drops NCCL's
            connections, so that the other GPUs go on, and the next call makes new ones.
        """
        self._core.wait()

    def close(self) -> None:
        """Free streams, memory and connections, as the end of the object does. Later calls raise `Unavailable`."""
        self._core.close()

    @property
    def description(self) -> str:
        """How data gets from one memory to another, such as ``"NCCL 2.30.7 (/usr/lib/libnccl.so.2)"``."""
        return self._core.description()
