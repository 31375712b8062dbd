"""`check` with costs: the order that they give is checked, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from check_cases import DEVICES, checked, inputs, kinds, loss_of_words_each, network
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, gradients, loss_of_words, words

F = nn.functional


@DEVICES
def test_costs_are_checked_with_the_order_that_they_give(devices: int) -> None:
    module, batch = words(24, 7)
    report = checked(module, loss_of_words, batch, devices=devices, cost=batch["length"])
    assert report.exact, report
    assert report.splits[-2].name.startswith("by cost, ")
    assert report.splits[-2].differences.keys() == report.splits[0].differences.keys()
    assert report.splits[-1].name.startswith("host:0 ")
    assert gradients(module) == [None] * 3
    weighted = checked(module, loss_of_words_each, batch, devices=devices, cost=batch["length"], weight=torch.rand(24))
    assert weighted.exact, weighted


def test_a_loss_that_goes_by_the_order_is_named_with_costs_only() -> None:
    inputs_, labels = inputs()

    def with_its_neighbour(module: Any, batch: Any) -> Any:
        x, y = batch
        pairs = (x[0::2] + x[1::2]).repeat_interleave(2, dim=0)
        return F.cross_entropy(module(pairs), y)

    module = network()
    assert checked(module, with_its_neighbour, (inputs_, labels), micro_batch=4).exact
    report = checked(module, with_its_neighbour, (inputs_, labels), micro_batch=4, cost=torch.rand(24))
    assert kinds(report) == ["order"]
    assert not report.exact
    assert "Put what belongs to an item into the batch" in report.causes[0].text


def test_a_loss_that_raises_for_another_order_is_named_with_its_error() -> None:
    x, y = inputs()

    def in_order(module: Any, batch: Any) -> Any:
        number, x, y = batch
        if (number.diff() < 0).any():
            raise ValueError("not in order")
        return F.cross_entropy(module(x), y)

    numbered = (torch.arange(24), x, y)
    report = checked(network(), in_order, numbered, cost=torch.rand(24))
    assert kinds(report) == ["order"]
    assert "It raised ValueError: not in order." in report.causes[0].text
    # Longest first is the order that a slice has, so who needs that is content.
    assert checked(network(), in_order, numbered, cost=torch.arange(24, 0, -1)).exact


def test_costs_that_a_step_refuses_are_refused() -> None:
    module, batch = words(24, 7)
    with pytest.raises(InvalidArgument, match="cost: item 0 costs -1"):
        checked(module, loss_of_words, batch, cost=-torch.ones(24))
    with DataParallel(module, TWO, granularity=2) as trainer, pytest.raises(InvalidArgument, match="granularity="):
        trainer.check(loss_of_words, batch, cost=batch["length"])
