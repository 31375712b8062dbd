from __future__ import annotations

import typing

import paceline._core.runtime

__all__: list[str] = ["Communicator", "measure_links", "nccl_info", "reduce_isa", "set_nccl_path"]

class Communicator:
    """
    The compiled part of `paceline.Communicator`.
    """
    def __init__(
        self,
        group: paceline._core.runtime.DeviceGroup,
        transport: str,
        timeout: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    def all_gather(self, inputs: typing.Any, outputs: typing.Any) -> None: ...
    def all_reduce(self, buffers: typing.Any, op: str) -> None: ...
    def broadcast(self, buffers: typing.Any, root: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def close(self) -> None: ...
    def description(self) -> str: ...
    def reduce_scatter(self, inputs: typing.Any, outputs: typing.Any, op: str) -> None: ...
    def send(
        self,
        input: typing.Any,
        output: typing.Any,
        source: typing.SupportsInt | typing.SupportsIndex,
        target: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def wait(self) -> None: ...

def measure_links(group: paceline._core.runtime.DeviceGroup) -> list[typing.Any]:
    """
    The links between the GPUs of a group, measured once in a process, within a second: ``from``, ``to``, ``kind``, ``bytes_per_second``, ``push_bytes_per_second`` if the source copies (0: unknown), and ``pushed``, whether it does so from now on.
    """

def nccl_info() -> dict[str, str]:
    """
    NCCL's ``version`` and ``path``, or ``why_none`` if there is no NCCL. Loads NCCL if needed; needs no GPU.
    """

def reduce_isa() -> str:
    """
    The instruction set that the reduction kernels use on this processor.
    """

def set_nccl_path(path: str) -> None:
    """
    Set where NCCL is installed. No effect once NCCL is loaded.
    """
