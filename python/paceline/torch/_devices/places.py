"""Where PyTorch computes for each device of a group (device, stream, generator), and how a batch gets there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import DeviceGroup, DeviceLost, Error, InvalidArgument
from paceline._core.engine import DeviceQueues
from paceline._core.runtime import gpu_facts
from paceline._info_text import links_text
from paceline._nccl import find_installed_nccl
from paceline.comm import Transport
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.moving import Move, same
from paceline.torch._devices import cuda
from paceline.torch._devices.caller_state import NOTHING
from paceline.torch._devices.worker_draws import WorkerGenerator, mixed_seed
from paceline.torch._devices.worker_state import prepare_worker

_HOST = torch.device("cpu")


class Place(NamedTuple):
    """Where one device computes."""

    name: str
    gpu: int | None = None  # its number; None: the host
    threads: int = 1  # of PyTorch, on the device's worker
    memory: str = ""  # the name of its memory
    is_part: bool = False  # of a GPU, so that its streams end with it


def places_in(group: DeviceGroup) -> list[Place]:
    """The places of the devices of a group.

    A GPU's thread launches. With a team of OpenMP threads for each GPU, operators on the host would crowd out the launches of others.
    """
    return [
        Place(one.name, None, max(1, len(one.cores)), one.memory_space)
        if one.kind == "host"
        else Place(one.name, one.index, 1, one.memory_space, one.part is not None)
        for one in group.devices
    ]


class Places:
    """The devices of a trainer, in PyTorch's words.

    *Home* is where the module is: the memory of the group's first GPU, or the host's memory if there is no GPU. With GPUs the group has
    `queues`, and steps are ordered on the caller's stream of the home GPU. `reduce_dtype`: what gradients are rounded to.
    """

    def __init__(
        self,
        places: Sequence[Place],
        home: torch.device,
        own_generators: list[WorkerGenerator | None],
        queues: DeviceQueues | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.home, self.own_generators, self.queues, self.reduce_dtype = home, own_generators, queues, reduce_dtype
        self.names, self.space_names = [place.name for place in places], [place.memory for place in places]
        self._gpu, self._threads = [place.gpu for place in places], [place.threads for place in places]
        self._home_gpu = next((gpu for gpu in self._gpu if gpu is not None), None)
        self.devices = [_HOST if gpu is None else cuda.device(gpu) for gpu in self._gpu]
        self.types = sorted({device.type for device in self.devices})
        self.transport = queues.transport if queues is not None else ""
        self.links = queues.links if queues is not None else []
        self.spaces = queues.spaces if queues is not None else [0] * len(places)
        self.home_space = queues.home_space if queues is not None else 0
        self.any_part = any(place.is_part for place in places)
        self.on_gpu = [gpu is not None for gpu in self._gpu]  # or a part of a GPU
        self.on_host = [gpu is None for gpu in self._gpu]
        self.any_host = None in self._gpu  # whether some device is a worker on the host's cores
        self.share_gpu = len(set(self._gpu) - {None}) < sum(self.on_gpu)  # whether two devices are parts of one GPU
        self.share_generators = len(set(self._gpu)) < len(self._gpu)  # as host devices and the parts of one GPU do
        self.hosts_share = any(generator is not None for generator in own_generators)
        self._copies: dict[int, cuda.CopyStream] = {}
        self._pool_peaks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.devices)

    def begin(self, batch: Batch) -> None:
        """Order the next step on the stream that the caller is on now. The work that made the batch has to be ordered on that stream, too."""
        if self.queues is not None and self._home_gpu is not None:
            for place, path in batch.places.items():
                self._check_place(place, f"batch: {path}")
            self.order_on_caller("step")

    def order_on_caller(self, call: str) -> None:
        """Order what follows on the stream that the caller is on now."""
        if self.queues is not None and self._home_gpu is not None:
            if self._is_capturing():
                raise InvalidArgument(
                    f"{call}: called while a CUDA graph is captured, which cannot hold what several devices do on their own streams. Capture "
                    f"what is inside loss_fn, or call {call} outside of the capture."
                )
            self.queues.set_stream(cuda.current_stream(self._home_gpu))

    def check_values(self, tensor: torch.Tensor, what: str) -> None:
        """Check where weights or costs are, which are read on the host before the step."""
        if self.queues is not None:
            self._check_place(tensor.device, f"{what}: the tensor")

    def _check_place(self, place: torch.device, what: str) -> None:
        if place not in (self.home, _HOST):
            raise InvalidArgument(
                f"{what} is on {place}, where nothing tells when it is ready. Put it on the host, or where the module is: {self.home}."
            )

    def _is_capturing(self) -> bool:
        try:
            return cuda.is_capturing()
        except RuntimeError as error:  # PyTorch's type for a failure of a GPU, now or earlier
            name = self.names[self.on_gpu.index(True)]
            lost = DeviceLost(
                f"step: {name}: asking for the state of its stream failed: {str(error).splitlines()[0]}. After such an "
                "error nothing runs on the GPU any more: start a new process from the last checkpoint."
            )
            lost.device = name
            raise lost from error

    def prepare_worker(self, device: int) -> None:
        """Prepare the calling thread for computing on a device, and undo what an earlier function has left set: gradients off, other threads."""
        prepare_worker(self._threads[device], self._gpu[device])

    def enter(self, device: int) -> contextlib.AbstractContextManager[None]:
        """Send the operators of the calling worker to the device's own queue."""
        if self.queues is None:
            return NOTHING
        source = self._home_gpu, self.queues.sources[device]  # for reads from the home GPU's memory
        return _on_streams(source, (self._gpu[device], self.queues.streams[device]))

    def on_own_stream(self, device: int) -> contextlib.AbstractContextManager[None]:
        """Send what the calling thread does on the device's GPU to the device's own queue."""
        return _on_streams((self._gpu[device], None if self.queues is None else self.queues.streams[device]))

    def spare_memory(self, device: int) -> int:
        """The bytes of a GPU that nobody has, but for a margin."""
        gpu = self._gpu[device]
        return 0 if gpu is None else cuda.spare_memory(gpu)

    def bandwidth(self, device: int) -> float | None:
        """Of a GPU's memory, in bytes per second, if it is known."""
        gpu = self._gpu[device]
        return None if gpu is None else cuda.memory_bandwidth(gpu)

    def follow_current(self, device: int) -> None:
        """Let the device's queue wait for the stream that the calling worker is on now, if that is another one."""
        gpu, stream = self._gpu[device], None if self.queues is None else self.queues.streams[device]
        if gpu is not None and stream is not None:
            cuda.let_follow_current(gpu, stream)

    def at_home(self) -> contextlib.AbstractContextManager[None]:
        """Send the operators of the calling thread to the stream that the step is ordered on."""
        return _on_streams((self._home_gpu, None if self.queues is None else self.queues.home_stream))

    def mover(self, device: int) -> Move:
        """A function that brings a tensor of the batch to the device. Its worker calls it inside `enter`."""
        target, gpu = self.devices[device], self._gpu[device]
        if self.queues is None:
            return same
        if gpu is None:
            return lambda tensor: tensor.to(target)
        stream = self.queues.streams[device]

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and stream is not None:
                if device not in self._copies:
                    self._copies[device] = cuda.CopyStream(gpu)
                return self._copies[device].bring(tensor, stream)
            return tensor if tensor.device == target else tensor.to(target, non_blocking=True)

        return move

    def graph(self, device: int, pool: Any) -> cuda.Graph:
        """An empty CUDA graph for a GPU, with its memory in the pool."""
        gpu = self._gpu[device]
        if gpu is None:
            raise TypeError("Places.graph is for GPUs")
        return cuda.Graph(gpu, pool)

    def brought(self, device: int) -> None:
        """Start the device's clock when the items of a run are on their way, since waiting for them is not the device's time."""
        if self.queues is not None:
            self.queues.restart_run(device)

    def to_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in home's memory. For the caller's thread, between steps."""
        return tensor if tensor.device == self.home else tensor.to(self.home)

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory of the caller's stream, which outlives the streams of the devices."""
        if self.queues is None or self.queues.streams == [self.queues.home_stream]:
            return tensor
        return tensor.clone()

    def generator(self, device: int) -> torch.Generator:
        """The generator that the device's random operators draw from."""
        gpu = self._gpu[device]
        return torch.default_generator if gpu is None else cuda.generator(gpu)

    @functools.cached_property
    def device_generators(self) -> list[torch.Generator]:
        """What `generator` returns for each device."""
        return list(map(self.generator, range(len(self.devices))))

    @functools.cached_property
    def generators(self) -> list[torch.Generator]:
        """All generators that the devices draw from, and the host's, each once."""
        gpus = [cuda.generator(gpu) for gpu in self._gpu if gpu is not None]
        return list(dict.fromkeys([torch.default_generator, *gpus]))

    def separate_generators(self) -> None:
        """Give each GPU whose generator has the seed of an earlier GPU a seed of its own, made of that seed and its place among the GPUs.

        ``torch.manual_seed`` seeds all GPUs alike. They would draw the same dropout for different items.
        """
        if self.queues is None:
            return
        seeds: set[int] = set()
        generators = dict.fromkeys(cuda.generator(gpu) for gpu in self._gpu if gpu is not None)
        for place, generator in enumerate(generators):
            seed = generator.initial_seed()
            if seed in seeds:
                seed = mixed_seed(repr(seed).encode(), place)
                generator.manual_seed(seed)
            seeds.add(seed)

    def named_generators(self) -> dict[str, torch.Generator]:
        """The same by names that hold on any machine: ``"host"``, and the UUIDs of GPUs."""
        gpus = {cuda.uuid(gpu): cuda.generator(gpu) for gpu in self._gpu if gpu is not None}
        return {"host": torch.default_generator, **gpus}

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that GPUs can copy from while the host goes on."""
        return cuda.pinned(count, dtype)

    def must_pin(self, device: int) -> bool:
        """Whether GPUs copy to and from what this device computes with, which has to be pinned for that."""
        return self.devices[device].type == "cpu" and self.home.type != "cpu"

    def empty_for(self, device: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of a device that the queues may write to at the beginning of a step.

        Whatever takes it later is on the device's stream, which in each step waits for what the queues have copied before.
        """
        if self.must_pin(device):
            return self.pinned(count, dtype)
        with self.enter(device):
            return torch.empty(count, dtype=dtype, device=self.devices[device])

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that every device can read while the host goes on."""
        return tensor if self.queues is None else cuda.pin(tensor)

    def explain(self) -> str:
        """How data gets from one GPU to another, and whether the first one is the smallest. Empty if there are no two GPUs."""
        if not self.transport:
            return ""
        return f"Between GPUs: {self.transport}.\n{links_text(self.links)}{self._small_home()}"

    def _small_home(self) -> str:
        """A sentence if the first GPU, which holds the module, the sums and the optimizer's state, has less memory than each of the others."""
        sizes = {facts["device"]: facts["memory_bytes"] for facts in gpu_facts()}
        here, *others = [sizes[name] for name in dict.fromkeys(self.space_names) if name in sizes] or [0]
        if here >= 0.99 * min(others, default=0):  # the driver's own share differs a little
            return ""
        largest = max(sizes[name] for name in self.space_names if name in sizes)
        better = next(name for name in self.space_names if sizes.get(name) == largest)
        return (
            f"The module is on the GPU with the least memory ({self.space_names[self.spaces.index(self.home_space)]}: {here / 2**30:.3g} GiB; {better} has "
            f"{largest / 2**30:.3g} GiB). The sums of gradients and the optimizer's state lie there, too: name {better} first, and move the module to it.\n"
        )

    def pool_peaks(self) -> dict[str, int]:
        """For each GPU, the most bytes that paceline's pool had given out at once. After `close`, or if the GPU is lost: as last known."""
        queues = self.queues
        if queues is not None:
            with contextlib.suppress(Error):
                peaks = zip(self.space_names, queues.pool_peaks, strict=True)
                self._pool_peaks = {space: peak for space, peak in peaks if peak is not None}
        return self._pool_peaks

    def drain(self) -> None:
        """Wait until the devices have done all their work."""
        if self.queues is not None:
            self.queues.drain()

    def has_finished(self, device: int) -> bool:
        """Whether the device has done everything that was enqueued. True on the host, and if the device has failed."""
        gpu, stream = self._gpu[device], None if self.queues is None else self.queues.streams[device]
        if gpu is None or stream is None:
            return True
        with contextlib.suppress(RuntimeError):  # PyTorch's type for a failure of a GPU, which the step reports
            return cuda.has_finished(gpu, stream)
        return True

    def release_memory(self) -> None:
        """Give unused memory back, after memory ran out and before streams end."""
        if self.queues is not None:
            cuda.release_memory(self.any_part)
            self.queues.release_memory()

    @property
    def holds(self) -> bool:
        """Whether there is something to release at the end."""
        return self.queues is not None

    def close(self) -> None:
        """Wait for all enqueued work, and give the streams back."""
        if self.queues is None:
            return
        self.queues.drain()
        try:
            self.pool_peaks()
            self._copies.clear()
            # PyTorch's type: a GPU that has failed releases nothing. An earlier error said so, and close() hides no other error.
            with contextlib.suppress(RuntimeError):
                self.release_memory()
        finally:
            self.queues = None


