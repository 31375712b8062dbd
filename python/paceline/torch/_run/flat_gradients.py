"""The gradients of devices with queues: views of flat memory that stays, summed bucket by bucket while backward goes on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline._words import plural
from paceline.torch._devices.places import Places
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.buckets import Layout
from paceline.torch._run.gradients import DTYPES, Sink, View, is_sparse, weakly

# Large enough that a bucket takes longer to pull than to launch, and small enough that the last one, which nothing hides, is short.
MOST_BYTES = 25 << 20
# From so many GPUs on, twice that. Each of them sums a slice, and each slice takes as many calls of the driver as there are GPUs.
_MANY_GPUS = 4


@dataclasses.dataclass
class _Device:
    """The gradients of one device's replica."""

    buckets: list[torch.Tensor]
    loss: torch.Tensor  # the device's part of the objective
    views: list[torch.Tensor | None]  # in the order of the parameters; None where none is required
    begun: bool = False  # whether the views are the parameters' gradients, in this step
    found: set[int] = dataclasses.field(default_factory=set)  # parameters that have got a gradient in this step
    # Per bucket, the parameters that its seal waits for; None: it is not the last backward.
    waiting: list[set[int]] | None = None
    again: set[int] = dataclasses.field(default_factory=set)  # buckets that were written after their seal
    # Parameters in the order in which the last backward came to them.
    ready: list[int] = dataclasses.field(default_factory=list)
    capture: Capture | None = None  # what is being captured: such a backward seals nothing


@dataclasses.dataclass
class Capture:
    """What a captured backward adds to."""

    mark: Callable[[], int]  # makes an event that each replay records behind what was captured so far
    used: list[int] = dataclasses.field(default_factory=list)  # the parameters that get gradients
    events: dict[int, int] = dataclasses.field(default_factory=dict)  # by bucket: behind its last gradient


