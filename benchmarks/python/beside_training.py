"""How long a request waits that comes while a model trains on the same cores, and what short micro-batches cost the training.

    python benchmarks/python/beside_training.py                     two cores, a convolutional network on 256 images a step
    python benchmarks/python/beside_training.py --rounds 1 --json   quick; the last line is one JSON object

The requests go to a small network that a pool serves. They come at random, 20 a second, with the same seeds for each way. `short`: the pool is
`Pool(trainer)`, which has micro-batches be short. `whole`: it is a pool of the same devices, which has not. `idle`: `Pool(trainer)`, and no request comes.
`training`: no pool. The four ways take turns, in rounds. Waits are from submit to result, in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from paceline.torch import DataParallel, Pool
from race import script

WAYS = ("training", "idle", "whole", "short")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 14 * 14, 10)),
    )


def classify(module: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


class Requests:
    """Sends requests at random times, and notes how long each took."""

    def __init__(self, batcher: Any, rate: float, seed: int) -> None:
        self.seconds: list[float] = []
        self._batcher, self._rate, self._random = batcher, rate, random.Random(seed)
        self._end, self._thread = threading.Event(), threading.Thread(target=self._send)

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _send(self) -> None:
        item = torch.zeros(64)
        while not self._end.wait(self._random.expovariate(self._rate)):
            begin = time.perf_counter()
            done = self._batcher(item)
            done.add_done_callback(lambda _, begin=begin: self.seconds.append(time.perf_counter() - begin))


def measure(way: str, args: argparse.Namespace, seed: int) -> tuple[float, list[float]]:
    """Images a second, and the seconds of each request."""
    batch = (torch.randn(args.batch, 1, 28, 28), torch.randint(0, 10, (args.batch,)))
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(DataParallel(network(), args.devices, prove=None))
        optimizer = torch.optim.SGD(trainer.module.parameters(), lr=0.01)

        def step() -> None:
            trainer.step(classify, batch)
            optimizer.step()
            optimizer.zero_grad()

        requests: Any = contextlib.nullcontext()
        if way != "training":
            pool = stack.enter_context(Pool(args.devices if way == "whole" else trainer))
            small = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
            batcher = pool.serve(small)
            batcher(torch.zeros(64)).result()
            if way != "idle":
                requests = Requests(batcher, args.rate, seed)
        for _ in range(12):  # speeds and sizes are learned
            step()
        with requests:
            steps, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < args.seconds:
                step()
                steps += 1
            rate = steps * args.batch / (time.perf_counter() - begin)
        return rate, getattr(requests, "seconds", [])


def main() -> int:
    args = arguments()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    waits: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(args.rounds):
        for way in WAYS:
            rate, seconds = measure(way, args, seed)
            rates[way].append(rate)
            waits[way].extend(seconds)
    print(f"PyTorch {torch.__version__}, {platform.processor() or platform.machine()}, {', '.join(args.devices)}")
    figures: dict[str, dict[str, float]] = {}
    for way in WAYS:
        figures[way] = {"images_per_second": round(statistics.median(rates[way]), 1)}
        text = f"{way:9} {figures[way]['images_per_second']:9.1f} images/s"
        if len(waits[way]) > 1:
            cuts = [1e3 * one for one in statistics.quantiles(waits[way], n=100, method="inclusive")]
            figures[way] |= {"p50_ms": round(cuts[49], 2), "p90_ms": round(cuts[89], 2), "p99_ms": round(cuts[98], 2)}
            text += "   a request waits {p50_ms:.1f} ms (median), {p90_ms:.1f} (90 %), {p99_ms:.1f} (99 %)".format(
                **figures[way]
            )
        print(text)
    if args.json:
        print(json.dumps({"benchmark": "beside_training", "devices": args.devices, "batch": args.batch, **figures}))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--devices", nargs="+", default=["host:0", "host:1"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
