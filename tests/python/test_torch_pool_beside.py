"""A pool of a trainer: micro-batches are short, so that a request does not wait for a whole part of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pool
from pool_support import Held, soon
from torch_support import assert_same_gradients, classifier, classify, hosts, plain

_BATCH = 40


class Steps:
    """Steps of a trainer that note the sizes of their micro-batches."""

    def __init__(self, module: nn.Module, devices: int = 1, **options: Any) -> None:
        self.trainer = DataParallel(module, hosts(devices), prove=None, **options)
        self.order: list[Any] = []
        self.during: Callable[[], object] = lambda: None

    def loss_fn(self, module: nn.Module, part: torch.Tensor) -> Any:
        if not self.order:
            self.during()
        self.order.append(len(part))
        time.sleep(0.002 * len(part))
        return module(part).square().mean()

    def step(self) -> list[Any]:
        """The sizes of one step's micro-batches, and what else was noted."""
        self.order = []
        self.trainer.step(self.loss_fn, torch.randn(_BATCH, 6))
        return self.order

    def predict(self) -> list[Any]:
        """Those of a prediction."""
        self.order = []
        self.trainer.predict(self._outputs, torch.randn(_BATCH, 6))
        return self.order

    def _outputs(self, module: nn.Module, part: torch.Tensor) -> Any:
        self.loss_fn(module, part)
        return part


class Counts(nn.Module):
    """Writes a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        return batch * self.weight


@pytest.mark.parametrize("budget", [0.1, 0.0])
def test_requests_start_within_the_part_of_a_device_as_long_as_the_pool_is_open(budget: float) -> None:
    steps = Steps(nn.Linear(6, 3))
    with steps.trainer:
        assert steps.step() == [_BATCH]
        with Pool(steps.trainer, budget=budget) as pool:
            steps.during = lambda: pool.submit(lambda _: steps.order.append("request"), priority="interactive")
            if budget:
                assert steps.step() == [16, "request", 16, 8]
            else:
                assert steps.step()[0] == _BATCH
            pool.close()
            steps.during = lambda: None
            assert steps.step() == [_BATCH]
        beside = steps.trainer._works.beside
        lost = Pool(steps.trainer)
        assert beside.longest > 0
        del lost
        assert beside.longest == 0
        assert steps.step() == [_BATCH]


def test_a_pool_that_is_closing_shortens_nothing_more() -> None:
    steps = Steps(nn.Linear(6, 3))
    with steps.trainer, Pool(steps.trainer) as pool:
        beside = steps.trainer._works.beside
        with pytest.raises(InvalidArgument):
            pool.submit(lambda _: pool.close()).result()
        assert beside.longest > 0
        with Held(pool):
            closing = threading.Thread(target=pool.close)
            closing.start()
            assert soon(lambda: beside.longest == 0)
            assert not pool._jobs.closed
        closing.join()


def test_explain_says_nothing_of_a_pool_that_is_closed() -> None:
    steps = Steps(nn.Linear(6, 3))
    with steps.trainer:
        with Pool(steps.trainer):
            for _ in range(4):  # the first runs of a size say nothing
                steps.predict()  # without a search for sizes
            assert "to end within 20 ms" in steps.trainer.explain()
        steps.predict()
        assert "to end within" not in steps.trainer.explain()


def test_predictions_are_cut_too() -> None:
    steps = Steps(nn.Linear(6, 3))
    with steps.trainer, Pool(steps.trainer):
        assert steps.predict() == [16, 16, 8]


@pytest.mark.parametrize(
    ("module", "options", "sizes"),
    [
        (nn.Linear(6, 3), {"micro_batch": 20}, [20, 20]),
        (nn.Linear(6, 3), {"granularity": 2}, [_BATCH]),
        (nn.Linear(6, 3), {"hold_back": False}, [_BATCH]),
        (nn.BatchNorm1d(6), {}, [_BATCH]),
        (Counts(), {}, [_BATCH]),
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout()), {"balance": "even"}, [_BATCH]),
    ],
    ids=["micro_batch", "granularity", "hold_back", "batch norm", "buffers", "draws under fixed shares"],
)
def test_sizes_that_are_fixed_or_matter_stay(module: nn.Module, options: dict[str, Any], sizes: list[int]) -> None:
    steps = Steps(module, **options)
    with steps.trainer, Pool(steps.trainer):
        steps.step()  # finds out what its forward does
        assert [steps.step() for _ in range(2)] == [sizes] * 2


@pytest.mark.parametrize("balance", ["auto", "even"])
def test_plans_count_what_requests_take_and_gradients_stay_exact(balance: Any) -> None:
    module, batch = classifier(64)
    budget, asks = 0.2, threading.Event()

    def loss_fn(module: Any, part: Any) -> Any:
        if asks.is_set():
            asks.clear()
            pool.submit(lambda _: time.sleep(0.002), priority="interactive", needs="host:1", kind="request")
        return classify(module, part)

    def lent() -> float:
        devices, text = trainer.report()["devices"], trainer.explain()
        part = devices["host:1"].get("lent_part", 0.0)
        assert "lent_part" not in devices["host:0"]
        assert 0 <= part <= budget
        assert ("host:1 lends" in text) == (part > 0)
        assert ("which its share counts" in text) == (part > 0 and balance == "auto")
        return part

    loss, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(2), balance=balance, micro_batch=4, prove=None) as trainer:
        with Pool(trainer, budget=budget) as pool:
            for step in range(60):
                if step == 10:
                    assert lent() == 0
                if step >= 10:
                    asks.set()
                module.zero_grad()
                torch.testing.assert_close(trainer.step(loss_fn, batch), loss)
                assert_same_gradients(module, wanted)
                lent()
                shares = [one["share"] for one in trainer.report()["devices"].values()]
                assert sum(shares) == 64
                assert balance == "auto" or shares == [32, 32]
        asks.clear()
        for _ in range(16):
            trainer.step(loss_fn, batch)
        if balance == "even":  # otherwise host:0 may run all of some steps, which say nothing of host:1
            assert lent() == 0, "the pool is closed, so nothing is lent"


def test_gradients_are_exact_in_short_micro_batches() -> None:
    module, batch = classifier(64)
    sizes: list[int] = []

    def loss_fn(module: Any, part: Any) -> Any:
        sizes.append(len(part[0]))
        return classify(module, part)

    loss, wanted = plain(module, classify, batch)
    most = 0
    with DataParallel(module, hosts(2), balance="even") as trainer, Pool(trainer) as pool:
        for _ in range(4):
            sizes.clear()
            module.zero_grad()
            jobs = [pool.submit(lambda _: None, priority="interactive") for _ in range(4)]
            torch.testing.assert_close(trainer.step(loss_fn, batch), loss)
            assert_same_gradients(module, wanted)
            assert [job.result() for job in jobs] == [None] * 4
            most = max(most, len(sizes) if sum(sizes) == 64 else 0)
        assert most > 2, "the first step after the proof is cut, whatever it takes"
