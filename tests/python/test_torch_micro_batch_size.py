"""The size of micro-batches that is found while training."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from paceline.torch._run import micro_batch_size as _micro_batch_size
from paceline.torch._run.micro_batch_size import MicroBatchSizes, SizeSearch, in_pieces
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain

Seconds = Callable[[int], float]  # of an item in a micro-batch of so many items


def steps(
    search: SizeSearch, shares: list[int], seconds: Seconds, count: int, noise: float = 0.0, seed: int = 1
) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        timed = []
        for share in shares:
            pieces = [end - begin for begin, end in search.pieces(0, share)] if share else []
            assert sum(pieces) == share
            timed.append(
                [[(items, items * seconds(items) * rng.gauss(1.0, noise)) for items in pieces]] if share else []
            )
        search.add(timed)


def falling_out_of_a_cache(items: int) -> float:
    return (1e-4 if items <= 200 else 2e-4) + 1e-4 / items


def test_the_largest_size_that_fits_is_found_in_thirteen_steps() -> None:
    search = SizeSearch()
    steps(search, [2048, 2048], falling_out_of_a_cache, 13)
    assert search.size == 128
    assert search.gain == pytest.approx(falling_out_of_a_cache(2048) / falling_out_of_a_cache(128))
    assert search.pieces(10, 266) == [(10, 138), (138, 266)]


@pytest.mark.parametrize("shares", [[2048, 1000], [2048, 0], [700, 1500, 300]], ids=str)
def test_it_is_found_for_unequal_shares(shares: list[int]) -> None:
    search = SizeSearch()
    steps(search, shares, falling_out_of_a_cache, 13, noise=0.05)
    assert search.size is not None
    assert 64 <= search.size <= 200


@pytest.mark.parametrize("share", [9, 17, 100, 131, 200])
def test_it_is_found_whatever_halves_leave_over(share: int) -> None:
    search = SizeSearch()
    steps(search, [share, share], lambda items: 1e-2 if 2 * items <= share + 1 else 2e-2, 13)
    assert search.size == -(-share // 2)
    assert search.gain == pytest.approx(2)


def test_corrections_do_not_blur_what_whole_claims_tell() -> None:
    search = SizeSearch()
    for _ in range(13):
        timed = []
        for begin, share in ((0, 1800), (2048, 248)):  # a claim, and a correction of the same device
            pieces = [last - first for first, last in search.pieces(begin, begin + share)]
            timed.append([(items, items * falling_out_of_a_cache(items)) for items in pieces])
        search.add([timed])
    assert search.size is not None
    assert 64 <= search.size <= 200


def test_where_times_vary_it_measures_until_it_is_certain() -> None:
    def found(seconds: Seconds, seed: int) -> int | None:
        search = SizeSearch()
        steps(search, [2048, 2048], seconds, 60, noise=0.1, seed=seed)
        return search.size

    assert all(found(lambda items: 1e-4 if items <= 1024 else 1.25e-4, seed) for seed in range(40))
    assert sum(found(lambda items: 1e-4, seed) is not None for seed in range(40)) <= 2


def test_sizes_that_are_no_faster_are_left_alone() -> None:
    search = SizeSearch()
    steps(search, [2048, 2048], lambda items: 1e-4 + 1e-3 / items, 2000, noise=0.05)
    assert search.size is None


def test_small_micro_batches_are_never_tried() -> None:
    search = SizeSearch()
    sizes = set()

    def seconds(items: int) -> float:
        sizes.add(items)
        return 1e-4

    steps(search, [400, 400], seconds, 30)
    assert sizes == {400, 200, 100, 50}  # the smallest one takes 5 ms


def test_most_steps_run_as_usual() -> None:
    search = SizeSearch()
    trials = 0
    for _ in range(1000):
        trials += search.on_trial
        steps(search, [2048], falling_out_of_a_cache, 1)
    assert trials == 4 + 8  # of sizes in each of two searches, and of whole claims in the second


def test_a_size_is_given_up_when_another_is_faster() -> None:
    search = SizeSearch()
    steps(search, [2048], falling_out_of_a_cache, 13)
    assert search.size == 128
    steps(search, [2048], lambda items: 1e-4 + (4e-2 / items if items <= 1024 else 1e-4), 600)
    assert search.size == 1024


def test_whole_claims_are_gone_back_to_where_they_are_faster_and_left_again() -> None:
    search = SizeSearch()
    sizes = []
    for seconds, count in (
        (falling_out_of_a_cache, 13),
        (lambda items: 1e-4 + 4e-2 / items, 600),
        (falling_out_of_a_cache, 600),
    ):
        steps(search, [2048, 1000], seconds, count, noise=0.02)
        sizes.append(search.size)
        if search.size is None:
            assert search.pieces(0, 2048) == [(0, 2048)]
    assert [size is None for size in sizes] == [False, True, False]


def test_pieces_are_equal_and_cover_the_claim() -> None:
    for items in range(1, 60):
        for size in (1, 3, 10, 100):
            pieces = in_pieces(5, 5 + items, size)
            lengths = [end - begin for begin, end in pieces]
            assert pieces[0][0] == 5
            assert pieces[-1][1] == 5 + items
            assert sum(lengths) == items
            assert max(lengths) - min(lengths) <= 1
            assert max(lengths) <= max(1.5 * size, 1) + 1


def test_each_kind_of_batch_is_searched_by_itself_and_few_are_kept() -> None:
    sizes = MicroBatchSizes()
    first = sizes.of("first")
    steps(first, [2048], falling_out_of_a_cache, 13)
    assert "Micro-batches of about 128 items: measured to be 1.98 times as fast" in sizes.explain()
    assert sizes.of("second").size is None
    assert sizes.explain() == ""
    assert sizes.of("first") is first
    for kind in range(20):
        sizes.of(kind)
    assert len(sizes._searches) <= 8


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


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_finds_it_and_stays_exact(devices: int) -> None:
    module, batch = Slow(128), torch.rand(300 * devices, 3, dtype=torch.double)
    _, wanted = plain(module, loss_of_slow, batch)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(16):
            module.zero_grad()
            trainer.step(loss_of_slow, batch)
            assert_same_gradients(module, wanted)
        assert re.search(r"Micro-batches of about (75|38) items: measured to be \d\.\d\d times", trainer.explain())
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


@pytest.mark.parametrize("options", [{"micro_batch": 300}, {"granularity": 2}, {"corrections": False}], ids=str)
def test_nothing_is_searched_where_sizes_are_told(options: Any) -> None:
    module, batch = Slow(128), torch.rand(600, 3, dtype=torch.double)
    balance: Any = "auto" if "corrections" in options else "even"
    with DataParallel(module, TWO, balance=balance, **options) as trainer:
        for _ in range(16):
            trainer.step(loss_of_slow, batch)
        assert "Micro-batches of about" not in trainer.explain()
        assert balance == "auto" or trainer.report()["sizes"]["host:0"] == [300]


def test_nothing_is_searched_with_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_micro_batch_size, "_LEAST_SECONDS", 0.0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    batch = classifier(64)[1]
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(16):
            trainer.step(classify, batch)
        assert trainer.report()["sizes"]["host:0"] == [32]
        module.eval()
        for _ in range(16):
            trainer.step(classify, batch)
        assert len(trainer.report()["sizes"]["host:0"]) > 1
