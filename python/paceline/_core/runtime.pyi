from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat, SupportsIndex

_Float = SupportsFloat | SupportsIndex

class Device:
    """A place of execution: ``host:1``, a worker pinned to cores of its own; ``cuda:0``, a GPU; ``cuda:0/1``, a part of one.

    A plain value: the name and the properties of the place. `devices`, `find_device` and `partition` make them.
    """
    def __eq__(self, arg0: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    @property
    def cores(self) -> tuple[int, ...]:
        """The cores that the worker is pinned to; empty if pinning is impossible."""
    @property
    def device_class(self) -> str:
        """The model of a GPU and its multiprocessors, ``host`` for all host devices. Devices of one class count as equally fast until measured."""
    @property
    def fraction(self) -> float:
        """The fraction of the GPU that `partition` was asked for; 1.0 for a whole device."""
    @property
    def index(self) -> int:
        """The number after the colon of the name."""
    @property
    def kind(self) -> str:
        """``host`` or ``cuda``."""
    @property
    def memory_space(self) -> str:
        """Devices of one memory space share memory without copying: all parts of ``cuda:0`` are in ``cuda:0``."""
    @property
    def name(self) -> str:
        """``host:1``; names are unique."""
    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the cores; None if unknown or if there are several."""
    @property
    def part(self) -> int | None:
        """The 1 of ``cuda:0/1``; None for a whole device."""
    @property
    def sm_count(self) -> int | None:
        """The number of streaming multiprocessors that it computes on; None on the host."""

class DeviceGroup:
    """An ordered set of devices, and a seat at the worker thread of each.

    There is one worker per device in the process, which all groups with this device share. It lives until the last of them is closed, by
    `close()`, the end of a ``with`` block, or the last reference. Workers are pinned to their device's cores and sleep without work. Steps
    of different trainers on one device take turns. After ``fork`` (a DataLoader worker) the child process has no workers: there every
    call raises `Unavailable`.

    Parameters
    ----------
    devices
        ``"auto"`` (all host devices), one name such as ``"host:0"``, or a list of names and `Device` objects. `paceline.devices()` lists them.
    one_socket
        Where the workers of GPUs run if the GPUs lie on several processor sockets. True: all on the cores of one socket, that of most of the
        GPUs, and of the first one among equals. Threads that take Python's lock in turn then do so within one socket. False: each on the cores
        next to its GPU. None (default): True if the interpreter has a global lock. A GPU's worker that another group has started stays where it is.

    Raises
    ------
    InvalidArgument
        If a device does not exist or is named twice, or if the list is empty.
    """
    def __enter__(self) -> Any: ...
    def __exit__(self, arg0: Any, *args: object) -> None: ...
    def __init__(self, devices: str | Sequence[str | Device] = "auto", *, one_socket: bool | None = None) -> None: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def close(self, timeout: _Float = 10.0) -> None:
        """Leave the workers, and end those that no other group uses. A second call does nothing.

        Raises
        ------
        Timeout
            If a device has not done within `timeout` seconds what this group gave it. The error names it. What no worker has begun is cancelled.
            A worker whose user code does not return is left behind.
        InvalidArgument
            If `timeout` is negative or NaN.
        """
    def share(self) -> DeviceGroup:
        """Another group of the same devices, which is busy and closed on its own. Closing this group closes it, too."""
    @property
    def busy(self) -> bool:
        """True while a step or a collective of this group, or of a share of it, has not ended."""
    @property
    def closed(self) -> bool:
        """True once the group has left its workers."""
    @property
    def devices(self) -> list[Device]:
        """The devices, in order."""

def build_facts() -> dict[str, Any]:
    """How the compiled part was built."""

def device_health(name: str) -> dict[str, Any]:
    """What a device's own sensors and counters say now: clocks, limits, temperature, power, other processes.

    Unknown values are left out. If nothing is known, ``why_no_health`` says why.

    Raises
    ------
    InvalidArgument
        If there is no such device.
    """

def devices() -> list[Device]:
    """Every device that this process can use now, in order: GPUs, then host devices. Parts of GPUs are not listed.

    There is one host device per core of the process's affinity mask, limited by its cgroup's CPU quota. With a quota, a device is pinned
    to several cores, because every core of the mask is given to a device.
    """

def find_device(name: str) -> Device:
    """The device called `name`, such as ``host:1``.

    More host devices than cores are allowed; they share cores. Parts of a GPU, such as ``cuda:0/1``, exist once `partition` has made them.

    Raises
    ------
    InvalidArgument
        If the name is malformed or there is no such device; the message lists those that exist.
    """

def gpu_facts() -> list[dict[str, Any]]:
    """What the CUDA runtime and the driver say about each GPU; an empty list without a GPU.

    Returns
    -------
    list of dict
        ``device``, ``model``, ``pci_bus_id``, ``numa_node``, ``compute_capability``, ``sm_count``, ``peak_clock_mhz``, ``memory_bytes``,
        ``copy_engine_count``, ``peers`` (the GPUs whose memory it can access directly), ``partition_sm_count`` (SMs of the smallest part),
        ``most_partitions``, ``why_no_partitions`` (empty if it can be partitioned), ``mig`` (of a MIG slice, what that means; else empty), ``driver`` and ``runtime`` (CUDA versions).
    """

def host_facts() -> dict[str, Any]:
    """What the operating system says about the processor, and how much of it this process may use."""

def on_a_worker() -> bool:
    """Whether the calling thread runs a piece of work with a device's turn: no step may begin there."""

def partition(device: str | Device, fractions: Sequence[_Float]) -> list[Device]:
    """The compiled part of `paceline.partition`."""

def release_partitions(device: str | Device, timeout: _Float = 10.0) -> None:
    """The compiled part of `paceline.release_partitions`."""

def why_no_devices() -> dict[str, str]:
    """For each kind of device that this build supports: why there is no device; empty if there is one."""
