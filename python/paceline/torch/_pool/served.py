"""What answers requests on each device: a copy of a module, or a function with the device's own state."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._devices import cuda
from paceline.torch._devices.compile_gate import CompileGate
from paceline.torch._devices.compiling import compiled_for_each
from paceline.torch._pool.seats import Seat, home_of
from paceline.torch._pool.weights import Marks, Weights, same
from paceline.torch._replicas.buffers import Pair, Slots
from paceline.torch._replicas.capture import loading
from paceline.torch._replicas.compiled import captures_graphs, compiles, is_compiled, is_compiled_function
from paceline.torch._replicas.copies import Replicate, alias_of, copied, made_by
from paceline.torch._replicas.reach import Reach
from paceline.torch._replicas.replica import Replica

# Of a kind on a device. A compiler that meets so many has long switched to dynamic shapes, or given up (its own limit is 8).
_MOST_SIZES = 16

Answer = Callable[[Any], Any]
Ready = tuple[
    Answer, float | None, float
]  # seconds of loading it, if it was not resident, and of waiting for captures before


class Served:
    """Hands each device its function of a batch.

    Attributes
    ----------
    resident
        Bytes that it keeps in the memory of a device, until `drop`.
    keeps
        Whether it keeps anything on a device that `of` makes.
    load_seconds
        How long the first `of` on a device took, the last time.
    prepared
        The devices on which `of` has succeeded once.
    rehearsals
        How often a batch of a size runs until later ones run as they will.
    """

    resident = 0.0
    keeps = True
    load_seconds = 0.0
    rehearsals = 1

    def __init__(self, *, compiled: bool, captures: bool = False) -> None:
        self._compiled, self._captures = compiled, captures
        self._devices: set[str] = set()
        self.prepared: set[str] = set()
        self._sizes: dict[tuple[str, str], set[Any]] = {}  # that have run, by device and kind
        self._call = object()  # for the gate; another one once a run hangs
        self._drops: Counter[str] = Counter()  # by device

    def holds(self, device: str) -> float:
        """Bytes of a device's memory that it keeps now, by `resident`."""
        return 0.0

    def bytes_on(self, seat: Seat) -> float:
        """Bytes that it takes of a GPU's memory once it is loaded there, as far as that is known."""
        return self.resident

    def add(self, seat: Seat) -> None:
        """Called for each device before it may answer, with all others at work. Raises if it cannot."""
        if self._captures and seat.gpu is not None:
            raise InvalidArgument(
                f"serve: torch.compile with CUDA graphs of its own (mode='reduce-overhead' or 'max-autotune') on {seat.name}. PyTorch keeps the memory of such "
                "graphs for one thread and one stream of a GPU, and a pool has several. Use mode='max-autotune-no-cudagraphs' or no mode."
            )
        self._devices.add(seat.name)

    def of(self, seat: Seat) -> Ready:
        """Called on the device's worker, on its stream, before each batch. What it raises makes the device useless for these requests.

        Also the seconds in which it was loaded, if it was not resident, and those of waiting for captures before that.
        """
        begun = time.monotonic()
        answer, loaded, waited = self._of(seat)
        if seat.name not in self.prepared:
            self.load_seconds = time.monotonic() - begun - waited
            self.prepared.add(seat.name)
        return (self._limited(answer) if self._compiled else answer), loaded, waited

    def _of(self, seat: Seat) -> Ready:
        raise TypeError("Served._of is for subclasses")

    def drop(self, device: str) -> None:
        """Forget what was made for a device, on any thread. What is just made there, by a load that was given up for example, is not kept."""
        self._drops[device] += 1  # before the rest, as `_keep` looks in the other order
        self._call = object()
        for key in [key for key in list(self._sizes) if key[0] == device]:  # others may add theirs
            self._sizes.pop(key, None)

    def _keep(self, kept: dict[str, Any], device: str, made: Any, drops: int) -> None:
        """Keep what was made for a device, unless `drop` was called since there were so many `drops`."""
        if self._drops[device] == drops:
            kept[device] = made
            if self._drops[device] != drops:  # just now, and perhaps before
                kept.pop(device, None)

    def free(self, seat: Seat) -> None:
        """Forget what was made for a device, where nobody uses it any more."""
        self.drop(seat.name)

    @property
    def settles_by_size(self) -> bool:
        """Whether each size of batches makes something anew on a device: code or a graph."""
        return self._compiled or self.rehearsals > 1

    def explain(self) -> str:
        """What there is to say of it, in words."""
        return ""

    @contextlib.contextmanager
    def running(
        self, device: str, kind: str, size: tuple[Any, ...], *, captures: bool | None = None
    ) -> Iterator[float]:
        """Around a batch of a kind and a size. Yields the seconds that say nothing of the device's speed: all if something may be compiled.

        What is compiled, or `captures`, runs with no other compiled or captured work beside it, as in training. `size` has all that code may be compiled anew
        for. `captures` is None where nothing ever does.
        """
        if not self._compiled and captures is None:
            yield 0.0
            return
        sizes = self._sizes.setdefault((device, kind), set())
        first = captures or (self._compiled and size not in sizes and len(sizes) < _MOST_SIZES)
        with CompileGate.of_call().enter(bool(first), self._call) as waited:
            yield math.inf if first or waited else 0.0
        if first:
            sizes.add(size)

    def _limited(self, answer: Answer) -> Answer:
        def limited(batch: Any) -> Any:  # each device may compile as often as one device alone
            context = contextvars.copy_context()
            with compiled_for_each(len(self._devices), [context]):
                return context.run(answer, batch)

        return limited