class FlatGradients(Sink):
    """The replicas' gradients in persistent memory, one flat tensor for each bucket, and the sums at home.

    Autograd adds to the views in place. In a device's last backward of a step a hook on each parameter counts: when all gradients of a bucket
    are there, the bucket is sealed, and summed as soon as every device has sealed it. The first step fills buckets in the parameters' reverse
    order. Later ones use the order in which the first backward came to them, as DDP does (Li et al., PyTorch Distributed, VLDB 2020).

    A gradient that comes after its bucket's seal (reentrant checkpoints call backward in the backward) marks the bucket to be summed again.

    A captured backward records an event behind each bucket. A replay of it, which calls no hook, seals the buckets by these events.
    """

    def __init__(self, replicas: Replicas, places: Places) -> None:
        self._replicas = replicas
        self._places = places
        self._key: Any = None
        self._order: list[int] = []
        self._ordered = False
        self._layout: Layout
        self._devices: list[_Device] = []
        self._bucket_of: dict[int, int] = {}
        self._handles: list[Any] = []
        self._sums: list[torch.Tensor] = []
        self.layouts = 0  # how often the memory was laid out
        self.early = 0  # buckets that all devices had sealed before the end of their last backward, in the last step

    def begin(self) -> None:
        """Begin a step. Lays the memory out anew if the parameters have changed, or their order is known by now."""
        key = self._replicas.generation, tuple(one.requires_grad for one in self._replicas.parameters)
        ready = max((one.ready for one in self._devices), key=len, default=[])
        if key != self._key:
            self._lay_out(range(len(self._replicas.parameters) - 1, -1, -1))
            self._key, self._ordered = key, False
        elif ready and not self._ordered:
            known = set(ready)
            order = [*dict.fromkeys(ready), *(index for index in self._order if index not in known)]
            if order != self._order:
                self._lay_out(order)
            self._key, self._ordered = key, True
        for one in self._devices:
            one.begun, one.waiting, one.ready = False, None, []
            one.found.clear()
            one.again.clear()

    def release(self) -> None:
        """Give the memory back. Requires: nothing reads it any more."""
        for handle in self._handles:
            handle.remove()
        self._devices, self._handles, self._sums, self._key = [], [], [], None

    def start(self, device: int) -> None:
        """Let the device's replica have zero gradients, on its worker, before its first micro-batch of a step."""
        one = self._devices[device]
        if one.buckets:  # there are none if everything is frozen
            torch._foreach_zero_(one.buckets)
        for parameter, view in zip(self._replicas.list[device].parameters, one.views, strict=True):
            parameter.grad = view
        one.begun = True

    def last(self, device: int) -> None:
        self._devices[device].waiting = [{piece.index for piece in one.pieces} for one in self._layout.buckets]

    def any(self, device: int) -> bool:
        return bool(self._devices[device].found)

    @contextlib.contextmanager
    def captured(self, device: int, capture: Capture) -> Iterator[None]:
        """Note to which gradients the ``with`` block adds, which is captured and does not run."""
        one = self._devices[device]
        before = one.found, one.waiting, one.again, one.ready
        one.found, one.again, one.ready, one.capture = set(), set(), [], capture
        self.last(device)
        try:
            yield
            capture.used = sorted(one.found)
            for k in one.again:  # written again after their event
                del capture.events[k]
        finally:
            one.found, one.waiting, one.again, one.ready = before
            one.capture = None

    def replayed(self, device: int, capture: Capture, *, last: bool) -> None:
        """Note that a replay was enqueued, which calls no hooks. `last`: it is the device's last backward in this step."""
        one, queues = self._devices[device], self._places.queues
        one.found.update(capture.used)
        if not last:
            return
        self.last(device)
        for k, event in capture.events.items():
            if one.waiting is not None and queues is not None:
                one.waiting[k].clear()
                queues.seal(device, k, *_view(one.buckets[k]), event)

    def forget(self, device: int, indices: Iterable[int]) -> None:
        one = self._devices[device]
        for index in one.found.intersection(indices):
            view = one.views[index]
            if view is not None:
                view.zero_()
            one.found.discard(index)

    def finish(self, device: int, terms: Sequence[torch.Tensor]) -> list[View | None]:
        """The buckets that are not sealed yet, and the device's part of the loss."""
        one = self._devices[device]
        with self._places.enter(device), torch.no_grad():
            if terms:  # empty if no item of this device counts
                place = self._places.devices[device]
                one.loss.copy_(torch.stack([term.to(place, torch.float64) for term in terms]).sum())
            else:
                one.loss.zero_()
        sealed = [not left for left in one.waiting] if one.waiting is not None else [False] * len(one.buckets)
        self._replicas.list[device].clear_gradients()
        open_buckets = [
            None if done and k not in one.again else _view(bucket)
            for k, (bucket, done) in enumerate(zip(one.buckets, sealed, strict=True))
        ]
        return [*open_buckets, _view(one.loss)]

    def sums(self) -> list[View | None]:
        """Allocate the sums: fresh memory at home, of the caller's stream. Returns where they are."""
        with self._places.at_home():
            home = self._places.home
            self._sums = [*self._layout.empty(home), torch.empty(1, dtype=torch.float64, device=home)]
        return [_view(tensor) for tensor in self._sums]

    def totals(self) -> list[torch.Tensor | None]:
        """The gradients of the batch, in the order of the parameters, as parts of the sums."""
        begun = [one for one in self._devices if one.begun]
        self.early = min((sum(not left for left in one.waiting or [{0}]) for one in begun), default=0)
        found = self._layout.gradients(self._sums[:-1])
        some = set().union(*(one.found for one in begun))
        return [found.get(index) if index in some else None for index in range(len(self._replicas.parameters))]

    def loss(self, terms: list[list[tuple[int, torch.Tensor]]], home: torch.device) -> torch.Tensor:
        dtype = next((term.dtype for ones in terms for _, term in ones), torch.float32)
        return self._sums[-1][0].to(dtype)

    def drop_sums(self) -> None:
        """Let the caller's gradients be the only users of the sums."""
        self._sums = []

    def explain(self) -> str:
        """A line about the last step; empty before the first."""
        if not self._devices:
            return ""
        count = len(self._layout.buckets)
        return f"Gradients: {self.early} of {plural(count, 'bucket')} were final on all devices before the last backward ended.\n"

    def _lay_out(self, order: Sequence[int]) -> None:
        replicas = self._replicas
        _refuse_sparse(replicas)
        self._places.drain()  # the memory so far may still be read
        self.release()
        self.layouts += 1
        self._order = list(order)
        gpus = {space for space, on_gpu in zip(self._places.spaces, self._places.on_gpu, strict=True) if on_gpu}
        most_bytes = MOST_BYTES if len(gpus) < _MANY_GPUS else 2 * MOST_BYTES
        self._layout = Layout(replicas.parameters, replicas.names, self._order, most_bytes)
        self._bucket_of = {piece.index: k for k, one in enumerate(self._layout.buckets) for piece in one.pieces}
        for device, replica in enumerate(replicas.list):
            with self._places.enter(device):
                self._devices.append(self._memory_of(device, replica))
            for index in self._bucket_of:
                hook = weakly(self._came, device, index)
                self._handles.append(replica.parameters[index].register_post_accumulate_grad_hook(hook))

    def _memory_of(self, device: int, replica: Replica) -> _Device:
        place = self._places.devices[device]
        if place.type == "cpu" and self._places.home.type != "cpu":  # GPUs copy from it, so it has to be pinned
            buckets = [self._places.pinned(one.count, one.dtype) for one in self._layout.buckets]
            loss = self._places.pinned(1, torch.float64)
        else:
            buckets, loss = self._layout.empty(place), torch.empty(1, dtype=torch.float64, device=place)
        views = self._layout.gradients(buckets)
        return _Device(buckets, loss, [views.get(index) for index in range(len(replica.parameters))])

    def _came(self, device: int, index: int, parameter: torch.Tensor) -> None:
        """Called by autograd, on the device's worker, when it has added to a parameter's gradient."""
        one = self._devices[device]
        if not one.begun:
            return
        one.found.add(index)
        view = one.views[index]
        if parameter.grad is not view and view is not None and parameter.grad is not None:
            # A backward with create_graph makes a new tensor, and so does one after the loss has set the gradient to None.
            with torch.no_grad():
                view.copy_(parameter.grad)
            parameter.grad = view
        if one.waiting is None:
            return
        # Autograd adds on the stream where the parameter's node was made. That is another stream if the graph was made elsewhere.
        self._places.follow_current(device)
        k = self._bucket_of[index]
        left = one.waiting[k]
        if not left:
            one.again.add(k)
            return
        left.discard(index)
        one.ready.append(index)
        queues = self._places.queues
        if left or queues is None:
            return
        if one.capture is not None:
            one.capture.events[k] = one.capture.mark()
        else:
            queues.seal(device, k, *_view(one.buckets[k]))


def _refuse_sparse(replicas: Replicas) -> None:
    for name, module in replicas.named_modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise is_sparse(f"{name}.weight")


def _view(tensor: torch.Tensor) -> View:
    return (tensor.data_ptr(), tensor.numel(), DTYPES[tensor.dtype])
