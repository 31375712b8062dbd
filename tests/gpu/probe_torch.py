"""What PyTorch really does on this GPU, where the design of paceline.torch leans on it. Needs PyTorch alone.

    python tests/gpu/probe_torch.py

Prints one JSON object. Every answer is measured, and each time is the shortest of several; a question that fails has its error for an answer and stops no other. Without a GPU it
says so and exits with 0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from green_contexts import Part, split

SLEEP_CYCLES = 40_000_000  # about 20 ms at 2 GHz
ROUNDS = 3


def main() -> int:
    faulthandler.dump_traceback_later(120, exit=True)
    answers: dict[str, Any] = {"versions": versions(), "dlpack": dlpack()}
    if not torch.cuda.is_available():
        answers |= {"available": False, "why": "PyTorch sees no GPU"}
    else:
        torch.zeros(1, device="cuda")  # makes the primary context
        answers |= {"available": True, "gpu": torch.cuda.get_device_name(), "launch": launch_costs()}
        questions: dict[str, Callable[[list[Part]], Any]] = {
            "external_stream": external_stream,
            "backward_in_threads": backward_in_threads,
            "graphs_in_threads": graphs_in_threads,
            "matrix_products": matrix_products,
            "generator": generator,
            "allocator": allocator,
        }
        for name, question in questions.items():
            answers[name] = answer(question)
    print(json.dumps(answers))
    return 0


def answer(question: Callable[[list[Part]], Any]) -> Any:
    try:
        with split([3, 1]) as parts:
            result = question(parts)
            torch.cuda.synchronize()  # before the streams go, and with them what is kept for each
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            return result
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        found["nccl"] = torch.cuda.nccl.version()
        found["cudnn"] = torch.backends.cudnn.version()
    found["nccl_header"] = nccl_header()
    found["green_context"] = hasattr(torch.cuda, "GreenContext") or hasattr(torch.cuda, "green_contexts")
    found["gil"] = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
    return found


def nccl_header() -> str | None:
    """The version of the `nccl.h` of NCCL_HOME or of the wheel that PyTorch's NCCL came with; None where there is none."""
    folders = [Path(os.environ["NCCL_HOME"])] if "NCCL_HOME" in os.environ else []
    with contextlib.suppress(ModuleNotFoundError):  # of the package around it
        spec = importlib.util.find_spec("nvidia.nccl")
        folders += [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in folders:
        header = folder / "include" / "nccl.h"
        if header.is_file():
            numbers = dict(
                re.findall(r"#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            )
            return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return None


def dlpack() -> dict[str, str | None]:
    """Which spelling of the C exchange API the type has, and what kind of object it is."""
    names = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
    return {name: type(getattr(torch.Tensor, name)).__name__ if hasattr(torch.Tensor, name) else None for name in names}


def launch_costs() -> dict[str, float]:
    """Microseconds of Python for things that a step does often, the GPU kept busy meanwhile."""
    x = torch.zeros(1, device="cuda")
    stream = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    event = torch.cuda.Event(enable_timing=True)

    def enter() -> None:
        with torch.cuda.stream(stream):
            pass

    costs: dict[str, Callable[[], object]] = {
        "operator": lambda: x.add_(1),
        "enter_stream": enter,
        "record_event": lambda: event.record(stream),
        "record_stream": lambda: x.record_stream(stream),
    }
    found = {}
    for name, action in costs.items():
        torch.cuda._sleep(SLEEP_CYCLES)
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            action()
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        found[name] = round(1e6 * min(times), 2)
    return found


def external_stream(parts: list[Part]) -> dict[str, Any]:
    streams = streams_of(parts)
    x = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        current = torch.cuda.current_stream().cuda_stream == parts[0].stream
        y = x @ x
    streams[0].synchronize()
    alone = [Interval(streams[0]).fill() for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    both = [[Interval(stream).fill() for stream in streams] for _ in range(ROUNDS)]
    torch.cuda.synchronize()
    return {
        "sms": [part.sms for part in parts],
        "is_current": current,
        "right": bool(torch.allclose(y, x @ x)),
        "alone_ms": min(each.milliseconds() for each in alone),
        "overlap_of_two": max(overlap(each) for each in both),
    }


class SleepsInBackward(torch.autograd.Function):
    """Keeps the stream busy in backward, and notes which thread it runs on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threads: list[int]) -> torch.Tensor:
        ctx.threads = threads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.threads.append(threading.get_ident())
        torch.cuda._sleep(SLEEP_CYCLES)
        return gradient, None


def backward_in_threads(parts: list[Part]) -> dict[str, Any]:
    """Two threads, two partitions: do their backward passes run at once, and on whose thread?"""
    found = {}
    streams = streams_of(parts)
    for autograd_threads in (True, False):
        own_thread = [False] * len(streams)
        rounds: list[tuple[float, float]] = []

        def body(index: int, autograd_threads: bool, intervals: list[Interval], own_thread: list[bool]) -> None:
            with torch.cuda.stream(streams[index]), torch.autograd.set_multithreading_enabled(autograd_threads):
                threads: list[int] = []
                x = torch.zeros(16, device="cuda", requires_grad=True)
                intervals[index].begin.record(streams[index])
                y = x
                for _ in range(4):  # sleeps that alternate between two threads would show as half an overlap
                    y = SleepsInBackward.apply(y, threads)  # type: ignore[no-untyped-call]
                y.sum().backward()
                intervals[index].end.record(streams[index])
                own_thread[index] = set(threads) == {threading.get_ident()}

        for _ in range(ROUNDS):
            intervals = [Interval(stream) for stream in streams]
            bound = functools.partial(
                body, autograd_threads=autograd_threads, intervals=intervals, own_thread=own_thread
            )
            host_seconds = in_threads(len(streams), bound)
            torch.cuda.synchronize()
            rounds.append((overlap(intervals), host_seconds))
        found["with_autograd_threads" if autograd_threads else "without_autograd_threads"] = {
            "overlap": max(each for each, _ in rounds),
            "backward_on_calling_thread": all(own_thread),
            "host_ms": round(1e3 * min(each for _, each in rounds), 2),
        }
    return found


def graphs_in_threads(parts: list[Part]) -> dict[str, Any]:
    """Graphs captured on partitions' streams and replayed by two threads: do they run at once, on the partitions' SMs?"""
    streams = streams_of(parts)
    graphs = []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            torch.cuda._sleep(SLEEP_CYCLES)
        graphs.append(graph)
    torch.cuda.synchronize()
    found = []
    for _ in range(ROUNDS):
        intervals = [Interval(stream) for stream in streams]

        def body(index: int, intervals: list[Interval] = intervals) -> None:
            with torch.cuda.stream(streams[index]):
                intervals[index].begin.record(streams[index])
                graphs[index].replay()
                intervals[index].end.record(streams[index])

        in_threads(len(streams), body)
        torch.cuda.synchronize()
        found.append(overlap(intervals))
    return {"overlap": max(found), "raw_exec": hasattr(graphs[0], "raw_cuda_graph_exec")}


def matrix_products(parts: list[Part]) -> dict[str, Any]:
    """Speed of cuBLAS on each part, relative to the whole GPU, beside the part's share of the SMs: alone, and all at once."""
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Any] = {}
    for dtype, size in ((torch.bfloat16, 8192), (torch.float32, 4096)):
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        outs = [torch.empty(size, size, device="cuda", dtype=dtype) for _ in range(len(parts) + 1)]
        torch.cuda.synchronize()

        def seconds(streams: Sequence[Any], a: Any = a, b: Any = b, outs: Any = outs) -> list[float]:
            intervals = [Interval(stream) for stream in streams]
            for repeat in range(6):  # the first warms up
                for interval, out in zip(intervals, outs, strict=False):
                    with torch.cuda.stream(interval.stream):
                        if repeat == 1:
                            interval.begin.record(interval.stream)
                        torch.mm(a, b, out=out)
                        if repeat == 5:
                            interval.end.record(interval.stream)
            torch.cuda.synchronize()
            return [interval.milliseconds() / 5e3 for interval in intervals]

        def shortest(streams: Sequence[Any]) -> list[float]:
            return [min(each) for each in zip(*(seconds(streams) for _ in range(ROUNDS)), strict=True)]

        full = shortest([torch.cuda.Stream()])[0]
        alone = [shortest([stream])[0] for stream in streams_of(parts)]
        together = shortest(streams_of(parts))
        found[str(dtype).removeprefix("torch.")] = {
            "tflops": round(2 * size**3 / full / 1e12, 1),
            "parts": [
                {
                    "sm_share": round(part.sms / whole, 4),
                    "speed_alone": round(full / one, 4),
                    "speed_together": round(full / both, 4),
                }
                for part, one, both in zip(parts, alone, together, strict=True)
            ],
        }
    return found


def generator(parts: list[Part]) -> dict[str, Any]:
    """Two threads draw from the one generator of the GPU: do they ever get the same numbers, and does a seed repeat them?"""
    streams = streams_of(parts)

    def draws() -> list[torch.Tensor]:
        torch.cuda.manual_seed(0)
        drawn: list[list[torch.Tensor]] = [[], []]

        def body(index: int) -> None:
            with torch.cuda.stream(streams[index]):
                drawn[index] = [torch.rand(4, device="cuda", dtype=torch.float64) for _ in range(500)]

        in_threads(2, body)
        torch.cuda.synchronize()
        return [torch.stack(each).cpu() for each in drawn]

    first, second = draws(), draws()
    rows = torch.cat(first)
    return {
        "draws": len(rows),
        "different": len(torch.unique(rows, dim=0)),
        "repeat_with_a_seed_in_any_order": bool(torch.equal(rows.sort(0).values, torch.cat(second).sort(0).values)),
        "repeat_with_a_seed_per_thread": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
    }


def allocator(parts: list[Part]) -> dict[str, Any]:
    """Memory that is freed on one stream: given to the same stream at once, to another, before and after synchronising."""
    streams = streams_of(parts)
    size = 32 << 20

    def allocate(stream: Any) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device="cuda")

    torch.cuda.empty_cache()
    address = allocate(streams[0]).data_ptr()
    same = allocate(streams[0]).data_ptr() == address
    other = allocate(streams[1]).data_ptr() == address
    torch.cuda.synchronize()
    other_later = allocate(streams[1]).data_ptr() == address
    tensor = allocate(streams[0])
    address = tensor.data_ptr()
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(SLEEP_CYCLES)
        tensor.record_stream(streams[1])
    del tensor
    while_used = allocate(streams[0]).data_ptr() == address
    reserved = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {
        "reused_on_the_same_stream": same,
        "reused_on_another_stream": other,
        "reused_on_another_stream_after_synchronising": other_later,
        "reused_while_a_recorded_stream_uses_it": while_used,
        "bytes_left_after_empty_cache": torch.cuda.memory_reserved(),
        "bytes_before": reserved,
        "backend": torch.cuda.get_allocator_backend(),
    }


class Interval:
    """A stretch of a stream's time."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def fill(self) -> Interval:
        with torch.cuda.stream(self.stream):
            self.begin.record(self.stream)
            torch.cuda._sleep(SLEEP_CYCLES)
            self.end.record(self.stream)
        return self

    def milliseconds(self) -> float:
        milliseconds: float = self.begin.elapsed_time(self.end)
        return round(milliseconds, 3)


def overlap(intervals: Sequence[Interval]) -> float:
    """The part of the shorter of two intervals during which both ran: 1 at the same time, 0 one after the other."""
    a, b = intervals
    starts: tuple[float, float] = 0.0, a.begin.elapsed_time(b.begin)
    ends = a.milliseconds(), starts[1] + b.milliseconds()
    return round(max(0.0, min(ends) - max(starts)) / min(a.milliseconds(), b.milliseconds()), 3)


def streams_of(parts: Sequence[Part]) -> list[Any]:
    return [torch.cuda.ExternalStream(part.stream) for part in parts]


def in_threads(count: int, body: Callable[[int], None]) -> float:
    """Seconds until all threads, started at one barrier, have returned. The first error is raised again here."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(10)
            body(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
