"""Every item runs exactly once, whoever takes it: forced stealing, random delays, exceptions."""

from __future__ import annotations

import collections
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import gradients, hosts

ROUNDS = 170  # for each of the settings below: more than 1,000 with a fixed micro-batch, where stealing is certain


class Planned(RuntimeError):
    """Raised by a round that is to fail."""


class Rounds:
    """A loss whose gradient is a histogram: the derivative by `weight` is the number of times that each item ran."""

    def __init__(self, seed: int, delay: float = 3e-4) -> None:
        self.delay = delay  # seconds an item, of the slow device
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.ran: list[tuple[int, int, int]] = []
        self.slow = 0
        self.devices: dict[int, int] = {}
        self.fail_at: int | None = None

    def loss_fn(self, module: Any, numbers: torch.Tensor) -> Any:
        begin, end = int(numbers[0]), int(numbers[-1]) + 1
        assert numbers.tolist() == list(range(begin, end))
        with self.lock:
            device = self.devices.setdefault(threading.get_ident(), len(self.devices))
            self.ran.append((device, begin, end))
            delay = self.rng.uniform(0, self.delay / 6) + (self.delay if device == self.slow else 0.0)
        time.sleep(delay * (end - begin))
        if self.fail_at is not None and begin <= self.fail_at < end:
            raise Planned
        return module.weight[numbers].sum()

    def counts(self) -> collections.Counter[int]:
        return collections.Counter(item for _, begin, end in self.ran for item in range(begin, end))

    def taken_over(self) -> bool:
        """Whether a device ran something else than items that follow each other, as its own share does."""
        ends: dict[int, int] = {}
        for device, begin, end in self.ran:
            if ends.get(device, begin) != begin:
                return True
            ends[device] = end
        return False


class Histogram(nn.Module):
    def __init__(self, items: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(items, dtype=torch.double))


@pytest.mark.parametrize("micro_batch", [1, 3, None])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_item_runs_exactly_once(devices: int, micro_batch: int | None) -> None:
    # A planned chunk leaves something to steal only where items take longer than another micro-batch costs.
    most = 40 if micro_batch else 400
    rounds = Rounds(devices * 10 + (micro_batch or 0), 3e-4 if micro_batch else 1e-4)
    rng = rounds.rng
    module = Histogram(most)
    moved = failed = 0
    with DataParallel(module, hosts(devices), balance="auto", micro_batch=micro_batch, reduction="sum") as trainer:
        for _ in range(ROUNDS):
            items = rng.randint(1, most)
            rounds.ran.clear()
            rounds.slow = rng.randrange(devices)
            rounds.fail_at = rng.randrange(items) if rng.random() < 0.2 else None
            module.zero_grad()
            if rounds.fail_at is not None:
                with pytest.raises(Planned):
                    trainer.step(rounds.loss_fn, torch.arange(items))
                assert max(rounds.counts().values()) == 1
                assert gradients(module) == [None]
                failed += 1
                continue
            trainer.step(rounds.loss_fn, torch.arange(items))
            assert rounds.counts() == collections.Counter(range(items))
            expected = torch.zeros(most, dtype=torch.double)
            expected[:items] = 1 / items
            torch.testing.assert_close(gradients(module)[0], expected, rtol=1e-12, atol=0)
            assert sum(trainer.shares.values()) == items
            shares = [0] * devices
            for device, begin, end in rounds.ran:
                shares[device] += end - begin
            assert sorted(shares) == sorted(trainer.shares.values())
            moved += rounds.taken_over()
    assert failed > ROUNDS // 10
    # Without a fixed size it is the balancer's to hold something back; among devices without any speed it may not.
    assert moved > ROUNDS // 10 or micro_batch is None, "nothing was stolen: this would test nothing"


@pytest.mark.parametrize("balance", ["even", [3, 1, 2]], ids=str)
def test_fixed_shares_are_never_stolen(balance: Any) -> None:
    rounds = Rounds(5)
    module = Histogram(40)
    with DataParallel(module, hosts(3), balance=balance, micro_batch=2, reduction="sum") as trainer:
        for slow in (0, 1, 2, 0, 1, 2):
            rounds.slow = slow
            rounds.ran.clear()
            trainer.step(rounds.loss_fn, torch.arange(24))
            assert rounds.counts() == collections.Counter(range(24))
            assert list(trainer.shares.values()) == ([8, 8, 8] if balance == "even" else [12, 4, 8])
