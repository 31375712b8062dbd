"""Train a small convolutional network on scikit-learn's handwritten digits, on all devices of this machine.

    python digits.py                                     all devices; about 20 seconds on two cores
    python digits.py --slow host:1                       a busy loop takes half of host:1 away for a while
    python digits.py --slow host:1 --balance even        the same with equal shares: all devices wait for host:1
    python digits.py --slow host:1 --plot shares.png     also draws the run
    python digits.py --slow host:1 --page run.html       also writes a page of the run, to open by a double click
    python digits.py --devices cuda:0,cuda:1             on GPUs; cuda:0,host:0 mixes (the host seldom gets a share beside a GPU)
    python digits.py --devices cuda:0 --partition 0.75,0.25     on two unequal parts of one GPU

Lines that differ from a plain training script are marked with (*).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from paceline import Device, find_device, partition
from paceline.torch import DataParallel

STEPS = 300
GOAL = 0.97  # on the test set; this network reaches 98 to 99 %
ROWS = 12  # of the table; a multiple of three, so that the busy loop comes and goes between two rows


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1347 images for training and 450 for testing, 1 x 8 x 8 pixels from 0 to 1, with their labels."""
    digits = load_digits()
    parts = train_test_split(digits.images, digits.target, test_size=450, random_state=seed, stratify=digits.target)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32).div(16).unsqueeze(1) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return train_images, train_labels, test_images, test_labels


