"""Optimizers whose step runs on all workers of a trainer, each with a part of the parameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from paceline.plan import split_items

if TYPE_CHECKING:
    from paceline.torch._trainer.host_workers import HostWorkers

# Optimizers that update each parameter from its own gradient and state alone, so that any division gives the same bits. Others run as they
# are. So do subclasses, since they may do anything.
_NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
SEPARABLE = frozenset(getattr(torch.optim, name) for name in _NAMES.split() if hasattr(torch.optim, name))
# With fewer elements, handing the work over costs more than it brings (benchmarks/python/optimizer.py). The loop over single parameters holds
# Python's lock between its operators, so two such loops hinder each other unless their parameters are large.
_LEAST_ELEMENTS = 1 << 21
_LEAST_ELEMENTS_OF_A_LOOP = 1 << 17  # on average
_MOST_IN_ONE_PART = 0.85  # of the elements; a single parameter is not divided, and all wait for the largest part


class Divided(Optimizer):
    """What a trainer adds to a class of PyTorch: `made_of` makes a subclass of both. A copy or a pickle of an instance is a plain one."""

    _plain: type[Optimizer]

    def __init__(self, parameters: Iterable[Any], *, workers: HostWorkers, **options: Any) -> None:
        self._workers = workers
        super().__init__(parameters, **options)

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        step = unhooked(self._plain.step)
        if not self._runs(step):
            step(self)
        self._workers.stepped(began)
        return loss

    def _runs(self, step: Callable[[Any], Any]) -> bool:
        """Run the step, divided. False: nothing was run."""
        raise TypeError("Divided._runs is for subclasses")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self._plain,), self.__getstate__()


_made: dict[Any, Any] = {}


def made_of(kind: type[Divided], cls: type[Optimizer]) -> Any:
    """A subclass of both, with the name of `cls`."""
    if (kind, cls) not in _made:
        names = {name: getattr(cls, name) for name in ("__qualname__", "__doc__", "__module__")}
        _made[kind, cls] = type(cls.__name__, (kind, cls), {**names, "_plain": cls})
    return _made[kind, cls]


class Spread(Divided):
    """Divides the parameters over the workers in its step, if that changes nothing but the time. Its state is all in its own ``state``."""

    _parts: tuple[Any, list[set[int]]] = ((), [])  # the key that the parts were made for, and the parts

    def _runs(self, step: Callable[[Any], Any]) -> bool:
        if is_observed():
            return False
        parts = self._divided(self._workers.part_count())
        tasks = [functools.partial(step, _part(self._plain, self, part)) for part in parts]
        return bool(tasks) and self._workers.run_parts(tasks)

    def _divided(self, count: int) -> list[set[int]]:
        """The parameters of each part, by identity, of all groups together."""
        parameters = [one for group in self.param_groups for one in group["params"]]
        key = (count, tuple(map(id, parameters)))
        if self._parts[0] != key:
            self._parts = (key, _parts_of(parameters, count, _is_loop(self)))
        return self._parts[1]


def spread(cls: type[Optimizer], parameters: Iterable[Any], workers: HostWorkers, options: dict[str, Any]) -> Optimizer:
    """``cls(parameters, **options)``, whose step is spread over the workers if it can be."""
    if cls not in SEPARABLE:
        return cls(parameters, **options)
    made: Optimizer = made_of(Spread, cls)(parameters, workers=workers, **options)
    return made


def _empty(cls: type[Optimizer]) -> Optimizer:
    """An object of the class without state, for `copy` and `pickle`."""
    return cls.__new__(cls)


def unhooked(step: Any) -> Callable[[Any], Any]:
    """The step of the class without the calls of hooks, which come once for all parts."""
    plain: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def is_observed(*harmless: type) -> bool:
    """Whether the calling thread has a mode on, which would not see what other threads do, but for `harmless` ones."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return torch.is_inference_mode_enabled() or not all(isinstance(mode, harmless) for mode in modes)


def _is_loop(optimizer: Optimizer) -> bool:
    """Whether a Python loop updates the parameters one by one, as by default on the host."""
    return not all(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)


def _parts_of(parameters: Sequence[torch.Tensor], count: int, loop: bool) -> list[set[int]]:
    elements = [float(parameter.numel()) for parameter in parameters]
    total = sum(elements)
    if count < 2 or total < _LEAST_ELEMENTS or (loop and total < _LEAST_ELEMENTS_OF_A_LOOP * len(elements)):
        return []
    split = split_items(elements, [(0.0, 1.0)] * count)
    if max(split.loads) > _MOST_IN_ONE_PART * total:
        return []
    return [{id(parameters[index]) for index in items} for items in split.items if items]


def _part(cls: type[Optimizer], optimizer: Optimizer, part: set[int]) -> Optimizer:
    """An optimizer of some of the parameters, with the present options and the common state."""
    groups = []
    for group in optimizer.param_groups:
        parameters = [one for one in group["params"] if id(one) in part]
        if parameters:
            groups.append({**group, "params": parameters})
    piece = cls.__new__(cls)
    piece.__dict__.update(optimizer.__dict__, param_groups=groups)
    return piece
