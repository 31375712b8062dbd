"""CUDA graphs of micro-batches: forward and backward of a size are captured once on each device, and replayed after that.

A replay launches all operators at once and runs no Python of ``loss_fn``. It reads the addresses that the capture has seen. So inputs, factors
and the scale are copied into static tensors first, and gradients are added to static tensors, which become the replica's ``.grad``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.moving import Move
from paceline.torch._batch.nest import entries_of
from paceline.torch._devices import cuda
from paceline.torch._devices.places import Places
from paceline.torch._replicas.capture import (
    WARM_UPS,
    Attributes,
    capturing,
    hook_of_user,
    place_of,
    refusal,
    without_loads,
)
from paceline.torch._replicas.hooks import sign_of
from paceline.torch._replicas.reach import SIMPLE
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.flat_gradients import Capture, FlatGradients

MOST_GRAPHS = 16  # per device; each keeps the memory of a micro-batch
_MOST_KEYS = 256  # per device, of micro-batches that were seen

_training = operator.attrgetter("training")


class Inputs:
    """The tensors of a slice in the order in which the batch moves them, and the values in it that a graph would freeze."""

    def __init__(self, slice_with: Callable[[Move], Any], move: Move) -> None:
        self.tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> torch.Tensor:
            self.tensors.append(move(tensor))
            return self.tensors[-1]

        self.part = slice_with(take)
        own = set(map(id, self.tensors))
        self.others = [
            (path, type(value), value) for path, value in _leaves(self.part, "batch") if id(value) not in own
        ]

    def check(self) -> None:
        """Raise if a graph would freeze something whose changes nobody sees."""
        for path, kind, value in self.others:
            if kind not in SIMPLE:
                what = f"{value.dim()}-dimensional host tensor" if isinstance(value, torch.Tensor) else kind.__name__
                raise InvalidArgument(
                    f"step: graphs=True: {path} is a {what}. A captured graph would keep its present value in all later steps. Pass a tensor with "
                    "dimensions, with batch_dim=None if it has no items, or train without graphs=True."
                )

    def fits(self, other: Inputs) -> bool:
        """Whether a graph of one reads the other rightly, once its tensors are copied."""
        theirs = zip(self.tensors, other.tensors, strict=False)
        return (
            len(self.tensors) == len(other.tensors)
            and all(one.shape == two.shape and one.dtype == two.dtype for one, two in theirs)
            and self.others == other.others
        )


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    entries = None if type(node) is torch.Size else entries_of(node)
    if entries is not None and isinstance(node, Mapping) and dataclasses.is_dataclass(type(node)):  # besides its fields
        entries += [(key, value, f"[{key!r}]") for key, value in node.items()]
    if entries is None:
        yield path, node
    for _, value, way in entries or ():
        yield from _leaves(value, path + way)


class Captured:
    """The graph of a micro-batch, and the static tensors that it reads and writes."""

    def __init__(self, graph: cuda.Graph, inputs: Inputs, function: Any, device: torch.device) -> None:
        self.graph = graph
        self.inputs = inputs
        self.function = function  # what it refers to stays alive, since the graph reads it
        self.factor = torch.ones((), dtype=torch.float64, device=device)
        self.weights: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.dims = 0  # of the loss
        self.term = self.factor
        self.extras: Any = None  # detached, or None
        self.gradients = Capture(graph.mark)
        self.attributes: Attributes | None = None  # of the replica, before the capture


class DeviceGraphs:
    """The graphs of one device. Its micro-batches run one after the other, so they share a pool and the static gradients."""

    def __init__(self, device: int, flat: FlatGradients | None) -> None:
        """`flat`: the gradients of several devices, which are static. A single device gets static ones here."""
        self._device = device
        self._flat = flat
        self._seen: dict[Any, int] = {}  # how often a key was met
        self.captured: dict[Any, Captured] = {}
        self.drew: set[Any] = set()  # keys of micro-batches that drew from a generator that another device has, too
        self._pool: Any = None
        self._gradients: list[torch.Tensor | None] = []
        self.captures = self.replays = 0  # so far

    def clear(self) -> None:
        """Drop all graphs. Requires: the device has finished its work."""
        self.captured.clear()
        self._seen.clear()
        self.drew.clear()
        self._gradients = []
        self._pool = None

    def meet(self, key: Any) -> bool:
        """Note a micro-batch. Returns whether it has to be captured now."""
        if key in self.captured:
            return False
        if len(self._seen) >= _MOST_KEYS:
            self._seen.clear()
            self.drew.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        return seen > WARM_UPS and len(self.captured) < MOST_GRAPHS

    def pool(self) -> Any:
        """The memory of all graphs of the device."""
        if self._pool is None:
            self._pool = cuda.graph_pool()
        return self._pool

    def capture(self, key: Any, replica: Replica, captured: Captured, body: Callable[[Captured], None]) -> None:
        """Capture `body`, which reads the inputs and sets the outputs. Called on the device's worker."""
        captured.inputs.check()
        if hook := hook_of_user(replica.modules):
            raise InvalidArgument(
                f"step: graphs=True: {hook}. Return what it computes from forward or as extras of loss_fn, remove it, or train without graphs=True."
            )
        attributes = captured.attributes = Attributes(replica.modules, captured.graph.index)
        try:
            with self._gradients_of(replica, captured), without_loads(captured.graph.index), capturing(captured.graph):
                body(captured)
        except RuntimeError as error:
            self._pool = None  # PyTorch may still take it for one that is captured into
            refused = refusal("forward and backward", error)
            if refused is None:
                raise
            old = " PyTorch before 2.12 does not get over such a capture: start a new process."
            raise InvalidArgument(
                f"step: graphs=True: {refused}, return values as extras, or train without graphs=True."
                + (old if torch.__version__ < "2.12" else "")
            ) from error
        if change := attributes.change():
            raise InvalidArgument(
                f"step: graphs=True: {change}. Return the value from loss_fn as extras, keep it in a buffer that is written in place, or train "
                "without graphs=True."
            )
        self.captured[key] = captured
        self.captures += 1

    @contextlib.contextmanager
    def _gradients_of(self, replica: Replica, captured: Captured) -> Iterator[None]:
        """Let the static gradients be those of the replica in a capture, and note which parameters get some."""
        if self._flat is not None:  # these are static
            with self._flat.captured(self._device, captured.gradients):
                yield
            return
        if not self._gradients:
            self._gradients = [
                torch.zeros_like(parameter, requires_grad=False) if parameter.requires_grad else None
                for parameter in replica.parameters
            ]
        before = [parameter.grad for parameter in replica.parameters]
        versions = [-1 if gradient is None else gradient._version for gradient in self._gradients]
        try:
            for parameter, gradient in zip(replica.parameters, self._gradients, strict=True):
                parameter.grad = gradient
            yield
            for index, (parameter, gradient) in enumerate(zip(replica.parameters, self._gradients, strict=True)):
                if parameter.grad is not gradient:
                    raise InvalidArgument(
                        f"step: graphs=True: the backward has replaced the gradient of a parameter of shape {tuple(parameter.shape)} instead of "
                        "adding to it, so a replay would not find it. Train without graphs=True."
                    )
                if gradient is not None and gradient._version != versions[index]:
                    captured.gradients.used.append(index)
        finally:
            for parameter, gradient in zip(replica.parameters, before, strict=True):
                parameter.grad = gradient

    def replay(self, replica: Replica, captured: Captured, *, last: bool) -> None:
        """Run a graph, whose inputs are in place. Adds to the gradients of the replica. `last`: in this step."""
        if self._flat is None:
            self._take_gradients(replica, captured)
        captured.graph.replay()
        if self._flat is not None:
            self._flat.replayed(self._device, captured.gradients, last=last)
        self.replays += 1

    def _take_gradients(self, replica: Replica, captured: Captured) -> None:
        """Let the static gradients be those of the replica: zeros, or what the step has added up without a graph."""
        zeros = []
        for index in captured.gradients.used:
            parameter, static = replica.parameters[index], self._gradients[index]
            if static is None or parameter.grad is static:
                continue
            if parameter.grad is None:
                zeros.append(static)
            else:
                static.copy_(parameter.grad)
            parameter.grad = static
        if zeros:
            torch._foreach_zero_(zeros)

    def give_gradients(self, replica: Replica) -> None:
        """Replace the static gradients of the replica by copies, which the next step does not overwrite."""
        for parameter, static in zip(replica.parameters, self._gradients, strict=False):
            if static is not None and parameter.grad is static:
                parameter.grad = static.clone()


