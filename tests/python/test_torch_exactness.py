"""Random modules under random splits have the gradients of one device; and what a step does to ``.grad``: set, add, or leave alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    DEVICES,
    TOLERANCE,
    TWO,
    LossFunction,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    plain,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("proved")


F = nn.functional


def labels(items: int) -> torch.Tensor:
    return torch.randint(0, 3, (items,))


def make_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 17), nn.GELU(), nn.Linear(17, 3, bias=False))


def make_convolution() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def attend(m: Any, x: torch.Tensor) -> Any:
    y = m.norm(x)
    return m.head((x + m.attention(y, y, y, need_weights=False)[0]).mean(1))


def recurrent(cell: Any) -> Any:
    parts = {"embedding": nn.Embedding(11, 6, padding_idx=0), "cell": cell(6, 9, batch_first=True)}
    return module_of(lambda m, x: m.head(m.cell(m.embedding(x))[0][:, -1]), head=nn.Linear(9, 3), **parts)


def tied() -> nn.Module:
    """A language model whose input and output share one matrix."""
    module = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 13, bias=False))
    module[3].weight = module[0].weight
    return module


def branch(m: Any, x: torch.Tensor) -> Any:
    """A branch that only some items take, and one that none does."""
    y, taken = m.trunk(x), x[:, 0] > 0.8
    return y.index_add(0, taken.nonzero()[:, 0], m.branch(x[taken])) if taken.any() else y


def add_positions(m: Any, x: torch.Tensor) -> Any:
    """Where a slice has one item nothing is broadcast, and autograd gives the two embeddings views of one gradient."""
    return m.out(torch.tanh(m.tokens(x) + m.positions.unsqueeze(0) + m.segments.unsqueeze(0)).mean(1))


def with_positions() -> Any:
    positions, segments = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
    parts = {"tokens": nn.Embedding(7, 6), "out": nn.Linear(6, 3)}
    return module_of(add_positions, positions=positions, segments=segments, **parts)


def make_frozen() -> nn.Module:
    module = make_linear()
    next(module.parameters()).requires_grad_(False)
    return module


def rows(items: int) -> torch.Tensor:
    return torch.randn(items, 5)


def images(items: int) -> torch.Tensor:
    return torch.randn(items, 2, 8, 8)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "linear": (make_linear, rows),
    "convolution": (make_convolution, images),
    # The gradients of such weights are not contiguous.
    "channels_last": (lambda: make_convolution().to(memory_format=torch.channels_last), images),  # type: ignore[call-overload]
    "attention": (
        lambda: module_of(
            attend,
            norm=nn.LayerNorm(12),
            attention=nn.MultiheadAttention(12, 3, batch_first=True),
            head=nn.Linear(12, 3),
        ),
        lambda items: torch.randn(items, 7, 12),
    ),
    "lstm": (lambda: recurrent(nn.LSTM), lambda items: torch.randint(0, 11, (items, 5))),
    "rnn": (lambda: recurrent(nn.RNN), lambda items: torch.randint(0, 11, (items, 5))),
    "tied": (tied, lambda items: torch.randint(0, 13, (items, 6))),
    "frozen": (make_frozen, rows),
    "partly_used": (
        lambda: module_of(branch, **{name: nn.Linear(5, 3) for name in ("trunk", "branch", "never")}),
        rows,
    ),
    "positions": (with_positions, lambda items: torch.randint(0, 7, (items, 5))),
}


def random_trainer(module: nn.Module, rng: random.Random, items: int) -> DataParallel:
    count = rng.randint(1, 4)
    ratios = [rng.choice([0.0, 1.0, rng.uniform(0.1, 5)]) for _ in range(count)]
    ratios[rng.randrange(count)] += 1.0
    balance: Any = rng.choice(["auto", "even", ratios, ratios])
    return DataParallel(module, hosts(count), balance=balance, micro_batch=rng.choice([None, 1, 3, items]))


def next_token(module: nn.Module, tokens: Any) -> Any:
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def made(kind: str, items: int, dtype: torch.dtype) -> tuple[Any, list[Any], LossFunction]:
    """A module, two batches and their loss."""
    make, inputs = KINDS[kind]
    module = make().to(dtype)
    given = [x.to(dtype) if x.is_floating_point() else x for x in (inputs(items), inputs(items))]
    if kind == "tied":
        return module, given, next_token
    return module, [(x, labels(items)) for x in given], classify


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_accumulated_batches_are_those_of_one_device(kind: str, dtype: torch.dtype) -> None:
    for seed in range(8):
        rng = random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        items = rng.randint(4, 24)
        module, batches, loss_fn = made(kind, items, dtype)
        reference = copy.deepcopy(module)
        with random_trainer(module, rng, items) as trainer:
            for batch in batches:
                wanted = loss_fn(reference, batch)
                wanted.backward()
                loss = trainer.step(loss_fn, batch)
                assert_same_gradients(module, gradients(reference), dtype)
                assert loss.item() == pytest.approx(wanted.item(), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_gradients_in_one_memory_are_told_apart(devices: int, micro_batch: int | None) -> None:
    """Both parameters get the same gradient, and autograd gives both the same memory, whatever the batch."""
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.randn(4)) for _ in range(2))
    module = module_of(lambda m, x: x @ (m.a.view(2, 2) + m.b.view(2, 2)), a=a, b=b)
    batch = torch.randn(9, 2, dtype=torch.double)
    assert_exact(module, lambda m, b: m(b).square().mean(), batch, devices, steps=2, micro_batch=micro_batch)


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
        loss, wanted = plain(module, masked_mean, batch)
        with random_trainer(module, rng, items) as trainer:
            ours = trainer.step(masked_mean, batch, weight=lengths if seed % 2 else lambda whole: whole.mask.sum(1))
        assert_same_gradients(module, wanted, dtype)
        assert ours.item() == pytest.approx(loss.item(), rel=TOLERANCE[dtype])


def test_a_mean_of_means_would_be_noticed() -> None:
    """The check of this file, checked: shares of 15 and 1 item averaged with equal weights are far off."""
    torch.manual_seed(0)
    module, x, y = make_linear(), rows(16), labels(16)
    _, wanted = plain(module, classify, (x, y))
    parts = [plain(module, classify, (x[part], y[part]))[1] for part in (slice(15), slice(15, 16))]
    means = [(a + b) / 2 for a, b in zip(*parts, strict=True) if a is not None and b is not None]
    assert worst_difference(means, wanted) > 0.1


def halve(m: Any, x: torch.Tensor, number: torch.Tensor) -> Any:
    """`right` runs only for items whose number is 6 or more."""
    y, late = m.left(x).pow(2).sum(1), number >= 6
    return y + m.right(x).pow(2).sum(1) * late if late.any() else y


def per_item(module: nn.Module, batch: Any) -> Any:
    return module(*batch)


def halves() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    module = module_of(halve, **{name: nn.Linear(4, 2) for name in ("left", "right", "unused")})
    return module, (torch.randn(8, 4, dtype=torch.double), torch.arange(8))


@DEVICES
def test_gradients_that_no_micro_batch_touched_stay_none(devices: int) -> None:
    module, batch = halves()
    _, wanted = plain(module, lambda m, b: per_item(m, b).mean(), batch)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(per_item, batch)
        assert_same_gradients(module, wanted)
        assert gradients(module)[4:] == [None, None]
        module.zero_grad()
        trainer.step(per_item, (batch[0], batch[1] % 6))
        assert [gradient is None for gradient in gradients(module)] == [False, False, True, True, True, True]


@DEVICES
def test_what_no_micro_batch_touched_keeps_its_gradient_and_weight_decay_does_not_move_it(devices: int) -> None:
    module, batch = halves()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with DataParallel(module, hosts(devices)) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        trainer.step(per_item, batch)
        optimizer.step()
        moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
        assert moved == {"left.weight", "left.bias", "right.weight", "right.bias"}
        kept = module.unused.weight.grad = torch.full((2, 4), 7.0, dtype=torch.double)
        trainer.step(per_item, batch)
    assert module.unused.weight.grad is kept
    assert bool((kept == 7).all())


@DEVICES
def test_steps_add_up_until_gradients_are_zeroed(devices: int) -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for count in (1, 2, 3):
            trainer.step(classify, batch)
            assert_same_gradients(module, [count * gradient for gradient in wanted if gradient is not None])
        module.zero_grad(set_to_none=False)
        own = [parameter.grad for parameter in module.parameters()]
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        assert all(a.grad is b for a, b in zip(module.parameters(), own, strict=True)), "gradients were replaced"
        before = gradients(module)
        module.zero_grad()
        trainer.step(classify, (batch[0] * 2, batch[1]))
        assert all(map(torch.equal, own, before)), "they are not the user's own"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128], ids=str)
def test_other_types_of_parameters_are_summed_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.ParameterList([nn.Parameter(torch.randn(5, 3, dtype=dtype))])
    batch = torch.randn(8, 5, dtype=dtype)

    def loss_fn(m: Any, b: torch.Tensor) -> Any:
        return (b @ m[0]).abs().pow(2).sum(1)

    _, wanted = plain(module, lambda m, b: loss_fn(m, b).float().mean(), batch)
    with DataParallel(module, hosts(3), balance=[2, 1, 1]) as trainer:
        trainer.step(loss_fn, batch)
    got, expected = gradients(module)[0], wanted[0]
    assert got is not None
    assert expected is not None
    assert got.dtype == dtype
    tolerance = 1e-12 if dtype == torch.complex128 else 2e-2
    assert float((got - expected).abs().max() / expected.abs().max()) < tolerance


def test_sparse_gradients_are_refused_by_name_on_several_devices_and_work_on_one() -> None:
    module, batch = nn.EmbeddingBag(10, 3, sparse=True, dtype=torch.float64), torch.arange(8).reshape(4, 2)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=r"weight is sparse.*sparse=False"):
            trainer.step(lambda m, b: m(b).square().sum(1), batch)
        assert gradients(module) == [None]
    _, (wanted,) = plain(module, lambda m, b: m(b).square().sum(1).mean(), batch)
    with DataParallel(module, ["host:0"]) as trainer:
        for call in (trainer.step, trainer.loss):  # which add up
            loss = call(lambda m, b: m(b).square().sum(1), batch)
            if call == trainer.loss:
                (2 * loss).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_sparse
    assert wanted is not None
    torch.testing.assert_close(module.weight.grad.to_dense(), 3 * wanted.to_dense())
