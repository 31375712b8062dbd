"""Items that do not cost the same: whatever the costs and the split, gradients and outputs are those of one device."""

from __future__ import annotations

import collections
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
    noting,
    plain,
    words,
)


def trained(trainer: DataParallel, call: str, loss_fn: Any, batch: Any, **options: Any) -> Any:
    """A step, or a run of a batch by a function that runs backward."""
    if call == "step":
        return trainer.step(loss_fn, batch, **options)
    scaler = options.pop("scaler", None)
    with trainer.batch(batch, **options) as global_batch:
        return global_batch.run(lambda one, part: part.backward(loss_fn(one, part.data)), scaler=scaler)


CALLS = pytest.mark.parametrize("call", ["step", "run"])


@CALLS
@pytest.mark.parametrize("balance", ["auto", "even", [1.0, 3.0]])
@pytest.mark.parametrize("micro_batch", [None, 1, 5])
def test_gradients_are_those_of_one_device(balance: Any, micro_batch: int | None, call: str) -> None:
    module, _ = words(1, 0)
    with DataParallel(module, TWO, balance=balance, micro_batch=micro_batch) as trainer:
        for seed in range(12):
            _, batch = words(random.Random(seed).randint(1, 40), seed)
            module.zero_grad()
            wanted_loss, wanted = plain(module, loss_of_words, batch)
            loss = trained(trainer, call, loss_of_words, batch, cost=batch["length"])
            torch.testing.assert_close(loss, wanted_loss)
            assert_same_gradients(module, wanted)