def places_of(
    group: DeviceGroup,
    module: nn.Module,
    timeout: float = 600.0,
    transport: Transport = "auto",
    reduce_dtype: torch.dtype | None = None,
) -> Places:
    """The places of devices that each have a replica of the module."""
    gpus = [device for device in group.devices if device.kind == "cuda"]
    home = cuda.device(gpus[0].index) if gpus else _HOST
    _check_home(module, home, gpus[0].name if gpus else "")
    several_spaces = len({device.memory_space for device in gpus}) > 1
    rounded_to = reduce_dtype if several_spaces else None
    queues = None
    if gpus:
        if several_spaces:
            find_installed_nccl()
            cuda.meet_peers(sorted({device.index for device in gpus}))
        half = None if rounded_to is None else str(rounded_to).removeprefix("torch.")
        stream = cuda.current_stream(gpus[0].index)
        queues = DeviceQueues(group, stream=stream, timeout=timeout, transport=transport, reduce_dtype=half)
    places = places_in(group)
    # If there are several host devices, each has a generator of its own. PyTorch has one for all of them.
    own = len(places) - len(gpus) > 1
    return Places(
        places, home, [WorkerGenerator() if own and one.gpu is None else None for one in places], queues, rounded_to
    )


@contextlib.contextmanager
def _on_streams(*streams: tuple[int | None, int | None]) -> Iterator[None]:
    """Enter these streams, each given by its GPU and its handle. Without one of the two there is nothing to enter."""
    with contextlib.ExitStack() as stack:
        for gpu, stream in streams:
            if gpu is not None and stream is not None:
                stack.enter_context(cuda.on_stream(gpu, stream))
        yield


def _check_home(module: nn.Module, home: torch.device, first_gpu: str) -> None:
    why = f"the first GPU of the devices, where the parameters live, is {first_gpu}"
    if not first_gpu:
        why = "the devices compute on the host"
    for name, parameter in module.named_parameters():
        if parameter.device != home and not isinstance(parameter, nn.parameter.UninitializedParameter):
            how = f"Move the module there first: module.to('{home}')."
            if parameter.is_meta:
                how = (
                    f"It has no values yet. Give it memory, by module.to_empty(device='{home}'), and values, by load_state_dict or the modules' "
                    "reset_parameters(). Pipeline(init=) takes a module on meta as it is."
                )
            raise InvalidArgument(f"paceline: parameter {name} is on {parameter.device}, but {why}. {how}")
