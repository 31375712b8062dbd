"""Items that do not cost the same: whatever the costs and the split, gradients and outputs are those of one device."""

from __future__ import annotations

import collections
import copy
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    loss_of_words,
    plain,
    words,
)


@pytest.mark.parametrize("balance", ["auto", "even", [1.0, 3.0]])
@pytest.mark.parametrize("micro_batch", [None, 1, 5])
def test_gradients_are_those_of_one_device(balance: Any, micro_batch: int | None) -> None:
    module, _ = words(1, 0)
    with DataParallel(module, TWO, balance=balance, micro_batch=micro_batch) as trainer:
        for seed in range(12):
            _, batch = words(random.Random(seed).randint(1, 40), seed)
            module.zero_grad()
            wanted_loss, wanted = plain(module, loss_of_words, batch)
            loss = trainer.step(loss_of_words, batch, cost=batch["length"])
            torch.testing.assert_close(loss, wanted_loss)
            assert_same_gradients(module, wanted)


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_costs_zero_costs_and_weights(devices: int, seed: int) -> None:
    rng = random.Random(seed)
    items = rng.randint(1, 30)
    module, batch = classifier(items, seed=seed)
    weight = torch.tensor([rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(items)], dtype=torch.float64)
    weight[rng.randrange(items)] = 2.0

    def weighted(one: Any, part: Any) -> Any:
        losses = nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")
        return (losses * weight).sum() / weight.sum()

    def single(one: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")

    _, wanted = plain(module, weighted, batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for _ in range(4):
            costs = torch.tensor([rng.choice([0.0, 0.0, rng.random(), 1e6 * rng.random()]) for _ in range(items)])
            module.zero_grad()
            trainer.step(single, batch, weight=weight, cost=costs)
            assert_same_gradients(module, wanted)
        module.zero_grad()
        trainer.step(single, batch, weight=weight, cost=torch.zeros(items, dtype=torch.int64))
        assert_same_gradients(module, wanted)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_every_item_runs_once_when_a_device_is_slow(micro_batch: int | None) -> None:
    items = 40
    rng = random.Random(1)

    class Histogram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(items, dtype=torch.double))

    module = Histogram()
    slow: set[int] = set()
    lock = threading.Lock()
    ran: list[int] = []

    def loss_fn(one: Any, part: Any) -> Any:
        with lock:
            if not slow:
                slow.add(threading.get_ident())
            ran.append(len(part["item"]))
        one_takes = 1.2e-3 if threading.get_ident() in slow else 3e-4
        time.sleep(one_takes * float(part["cost"].max()) * len(part["item"]))
        return one.weight[part["item"]].sum()

    with DataParallel(module, TWO, micro_batch=micro_batch, reduction="sum") as trainer:
        for _ in range(30):
            costs = torch.tensor([rng.lognormvariate(0, 0.7) for _ in range(items)])
            trainer.step(loss_fn, {"item": torch.arange(items), "cost": costs}, cost=costs)
        fast, late = sorted(trainer.report()["devices"].values(), key=lambda entry: entry["items"], reverse=True)
        assert fast["items"] > 1.2 * late["items"]  # four times as fast, on a machine that may be busy
    # Each step divides by the batch size.
    torch.testing.assert_close(module.weight.grad, torch.full((items,), 30.0 / items, dtype=torch.double))
    assert sum(ran) == 30 * items
    if micro_batch is not None:
        assert max(ran) <= micro_batch


def test_costs_decide_and_not_items() -> None:
    module, batch = classifier(16)
    costs = torch.ones(16)
    costs[5] = 15.0
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(classify, batch, cost=costs)
        assert sorted(trainer.shares.values()) == [1, 15]


def test_fixed_ratios_are_ratios_of_cost() -> None:
    module, batch = classifier(64)
    costs = torch.cat([torch.full((32,), 3.0), torch.ones(32)])
    ran: dict[int, float] = collections.defaultdict(float)

    def loss_fn(one: Any, part: Any) -> Any:
        ran[threading.get_ident()] += float(part[2].sum())
        return classify(one, part[:2])

    with DataParallel(module, TWO, balance=[1, 3]) as trainer:
        for _ in range(8):
            ran.clear()
            trainer.step(loss_fn, (*batch, costs), cost=costs)
            assert min(ran.values()) == pytest.approx(128 / 4, rel=0.2)


def test_slices_come_longest_first_and_hold_similar_costs() -> None:
    module, batch = classifier(64)
    costs = torch.tensor([1.0, 100.0] * 32)
    seen: list[list[float]] = []

    def loss_fn(one: Any, part: Any) -> Any:
        seen.append(part[2].tolist())
        return classify(one, part[:2])

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(loss_fn, (*batch, costs), cost=costs)
    assert all(len(set(part)) == 1 for part in seen)
    assert sum(map(len, seen)) == 64


def test_the_cost_may_be_made_from_the_batch() -> None:
    module, batch = words(20, 3)
    _, wanted = plain(module, loss_of_words, batch)
    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_of_words, batch, cost=lambda b: b["length"] ** 2)
    assert_same_gradients(module, wanted)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_predictions_come_in_the_callers_order(devices: int) -> None:
    module, batch = words(37, 5)
    with torch.no_grad():
        wanted = module(batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for _ in range(4):
            torch.testing.assert_close(trainer.predict(batch, cost=batch["length"]), wanted)
        got = trainer.predict(
            lambda one, part: {"logits": one(part), "label": part["label"]}, batch, cost=batch["length"]
        )
    torch.testing.assert_close(got["logits"], wanted)
    assert torch.equal(got["label"], batch["label"])


def test_predictions_of_unequal_width_are_refused_with_the_reason() -> None:
    module, _ = classifier(12)
    values = torch.rand(12, 6, dtype=torch.float64)
    widths = torch.arange(12) % 5 + 1

    def trimmed(one: Any, part: Any) -> Any:
        rows, width = part
        return rows[:, : int(width.max())]

    with (
        DataParallel(module, TWO, micro_batch=3) as trainer,
        pytest.raises(InvalidArgument, match=r"output has rows of shape .* in another.*pad=value"),
    ):
        trainer.predict(trimmed, (values, widths), cost=widths)


def test_a_failure_names_items_and_leaves_everything_as_it_was() -> None:
    module, batch = classifier(12)
    costs = torch.arange(12.0)

    def failing(one: Any, part: Any) -> Any:
        if 7.0 in part[2].tolist():
            raise ValueError("no seven")
        return classify(one, part[:2])

    with DataParallel(module, TWO, micro_batch=1) as trainer:
        trainer.step(classify, batch, cost=costs)
        before = gradients(module)
        with pytest.raises(ValueError, match="no seven") as caught:
            trainer.step(failing, (*batch, costs), cost=costs)
        for now, then in zip(gradients(module), before, strict=True):
            assert torch.equal(now, then)  # type: ignore[arg-type]
        notes = getattr(caught.value, "__notes__", None) or [str(caught.value.__cause__)]
        assert "at item 7 of the batch" in notes[0]
        module.zero_grad()
        _, wanted = plain(module, classify, batch)
        trainer.step(classify, batch, cost=costs)
        assert_same_gradients(module, wanted)


def test_scaled_gradients() -> None:
    module, batch = classifier(16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch, scaler=scaler, cost=torch.rand(16))
    assert_same_gradients(module, [None if one is None else 1024.0 * one for one in wanted])


def test_running_statistics_stay_finite_and_of_one_device() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    _, batch = classifier(32)
    alone = copy.deepcopy(module)
    costs = torch.ones(32)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(classify, batch, cost=costs)
    classify(alone, batch)
    torch.testing.assert_close(module[1].running_mean, alone[1].running_mean)
    assert module[1].num_batches_tracked == 1


def test_steps_with_and_without_costs_alternate() -> None:
    module, batch = words(24, 1)
    _, wanted = plain(module, loss_of_words, batch)
    with DataParallel(module, TWO) as trainer:
        for step in range(12):
            module.zero_grad()
            trainer.step(loss_of_words, batch, cost=batch["length"] if step % 3 else None)
            assert_same_gradients(module, wanted)
        report = trainer.report()
        assert report["steps"] == 12
        assert report["items"]["steps"] == 8


@pytest.mark.alone
def test_the_report_tells_what_was_saved() -> None:
    module, batch = words(64, 2)

    def loss_fn(one: Any, part: Any) -> Any:  # long beside what does not depend on the items, on a busy machine too
        time.sleep(1e-5 * len(part["length"]) * float(part["length"].max()))
        return loss_of_words(one, part)

    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_of_words, batch)
        assert "items" not in trainer.report()
        for _ in range(20):
            trainer.step(loss_fn, batch, cost=batch["length"])
        items = trainer.report()["items"]
        text = trainer.explain()
        answer = trainer.what_if(remove=["host:1"])
    assert f"a step of {sum(answer.shares)} units of work would take" in answer.text
    assert items["cost"] == 20 * int(batch["length"].sum())
    assert items["cost"] <= items["padded_cost"] < items["contiguous_cost"]
    assert 0.0 < items["padding_saved"] <= 1.0
    assert items["measure"] in ("padded", "sum", "count")
    assert items["error"] >= 0.0
    assert "of the padding saved" in text


