from __future__ import annotations

import typing

import paceline._core.runtime

__all__: list[str] = ["Communicator", "NcclInfo", "nccl_info", "reduce_isa", "set_nccl_path"]

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
    def wait(self) -> None: ...

class NcclInfo:
    """
    NVIDIA's library for collectives between GPUs, as this process has it.
    """
    @property
    def path(self) -> str:
        """
        The file that is loaded.
        """
    @property
    def version(self) -> str:
        """
        Like ``2.30.7``; empty if there is none to use.
        """
    @property
    def why_none(self) -> str:
        """
        A sentence, where `version` is empty.
        """

def nccl_info() -> NcclInfo:
    """
    Loads NCCL if it is not loaded yet. Needs no GPU.
    """

def reduce_isa() -> str:
    """
    The instruction set that the reduction kernels use on this processor.
    """

def set_nccl_path(path: str) -> None:
    """
    Where an NCCL is installed; without effect once one is loaded.
    """