@CALLS
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_random_costs_zero_costs_and_weights(devices: int, seed: int, call: str) -> None:
    rng = random.Random(seed)
    items = rng.randint(1, 30)
    module, batch = classifier(items, seed=seed)
    weight = torch.tensor([rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(items)], dtype=torch.float64)
    weight[rng.randrange(items)] = 2.0

    def single(one: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")

    _, wanted = plain(module, lambda m, b: (single(m, b) * weight).sum() / weight.sum(), batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for step in range(4):
            costs = [rng.choice([0.0, 0.0, rng.random(), 1e6 * rng.random()]) for _ in range(items)]
            cost = torch.tensor(costs) if step else torch.zeros(items, dtype=torch.int64)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=step == 3)
            module.zero_grad()
            trained(trainer, call, single, batch, weight=weight, cost=cost, scaler=scaler)
            assert_same_gradients(module, [one if one is None else scaler.get_scale() * one for one in wanted])


def test_two_runs_of_a_batch_have_costs_of_their_own() -> None:
    module, batch = nn.ModuleDict({name: classifier()[0] for name in "ab"}), classifier()[1]
    _, wanted = plain(module, lambda m, b: classify(m["a"], b) + classify(m["b"], b), batch)
    with DataParallel(module, hosts(3)) as trainer:
        for seed in range(3):
            module.zero_grad()
            with trainer.batch(batch, cost=torch.rand(16, generator=torch.Generator().manual_seed(seed))) as whole:
                assert len(whole) == 16
                for name in "ab":
                    whole.run(
                        lambda m, part, name=name: part.backward(classify(m[name], part.data)),  # type: ignore[misc]
                        parameters=module[name],
                        name=name,
                    )
            assert_same_gradients(module, wanted)
        runs = trainer.report()["runs"]
    assert {name: (run["steps"], run["items"]["steps"]) for name, run in runs.items()} == {"a": (3, 3), "b": (3, 3)}


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_every_item_runs_once_when_a_device_is_slow(micro_batch: int | None) -> None:
    items, rng = 40, random.Random(1)
    module = nn.ParameterList([torch.zeros(items, dtype=torch.double)])
    slow: list[int] = []
    ran: list[int] = []

    def loss_fn(one: Any, part: Any) -> Any:
        slow.append(threading.get_ident())
        ran.append(len(part["item"]))
        one_takes = 1.2e-3 if threading.get_ident() == slow[0] else 3e-4
        time.sleep(one_takes * float(part["cost"].max()) * len(part["item"]))
        return one[0][part["item"]].sum()

    with DataParallel(module, TWO, micro_batch=micro_batch, reduction="sum") as trainer:
        for _ in range(30):
            costs = torch.tensor([rng.lognormvariate(0, 0.7) for _ in range(items)])
            trainer.step(loss_fn, {"item": torch.arange(items), "cost": costs}, cost=costs)
        fast, late = sorted(trainer.report()["devices"].values(), key=lambda entry: entry["items"], reverse=True)
        assert fast["items"] > 1.2 * late["items"]  # four times as fast, on a machine that may be busy
    # Each step divides by the batch size.
    torch.testing.assert_close(module[0].grad, torch.full((items,), 30.0 / items, dtype=torch.double))
    assert sum(ran) == 30 * items
    assert max(ran) <= (micro_batch or items)


def test_costs_decide_and_not_items_and_fixed_ratios_are_of_cost() -> None:
    module, batch = classifier(64)
    costs = torch.ones(64)
    costs[5] = 63.0
    ran: dict[int, float] = collections.defaultdict(float)

    def loss_fn(one: Any, part: Any) -> Any:
        ran[threading.get_ident()] += float(part[2].sum())
        return classify(one, part[:2])

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(classify, batch, cost=costs)
        assert sorted(trainer.shares.values()) == [1, 63]
    costs = torch.cat([torch.full((32,), 3.0), torch.ones(32)])
    with DataParallel(module, TWO, balance=[1, 3]) as trainer:
        for _ in range(8):
            ran.clear()
            trainer.step(loss_fn, (*batch, costs), cost=costs)
            assert min(ran.values()) == pytest.approx(128 / 4, rel=0.2)


@CALLS
@pytest.mark.parametrize("micro_batch", [None, 8])
def test_slices_hold_similar_costs_and_no_more_than_a_micro_batch_may(call: str, micro_batch: int | None) -> None:
    module, batch = classifier(64)
    costs = torch.tensor([1.0, 100.0] * 32)
    seen: list[list[int]] = []
    loss_fn = noting(lambda _, part: seen.append(part[2].tolist()))
    with DataParallel(module, TWO, balance="even", micro_batch=micro_batch) as trainer:
        trained(trainer, call, loss_fn, (*batch, torch.arange(64)), cost=lambda batch: costs[batch[2]])
        assert trainer.shares == dict.fromkeys(TWO, 32)
    assert sorted(item for part in seen for item in part) == list(range(64))
    assert all(len({item % 2 for item in part}) == 1 for part in seen)
    assert max(map(len, seen)) <= (micro_batch or 64)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_predictions_come_in_the_callers_order(devices: int) -> None:
    module, batch = words(37, 5)
    wanted = module(batch).detach()
    with DataParallel(module, hosts(devices)) as trainer:
        for _ in range(4):
            torch.testing.assert_close(trainer.predict(batch, cost=batch["length"]), wanted)
        got = trainer.predict(lambda one, part: (one(part), part["label"]), batch, cost=batch["length"])
    torch.testing.assert_close(got, (wanted, batch["label"]))


@CALLS
def test_a_failure_names_items_and_leaves_everything_as_it_was(call: str) -> None:
    module, batch = classifier(12)
    costs = torch.arange(12.0)

    def failing(one: Any, part: Any) -> Any:
        if 7.0 in part[2].tolist():
            raise ValueError("no seven")
        return classify(one, part[:2])

    with DataParallel(module, TWO, micro_batch=1) as trainer:
        trained(trainer, call, classify, batch, cost=costs)
        before = gradients(module)
        with pytest.raises(ValueError, match="no seven") as caught:
            trained(trainer, call, failing, (*batch, costs), cost=costs)
        for now, then in zip(gradients(module), before, strict=True):
            assert torch.equal(now, then)  # type: ignore[arg-type]
        notes = getattr(caught.value, "__notes__", None) or [str(caught.value.__cause__)]
        assert "at item 7 of the batch" in notes[0]
        module.zero_grad()
        trained(trainer, call, classify, batch, cost=costs)
        assert_same_gradients(module, plain(module, classify, batch)[1])


def test_steps_and_runs_with_and_without_costs_alternate() -> None:
    module, batch = words(24, 1)
    _, wanted = plain(module, loss_of_words, batch)
    with DataParallel(module, TWO) as trainer:
        for step in range(12):
            for call in ("step", "run"):
                module.zero_grad()
                trained(trainer, call, loss_of_words, batch, cost=batch["length"] if step % 3 else None)
                assert_same_gradients(module, wanted)
        report = trainer.report()
        (run,) = report["runs"].values()
        assert "Items are dealt by cost" in trainer.explain().split("\nrun ")[1]
    assert report["steps"] == run["steps"] == 12
    assert report["items"]["steps"] == run["items"]["steps"] == 8


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
        for call, given in ((trainer.step, (classify, batch)), (trainer.predict, (batch,)), (trainer.batch, (batch,))):
            with pytest.raises(InvalidArgument, match=message):
                call(*given, cost=cost)
        trainer.step(classify, batch, cost=torch.ones(4))


def test_a_granularity_is_refused() -> None:
    module, batch = nn.Linear(3, 1), torch.rand(8, 3)
    cost = torch.ones(8)
    with DataParallel(module, TWO, granularity=4) as trainer:
        for call in (
            lambda: trainer.step(lambda one, part: one(part).mean(), batch, cost=cost),
            lambda: trainer.predict(batch, cost=cost),
            lambda: trainer.batch(batch, cost=cost),
        ):
            with pytest.raises(InvalidArgument, match=r"cost= together with granularity="):
                call()
        trainer.step(lambda one, part: one(part).mean(), batch)
