"""Another rounding of parameters, which tells how much of a result is rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


@torch.no_grad()
def round_otherwise(parameters: Sequence[torch.Tensor], types: Iterable[torch.dtype]) -> None:
    """Move each parameter up or down by the unit in its last place, in the least precise type that is used."""
    types = {*types, *(one.dtype for one in parameters)}
    by = max((torch.finfo(one).eps for one in types if one.is_floating_point), default=0.0)
    for index, one in enumerate(parameters):
        if one.is_floating_point() and one.layout is torch.strided and 0 not in one.stride():
            one.data.add_(one.data * _signs(one, index), alpha=by)


def _signs(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Ones and minus ones without a pattern, the same in every run."""
    counted = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device)
    return (((counted + seed) * -1640531535 >> 16) & 1).mul_(2).sub_(1).view(tensor.shape)
