"""Times on GPUs and hosts: of blocks of steps, of single steps, and of Python's part in a step."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

Step = Callable[[], object]


class Clock:
    """A clock for devices whose tensors lie on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def block(self, step: Step, count: int) -> float:
        """Run so many steps and return the seconds until the last one's work is done. Steps may be enqueued ahead."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        return time.perf_counter() - begin

    def each(self, step: Callable[[int], object], count: int) -> list[float]:
        """The seconds of each single step. On a GPU, events on the caller's stream measure them.

        On a GPU at most two steps are in flight. A loop that reads its loss now and then is no further ahead either, and the balancer can
        only use steps that were measured.
        """
        if not self._cuda:
            times = []
            for number in range(count):
                begin = time.perf_counter()
                step(number)
                times.append(time.perf_counter() - begin)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for number in range(count):
            if number > 0:
                events[number - 1].synchronize()
            step(number)
            events[number + 1].record()
        self.wait()
        return [1e-3 * begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def launch_and_work(self, step: Step, repeats: int = 7) -> tuple[float, float]:
        """The median seconds that Python takes to enqueue a step, and the median seconds that the device works on it.

        The step is enqueued behind a delay, so that the device does not wait for Python while it works. On the host both are the same work,
        and the first value is zero.
        """
        if not self._cuda:
            return 0.0, statistics.median(self.block(step, 1) for _ in range(repeats))
        launches: list[float] = []
        works: list[float] = []
        cycles = 1_000_000
        while len(works) < repeats:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wait()
            torch.cuda._sleep(cycles)
            begin.record()
            start = time.perf_counter()
            step()
            launch = time.perf_counter() - start
            if begin.query():  # the delay ended too soon, so the device has waited for Python
                cycles *= 2
                if cycles > 1 << 32:
                    raise RuntimeError(
                        "a step cannot be enqueued without waiting for the device: something in it waits"
                    )
                continue
            end.record()
            self.wait()
            launches.append(launch)
            works.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(launches), statistics.median(works)
