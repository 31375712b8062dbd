"""What answers requests on each device: a copy of a module, or a function with the device's own state."""

from __future__ import annotations

import contextlib
import contextvars
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.torch._devices.compile_gate import CompileGate
from paceline.torch._devices.compiling import compiled_for_each
from paceline.torch._replicas.buffers import Pair
from paceline.torch._replicas.compiled import is_compiled, is_compiled_function
from paceline.torch._replicas.copies import Replicate, alias_of, copied, made_by
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica

# Of a kind on a device. A compiler that meets so many has long switched to dynamic shapes, or given up (its own limit is 8).
_MOST_SIZES = 16

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

    def __init__(self, devices: int, *, compiled: bool) -> None:
        self._devices, self._compiled = devices, compiled
        self._sizes: dict[tuple[str, str], set[Any]] = {}  # that have run, by device and kind
        self._call = object()  # for the gate; another one once a run hangs

    def of(self, device: str) -> tuple[Answer, float | None]:
        """Called on the device's worker, before each batch. What it raises makes the device useless for these requests.

        Also the seconds in which it was loaded, if it was not resident.
        """
        answer, loaded = self._of(device)
        return (self._limited(answer) if self._compiled else answer), loaded

    def _of(self, device: str) -> tuple[Answer, float | None]:
        raise TypeError("Served._of is for subclasses")

    def drop(self, device: str) -> None:
        """Forget what was made for a device, on any thread."""
        self._call = object()
        self._sizes = {key: sizes for key, sizes in self._sizes.items() if key[0] != device}

    @contextlib.contextmanager
    def running(self, device: str, kind: str, size: tuple[Any, ...]) -> Iterator[float]:
        """Around a batch of a kind and a size. Yields the seconds that say nothing of the device's speed: all if something may be compiled.

        What is compiled first runs with no other compiled work beside it, as in training. `size` has all that code may be compiled anew for.
        """
        if not self._compiled:
            yield 0.0
            return
        sizes = self._sizes.setdefault((device, kind), set())
        first = size not in sizes and len(sizes) < _MOST_SIZES
        with CompileGate.of_call().enter(first, self._call) as waited:
            yield math.inf if first or waited else 0.0
        if first:
            sizes.add(size)

    def _limited(self, answer: Answer) -> Answer:
        def limited(batch: Any) -> Any:  # each device may compile as often as one device alone
            context = contextvars.copy_context()
            with compiled_for_each(self._devices, [context]):
                return context.run(answer, batch)

        return limited


class ServedFunction(Served):
    """A function that all devices call."""

    def __init__(self, function: Answer, devices: int) -> None:
        super().__init__(devices, compiled=is_compiled_function(function))
        self._function = function

    def _of(self, device: str) -> tuple[Answer, float | None]:
        return self._function, None


class WithState(Served):
    """A function of the device's own state, which `initializer` makes on the device's worker, before the first batch."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        initializer: Callable[[torch.device], Any],
        devices: int,
        resident: float,
    ) -> None:
        super().__init__(devices, compiled=is_compiled_function(function))
        self._function, self._initializer, self.resident = function, initializer, resident
        self._states: dict[str, tuple[Any]] = {}  # each worker writes its own

    def _of(self, device: str) -> tuple[Answer, float | None]:
        made, loaded = self._states.get(device), None
        if made is None:
            begun = time.monotonic()
            made = self._states[device] = (self._initializer(torch.device("cpu")),)
            loaded = time.monotonic() - begun
        (state,) = made
        return (lambda batch: self._function(state, batch)), loaded

    def drop(self, device: str) -> None:
        """See `Served`."""
        super().drop(device)
        self._states.pop(device, None)


class Copies(Served):
    """A copy of a module for each device, since a forward may write to attributes and buffers. Copies share the parameters."""

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[str],
        replicate: Replicate | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(len(devices), compiled=options is not None or is_compiled(module))
        self._module, self._replicate, self._options = module, replicate, options
        self._replicas: dict[str, Replica] = {}
        self._answers: dict[str, Answer] = {}  # what is called in their place
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
        if self._options is not None:  # module.compile() compiles nothing of a class of PyTorch, such as nn.Sequential
            self._answers[device] = torch.compile(replica.module, **self._options)
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
        super().drop(device)
        self._replicas.pop(device, None)

    def _marks(self) -> Marks:
        found = [slots.get(name) for slots, name in self._buffers]
        return found, [0 if one is None or one.is_inference() else one._version for one in found]

    def _of(self, device: str) -> tuple[Answer, float | None]:
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
        return self._answers.get(device, replica.module), None
