"""The devices of a race, the programs that run on them, and the size of the batches."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

import paceline
from paceline import Device
from paceline.torch import DataParallel
from race import gpu_networks as networks
from race.gpu_clock import Clock
from race.gpu_networks import Network, Pair

# A run is launch-bound if a micro-batch takes less GPU time than this factor times devices times launch time.
LAUNCH_FACTOR = 3.0
_MOST_MEMORY = 0.2  # fraction of a GPU's memory that a batch may keep


class Plain:
    """Plain PyTorch: forward, backward and, with `update`, the optimizer, on the current stream."""

    def __init__(self, network: Network, items: int, *, update: bool = True) -> None:
        self.items = items
        self._batch = network.batch(items)
        self._module = network.module()
        self._optimizer = networks.optimizer(self._module) if update else None

    def __call__(self) -> None:
        networks.loss_fn(self._module, self._batch).backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._module.zero_grad()


class Paced:
    """The same training through paceline."""

    def __init__(
        self,
        network: Network,
        devices: Sequence[Device],
        items: int,
        balance: Literal["auto", "even"],
        loss_fn: Callable[[nn.Module, Pair], torch.Tensor] = networks.loss_fn,
        *,
        update: bool = True,
    ) -> None:
        self.items = items
        self._batch = network.batch(items)
        self._loss_fn = loss_fn
        self.trainer = DataParallel(network.module(), list(devices), balance=balance)
        self._optimizer = networks.optimizer(self.trainer.module) if update else None

    def __call__(self) -> None:
        self.trainer.step(self._loss_fn, self._batch)
        if self._optimizer is not None:
            self._optimizer.step()
        self.trainer.module.zero_grad()

    def __enter__(self) -> Paced:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.close()


class Lanes:
    """Find out which worker and, on a GPU, which stream belongs to which device of a trainer, in one step with even shares."""

    def __init__(self, network: Network, devices: Sequence[Device]) -> None:
        self.streams: list[Any] = [None] * len(devices)
        share = 8
        items = share * len(devices)

        def note(module: nn.Module, part: Pair) -> torch.Tensor:
            # A slice is a view into the batch, so its offset tells whose share it is.
            device = part[0].storage_offset() // part[0].stride(0) // share
            self.streams[device] = torch.cuda.current_stream() if part[0].is_cuda else None
            return networks.loss_fn(module, part)

        self._trainer = Paced(network, devices, items, "even", note)
        self._trainer()

    def close(self) -> None:
        self._trainer.trainer.close()


def together(network: Network, devices: Sequence[Device], lanes: Lanes, items: Sequence[int], seconds: float) -> float:
    """Items per second that all devices reach together when each runs forward and backward on its own batch at the same time."""
    counts = [0.0] * len(devices)
    errors: list[BaseException] = []
    ready = threading.Barrier(len(devices) + 1)
    stop = threading.Event()

    def run(index: int) -> None:
        try:
            stream = lanes.streams[index]
            if stream is None and devices[index].cores:
                os.sched_setaffinity(0, devices[index].cores)  # for this thread
                torch.get_num_threads()  # call it before setting the number, because the first call reads the global setting
                torch.set_num_threads(1)
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                with torch.autograd.set_multithreading_enabled(False):
                    plain = Plain(network, items[index], update=False)
                    for _ in range(3):
                        plain()
                    _drain(stream)
                    ready.wait(60)
                    begin, steps = time.perf_counter(), 0
                    while not stop.is_set():
                        plain()
                        steps += 1
                        # At most two steps ahead, because a longer queue would outlast the measurement.
                        if steps % 2 == 0:
                            _drain(stream)
                    _drain(stream)
                    counts[index] = items[index] * steps / (time.perf_counter() - begin)
        except BaseException as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(devices))]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait(60)
        time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def _drain(stream: Any) -> None:
    if stream is not None:
        stream.synchronize()


def batch_size(network: Network, clock: Clock, devices: int, seconds: float) -> tuple[int, dict[str, Any]]:
    """A batch size, as far as memory allows, whose shares are not launch-bound and take at least `seconds`; and the figures behind it."""
    items = 64 * devices
    most = 1 << 15
    if clock.device.type == "cuda":
        memory = torch.cuda.get_device_properties(clock.device).total_memory
        most = int(_MOST_MEMORY * memory / network.bytes_of_an_item)
    while True:
        plain = Plain(network, -(-items // devices))
        clock.block(plain, 2)
        launch, work = clock.launch_and_work(plain)
        enough = work >= max(seconds, 1.5 * LAUNCH_FACTOR * devices * launch)
        if enough or 2 * items > most:
            break
        items *= 2
    return items, {
        "batch": items,
        "launch_milliseconds": round(1e3 * launch, 3),
        "micro_batch_milliseconds": round(1e3 * work, 3),
        "launch_bound": work < LAUNCH_FACTOR * devices * launch,
    }


def partition(ratios: Sequence[float]) -> list[Device]:
    """Split the first GPU in these ratios, in place of the parts of the previous race."""
    gc.collect()
    torch.cuda.synchronize()
    # Drop what PyTorch keeps for the old parts' streams before the streams are destroyed.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    paceline.release_partitions("cuda:0")
    return paceline.partition("cuda:0", list(ratios))
