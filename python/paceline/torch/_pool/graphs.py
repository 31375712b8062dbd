"""Copies of a module on GPUs that answer by CUDA graphs: one for each kind of requests and each size of a batch."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline import Device, InvalidArgument
from paceline._words import warn
from paceline.torch._devices import cuda
from paceline.torch._devices.out_of_memory import is_out_of_memory
from paceline.torch._pool.job import clear_frames
from paceline.torch._pool.needs import Place
from paceline.torch._pool.seats import Seat
from paceline.torch._pool.served import Answer, Copies, Ready
from paceline.torch._replicas.capture import (
    WARM_UPS,
    Attributes,
    capturing,
    hook_of_user,
    is_loading,
    place_of,
    refusal,
    without_loads,
)
from paceline.torch._replicas.replica import Replica

MOST_GRAPHS = 64  # per device; they share the memory of the largest, but each keeps its inputs and answers
_LATER = 100  # batches of a size after memory ran out in its capture, until it is tried again
_MOST_KEYS = 256  # per device, of batches that were seen


def check_graphs(model: Any, devices: Sequence[Device], place: Place) -> None:
    """Raise if there are no copies of the model whose memory is known, or if a device that may answer has no CUDA graphs."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise InvalidArgument(
            f"serve: graphs=True is for modules of which each device has a copy, and not for a {type(model).__name__}: a graph would go on reading "
            "memory that it has replaced."
        )
    for one in devices:
        may = (not place.names or one.name in place.names) and {*place.labels} <= {one.name, one.kind, one.device_class}
        if may and one.kind != "cuda":
            raise InvalidArgument(
                f"serve: graphs=True needs GPUs, and {one.name} computes on the host, which has no CUDA graphs. Leave graphs= out, or let GPUs "
                "alone answer: needs='cuda'."
            )


class _Captured:
    """The graph of a batch, and the tensors that it reads and writes in each replay."""

    def __init__(self, graph: cuda.Graph, inputs: list[torch.Tensor], attributes: Attributes) -> None:
        self.graph, self.inputs, self.attributes = graph, inputs, attributes
        self.answers: Any = None


class _DeviceGraphs:
    """The graphs of one device. Its batches run one after the other, so they share a pool of memory."""

    def __init__(self, replica: Replica, forward: Answer, gpu: int, refused: Callable[[str], None]) -> None:
        self.replica, self.forward, self._gpu = replica, forward, gpu
        self._refused = refused  # called with why nothing more is captured
        self._captured: dict[Any, _Captured] = {}
        self._seen: dict[Any, int] = {}  # how often a key was met
        self._key: Any = None  # of the present batch
        self.due: bool | None = False  # whether it is to be captured; None: it is replayed
        self._memory: list[int] = []  # of the module
        self._pool: Any = None
        self.captures = self.replays = 0  # so far
        self.on = True

    def follow(self, seat: Seat) -> None:
        """Before a batch: drop all graphs if they would read other memory than the module's. The device may still be at a replay."""
        buffers = chain(*(one._buffers.values() for one in self.replica.modules))
        memory = list(map(place_of, chain(self.replica.parameters, buffers)))
        if memory == self._memory:
            return
        if self._captured:
            seat.wait()
        self._captured.clear()
        self._seen.clear()
        self._pool, self._memory = None, memory

    def begin(self, key: Any) -> bool:
        """Note the next batch. Returns whether it says nothing of later ones, which will be replayed."""
        self._key, self.due = key, None if key in self._captured else False
        if self.due is None or not self.on:
            return False
        if len(self._seen) >= _MOST_KEYS:
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        room = len(self._captured) < MOST_GRAPHS
        self.due = room and seen > WARM_UPS and not is_loading(self._gpu)  # otherwise a later batch
        return room and seen > 0

    def answer(self, seat: Seat, batch: Any) -> Any:
        """Answer the batch, by a graph if there is one. The answers are those of the next replay, too."""
        leaves, spec = pytree.tree_flatten(batch)
        captured = self._captured.get(self._key)
        if captured is not None:
            if leaves:
                torch._foreach_copy_(captured.inputs, leaves)
        else:
            if self.due:
                captured = self._capture(seat, leaves, spec)
            if captured is None:
                return self.forward(batch)
        captured.graph.replay()
        self.replays += 1
        return captured.answers

    def _capture(self, seat: Seat, leaves: list[torch.Tensor], spec: Any) -> _Captured | None:
        """The graph of a batch. None if there can be none, and then the device captures nothing more; or if memory is too short now."""
        if self._pool is None:
            self._pool = cuda.graph_pool()
        plain = all(type(one) is torch.Tensor and one.layout is torch.strided for one in leaves)
        why = hook_of_user(self.replica.modules) if plain else "requests are sparse, or tensors of a class of their own"
        try:
            if why is None:
                attributes = Attributes(self.replica.modules, self._gpu)
                captured = _Captured(cuda.Graph(self._gpu, self._pool), [one.clone() for one in leaves], attributes)
                with without_loads(self._gpu, 0.0) as alone:
                    if not alone:  # it has begun just now
                        return None
                    with capturing(captured.graph):
                        captured.answers = self.forward(pytree.tree_unflatten(captured.inputs, spec))
                why = attributes.change() or _frozen(seat, captured.answers)
        except BaseException as error:
            self._pool = None  # PyTorch may still take it for one that is captured into
            if not isinstance(error, Exception):
                raise
            if is_out_of_memory(error):
                self._seen[self._key] = -_LATER
                clear_frames(error)
                seat.release_memory()
                return None
            why = refusal("the forward", error) or f"its capture has raised {error!r}"
        if why is not None:
            self.on = False
            self._refused(why)
            return None
        self._captured[self._key] = captured
        self.captures += 1
        return captured


