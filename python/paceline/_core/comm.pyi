from __future__ import annotations

from typing import Any, SupportsFloat, SupportsIndex, SupportsInt

import paceline._core.runtime

_Int = SupportsInt | SupportsIndex
_Float = SupportsFloat | SupportsIndex

class Communicator:
    """The compiled part of `paceline.Communicator`."""
    def __init__(self, group: paceline._core.runtime.DeviceGroup, transport: str, timeout: _Float) -> None: ...
    def all_gather(self, inputs: Any, outputs: Any) -> None: ...
    def all_reduce(self, buffers: Any, op: str) -> None: ...
    def broadcast(self, buffers: Any, root: _Int) -> None: ...
    def close(self) -> None: ...
    def description(self) -> str: ...
    def reduce_scatter(self, inputs: Any, outputs: Any, op: str) -> None: ...
    def send(self, input: Any, output: Any, source: _Int, target: _Int) -> None: ...
    def wait(self) -> None: ...

def measure_links(group: paceline._core.runtime.DeviceGroup) -> list[Any]:
    """The links between the GPUs of a group, measured once in a process, within a second: ``from``, ``to``, ``kind``, ``bytes_per_second``, ``push_bytes_per_second`` if the source copies (0: unknown), and ``pushed``, whether it does so from now on."""

def nccl_info() -> dict[str, str]:
    """NCCL's ``version`` and ``path``, or ``why_none`` if there is no NCCL. Loads NCCL if needed; needs no GPU."""

def reduce_isa() -> str:
    """The instruction set that the reduction kernels use on this processor."""

def set_nccl_path(path: str) -> None:
    """Set where NCCL is installed. No effect once NCCL is loaded."""
