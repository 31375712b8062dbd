"""Limits on memory: two sizes are measured, larger claims are worked off in pieces that fit, and what fails is done again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, OutOfMemory
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, held, hosts, noting, plain

DEVICES = pytest.mark.parametrize("devices", [1, 2])


class Wide(nn.Module):
    """Saves a known amount: the result of the exponential, 1000 numbers for each item, and as many again once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> Any:
        return ((x * self.scale).exp() + self.scale.exp()).mean(1)


PER_ITEM = 8000 * 2  # the item itself (for the scale's gradient) and its exponential
FIXED = 8000


def wide(items: int) -> tuple[nn.Module, torch.Tensor]:
    return Wide(), torch.randn(items, 1000, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def ran_with(memory: Any) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """The sizes that each worker ran in the second step with this much memory for micro-batches, and the report."""
    module, batch = wide(64)
    sizes: dict[int, list[int]] = {}
    limits = memory if isinstance(memory, dict) else {} if memory is None else dict.fromkeys(TWO, memory)
    limits = {name: limit + held(module, 2) for name, limit in limits.items()}
    with DataParallel(module, TWO, balance="even", memory=limits or None) as trainer:
        trainer.step(noted(sizes), batch)
        sizes.clear()
        trainer.step(noted(sizes), batch)
        return sizes, dict(trainer.report())


def loss_of(module: Any, x: torch.Tensor) -> Any:
    return module(x).mean()


def noted(sizes: dict[int, list[int]]) -> Any:
    """`loss_of`, noting the sizes that each worker ran."""

    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        loss = loss_of(module, x)
        sizes.setdefault(threading.get_ident(), []).append(len(x))
        return loss

    return loss_fn


@DEVICES
def test_after_two_sizes_everything_runs_in_as_few_pieces_as_fit(devices: int) -> None:
    module, batch = wide(64)
    _, wanted = plain(module, loss_of, batch)
    sizes: dict[int, list[int]] = {}
    limit = 10 * PER_ITEM + FIXED + 100
    with DataParallel(module, hosts(devices), balance="even", memory=limit + held(module, devices)) as trainer:
        trainer.step(noted(sizes), batch)
        assert_same_gradients(module, wanted)
        share = 64 // devices
        first = share // 16
        for ran in sizes.values():
            assert ran[:2] == [first, 2 * first]
            assert sum(ran) == share
            assert max(ran) <= 10
        sizes.clear()
        trainer.step(noted(sizes), batch)
        pieces = -(-share // 10)
        for ran in sizes.values():
            assert sum(ran) == share
            assert len(ran) == pieces
            assert max(ran) - min(ran) <= 1
        memory = trainer.report()["memory"]
        assert list(memory) == hosts(devices)
        for entry in memory.values():
            assert entry["limit_bytes"] == limit
            assert entry["bytes_per_item"] == pytest.approx(PER_ITEM, rel=0.02)
            assert entry["fixed_bytes"] == pytest.approx(FIXED, rel=0.1)
            assert entry["largest_micro_batch"] == 10
        assert "host:0: at most 10 items at once" in trainer.explain()


def test_a_large_fixed_part_is_not_taken_for_the_items() -> None:
    # Two items take 2.5 times what one adds: by the first size alone a third one would not fit.
    sizes, _ = ran_with(3 * PER_ITEM + FIXED + 100)
    assert {max(ran) for ran in sizes.values()} == {3}


def test_a_limit_of_one_device_is_no_other_device_s() -> None:
    sizes, report = ran_with({"host:1": 5 * PER_ITEM + FIXED + 100})
    assert sorted(max(ran) for ran in sizes.values()) == [5, 32]
    assert list(report["memory"]) == ["host:1"]


def test_what_exceeds_the_limit_while_it_is_measured_is_run_again_smaller_and_nothing_is_lost() -> None:
    module, batch = wide(64)
    _, wanted = plain(module, loss_of, batch)
    sizes: dict[int, list[int]] = {}
    # A first part of 2 items is too much already.
    with DataParallel(
        module, TWO, balance="even", memory={"host:0": PER_ITEM + FIXED + 100 + held(module, 2)}
    ) as trainer:
        trainer.step(noted(sizes), batch)
        assert_same_gradients(module, wanted)
        assert "host:0: at most 1 item at once, since it reached its limit with 2." in trainer.explain()
        assert "host:1" not in trainer.explain().split("host:0: at most")[1]
        assert trainer.report()["steps"] == 1


@pytest.mark.parametrize("items", [64, 1])
def test_one_item_that_does_not_fit_is_an_error_that_leaves_everything_as_it_was(items: int) -> None:
    module, batch = wide(64)
    batch = batch[:items]
    with DataParallel(module, TWO, memory=1000 + held(module, 2)) as trainer:
        with pytest.raises(OutOfMemory, match="memory= allows"):
            trainer.step(loss_of, batch)
    assert gradients(module) == [None]


def test_items_of_another_shape_have_a_model_of_their_own() -> None:
    module, found = Scaled(), []
    with DataParallel(module, ["host:0"], memory=10**6) as trainer:
        for length in (10, 100):
            trainer.step(loss_of, torch.randn(64, length, 4, dtype=torch.double))
            found.append(trainer.report()["memory"]["host:0"]["bytes_per_item"])  # of the items that take most
    assert found[1] == pytest.approx(10 * found[0], rel=0.1)


class Scaled(nn.Module):
    """For items of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.double))

    def forward(self, x: torch.Tensor) -> Any:
        return (self.scale * x).exp().flatten(1).mean(1)


def short_of(numbers: int, ran: list[int], error: type[Exception] = torch.OutOfMemoryError) -> Any:
    """`loss_of` on a device that has memory for a slice of so many numbers, noting the items of those that fit."""

    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        if x.numel() > numbers:
            raise error("as planned")
        ran.append(len(x))
        return loss_of(module, x)

    return loss_fn


def images(items: int, width: int) -> torch.Tensor:
    return torch.randn(items, width, width, dtype=torch.double, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("limit", [None, 10**8])
def test_items_of_another_shape_have_a_cap_of_their_own(limit: int | None) -> None:
    module = Scaled()
    ran: list[int] = []
    with DataParallel(module, ["host:0"], memory=limit) as trainer:
        for _ in range(2):
            for width, fits in ((32, 4), (8, 64)):
                batch = images(64, width)
                ran.clear()
                module.zero_grad()
                trainer.step(short_of(4 * 32 * 32, ran), batch)
                _, wanted = plain(module, loss_of, batch)
                assert_same_gradients(module, wanted)
                assert max(ran) <= fits
            # The large ones come first: they leave the small ones alone, which in the end are one piece.
        assert max(ran) == 64
        assert "host: at most 4 items at once, since host:0 ran out of memory with 8.\n" in trainer.explain()
        if limit is not None:
            assert trainer.report()["memory"]["host:0"]["largest_micro_batch"] == 4


def test_a_cap_of_small_items_is_not_told_of_large_ones() -> None:
    module = Scaled()
    ran: list[int] = []
    with DataParallel(module, ["host:0"], memory=10**8) as trainer:
        trainer.step(short_of(10**9, ran), images(64, 32))
        before = trainer.report()["memory"]["host:0"]["largest_micro_batch"]
        trainer.step(short_of(4 * 8 * 8, ran, OutOfMemory), images(64, 8))
        assert trainer.report()["memory"]["host:0"]["largest_micro_batch"] == before > 64
        assert "host:0: at most 4 items at once, since it reached its limit with 8." in trainer.explain()


def test_without_a_limit_nothing_is_measured_and_nothing_split() -> None:
    sizes, report = ran_with(None)
    assert (list(sizes.values()), report["memory"]) == ([[32], [32]], {})


def test_saved_tensor_hooks_of_the_caller_stay_in_force() -> None:
    module, batch = wide(64)
    _, wanted = plain(module, loss_of, batch)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor

    with DataParallel(module, TWO, balance="even", memory=10 * PER_ITEM) as trainer:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.step(loss_of, batch)
    assert packed
    assert_same_gradients(module, wanted)


def test_predictions_on_the_host_save_nothing_and_soon_run_whole() -> None:
    module, batch = wide(64)
    ran: list[int] = []

    def fn(replica: Any, x: torch.Tensor) -> Any:
        ran.append(len(x))
        return replica(x)

    with DataParallel(module, ["host:0"], memory=10 * PER_ITEM) as trainer:
        for _ in range(3):
            trainer.predict(fn, batch)
        ran.clear()
        trainer.predict(fn, batch)
    assert ran == [64]


def test_a_fraction_is_of_the_memory_that_devices_share() -> None:
    module, _ = classifier(4)
    with (
        DataParallel(module, TWO, memory=0.5) as half,
        DataParallel(module, ["host:0"], memory={"host:0": 0.5}) as alone,
    ):
        a, b = half.report()["memory"]["host:1"]["limit_bytes"], alone.report()["memory"]["host:0"]["limit_bytes"]
        assert b + held(module) == pytest.approx(2 * (a + held(module, 2)), abs=2)
        assert a > 10**8


def test_parameters_buffers_and_gradients_count_and_leave_the_rest_for_micro_batches() -> None:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10, affine=False)).double()
    module[0].weight.requires_grad_(False)
    module.append(nn.Linear(10, 5, bias=False).double())
    taken = 800 // 2 + 400 // 2 + 400 + 2 * 80 + 8  # two devices share the weights; a frozen one has no gradient
    with DataParallel(module, TWO, memory={"host:1": taken + 1234}) as trainer:
        assert trainer._works.limits == [None, 1234]
    with pytest.raises(OutOfMemory, match=f"allows host:1 {taken} bytes, and the module's .* take {taken} there"):
        DataParallel(module, TWO, memory={"host:1": taken})


@pytest.mark.parametrize(
    "memory", [0, -1, 0.0, "1 GiB", 1.5, 2.0, 80.0, True, float("nan"), {"host:0": "much"}, {"host:7": 10}]
)
def test_what_is_no_limit_is_refused(memory: Any) -> None:
    module, _ = classifier(4)
    with pytest.raises(InvalidArgument, match="memory"):
        DataParallel(module, TWO, memory=memory)


@DEVICES
def test_fixed_micro_batches_stay_exact_under_a_limit(devices: int) -> None:
    module, batch = classifier(40)
    _, wanted = plain(module, classify, batch)
    ran: list[int] = []
    with DataParallel(module, hosts(devices), memory=1000 + held(module, devices), micro_batch=16) as trainer:
        for _ in range(3):
            module.zero_grad()
            trainer.step(noting(lambda _, part: ran.append(len(part[0]))), batch)
            assert_same_gradients(module, wanted)
    assert max(ran) < 16


@DEVICES
def test_items_without_weight_are_no_measurements(devices: int) -> None:
    module, batch = wide(64)
    weight = (torch.arange(64) % 32 >= 16).to(torch.double)  # the first half of each device's share counts nothing
    sizes: dict[int, list[int]] = {}
    with DataParallel(module, hosts(devices), balance="even", memory=FIXED + 6 * PER_ITEM) as trainer:
        for _ in range(4):
            trainer.step(noted(sizes), batch, weight=weight)
            module.zero_grad()
        assert all(max(ran) <= 6 for ran in sizes.values())
        assert all("largest_micro_batch" in entry for entry in trainer.report()["memory"].values())