class GraphedCopies(Copies):
    """Copies whose batches are captured on GPUs when a size has run often enough, and replayed after that. On the host they run as others do."""

    rehearsals = WARM_UPS + 1

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._name = name
        self._graphs: dict[str, _DeviceGraphs] = {}  # of the present copies
        self._mine = threading.local()  # its `graphs`, held weakly, are those of the thread's present batch: a run that hangs may go on beside another one
        self._left: list[_DeviceGraphs] = []  # on devices that hang, which may be at a replay
        self._warned = False

    def _of(self, seat: Seat) -> Ready:
        answer, loaded, waited = super()._of(seat)
        copy = self._copies.get(seat.name)
        if seat.gpu is None or copy is None or copy.answer is not answer:  # this is a run that hung, and goes on
            self._mine.graphs = _no_graphs
            return answer, loaded, waited
        graphs = self._graphs.get(seat.name)
        if graphs is None or graphs.forward is not answer:
            graphs = self._graphs[seat.name] = _DeviceGraphs(copy.replica, answer, seat.gpu, self._refused)
        graphs.follow(seat)
        self._mine.graphs = weakref.ref(graphs)  # the batch holds them
        return functools.partial(graphs.answer, seat), loaded, waited

    @contextlib.contextmanager
    def running(
        self, device: str, kind: str, size: tuple[Any, ...], *, captures: bool | None = None
    ) -> Iterator[float]:
        """See `Served`."""
        graphs: _DeviceGraphs | None = self._mine.graphs()
        first = graphs is not None and graphs.begin((kind, size))
        if graphs is not None and graphs.due is None:  # a replay compiles and captures nothing, so it waits for nobody
            yield 0.0
            return
        with super().running(device, kind, size, captures=None if graphs is None else graphs.due) as excluded:
            yield math.inf if first else excluded

    def drop(self, device: str) -> None:
        """See `Served`."""
        if (graphs := self._graphs.pop(device, None)) is not None:
            self._left.append(graphs)
        super().drop(device)

    def free(self, seat: Seat) -> None:
        """See `Served`."""
        self._graphs.pop(seat.name, None)  # nobody uses it
        super().free(seat)

    def explain(self) -> str:
        """See `Served`."""
        graphs = list(self._graphs.values())
        captures, replays = sum(one.captures for one in graphs), sum(one.replays for one in graphs)
        return f"{self._name}: CUDA graphs: {captures} captured, {replays} batches replayed.\n"

    def _refused(self, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            f"{self._name}: graphs=True: {why}. Batches run without new graphs from now on, which is exact, but slower."
        )


def _frozen(seat: Seat, answers: Any) -> str | None:
    """An answer that a replay would not compute, in words. None if there is none."""
    for one in pytree.tree_leaves(answers):
        if not (isinstance(one, torch.Tensor) and one.device == seat.device):
            what = f"a tensor on {one.device}" if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            return f"the forward returns {what}, which a replay would not compute"
    return None


def _no_graphs() -> None:
    """In the place of a weak reference."""
