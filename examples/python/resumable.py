"""Train a small network, stop between two steps when a signal asks for it, and continue where the last run stopped.

    python resumable.py --saves run                    SIGTERM or SIGUSR1: saves and ends with status 75
    python resumable.py --saves run                    the same command continues, on any devices
    python resumable.py --saves run --devices host:0   for example on one core

Status 75 means "try again later" to many programs (EX_TEMPFAIL), so a job script knows that the training is not finished. Status 0 means
that it is. examples/cluster has job scripts for SLURM and Kubernetes. Lines that differ from a plain training script are marked with (*).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.torch import DataParallel

SEED = 0
ITEMS = 4096
BATCH = 256


def spirals(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane on two spirals, and which of the two each point is on."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(0, 2, (ITEMS,), generator=generator)
    radius = torch.rand(ITEMS, generator=generator, dtype=torch.float64)
    angle = 2 * math.pi * radius + math.pi * labels
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return (points + 0.01 * torch.randn(ITEMS, 2, generator=generator, dtype=torch.float64)).to(dtype), labels


def rows_of(step: int) -> torch.Tensor:
    """The items of a step. They follow from its number alone, so the number is all that a save has to say about the data."""
    return torch.randint(0, ITEMS, (BATCH,), generator=torch.Generator().manual_seed(SEED + 1 + step))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def main() -> int:
    args = arguments()
    dtype = torch.float64 if args.double else torch.float32
    points, labels = spirals(dtype)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(dtype)
    step = 0

    with paceline.stop_on(signal.SIGTERM, signal.SIGUSR1) as stop, DataParallel(model, args.devices) as trainer:  # (*)
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9)  # (*)
        with contextlib.suppress(FileNotFoundError):  # there is none at the first start
            step = trainer.load(args.saves, optimizer=optimizer)["step"]  # (*)
        names = ", ".join(device.name for device in trainer.group.devices)
        print(f"step {step} of {args.steps}, on {names}", flush=True)
        saved = step
        while step < args.steps and not stop:  # (*)
            rows = rows_of(step)
            loss = trainer.step(loss_fn, (points[rows], labels[rows]))  # (*)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.save_every == 0:
                trainer.save_async(args.saves, optimizer=optimizer, extra={"step": step})  # (*)
                saved = step
                print(f"step {step}: loss {loss:.4f}", flush=True)
        if saved < step:
            trainer.save_async(
                args.saves, optimizer=optimizer, extra={"step": step}
            )  # (*) closing the trainer waits for it
    if step < args.steps:
        print(
            f"{signal.Signals(stop.signal).name if stop.signal else 'stop'} after step {step}; the same command continues"
        )
        return os.EX_TEMPFAIL
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--saves", type=Path, required=True, help="the folder to save to and to continue from")
    parser.add_argument("--devices", default="auto", help="such as host:0,host:1; default: all host devices")
    parser.add_argument("--steps", type=int, default=1000, help="how long to train, with earlier runs (default: 1000)")
    parser.add_argument("--save-every", type=int, default=200, help="steps between two saves (default: 200)")
    parser.add_argument("--double", action="store_true", help="compute in double precision")
    args = parser.parse_args()
    if args.steps < 1 or args.save_every < 1:
        parser.error("--steps and --save-every must be at least 1")
    if args.devices != "auto":
        args.devices = args.devices.split(",")
    return args


if __name__ == "__main__":
    sys.exit(main())
