"""Train two networks against each other on scikit-learn's handwritten digits, on all devices of this machine.

A generator learns to draw digits, and a critic learns to tell them from real ones (a GAN). Each network has its own optimizer. Each step
runs the batch twice, once for the critic and once for the generator. `DataParallel.step` supports one loss and one backward. Here
`DataParallel.batch` leaves loss and backward to the functions below, and does the split, the weights and the reduction.

    python two_optimizers.py                          all devices; about 10 seconds on two cores
    python two_optimizers.py --plot digits.png        also draws what the generator has learnt
    python two_optimizers.py --steps 20 --verify      compares the first gradients with those of one device
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from paceline.torch import DataParallel, MicroBatch

STEPS = 300
NOISE = 16  # the number of random inputs for a digit
SLOPE = 1.0  # weight of the penalty on steep slopes (R1); without it such a pair does not converge
GOAL = 0.8  # fraction of the way from an untrained generator's mean pixels to the real ones; this generator goes 90 %
F = nn.functional


def networks() -> nn.ModuleDict:
    """Both networks as parts of one module, because each device runs a copy of one module."""
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.Sigmoid()
    )
    critic = nn.Sequential(
        nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    return nn.ModuleDict({"generator": generator, "critic": critic})


def criticise(networks: Any, micro_batch: MicroBatch) -> None:
    """The critic's step: real digits should score high and drawn digits low, with a flat score around real digits."""
    real, noise = micro_batch.data
    with torch.no_grad():
        drawn = networks["generator"](noise)
    real = real.detach().requires_grad_()
    score = networks["critic"](real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    # One loss per item (their mean works as well) and two backward passes: the sum of both losses counts.
    micro_batch.backward(F.softplus(-score).squeeze(1) + SLOPE * slope.square().sum(1))
    micro_batch.backward(F.softplus(networks["critic"](drawn)).mean())


def draw(networks: Any, micro_batch: MicroBatch) -> None:
    """The generator's step: its digits should score high."""
    _, noise = micro_batch.data
    micro_batch.backward(F.softplus(-networks["critic"](networks["generator"](noise))).mean())


def batches(images: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Real digits and noise. The noise is drawn here, so that it is the same for every split."""
    while True:
        yield images[torch.randint(len(images), (size,))], torch.randn(size, NOISE)


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    images = torch.tensor(load_digits().data, dtype=torch.float32).div(16)
    both = networks()
    generator, critic = both["generator"], both["critic"]
    before = distance(generator, images)

    with DataParallel(both, args.devices) as trainer:
        generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
        critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
        for step, batch in zip(range(args.steps), batches(images, args.batch), strict=False):
            if args.verify and step == 0 and not verified(trainer, both, batch):
                return 1
            with trainer.batch(batch) as global_batch:
                critic_loss = global_batch.run(criticise, parameters=critic)
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                generator_loss = global_batch.run(draw, parameters=generator)
                generator_optimizer.step()
                generator_optimizer.zero_grad()
            if (step + 1) % max(1, args.steps // 8) == 0:
                print(
                    f"step {step + 1:>4}  critic {critic_loss:.3f}  generator {generator_loss:.3f}  shares {trainer.shares}"
                )
        print()
        print(trainer.explain())

    after = distance(generator, images)
    print(f"mean pixels: {before:.3f} away from the real ones before, {after:.3f} after")
    if args.plot:
        plot(generator, args.plot)
    if args.steps >= STEPS and after > (1 - GOAL) * before:
        print(f"that leaves more than the {1 - GOAL:.0%} of the way that these networks leave", file=sys.stderr)
        return 1
    return 0


def verified(trainer: DataParallel, both: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the critic's gradients equal those of one device, computed here by plain PyTorch."""
    alone = copy.deepcopy(both)
    real, noise = batch
    drawn = alone["generator"](noise).detach()  # type: ignore[index]
    critic = alone["critic"]  # type: ignore[index]
    real = real.clone().requires_grad_()
    score = critic(real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    penalty = SLOPE * slope.square().sum(1).mean()
    (F.softplus(-score).mean() + penalty + F.softplus(critic(drawn)).mean()).backward()
    with trainer.batch(batch) as global_batch:
        global_batch.run(criticise, parameters=both["critic"])  # type: ignore[index]
    pairs = zip(both["critic"].parameters(), critic.parameters(), strict=True)  # type: ignore[index]
    worst = max(float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) for ours, theirs in pairs)
    both.zero_grad()
    print(f"largest relative difference from the gradients of one device: {worst:.1e}")
    return worst < 1e-4


def distance(generator: nn.Module, images: torch.Tensor) -> float:
    """The distance between the mean of the drawn images and the mean of the real images, pixel by pixel."""
    with torch.no_grad():
        drawn = generator(torch.randn(512, NOISE, generator=torch.Generator().manual_seed(1)))
    return float((drawn.mean(0) - images.mean(0)).norm())


def plot(generator: nn.Module, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with torch.no_grad():
        drawn = generator(torch.randn(32, NOISE)).view(4, 8, 8, 8).permute(0, 2, 1, 3).reshape(32, 64)
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.imshow(drawn, cmap="gray_r", vmin=0, vmax=1)
    axes.set_axis_off()
    figure.savefig(path, dpi=150)
    print(f"drawn: {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="auto", help="such as host:0,host:1; default: all host devices")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"how long to train (default: {STEPS})")
    parser.add_argument("--batch", type=int, default=256, help="items of a step, over all devices (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--verify", action="store_true", help="compare gradients with those of one device first")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw 32 digits, as .png, .svg or .pdf")
    args = parser.parse_args()
    if args.steps < 1 or args.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    if args.devices != "auto":
        args.devices = args.devices.split(",")
    return args


if __name__ == "__main__":
    sys.exit(main())
