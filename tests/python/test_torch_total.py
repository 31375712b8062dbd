"""``total=``: a denominator that the caller gives, for `step`, `loss` and runs of a batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, plain

pytestmark = pytest.mark.usefixtures("proved")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_total_takes_the_place_of_the_weight(reduction: Any, weighted: bool) -> None:
    module, batch = classifier(16)
    weight = torch.arange(1, 17) if weighted else None
    counts = weight if weight is not None and reduction == "mean" else torch.ones(16)

    def items(module: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")

    reference = copy.deepcopy(module)
    wanted = (items(reference, batch) * counts).sum() / 37
    wanted.backward()
    for total in (37, 37.0, torch.tensor(37)):
        module.zero_grad()
        with DataParallel(module, TWO, reduction=reduction) as trainer:
            assert trainer.step(items, batch, weight=weight, total=total).item() == pytest.approx(
                wanted.item(), rel=1e-12
            )
        assert_same_gradients(module, gradients(reference))


def test_a_plain_sum_is_a_total_of_one() -> None:
    module, batch = classifier(16)
    summed = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum")  # noqa: E731
    expected = plain(module, summed, batch)[1]
    with DataParallel(module, TWO, reduction="sum") as trainer:
        trainer.step(summed, batch, total=1)
    assert_same_gradients(module, expected)


def test_accumulation_over_unequal_batches_is_the_mean_over_all_their_items() -> None:
    module, batch = classifier(20)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        for part in (slice(0, 7), slice(7, 20)):
            trainer.loss(classify, (batch[0][part], batch[1][part]), total=20).backward()
    assert_same_gradients(module, expected)


def test_runs_of_a_batch_take_a_total_too() -> None:
    module, batch = classifier(16)
    expected = [one * 16 / 5 for one in plain(module, classify, batch)[1] if one is not None]
    with DataParallel(module, TWO) as trainer, trainer.batch(batch, total=5) as whole:
        whole.run(lambda m, part: part.backward(classify(m, part.data)))
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("total", [0, -1, float("nan"), float("inf"), "4", True, torch.ones(2)])
def test_totals_that_cannot_be_used_are_refused(total: Any) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"total: .*positive finite number"):
        trainer.step(classify, batch, total=total)
