"""Batch normalisation: every batch that one device trains is trained, and it is said that micro-batches are normalised apart."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.balance import replay
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, gradients, hosts

pytestmark = pytest.mark.filterwarnings("ignore:DataParallel. .*each micro-batch is normalised")

ITEMS = range(2, 14)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def batch_of(items: int) -> tuple[torch.Tensor, torch.Tensor]:
    return classifier(items)[1]


class Sizes:
    """`classify`, of slices that take any time; it keeps their sizes."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most  # that fit into memory
        self.seen: list[int] = []

    def __call__(self, module: Any, part: Any) -> Any:
        items = len(part[0])
        if self.most is not None and items > self.most:
            raise MemoryError
        self.seen.append(items)
        time.sleep(2e-4 * items * (1 + len(self.seen) % 3))
        return classify(module, part)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"balance": "even"},
        {"granularity": 3},
        {"micro_batch": 2},
        {"micro_batch": 4},
        {"hold_back": True},
        {"memory": 0.5},
    ],
    ids=str,
)
def test_every_batch_that_one_device_trains_is_trained(devices: int, options: Any) -> None:
    loss_fn, module = Sizes(), normalised()
    with DataParallel(module, hosts(devices), **options) as trainer:
        for items in [*ITEMS, *reversed(ITEMS)]:
            trainer.step(loss_fn, batch_of(items))
        assert trainer.report()["steps"] == 2 * len(ITEMS)
    assert min(loss_fn.seen) == 2
    assert max(loss_fn.seen) <= max(options.get("micro_batch", 99), 3)


def test_fixed_ratios_give_a_device_enough_or_nothing() -> None:
    loss_fn = Sizes()
    with DataParallel(normalised(), hosts(3), balance=[8, 1, 1]) as trainer:
        for items in ITEMS:
            trainer.step(loss_fn, batch_of(items))
    assert min(loss_fn.seen) == 2


@pytest.mark.parametrize("options", [{}, {"balance": "even"}, {"micro_batch": 3}], ids=str)
def test_items_that_are_dealt_out_by_cost_come_in_twos_at_least(options: Any) -> None:
    loss_fn = Sizes()
    with DataParallel(normalised(), TWO, **options) as trainer:
        for items in [*ITEMS, *ITEMS]:
            trainer.step(loss_fn, batch_of(items), cost=torch.arange(items) ** 2.0)
    assert min(loss_fn.seen) >= 2


@pytest.mark.parametrize("most", [2, 3, 5])
def test_where_memory_runs_out_no_piece_is_of_one_item(most: int) -> None:
    loss_fn = Sizes(most)
    with DataParallel(normalised(), TWO, balance="even") as trainer:
        for items in (24, 8, 12) if most == 2 else (24, 9, 13):
            trainer.step(loss_fn, batch_of(items))
        if most == 2:
            with pytest.raises(MemoryError):  # there are no two pieces of 3 items
                trainer.step(loss_fn, batch_of(6))
    assert min(loss_fn.seen) == 2
    assert max(loss_fn.seen) <= most


def test_prediction_in_training_mode_takes_as_many() -> None:
    module = normalised()
    with DataParallel(module, TWO) as trainer:
        for items in ITEMS:
            assert trainer.predict(batch_of(items)[0]).shape == (items, 3)


def test_what_leaves_no_trace_takes_as_many() -> None:
    with DataParallel(normalised(), TWO, micro_batch=4) as trainer:
        assert {cause.kind for cause in trainer.check(classify, batch_of(9)).causes} == {"running statistics"}
        cost = torch.arange(5) + 1.0
        assert {cause.kind for cause in trainer.check(classify, batch_of(5), cost=cost).causes} == {
            "running statistics"
        }
        found = trainer.find_batch_size(classify, batch_of, smallest=3, largest=9, seconds=0.0)
        assert list(found.seconds) == [3, 6, 9]


