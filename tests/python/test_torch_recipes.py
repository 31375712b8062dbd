"""The recipes of python/guide, each trained for some steps and compared with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, hosts

pytestmark = pytest.mark.usefixtures("proved")

STEPS = 3


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[int], Any]) -> list[float]:
    """Train for some steps. Returns the losses."""
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step(index)))
        optimizer.step()
    return losses


def assert_same_training(ours: Any, theirs: Any, losses: list[float], wanted: list[float]) -> None:
    """Compare parameters, buffers and losses of two trainings."""
    assert losses == pytest.approx(wanted, rel=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-11, atol=1e-13)


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


class Language(nn.Module):
    """Predicts the next token of each row. The hidden state is [layers, batch, hidden], as PyTorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 10)

    def forward(self, tokens: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        output, state = self.lstm(self.embedding(tokens), state)
        return self.head(output), state


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_hidden_state_that_is_carried_over(count: int) -> None:
    torch.manual_seed(0)
    module = Language().double()
    reference = copy.deepcopy(module)
    text = torch.randint(0, 10, (7, 5 * STEPS + 1))
    chunks = [(text[:, i : i + 5], text[:, i + 1 : i + 6]) for i in range(0, 5 * STEPS, 5)]
    start = (torch.zeros(2, 7, 5).double(), torch.zeros(2, 7, 5).double())

    def loss_of(module: Any, tokens: torch.Tensor, following: torch.Tensor, state: Any) -> Any:
        logits, state = module(tokens, state)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten()), state

    there = torch.optim.SGD(reference.parameters(), lr=0.5)
    state_there: Any = start

    def one_device(index: int) -> Any:
        nonlocal state_there
        loss, state_there = loss_of(reference, *chunks[index], state_there)
        state_there = tuple(part.detach() for part in state_there)
        loss.backward()
        return loss

    wanted = trained(reference, there, one_device)

    def loss_fn(replica: Any, batch: Any) -> Any:
        tokens, following, state = batch
        loss, state = loss_of(replica, tokens, following, state)
        return loss, [part.transpose(0, 1) for part in state]  # extras have the item first

    with DataParallel(module, hosts(count)) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.5)
        state: Any = start

        def step(index: int) -> Any:
            nonlocal state
            loss = trainer.step(loss_fn, (*chunks[index], state), batch_dim=(0, 0, 1))
            state = [part.transpose(0, 1) for part in trainer.extras]
            return loss

        losses = trained(module, optimizer, step)
    assert_same_training([*tensors(module), *state], [*tensors(reference), *state_there], losses, wanted)


def test_lbfgs_with_a_closure() -> None:
    module, batch = classifier(24)
    reference = copy.deepcopy(module)

    def optimized(module: nn.Module, step: Callable[[], Any]) -> list[float]:
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> Any:
            optimizer.zero_grad()
            return step()

        return [float(optimizer.step(closure)) for _ in range(STEPS)]

    def one_device() -> Any:
        loss = classify(reference, batch)
        loss.backward()
        return loss.detach()

    wanted = optimized(reference, one_device)
    with DataParallel(module, TWO) as trainer:
        losses = optimized(module, lambda: trainer.step(classify, batch))
    assert losses == pytest.approx(wanted, rel=1e-9)  # line searches multiply the differences of sums
    assert losses[-1] < 0.9 * losses[0]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def evidence_bound(module: Any, batch: Any) -> Any:
    """The sum over items that papers and examples train a VAE on."""
    output, mean, log_variance = module(*batch)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return F.mse_loss(output, batch[0], reduction="sum") + divergence


def test_check_names_total_to_whoever_trains_on_a_sum() -> None:
    torch.manual_seed(0)
    module = Autoencoder().double()
    batch = (torch.randn(10, 6).double(), torch.randn(10, 2).double())
    with DataParallel(module, TWO) as trainer:
        (cause,) = trainer.check(evidence_bound, batch).causes
        assert cause.kind == "reduction"
        assert 'reduction="sum"' in cause.text
        assert "total=1" in cause.text
        assert trainer.check(evidence_bound, batch).notes == ()
    with DataParallel(module, TWO, reduction="sum") as trainer:
        report = trainer.check(evidence_bound, batch)
        assert report.exact
        (note,) = report.notes
        assert "divided by the number of items" in note
        assert "total=1" in note
        assert "note: with" in str(report)
        (note,) = trainer.check(evidence_bound, batch, weight=torch.arange(10) + 1.0).notes
        assert "divided by the sum of the weights" in note
        assert trainer.check(evidence_bound, batch, total=1).notes == ()
        assert trainer.check(evidence_bound, batch, total=10).notes == ()
