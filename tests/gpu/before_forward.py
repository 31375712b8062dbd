"""Where the time of Python goes before a forward of ResNet-50's size on one device, function by function.

    python tests/gpu/before_forward.py                       on the first GPU
    python tests/gpu/before_forward.py --devices host:0      tiny, on a host device; only to try the program

A GPU that waits for a step is idle so long. The caller and the worker tell each call and each return; this makes every function slower, so the
figures say which functions count, and `milliseconds` without it says how much there is. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from measure import ON_GPU, TINY, network
from paceline.torch import DataParallel

STEPS = 12
ROWS = 40


class Calls:
    """Tells how long each function took by itself, in the threads that ask for it."""

    def __init__(self) -> None:
        self.on = False
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.times: collections.Counter[str] = collections.Counter()
        self._open: dict[
            int, list[tuple[str, float]]
        ] = {}  # by thread: functions that have not returned, and since when each works itself

    def begin(self) -> None:
        self._open, self.on = {}, True

    def told(self, frame: FrameType, event: str, of: Any) -> None:
        if not self.on:
            return
        now = time.perf_counter()
        stack = self._open.setdefault(threading.get_ident(), [])
        if stack:
            self.seconds[stack[-1][0]] += now - stack[-1][1]
        if event in ("call", "c_call"):
            code = frame.f_code
            place = f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_name}"
            name = place if event == "call" else str(getattr(of, "__qualname__", of))
            self.times[name] += 1
            stack.append((name, now))
        elif stack:
            stack.pop()
        if stack:
            stack[-1] = (stack[-1][0], time.perf_counter())


def measured(device: str | None) -> dict[str, Any]:
    size, home = (ON_GPU, torch.device("cuda", 0)) if device is None else (TINY, torch.device("cpu"))
    module, batch = network(size, home)
    criterion, calls = nn.CrossEntropyLoss(), Calls()
    reached = [0.0]
    watched = False

    def loss_fn(one: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.on, reached[0] = False, time.perf_counter()
        if watched and sys.getprofile() is None:  # on the worker
            sys.setprofile(calls.told)
        loss: torch.Tensor = criterion(one(part[0]), part[1])
        return loss

    with DataParallel(module, [device or "cuda:0"]) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=1e-3)

        def until_forward(begin: Callable[[], None] = lambda: None) -> float:
            optimizer.zero_grad()
            begin()
            began = time.perf_counter()
            loss = trainer.step(loss_fn, batch)
            optimizer.step()
            loss.item()
            return 1e3 * (reached[0] - began)

        found = {"milliseconds": statistics.median([until_forward() for _ in range(2 * STEPS)][STEPS:])}
        watched = True
        sys.setprofile(calls.told)
        until_forward()  # after which the worker tells, too
        found["milliseconds_told"] = statistics.median(until_forward(calls.begin) for _ in range(STEPS))
        sys.setprofile(None)
    longest = sorted(calls.seconds, key=lambda name: -calls.seconds[name])[:ROWS]
    rows = [[round(1e6 * calls.seconds[name] / STEPS, 1), calls.times[name] / STEPS, name] for name in longest]
    return {**{name: round(value, 3) for name, value in found.items()}, "microseconds_calls_function": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="one host device, to try the program")
    device = parser.parse_args().devices
    if device is None and not torch.cuda.is_available():
        print(json.dumps({"available": False, "why": "PyTorch sees no GPU"}))
        return 0
    print(json.dumps(measured(device.split(",")[0] if device else None)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
