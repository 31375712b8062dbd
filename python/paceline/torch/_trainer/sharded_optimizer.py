"""Optimizers whose state lies in ranges on several GPUs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.torch._devices.places import Places
from paceline.torch._trainer.arguments import check_optimizer
from paceline.torch._trainer.optimizer import SEPARABLE, Workers, empty, unhooked
from paceline.torch._trainer.shards import Shards

# From so many GPUs on, "auto" shards. With two, one of which is home, the other one would save half of an update, and cost two more copies.
_LEAST_GPUS = 3


def why_unsharded(cls: type[Optimizer], shard: object, places: Places) -> str:
    """Why an optimizer of the class is not sharded on these devices. Empty: it is."""
    pairs = zip(places.spaces, places.on_gpu, strict=True) if places.queues is not None else ()
    gpus = len({space for space, on_gpu in pairs if on_gpu})
    least = 2 if shard is True else _LEAST_GPUS
    if shard is False:
        return "shard is False"
    if cls not in SEPARABLE:
        return "only PyTorch's own optimizers are, and of them not LBFGS and SparseAdam"
    return "" if gpus >= least else f"that takes a DataParallel with {least} GPUs, which is open"


def sharded(
    cls: type[Optimizer], parameters: Iterable[Any], shards: Shards, workers: Workers, options: dict[str, Any]
) -> Optimizer:
    """``cls(parameters, **options)``, whose state lies in the shards between steps.

    It is an instance of `cls`. Whoever reads its ``state`` finds it at home, as `cls` has it. A copy or a pickle of it is a plain `cls`.
    """
    check_optimizer(cls, parameters)
    if cls not in _sharded_classes:
        _sharded_classes[cls] = _sharded_class(cls)
    optimizer: Optimizer = _sharded_classes[cls](parameters, shards=shards, workers=workers, **options)
    return optimizer


_sharded_classes: dict[type[Optimizer], Any] = {}


def _sharded_class(cls: type[Optimizer]) -> Any:
    class Sharded(cls):  # type: ignore[misc, valid-type]
        def __init__(self, parameters: Iterable[Any], *, shards: Shards, workers: Workers, **options: Any) -> None:
            self._shards, self._workers = shards, workers
            self._shown: Any = None  # the state that a call of state_dict sees
            shards.attach(self)
            super().__init__(parameters, **options)

        @property
        def state(self) -> Any:
            if self._shown is not None:
                return self._shown
            self._shards.gather()
            return self.__dict__["state"]

        @state.setter
        def state(self, state: Any) -> None:
            self._shards.forget()
            self.__dict__["state"] = state

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            began = time.perf_counter()
            step = unhooked(cls.step)
            if not self._shards.step(step):
                step(self)
            self._workers.stepped(began)
            return loss

        def state_dict(self) -> Any:
            self._shown = defaultdict(dict, {**self.__dict__["state"], **self._shards.on_host()})
            try:
                return super().state_dict()
            finally:
                self._shown = None

        def __setstate__(self, state: dict[str, Any]) -> None:
            self._shards.forget()  # what comes takes the place of it
            super().__setstate__(state)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return empty, (cls,), self.__getstate__()

    Sharded.__name__, Sharded.__qualname__, Sharded.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    Sharded.__module__ = cls.__module__
    return Sharded
