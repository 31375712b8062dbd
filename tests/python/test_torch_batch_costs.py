"""The lower level of a step with items that do not cost the same: every run's gradients are those of one device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

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


def backward_of_words(module: Any, part: Any) -> None:
    part.backward(loss_of_words(module, part.data))


@pytest.mark.parametrize("balance", ["auto", "even", [1.0, 3.0]])
@pytest.mark.parametrize("micro_batch", [None, 1, 5])
def test_gradients_of_runs_with_costs_are_those_of_one_device(balance: Any, micro_batch: int | None) -> None:
    module, _ = words(1, 0)
    with DataParallel(module, TWO, balance=balance, micro_batch=micro_batch) as trainer:
        for seed in range(8):
            _, batch = words(random.Random(seed).randint(1, 40), seed)
            module.zero_grad()
            wanted_loss, wanted = plain(module, loss_of_words, batch)
            with trainer.batch(batch, cost=batch["length"]) as global_batch:
                loss = global_batch.run(backward_of_words)
            torch.testing.assert_close(loss, wanted_loss)
            assert_same_gradients(module, wanted)


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_several_runs_of_a_batch_with_random_costs_and_weights(devices: int, seed: int) -> None:
    rng = random.Random(seed)
    items = rng.randint(1, 30)
    torch.manual_seed(seed)
    module = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)}).double()
    _, (x, y) = classifier(items, seed=seed)
    weight = torch.tensor([rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(items)], dtype=torch.float64)
    weight[rng.randrange(items)] = 2.0

    def losses(one: Any, name: str, x: torch.Tensor, y: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(one[name](x), y, reduction="none")

    def run_of(name: str) -> Any:
        return lambda one, part: part.backward(losses(one, name, *part.data))

    def both(one: Any, batch: Any) -> Any:
        return ((losses(one, "a", *batch) + losses(one, "b", *batch)) * weight).sum() / weight.sum()

    _, wanted = plain(module, both, (x, y))
    with DataParallel(module, hosts(devices)) as trainer:
        for _ in range(3):
            costs = torch.tensor([rng.choice([0.0, 0.0, rng.random(), 1e6 * rng.random()]) for _ in range(items)])
            module.zero_grad()
            with trainer.batch((x, y), weight=weight, cost=costs) as global_batch:
                assert len(global_batch) == items
                global_batch.run(run_of("a"), parameters=module["a"], name="a")
                global_batch.run(run_of("b"), parameters=module["b"], name="b")
            assert_same_gradients(module, wanted)
        runs = trainer.report()["runs"]
    assert {name: run["steps"] for name, run in runs.items()} == {"a": 3, "b": 3}
    assert {name: run["items"]["steps"] for name, run in runs.items()} == {"a": 3, "b": 3}


def test_a_run_gets_items_of_similar_cost_and_no_more_than_a_micro_batch_may_hold() -> None:
    _, (x, y) = classifier(64)
    module, _ = classifier(64)
    costs = torch.tensor([1.0, 100.0] * 32)
    seen: list[list[int]] = []

    def fn(one: Any, part: Any) -> None:
        seen.append(part.data[2].tolist())
        assert len(part) == len(part.data[2])
        part.backward(classify(one, part.data[:2]))

    with DataParallel(module, TWO, balance="even", micro_batch=8) as trainer:
        with trainer.batch((x, y, torch.arange(64)), cost=lambda batch: costs[batch[2]]) as global_batch:
            global_batch.run(fn)
        assert trainer.shares == dict.fromkeys(TWO, 32)
    assert sorted(item for part in seen for item in part) == list(range(64))
    assert all(len({float(costs[item]) for item in part}) == 1 for part in seen)
    assert max(map(len, seen)) <= 8


def test_runs_with_and_without_costs_alternate_with_steps() -> None:
    module, batch = words(24, 1)
    _, wanted = plain(module, loss_of_words, batch)
    with DataParallel(module, TWO) as trainer:
        for step in range(9):
            module.zero_grad()
            with trainer.batch(batch, cost=batch["length"] if step % 3 else None) as global_batch:
                global_batch.run(backward_of_words)
            assert_same_gradients(module, wanted)
            module.zero_grad()
            trainer.step(loss_of_words, batch)
            assert_same_gradients(module, wanted)
        report = trainer.report()
        assert "Items are dealt by cost" in trainer.explain().split("\nrun backward_of_words: ")[1]
    assert "items" not in report
    assert report["runs"]["backward_of_words"]["items"]["steps"] == 6


def test_a_run_with_costs_that_fails_names_items_and_leaves_everything_as_it_was() -> None:
    module, batch = classifier(12)
    costs = torch.arange(12.0)
    failing = [True]

    def fn(one: Any, part: Any) -> None:
        if failing[0] and 7.0 in part.data[2].tolist():
            raise ValueError("no seven")
        part.backward(classify(one, part.data[:2]))

    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, micro_batch=1) as trainer:
        with trainer.batch((*batch, costs), cost=costs) as global_batch:
            with pytest.raises(ValueError, match="no seven") as caught:
                global_batch.run(fn)
            notes = getattr(caught.value, "__notes__", None) or [str(caught.value.__cause__)]
            assert "at item 7 of the batch" in notes[0]
            assert gradients(module) == [None] * 4
            failing.clear()
            failing.append(False)
            global_batch.run(fn)
    assert_same_gradients(module, wanted)


def test_a_run_with_costs_whose_memory_runs_out_is_made_again_in_smaller_pieces() -> None:
    module, batch = classifier(32)
    _, wanted = plain(module, classify, batch)

    def greedy(one: Any, part: Any) -> None:
        part.backward(classify(one, part.data))
        if len(part) > 3:
            raise torch.OutOfMemoryError("simulated")

    with DataParallel(module, TWO) as trainer, trainer.batch(batch, cost=torch.rand(32)) as global_batch:
        global_batch.run(greedy)
    assert_same_gradients(module, wanted)


def test_scaled_gradients_of_a_run_with_costs() -> None:
    module, batch = classifier(16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer, trainer.batch(batch, cost=torch.rand(16)) as global_batch:
        global_batch.run(lambda one, part: part.weigh(classify(one, part.data)).backward(), scaler=scaler)
    assert_same_gradients(module, [None if one is None else 1024.0 * one for one in wanted])
