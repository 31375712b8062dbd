"""Train a character transformer that no device may hold alone: its blocks are cut into stages over several devices.

    python pipeline.py                              over host:0 and host:1; about a minute on two cores
    python pipeline.py --slow host:1                from the middle on, a busy loop takes half of host:1 away: a cut moves
    python pipeline.py --steps 20 --plot step.svg   shorter, with the schedule of the last step drawn into another file

Bytes are the tokens, and the text is alice.txt, as in text.py. `memory=` gives each device less memory than training takes, as if it were
a card that is too small. Lines that differ from a plain training script are marked with (*).
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.torch import Pipeline

TEXT = Path(__file__).with_name("alice.txt")
LENGTH = 64  # tokens of a piece
MEASURING = "measuring the blocks"  # in the first steps, before anything is planned
Batch = tuple[torch.Tensor, torch.Tensor]

# A stand-in for another program: a busy loop on one core. It ends by itself when its parent is gone for any reason.
BUSY_LOOP = """
import os, sys
parent = os.getppid()
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == parent:
    pass
"""


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Transformer(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self, width: int = 256, blocks: int = 6) -> None:
        super().__init__()
        self.embedding = Embedding(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def pieces(count: int, seed: int = 0) -> Batch:
    """`count` pieces of the text, and at each position the next byte: two tensors of shape (count, LENGTH)."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    begins = torch.randint(0, len(text) - LENGTH, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = text[begins + torch.arange(LENGTH + 1)]
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, following = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    memory = dict.fromkeys(args.devices, args.memory << 20)
    show_that_one_is_too_small(args.devices[0], memory)
    losses, stages = [], ""
    with (
        contextlib.ExitStack() as neighbour,
        Pipeline(Transformer(), args.devices, blocks="blocks", memory=memory) as trainer,  # (*)
    ):
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-3)  # (*)
        for step in range(args.steps):
            if args.slow and step == args.steps // 2:
                neighbour.enter_context(busy_loop(args.slow))
                print(f"step {step:4}  a busy loop begins on {args.slow}", flush=True)
            start = time.perf_counter()
            loss = trainer.step(loss_fn, pieces(args.batch, seed=args.seed + step))  # (*)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            before, stages = stages, placed(trainer.report()["pipeline"])
            if stages != before or step % max(1, args.steps // 10) == 0:
                mark = "  <- a cut moved" if before not in ("", MEASURING, stages) else ""
                milliseconds = 1e3 * (time.perf_counter() - start)
                print(f"step {step:4}  loss {losses[-1]:.3f}  {milliseconds:6.1f} ms  {stages}{mark}", flush=True)
        print()
        print(trainer.explain())
        trainer.plot_schedule(args.plot)
        print(f"the last step, drawn: {args.plot}")
    print(f"loss per byte: {losses[0]:.2f} at first, {losses[-1]:.2f} in the end")
    if args.steps >= 40 and losses[-1] > 0.8 * losses[0]:
        print("it should have fallen by a fifth and more", file=sys.stderr)
        return 1
    return 0


def show_that_one_is_too_small(device: str, memory: dict[str, int]) -> None:
    try:
        with Pipeline(Transformer(), [device], blocks="blocks", memory={device: memory[device]}) as trainer:
            trainer.step(loss_fn, pieces(1))
    except paceline.OutOfMemory as error:
        print(f"{device} alone: {error}\n")
    else:
        print(f"{device} alone would have been enough: --memory is too large to show anything\n", file=sys.stderr)


def placed(pipeline: dict[str, Any]) -> str:
    """Which blocks each device had in the last step."""
    if pipeline["predicted_seconds"] is None:
        return MEASURING
    return ", ".join(
        f"{stage['device']} {stage['first_block']} to {stage['last_block']}" for stage in pipeline["stages"]
    )


@contextlib.contextmanager
def busy_loop(device: str) -> Iterator[None]:
    """A stand-in for another program: a busy loop on each core of a device."""
    cores = paceline.find_device(device).cores
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="host:0,host:1", help="of the stages (default: host:0,host:1)")
    parser.add_argument("--memory", type=int, default=68, help="MiB of each device (default: 68)")
    parser.add_argument("--slow", metavar="DEVICE", help="hold a busy loop on this device's core from the middle on")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=Path("pipeline.png"), help="(default: pipeline.png)"
    )
    parser.add_argument("--steps", type=int, default=80, help="how long to train (default: 80)")
    parser.add_argument("--batch", type=int, default=16, help="pieces of a step (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.devices = args.devices.split(",")
    if len(args.devices) < 2:
        parser.error(
            f"--devices {args.devices[0]}: name two devices or more, since no single one has memory for the model"
        )
    if min(args.steps, args.batch, args.memory) < 1:
        parser.error("--steps, --batch and --memory must be at least 1")
    if args.slow and (args.slow not in args.devices or not paceline.find_device(args.slow).cores):
        parser.error(
            f"--slow {args.slow}: not a device of this run with cores of its own; there are {', '.join(args.devices)}"
        )
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except paceline.OutOfMemory as error:
        sys.exit(f"error: {error}. Raise --memory, or name more --devices.")
