"""What really ran: reported, written beside the decisions, and run again to the same bit."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, balance
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, gradients, hosts, noting

Record = list[dict[str, Any]]


def unsteady(_: Any, part: Any) -> None:
    """Devices that are slow now and then, so that shares move and items are taken over."""
    time.sleep(random.choice([0.0, 0.0005, 0.003]) + 2e-5 * len(part[0]))


def claims_of(path: Path) -> Record:
    return [entry["claims"] for entry in map(json.loads, path.read_text().splitlines()) if "claims" in entry]


def claims_of_cut(path: Path) -> Record:
    lines = path.read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[-1])
    return [entry["claims"] for entry in map(json.loads, lines[:-1]) if "claims" in entry]


def results_of(
    prepare: Callable[[DataParallel], None], steps: int = 8, devices: int = 2, **options: Any
) -> list[list[torch.Tensor | None]]:
    """Gradients and losses of single-precision steps."""
    module, batch = classifier(96, dtype=torch.float32)
    results = []
    with DataParallel(module, hosts(devices), **options) as trainer:
        prepare(trainer)
        for step in range(steps):
            size = 96 if step % 4 else 64
            loss = trainer.step(noting(unsteady), (batch[0][:size], batch[1][:size]))
            results.append([*gradients(module), loss])
            module.zero_grad()
    return results


def trained(path: Path, *given: Any, **options: Any) -> list[list[torch.Tensor | None]]:
    """With a ledger."""
    return results_of(lambda trainer: trainer.write_ledger(path), *given, **options)


def replayed(path: Path, *given: Any, **options: Any) -> list[list[torch.Tensor | None]]:
    return results_of(lambda trainer: trainer.replay_claims(path), *given, **options)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (2, {}), (3, {}), (1, {"micro_batch": 7}), (3, {"micro_batch": 7}), (2, {"balance": [3, 1]})],
)
def test_a_ledger_runs_again_to_the_same_bit(tmp_path: Path, devices: int, options: Any) -> None:
    path = tmp_path / "ledger"
    first = trained(path, devices=devices, **options)
    # Another trainer would decide otherwise: even shares, no micro-batches.
    assert same(replayed(path, devices=devices, balance="even"), first)
    if "balance" in options:  # another split is another rounding, else this would say nothing
        assert not same(trained(tmp_path / "other", devices=devices, balance=[1, 3]), first)


def test_a_ledger_whose_last_line_was_cut_off_runs_again_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = trained(path)
    path.write_text(path.read_text()[:-20])  # as a process leaves it that was killed
    steps = len(claims_of_cut(path))
    assert 6 <= steps <= 8
    assert same(replayed(path, steps), first[:steps])


def test_every_item_is_in_the_claims_once_and_decisions_replay_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    trained(path, steps=12)
    steps = claims_of(path)
    assert [entry["step"] for entry in steps] == list(range(12))
    for entry in steps:
        spans = sorted((begin, end) for _, begin, end, _, _ in entry["ran"])
        assert [begin for begin, _ in spans] == [0, *[end for _, end in spans[:-1]]]
        assert spans[-1][1] == entry["batch_size"]
        assert all(0 <= start <= finish for _, _, _, start, finish in entry["ran"])
        # There are some where the search for the size of micro-batches tries sizes.
        assert sum(end - begin for _, begin, end in entry.get("pieces", [])) in (0, entry["batch_size"])
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds[1:4] == ["plan", "record", "claims"]
    result = balance.replay(path)
    assert result.mismatches == []
    assert (result.plans, result.records) == (12, 12)


def test_pieces_under_a_memory_limit_are_run_again_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = trained(path, memory=1500)
    entry = claims_of(path)[0]
    assert len(entry["pieces"]) > len(entry["ran"])
    assert sum(end - begin for _, begin, end in entry["pieces"]) == entry["batch_size"]
    assert same(replayed(path), first)
    lines = path.read_text().splitlines()
    entry["pieces"].pop()
    path.write_text("\n".join([lines[0], json.dumps({"claims": entry})]) + "\n")
    with pytest.raises(InvalidArgument, match="pieces of step 0"):
        replayed(path)


def test_a_step_that_fails_stays_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = trained(path, steps=1)
    module, batch = classifier(96, dtype=torch.float32)
    part = (batch[0][:64], batch[1][:64])
    with DataParallel(module, TWO) as trainer:
        trainer.replay_claims(path)
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: 1 / 0, part)  # type: ignore[arg-type,return-value]
        loss = trainer.step(classify, part)
        assert same([[*gradients(module), loss]], first)
        with pytest.raises(InvalidArgument, match=r"has run again to its end, 1 step\. .*replay_claims\(None\)"):
            trainer.step(classify, part)
        trainer.replay_claims(None)
        trainer.step(classify, part)
        assert trainer.report()["steps"] == 1


RUNS = ("first", "second")


def in_runs(
    prepare: Callable[[DataParallel], None], cost: torch.Tensor | None, **options: Any
) -> list[list[torch.Tensor | None]]:
    """Gradients and losses of two kinds of runs over each of some batches, in single precision."""
    module, batch = classifier(96, dtype=torch.float32)
    results = []

    def fn(one: Any, part: Any) -> None:
        unsteady(one, part.data)
        part.backward(classify(one, part.data))

    with DataParallel(module, TWO, **options) as trainer:
        prepare(trainer)
        for _ in range(5):
            with trainer.batch(batch, cost=cost) as global_batch:
                for name in RUNS:
                    loss = global_batch.run(fn, name=name)
                    results.append([*gradients(module), loss])
                    module.zero_grad()
    return results


@pytest.mark.parametrize("cost", [None, torch.arange(96) % 13 + 1.0], ids=["items", "costs"])
def test_every_run_of_a_batch_has_a_ledger_and_runs_again(tmp_path: Path, cost: torch.Tensor | None) -> None:
    def write(trainer: DataParallel) -> None:
        for name in RUNS:
            trainer.write_ledger(tmp_path / name, run=name)

    def replay(trainer: DataParallel) -> None:
        for name in RUNS:
            trainer.replay_claims(tmp_path / name, run=name)

    first = in_runs(write, cost)
    for name in RUNS:
        assert [entry["step"] for entry in claims_of(tmp_path / name)] == list(range(5))
        result = balance.replay(tmp_path / name)
        assert (result.plans, result.records, result.mismatches) == (5, 5, [])
    assert same(in_runs(replay, cost, balance="even"), first)


def test_one_run_of_a_batch_is_replayed_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "first"
    in_runs(lambda trainer: trainer.write_ledger(path, run="first"), None, balance=[3, 1])
    module, batch = classifier(96, dtype=torch.float32)

    def fn(one: Any, part: Any) -> None:
        part.backward(classify(one, part.data))

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.replay_claims(path, run="first")
        with trainer.batch(batch) as global_batch:
            for _ in range(5):
                global_batch.run(fn, name="first")
                assert list(trainer.shares.values()) == [72, 24]
                global_batch.run(fn, name="second")
                assert list(trainer.shares.values()) == [48, 48]
            with pytest.raises(InvalidArgument, match=r"run first: .*5 steps.*replay_claims\(None, run='first'\)"):
                global_batch.run(fn, name="first")
            trainer.replay_claims(None, run="first")
            global_batch.run(fn, name="first")
            assert list(trainer.shares.values()) == [48, 48]
            with pytest.raises(InvalidArgument, match="called after 1 step"):
                trainer.write_ledger(tmp_path / "late", run="first")


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    trained(path, steps=1)
    module, batch = classifier(96, dtype=torch.float32)
    with DataParallel(module, hosts(3)) as trainer:
        with pytest.raises(InvalidArgument, match=r"2 devices .* this trainer has 3"):
            trainer.replay_claims(path)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(OSError, match="missing"):
            trainer.replay_claims(tmp_path / "missing")
        for text, message in (("[]", "is no ledger"), (path.read_text().splitlines()[0], "holds no step")):
            (tmp_path / "other").write_text(text + "\n")
            with pytest.raises(InvalidArgument, match=message):
                trainer.replay_claims(tmp_path / "other")
        trainer.replay_claims(path)
        with pytest.raises(InvalidArgument, match=r"a batch of 96 items where step 0 .* had 64"):
            trainer.step(classify, batch)
        broken = json.loads(path.read_text().splitlines()[-1])
        assert "claims" in broken
        broken["claims"]["ran"][0][2] -= 1
        lines = path.read_text().splitlines()[:-1]
        path.write_text("\n".join([*lines, json.dumps(broken)]) + "\n")
        trainer.replay_claims(path)
        with pytest.raises(InvalidArgument, match="the script has"):
            trainer.step(classify, (batch[0][:64], batch[1][:64]))


class Sizes:
    """What takes a random time for each item, and keeps the sizes of slices."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, one: Any, part: Any) -> Any:
        self.seen.append(len(part[0]))
        time.sleep(0.0005 * len(part[0]) * random.uniform(0.5, 2.0))
        return classify(one, part)


