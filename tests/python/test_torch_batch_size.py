"""The search for a batch size: decided by what was measured alone, and without a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline.torch import BatchSizeSearch, DataParallel
from paceline.torch._trainer.batch_size import search
from torch_support import TWO, classifier, classify, gradients, hosts


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


def test_the_knee_of_a_fixed_and_a_proportional_part() -> None:
    found = searched(lambda n: 0.030 + 0.001 * n)  # n / (30 + n) of the limit: 0.68, 0.81, 0.895, 0.945, 0.97
    assert found.batch_size == 256
    assert list(found.seconds) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert found.stopped == "doubling it once more brings little"
    assert found.throughput[256] == pytest.approx(256 / 0.286)
    assert searched(lambda n: 0.030 + 0.001 * n, efficiency=0.8).batch_size == 128


def test_without_a_fixed_part_the_smallest_is_enough() -> None:
    found = searched(lambda n: 0.001 * n)
    assert found.batch_size == 8
    assert list(found.seconds) == [8, 16, 32]


def test_the_largest_is_where_it_ends() -> None:
    found = searched(lambda n: 1.0, largest=100)
    assert list(found.seconds) == [8, 16, 32, 64, 100]
    assert found.batch_size == 100
    assert found.stopped == "100 is the largest that was to be measured"


def test_memory_ends_it_too() -> None:
    def seconds(n: int) -> float:
        if n > 40:
            raise torch.OutOfMemoryError("as planned")
        return 1.0

    found = searched(seconds)
    assert found.batch_size == 32
    assert found.stopped == "a batch of 64 does not fit into memory"
    with pytest.raises(torch.OutOfMemoryError):
        searched(seconds, smallest=64)


def test_one_slow_size_is_no_reason_to_end() -> None:
    found = searched(lambda n: 1.0 if n != 64 else 1.8, largest=512)
    assert max(found.seconds) == 512


def test_a_batch_that_is_too_large_for_the_caches_is_not_chosen() -> None:
    found = searched(lambda n: 0.01 + 0.001 * n * (1 if n <= 128 else 2))
    assert found.batch_size == 64
    assert max(found.seconds) == 256


def test_smaller_micro_batches_are_recommended_only_where_they_are_clearly_faster() -> None:
    plain = searched(lambda n: 0.030 + 0.001 * n, lambda piece: 0.286 * {64: 0.97, 32: 0.99, 16: 1.2}[piece])
    assert plain.micro_batch is None
    assert set(plain.micro_batches) == {None, 64, 32, 16}
    faster = searched(lambda n: 0.030 + 0.001 * n, lambda piece: 0.286 * {64: 0.9, 32: 0.8, 16: 1.2}[piece])
    assert faster.micro_batch == 32
    assert "With micro_batch=32 it is 25% faster" in str(faster)


def test_it_prints_a_table_and_draws(tmp_path: Any) -> None:
    found = searched(lambda n: 0.030 + 0.001 * n)
    lines = str(found).splitlines()
    assert len(lines) == 2 + len(found.seconds)
    assert [line.split()[0] for line in lines if "<- knee" in line] == ["256"]
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        {"smallest": 0},
        {"smallest": 9, "largest": 8},
        {"smallest": 1.5},
        {"smallest": "8"},
        {"smallest": True},
        {"largest": None},
        {"efficiency": 0.0},
        {"efficiency": 1.0},
        {"efficiency": "0.9"},
        {"efficiency": None},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: Any) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(InvalidArgument, match=rf"find_batch_size: .*{name} (is )?{re.escape(repr(value))}.* needed"):
        searched(lambda n: 1.0, **options)


def test_sizes_of_numpy_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    found = searched(lambda n: 0.001 * n, smallest=numpy.int64(8), largest=numpy.int64(32))
    assert list(found.seconds) == [8, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make_batch": 64}, r"make_batch is a int, not a function. It is find_batch_size\(loss_fn, make_batch\)"),
        ({"loss_fn": None}, "loss_fn is a NoneType, not a function"),
        ({"weight": torch.ones(8)}, "weight is a Tensor, which fits one size of batches only; give a function"),
        ({"seconds": "1"}, "seconds is '1'; a number of at least 0"),
        ({"seconds": -1.0}, "seconds is -1.0; a number of at least 0"),
        ({"seconds": float("inf")}, "seconds is inf; a number of at least 0"),
        ({"seconds": float("nan")}, "seconds is nan; a number of at least 0"),
        ({"smallest": "8"}, "smallest is '8' and largest 65536; integers"),
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

    def loss_fn(replica: Any, part: Any) -> Any:
        torch.rand(())
        return classify(replica, part)

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

    def loss_fn(replica: Any, part: Any) -> Any:
        ran.append(len(part[0]))
        return classify(replica, part)

    with DataParallel(module, TWO, memory=1000) as trainer:
        found = trainer.find_batch_size(loss_fn, lambda n: (x[:n], y[:n]), smallest=16, largest=64, seconds=0.01)
        assert max(found.seconds) >= 32
    assert max(ran) < 16


def test_a_batch_of_another_size_is_refused() -> None:
    module, batch = classifier(8)
    with (
        DataParallel(module, TWO) as trainer,
        pytest.raises(InvalidArgument, match=r"make_batch\(16\) returned a batch of 8"),
    ):
        trainer.find_batch_size(classify, lambda n: batch, smallest=16)