def batches(images: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless series of batches of `size`, one shuffled epoch after the other."""
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(images))])
        yield images[order[:size]], labels[order[:size]]
        order = order[size:]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    train_images, train_labels, test_images, test_labels = load(args.seed)
    steps = args.steps or -(-args.epochs * len(train_images) // args.batch)
    slow_steps = range(steps // 3, 2 * steps // 3) if args.slow else range(0)

    devices = chosen(args)
    model = network().to(home(devices))
    with DataParallel(model, devices, balance=args.balance) as trainer:  # (*)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=2e-3)  # (*) torch.optim.AdamW(model.parameters(), lr=2e-3)
        neighbour = BusyLoop(trainer, args.slow)
        table = Table(trainer, steps, neighbour)
        with contextlib.closing(neighbour):
            for step, batch in zip(range(steps), batches(train_images, train_labels, args.batch), strict=False):
                neighbour.run(step in slow_steps)
                start = time.perf_counter()
                loss = trainer.step(loss_fn, batch)  # (*) loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                table.add(step, float(loss), time.perf_counter() - start)

        model.eval()
        answers = trainer.predict(test_images).argmax(dim=1).cpu()  # (*) model(test_images), with torch.no_grad()
        accuracy = (answers == test_labels).double().mean().item()
        print()
        print(trainer.explain())
        if args.plot:
            plot(trainer, slow_steps, args)
        if args.page:
            trainer.page(args.page)
            print(f"written: {args.page}")

    print(f"test accuracy: {accuracy:.1%} of {len(test_labels)} images that it was not trained on")
    if accuracy < GOAL and steps >= STEPS:
        print(f"that is less than the {GOAL:.0%} which this network reaches", file=sys.stderr)
        return 1
    return 0


def chosen(args: argparse.Namespace) -> str | list[Device]:
    """The requested devices, as arguments for the trainer."""
    if args.devices == "auto":
        return (
            "auto"
            if not torch.cuda.is_available()
            else [find_device(f"cuda:{i}") for i in range(torch.cuda.device_count())]
        )
    devices = [find_device(name) for name in args.devices]
    if not args.partition:
        return devices
    gpus = [device for device in devices if device.kind == "cuda"]
    if len(gpus) != 1:
        raise SystemExit("--partition: name one GPU with --devices, such as cuda:0; host devices may stand beside it")
    return partition(gpus[0], args.partition) + [device for device in devices if device.kind == "host"]


def home(devices: str | list[Device]) -> torch.device:
    """The `torch.device` of the parameters: the first GPU, or the CPU if there is no GPU."""
    gpus = [device.index for device in devices if isinstance(device, Device) and device.kind == "cuda"]
    return torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")


class BusyLoop:
    """A stand-in for another program: a process per core of `device` that runs a busy loop."""

    # It ends by itself when its parent is gone for any reason.
    CODE = """
import os, sys
parent = os.getppid()
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == parent:
    pass
"""

    def __init__(self, trainer: DataParallel, device: str | None) -> None:
        cores = {entry.name: entry.cores for entry in trainer.group.devices}
        if device is not None and not cores.get(device):
            raise SystemExit(
                f"--slow {device}: not a device of this run with cores of its own; there are {', '.join(cores)}"
            )
        self.device = device
        self._cores = cores[device] if device is not None else []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def running(self) -> bool:
        return bool(self._processes)

    def run(self, wanted: bool) -> None:
        if wanted and not self.running:
            self._processes = [subprocess.Popen([sys.executable, "-c", self.CODE, str(core)]) for core in self._cores]
        elif not wanted:
            self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []


class Table:
    """Print how many items each device ran, and how the shares move."""

    HEAD = f"{'steps':>9}  {'loss':>6}  {'ms/step':>7}   {'device':<8}{'share':>5}  {'':<24}{'items/s':>8}  {'busy':>5}"

    def __init__(self, trainer: DataParallel, steps: int, neighbour: BusyLoop) -> None:
        self._seconds: list[float] = []  # for the steps since the last row
        self._trainer = trainer
        self._steps = steps
        self._neighbour = neighbour
        self._row_begin = 0
        self._report = trainer.report()["devices"]
        print(self.HEAD)

    def add(self, step: int, loss: float, seconds: float) -> None:
        self._seconds.append(seconds)
        if (step + 1) * ROWS // self._steps > step * ROWS // self._steps:
            self._row(step + 1, loss)
        elif sys.stdout.isatty():
            print(f"{step + 1:>9}  {loss:6.3f}  {seconds * 1e3:7.1f}   training ...", end="\r", flush=True)

    def _row(self, end: int, loss: float) -> None:
        seconds, self._seconds = self._seconds, []
        report = self._trainer.report()["devices"]
        label = f"{f'{self._row_begin + 1}-{end}':>9}  {loss:6.3f}  {1e3 * sum(seconds) / len(seconds):7.1f}"
        for name, now in report.items():
            items = now["items"] - self._report[name]["items"]
            busy = now["busy_seconds"] - self._report[name]["busy_seconds"]
            mean = items / len(seconds)
            total = sum(self._trainer.shares.values())
            bar = "#" * round(24 * mean / total)
            rate = f"{items / busy:8.0f}" if busy > 0 else f"{'-':>8}"
            mark = "  <- busy loop" if self._neighbour.running and name == self._neighbour.device else ""
            print(f"{label:<26}   {name:<8}{mean:5.0f}  {bar:<24}{rate}  {busy / sum(seconds):5.0%}{mark}", flush=True)
            label = ""
        self._report = report
        self._row_begin = end


def plot(trainer: DataParallel, slow_steps: range, args: argparse.Namespace) -> None:
    figure = trainer.plot()
    if slow_steps:
        for axes in figure.axes:
            axes.axvspan(slow_steps.start + 0.5, slow_steps.stop + 0.5, color="tab:red", alpha=0.12, lw=0)
        figure.axes[0].set_title(f"A busy loop on {args.slow} in the shaded steps, --balance {args.balance}")
    figure.savefig(args.plot, dpi=150)
    print(f"drawn: {args.plot}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--devices", default="auto", help="such as host:0,host:1; default: all GPUs, or all host devices"
    )
    parser.add_argument(
        "--partition", metavar="FRACTIONS", help="of the GPU: its parts as devices of their own, such as 0.75,0.25"
    )
    parser.add_argument(
        "--balance", choices=["auto", "even"], default="auto", help="how a batch is split (default: auto)"
    )
    parser.add_argument("--slow", metavar="DEVICE", help="hold a busy loop on this device's core in the middle third")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw shares, speeds and step times over the steps, as .png, .svg or .pdf",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page of the run, such as run.html")
    parser.add_argument("--batch", type=int, default=512, help="items of a step, over all devices (default: 512)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split into training and test set, and of all else (default: 0)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"how long to train (default: {STEPS})")
    length.add_argument("--epochs", type=int, help="the same, in passes over the training set")
    args = parser.parse_args()
    for name in ("batch", "steps", "epochs"):
        if (getattr(args, name) or 1) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.slow and not hasattr(os, "sched_setaffinity"):
        parser.error("--slow needs a system on which processes can be pinned to cores")
    if args.steps is None and args.epochs is None:
        args.steps = STEPS
    if args.devices != "auto":
        args.devices = args.devices.split(",")
    if args.partition:
        try:
            args.partition = [float(fraction) for fraction in args.partition.split(",")]
        except ValueError:
            parser.error(f"--partition {args.partition}: fractions of the GPU are needed, such as 0.75,0.25")
    return args


if __name__ == "__main__":
    sys.exit(main())
