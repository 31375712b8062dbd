"""Lets a device in another memory space wait for its parameters when it first uses them, bucket by bucket."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

# References to a parameter beside those of modules: the replica's list, its counterparts, and the argument of getrefcount.
_KNOWN = 3
# Large enough that a bucket takes longer to copy than to launch, and small enough that the first one, which nothing hides, is short.
MOST_BYTES = 25 << 20


def buckets_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """The bucket of each parameter. Modules mostly use parameters in the order in which they were registered."""
    found, filled = [], 0
    for parameter in parameters:
        found.append(filled // MOST_BYTES)
        filled += parameter.numel() * parameter.element_size()
    numbers = {bucket: number for number, bucket in enumerate(dict.fromkeys(found))}
    return [numbers[bucket] for bucket in found]


class Arrivals:
    """Which buckets of parameters a device has still to wait for in this step.

    Modules of the device read their parameters from dictionaries that wait first. So whoever uses a parameter waits for it, also outside of
    the forward of its own module. A parameter that is held somewhere else (the flat weights of an RNN, a closure, a list) could be used
    without its module's dictionary, so it is waited for at once.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        buckets: Sequence[int],
        modules: Sequence[nn.Module],
        *,
        at_once: Iterable[int] = (),
    ) -> None:
        """`parameters`: those of the device's replica, whose list it is; `buckets`: the bucket of each; `at_once`: buckets to wait for first."""
        self.waiting: set[int] = set()
        self._all = frozenset(buckets)
        self._bucket_of = dict(zip(map(id, parameters), buckets, strict=True))
        self._need: Callable[[int], None] | None = None
        self._modules = [module for module in dict.fromkeys(modules) if module._parameters]
        self._at_once = set(at_once)
        self._parameters, self._buckets = parameters, buckets
        uses = Counter(id(one) for module in self._modules for one in module._parameters.values())
        self._known = [_KNOWN + uses[id(parameter)] for parameter in parameters]
        for module in self._modules:
            module._parameters = _Parameters(module._parameters, self)

    def begin(self, need: Callable[[int], None], *, compiled: bool) -> None:
        """Begin a step. `need` lets the device's queue wait for a bucket. `compiled`: code that is not Python uses parameters."""
        if compiled and self._modules:
            for module in self._modules:
                module._parameters = dict(module._parameters)
            self._modules, self._at_once = [], set(self._all)
        self._need = need
        self.waiting = set(self._all)
        for bucket in sorted(self._at_once | self._held()):
            self.wait_for(bucket)

    def _held(self) -> set[int]:
        """The buckets of parameters that somebody beside the modules holds by now, as a list that the last forward has made."""
        ours, known = self._parameters, self._known
        return {self._buckets[k] for k in range(len(ours)) if sys.getrefcount(ours[k]) > known[k]}

    def end(self) -> None:
        """The devices have no more work in this step."""
        self.waiting, self._need = set(), None

    def wait_for(self, bucket: int) -> None:
        if bucket in self.waiting:
            if self._need is not None:
                self._need(bucket)
            self.waiting.discard(bucket)  # last, for another thread of the user's that uses the replica, too

    def wait_for_all(self) -> None:
        for bucket in sorted(self.waiting):
            self.wait_for(bucket)

    def used(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """The parameter, which its device is about to use."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self.wait_for(bucket)
        return parameter


class _Parameters(dict[str, Any]):
    """A module's parameters. What is read is waited for."""

    def __init__(self, parameters: dict[str, Any], arrivals: Arrivals) -> None:
        super().__init__(parameters)
        self._arrivals = arrivals

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return self._arrivals.used(found) if self._arrivals.waiting else found

    def get(self, name: str, default: Any = None) -> Any:
        return self._arrivals.used(super().get(name, default))

    def pop(self, *given: Any) -> Any:
        self._arrivals.wait_for_all()
        return super().pop(*given)

    def values(self) -> Any:
        self._arrivals.wait_for_all()
        return super().values()

    def items(self) -> Any:
        self._arrivals.wait_for_all()
        return super().items()

    def copy(self) -> Any:
        return dict(self.items())

    def __iter__(self) -> Any:  # with it, dict(this) and {**this} read through __getitem__
        return super().__iter__()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)
