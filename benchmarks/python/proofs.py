"""What proofs cost: runs of a trainer with and without them, in turns.

    python proofs.py --json      run it alone on the machine

A run makes a trainer of a small network and takes --steps steps, of which the first and the thousandth are proved. Prints the seconds of both kinds
of runs, their ratio in each pair, and what the proofs themselves took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import paceline
from paceline.torch import DataParallel
from race import script


def loss_fn(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def run(args: argparse.Namespace, names: list[str], *, prove: bool) -> tuple[float, list[float]]:
    """The seconds of a run, and those of its proofs."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(64, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh(), nn.Linear(args.width, 10)
    )
    batch = torch.randn(args.batch, 64), torch.randint(0, 10, (args.batch,))
    with DataParallel(module, names, prove=prove) as trainer:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        begin = time.perf_counter()
        for _ in range(args.steps):
            trainer.step(loss_fn, batch)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        text = trainer.explain()
    proofs = [line for line in text.splitlines() if line.startswith("Proof")]
    return seconds, [float(line.rsplit(" ", 2)[-2]) / 1e3 for line in proofs]


def main() -> int:
    args = arguments()
    devices = paceline.devices()[: args.devices]
    names = [device.name for device in devices]
    run(args, names, prove=True)  # warm-up
    found: dict[bool, list[float]] = {True: [], False: []}
    proofs: list[float] = []
    for pair in range(args.rounds):
        for prove in (True, False) if pair % 2 else (False, True):
            seconds, took = run(args, names, prove=prove)
            found[prove].append(seconds)
            proofs = took or proofs
    ratios = [mine / theirs for mine, theirs in zip(found[True], found[False], strict=True)]
    step = statistics.median(found[False]) / args.steps
    print(
        f"{args.steps} steps of {1e3 * step:.1f} ms: {statistics.median(ratios):.4f} times the time without proofs (median of {args.rounds} pairs, {min(ratios):.4f} to "
        f"{max(ratios):.4f}); proofs took {', '.join(f'{1e3 * one:.0f}' for one in proofs)} ms, {sum(proofs) / statistics.median(found[False]):.2%} of the run"
    )
    if args.json:
        result = {"with": found[True], "without": found[False], "ratios": ratios, "proofs": proofs}
        print(json.dumps(result | script.facts(devices, torch=torch.__version__)))
    return 0


def arguments() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--devices", type=int, default=2, help="how many devices (default: 2)")
    parser.add_argument("--batch", type=int, default=512, help="items of a batch (default: 512)")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers (default: 512)")
    parser.add_argument("--steps", type=int, default=1000, help="of a run (default: 1000)")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of runs (default: 4)")
    args = parser.parse_args()
    if min(args.devices, args.batch, args.width, args.steps, args.rounds) < 1:
        parser.error("all numbers are at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
