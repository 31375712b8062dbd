"""Devices that leave between steps and come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import InvalidArgument
from paceline.balance import replay
from paceline.torch import DataParallel
from torch_support import assert_same_gradients, classifier, classify, hosts, plain

THREE = hosts(3)


@pytest.mark.parametrize("balance", ["auto", "even", [1.0, 2.0, 3.0]])
def test_a_retired_device_runs_nothing_and_no_item_is_lost(balance: object) -> None:
    module, batch = classifier(48)
    _, expected = plain(module, classify, batch)
    lengths = torch.arange(1, 49)
    with DataParallel(module, THREE, balance=balance) as trainer:  # type: ignore[arg-type]
        for retired in [], ["host:1"], ["host:1", "host:2"], ["host:2"], []:
            for name in THREE:
                (trainer.retire if name in retired else trainer.restore)(name)
            for cost in None, lengths, None:
                module.zero_grad()
                trainer.step(classify, batch, cost=cost)
                assert_same_gradients(module, expected)
                assert sum(trainer.shares.values()) == 48
                assert all(trainer.shares[name] == 0 for name in retired), retired
            assert len(trainer.predict(batch[0])) == 48
            for name in retired:
                assert f"{name}: retired, gets no work" in trainer.explain()


def test_runs_of_a_batch_and_optimizers_go_without_it_too() -> None:
    module, batch = classifier(48)
    with DataParallel(module, THREE, balance="even") as trainer:
        trainer.retire(trainer.group.devices[1])
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        for retired in True, False:
            with trainer.batch(batch) as whole:
                whole.run(lambda one, part: part.backward(classify(one, part.data)))
            optimizer.step()
            (run,) = trainer.report()["runs"].values()
            for figures in run, trainer.report():
                assert {name: one["retired"] for name, one in figures["devices"].items()} == {
                    "host:0": False,
                    "host:1": retired,
                    "host:2": False,
                }
            assert trainer.scalars()["paceline/retired/host_1"] == retired
            items = {name: entry["items"] for name, entry in run["devices"].items()}
            assert items == (
                {"host:0": 24, "host:1": 0, "host:2": 24} if retired else {"host:0": 40, "host:1": 16, "host:2": 40}
            )
            trainer.restore("host:1")


def test_what_cannot_leave_is_refused_and_nothing_changes() -> None:
    module, batch = classifier(48)
    with DataParallel(module, THREE[:2]) as trainer:
        with pytest.raises(InvalidArgument, match="there is no device host:7 in this trainer; it has host:0, host:1"):
            trainer.retire("host:7")
        trainer.retire("host:0")
        with pytest.raises(InvalidArgument, match="host:1 is the last device"):
            trainer.retire("host:1")
        trainer.step(classify, batch)
        assert trainer.shares == {"host:0": 0, "host:1": 48}


def test_a_ledger_has_it_and_replays(tmp_path: Path) -> None:
    module, batch = classifier(48)
    path = tmp_path / "ledger.jsonl"
    with DataParallel(module, THREE) as trainer:
        trainer.write_ledger(path)
        for count in range(12):
            if count == 4:
                trainer.retire("host:2")
            if count == 8:
                trainer.restore("host:2")
            trainer.step(classify, batch)
    result = replay(path)
    assert result.records == 12
    assert result.mismatches == []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    calls = [line for line in lines if not line.keys() & {"claims", "record", "paceline_ledger", "least_items"}]
    assert [next(iter(line)) for line in calls] == [*4 * ["plan"], "retire", *4 * ["plan"], "restore", *4 * ["plan"]]
    assert calls[4]["retire"] == calls[9]["restore"] == {"device": 2}


def test_a_ledger_that_begins_later_has_it_too(tmp_path: Path) -> None:
    module, batch = classifier(48)
    path = tmp_path / "ledger.jsonl"
    with DataParallel(module, THREE) as trainer:
        trainer.retire("host:1")
        trainer.write_ledger(path)
        for _ in range(2):
            trainer.step(classify, batch)
            trainer.step(classify, batch, cost=torch.arange(1, 49))
    assert [line for line in path.read_text().splitlines() if '"retire"' in line] == [
        '{"retire": {"device": 1}}',
        '{"balancer": 1, "retire": {"device": 1}}',
    ]
    assert replay(path).mismatches == []
