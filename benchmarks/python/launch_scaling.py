"""How short a step may be before Python's lock limits a machine with many fast GPUs.

    python launch_scaling.py --devices host:0 --json       CPU tensors; only a rough indication
    python launch_scaling.py --json                        on the first GPU, alone on the machine

1, 2, 4 and 8 threads, one per GPU of a machine, each run operators that do next to nothing. This measures the time that
Python and PyTorch need to start an operator, and how much of it threads can share. Python code runs one thread at a time,
so more threads hardly start more operators per second. With N operators per micro-batch on each of n devices, a
micro-batch takes at least n x N divided by that rate, however fast the GPUs are. The last columns show this time. C++
starts backward's operators without the lock, so `forward and backward` scales further than `operators`.

Python calls the modules of a forward, so threads hinder each other there more than in backward. In the rows `forward, 2 at a time, and
backward` no more than two threads are in their forward. If they start more operators than without that limit, a trainer would gain by it.

A CUDA graph helps: it launches all operators of a micro-batch at once. On a GPU each thread captures the same forward
and backward once and replays it, in the rows `CUDA graph`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline
from race import script
from race.figures import spread

THREADS = (1, 2, 4, 8)
OPERATORS = 50  # per call
EXAMPLES = (100, 500, 2000)  # operators in a micro-batch of a small, a medium and a large network
FORWARDS = 2  # at a time, where they are limited
LIMITED = f"forward, {FORWARDS} at a time, and backward"
MEASURED = ("operators", "forward and backward", LIMITED, "CUDA graph")


def main() -> int:
    args = arguments()
    kind = "cpu" if args.devices else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU; --devices host:0 measures CPU tensors", file=sys.stderr)
        print(json.dumps({"available": False, "why": "PyTorch sees no GPU"}))
        return 0
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"note: the load average is {load:.1f}: somebody else computes here, publish nothing of this",
            file=sys.stderr,
        )
    rounds, seconds = (3, 0.1) if args.short else (7, 1.0)
    torch.set_num_threads(1)
    rows = []
    for what in MEASURED if kind == "cuda" else MEASURED[:3]:
        for threads in THREADS if what != LIMITED else [count for count in THREADS if count > FORWARDS]:
            rates = [rate(MAKERS[what], kind, threads, seconds) for _ in range(rounds)]
            rows.append(row(what, threads, rates))
    print(table(rows))
    if args.json:
        print(json.dumps({"available": True, "kind": kind, "load_before": round(load, 2), "rows": rows, **setting()}))
    return 0


def rate(make: Callable[[str], tuple[Callable[[], None], int]], kind: str, threads: int, seconds: float) -> float:
    """The operators per second that all threads together start."""
    counts = [0] * threads
    barrier = threading.Barrier(threads + 1)
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            stream = torch.cuda.Stream() if kind == "cuda" else None
            with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                with CAPTURE:  # PyTorch captures one graph at a time per process
                    call, operators = make(kind)
                for _ in range(3):
                    call()
                barrier.wait(60)
                done = 0
                while not stop.is_set():
                    call()
                    done += operators
                    if stream is not None and done % (20 * operators) == 0:
                        stream.synchronize()  # the queue is finite; with a full queue a launch waits for the GPU
                counts[index] = done
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(60)
    begin = time.perf_counter()
    time.sleep(0 if errors else seconds)
    stop.set()
    passed = time.perf_counter() - begin
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(counts) / passed


CAPTURE = threading.Lock()


def operators(kind: str) -> tuple[Callable[[], None], int]:
    """Calls from Python that each start one operator on 16 numbers."""
    x = torch.zeros(16, device=kind)

    def call() -> None:
        for _ in range(OPERATORS):
            x.add_(1)

    return call, OPERATORS


def forward_and_backward(
    kind: str, limit: contextlib.AbstractContextManager[Any] | None = None
) -> tuple[Callable[[], None], int]:
    """A tiny network: modules that Python calls, and their backward, which C++ runs. `limit` is entered around each forward."""
    around = contextlib.nullcontext() if limit is None else limit
    layers = 10
    module = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)]).to(kind)
    x = torch.zeros(4, 8, device=kind)
    parameters = list(module.parameters())

    def call() -> None:
        with around:
            loss = module(x).sum()
        torch.autograd.grad(loss, parameters)

    # Forward: per layer, a product with bias and a ReLU. Backward: two products, a sum and a ReLU.
    return call, 6 * layers + 2


def graph(kind: str) -> tuple[Callable[[], None], int]:
    """The same network as in `forward_and_backward`, captured once: one launch for all."""
    call, count = forward_and_backward(kind)
    for _ in range(3):  # libraries load and choose algorithms
        call()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return captured.replay, count


TURNS = threading.BoundedSemaphore(FORWARDS)

MAKERS: dict[str, Callable[[str], tuple[Callable[[], None], int]]] = {
    "operators": operators,
    "forward and backward": forward_and_backward,
    LIMITED: lambda kind: forward_and_backward(kind, TURNS),
    "CUDA graph": graph,
}


def row(what: str, threads: int, rates: list[float]) -> dict[str, Any]:
    median = statistics.median(rates)
    return {
        "what": what,
        "threads": threads,
        "operators_per_second": round(median),
        "spread": round(spread(rates), 4),
        "microseconds_per_operator": round(1e6 * threads / median, 2),  # as seen by each thread
        "shortest_milliseconds": {str(count): round(1e3 * threads * count / median, 3) for count in EXAMPLES},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    examples = " | ".join(f"{count} operators" for count in EXAMPLES)
    lines = [
        f"| | threads | operators/s, all | spread | µs each | shortest micro-batch of {examples} |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(EXAMPLES),
    ]
    for entry in rows:
        shortest = " | ".join(f"{value:.2f} ms" for value in entry["shortest_milliseconds"].values())
        lines.append(
            f"| {entry['what']} | {entry['threads']} | {entry['operators_per_second']:,} | ±{entry['spread']:.0%} | "
            f"{entry['microseconds_per_operator']:.1f} | {shortest} |"
        )
    lines.append(
        "\nA network whose micro-batches are shorter than this waits for Python, not for its GPUs; a CUDA graph is the cure."
    )
    return "\n".join(lines)


def setting() -> dict[str, Any]:
    facts = script.facts(paceline.devices(), torch=torch.__version__, cuda=torch.version.cuda)
    facts["hardware"]["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return facts | {"gil": bool(getattr(sys, "_is_gil_enabled", lambda: True)())}


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--devices", help="any host device: measure CPU tensors (default: the first GPU)")
    parser.add_argument("--short", action="store_true", help="four seconds, with a wider spread")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
