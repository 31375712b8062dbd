"""`torch.nn.utils.parametrize.cached()`, for replicas.

PyTorch caches values under the identity of the module that was parametrized. A copy has the same class, and so would get the values of the
original, or of another replica, together with their graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def give_own_cache(modules: list[nn.Module]) -> None:
    """Let each parametrized module of a replica cache its values under its own identity."""
    for part in modules:
        # `is_parametrized` alone is not enough: it is also true if a module merely has an attribute of that name.
        names = getattr(part, "parametrizations", None)
        if isinstance(names, nn.ModuleDict) and parametrize.is_parametrized(part):
            original = type(part)
            content = {key: value for key, value in vars(original).items() if key not in ("__dict__", "__weakref__")}
            for name in names:
                content[name] = property(_getter(name), content[name].fset)
            part.__class__ = type(original.__name__, original.__bases__, content)


def forget(module_ids: set[int]) -> None:
    """Drop the cached values of these modules, whose graph is gone."""
    cache: dict[Any, Any] = parametrize._cache
    if cache:
        for key in [key for key in list(cache) if key[0] in module_ids]:
            cache.pop(key, None)


def _getter(name: str) -> Any:
    def value_of(self: Any) -> Any:
        parametrization = self.parametrizations[name]
        if not parametrize._cache_enabled:
            return parametrization()
        # Caching is on or off for the whole process. Another thread may be inside cached() while this thread is outside, without
        # gradients.
        key: Any = (id(self), f"{name} {torch.is_grad_enabled()}")
        cache: dict[Any, Any] = parametrize._cache
        found = cache.get(key)
        if found is None:
            found = cache[key] = parametrization()
        return found

    return value_of
