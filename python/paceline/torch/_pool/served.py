"""What answers requests on each device: a copy of a module, or a function with the device's own state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.copies import Replicate, alias_of, copied, made_by
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica

Answer = Callable[[Any], Any]


class Served:
    """Hands each device its function of a batch."""

    def of(self, device: str) -> Answer:
        """Called on the device's worker, before each batch. What it raises makes the device useless for these requests."""
        raise TypeError("Served.of is for subclasses")


class ServedFunction(Served):
    """A function that all devices call."""

    def __init__(self, function: Answer) -> None:
        self._function = function

    def of(self, device: str) -> Answer:
        """See `Served`."""
        return self._function


class WithState(Served):
    """A function of the device's own state, which `initializer` makes on the device's worker, before the first batch."""

    def __init__(self, function: Callable[[Any, Any], Any], initializer: Callable[[torch.device], Any]) -> None:
        self._function, self._initializer = function, initializer
        self._states: dict[str, Any] = {}  # each worker writes its own

    def of(self, device: str) -> Answer:
        """See `Served`."""
        if device not in self._states:
            self._states[device] = self._initializer(torch.device("cpu"))
        state = self._states[device]
        return lambda batch: self._function(state, batch)


class Copies(Served):
    """A copy of a module for each device, since a forward may write to attributes and buffers. Copies share the parameters."""

    def __init__(self, module: nn.Module, devices: Sequence[str], replicate: Replicate | None) -> None:
        self._replicas: dict[str, Replica] = {}
        self._seen: dict[str, list[tuple[int, int]]] = {}  # of the user's buffers
        reach = Reach(module)
        self._buffers = [(part._buffers, name) for _, part in reach.modules for name in part._buffers]
        parameters = [*module.parameters(), *reach.unregistered.values()]
        marks = self._marks()
        with torch.inference_mode(False):
            for device in devices:
                if replicate is None:
                    made = copied(module, reach, alias_of, {}, detaches=True)
                else:
                    made = made_by(replicate, module, reach, alias_of)
                replica = self._replicas[device] = Replica(made, reach, parameters, shared=True)
                replica.follow(
                    [one.requires_grad for one in parameters], [one.training for _, one in reach.modules], anew=False
                )
                self._seen[device] = marks

    def _marks(self) -> list[tuple[int, int]]:
        found = (slots.get(name) for slots, name in self._buffers)
        return [(id(one), 0 if one is None or one.is_inference() else one._version) for one in found]

    def of(self, device: str) -> Answer:
        """See `Served`. The copy gets the user's buffers if these have changed."""
        replica, marks = self._replicas[device], self._marks()
        if marks != self._seen[device]:
            with torch.no_grad():
                assert replica.buffers is not None
                replica.buffers.pull()
            self._seen[device] = marks
        return replica.module
