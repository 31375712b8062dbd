"""The places of stages: a stage's part of the module lies in its own device's memory, and tensors go from one memory to another."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline import DeviceGroup, InvalidArgument
from paceline._core.comm import Communicator
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.moving import Move
from paceline.torch._devices import cuda
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.places import Places, places_in

_HOST = torch.device("cpu")
_COPIES = 2**14, 2**23  # bytes: one that is mostly latency, and one that is mostly bandwidth
_here = threading.local()  # its `device` is the one whose turn the thread has


class StagePlaces(Places):
    """Places of a group with GPUs whose devices are stages.

    *Home* is where the module was when the trainer was made, and is again after it. In between each stage's part of it lies on its device.
    Each GPU has a stream that computes for all lanes, whose turns order what they enqueue, and two streams for copies. So no stream that
    computes waits for what another device has queued, but only for the copy that it needs.
    """

    def __init__(self, group: DeviceGroup, module: nn.Module) -> None:
        super().__init__(places_in(group), _HOST, [None] * len(group))
        self.home = _home_of(module, self.devices)
        self.types = sorted({device.type for device in (*self.devices, _HOST)})
        self._open = True
        self._links: dict[tuple[int, int], tuple[float, float]] = {}
        self._gpus = [gpu for gpu in self._gpu if gpu is not None]
        self._peers: Communicator | None = None
        if len(set(self._gpus)) > 1:
            cuda.meet_peers(sorted(set(self._gpus)))
            # Tensors go between stages by PyTorch's copies. While this is open, GPUs whose direct copies arrive wrong have no access.
            self._peers = Communicator(group, "copies", 60.0)
        self._computes, self._sends, self._receives = (
            {cuda.device(gpu): cuda.Queue(gpu) for gpu in self._gpus} for _ in range(3)
        )

    # Before and after a run, on the caller's thread

    def begin(self, batch: Batch) -> None:
        for place, path in batch.places.items():
            self._check_place(place, f"batch: {path}")

    def check_values(self, tensor: torch.Tensor, what: str) -> None:
        self._check_place(tensor.device, f"{what}: the tensor")

    def _check_place(self, place: torch.device, what: str) -> None:
        if place != _HOST and place not in self._computes:
            raise InvalidArgument(
                f"{what} is on {place}, which is none of the devices. Put it on the host, or on one of them."
            )

    @property
    def holds(self) -> bool:
        return self._open

    def close(self) -> None:
        self._open = False
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def free_bytes(self, module: nn.Module) -> list[int | None]:
        """For each GPU the bytes that are free, also those that the module itself has there now. None for devices on the host."""
        lies = [(one.device, one.nbytes) for one in (*module.parameters(), *module.buffers())]
        return [
            None if gpu is None else cuda.free_memory(gpu) + sum(size for where, size in lies if where == place)
            for gpu, place in zip(self._gpu, self.devices, strict=True)
        ]

    def slowest_link(self) -> tuple[float, float]:
        """Of a copy from one memory to another: seconds that each takes, and bytes per second beyond that. Measured at the first call."""
        if not self._links:
            memories = {place: number for number, place in reversed(list(enumerate(self.devices)))}
            self._links = {
                (first, last): self._link(source, target)
                for source, first in memories.items()
                for target, last in memories.items()
                if source != target
            }
        if not self._links:
            return 0.0, 0.0
        return max(latency for latency, _ in self._links.values()), min(rate for _, rate in self._links.values())

    def _link(self, source: torch.device, target: torch.device) -> tuple[float, float]:
        small, large = (self.copy_seconds(source, target, size) for size in _COPIES)
        rate = (_COPIES[1] - _COPIES[0]) / max(large - small, 1e-9)
        return max(0.0, small - _COPIES[0] / rate), rate

    def copy_seconds(self, source: torch.device, target: torch.device, size: int) -> float:
        """Seconds of a copy of so many bytes, by the clock of the GPU that makes it. The shortest of a few, the first left out."""
        tensor = torch.zeros(size, dtype=torch.uint8, device=source)
        tensor = cuda.pin(tensor) if source == _HOST else tensor
        queue = self._receives[target] if target in self._receives else self._sends[source]
        self.drain()
        found = []
        for _ in range(4):
            first = queue.mark()
            with queue.entered():
                there = cuda.pinned_like(tensor) if target == _HOST else torch.empty_like(tensor, device=target)
                there.copy_(tensor, non_blocking=True)
            last = queue.mark()
            cuda.wait(last)
            found.append(cuda.seconds_between(first, last))
        return min(found[1:])

    def explain(self) -> str:
        links = [
            f"{self.names[first]} to {self.names[last]} {rate / 1e9:.3g} GB/s and {1e6 * latency:.0f} us"
            for (first, last), (latency, rate) in self._links.items()
        ]
        peers = f"Between GPUs: {self._peers.description()}.\n" if self._peers is not None else ""
        return peers + (f"Links, of which plans take the slowest: {', '.join(links)}.\n" if links else "")

    def marks(self) -> list[Any]:
        """For each device an event of its stream; None for those on the host."""
        return [
            None if gpu is None else self._computes[place].mark()
            for gpu, place in zip(self._gpu, self.devices, strict=True)
        ]

    def follow_caller(self) -> None:
        """Let the GPUs wait for what the calling thread has enqueued on them. It may read memory that a run is about to reuse."""
        for gpu in self._gpus:
            event = cuda.mark_current(gpu)
            for queues in (self._computes, self._sends, self._receives):
                queues[cuda.device(gpu)].follow(event)

    def lead_caller(self) -> None:
        """Let what the calling thread will enqueue on the GPUs wait for the stages, whose gradients it may use."""
        for gpu in self._gpus:
            cuda.follow_on_current(gpu, self._computes[cuda.device(gpu)].mark())

    def drain(self) -> None:
        """Hold the calling thread until the GPUs have done everything, also what this thread has enqueued."""
        for gpu in self._gpus:
            cuda.wait(cuda.mark_current(gpu))
        for queue in (*self._sends.values(), *self._receives.values(), *self._computes.values()):
            cuda.wait(queue.mark())

    def has_finished(self, device: int) -> bool:
        queue = self._computes.get(self.devices[device])
        if queue is None:
            return True
        with contextlib.suppress(RuntimeError):  # PyTorch's type for a failure of a GPU, which the next call reports
            return queue.has_finished()
        return True

    def release_memory(self) -> None:
        cuda.release_memory(False)

    # On the threads of lanes

    def open(self) -> None:
        """Send what the calling thread does on any GPU to the stream that computes there."""
        for queue in self._computes.values():
            queue.enter()

    def arrive(self, device: int) -> None:
        """The calling thread has got the turn of this device."""
        _here.device = device
        self._enter_here()

    def _enter_here(self) -> None:
        queue = self._computes.get(self.here)
        if queue is not None:
            queue.enter()

    @property
    def here(self) -> torch.device:
        """Where the calling thread computes."""
        here: int = _here.device
        return self.devices[here]

    def stamp(self) -> Any:
        """The time of the device that the calling thread has the turn of: a moment on the host, or an event of its stream."""
        queue = self._computes.get(self.here)
        return time.perf_counter() if queue is None else queue.mark()

    def send(self, tensor: torch.Tensor, target: torch.device) -> Sent:
        """Begin to copy what the stream that computes on the tensor's GPU will have written, to another memory.

        What is sent from a GPU is a copy in its own memory: nothing else would keep code that follows, autograd's sums included, from
        writing to the tensor before it has left.
        """
        source = tensor.device
        with torch.no_grad():
            tensor = tensor.detach()
            if source in self._sends:
                self._computes[source].enter()
                tensor = tensor.clone()
                self._sends[source].follow(self._computes[source].mark())
                self._sends[source].enter()
                self._sends[source].keep(tensor)
            if target in self._receives:
                self._receives[target].enter()
                there = (tensor if source != _HOST else cuda.pin(tensor)).to(target, non_blocking=True)
                arrived = self._receives[target].mark()
            else:
                there = cuda.pinned_like(tensor)
                there.copy_(tensor, non_blocking=True)
                arrived = self._sends[source].mark()
        for device in (source, target):
            if device in self._computes:
                self._computes[device].enter()
        self._enter_here()
        return Sent(there, arrived, self._computes.get(target))

    def moves(self, tensor: torch.Tensor, target: torch.device) -> bool:
        """Whether a tensor has to move to be used there. Operators take a 0-dimensional host tensor anywhere."""
        return (
            tensor.device != target and tensor.layout is torch.strided and (tensor.dim() > 0 or tensor.device != _HOST)
        )


class Sent:
    """A copy of a tensor that is on its way to another memory."""

    def __init__(self, there: torch.Tensor, arrived: Any, reader: cuda.Queue | None) -> None:
        self.there = there
        self._arrived = arrived
        self._reader = reader  # None: the host

    def received(self) -> torch.Tensor:
        """The copy, for what is enqueued there from now on. On the host this waits."""
        if self._reader is None:
            cuda.wait(self._arrived)
        else:
            self._reader.follow(self._arrived)
            self._reader.keep(self.there)
        return self.there


class StageLanePlaces(LanePlaces):
    """Lanes of stages on GPUs. Slices of the batch lie where the last stage is, with its loss."""

    def __init__(self, base: StagePlaces, lanes: int, last: int) -> None:
        super().__init__(base, lanes)
        self._stages = base
        self.devices = [base.devices[last]] * lanes

    def prepare_worker(self, device: int) -> None:
        super().prepare_worker(device)
        # Otherwise the backward of a GPU runs on a thread of its own, which has no turn. This is set for the thread's whole life.
        torch.autograd.set_multithreading_enabled(False)

    def mover(self, device: int) -> Move:
        stages, target = self._stages, self.devices[device]
        return lambda tensor: stages.send(tensor, target).received() if stages.moves(tensor, target) else tensor

    def drain(self) -> None:
        self._stages.drain()


def _home_of(module: nn.Module, devices: Sequence[torch.device]) -> torch.device:
    """Where the module is: on the host, or on one of the devices."""
    homes: dict[torch.device, str] = {}
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        homes.setdefault(one.device, name)
    for home, name in homes.items():
        if len(homes) > 1 or (home != _HOST and home not in devices):
            raise InvalidArgument(
                f"Pipeline: {name} is on {home}. A module lies on the host as a whole, or on one of the devices; stages get their parts from there. "
                "Move it first: module.to('cpu')."
            )
    return next(iter(homes), _HOST)
