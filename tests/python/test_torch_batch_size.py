"""Sizes that are found: of batches by a search without a trace, and of micro-batches while training."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import BatchSizeSearch, DataParallel
from paceline.torch._trainer.batch_size import search
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, held, hosts, noting, plain


def searched(
    seconds: Callable[[int], float], micro: Callable[[int], float] | None = None, **options: Any
) -> BatchSizeSearch:
    """With times by formula; `micro`: of a step at the knee by micro-batch."""

    def measure(size: int, micro_batch: int | None) -> float:
        if micro_batch is not None:
            assert micro is not None
            return micro(micro_batch)
        return seconds(size)

    defaults = {"smallest": 8, "largest": 65536, "efficiency": 0.9, "micro_batches": micro is not None, "devices": 2}
    return search(measure, **{**defaults, **options})


def limited(n: int) -> float:
    if n > 40:
        raise torch.OutOfMemoryError("as planned")
    return 1.0


def rising(n: int) -> float:
    """Of n / (30 + n) of the limit are reached: 0.68, 0.81, 0.895, 0.945, 0.97."""
    return 0.030 + 0.001 * n


@pytest.mark.parametrize(
    ("seconds", "options", "best", "last", "stopped"),
    [
        (rising, {}, 256, 1024, "doubling it once more brings little"),
        (rising, {"efficiency": 0.8}, 128, None, ""),
        (lambda n: 0.001 * n, {}, 8, 32, ""),
        (lambda n: 1.0, {"largest": 100}, 100, 100, "100 is the largest that was to be measured"),
        (limited, {}, 32, 32, "a batch of 64 does not fit into memory"),
        (lambda n: 1.0 if n != 64 else 1.8, {"largest": 512}, None, 512, ""),
        (lambda n: 0.01 + 0.001 * n * (1 if n <= 128 else 2), {}, 64, 256, ""),
        (lambda n: 0.001 * n, {"smallest": np.int64(8), "largest": np.int64(32)}, 8, 32, ""),
    ],
    ids=["fixed part", "lower", "no fixed part", "largest", "memory", "one slow", "too large for caches", "numpy"],
)
def test_the_batch_size_is_where_doubling_brings_little(
    seconds: Any, options: Any, best: int | None, last: int | None, stopped: str
) -> None:
    found = searched(seconds, **options)
    assert best in (None, found.batch_size)
    assert last in (None, max(found.seconds))
    assert all(size in found.seconds for size in (8, 16, 32))
    assert stopped in found.stopped
    assert found.throughput[32] == pytest.approx(32 / seconds(32))


def test_the_smallest_size_must_fit() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        searched(limited, smallest=64)


def test_smaller_micro_batches_are_recommended_only_where_they_are_clearly_faster() -> None:
    plain = searched(rising, lambda piece: 0.286 * {64: 0.97, 32: 0.99, 16: 1.2}[piece])
    assert plain.micro_batch is None
    assert set(plain.micro_batches) == {None, 64, 32, 16}
    faster = searched(rising, lambda piece: 0.286 * {64: 0.9, 32: 0.8, 16: 1.2}[piece])
    assert faster.micro_batch == 32
    assert "With micro_batch=32 it is 25% faster" in str(faster)


def test_it_prints_a_table_and_draws(tmp_path: Any) -> None:
    found = searched(rising)
    lines = str(found).splitlines()
    assert len(lines) == 2 + len(found.seconds)
    assert [line.split()[0] for line in lines if "<- knee" in line] == ["256"]
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make_batch": 64}, r"make_batch is a int, not a function. It is find_batch_size\(loss_fn, make_batch\)"),
        ({"loss_fn": None}, "loss_fn is a NoneType, not a function"),
        ({"weight": torch.ones(8)}, "weight is a Tensor, which fits one size of batches only; give a function"),
        *(({"seconds": one}, f"seconds is {one!r}; a number of at least 0") for one in ("1", -1.0, inf, nan)),
        ({"smallest": "8"}, "smallest is '8' and largest 65536; integers"),
        *(({"smallest": one}, f"find_batch_size: .*smallest is {one!r}.* needed") for one in (0, 1.5, True)),
        ({"smallest": 9, "largest": 8}, "find_batch_size: .*smallest is 9 .* needed"),
        ({"largest": None}, "find_batch_size: .*largest None.* needed"),
        *(
            ({"efficiency": one}, f"find_batch_size: .*efficiency is {one!r}.* needed")
            for one in (0.0, 1.0, "0.9", None)
        ),
    ],
    ids=str,
)
def test_what_cannot_be_searched_with_is_refused_before_anything_runs(arguments: Any, message: str) -> None:
    module, _ = classifier(8)

    def runs(*_: Any) -> Any:
        pytest.fail("something ran")

    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.find_batch_size(**{"loss_fn": runs, "make_batch": runs, **arguments})


@pytest.mark.parametrize("devices", [1, 2])
def test_a_search_leaves_no_trace_and_measures_every_size_on_all_devices(devices: int) -> None:
    module, (x, y) = classifier(64)
    module.append(torch.nn.BatchNorm1d(3).double())
    module[2].weight.grad = torch.ones_like(module[2].weight)
    before, random = gradients(module), torch.get_rng_state()
    buffers = [buffer.clone() for buffer in module.buffers()]
    sizes: list[int] = []

    def make_batch(items: int) -> Any:
        sizes.append(items)
        return x[:items], y[:items]

    loss_fn = noting(lambda *_: torch.rand(()))
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        found = trainer.find_batch_size(loss_fn, make_batch, smallest=16, largest=64, seconds=0.01)
        assert trainer.report()["steps"] == 0
        assert trainer.shares == dict.fromkeys(hosts(devices), 0)
    assert sizes[:2] == [16, 32]
    assert set(found.seconds) <= {16, 32, 64}
    assert all(0 < seconds < 5 for seconds in found.seconds.values())
    after = gradients(module)
    assert all(a is b or torch.equal(a, b) for a, b in zip(after, before, strict=True))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), buffers, strict=True))


def test_under_a_memory_limit_micro_batches_stay_small_and_batches_grow() -> None:
    module, (x, y) = classifier(64)
    ran: list[int] = []
    loss_fn = noting(lambda _, part: ran.append(len(part[0])))
    with DataParallel(module, TWO, memory=1000 + held(module, 2)) as trainer:
        found = trainer.find_batch_size(loss_fn, lambda n: (x[:n], y[:n]), smallest=16, largest=64, seconds=0.01)
        assert max(found.seconds) >= 32
        assert max(ran) < 16
        with pytest.raises(InvalidArgument, match=r"make_batch\(16\) returned a batch of 8"):
            trainer.find_batch_size(classify, lambda n: (x[:8], y[:8]), smallest=16)


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
