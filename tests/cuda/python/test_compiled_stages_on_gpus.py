"""Pipelines of compiled blocks whose stages are on GPUs, on a fake device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import Pipeline
from pipeline_cases import ModelCase
from pipeline_gpu_cases import BOXES, Bridge, bridge_differences, differences

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.own_gpus("pipelines in Python are refused on parts")]


@pytest.fixture(autouse=True)
def _high_limit(fresh_compiler: None) -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):  # all blocks share their code, which the limit is for
        yield


class Layer(nn.Module):
    """A block. The compiler leaves PyTorch's own modules alone, and the fake device has no attention that it can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.norm(self.linear(x)).tanh()
        return result


def mlp(backend: Any, **options: Any) -> ModelCase:
    """A case of compiled blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    for block in model:
        block.compile(backend=backend)
    return ModelCase(model, (torch.randn(10, 8), torch.randn(10, 8)), 2, options, False, loss_of)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    x, targets = batch
    loss: torch.Tensor = (model(x) - targets).square().mean()
    return loss


@pytest.mark.parametrize(("box", "backend"), [("two", "eager"), ("host between", "aot_eager")])
def test_compiled_blocks_are_exact(box: str, backend: str) -> None:
    case = mlp(backend, micro_batches=4, schedule="1f1b")
    assert differences(case, BOXES[box], retired=BOXES[box][0]) == []


class Ends(nn.Module):
    """What a bridge has at its end, in one compiled part: a norm of its own, and one whose scales a norm of others has, too."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.own, self.tied = nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.tied.weight = norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.own(self.tied(x))
        return result


class Scale(nn.Module):
    """A compiled part that several stages call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.weight


@pytest.mark.parametrize("box", ["three", "host around"])
def test_compiled_parts_share_tensors_with_other_stages(box: str) -> None:
    torch.manual_seed(0)
    model: Any = Bridge()
    model.behind, model.norm = Ends(model.norm), Scale()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        for part in (*one.first, *one.last, one.behind, one.norm):
            part.compile(backend="aot_eager")
    assert bridge_differences(model, BOXES[box], plain) == []


def test_nothing_else_runs_while_a_block_is_compiled_for_another_gpu() -> None:
    beside: list[int] = []
    places: list[set[torch.device]] = []

    def backend(trainers: list[Pipeline], graph: Any, inputs: Any) -> Any:
        run = trainers[-1]._execution.running
        assert run is not None
        beside.append(len(run.inside) - 1)
        places.append({one.device for one in inputs if isinstance(one, torch.Tensor)})
        return graph.forward

    trainers: list[Pipeline] = []
    case = mlp(functools.partial(backend, trainers))
    with Pipeline(case.model, BOXES["three"], micro_batches=4, schedule="1f1b") as trainer:
        trainers.append(trainer)
        for _ in range(4):
            trainer.step(case.loss_fn, case.batch)
        for device in BOXES["three"][:2]:
            trainer.retire(device)
            trainer.step(case.loss_fn, case.batch)
            trainer.restore(device)
        trainer.step(case.loss_fn, case.batch)
        trainer.step(case.loss_fn, case.batch)
    assert len(set.union(*places)) > 1
    assert set(beside) == {0}


def test_a_part_that_is_compiled_in_another_one_may_not_be_called_beside_it() -> None:
    model: Any = Bridge()
    model.behind = nn.Sequential(model.norm, nn.Linear(8, 8))
    model.behind.compile(backend="eager")
    with (
        Pipeline(model, BOXES["two"], blocks=[*model.first, *model.last]) as trainer,
        pytest.raises(InvalidArgument, match="norm is also a part of behind, which is compiled"),
    ):
        trainer.step(lambda one, part: one(*part), (torch.randn(4, 8), torch.randn(4, 8)))
