"""What answers requests on each device: a copy of a module, or a function with the device's own state."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._devices import cuda
from paceline.torch._pool.seats import Seat
from paceline.torch._replicas.buffers import Pair, Slots
from paceline.torch._replicas.copies import Replicate, alias_of, copied, made_by
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica

Answer = Callable[[Any], Any]
Marks = tuple[
    list[torch.Tensor | None], list[Any]
]  # tensors, which are kept so that no other one gets their identity, and versions


class Served:
    """Hands each device its function of a batch."""

    def of(self, seat: Seat) -> Answer:
        """Called on the device's worker, on its stream, before each batch. What it raises makes the device useless for these requests."""
        raise TypeError("Served.of is for subclasses")

    def add(self, seat: Seat) -> None:
        """Called before a device joins the pool, with all other devices at work."""


class ServedFunction(Served):
    """A function that all devices call."""

    def __init__(self, function: Answer) -> None:
        self._function = function

    def of(self, seat: Seat) -> Answer:
        """See `Served`."""
        return self._function


class ServedScript(ServedFunction):
    """A ``ScriptModule``, which has no copies."""

    def __init__(self, module: torch.jit.ScriptModule, seats: Sequence[Seat]) -> None:
        super().__init__(module)
        self._place = _place_of(module)
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        """See `Served`."""
        if seat.device != self._place:
            raise InvalidArgument(
                f"serve: a torch.jit.ScriptModule has no copies, and this one is on {self._place}, so {seat.name} cannot call it. Let initializer= "
                "load it onto each device."
            )


class WithState(Served):
    """A function of the device's own state, which `initializer` makes on the device's worker, before the first batch."""

    def __init__(self, function: Callable[[Any, Any], Any], initializer: Callable[[torch.device], Any]) -> None:
        self._function, self._initializer = function, initializer
        self._states: dict[str, Any] = {}  # each worker writes its own

    def of(self, seat: Seat) -> Answer:
        """See `Served`."""
        if seat.name not in self._states:
            self._states[seat.name] = self._initializer(seat.device)
        state = self._states[seat.name]
        return lambda batch: self._function(state, batch)


class _Weights:
    """Copies of the parameters for one memory space where the module is not. The devices there share them.

    One batch at a time is on a device. So when a device takes over new copies nothing there uses the old ones any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Marks = ([], [])
        self._copies: list[torch.Tensor] = []
        self._ready: Any = None
        self.generation = 0

    def of(self, seat: Seat, marks: Marks) -> tuple[list[torch.Tensor], int]:
        """The copies, and how often they were made."""
        with self._lock:
            if not (self._copies and _same(marks, self._seen)):
                # `copy`: a tensor that changes while this goes on is copied again before the next batch.
                made = {id(one): one.detach().to(seat.device, copy=True) for one in marks[0] if one is not None}
                self._copies = [made[id(one)] for one in marks[0] if one is not None]
                self._seen, self._ready = marks, seat.mark()
                self.generation += 1
            elif self._ready is not None:
                seat.follow([self._ready])
            return self._copies, self.generation


class _Copy:
    """A device's copy of a module."""

    def __init__(self, replica: Replica, shared: list[Pair], weights: _Weights | None) -> None:
        self.replica = replica
        self.shared = shared  # its parameters, and the user's
        self.weights = weights  # None where the module is
        self.generation = 0  # of the weights that it has
        self.seen: Marks | None = None  # of the user's buffers
        self.written: Marks | None = None  # of the user's module on its GPU


