"""`torch.nn.utils.parametrize.cached()`, for replicas.

PyTorch keeps what it computed under the identity of the module that was parametrized. A copy has the same class, and so would be given the
values of the original, or of another replica, together with their graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def give_own_cache(modules: list[nn.Module]) -> None:
    """Let every parametrized one of a replica's modules keep its values under its own identity."""
    for part in modules:
        # Not `is_parametrized`: that is true of what merely calls an attribute so.
        names = getattr(part, "parametrizations", None)
        if isinstance(names, nn.ModuleDict) and parametrize.is_parametrized(part):
            original = type(part)
            content = {key: value for key, value in vars(original).items() if key not in ("__dict__", "__weakref__")}
            for name in names:
                content[name] = property(_getter(name), content[name].fset)
            part.__class__ = type(original.__name__, original.__bases__, content)


def forget(module_ids: set[int]) -> None:
    """Drop what was computed for these modules: its graph is gone."""
    cache: dict[Any, Any] = parametrize._cache
    if cache:
        for key in [key for key in list(cache) if key[0] in module_ids]:
            cache.pop(key, None)


def _getter(name: str) -> Any:
    def value_of(self: Any) -> Any:
        parametrization = self.parametrizations[name]
        if not parametrize._cache_enabled:
            return parametrization()
        # Whether caching is on is known for the whole process only: another thread may be inside cached() while this one is outside, without
        # gradients.
        key: Any = (id(self), f"{name} {torch.is_grad_enabled()}")
        cache: dict[Any, Any] = parametrize._cache
        found = cache.get(key)
        if found is None:
            found = cache[key] = parametrization()
        return found

    return value_of
