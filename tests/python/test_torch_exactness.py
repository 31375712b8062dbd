"""Random modules under random splits: the gradients are those of one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import TOLERANCE, LossFunction, assert_same_gradients, gradients, hosts, plain, worst_difference

pytestmark = pytest.mark.usefixtures("proved")

F = nn.functional
Make = Callable[[int, torch.dtype], tuple[nn.Module, Any, LossFunction]]


def cross_entropy(module: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(module(batch[0]), batch[1])


def labels(items: int) -> torch.Tensor:
    return torch.randint(0, 3, (items,))


def make_linear(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    module = nn.Sequential(nn.Linear(5, 17), nn.GELU(), nn.Linear(17, 3, bias=False))
    return module, (torch.randn(items, 5, dtype=dtype), labels(items)), cross_entropy


def make_convolution(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    module = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    return module, (torch.randn(items, 2, 8, 8, dtype=dtype), labels(items)), cross_entropy


def make_channels_last(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    """The gradients of such weights are not contiguous."""
    module, batch, loss_fn = make_convolution(items, dtype)
    return module.to(memory_format=torch.channels_last), batch, loss_fn  # type: ignore[call-overload]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        return self.head((x + self.attention(y, y, y, need_weights=False)[0]).mean(1))


def make_attention(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    return Attention(), (torch.randn(items, 7, 12, dtype=dtype), labels(items)), cross_entropy


class Recurrent(nn.Module):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.cell = cell(6, 9, batch_first=True)
        self.head = nn.Linear(9, 3)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.cell(self.embedding(tokens))[0][:, -1])


def make_lstm(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    return Recurrent(nn.LSTM), (torch.randint(0, 11, (items, 5)), labels(items)), cross_entropy


def make_rnn(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    return Recurrent(nn.RNN), (torch.randint(0, 11, (items, 5)), labels(items)), cross_entropy


class Tied(nn.Module):
    """A language model whose input and output share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.mix = nn.Linear(8, 8)
        self.output = nn.Linear(8, 13, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.output(self.mix(self.embedding(tokens)).tanh())


def make_tied(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    tokens = torch.randint(0, 13, (items, 6))
    return Tied(), tokens, lambda module, t: F.cross_entropy(module(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())


def make_frozen(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    module, batch, loss_fn = make_linear(items, dtype)
    next(module.parameters()).requires_grad_(False)
    return module, batch, loss_fn


class Branches(nn.Module):
    """A branch that only some items take, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 3)
        self.branch = nn.Linear(5, 3)
        self.never = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.trunk(x)
        taken = x[:, 0] > 0.8
        return y.index_add(0, taken.nonzero()[:, 0], self.branch(x[taken])) if taken.any() else y


def make_partly_used(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    return Branches(), (torch.randn(items, 5, dtype=dtype), labels(items)), cross_entropy


class Positions(nn.Module):
    """Where a slice has one item nothing is broadcast, and autograd gives the two embeddings views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.positions = nn.Parameter(torch.randn(5, 6))
        self.segments = nn.Parameter(torch.randn(5, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.tokens(x) + self.positions.unsqueeze(0) + self.segments.unsqueeze(0)).mean(1))


def make_positions(items: int, dtype: torch.dtype) -> tuple[nn.Module, Any, LossFunction]:
    return Positions(), (torch.randint(0, 7, (items, 5)), labels(items)), cross_entropy


MAKERS: dict[str, Make] = {
    "linear": make_linear,
    "convolution": make_convolution,
    "channels_last": make_channels_last,
    "attention": make_attention,
    "lstm": make_lstm,
    "rnn": make_rnn,
    "tied": make_tied,
    "frozen": make_frozen,
    "partly_used": make_partly_used,
    "positions": make_positions,
}


@dataclass
class Setting:
    devices: list[str]
    balance: Any
    micro_batch: int | None


def random_setting(rng: random.Random, items: int) -> Setting:
    count = rng.randint(1, 4)
    ratios = [rng.choice([0.0, 1.0, rng.uniform(0.1, 5)]) for _ in range(count)]
    ratios[rng.randrange(count)] += 1.0
    return Setting(hosts(count), rng.choice(["auto", "even", ratios, ratios]), rng.choice([None, 1, 3, items]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", MAKERS)
def test_gradients_of_two_accumulated_batches_are_those_of_one_device(kind: str, dtype: torch.dtype) -> None:
    for seed in range(8):
        rng = random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        items = rng.randint(4, 24)
        module, batch, loss_fn = MAKERS[kind](items, dtype)
        module.to(dtype)
        _, second_batch, _ = MAKERS[kind](items, dtype)
        setting = random_setting(rng, items)

        reference = copy.deepcopy(module)
        losses = [loss_fn(reference, each) for each in (batch, second_batch)]
        losses[0].backward()
        after_one = gradients(reference)
        losses[1].backward()
        with DataParallel(module, setting.devices, balance=setting.balance, micro_batch=setting.micro_batch) as trainer:
            loss = trainer.step(loss_fn, batch)
            assert_same_gradients(module, after_one, dtype)
            assert loss.item() == pytest.approx(losses[0].item(), rel=TOLERANCE[dtype])
            trainer.step(loss_fn, second_batch)
        assert_same_gradients(module, gradients(reference), dtype)


class SumOfTwo(nn.Module):
    """Both parameters get the same gradient, and autograd gives both the same memory, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        return x @ (self.a.view(2, 2) + self.b.view(2, 2))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_gradients_in_one_memory_are_told_apart(devices: int, micro_batch: int | None) -> None:
    torch.manual_seed(0)
    module, batch = SumOfTwo().double(), torch.randn(9, 2, dtype=torch.double)

    def loss_fn(replica: nn.Module, part: torch.Tensor) -> Any:
        return replica(part).square().mean()

    _, wanted = plain(module, loss_fn, batch)
    with DataParallel(module, hosts(devices), micro_batch=micro_batch) as trainer:
        trainer.step(loss_fn, batch)
        assert_same_gradients(module, wanted)
        trainer.step(loss_fn, batch)
    assert_same_gradients(module, [None if gradient is None else 2 * gradient for gradient in wanted])


@dataclass
class Tokens:
    x: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_gradients_weighted_by_tokens_are_those_of_the_mean_over_all_tokens(dtype: torch.dtype) -> None:
    def masked_mean(module: nn.Module, batch: Tokens) -> Any:
        per_token = F.cross_entropy(module(batch.x).transpose(1, 2), batch.targets, reduction="none")
        return (per_token * batch.mask).sum() / batch.mask.sum()

    for seed in range(25):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        items = rng.randint(2, 20)
        lengths = torch.tensor([rng.choice([0, rng.randint(1, 9)]) for _ in range(items)])
        lengths[rng.randrange(items)] = 5
        batch = Tokens(
            torch.randn(items, 9, 4, dtype=dtype),
            torch.randint(0, 3, (items, 9)),
            (torch.arange(9) < lengths[:, None]).to(dtype),
        )
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
        setting = random_setting(rng, items)
        loss, wanted = plain(module, masked_mean, batch)
        with DataParallel(module, setting.devices, balance=setting.balance, micro_batch=setting.micro_batch) as trainer:
            ours = trainer.step(masked_mean, batch, weight=lengths if seed % 2 else lambda whole: whole.mask.sum(1))
        assert_same_gradients(module, wanted, dtype)
        assert ours.item() == pytest.approx(loss.item(), rel=TOLERANCE[dtype])


def test_a_mean_of_means_would_be_noticed() -> None:
    """The check of this file, checked: shares of 15 and 1 item averaged with equal weights are far off."""
    torch.manual_seed(0)
    module, batch, loss_fn = make_linear(16, torch.float64)
    module.double()
    _, wanted = plain(module, loss_fn, batch)
    parts = [plain(module, loss_fn, (batch[0][part], batch[1][part]))[1] for part in (slice(15), slice(15, 16))]
    means = [(a + b) / 2 for a, b in zip(*parts, strict=True) if a is not None and b is not None]
    assert worst_difference(means, wanted) > 0.1
