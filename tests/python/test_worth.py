"""What devices are worth: `paceline.balance.worth`, `what_if(prices=)` and the command `paceline worth`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline._cli import main
from paceline._replay import replayed
from paceline._worth import asked
from paceline.balance import Balancer, WhatIfAnswer, Worth, worth
from paceline.torch import DataParallel
from paceline.torch._run import alone as _alone
from test_worth_pool import pool_ledger
from torch_support import TWO, classifier, classify


def ledger(
    seconds: Sequence[float],
    *,
    fixed: Sequence[float] = (),
    idle: float = 0.0,
    steps: int = 12,
    names: Sequence[str] = (),
) -> list[str]:
    """Of devices a, b, ... that take exactly so many seconds for an item. `idle`: seconds of each step in which nobody computes."""
    names = names or [chr(ord("a") + device) for device in range(len(seconds))]
    balancer = Balancer(names, device_classes=names, ledger=True)
    for _ in range(steps):
        shares = balancer.next_plan(120).shares
        more = [*fixed, *[0.0] * len(seconds)]
        took = [n * s + m if n else 0.0 for n, s, m in zip(shares, seconds, more, strict=False)]
        balancer.record([[(n, s)] if n else [] for n, s in zip(shares, took, strict=True)], max(took) + idle)
    return [f"{line}\n" for line in balancer.ledger().split("\n") if line]


def test_each_subset_takes_what_its_devices_take_and_costs_what_they_cost() -> None:
    (found,) = worth(ledger([1e-3, 3e-3]), {"a": 2.0, "b": 1.0})
    by_devices = {" ".join(one.devices): one for one in found.choices}
    assert [" ".join(one.devices) for one in found.choices] == ["a b", "a", "b"]
    for names, seconds, price in (("a", 1.0, 2.0), ("b", 3.0, 1.0), ("a b", 0.75, 3.0)):
        one = by_devices[names]
        assert one.seconds == pytest.approx(seconds, rel=0.02)
        assert one.step_seconds == pytest.approx(0.12 * seconds, rel=0.02)
        assert one.cost == pytest.approx(one.seconds * price / 3600)
        assert 0 <= one.error < 0.1
    assert found.fastest is by_devices["a b"]
    assert found.cheapest is by_devices["a"]
    assert (found.batch_size, found.unit) == (120, "items")
    text = str(found)
    assert "fastest:  a b, 0.75" in text
    assert "cheapest: a, 0.000555" in text
    assert "no time between steps" in text


def test_without_prices_there_are_seconds_only() -> None:
    (found,) = worth(ledger([1e-3, 3e-3]))
    assert found.cheapest is None
    assert all(one.cost is None for one in found.choices)
    assert "cost" not in str(found)


@pytest.mark.parametrize("prices", [{"cuda:0": 2.0}, {"cuda": 2.0}])
def test_parts_of_a_gpu_are_paid_once(prices: dict[str, float]) -> None:
    lines = ledger([1e-3, 1e-3], names=["cuda:0/0", "cuda:0/1"])
    (found,) = worth(lines, prices, add=[("cuda:0/0", 1.0)])
    for one in found.choices:  # what is added is a part of another GPU
        gpus = len({name.partition("/")[0] for name in one.devices})
        assert one.cost == pytest.approx(one.seconds * 2.0 * gpus / 3600)
    (found,) = worth(lines, {"cuda:0/0": 0.5, "cuda:0/1": 0.25})
    (both,) = [one for one in found.choices if len(one.devices) == 2]
    assert both.cost == pytest.approx(both.seconds * 0.75 / 3600)


def test_a_name_may_look_like_that_of_an_added_device() -> None:
    (found,) = worth(ledger([1e-3, 3e-3], names=["a (2)", "b"]), {"a (2)": 2.0, "b": 1.0})
    assert found.fastest.cost == pytest.approx(found.fastest.seconds * 3.0 / 3600)


def test_what_is_in_no_subset_needs_no_price() -> None:
    lines = ledger([1e-3, 3e-3])
    (found,) = worth(lines, {"a": 2.0}, remove=["b"])
    assert [(one.devices, one.cost) for one in found.choices] == [(["a"], found.choices[0].seconds * 2.0 / 3600)]
    assert worth(lines, {"a": 2.0, "b": 1.0}, remove=["b"])[0].choices == found.choices


def test_without_prices_many_subsets_have_the_fastest_rows() -> None:
    (found,) = worth(ledger([1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3]))
    assert len(found.choices) == 31
    _, _, _, *rows = str(found).splitlines()
    assert [row.split("  ")[0].strip() for row in rows[:24]] == [" ".join(one.devices) for one in found.choices[:24]]
    assert rows[24] == "and 7 other subsets: as fast as one of these, or slower"


def test_a_subset_that_leaves_a_device_without_work_is_none() -> None:
    (found,) = worth(ledger([1e-3, 1e-3], fixed=[0.0, 5.0], steps=30))
    assert [one.devices for one in found.choices] == [["a"], ["b"]]


def test_a_retired_device_is_in_no_subset() -> None:
    balancer = Balancer(["a", "b"], ledger=True)
    balancer.retire(1)
    balancer.record([[(balancer.next_plan(120).shares[0], 0.12)], []])
    (found,) = worth([f"{line}\n" for line in balancer.ledger().split("\n") if line], {"a": 1.0})
    assert [one.devices for one in found.choices] == [["a"]]
    assert "b has run nothing." in found.notes


def test_devices_may_be_added_and_left_out() -> None:
    lines = ledger([1e-3, 3e-3])
    (found,) = worth(lines, {"a": 2.0, "b": 1.0, "another a": 9.0}, add=[("a", 2.0), ("a", 1.0)], remove=["b"])
    best = {" ".join(one.devices): one for one in found.choices}
    assert len(best) == 7
    assert found.fastest.devices == ["a", "another a", "another a (2)"]
    assert found.fastest.seconds == pytest.approx(0.25, rel=0.03)
    assert found.fastest.cost == pytest.approx(found.fastest.seconds * 20 / 3600)
    assert found.cheapest is best["a"]


def test_of_many_devices_those_are_left_out_that_are_worth_least() -> None:
    seconds = [1e-3 * (1 + device / 4) for device in range(12)]
    prices = {chr(ord("a") + device): 1.0 for device in range(11)} | {"l": 0.1}  # the slowest one is nearly free
    (found,) = worth(ledger(seconds), prices)
    assert len(found.choices) < 100
    assert len(found.fastest.devices) == 12
    assert found.cheapest is not None
    assert found.cheapest.devices == ["l"]
    assert len(str(found).splitlines()) < 40


def test_subsets_are_all_asked_of_few_devices() -> None:
    assert len(asked(10, lambda kept: (True, kept))) == 2**10 - 1
    assert asked(3, lambda kept: (len(kept) == 2, kept)) == [(0, 1), (0, 2), (1, 2)]


def test_what_the_error_does_not_tell_apart_is_said() -> None:
    (found,) = worth(ledger([1e-3, 1e-3]), {"a": 1.0, "b": 1.0})
    (line,) = [line for line in str(found).splitlines() if line.startswith("cheapest")]
    assert "within the error of this: " in line


def test_a_device_that_stands_idle_is_named_with_the_cure() -> None:
    (busy,) = worth(ledger([1e-3, 3e-3]), {"a": 1.0, "b": 1.0})
    (idle,) = worth(ledger([1e-3, 3e-3], idle=0.1), {"a": 1.0, "b": 1.0})
    assert not any("less than 70%" in note for note in busy.notes)
    both, alone = (next(one for one in idle.choices if one.devices == names) for names in (["a", "b"], ["a"]))
    assert idle.fastest is alone
    assert both.step_seconds == pytest.approx(0.19, rel=0.02)  # 0.09 s, and 0.1 s in which one waits for the other
    assert alone.step_seconds == pytest.approx(0.12, rel=0.02)
    _, (balancer,) = replayed(ledger([1e-3, 3e-3], idle=0.1))
    assert both.step_seconds == balancer.what_if().seconds
    assert alone.step_seconds == balancer.what_if(remove=["b"]).seconds
    (note,) = [note for note in idle.notes if "less than 70%" in note]
    assert note.startswith(("a computed in", "b computed in"))
    assert "on_alarm" in note
    assert "buys nothing. What to change: " in note  # the cure may be for another device


@pytest.mark.parametrize(
    ("prices", "what"),
    [
        ({"a": 1.0}, "there is none for b. Give b one"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "there is no device c; the devices are a, b"),
        ({"a": 1.0, "b": -1.0}, "that of b is -1.0"),
        ({"a": 1.0, "b": float("nan")}, "that of b is nan"),
        ({"a": 1.0, "b": "2"}, "that of b is '2'"),
    ],
)
def test_prices_that_cannot_be_used_are_refused(prices: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        worth(ledger([1e-3, 3e-3]), prices)


def test_a_ledger_without_steps_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no step that was recorded"):
        worth(ledger([1e-3, 3e-3], steps=0))


def test_steps_that_were_only_planned_have_no_say_in_the_usual_size() -> None:
    balancer = Balancer(["a", "b"], ledger=True)
    for batch_size, tries in ((120, 1), (120, 1), (7, 4)):
        for _ in range(tries):
            shares = balancer.next_plan(batch_size).shares
        balancer.record([[(n, 1e-3 * n)] for n in shares], 1e-3 * max(shares))
    assert [one.batch_size for one in worth(balancer.ledger().splitlines())] == [120]


def test_a_trainer_says_it_with_the_time_between_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(64)
    with DataParallel(module, TWO, prove=False) as trainer:
        with pytest.raises(InvalidArgument, match="nothing is measured yet"):
            trainer.what_if(prices={"host": 1.0})
        for rows in (64, 64, 64, 5):  # the last batch of an epoch
            trainer.step(classify, (batch[0][:rows], batch[1][:rows]))
        monkeypatch.setattr(trainer._reports._gaps, "medians", lambda: (0.5, 0.1, 100.0))
        found = trainer.what_if(prices={"host": 1.0, "host:1": 3.0, "cuda": 2.0})
        assert isinstance(found, Worth)
        assert found.batch_size == 64
        for one in found.choices:
            assert one.seconds == pytest.approx(one.step_seconds * 1000 / 64)
            assert one.step_seconds > 90  # what passes in a call of step beside the devices' work counts
            assert one.step_seconds == alone_on(trainer, one.devices).seconds
            assert one.cost == pytest.approx(
                one.seconds * sum({"host:0": 1, "host:1": 3}[n] for n in one.devices) / 3600
            )
        assert "Between two steps 500 ms pass" in str(found)
        assert "ms beside the work of the devices" in trainer.what_if(remove=["host:1"]).text
        assert trainer.report()["steps"] == 4
        alone = trainer.what_if(prices={"host:0": 1.0}, remove=["host:1"])
        assert [one.devices for one in alone.choices] == [["host:0"]]
        with pytest.raises(InvalidArgument, match="prices= is for devices"):
            trainer.what_if(prices={"host": 1.0}, of="ranks")
        assert not isinstance(trainer.what_if(remove=["host:1"]), Worth)


def alone_on(trainer: DataParallel, devices: Sequence[str]) -> WhatIfAnswer:
    """What `what_if` says of these devices, without prices."""
    return trainer.what_if(remove=[name for name in trainer.shares if name not in devices])


@pytest.mark.alone
def test_prices_and_remove_say_the_same_of_steps_that_were_tried_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(_alone, "_FIRST_TRIAL", 4)
    monkeypatch.setattr(_alone, "_MOST_SECONDS", 60.0)
    module, batch = classifier(8)
    with DataParallel(module, TWO, prove=False) as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        for _ in range(30):
            trainer.step(classify, batch)
        found = trainer.what_if(prices={"host": 1.0})
        answers = {" ".join(one.devices): alone_on(trainer, one.devices) for one in found.choices}
    assert {" ".join(one.devices): one.step_seconds for one in found.choices} == {
        name: answer.seconds for name, answer in answers.items()
    }
    assert "it rests on steps that one device ran alone" in answers["host:0"].text
    (of_ledger,) = worth(tmp_path / "run.jsonl")
    _, (balancer,) = replayed((tmp_path / "run.jsonl").read_text().splitlines(keepends=True))
    for one in of_ledger.choices:  # without what only the loop knows
        out = [name for name in TWO if name not in one.devices]
        assert one.step_seconds == balancer.what_if(remove=out, batch_size=8).seconds
    present = trainer.what_if().present_seconds
    assert present >= balancer.what_if().present_seconds


def test_steps_with_costs_and_without_are_told_apart(tmp_path: Path) -> None:
    module, batch = classifier(64)
    path = tmp_path / "run.jsonl"
    with DataParallel(module, TWO, prove=False) as trainer:
        trainer.write_ledger(path)
        found = []
        for cost in (torch.arange(1, 65), None):
            for _ in range(3):
                trainer.step(classify, batch, cost=cost)
            found.append(trainer.what_if(prices={"host": 1.0}))
    asked_for = worth(path, {"host": 1.0}, batch_size=16)
    assert [one.batch_size for one in asked_for] == [1_000_000, 16]
    assert any("does not apply to steps with costs" in note for note in asked_for[0].notes)
    for by_cost, by_items in (found, worth(path, {"host": 1.0})):
        assert not any("does not apply" in note for note in by_cost.notes)
        assert (by_cost.unit, by_items.unit, by_items.batch_size) == ("units of work", "items", 64)
        assert by_cost.batch_size == 1_000_000
        assert all(one.seconds == one.step_seconds for one in by_cost.choices), "of a batch"
        assert "s for a batch" in str(by_cost)
        assert "s for 1,000 items" in str(by_items)


def test_the_command_prints_text_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(ledger([1e-3, 3e-3])))
    assert main(["worth", str(path), "--prices", "a=2, b=1"]) == 0
    assert "cheapest: a, " in capsys.readouterr().out
    assert main(["worth", str(path), "--prices", "a=2,b=1", "--json", "--batch-size", "60"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["kinds"]
    assert told["batch_size"] == 60
    assert list(told["cheapest"]["shares"]) == ["a"]
    pool = tmp_path / "pool.jsonl"
    pool_ledger(pool, [0.01, 0.04], every=0.02)
    assert main(["worth", str(pool), "--prices", "d:0=1,d:1=0.5", "--latency", "0.02"]) == 0
    assert "cheapest of those with a p99 of at most 20 ms: d:0, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--prices", "a"], "'a' is no device with its price"),
        (["--prices", "a=x"], "'a=x' is no device with its price"),
        (["--prices", "a=1"], "there is none for b"),
        (["--latency", "1"], "--latency is for the ledgers of pools"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(ledger([1e-3, 3e-3])))
    with pytest.raises(SystemExit) as ended:
        main(["worth", str(path), *arguments])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["worth", str(tmp_path / "none")])