def test_the_report_knows_every_size_that_ran() -> None:
    module, batch = classifier(32)
    loss_fn = Sizes()
    with DataParallel(module, TWO) as trainer:
        for _ in range(10):
            trainer.step(loss_fn, batch)
        sizes = trainer.report()["sizes"]
    assert list(sizes) == TWO
    assert set().union(*sizes.values()) == set(loss_fn.seen)
    assert all(list(entry) == sorted(set(entry)) for entry in sizes.values())


@pytest.mark.parametrize("norm", [False, True], ids=["hold_back=False", "batch norm"])
def test_without_corrections_shares_are_run_as_planned(norm: bool) -> None:
    module, batch = classifier(64)
    if norm:
        module.insert(1, nn.BatchNorm1d(10).double())
    loss_fn = Sizes()
    with DataParallel(module, TWO, hold_back=None if norm else False) as trainer:
        for _ in range(20):
            trainer.step(loss_fn, batch)
    assert len(loss_fn.seen) <= 40, "one piece of a share each"
    loss_fn.seen.clear()
    with DataParallel(module.eval(), TWO, hold_back=True) as trainer:
        for _ in range(20):
            trainer.step(loss_fn, batch)
    assert len(loss_fn.seen) > 40, "or the above says nothing"
    with pytest.raises(InvalidArgument, match="hold_back is 1; it must be True, False or None"):
        DataParallel(module, TWO, hold_back=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs balance='auto'"):
        DataParallel(module, TWO, hold_back=True, balance="even")


def test_with_a_granularity_there_are_few_sizes_however_speeds_change() -> None:
    module, batch = classifier(100)
    with DataParallel(module, TWO, granularity=16) as trainer:
        for _ in range(40):
            trainer.step(noting(unsteady), batch)
        sizes = set().union(*trainer.report()["sizes"].values())
    # Multiples of 16, and with what is left of 100 as well.
    assert {size % 16 for size in sizes} <= {0, 4}
    assert len(sizes) <= 2 * 7
    with pytest.raises(InvalidArgument, match="granularity is 0"):
        DataParallel(module, TWO, granularity=0)
