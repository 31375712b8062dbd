from __future__ import annotations

import typing

import paceline._core.runtime

__all__: list[str] = ["Communicator", "reduce_isa"]

class Communicator:
    """
    The compiled part of `paceline.Communicator`.
    """
    def __init__(self, group: paceline._core.runtime.DeviceGroup) -> None: ...
    def all_gather(self, inputs: typing.Any, outputs: typing.Any) -> None: ...
    def all_reduce(self, buffers: typing.Any, op: str) -> None: ...
    def broadcast(self, buffers: typing.Any, root: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def reduce_scatter(self, inputs: typing.Any, outputs: typing.Any, op: str) -> None: ...

def reduce_isa() -> str:
    """
    The instruction set that the reduction kernels use on this processor.
    """