def test_small_batches_run_again_as_they_ran(tmp_path: Path) -> None:
    module = normalised()
    again = copy.deepcopy(module)
    ran = []
    with DataParallel(module, TWO, micro_batch=2) as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        for items in (3, 9, 5):
            trainer.step(classify, batch_of(items))
            ran.append(trainer.shares)
    assert replay(tmp_path / "run.jsonl").mismatches == []
    with DataParallel(again, TWO) as trainer:
        trainer.replay_claims(tmp_path / "run.jsonl")
        for items, shares in zip((3, 9, 5), ran, strict=True):
            trainer.step(classify, batch_of(items))
            assert trainer.shares == shares
    for ours, theirs in zip(gradients(again), gradients(module), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("devices", [1, 2])
def test_one_item_fails_as_it_does_in_plain_pytorch(devices: int) -> None:
    with DataParallel(normalised(), hosts(devices)) as trainer:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            trainer.step(classify, batch_of(1))
        trainer.step(classify, batch_of(2))


def test_any_share_will_do_in_evaluation_mode() -> None:
    module = normalised().eval()
    with DataParallel(module, hosts(3), balance="even") as trainer:
        trainer.step(classify, batch_of(3))
        assert list(trainer.shares.values()) == [1, 1, 1]
        module.train()
        trainer.step(classify, batch_of(3))
        assert sorted(trainer.shares.values()) == [0, 0, 3]
        module.eval()
        trainer.step(classify, batch_of(3))
        assert list(trainer.shares.values()) == [1, 1, 1]


def told(record: Any) -> list[str]:
    return [str(one.message) for one in record if "each micro-batch is normalised" in str(one.message)]


def test_that_micro_batches_are_normalised_apart_is_said_once_where_it_was_called_and_by_explain() -> None:
    module = normalised()
    with warnings.catch_warnings(record=True) as record, DataParallel(module, TWO, balance="even") as trainer:
        warnings.simplefilter("always")
        trainer.step(classify, batch_of(3))  # on one device, as a whole
        assert told(record) == []
        assert "GroupNorm" not in trainer.explain()
        for _ in range(3):
            trainer.step(classify, batch_of(8))
        (message,) = told(record)
        assert message.startswith("paceline: 1 (BatchNorm1d): each micro-batch is normalised")
        (warning,) = (one for one in record if str(one.message) == message)
        assert warning.category is UserWarning
        assert warning.filename == __file__
        assert "GroupNorm" in trainer.explain()
        module.eval()
        assert "GroupNorm" not in trainer.explain()


@pytest.mark.parametrize("options", [{}, {"micro_batch": 4}], ids=str)
def test_one_device_is_warned_of_micro_batches_only(options: Any) -> None:
    with warnings.catch_warnings(record=True) as record, DataParallel(normalised(), ["host:0"], **options) as trainer:
        warnings.simplefilter("always")
        trainer.step(classify, batch_of(8))
    assert len(told(record)) == len(options)


def test_a_warning_that_is_an_error_leaves_everything_as_it_was() -> None:
    module = normalised()
    before = [buffer.clone() for buffer in module.buffers()]
    with DataParallel(module, TWO) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="each micro-batch is normalised"):
                trainer.step(classify, batch_of(8))
        assert gradients(module) == [None] * len(gradients(module))
        assert all(map(torch.equal, module.buffers(), before))
        trainer.step(classify, batch_of(8))
        assert trainer.report()["steps"] == 1


class OwnNorm(nn.Module):
    """Batch normalisation that is no module of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.mean: Any
        self.variance: Any
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("variance", torch.ones(3).double())

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.batch_norm(self.layer(x), self.mean, self.variance, training=self.training)


@pytest.mark.parametrize("kind", ["own", "outside"])
def test_batch_normalisation_that_no_module_shows_is_given_two_items(kind: str) -> None:
    norm = nn.BatchNorm1d(3).double()
    module = OwnNorm() if kind == "own" else nn.Linear(6, 3).double()
    sizes = Sizes()

    def loss_fn(replica: Any, part: Any) -> Any:
        return sizes((lambda x: norm(replica(x))) if kind == "outside" else replica, part)

    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(3):
            sizes.seen.clear()
            trainer.step(loss_fn, batch_of(3))
        assert sizes.seen == [3]
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            trainer.step(loss_fn, batch_of(1))
        with pytest.warns(UserWarning, match="paceline: loss_fn, or .* calls batch_norm: each micro-batch is"):
            trainer.step(loss_fn, batch_of(8))


def test_a_norm_of_ones_own_runs_once_on_each_device() -> None:
    module, sizes = OwnNorm().eval(), Sizes()
    with DataParallel(module, TWO) as trainer:
        trainer.step(sizes, batch_of(64))
        module.train()
        trainer.step(sizes, batch_of(64))  # which shows it, though no version counts what batch_norm writes
        sizes.seen.clear()
        for _ in range(20):
            trainer.step(sizes, batch_of(64))
        assert len(sizes.seen) == 40
