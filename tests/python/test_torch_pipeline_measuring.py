"""What `Pipeline` measures of blocks in its first steps, and when it measures again."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import Pipeline
from pipeline_models import chain as chain_of
from pipeline_models import squares
from torch_support import TWO

WIDTH = 16


def chain() -> Any:
    return chain_of(4, WIDTH)


class Slow(nn.Linear):
    """Takes 3 ms however few items there are."""

    def forward(self, x: Any) -> Any:
        time.sleep(0.003)
        return super().forward(x).tanh()


def slow_chain() -> nn.Sequential:
    return nn.Sequential(*(Slow(WIDTH, WIDTH) for _ in range(4)))


def saved(trainer: Any) -> list[int]:
    return [block["saved_bytes"] for block in trainer.report()["pipeline"]["blocks"]]


def measuring(trainer: Any) -> bool:
    return bool(trainer.report()["pipeline"]["measuring"])


def measure(trainer: Any, batch: Any, weight: Any = None) -> None:
    """Make the three steps that measure."""
    for step in range(3):
        trainer.step(squares, batch, weight=weight)
        assert measuring(trainer) == (step < 2)


@pytest.mark.alone
def test_a_batch_as_small_as_the_micro_batches_tells_what_each_of_them_costs() -> None:
    with Pipeline(slow_chain(), TWO) as trainer:
        for _ in range(5):
            trainer.step(squares, torch.randn(8, WIDTH))
        assert len(trainer.report()["micro_batches"]) <= 4


@pytest.mark.alone
def test_a_larger_batch_is_measured_where_one_item_told_nothing() -> None:
    with Pipeline(slow_chain(), TWO) as trainer:
        measure(trainer, torch.randn(1, WIDTH))
        measure(trainer, torch.randn(64, WIDTH))
        trainer.step(squares, torch.randn(64, WIDTH))
        assert len(trainer.report()["micro_batches"]) <= 16


def test_the_batch_itself_is_not_what_a_micro_batch_saves() -> None:
    with Pipeline(chain(), TWO, micro_batches=16) as trainer:
        for _ in range(2):
            trainer.step(squares, torch.randn(64, WIDTH))
        assert max(saved(trainer)) <= 2 * WIDTH * 4


def test_micro_batches_without_weight_measure_nothing() -> None:
    weight = torch.ones(16)
    weight[:10] = 0
    with Pipeline(chain(), TWO) as trainer:
        measure(trainer, torch.randn(16, WIDTH), weight)
        assert min(saved(trainer)[1:]) > 0
        trainer.step(squares, torch.randn(16, WIDTH), weight=weight)


def test_a_forward_may_leave_blocks_out() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chain()

        def forward(self, x: Any) -> Any:
            for layer in (self.layers[0], self.layers[2]):
                x = layer(x)
            return x

    with Pipeline(Skips(), TWO) as trainer:
        measure(trainer, torch.randn(16, WIDTH))
        trainer.step(squares, torch.randn(16, WIDTH))
        assert trainer.report()["steps"] == 4


@pytest.mark.parametrize("before", [1, 2])
def test_a_device_retired_while_blocks_are_measured_gets_no_stage(before: int) -> None:
    with Pipeline(chain(), TWO) as trainer:
        for _ in range(before):
            trainer.step(squares, torch.randn(16, WIDTH))
        trainer.retire("host:1")
        for _ in range(3):
            trainer.step(squares, torch.randn(16, WIDTH))
            assert trainer.shares["host:1"] == 0
        assert not measuring(trainer)


def test_longer_items_and_other_trained_parameters_are_measured_again() -> None:
    module = chain()
    module[3].requires_grad_(False)
    with Pipeline(module, TWO) as trainer:
        measure(trainer, torch.randn(16, 4, WIDTH))
        short = saved(trainer)
        trainer.step(squares, torch.randn(16, 5, WIDTH))
        assert not measuring(trainer)
        trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert measuring(trainer)
        for _ in range(2):
            trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert saved(trainer)[1] == 10 * short[1]
        frozen = trainer.report()["pipeline"]["blocks"][3]["parameter_bytes"]
        # Parameters that take the place of others are no reason, and are followed.
        module.load_state_dict({name: one.clone() for name, one in module.state_dict().items()}, assign=True)
        trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert not measuring(trainer)
        module[3].requires_grad_(True)
        measure(trainer, torch.randn(16, 40, WIDTH))
        assert trainer.report()["pipeline"]["blocks"][3]["parameter_bytes"] == 4 * frozen


def test_steps_are_counted_as_they_were_called() -> None:
    with Pipeline(chain(), TWO, cuts=[0, 2], micro_batches=4) as trainer:
        for _ in range(5):
            trainer.step(squares, torch.randn(16, WIDTH))
        assert "; 5 steps measured" in " ".join(trainer.explain().split())
        assert trainer.report()["steps"] == 5
        trainer.retire("host:1")
        trainer.step(squares, torch.randn(16, WIDTH))
        assert "Last change at step 5" in trainer.explain()
        assert trainer.report()["recent_moves"][-1]["step"] == 5


def test_memory_that_runs_out_while_blocks_are_measured_makes_smaller_micro_batches() -> None:
    def loss_fn(module: Any, batch: Any) -> Any:
        if len(batch) > 2:
            raise MemoryError("as planned")
        return squares(module, batch)

    with Pipeline(chain(), TWO) as trainer:
        trainer.step(loss_fn, torch.randn(32, WIDTH))
        assert trainer.report()["micro_batches"] == [2] * 16
