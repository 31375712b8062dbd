"""Keeps the values of parameters, in case a run that is thrown away writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.torch._replicas.buffers import same_bits

_MOST_BYTES = 1 << 30  # of parameters that are kept by value


class KeptParameters:
    """The values of parameters, to go back to. Of very large modules only the memory is known, which a forward may replace by ``.data``."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.keeps_values = keeps = sum(one.nbytes for one in parameters) <= _MOST_BYTES
        self._kept = [(one, one.data, one.detach().clone() if keeps else None) for one in parameters]

    def written(self) -> dict[int, torch.Tensor]:
        """The present values of those that were written since then, by index."""
        return {index: one[0].detach().clone() for index, one in enumerate(self._kept) if _is_written(*one)}

    def distance(self, index: int, values: torch.Tensor | None) -> float:
        """How far these values are from the kept ones."""
        then = self._kept[index][2]
        if values is None or then is None or values.shape != then.shape:
            return 0.0 if values is None else math.inf
        return float(torch.linalg.vector_norm((values - then).double()))

    @torch.no_grad()
    def restore(self) -> None:
        for one, memory, values in self._kept:
            if _is_written(one, memory, values):
                one.data = memory
                if values is not None:
                    memory.copy_(values)


def _is_written(parameter: torch.Tensor, memory: torch.Tensor, values: torch.Tensor | None) -> bool:
    moved = parameter.data_ptr() != memory.data_ptr() or parameter.shape != memory.shape
    return moved or (values is not None and not same_bits(parameter, values))
