"""How much results may differ by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.torch._devices.places import Places

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
LEAST_OF_PROOFS = (
    1e-4  # a module in double precision may compute some things in single precision, as transformers' norms do
)
_TENSOR_CORES = 5e-3  # float32 on GPUs, where convolutions round to 10 bits by default


def tolerance_of(types: Iterable[torch.dtype]) -> float:
    """The largest relative difference that rounding to these types may cause."""
    return max((_TOLERANCE.get(one, 0.0) for one in types), default=0.0)


def tolerance_for(module: nn.Module, places: Places) -> float:
    """The largest relative difference that rounding alone may cause, by the least precise type in use."""
    types = {parameter.dtype for parameter in module.parameters()}
    worst = tolerance_of(types) or _TOLERANCE[torch.float32]
    for kind in places.types:
        if torch.is_autocast_enabled(kind):
            worst = max(worst, _TOLERANCE.get(torch.get_autocast_dtype(kind), 0.0))
    if places.reduce_dtype is not None:
        worst = max(worst, _TOLERANCE[places.reduce_dtype])
    return (
        max(worst, _TENSOR_CORES)
        if any(place.type == "cuda" for place in places.devices) and torch.float32 in types
        else worst
    )
