"""Shared by the tests of `Pipeline`: a small GPT, batches for it, a pipeline of two stages, and comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.torch import Pipeline
from torch_support import TWO, Gradients, gradients

WIDTH = 8
Batch = tuple[torch.Tensor, ...]


class Block(nn.Module):
    """A residual block of a transformer that takes x only, and may checkpoint itself."""

    def __init__(self, *, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed else self._forward(x)
        )
        return result

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return hidden


class NanoGpt(nn.Module):
    """Tied embedding and head, blocks in a ModuleList of a ModuleDict, loss inside of the forward: as nanoGPT is written."""

    def __init__(self, layers: int = 4, **options: Any) -> None:
        super().__init__()
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(20, WIDTH),
                "wpe": nn.Embedding(6, WIDTH),
                "h": nn.ModuleList(Block(**options) for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, 20, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_inside(model: Any, batch: Any) -> Any:
    return model(*batch)[1]


def text(items: int = 9) -> Batch:
    words = torch.randint(0, 20, (items, 6), generator=torch.Generator().manual_seed(items))
    return words, words.roll(-1, 1)


def vectors(items: int = 9, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(items)
    return torch.randn(items, *(shape or (WIDTH,)), generator=generator), torch.arange(items) % 3


def sequential() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def chain(blocks: int = 4, width: int = 4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))


def squares(module: Any, batch: Any) -> Any:
    return module(batch).square().mean()


def two_stages(model: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(model, TWO, **{"cuts": [0, 2], "micro_batches": 4, "schedule": "1f1b", **options})


def assert_equal(got: nn.Module, wanted: nn.Module) -> None:
    """Gradients and buffers, to the last bit."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, one.grad, other.grad)
        for (name, one), other in zip(got.named_parameters(), wanted.parameters(), strict=True)
    ]
    pairs += [(name, one, other) for (name, one), other in zip(got.named_buffers(), wanted.buffers(), strict=True)]
    assert any(one is not None for _, one, _ in pairs)
    different = [
        name
        for name, one, other in pairs
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other))
    ]
    assert different == []


def slices(batch: Batch, sizes: list[int]) -> list[Batch]:
    return list(zip(*(tensor.split(sizes) for tensor in batch), strict=True))


def accumulate(plain: nn.Module, loss_fn: Any, batch: Any, trainer: Pipeline) -> Gradients:
    """The gradients after plain accumulation of the micro-batches that the trainer's last step had."""
    sizes = trainer.report()["micro_batches"]
    parts: Any = batch.split(sizes) if isinstance(batch, torch.Tensor) else slices(batch, sizes)
    for part, size in zip(parts, sizes, strict=True):
        (loss_fn(plain, part) * (size / sum(sizes))).backward()
    return gradients(plain)


def same(got: Any, wanted: Any) -> bool:
    """Whether gradients are equal to the last bit, and there are some."""
    pairs = list(zip(got, wanted, strict=True))
    return any(one is not None for one in got) and all(
        one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs
    )