class ServedFunction(Served):
    """A function that all devices call."""

    keeps = False

    def __init__(self, function: Answer) -> None:
        super().__init__(compiled=is_compiled_function(function), captures=captures_graphs(function))
        self._function = function

    def _of(self, seat: Seat) -> Ready:
        return self._function, None, 0.0


class ServedScript(ServedFunction):
    """A ``ScriptModule``, which has no copies."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__(module)
        self._place = home_of(module)

    def _of(self, seat: Seat) -> Ready:
        _follow_default(seat)
        return super()._of(seat)

    def add(self, seat: Seat) -> None:
        """See `Served`."""
        if seat.device != self._place:
            raise InvalidArgument(
                f"serve: a torch.jit.ScriptModule has no copies, and this one is on {self._place}, so {seat.name} cannot call it. Let initializer= "
                "load it onto each device."
            )
        super().add(seat)


class WithState(Served):
    """A function of the device's own state, which `initializer` makes on the device's worker, before the first batch."""

    def __init__(
        self, function: Callable[[Any, Any], Any], initializer: Callable[[torch.device], Any], resident: float
    ) -> None:
        super().__init__(compiled=is_compiled_function(function), captures=captures_graphs(function))
        self._function, self._initializer, self.resident = function, initializer, resident
        self._states: dict[str, tuple[Any]] = {}  # each worker writes its own

    def _of(self, seat: Seat) -> Ready:
        made, loaded, waited = self._states.get(seat.name), None, 0.0
        if made is None:
            drops = self._drops[seat.name]
            with loading(seat.gpu) as waited:
                begun = time.monotonic()
                made = (self._initializer(seat.device),)
                self._keep(self._states, seat.name, made, drops)
            seat.wait()  # for copies to a GPU
            loaded = time.monotonic() - begun
        # No frame of it keeps the state in the traceback of an error.
        return functools.partial(self._function, *made), loaded, waited

    def holds(self, device: str) -> float:
        """See `Served`."""
        return self.resident if device in self._states else 0.0

    def drop(self, device: str) -> None:
        """See `Served`."""
        super().drop(device)
        self._states.pop(device, None)


class _Copy:
    """A device's copy of a module."""

    def __init__(self, replica: Replica, answer: Answer, shared: list[Pair], weights: Weights | None) -> None:
        self.replica, self.answer = replica, answer
        self.shared = shared  # its parameters, and the user's
        self.weights = weights  # None where the module is
        self.waited = 0.0  # seconds for captures, before it was made
        self.generation = 0  # of the weights that it has
        self.seen: Marks | None = None  # of the user's buffers