@pytest.mark.alone
def test_learns_what_items_take_when_they_are_trimmed() -> None:
    """A loss that sleeps by the padded cost: that is the measure, and its rate is found."""
    module = nn.Linear(1, 1).double()
    rng = random.Random(0)

    def loss_fn(one: Any, part: Any) -> Any:
        time.sleep(2e-3 + 1e-3 * len(part[0]) * float(part[1].max()))
        return one(part[0]).sum()

    with DataParallel(module, TWO, reduction="sum") as trainer:
        for _ in range(25):
            costs = torch.tensor([rng.lognormvariate(0, 0.8) for _ in range(24)])
            trainer.step(loss_fn, (torch.ones(24, 1).double(), costs), cost=costs)
        items = trainer.report()["items"]
    assert items["measure"] == "padded"
    assert items["seconds_per_cost"] == pytest.approx(1e-3, rel=0.3)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (torch.ones(3), "one real cost per item"),
        (torch.ones(4, 1), "one real cost per item"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "item 1 costs nan"),
        (torch.tensor([1, 2, -3, 4]), "item 2 costs -3"),
        ([1, 2, 3, 4], "list; a 1-D tensor"),
        (lambda batch: [1, 2, 3, 4], "cost: list"),
    ],
)
def test_costs_that_are_none(cost: Any, message: str) -> None:
    module, batch = classifier(4)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(classify, batch, cost=cost)
        with pytest.raises(InvalidArgument, match=message):
            trainer.predict(lambda one, part: one(part[0]), batch, cost=cost)
        with pytest.raises(InvalidArgument, match=message):
            trainer.batch(batch, cost=cost)
        trainer.step(classify, batch, cost=torch.ones(4))


def test_a_granularity_is_refused() -> None:
    module, batch = nn.Linear(3, 1), torch.rand(8, 3)
    with DataParallel(module, TWO, granularity=4) as trainer:
        with pytest.raises(InvalidArgument, match=r"cost= together with granularity="):
            trainer.step(lambda one, part: one(part).mean(), batch, cost=torch.ones(8))
        with pytest.raises(InvalidArgument, match=r"cost= together with granularity="):
            trainer.predict(batch, cost=torch.ones(8))
        with pytest.raises(InvalidArgument, match=r"cost= together with granularity="):
            trainer.batch(batch, cost=torch.ones(8))
        trainer.step(lambda one, part: one(part).mean(), batch)
