"""What answers requests on each device: a copy of a module, or a function with the device's own state."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._replicas.buffers import Pair
from paceline.torch._replicas.copies import Replicate, alias_of, copied, made_by
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica

Answer = Callable[[Any], Any]
Marks = tuple[
    list[torch.Tensor | None], list[int]
]  # tensors, which are kept so that no other one gets their identity, and versions


class Served:
    """Hands each device its function of a batch.

    Attributes
    ----------
    resident
        Bytes that it keeps in the memory of a device, until `drop`.
    """

    resident = 0.0

    def of(self, device: str) -> tuple[Answer, float | None]:
        """Called on the device's worker, before each batch. What it raises makes the device useless for these requests.

        Also the seconds in which it was loaded, if it was not resident.
        """
        raise TypeError("Served.of is for subclasses")

    def drop(self, device: str) -> None:
        """Forget what was made for a device, on any thread."""


class ServedFunction(Served):
    """A function that all devices call."""

    def __init__(self, function: Answer) -> None:
        self._function = function

    def of(self, device: str) -> tuple[Answer, float | None]:
        """See `Served`."""
        return self._function, None


class WithState(Served):
    """A function of the device's own state, which `initializer` makes on the device's worker, before the first batch."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        initializer: Callable[[torch.device], Any],
        resident: float,
    ) -> None:
        self._function, self._initializer, self.resident = function, initializer, resident
        self._states: dict[str, tuple[Any]] = {}  # each worker writes its own

    def of(self, device: str) -> tuple[Answer, float | None]:
        """See `Served`."""
        made, loaded = self._states.get(device), None
        if made is None:
            begun = time.monotonic()
            made = self._states[device] = (self._initializer(torch.device("cpu")),)
            loaded = time.monotonic() - begun
        (state,) = made
        return (lambda batch: self._function(state, batch)), loaded

    def drop(self, device: str) -> None:
        """See `Served`."""
        self._states.pop(device, None)


class Copies(Served):
    """A copy of a module for each device, since a forward may write to attributes and buffers. Copies share the parameters."""

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[str],
        replicate: Replicate | None,
    ) -> None:
        self._module, self._replicate = module, replicate
        self._replicas: dict[str, Replica] = {}
        self._seen: dict[str, Marks] = {}  # of the user's buffers
        self._shared: dict[str, list[Pair]] = {}  # the parameters
        self._reach = Reach(module)
        self._buffers = [(part._buffers, name) for _, part in self._reach.modules for name in part._buffers]
        for device in devices:
            self._copy(device)

    def _copy(self, device: str) -> Replica:
        module, reach = self._module, self._reach
        parameters = [*module.parameters(), *reach.unregistered.values()]
        marks = self._marks()
        with torch.inference_mode(False):
            if self._replicate is None:
                made = copied(module, reach, alias_of, {}, detaches=True)
            else:
                made = made_by(self._replicate, module, reach, alias_of)
            replica = Replica(made, reach, parameters, shared=True)
            replica.follow(
                [one.requires_grad for one in parameters], [one.training for _, one in reach.modules], anew=False
            )
        self._seen[device] = marks
        self._shared[device] = [
            (ours._parameters, theirs._parameters, name)
            for (_, ours), theirs in zip(reach.modules, replica.modules, strict=True)
            if theirs is not ours
            for name, one in ours._parameters.items()
            if type(one) is nn.Parameter and one.layout is torch.strided  # others may have no address
        ]
        self._replicas[device] = replica
        return replica

    def drop(self, device: str) -> None:
        """See `Served`."""
        self._replicas.pop(device, None)

    def _marks(self) -> Marks:
        found = [slots.get(name) for slots, name in self._buffers]
        return found, [0 if one is None or one.is_inference() else one._version for one in found]

    def of(self, device: str) -> tuple[Answer, float | None]:
        """See `Served`."""
        # The copy gets the user's buffers, and the memory of the user's parameters, if these have changed.
        replica = self._replicas.get(device) or self._copy(device)
        marks, seen = self._marks(), self._seen[device]
        for ours, theirs, name in self._shared[device]:
            value, alias = ours.get(name), theirs.get(name)
            if value is None or alias is None:
                continue
            if value.data_ptr() != alias.data_ptr() or value.dtype != alias.dtype:
                alias.data = value.data
        if marks[1] != seen[1] or not all(map(operator.is_, marks[0], seen[0])):
            # A forward may have left tensors of inference mode in the place of buffers. Elsewhere these cannot be written to.
            with torch.inference_mode():
                assert replica.buffers is not None
                replica.buffers.pull()
            self._seen[device] = marks
        return replica.module, None