class Copies(Served):
    """A copy of a module for each device, since a forward may write to attributes and buffers. Copies share the parameters, or one copy of these in each memory."""

    def __init__(
        self, module: nn.Module, replicate: Replicate | None, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            compiled=options is not None or is_compiled(module),
            captures=any(captures_graphs(part) for part in module.modules() if compiles(part))
            or (options is not None and captures_graphs(torch.compile(module, **options))),
        )
        self._module, self._replicate, self._options = module, replicate, options
        self._copies: dict[str, _Copy] = {}
        self._weights: dict[str, Weights] = {}  # by memory space
        self._sharing = threading.Lock()  # for who shares them
        self._home: str | None = None  # the memory space of the module, if a device is there
        self._place = home_of(module)

    def add(self, seat: Seat) -> None:
        """See `Served`."""
        super().add(seat)
        if self._home is None and seat.device == self._place:
            self._home = seat.space
        self._copies[seat.name] = self._copy_for(seat, self._drops[seat.name])

    def bytes_on(self, seat: Seat) -> float:
        """See `Served`."""
        own = [*self._module.buffers(), *(() if seat.space == self._home else self._module.parameters())]
        return float(sum(one.numel() * one.element_size() for one in own))

    def drop(self, device: str) -> None:
        """See `Served`."""
        super().drop(device)
        self._copies.pop(device, None)

    def free(self, seat: Seat) -> None:
        """See `Served`."""
        super().free(seat)
        with self._sharing:
            weights = self._weights.get(seat.space)
            if weights is not None:
                weights.devices.discard(seat.name)
                if not weights.devices:
                    del self._weights[seat.space]

    def _copy_for(self, seat: Seat, drops: int) -> _Copy:
        reach = Reach(self._module)
        parameters = [*self._module.parameters(), *reach.unregistered.values()]
        with loading(seat.gpu) as waited, torch.inference_mode(False):
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
        weights = None
        if far:
            with self._sharing:
                weights = Weights()  # those of a copy that is not kept go with it
                if self._drops[seat.name] == drops:
                    weights = self._weights.setdefault(seat.space, weights)
                weights.devices.add(seat.name)
        # module.compile() compiles nothing of a class of PyTorch, such as nn.Sequential.
        answer = replica.module if self._options is None else torch.compile(replica.module, **self._options)
        copy = _Copy(replica, answer, shared, weights)
        copy.waited = waited
        return copy

    def _of(self, seat: Seat) -> Ready:
        # The copy gets the user's buffers, and the user's parameters or their memory, if these have changed.
        copy, waited = self._copies.get(seat.name), 0.0
        if copy is None:  # after a run that hangs, which has the one before
            drops = self._drops[seat.name]
            copy = self._copy_for(seat, drops)
            self._keep(self._copies, seat.name, copy, drops)
            waited = copy.waited
        here = seat.device == self._place  # PyTorch orders copies between GPUs itself
        if copy.weights is None:
            _share(copy.shared)
        else:
            if here:  # a part of the module's GPU that stands for another one
                _follow_default(seat)
            _renew(seat, copy, copy.weights)
        marks = _marks([(ours, name) for ours, _, name in copy.replica.buffer_pairs])
        if here:
            _follow_default(seat)
        if copy.seen is None or not same(marks, copy.seen):
            # A forward may have left tensors of inference mode in the place of buffers. Elsewhere these cannot be written to.
            with torch.inference_mode():
                if copy.weights is not None and copy.seen is None:
                    _move(copy, seat.device)
                assert copy.replica.buffers is not None
                copy.replica.buffers.pull()
            copy.seen = marks
        return copy.answer, None, waited


def _follow_default(seat: Seat) -> None:
    """Let a GPU wait for its default stream, which may be at a write to the user's module there. Nothing tells of new memory (``half()``) or writes through ``.data``."""
    if seat.gpu is not None:
        seat.follow([cuda.mark_default(seat.gpu)])


def _share(shared: list[Pair]) -> None:
    for ours, theirs, name in shared:
        value, alias = ours.get(name), theirs.get(name)
        if value is None or alias is None:
            continue
        if value.data_ptr() != alias.data_ptr() or value.dtype != alias.dtype:
            alias.data = value.data


def _renew(seat: Seat, copy: _Copy, weights: Weights) -> None:
    slots = [(ours, name) for ours, _, name in copy.shared if ours.get(name) is not None]
    present = [theirs[name] for ours, theirs, name in copy.shared if ours.get(name) is not None]
    made, generation = weights.of(seat, _marks(slots, addresses=True), present)
    if generation != copy.generation:
        for alias, value in zip(present, made, strict=True):
            alias.data = value
        copy.generation = generation


def _move(copy: _Copy, device: torch.device) -> None:
    """Buffers, and other tensors in attributes, of a copy for another memory, where the parameters are already."""
    there = {id(theirs[name]) for _, theirs, name in copy.shared}
    for part in copy.replica.modules:
        for table in (part._buffers, vars(part)):
            table |= {
                name: one.to(device, copy=True)
                for name, one in table.items()
                if isinstance(one, torch.Tensor) and id(one) not in there
            }


def _marks(slots: Sequence[tuple[Slots, str]], *, addresses: bool = False) -> Marks:
    """What changes when these tensors are replaced or written to; with `addresses`, also when they get other memory."""
    found = [table.get(name) for table, name in slots]
    versions = [0 if one is None or one.is_inference() else one._version for one in found]
    if not addresses:
        return found, versions
    return found, [*versions, *((one.dtype, _address(one)) for one in found if one is not None)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
