"""What ranks ask of a module: that they can train it together, and that it is the same one on all of them."""

from __future__ import annotations

import zlib

from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.replicas import Replicas


def check_module(module: nn.Module) -> None:
    """Raise for a module that sums gradients by itself, or whose parameters have no shape yet."""
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} is a DistributedDataParallel, which sums gradients over the ranks, and so does the trainer. Pass "
                "its .module."
            )
        if any(isinstance(one, nn.parameter.UninitializedParameter) for one in part._parameters.values()):
            raise InvalidArgument(
                f"DataParallel: {name or 'the module'} has parameters without a shape, which cannot be brought to all ranks. Run its forward "
                "once before."
            )


class ParameterMark:
    """A checksum of the parameters' names, shapes and types, and of which are frozen."""

    def __init__(self) -> None:
        self._known: tuple[int, int] = (-1, 0)  # the generation of the replicas, and what does not change in one

    def of(self, replicas: Replicas) -> int:
        """The checksum now."""
        if self._known[0] != replicas.generation:
            named = zip(replicas.names, replicas.parameters, strict=True)
            text = repr([(name, tuple(one.shape), one.stride(), str(one.dtype)) for name, one in named])
            self._known = replicas.generation, zlib.crc32(text.encode())
        return zlib.crc32(bytes(one.requires_grad for one in replicas.parameters), self._known[1])
