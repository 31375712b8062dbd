"""Buffers whose changes on the devices are joined."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from proof_cases import made, rows, said_by, squares

RULES: dict[str, Any] = {"seen": "sum", "inner.center": "mean", "last": "home"}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        center: Any = self.center
        center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 3).double(), Inner()
        self.other: Any
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("last", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("other", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: Any = self.seen
        seen += len(x)
        self.other += len(x)
        self.last = x.detach()[0, 0].clone()
        out: torch.Tensor = self.layer(self.inner(x))
        return out


def test_changes_are_added_averaged_by_items_and_taken_from_the_first_device() -> None:
    module, batches = Counts(), [rows(16) for _ in range(3)]
    other = copy.deepcopy(module)
    trainer = made(module, buffers=RULES, prove=False)
    for batch in batches:
        trainer.step(squares, batch)
        squares(other, batch)
    assert module.seen == other.seen == 48
    assert all(map(torch.allclose, module.inner.buffers(), other.inner.buffers()))
    assert module.last == other.last == batches[-1][0, 0]
    assert module.other == 30  # of the device that ran ten of sixteen items


def test_a_proof_agrees_with_what_is_joined() -> None:
    assert "buffer 'other'" in (text := said_by(Counts(), squares, rows(), buffers=RULES))
    assert "'seen' has" not in text
    assert "center" not in text
    assert "buffers={'other': 'sum'}) gives these" in text  # which was tried


def test_a_proof_names_the_rule_that_gives_the_values_of_one_device() -> None:
    text = said_by(Counts(), squares, rows())
    assert (
        "buffers={'seen': 'sum', 'other': 'sum', 'inner.center': 'mean'}) gives these the values of one device" in text
    )


def test_a_device_without_items_changes_nothing() -> None:
    module = Counts()
    trainer = made(module, buffers=RULES, balance=[0, 1], prove=False)
    trainer.step(squares, batch := rows(5))
    assert module.seen == 5
    assert module.last == batch[0, 0]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"seen": "add"}, "must be 'sum', 'mean' or 'home'"),
        ({"unseen": "sum"}, "no such buffer. It has 'seen'"),
        ({"seen": "mean"}, "holds torch.int64. Use 'sum'"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(rules: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        made(Counts(), buffers=rules)
