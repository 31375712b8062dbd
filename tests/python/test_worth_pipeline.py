"""What devices of pipelines are worth, and more of them: `what_if` of `Pipeline` and `PipelineReplicas`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.plan import BlockCost, StageDevice, plan_stages
from paceline.torch import Pipeline
from test_torch_layout import BLOCKS, ITEMS, inputs, replicas, squares
from torch_support import TWO


def test_replicas_of_pipelines_divide_the_batch_anew_for_each_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = replicas()
    names = list(trainer._works.names)  # measured speeds say which device is in which pipeline
    fast, slow = frozenset(names[:2]), frozenset(names[2:])
    prices = dict.fromkeys(names, 1.0) | {names[3]: 3.0}
    with trainer:
        with pytest.raises(InvalidArgument, match="nothing is measured yet"):
            trainer.what_if(prices=prices)
        trainer.step(squares, inputs())
        costs = [
            BlockCost(forward_per_item=1e-3, backward_per_item=2e-3, parameter_bytes=one.parameter_bytes)
            for one in trainer._planner.costs
        ]
        monkeypatch.setattr(type(trainer._planner.planners[0]), "costs", property(lambda _: costs))
        for planner, speeds in zip(trainer._planner.planners, ([1.0, 1.0], [0.5, 0.5]), strict=True):
            devices = planner.stage_devices(speeds)
            monkeypatch.setattr(planner, "stage_devices", lambda _devices=devices: _devices)
        found = {frozenset(one.devices): one for one in trainer.what_if(prices=prices).choices}
        with pytest.raises(InvalidArgument, match="no device is left"):
            trainer.what_if(prices=prices, remove=names)
        with pytest.raises(InvalidArgument, match="no device is left"):  # no device holds all blocks
            trainer.what_if(prices=prices, remove=[names[1], names[3]])
        (half,) = trainer.what_if(prices=prices, remove=names[2:], batch_size=ITEMS // 2).choices
        (joined,) = trainer.what_if(add=[(names[0], 1.0)], remove=names[1:]).choices
        monkeypatch.setattr(trainer._planner, "least_items", ITEMS)  # so the batch cannot be divided
        assert {sum(one.shares.values()) for one in trainer.what_if(prices=prices).choices} == {BLOCKS}
    whole = found[fast | slow]
    assert sum(whole.shares.values()) == 2 * BLOCKS, "each pipeline has all blocks"
    assert sum(found[fast].shares.values()) == BLOCKS
    assert whole.step_seconds < found[fast].step_seconds < found[slow].step_seconds
    assert whole.cost == pytest.approx(whole.seconds * 6.0 / 3600)
    assert frozenset(half.devices) == fast
    assert half.step_seconds < found[fast].step_seconds
    assert sorted(joined.shares) == sorted([names[0], f"another {names[0]}"]), "it is in that pipeline"
    assert sum(joined.shares.values()) == BLOCKS


def test_a_pipeline_plans_a_bigger_one_as_that_would_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(7)])
    with Pipeline(module, TWO, blocks=list(module), prove=False, memory=2**30) as trainer:
        for items in (12, 12, 12, 12, 12, 4):  # the last batch of an epoch is smaller
            trainer.step(squares, torch.randn(items, 8))
        planner = trainer._planner
        costs = [BlockCost(forward_per_item=1e-3, backward_per_item=2e-3, parameter_bytes=64) for _ in module]
        monkeypatch.setattr(type(planner), "costs", property(lambda _: costs))
        monkeypatch.setattr(type(planner), "speeds", property(lambda _: [2.0, 1.0]))
        monkeypatch.setattr(trainer._reports._gaps, "medians", lambda: (0.5, 0.0, 0.0))
        add = [("host:0", 1.5), ("host:0", 0.5)]
        names = [*TWO, "another host:0", "another host:0 (2)"]
        found = {frozenset(one.devices): one for one in trainer.what_if(prices={"host": 1.0}, add=iter(add)).choices}
        one = found[frozenset(names)]
        wanted = [
            StageDevice(name, speed=speed, memory_bytes=limit)
            for name, speed, limit in zip(
                names, (2.0, 1.0, 3.0, 1.0), [*planner.limits, *planner.limits[:1] * 2], strict=True
            )
        ]
        plan = plan_stages(costs, wanted, batch_size=12)
        assert one.step_seconds - 0.5 == pytest.approx(plan.seconds)
        ends = [*plan.cuts[1:], len(costs)]
        assert one.shares == {names[on]: end - cut for on, cut, end in zip(plan.order, plan.cuts, ends, strict=True)}
        assert one.cost == pytest.approx(one.seconds * 4 / 3600)
        (alone,) = trainer.what_if(add=[("host:1", 2.0)], remove=TWO).choices
        assert alone.step_seconds - 0.5 == pytest.approx(plan_stages(costs, [wanted[0]], batch_size=12).seconds)
        for wrong, says in (
            (["host:0"], "give a list of pairs"),
            (3, "give a list of pairs"),
            ([("host:7", 1.0)], "there is no device host:7"),
            ([("host:0", 0.0)], "the speed of another host:0 is 0"),
        ):
            with pytest.raises(InvalidArgument, match=f"what_if: .*{says}"):
                trainer.what_if(add=wrong)  # type: ignore[arg-type]


def test_a_pipeline_plans_each_subset_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with Pipeline(module, TWO, blocks=list(module), prove=False) as trainer:
        with pytest.raises(InvalidArgument, match="nothing is measured yet"):
            trainer.what_if(prices={"host": 1.0})
        for _ in range(5):
            trainer.step(lambda module, batch: module(batch).square().mean(), torch.randn(64, 64))
        found = trainer.what_if(prices={"host": 1.0, "host:1": 3.0})
        (alone,) = trainer.what_if(prices={"host:0": 1.0}, remove=["host:1"], batch_size=32).choices
        with pytest.raises(InvalidArgument, match="there is no device host:7"):
            trainer.what_if(prices={"host": 1.0}, remove=["host:7"])
        with pytest.raises(InvalidArgument, match="no device is left"):
            trainer.what_if(prices={"host": 1.0}, remove=TWO)
        monkeypatch.setattr(trainer._reports._gaps, "medians", lambda: (0.5, 0.0, 0.0))
        monkeypatch.setattr(type(trainer._planner), "speeds", property(lambda _: [2.0, 1.0]))
        known = {" ".join(one.devices): one for one in trainer.what_if(prices={"host": 1.0}).choices}
        of_blocks = [known[name].step_seconds - 0.5 for name in TWO]  # beside the time between two steps
        assert of_blocks[1] == pytest.approx(2 * of_blocks[0])
        assert known["host:0"].seconds == pytest.approx(known["host:0"].step_seconds * 1000 / 64)
        for name, other in (("host:0", "host:1"), ("host:1", "host:0")):
            (without,) = trainer.what_if(remove=[other]).choices
            assert (without.step_seconds, without.cost) == (known[name].step_seconds, None)
        trainer.retire("host:0")
        assert [one.devices for one in trainer.what_if(prices={"host:1": 1.0}).choices] == [["host:1"]]
    singles = {one.devices[0]: one for one in found.choices if len(one.shares) == 1}
    assert set(singles) == set(TWO)
    for one in found.choices:
        assert sum(one.shares.values()) == 4  # blocks
        assert one.cost == pytest.approx(one.seconds * sum({"host:0": 1, "host:1": 3}[n] for n in one.devices) / 3600)
        assert one.seconds * 64 / 1000 >= one.step_seconds > 0
    assert alone.devices == ["host:0"]


def test_the_usual_batch_of_a_pipeline_follows_the_rule_of_the_balancer() -> None:
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    with Pipeline(module, TWO, blocks=list(module), prove=False) as trainer:

        def step(items: int) -> None:
            trainer.step(lambda module, batch: module(batch).square().mean(), torch.randn(items, 8))

        for items in (20, 18, 16, 14, 12, 10):
            step(items)
        assert trainer.what_if().batch_size == 10  # no size came twice
        for items in (12, 12, 5):  # the last one ends an epoch
            step(items)
        assert trainer.what_if().batch_size == 12
        assert ", a batch of 12 in " in trainer.explain()
