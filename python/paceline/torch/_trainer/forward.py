"""What `predict` runs by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.torch._devices.failures import noted


def forward(module: nn.Module, part: Any) -> Any:
    """``module(part)``. Where that fails for a nest of tensors, the error tells how to pass its entries one by one."""
    try:
        return module(part)
    except (TypeError, AttributeError) as error:
        if isinstance(part, Mapping):
            entries = "by name, predict(batch, lambda model, b: model(**b))"
        elif isinstance(part, (tuple, list)):
            entries = "one by one, predict(batch, lambda model, b: model(*b))"
        else:
            raise
        noted(
            error,
            f"predict called module(batch), with the whole {type(part).__name__} as its only argument. If the module takes the entries "
            f"{entries} passes them.",
        )
        raise
