"""Optimizers whose state lies in ranges on several GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from paceline.torch._devices.places import Places
from paceline.torch._trainer.optimizer import SEPARABLE, Divided
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


class Sharded(Divided):
    """Has its state in shards between steps. Whoever reads its ``state`` finds it at home, as the plain class has it."""

    def __init__(self, parameters: Iterable[Any], *, shards: Shards, **options: Any) -> None:
        self._shards = shards
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

    def _runs(self, step: Callable[[Any], Any]) -> bool:
        return self._shards.step(step)

    def state_dict(self) -> Any:
        self._shown = defaultdict(dict, {**self.__dict__["state"], **self._shards.on_host()})
        try:
            return super().state_dict()
        finally:
            self._shown = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shards.forget()  # what comes takes the place of it
        super().__setstate__(state)
