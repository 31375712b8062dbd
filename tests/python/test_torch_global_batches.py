"""`DataParallel.batch_sampler`: ranks load their own parts of global batches, and slow ranks get smaller ones."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from paceline import Error, InvalidArgument
from paceline.balance import replay
from paceline.torch import DataParallel, GlobalBatchSampler
from paceline.torch._batch.global_sampler import scaled
from paceline.torch._run.rank_shares import RankShares
from rank_processes import error_of, trainer_of
from torch_support import classifier, classify, descend, hosts, noting, worst_difference

ITEMS, BATCH = 100, 12  # eight full batches in an epoch, and one of four items
SPLITS = [(9, 3), (2, 10), (12, 0), (5, 7), (0, 12), (6, 6)]
LENGTHS = [float((7 * index) % 23 + 1) for index in range(ITEMS)]
Run = Callable[..., list[Any]]


class Numbered(Dataset[Any]):
    """A data set whose items know their numbers."""

    def __init__(self) -> None:
        self._data = classifier(ITEMS)[1]

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        return index, self._data[0][index], self._data[1][index]


def loss_of(module: Any, batch: Any) -> Any:
    return classify(module, batch[1:])


class Script:
    """A balancer whose decisions are known before."""

    ledger_failed = False

    def __init__(self, splits: Sequence[tuple[int, ...]] = SPLITS) -> None:
        self.splits = itertools.cycle(splits)
        self.records: list[Any] = []

    def record(self, devices: Any, step_seconds: float, *, startup_seconds: Any) -> None:
        self.records.append((devices, step_seconds, startup_seconds))

    def next_plan(self, batch_size: int) -> Any:
        return SimpleNamespace(shares=list(next(self.splits)))


def loader_of(sampler: GlobalBatchSampler, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_sampler=sampler, num_workers=workers)


def stepped(trainer: DataParallel, batch: Any) -> list[int]:
    """One step of gradient descent. Returns the numbers of the items."""
    trainer.step(loss_of, batch)
    descend(trainer.module)
    return [] if batch is None else batch[0].tolist()


def training(
    rank: int, workers: list[int], epochs: int, given: Any = None, splits: Any = SPLITS, *, several: bool = False
) -> Any:
    """Epochs, with another split as soon as a batch of the last one has run. With `several`, rank r has r + 1 devices."""
    module = classifier(1, seed=rank)[0]
    with trainer_of(module, rank if several else 0) as trainer:
        sampler = trainer.batch_sampler(**(given or {"items": ITEMS}), batch_size=BATCH, seed=3)
        ranks: Any = trainer._execution.ranks
        if rank == 0:
            ranks.dealt.balancer = Script(splits)
        loader = loader_of(sampler, workers[rank])
        items, plans = [], []
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader):
                items.append(stepped(trainer, batch))
                plans.append(sampler.current)
    return items, plans, [parameter.detach() for parameter in module.parameters()]


def one_device(steps: int) -> tuple[list[list[int]], Any]:
    """The global batches and the parameters of a training on one device, which knows nothing of ranks."""
    module = classifier(1)[0]
    batches: list[list[int]] = []
    with DataParallel(module, hosts(1)) as trainer:
        sampler = trainer.batch_sampler(ITEMS, BATCH, seed=3)
        while len(batches) < steps:
            for batch in itertools.islice(sampler.batches(loader_of(sampler, 0)), steps - len(batches)):
                batches.append(stepped(trainer, batch))
    return batches, [parameter.detach() for parameter in module.parameters()]


def test_each_item_is_trained_on_once_while_shares_change_and_loaders_draw_ahead(on_ranks: Run) -> None:
    results = on_ranks(2, training, [2, 0], 3)
    batches, parameters = one_device(27)
    for items, stamps, found in results:
        assert len(items) == 27
        assert stamps == results[0][1]
        assert worst_difference(found, parameters) < 1e-12
    splits = [stamp.shares for stamp in results[0][1]]
    assert len(set(splits)) > 3, "shares did not change"
    assert any(0 in split for split in splits), "no rank was without items"
    for wanted, split, *parts in zip(batches, splits, results[0][0], results[1][0], strict=True):
        assert [len(part) for part in parts] == list(split)
        assert parts[0] + parts[1] == wanted
    assert sorted(itertools.chain(*batches[:9])) == sorted(itertools.chain(*batches[9:18])) == list(range(ITEMS))
    assert batches[:9] != batches[9:18], "both epochs have the same order"


def uneven(rank: int) -> Any:
    """Rank 1 takes five times as long for an item."""
    module = classifier(1)[0]
    slow = noting(lambda _, batch: time.sleep(len(batch[0]) * (0.003 if rank else 0.0006)), loss_of)
    with trainer_of(module) as trainer:
        sampler = trainer.batch_sampler(ITEMS, 25, ledger=True)
        loader = loader_of(sampler, 0)
        while sampler.epoch < 6:
            for batch in sampler.batches(loader):
                trainer.step(slow, batch)
                module.zero_grad()
        ledger = trainer.rank_ledger() if rank == 0 else ""
        answer = trainer.what_if(of="ranks", remove=["rank 1"]).shares if rank == 0 else []
        return sampler.shares, trainer.report(), trainer.explain(), ledger, answer


def logged(rank: int) -> Any:
    with trainer_of(classifier(1)[0]) as trainer:
        sampler = trainer.batch_sampler(ITEMS, 25, balance=[2, 3])
        for batch in sampler.batches(loader_of(sampler, 0)):
            trainer.step(loss_of, batch)
            break
        refused = None if rank == 0 else error_of(lambda: trainer.what_if(of="ranks"))
        return trainer.scalars(""), refused


def test_what_rank_0_logs_has_the_shares_of_all_ranks(on_ranks: Run) -> None:
    (found, _), (theirs, (kind, text)) = on_ranks(2, logged)
    assert [found["share/rank_0"], found["share/rank_1"]] == [10, 15]
    assert found["seconds/rank_1"] > 0
    assert not any("rank_" in name for name in theirs)
    assert kind is InvalidArgument
    assert "of='ranks' is for rank 0" in text


@pytest.mark.alone
def test_a_slow_rank_gets_fewer_items_and_rank_0_can_say_why(on_ranks: Run) -> None:
    (shares, report, text, ledger, alone), (theirs, other, *_) = on_ranks(2, uneven)
    assert shares == theirs
    assert sum(shares) == 25
    assert shares[1] < shares[0] - 6  # on a busy machine it may get none
    rows = {row["name"]: row["share"] for row in report["rank_shares"]["devices"]}
    planned = list(rows.values())  # newer than the last batch
    assert sum(planned) == 25
    assert planned[1] < planned[0] - 6
    assert list(rows) == ["rank 0", "rank 1"]
    assert report["rank_shares"]["moves"] > 0
    assert "rank_shares" not in other
    assert "ranks: auto balance" in text
    assert alone == [25, 0]
    found = replay(ledger.splitlines())
    assert found.plans > 10
    assert not found.mismatches


def timings(stamps: list[int], script: Script, own: GlobalBatchSampler) -> Iterator[int]:
    """Train on the next batches after two were drawn ahead. Rank 0 takes 2 s, rank 1 takes 3 s and begins 1 s later."""
    dealt: Any = RankShares(own, script)  # type: ignore[arg-type]
    draws = iter(own)
    next(draws), next(draws)
    for _ in range(12):
        stamp = own._hand_out(own._iteration)
        next(draws, None)
        dealt.decide()
        if dealt.plan != dealt.followed:
            own.follow(own.drawn, dealt.plan, dealt.shares)
            dealt.followed = dealt.plan
        headers = [
            SimpleNamespace(items=n, seconds=2.0 + r, between=5.0 + r, loss_type=0) for r, n in enumerate(stamp.shares)
        ]
        dealt.measured(headers)
        own.trained()
        stamps.append(stamp.plan)
        yield len(script.records)


def test_only_batches_of_the_newest_plan_are_evidence_and_no_waiting_counts() -> None:
    script, stamps = Script([(7, 5), (7, 5), (4, 8)]), list[int]()
    records = list(timings(stamps, script, GlobalBatchSampler(200, 12, ranks=2)))
    # The plan that is made first is followed from the third batch on. Two are drawn ahead, and the first of its own only warms up.
    assert stamps[:2] == [0, 0]
    assert stamps == sorted(stamps)
    assert script.records[0] == ([[(7, 2.0, False)], [(5, 3.0, False)]], 4.0, [0.0, 1.0])
    assert records[:5] == [0] * 5
    recorded = [tuple(part[0][0] for part in devices) for devices, _, _ in script.records]
    assert recorded[:3] == [(7, 5), (7, 5), (4, 8)]


def test_shares_of_smaller_batches_are_whole_numbers_in_proportion() -> None:
    for size, split in itertools.product(range(1, 13), SPLITS):
        found = scaled(split, size)
        assert sum(found) == size
        assert all(abs(one * 12 - size * share) < 12 for one, share in zip(found, split, strict=True))
    assert scaled((1, 1, 1), 2) == (1, 1, 0)


def part_of_an_epoch(rank: int, state: bytes | None, steps: int, fails: bool) -> Any:
    def failing(module: Any, batch: Any) -> Any:
        raise KeyError("bad item")

    with trainer_of(classifier(1)[0]) as trainer:
        if state is not None:
            trainer.load_training_state(torch.load(io.BytesIO(state), weights_only=True)["trainer"])
        options: dict[str, Any] = {} if state is not None else {"seed": 3, "balance": [1.0, 0.0]}
        sampler = trainer.batch_sampler(ITEMS, BATCH, **options)
        loader = loader_of(sampler, 1 if rank == 0 else 0)
        done = [stepped(trainer, batch) for batch in itertools.islice(sampler.batches(loader), steps)]
        if fails:  # a batch that was handed out, but not trained on
            with pytest.raises(Error if rank else KeyError):
                trainer.step(failing, next(sampler.batches(loader)))
        file = io.BytesIO()
        torch.save({"trainer": trainer.training_state()}, file)
        return done, file.getvalue(), trainer.training_state()


def joined(results: list[Any]) -> list[list[int]]:
    return [list(itertools.chain(*parts)) for parts in zip(*(done for done, _, _ in results), strict=True)]


def test_a_resumed_run_goes_on_with_the_very_next_global_batch_on_any_number_of_ranks(
    processes: Any, tmp_path: Any
) -> None:
    wanted = one_device(18)[0]
    first = processes.results(2, tmp_path / "two", part_of_an_epoch, None, 4, True)
    assert [state["sampler"]["position"] for _, _, state in first] == [4, 4], "the batch that failed would be lost"
    second = processes.results(3, tmp_path / "three", part_of_an_epoch, first[0][1], 99, False)
    assert joined(first) + joined(second) == wanted[:9]
    assert [state["steps"] for _, _, state in first] == [4, 4], "a rank without items has done the steps, too"
    assert second[0][2]["sampler"]["epoch"] == 1
    with DataParallel(classifier(1)[0], hosts(1)) as trainer:  # without a group
        sampler = trainer.batch_sampler(ITEMS, BATCH)
        trainer.load_training_state(torch.load(io.BytesIO(second[0][1]), weights_only=True)["trainer"])
        assert next(iter(sampler.batches(loader_of(sampler, 0))))[0].tolist() == wanted[9]


REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], list[str]]] = {
    "few": (lambda rank: {"batch_size": 1}, ["batch_size is 1 for 2 ranks"] * 2),
    "ratios": (lambda rank: {"balance": [1.0, 2.0, 3.0]}, ["balance has 3 ratios for 2 ranks"] * 2),
    "seeds": (lambda rank: {"seed": rank}, ["rank 1 has another sampler than rank 0"] * 2),
    "policy": (
        lambda rank: {"balance": "fast" if rank else "auto"},
        ["Error: batch_sampler: a rank failed", "balance is 'fast'"],
    ),
    "lengths": (lambda rank: {"items": [1.0 + rank, *[2.0] * 99]}, ["rank 1 has another sampler than rank 0"] * 2),
    "costs": (
        lambda rank: {"items": LENGTHS, "cost": [1.0 + rank, *LENGTHS[1:]]},
        ["of the same size, lengths, costs"] * 2,
    ),
    "padded": (lambda rank: {"items": LENGTHS, "padded": rank == 0}, ["rank 1 has another sampler than rank 0"] * 2),
    "no lengths": (
        lambda rank: {"cost": LENGTHS},
        ["batch_sampler: cost= and padded= need the lengths of all items"] * 2,
    ),
    "few costs": (
        lambda rank: {"items": LENGTHS, "cost": [1.0] * 3 if rank else None},
        ["rank 1: InvalidArgument: cost has 3 entries for 100 lengths", "cost has 3 entries for 100 lengths"],
    ),
    "a negative cost": (lambda rank: {"items": LENGTHS, "cost": lambda _: -1.0}, ["the cost of item 0 is -1.0"] * 2),
    "no work": (lambda rank: {"items": [0.0] * ITEMS}, ["the costs of all items sum to 0.0"] * 2),
    "no numbers": (lambda rank: {"items": ["a"] * ITEMS}, ["lengths and cost are one number per item"] * 2),
    "rows": (lambda rank: {"items": torch.ones(ITEMS, 2)}, ["one number per item, not of shape (100, 2)"] * 2),
    "ledger": (lambda rank: {"ledger": 1}, ["batch_sampler: ledger is 1; it must be the path of a file"] * 2),
    "folder": (
        lambda rank: {"ledger": "/none/ranks.jsonl"},
        ["ledger: /none/ranks.jsonl cannot be opened for writing (No such file or directory)"] * 2,
    ),
    "full": (lambda rank: {"ledger": "/dev/full"}, ["/dev/full cannot be written to; is the disk full?"] * 2),
    "direct": (lambda rank: {}, ["in sampler.batches(loader)"] * 2),
    "apart": (lambda rank: {}, ["or is at another global batch"] * 2),
}


def refused(rank: int, how: str) -> Any:
    errors = []
    with trainer_of(classifier(1)[0]) as trainer:
        try:
            sampler = trainer.batch_sampler(**{"items": ITEMS, "batch_size": BATCH, **REFUSED[how][0](rank)})
            loader = loader_of(sampler)
            if how == "direct":
                trainer.step(loss_of, next(iter(loader)))
            if how == "apart":
                batches = sampler.batches(loader)
                next(batches)
                trainer.step(loss_of, next(batches) if rank else None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        sampler = trainer.batch_sampler(ITEMS, BATCH)  # the trainer still works
        trainer.step(loss_of, next(sampler.batches(loader_of(sampler))))
    return errors


@pytest.mark.parametrize("how", REFUSED)
def test_what_does_not_fit_is_an_error_on_all_ranks(on_ranks: Run, how: str) -> None:
    for (error,), message in zip(on_ranks(2, refused, how), REFUSED[how][1], strict=True):
        assert message in error


def test_samplers_refuse_other_loaders_sizes_and_states() -> None:
    with DataParallel(classifier(1)[0], hosts(1)) as trainer:
        sampler = trainer.batch_sampler(ITEMS, BATCH)
        other = DataLoader(Numbered(), batch_size=BATCH)
        late = DataLoader(Numbered(), batch_sampler=sampler, in_order=False)
        for call, message in (
            (lambda: next(sampler.batches(other)), "does not have this sampler"),
            (lambda: next(sampler.batches(late)), "in another order"),
            (
                lambda: trainer.batch_sampler(ITEMS, 24).load_state_dict(sampler.state_dict()),
                "batch_size=12, and .* 24",
            ),
            (lambda: sampler.load_state_dict({"epoch": 1}), "not a state of a sampler"),
            (lambda: trainer.batch_sampler(5, BATCH, drop_last=True), "one batch needs 12 with drop_last"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                call()
        sampler = trainer.batch_sampler(ITEMS, BATCH)
        batches = sampler.batches(loader_of(sampler))
        next(batches)
        sampler.load_state_dict(sampler.state_dict())
        with pytest.raises(InvalidArgument, match="a state was loaded"):
            list(batches)
