"""The size of micro-batches that is found while training."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain


class Slow(nn.Module):
    """Takes longer for an item where there are many of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.ran: list[int] = []
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> Any:
        self.ran.append(len(x))
        time.sleep(len(x) * (4e-4 if len(x) > self.most else 1e-4))
        return (x * self.scale).sum(1).tanh()


def loss_of_slow(module: Any, batch: torch.Tensor) -> Any:
    return module(batch).mean()


@pytest.mark.alone
@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_finds_it_and_stays_exact(devices: int) -> None:
    module, batch = Slow(128), torch.rand(300 * devices, 3, dtype=torch.double)
    _, wanted = plain(module, loss_of_slow, batch)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(16):
            module.zero_grad()
            trainer.step(loss_of_slow, batch)
            assert_same_gradients(module, wanted)
        assert re.search(r"Micro-batches of about (75|38|19) items: measured to be \d\.\d\d times", trainer.explain())
        assert trainer.shares == {f"host:{device}": 300 for device in range(devices)}
        ran = trainer.report()["sizes"]["host:0"]
        assert {300, 150, 75} <= set(ran)
        assert len(ran) <= 7


def test_claims_of_a_search_run_again_to_the_same_bit(tmp_path: Any) -> None:
    module, batch = Slow(128), torch.rand(600, 3, dtype=torch.double)
    path = tmp_path / "ledger.jsonl"
    first = []
    with DataParallel(module, TWO) as trainer:
        trainer.write_ledger(path)
        for _ in range(14):
            module.zero_grad()
            trainer.step(loss_of_slow, batch)
            first.append(gradients(module))
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.replay_claims(path)
        for then in first:
            module.zero_grad()
            trainer.step(loss_of_slow, batch)
            assert all(torch.equal(a, b) for a, b in zip(gradients(module), then, strict=True))  # type: ignore[arg-type]


class Counting(Slow):
    """Keeps count of its micro-batches."""

    count: torch.Tensor

    def __init__(self, assign: bool) -> None:
        super().__init__(128)
        self.assign = assign
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.assign:
            self.count = self.count + 1
        else:
            self.count += 1
        return super().forward(x)


@pytest.mark.parametrize("assign", [False, True], ids=["written", "assigned"])
@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_is_searched_where_the_forward_writes_a_buffer(devices: int, assign: bool) -> None:
    module, batch = Counting(assign), torch.rand(300 * devices, 3, dtype=torch.double)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(16):
            trainer.step(loss_of_slow, batch)
        assert trainer.report()["sizes"]["host:0"] == [300]
    assert module.count == 16


@pytest.mark.parametrize("options", [{"micro_batch": 300}, {"granularity": 2}, {"hold_back": False}], ids=str)
def test_nothing_is_searched_where_sizes_are_told(options: Any) -> None:
    module, batch = Slow(128), torch.rand(600, 3, dtype=torch.double)
    balance: Any = "auto" if "hold_back" in options else "even"
    with DataParallel(module, TWO, balance=balance, **options) as trainer:
        for _ in range(16):
            trainer.step(loss_of_slow, batch)
        assert "Micro-batches of about" not in trainer.explain()
        assert balance == "auto" or trainer.report()["sizes"]["host:0"] == [300]


@pytest.mark.alone
def test_nothing_is_searched_with_batch_statistics() -> None:
    def slowly(module: Any, batch: Any) -> Any:
        time.sleep(1e-3 * len(batch[0]))
        return classify(module, batch)

    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    batch = classifier(64)[1]
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(16):
            trainer.step(slowly, batch)
        assert trainer.report()["sizes"]["host:0"] == [32]
        module.eval()
        for _ in range(16):
            trainer.step(slowly, batch)
        assert len(trainer.report()["sizes"]["host:0"]) > 1
