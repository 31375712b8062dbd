"""Random pipelines, each compared with plain accumulation of the same micro-batches on one device.

python tests/python/pipeline_cases.py 1000      # rounds
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.torch import Pipeline
from paceline.torch._pipeline.measure import Measured
from paceline.torch._pipeline.planner import Planner

WORDS = 40


def steady(patch: pytest.MonkeyPatch) -> None:
    """All blocks take the same on all devices from now on, as far as plans know: no noise decides which plan is made."""
    measured: Any = Measured.samples
    note = Planner.note

    def samples(step: Measured) -> list[tuple[int, int, bool, int, float]]:
        return [(block, on, back, n, 1e-4 * n * (1 + back)) for block, on, back, n, _ in measured.fget(step)]

    patch.setattr(Measured, "samples", property(samples))
    patch.setattr(Planner, "note", lambda planner, plan, record, evidence: note(planner, plan, record, evidence=False))


class Layer(nn.Module):
    """A layer of a transformer that takes a mask and rotary values as keyword arguments."""

    def __init__(self, width: int, *, checkpointed: bool, norm: str) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            result: torch.Tensor = checkpoint(self._forward, x, mask, rotary, use_reentrant=False)
            return result
        return self._forward(x, mask, rotary)

    def _forward(self, x: torch.Tensor, mask: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x.flatten(0, 1)).view_as(x)
        q, k, v = self.attention(normal).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q + rotary, k + rotary, v, attn_mask=mask)
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return hidden


class Text(nn.Module):
    """A small language model: tied head, a long skip by closure, a mask and rotary values that all layers share."""

    def __init__(self, layers: int, width: int, *, tied: bool, skip: bool, checkpointed: bool, norm: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, checkpointed=checkpointed, norm=norm) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.skip = skip
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=words.device).tril()
        rotary = torch.linspace(0, 1, self.last.normalized_shape[0], device=words.device)
        x = self.embedding(words)
        early = x
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask, rotary=rotary)
            if index == 0:
                early = x * 0.5
        if self.skip:
            x = x + early
        logits: torch.Tensor = self.head(self.last(x))
        return logits


@dataclass
class Case:
    """One random pipeline."""

    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    devices: int
    options: dict[str, Any]
    weighted: bool

    @property
    def weight(self) -> torch.Tensor | None:
        """How many words count in each item."""
        return (self.batch[1] >= 0).sum(1) if self.weighted else None

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss of a slice: over items, or over words."""
        words, targets = batch
        losses = functional.cross_entropy(
            model(words).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        )
        counted = (targets >= 0).sum()
        loss: torch.Tensor = losses.sum() / (counted if self.weighted else targets.numel())
        return loss


@dataclass
class ModelCase(Case):
    """A pipeline of a model with a loss of its own."""

    loss: Callable[[Any, Any], Any]

    def loss_fn(self, model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.loss(model, batch)
        return result


def differences_with(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: tuple[torch.Tensor, ...], steps: int = 4, **options: Any
) -> list[str]:
    """As `differences`, of a model in two stages and four micro-batches. The first three steps measure, with one micro-batch at a time."""
    options = {"cuts": [0, 2], "micro_batches": 4, "schedule": "1f1b", **options}
    return differences_of(ModelCase(model, batch, 2, options, False, loss), steps)


def random_case(seed: int, most: int = 3) -> Case:
    """The case of a seed, on at most so many devices."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers = rng.randint(2, 6)
    # A checkpointed batch normalisation updates its statistics again in the backward, whose place among forwards is the schedule's.
    norm, checkpointed = rng.choice([("batch", False), *[("layer", False)] * 3, *[("layer", True)] * 2])
    model = Text(
        layers,
        rng.choice([8, 12]),
        tied=rng.random() < 0.5,
        skip=rng.random() < 0.5,
        checkpointed=checkpointed,
        norm=norm,
    )
    if rng.random() < 0.2:
        for parameter in model.layers[0].parameters():
            parameter.requires_grad_(False)
    if rng.random() < 0.1:
        model.embedding.weight.requires_grad_(False)
    devices = rng.randint(1, min(most, layers))
    items = rng.randint(1, 13)
    words = torch.randint(0, WORDS, (items, 5))
    targets = torch.randint(0, WORDS, (items, 5))
    weighted = rng.random() < 0.4
    if weighted:
        targets[torch.rand(items, 5) < 0.3] = -1
        targets[0, 0] = 1
    stages = rng.randint(1, devices)
    options: dict[str, Any] = {
        "micro_batches": rng.randint(1, items),
        "schedule": rng.choice(["gpipe", "1f1b", "auto"]),
    }
    if rng.random() < 0.7:
        options["cuts"] = [0, *sorted(rng.sample(range(1, layers), stages - 1))]
    return Case(model, (words, targets), devices, options, weighted)


def accumulated(case: Case, model: nn.Module, sizes: list[int]) -> torch.Tensor:
    """Plain accumulation of these micro-batches, in order, on one device. Returns the objective."""
    weight = case.weight
    whole = float(len(case.batch[0]) if weight is None else weight.sum())
    begin, terms = 0, []
    for size in sizes:
        end = begin + size
        part = tuple(tensor[begin:end] for tensor in case.batch)
        share = size if weight is None else int(weight[begin:end].sum())
        begin = end
        if share:
            term = case.loss_fn(model, part) * (share / whole)
            term.backward()
            terms.append(term.detach())
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def differences(seed: int, steps: int = 5) -> list[str]:
    """The names of what is not equal to the last bit in some step, where plans may change between steps."""
    return differences_of(random_case(seed), steps)


def differences_of(case: Case, steps: int = 5) -> list[str]:
    """As `differences`, of a case."""
    plain = copy.deepcopy(case.model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    names = [f"host:{index}" for index in range(case.devices)]
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for one in (case.model, plain)
    ]
    try:
        with Pipeline(case.model, devices=names, **case.options) as trainer:
            for step in range(steps):
                if step == steps - 1 and len(names) > 1 and "cuts" not in case.options:
                    trainer.retire(names[len(case.batch[0]) % len(names)])  # blocks move to the others
                loss = trainer.step(case.loss_fn, case.batch, weight=case.weight)
                wanted = accumulated(case, plain, trainer.report()["micro_batches"])
                if not torch.equal(loss, wanted):
                    found.append(f"step {step}: loss {loss.item()} and {wanted.item()}")
                pairs: list[tuple[str, Any, Any]] = [
                    (name, one.grad, other.grad)
                    for (name, one), other in zip(case.model.named_parameters(), plain.parameters(), strict=True)
                ]
                buffers = zip(case.model.named_buffers(), plain.buffers(), strict=True)
                pairs += [(name, one, other) for (name, one), other in buffers]
                for name, one, other in pairs:
                    if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                        found.append(f"step {step}: {name}")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return found


def main(rounds: int, report: Callable[[str], object] = print) -> int:
    """Run so many rounds. Returns how many had differences."""
    bad = 0
    for seed in range(rounds):
        found = differences(seed)
        if found:
            bad += 1
            report(f"seed {seed}: {', '.join(found[:5])}")
    report(f"{rounds - bad} of {rounds} pipelines equal plain accumulation bit for bit")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 100) else 0)
