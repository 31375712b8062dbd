"""Pipelines whose stages are on GPUs: sets of devices, models, and plain accumulation on a fake device as the reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import fake_device
from paceline.torch import Pipeline
from pipeline_cases import Case, Text, accumulated

BOXES = {
    "one": ["cuda:0"],
    "two": ["cuda:0", "cuda:1"],
    "three": ["cuda:2", "cuda:0", "cuda:1"],
    "host last": ["cuda:0", "host:0"],
    "host first": ["host:0", "cuda:1"],
    "host between": ["cuda:0", "host:0", "cuda:1"],
    "host around": ["host:0", "cuda:0", "host:1"],
}


def text(layers: int = 4, width: int = 8, **options: Any) -> Text:
    torch.manual_seed(0)
    return Text(layers, width, **{"tied": False, "skip": False, "checkpointed": False, "norm": "layer", **options})


def words(items: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 40, (items, 5)), torch.randint(0, 40, (items, 5))


def differences(case: Case, devices: list[str], steps: int = 5, retired: str | None = None) -> list[str]:
    """The names of what is not equal to the last bit to plain accumulation on one device: a GPU, if there is one."""
    alone = torch.device("cpu") if all(map(is_host, devices)) else fake_device.device(7)
    plain = copy.deepcopy(case.model).to(alone)
    there = copy.copy(case)
    there.batch = tuple(one.to(alone) for one in case.batch)
    found: list[str] = []
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (case.model, plain)
    ]
    with Pipeline(case.model, devices=devices, **case.options) as trainer:
        for step in range(steps):
            if step == steps - 1 and retired is not None:
                trainer.retire(retired)
            loss = trainer.step(case.loss_fn, case.batch, weight=case.weight)
            wanted = accumulated(there, plain, trainer.report()["micro_batches"])
            if not torch.equal(loss.cpu(), wanted.cpu()):
                found.append(f"step {step}: loss {loss.item()} and {wanted.item()}")
            found += [f"step {step}: {name}" for name in different(case.model, plain)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one in (case.model, plain):
            one.eval()
        outputs = trainer.predict(case.batch[0])
        if not torch.allclose(outputs, plain(there.batch[0]).detach().cpu(), atol=1e-5):
            found.append("predict")
        found += [f"after: {name}" for name in different(case.model, plain)]
    assert {one.device.type for one in (*case.model.parameters(), *case.model.buffers())} == {"cpu"}, "back at home"
    case.loss_fn(case.model, case.batch).backward()
    optimizers[0].step()  # its state is at home, too
    return found


def is_host(name: str) -> bool:
    return name.startswith("host")


def different(model: nn.Module, plain: nn.Module) -> list[str]:
    pairs: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = [
        (name, one, other, one.grad, other.grad)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
    ]
    buffers = zip(model.named_buffers(), plain.buffers(), strict=True)
    pairs += [(name, one, other, None, None) for (name, one), other in buffers]
    return [
        name
        for name, one, other, gradient, wanted in pairs
        if not torch.equal(one.cpu(), other.cpu())
        or (gradient is None) != (wanted is None)
        or (gradient is not None and wanted is not None and not torch.equal(gradient.cpu(), wanted.cpu()))
    ]


class Conditioned(nn.Linear):
    """A block that uses what all blocks get more than once."""

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * start + x) * start + start


class Bridge(nn.Module):
    """A model with parts between its blocks, norms that are called in several stages, and tensors that cross by closure.

    Each stage uses `scale`, `start` and the norms more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.between, self.behind = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.first = nn.ModuleList(Conditioned(8, 8) for _ in range(2))
        self.last = nn.ModuleList(Conditioned(8, 8) for _ in range(4))
        self.last[3].weight = self.last[0].weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * self.scale)
        start = x
        for block in self.first:
            x = self.norm(block(x, start) + start).relu() + start
        x = self.between(x) + self.scale
        for block in self.last:
            x = self.norm(block(x * self.scale, start)) + x * start - start
        loss: torch.Tensor = (self.behind(self.norm(self.behind(x))) + start - targets).square().mean()
        return loss


def bridge_differences(model: Bridge, devices: list[str], plain: Bridge | None = None) -> list[str]:
    """As `differences`, of a bridge."""
    alone = fake_device.device(7)
    plain = (copy.deepcopy(model) if plain is None else plain).to(alone)
    batch = torch.randn(12, 8), torch.randn(12, 8)
    there = tuple(one.to(alone) for one in batch)

    def loss_fn(one: nn.Module, part: Any) -> torch.Tensor:
        loss: torch.Tensor = one(*part)
        return loss

    found: list[str] = []
    blocks = [*model.first, *model.last]
    with Pipeline(model, devices=devices, blocks=blocks, cuts=[0, 1, 4][: len(devices)], micro_batches=3) as trainer:
        for step in range(5):
            model.zero_grad()
            plain.zero_grad()
            loss = trainer.step(loss_fn, batch)
            wanted = [loss_fn(plain, [one[k : k + 4] for one in there]) * (4 / 12) for k in (0, 4, 8)]
            for one in wanted:
                one.backward()
            if not torch.equal(loss.cpu(), torch.stack(wanted).sum().detach().cpu()):
                found.append(f"step {step}: loss")
            found += [f"step {step}: {name}" for name in different(model, plain)]
    return found
