"""What paceline costs beside plain PyTorch on one GPU, and what it hides on two parts of it.

    python tests/gpu/measure.py                              on the first GPU
    python tests/gpu/measure.py --devices host:0,host:1      tiny, on host devices; only to try the program

Overheads: a network of ResNet-50's size with its 159 buffers in bfloat16, without and with a read of the loss in each step. Plain
PyTorch and paceline take turns; each figure is the shortest of several rounds. Memory: the most that PyTorch's allocator and paceline's
pool had given out. Overlap: which part of the sums of gradients runs while the parts' kernels run, by PyTorch's profiler.
Launch-bound: a step that Python cannot launch as fast as the GPU runs it, with and without CUDA graphs, on one GPU and on four parts of it.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import paceline
import timeline
from gpu_models import Pair, classify_in_bfloat16, images, resnet
from paceline.torch import DataParallel

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    blocks: tuple[int, ...]
    width: int
    items: int
    pixels: int
    rounds: int
    steps: int
    layers: int
    features: int


ON_GPU = Size((3, 4, 6, 3), 64, 128, 224, 5, 4, 24, 2048)
TINY = Size((1, 1), 4, 8, 16, 2, 1, 2, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="host devices, to try the program")
    named = parser.parse_args().devices
    if named is None and not torch.cuda.is_available():
        print(json.dumps({"available": False, "why": "PyTorch sees no GPU"}))
        return 0
    size, home = (ON_GPU, torch.device("cuda", 0)) if named is None else (TINY, torch.device("cpu"))
    if named is not None:
        torch.set_num_threads(1)  # like a worker
    first = "cuda:0" if named is None else named.split(",")[0]
    found: dict[str, Any] = {"available": True}
    questions: dict[str, Callable[[], Any]] = {
        "overheads": lambda: {
            "ResNet-50": overhead(size, home, first, read=False),
            "ResNet-50, the loss read": overhead(size, home, first, read=True),
        },
        "memory": lambda: memory(size, home, first),
        "overlap": lambda: overlap(size, home, named.split(",") if named else None),
        "launch-bound": lambda: launch_bound(size, home) if named is None else {"why": "about GPUs alone"},
    }
    broken = []
    for name, question in questions.items():
        try:
            found[name] = question()
        except Exception as error:  # the other figures must not be lost
            broken.append(f"{name}: {type(error).__name__}: {error}")
    if broken:
        found["failed"] = "; ".join(broken)
    print(json.dumps(found))
    return 1 if broken else 0


def network(size: Size, home: torch.device) -> tuple[nn.Module, Pair]:
    torch.manual_seed(0)
    module = resnet(size.blocks, size.width).to(home, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module, images(size.items, size.pixels, 1000, home)


def plain_step(module: nn.Module, batch: Pair) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

    def step() -> torch.Tensor:
        loss = classify_in_bfloat16(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def paced_step(trainer: DataParallel, batch: Pair, before: list[float] | None = None) -> Callable[[], torch.Tensor]:
    """`before` gets the milliseconds of each step before the loss is called: a GPU that waits for this step is idle so long."""
    optimizer = trainer.optimizer(torch.optim.SGD, lr=1e-3, momentum=0.9)
    began = 0.0

    def loss_fn(one: nn.Module, part: Pair) -> torch.Tensor:
        if before is not None:
            before.append(1e3 * (time.perf_counter() - began))
        return classify_in_bfloat16(one, part)

    def step() -> torch.Tensor:
        nonlocal began
        began = time.perf_counter()
        loss = trainer.step(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def overhead(size: Size, home: torch.device, device: str, *, read: bool) -> dict[str, Any]:
    module, batch = network(size, home)
    with DataParallel(copy.deepcopy(module), [device]) as trainer:
        before: list[float] = []
        steps = {"plain": plain_step(module, batch), "paceline": paced_step(trainer, batch, before)}

        def run(name: str) -> float:
            synchronize(home)
            begin = time.perf_counter()
            for _ in range(size.steps):
                loss = steps[name]()
                if read:
                    loss.item()
            synchronize(home)
            return 1e3 * (time.perf_counter() - begin) / size.steps

        shortest = shortest_of(run, list(steps), size.rounds)
    return {
        "parameters": sum(1 for _ in module.parameters()),
        "buffers": sum(1 for _ in module.buffers()),
        "plain_milliseconds": round(shortest["plain"], 3),
        "paceline_milliseconds": round(shortest["paceline"], 3),
        "milliseconds_before_forward": round(statistics.median(before), 3),
        "plain_over_paceline": round(shortest["plain"] / shortest["paceline"], 4),
    }


def shortest_of(run: Callable[[str], float], names: Sequence[str], rounds: int) -> dict[str, float]:
    """The shortest of several rounds for each. They take turns, first in this order, then in the other; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names if round_ % 2 == 0 else reversed(names):
            found[name].append(run(name))
    return {name: min(values[1:]) for name, values in found.items()}


