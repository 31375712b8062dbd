"""Tensors that hooks of `torch.nn.utils` compute from parameters before each forward: old weight_norm and spectral_norm, and pruning.

The hook leaves the tensor, with its graph, in an attribute of the module. `copy.deepcopy` refuses tensors with a graph. A replica needs no copy
of it: its own hook computes it from the replica's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class Derived(NamedTuple):
    """An attribute with a graph, the module that has it, and the hook that computes it."""

    module: nn.Module
    name: str
    hook: Any

    def compute(self, module: Any) -> torch.Tensor:
        """The tensor, from the parameters of a copy of the module."""
        with torch.enable_grad():
            if isinstance(self.hook, BasePruningMethod):
                computed = self.hook.apply_mask(module)
            elif isinstance(self.hook, SpectralNorm):
                computed = self.hook.compute_weight(module, do_power_iteration=False)
            else:
                computed = self.hook.compute_weight(module)
        return cast("torch.Tensor", computed)


def derived_in(modules: Iterable[nn.Module]) -> list[Derived]:
    """The derived tensors in these modules. One without a graph is copied as any other tensor."""
    found = []
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            name: Any = None
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                name = hook.name
            elif isinstance(hook, BasePruningMethod) and type(hook).__call__ is BasePruningMethod.__call__:
                name = hook._tensor_name
            value = vars(module).get(name)
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                found.append(Derived(module, name, hook))
    return found
