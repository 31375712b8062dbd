"""All-reduces of two processes over gloo, and of two devices in one process. Each function measures one process.

Both sum float32 zeros in place, over and over. Other values would grow, and zeros cost the same. The result of a sum is checked first. The
times of calls are stored by the size in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed

from race import ranks
from race.job import Job

Blocks = dict[str, list[list[float]]]

WARM_UP_CALLS = 3


def calls_of(size: int, steps: int) -> int:
    """The number of measured calls of a size: `steps` for small sizes, as many as move 512 MiB for large sizes, at least three."""
    return max(3, min(steps, (512 << 20) // size))


def measured(job: Job, fill: Callable[[int], list[torch.Tensor]], reduce: Callable[[], None]) -> Blocks:
    """The seconds of the calls of every size. `fill` makes this process's buffers of a size, and `reduce` reduces them."""
    blocks: Blocks = {}
    for size in job.sizes:
        buffers = fill(size)
        reduce()
        for buffer in buffers:
            if not bool((buffer == 3.0).all()):
                raise RuntimeError(f"{job.rival}: the sum of {size} bytes of 1 and 2 is not 3")
            buffer.zero_()
        for _ in range(WARM_UP_CALLS - 1):
            reduce()
        seconds = []
        for _ in range(calls_of(size, job.steps)):
            start = time.perf_counter()
            reduce()
            seconds.append(time.perf_counter() - start)
        blocks[str(size)] = [seconds]
    return blocks


def gloo(job: Job) -> tuple[Blocks, list[float]]:
    """One of two ranks."""
    torch.set_num_threads(1)
    ranks.meet(job)
    buffers: list[torch.Tensor] = []

    def fill(size: int) -> list[torch.Tensor]:
        buffers[:] = [torch.full((size // 4,), job.rank + 1.0)]
        return buffers

    return measured(job, fill, lambda: distributed.all_reduce(buffers[0])), []


def paceline(job: Job) -> tuple[Blocks, list[float]]:
    """Both devices, in one process."""
    from paceline import Communicator, DeviceGroup

    torch.set_num_threads(1)
    buffers: list[torch.Tensor] = []

    def fill(size: int) -> list[torch.Tensor]:
        buffers[:] = [torch.full((size // 4,), device + 1.0) for device in range(job.parts)]
        return buffers

    with DeviceGroup(job.devices) as group:
        communicator = Communicator(group)
        return measured(job, fill, lambda: communicator.all_reduce(buffers)), []


RIVALS = {"all-reduce-gloo": gloo, "all-reduce-paceline": paceline}