class Copies(Served):
    """A copy of a module for each device, since a forward may write to attributes and buffers. Copies share the parameters, or one copy of these in each memory."""

    def __init__(self, module: nn.Module, seats: Sequence[Seat], replicate: Replicate | None) -> None:
        self._module, self._replicate = module, replicate
        self._copies: dict[str, _Copy] = {}
        self._weights: dict[str, _Weights] = {}  # by memory space
        self._home: str | None = None  # the memory space of the module, if a device is there
        self._place = _place_of(module)
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        """See `Served`."""
        if self._home is None and seat.device == self._place:
            self._home = seat.space
        reach = Reach(self._module)
        parameters = [*self._module.parameters(), *reach.unregistered.values()]
        with torch.inference_mode(False):
            if self._replicate is None:
                made = copied(self._module, reach, alias_of, {}, detaches=True)
            else:
                made = made_by(self._replicate, self._module, reach, alias_of)
            replica = Replica(made, reach, parameters, shared=True)
            replica.follow(
                [one.requires_grad for one in parameters], [one.training for _, one in reach.modules], anew=False
            )
        far = seat.space != self._home
        shared: list[Pair] = [
            (ours._parameters, theirs._parameters, name)
            for (_, ours), theirs in zip(reach.modules, replica.modules, strict=True)
            if theirs is not ours
            for name, one in ours._parameters.items()
            if one is not None and (far or (type(one) is nn.Parameter and one.layout is torch.strided))
        ]  # without an address there is nothing to compare, nor to share anew
        if far:
            shared += [({"": one}, {"": made.counterparts[id(one)]}, "") for one in reach.unregistered.values()]
        weights = self._weights.setdefault(seat.space, _Weights()) if far else None
        self._copies[seat.name] = _Copy(replica, shared, weights)

    def of(self, seat: Seat) -> Answer:
        """See `Served`. The copy gets the user's buffers, and the user's parameters or their memory, if these have changed."""
        copy = self._copies[seat.name]
        if seat.gpu is not None and seat.device == self._place:
            _await(seat.gpu, seat, copy)
        if copy.weights is None:
            _share(copy.shared)
        else:
            _renew(seat, copy, copy.weights)
        marks = _marks([(ours, name) for ours, _, name in copy.replica.buffer_pairs])
        if copy.seen is None or not _same(marks, copy.seen):
            # A forward may have left tensors of inference mode in the place of buffers. Elsewhere these cannot be written to.
            with torch.inference_mode():
                if copy.weights is not None and copy.seen is None:
                    _move(copy.replica, seat.device)
                assert copy.replica.buffers is not None
                copy.replica.buffers.pull()
            copy.seen = marks
        return copy.replica.module


def _await(gpu: int, seat: Seat, copy: _Copy) -> None:
    """Let the device wait for what has written to the module on its GPU, on the default stream. PyTorch orders copies between GPUs itself."""
    written = _marks([(ours, name) for ours, _, name in (*copy.shared, *copy.replica.buffer_pairs)])
    if copy.written is None or not _same(written, copy.written):
        seat.follow([cuda.mark_default(gpu)])
        copy.written = written


def _share(shared: list[Pair]) -> None:
    for ours, theirs, name in shared:
        value, alias = ours.get(name), theirs.get(name)
        if value is None or alias is None:
            continue
        if value.data_ptr() != alias.data_ptr() or value.dtype != alias.dtype:
            alias.data = value.data


def _renew(seat: Seat, copy: _Copy, weights: _Weights) -> None:
    slots = [(ours, name) for ours, _, name in copy.shared if ours.get(name) is not None]
    made, generation = weights.of(seat, _marks(slots, addresses=True))
    if generation != copy.generation:
        present = [theirs[name] for ours, theirs, name in copy.shared if ours.get(name) is not None]
        for alias, value in zip(present, made, strict=True):
            alias.data = value
        copy.generation = generation


def _move(replica: Replica, device: torch.device) -> None:
    """Buffers, and other tensors in attributes, of a copy for another memory."""
    for part in replica.modules:
        for table in (part._buffers, vars(part)):
            table |= {name: one.to(device, copy=True) for name, one in table.items() if isinstance(one, torch.Tensor)}


def _marks(slots: Sequence[tuple[Slots, str]], *, addresses: bool = False) -> Marks:
    """What changes when these tensors are replaced or written to; with `addresses`, also when they get other memory."""
    found = [table.get(name) for table, name in slots]
    versions = [0 if one is None or one.is_inference() else one._version for one in found]
    if not addresses:
        return found, versions
    return found, [*versions, *((one.dtype, _address(one)) for one in found if one is not None)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _same(marks: Marks, seen: Marks) -> bool:
    return marks[1] == seen[1] and len(marks[0]) == len(seen[0]) and all(map(operator.is_, marks[0], seen[0]))


def _place_of(module: nn.Module) -> torch.device:
    """Where the module is."""
    places: dict[torch.device, str] = {}
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    for name, one in named or module.named_buffers():
        places.setdefault(one.device, name)
    if not places:
        return torch.device("cpu")
    (place, name), *others = places.items()
    if others or place.type == "meta":
        what = (
            f"{name} is on {place}, and {others[0][1]} on {others[0][0]}"
            if others
            else f"{name} is on meta, and has no values"
        )
        raise InvalidArgument(
            f"serve: {what}. Move the module to one device. Each device of the pool gets its copy from there."
        )
    return place
