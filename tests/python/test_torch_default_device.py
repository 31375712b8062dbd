"""``torch.set_default_device`` and ``with torch.device(...)``: what paceline keeps on the host is made there, whatever the default is.

Here the default is ``meta``, whose tensors have no values: nothing that is made there goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DataParallel
from rank_processes import Run, part_of
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, plain


@pytest.fixture
def made() -> tuple[Any, Any]:
    """A module and a batch on the host."""
    return classifier(16)


@pytest.fixture
def elsewhere(made: Any) -> Iterator[None]:
    """Another default device."""
    with torch.device("meta"):
        yield


def per_item(module: Any, part: Any) -> Any:
    return nn.functional.cross_entropy(module(part[0]), part[1], reduction="none")


@pytest.mark.usefixtures("elsewhere")
def test_steps_and_predictions_with_costs(made: Any) -> None:
    module, batch = made
    costs = torch.arange(16, device="cpu") % 5 + 1
    weight = torch.arange(16.0, dtype=torch.float64, device="cpu")
    _, wanted = plain(module, lambda one, part: (per_item(one, part) * weight).sum() / weight.sum(), batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            module.zero_grad()
            trainer.step(per_item, batch, cost=costs, weight=weight)
            assert_same_gradients(module, wanted)
        torch.testing.assert_close(trainer.predict(batch[0], cost=costs), module(batch[0]).detach())


@pytest.mark.usefixtures("elsewhere")
def test_lists_of_items_and_calls_as_a_module(made: Any) -> None:
    module, (x, y) = made
    with DataParallel(module, TWO) as trainer:
        cost = torch.arange(16, device="cpu")
        assert trainer.predict(lambda one, part: part[1].tolist(), (x, y), cost=cost) == y.tolist()
        torch.testing.assert_close(trainer(x), module(x))
        module.zero_grad()
        _, wanted = plain(module, classify, (x, y))
        classify(trainer, (x, y)).backward()
        assert_same_gradients(module, wanted)


@pytest.mark.usefixtures("elsewhere")
def test_checks_and_draws(made: Any) -> None:
    module, batch = made
    module.append(nn.Dropout(0.5))
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            assert trainer.step(classify, batch).isfinite()
        report = trainer.check(classify, batch)
        assert all(max(split.differences.values()) < report.tolerance for split in report.splits)


def training(rank: int) -> Any:
    module, batch = classifier(16)
    part = part_of(batch, rank, [10, 6])
    drawn = []
    for default in ("cpu", "meta"):
        module.zero_grad()
        with torch.device(default), DataParallel(module, ["host:0"], group=dist.group.WORLD) as trainer:
            trainer.step(classify, part)
            drawn.append(next(iter(trainer.batch_sampler(16, 8))))
    return drawn, gradients(module)


def test_ranks_that_train_together(on_ranks: Run) -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, classify, batch)
    for drawn, found in on_ranks(2, training):
        assert drawn[0] == drawn[1]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
