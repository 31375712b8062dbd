"""Random numbers that no seed reaches are named once, and what a seed reaches is not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy.random
import pytest
import torch
from torch import nn

from paceline.torch import DataParallel, UnseededDrawsWarning
from torch_support import TWO, classifier, classify


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 5, 2, batch_first=True, dropout=dropout).double()
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x[:, None].expand(-1, 4, -1))[0][:, -1])


def test_what_no_seed_reaches_is_said_once_and_by_name() -> None:
    module, (_, batch) = Recurrent(), classifier(32)
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.warns(UnseededDrawsWarning, match=r"the dropout of nn\.LSTM"):
            trainer.step(classify, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnseededDrawsWarning)
            trainer.step(classify, batch)
            trainer.predict(batch[0])


OWN = torch.Generator()
DRAWN_BY: dict[str, Callable[[], float]] = {
    "calls with generator=": lambda: torch.rand((), generator=OWN).item(),
    "numpy.random": numpy.random.random,
    "Python's random": random.random,
}


@pytest.mark.parametrize("name", DRAWN_BY)
def test_generators_of_a_loss_that_all_devices_share_are_named_where_the_caller_is(name: str) -> None:
    module, batch = classifier(32)

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) * DRAWN_BY[name]()

    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.warns(UnseededDrawsWarning, match=f"drawn by {name} come") as told:
            trainer.step(loss_fn, batch)
        assert [one.filename for one in told] == [__file__]


def test_a_generator_that_a_loss_makes_for_each_micro_batch_is_not_warned_of() -> None:
    module, batch = classifier(32)

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) * torch.rand((), generator=torch.Generator().manual_seed(3)).item()

    with DataParallel(module, TWO, balance="even") as trainer, warnings.catch_warnings():
        warnings.simplefilter("error", UnseededDrawsWarning)
        trainer.step(loss_fn, batch)


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Dropout(), classifier(32)[0]), Recurrent(0.0)], ids=["dropout", "no dropout in nn.LSTM"]
)
def test_what_a_seed_reaches_is_not_warned_of(module: nn.Module) -> None:
    _, batch = classifier(32)
    with DataParallel(module, TWO) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error", UnseededDrawsWarning)
        for _ in range(3):
            trainer.step(classify, batch)
