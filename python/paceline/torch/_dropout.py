"""Dropout switched off for a while, with everything else as in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_F = nn.functional
_DROPPING = {
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    _F.dropout,
    _F.dropout1d,
    _F.dropout2d,
    _F.dropout3d,
    _F.alpha_dropout,
    _F.feature_alpha_dropout,
}


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is _F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout in `module` on this thread, be it a layer, a function, or an option of attention and recurrent layers."""
    # These hand their probability to one fused operator, which no mode sees into.
    owners = [part for part in module.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention))]
    before = [owner.dropout for owner in owners]
    try:
        for owner in owners:
            owner.dropout = 0.0
        with _NoDropout():
            yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.dropout = value


def dropout_names(module: nn.Module) -> list[str]:
    """The submodules in training mode that drop out, with their class."""
    names = []
    for name, part in module.named_modules():
        probability = getattr(part, "p", getattr(part, "dropout", 0.0))
        drops = "dropout" in type(part).__name__.lower() or isinstance(part, (nn.RNNBase, nn.MultiheadAttention))
        if drops and part.training and isinstance(probability, (int, float)) and probability > 0:
            names.append(f"{name or 'the module'} ({type(part).__name__})")
    return names