class Graphs:
    """The graphs of all devices of a trainer. They last as long as the memory that they refer to stays where it is."""

    def __init__(self, places: Places, flat: FlatGradients | None) -> None:
        self._places = places
        self.devices = [DeviceGraphs(device, flat) for device in range(len(places))]
        self._flat = flat
        self._memory: Any = None

    def follow(self, replicas: Replicas) -> None:
        """Before a step: drop all graphs if they would read or write other memory than the module's."""
        tensors = chain(
            *(chain(one.parameters, *(part._buffers.values() for part in one.modules)) for one in replicas.list)
        )
        found = [(place_of(one), one is not None and one.requires_grad) for one in tensors]
        memory = (replicas.generation, replicas.changes, found, 0 if self._flat is None else self._flat.layouts)
        if memory != self._memory:
            if any(device.captured for device in self.devices):
                self._places.drain()
            self.clear()
            self._memory = memory

    def clear(self) -> None:
        """Drop all graphs. Requires: the devices have finished their work."""
        for device in self.devices:
            device.clear()
        self._memory = None

    def explain(self) -> str:
        """How many graphs there are, in words."""
        captures, replays = (sum(map(operator.attrgetter(name), self.devices)) for name in ("captures", "replays"))
        return f"CUDA graphs: {captures} captured, {replays} micro-batches replayed.\n"


def key_of(function: Any, size: tuple[Any, ...], replica: Replica, given: Sequence[bool]) -> tuple[Any, ...]:
    """All that the operators of a micro-batch depend on, besides values on the device."""
    return (sign_of(function), size, tuple(map(_training, replica.modules)), tuple(given))
