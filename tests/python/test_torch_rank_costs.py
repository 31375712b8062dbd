"""`DataParallel.batch_sampler` with lengths and costs: ranks get parts that take equally long, and the gradient stays that of the batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline import InvalidArgument
from paceline.balance import replay
from paceline.torch import DataParallel
from paceline.torch._batch.by_cost import ByCost
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._run.rank_shares import RankShares
from rank_processes import Run, trainer_of
from test_torch_global_batches import (
    BATCH,
    ITEMS,
    LENGTHS,
    Script,
    joined,
    loader_of,
    loss_of,
    one_device,
    stepped,
    training,
)
from torch_support import classifier, hosts, worst_difference

SQUARES = [length**2 for length in LENGTHS]
# Of a million units of work.
SPLITS = [(750_000, 250_000), (100_000, 900_000), (1_000_000, 0), (500_000, 500_000), (0, 1_000_000), (999_999, 1)]
GIVEN: dict[str, dict[str, Any]] = {
    "lengths": {"items": LENGTHS},
    "costs": {"items": LENGTHS, "cost": SQUARES},
    "a function": {"items": torch.tensor(LENGTHS), "cost": lambda length: length**2},
    "padded": {"items": LENGTHS, "padded": True},
}


# The gradient.


def training_by_cost(rank: int, how: str, workers: int) -> Any:
    return training(rank, [workers, workers], 2, GIVEN[how], SPLITS, several=True)


@pytest.mark.parametrize(("how", "workers"), [("lengths", 0), ("costs", 0), ("a function", 1), ("padded", 0)])
def test_the_gradient_is_that_of_one_device_whatever_items_cost(on_ranks: Run, how: str, workers: int) -> None:
    results = on_ranks(2, training_by_cost, how, workers)
    batches, parameters = one_device(18)
    stamps = results[0][1]
    for items, theirs, found in results:
        assert len(items) == 18
        assert theirs == stamps
        assert worst_difference(found, parameters) < 1e-12
    for wanted, stamp, *parts in zip(batches, stamps, results[0][0], results[1][0], strict=True):
        assert sorted(parts[0] + parts[1]) == sorted(wanted)
        assert tuple(map(len, parts)) == stamp.shares
    assert len({stamp.shares for stamp in stamps}) > 4, "shares did not change"
    assert any(0 in stamp.shares for stamp in stamps), "no rank was without items"
    assert any(min(stamp.shares) == 1 for stamp in stamps), "no rank with a small share had an item"


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_with_a_share_have_an_item_and_ranks_without_one_have_none(padded: bool) -> None:
    by_cost = ByCost(LENGTHS, None, padded)
    batch = list(range(12))
    for split in [(1, 0, 999_999), (0, 0, 1_000_000), (0, 1, 999_999), (333_334, 333_333, 333_333), (1, 999_998, 1)]:
        parts = by_cost.parts(batch, split, 5)
        assert [bool(part) for part in parts] == [share > 0 for share in split]
        assert sorted(itertools.chain(*parts)) == batch
    assert by_cost.parts([3], (0, 500_000, 500_000), 0)[0] == []


# The balance.


def by_work(
    rank: int, size: int, epochs: int, slow: Callable[[int], float], given: dict[str, Any], padded: bool
) -> Any:
    """Train with a rank 1 that is `slow(step)` times as slow, by a clock that only work moves."""
    module = classifier(1)[0]
    costs = given.get("cost") or given["items"]
    data = TensorDataset(torch.arange(len(costs)), *classifier(len(costs))[1])
    clock, counts = [0.0], list[list[int]]()
    with trainer_of(module) as trainer:
        sampler = trainer.batch_sampler(**given, batch_size=size, padded=padded, ledger=True)
        ranks: Any = trainer._execution.ranks
        exchange = ranks._exchange
        ranks._exchange = lambda header, *rest: exchange(
            header._replace(seconds=clock[0], between=0.0) if header.seconds else header, *rest
        )
        loader: Any = DataLoader(data, batch_sampler=sampler)
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader):
                numbers = [] if batch is None else batch[0].tolist()
                work = [costs[index] for index in numbers]
                whole = max(work, default=0.0) * len(work) if padded else sum(work)
                clock[0] = (1e-3 + 1e-4 * whole) * (slow(len(counts)) if rank else 1.0)
                trainer.step(loss_of, batch)
                module.zero_grad()
                counts.append(numbers)
        report = trainer.report()
        ledger = trainer.rank_ledger() if rank == 0 else ""
        answer = trainer.what_if(of="ranks", batch_size=500_000) if rank == 0 else None
        answered = None if answer is None else (answer.text, answer.shares)
        return counts, sampler.shares, report, trainer.explain(), ledger, answered, trainer.scalars("")


def three_times(_: int) -> float:
    return 3.0


MANY = [float((7 * index) % 23 + 1) for index in range(400)]


@pytest.mark.parametrize(("padded", "cost"), [(False, False), (False, True), (True, False)])
def test_a_slow_rank_gets_less_work_and_rank_0_names_the_unit(on_ranks: Run, padded: bool, cost: bool) -> None:
    given = {"items": MANY, "cost": [length**2 for length in MANY] if cost else None}
    (mine, shares, report, text, ledger, answered, scalars), (theirs, others, other, *_) = on_ranks(
        2, by_work, 40, 4, three_times, given, padded
    )
    assert shares == others
    assert sum(shares) == 1_000_000
    assert abs(shares[0] / 1e6 - 0.75) < 0.03, text
    epochs = [sorted(itertools.chain(*mine[k : k + 10], *theirs[k : k + 10])) for k in range(0, 40, 10)]
    assert epochs == [list(range(400))] * 4
    seconds = [row["seconds"] for row in report["ranks"]]
    assert max(seconds) / min(seconds) < 1.15
    assert [row["items"] for row in report["ranks"]] == [len(mine[-1]), len(theirs[-1])]
    assert len({len(part) for part in mine[-10:]}) > 1, "items were dealt by count"
    assert report["rank_shares"]["unit"] == "units of work"
    assert "rank_shares" not in other
    assert "ranks: items are dealt out by cost, and an average batch has 1000000 units of work; auto balance" in text
    assert "shares of a batch of 1000000 units of work" in text
    assert answered[0].startswith("a step of 500000 units of work would take")
    assert sum(answered[1]) == 500_000
    assert scalars["share/rank_1"] == shares[1]
    assert scalars["work_per_second/rank_0"] == pytest.approx(3 * scalars["work_per_second/rank_1"], rel=0.1)
    assert not any(name.startswith("items_per_second/rank") for name in scalars)
    assert json.loads(ledger.splitlines()[0])["options"]["unit"] == "units of work"
    found = replay(ledger.splitlines())
    assert found.plans > 10
    assert not found.mismatches


def very_slow_for_a_while(step: int) -> float:
    return 10.0 if step < 60 else 1.0


def test_a_rank_that_lost_its_work_is_tried_again_and_gets_it_back(on_ranks: Run) -> None:
    given = {"items": [50.0] * 400, "cost": None}
    (_, shares, _, text, ledger, *_), (theirs, *_) = on_ranks(2, by_work, 8, 8, very_slow_for_a_while, given, False)
    assert not any(theirs[20:60]), "an item takes the slow rank longer than the whole batch the other one"
    assert abs(shares[0] / 1e6 - 0.5) < 0.05, text
    assert not replay(ledger.splitlines()).mismatches


def test_a_batch_whose_items_cost_nothing_is_no_evidence() -> None:
    costs = [0.0] * 8 + [1.0] * 8
    sampler = GlobalBatchSampler(16, 4, ranks=2, shuffle=False, by_cost=ByCost(costs, None, False))
    script = Script([(500_000, 500_000)])
    dealt: Any = RankShares(sampler, script)  # type: ignore[arg-type]
    for _ in sampler:
        stamp = sampler._hand_out(sampler._iteration)
        dealt.measured([SimpleNamespace(items=n, seconds=2.0, between=0.0, loss_type=0) for n in stamp.shares])
        sampler.trained()
        sampler.current = None
        dealt.decide()
    # Two batches say nothing, and the first of the others only warms up.
    assert script.records == [([[(1_000_000, 2.0, False)], [(1_000_000, 2.0, False)]], 2.0, [0.0, 0.0])]


# Where the training is in the data.


def part_of_an_epoch(rank: int, state: Any, steps: int, given: dict[str, Any]) -> Any:
    with trainer_of(classifier(1)[0]) as trainer:
        if state is not None:
            trainer.load_training_state(state)
        sampler = trainer.batch_sampler(**given, batch_size=BATCH, seed=0 if state else 3)
        batches = itertools.islice(sampler.batches(loader_of(sampler, rank)), steps)
        return [stepped(trainer, batch) for batch in batches], None, trainer.training_state()


@pytest.mark.parametrize("before", [{"items": ITEMS}, {"items": LENGTHS}])
@pytest.mark.parametrize("after", [{"items": ITEMS}, {"items": LENGTHS, "cost": SQUARES}])
def test_a_resumed_run_may_have_other_costs(
    processes: Any, tmp_path: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    wanted = [sorted(batch) for batch in one_device(9)[0]]
    first = processes.results(2, tmp_path / "two", part_of_an_epoch, None, 4, before)
    assert [state["sampler"]["position"] for _, _, state in first] == [4, 4]
    second = processes.results(3, tmp_path / "three", part_of_an_epoch, first[0][2], 99, after)
    assert [sorted(batch) for batch in joined(first) + joined(second)] == wanted
    with DataParallel(classifier(1)[0], hosts(1)) as trainer:  # without a group
        trainer.load_training_state(second[0][2])
        sampler = trainer.batch_sampler(**after, batch_size=BATCH)
        assert sampler.epoch == 1
        assert len(next(iter(sampler.batches(loader_of(sampler))))[0]) == BATCH
        with pytest.raises(InvalidArgument, match="items=100, and this one has 99"):
            trainer.batch_sampler(99, BATCH).load_state_dict(second[0][2]["sampler"])