def memory(size: Size, home: torch.device, device: str) -> dict[str, Any]:
    """Bytes. On host devices nobody counts them."""
    module, batch = network(size, home)
    bytes_of_parameters = sum(each.numel() * each.element_size() for each in module.parameters())
    found: dict[str, Any] = {"parameters": bytes_of_parameters}
    with counted(home) as peak:
        step = plain_step(copy.deepcopy(module), batch)
        for _ in range(3):
            step()
        found["plain_peak"] = peak()
        del step
    with counted(home) as peak, DataParallel(copy.deepcopy(module), [device]) as trainer:
        step = paced_step(trainer, batch)
        for _ in range(3):
            step()
        found["paceline_peak"] = peak()
        pools = trainer.report()["memory"]
        found["paceline_pool_peak"] = sum(each.get("pool_peak_bytes", 0) for each in pools.values())
        del step
    return found


@contextlib.contextmanager
def counted(home: torch.device) -> Iterator[Callable[[], int | None]]:
    """A function that returns the most bytes that PyTorch's allocator had given out inside of the ``with`` block."""
    if home.type == "cpu":
        yield lambda: None
        return
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(home)
    yield lambda: torch.cuda.max_memory_allocated(home)


def overlap(size: Size, home: torch.device, named: list[str] | None) -> dict[str, Any]:
    """Of three steps the one that hides most: what a good step can do, without the chance of a busy host."""
    devices: list[Any] = paceline.partition("cuda:0", [0.75, 0.25]) if named is None else list(named)
    torch.manual_seed(0)
    layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.features, size.features), nn.ReLU())]
    module = nn.Sequential(*layers).to(home)
    batch = torch.randn(2 * size.features, size.features, device=home)
    found: list[float] = []
    with DataParallel(module, devices) as trainer:

        def step() -> None:
            trainer.step(lambda one, x: one(x).square().mean(), batch)
            module.zero_grad()

        for _ in range(8):
            step()
        if named is not None:
            return {"hidden": None, "why": "about GPUs alone"}
        for _ in range(3):
            part = timeline.hidden(timeline.kernels_of(step))
            found += [] if part is None else [part]
    if not found:
        return {"hidden": None, "why": f"the profiler saw no kernel {timeline.OURS}"}
    return {"hidden": round(max(found), 4), "of_three_steps": [round(each, 4) for each in found]}


def launch_bound(size: Size, home: torch.device) -> dict[str, Any]:
    """Milliseconds of a step whose kernels are over sooner than Python launches them: plain PyTorch, and paceline with and without graphs."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2 * size.layers) for layer in (nn.Linear(256, 256), nn.ReLU())]
    module = nn.Sequential(*layers).to(home)
    batch = torch.randn(512, 256, device=home)

    def loss_fn(one: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = one(x).square().mean()
        return loss

    def milliseconds(step: Step) -> float:
        def run(_: str) -> float:
            synchronize(home)
            begin = time.perf_counter()
            for _repeat in range(10):
                step()
                module.zero_grad()
            synchronize(home)
            return 100 * (time.perf_counter() - begin)

        return round(shortest_of(run, ["step"], size.rounds)["step"], 3)

    found: dict[str, Any] = {"plain": milliseconds(lambda: loss_fn(module, batch).backward())}
    for count, graphs in itertools.product((1, 4), (False, True)):
        gc.collect()
        paceline.release_partitions("cuda:0")
        devices: list[Any] = paceline.partition("cuda:0", [1 / count] * count) if count > 1 else ["cuda:0"]
        with DataParallel(module, devices, balance="even", graphs=graphs) as trainer:
            name = f"{'four parts' if count > 1 else 'one GPU'}{', graphs' if graphs else ''}"
            found[name] = milliseconds(functools.partial(trainer.step, loss_fn, batch))
    return found


def synchronize(home: torch.device) -> None:
    if home.type == "cuda":
        torch.cuda.synchronize(home)


if __name__ == "__main__":
    sys.exit(main())
