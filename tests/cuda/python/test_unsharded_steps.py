"""When a step of a sharded optimizer is a plain one, and that `explain` says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpu_cases import BOXES, GPUS
from paceline.torch import DataParallel, Pipeline
from shard_cases import batches, held, lay_out_anew, network, paired
from torch_support import classify

pytestmark = pytest.mark.usefixtures("small_shards")


def overlap(trainer: Any, optimizer: Any) -> None:
    trainer.module[0].bias.data = trainer.module[0].weight.data.view(-1)[:24]


def leave_gaps(trainer: Any, optimizer: Any) -> None:
    bias = trainer.module[0].bias
    bias.data = bias.grad = torch.zeros(48)[::2]


def make_differentiable(trainer: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["differentiable"] = True


def change_a_gradient(trainer: Any, optimizer: Any) -> None:
    weight = trainer.module[2].weight
    weight.grad = weight.grad.t().contiguous().t()


def add_a_subclass(trainer: Any, optimizer: Any) -> None:
    class Special(torch.Tensor):
        pass

    optimizer.add_param_group({"params": [torch.zeros(3).as_subclass(Special).requires_grad_()]})


def lay_out_one(trainer: Any, optimizer: Any) -> None:
    lay_out_anew(trainer.module)
    for parameter in trainer.module.parameters():
        parameter.grad = torch.zeros_like(parameter)


def retire_most(trainer: Any, optimizer: Any) -> None:
    for name in GPUS[1:]:
        trainer.retire(name)


def take_all(trainer: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def close(trainer: Any, optimizer: Any) -> None:
    trainer.close()


WHY_NOT = {
    overlap: "parameters overlap in memory",
    leave_gaps: r".*strides \(2,\), with gaps",
    make_differentiable: "it is differentiable",
    change_a_gradient: "a gradient is sparse, or unlike its parameter",
    add_a_subclass: "a parameter is a Special, a subclass",
    lay_out_one: "parameters have a new .*layout",
    retire_most: "fewer than two GPUs work",
    take_all: "it has no parameters",
    close: "the trainer is closed",
}


@pytest.mark.parametrize("change", WHY_NOT)
def test_explain_says_why_a_step_is_a_plain_one(fake: Any, change: Callable[..., None]) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        optimizer: Any = trainer.optimizer(torch.optim.SGD, lr=0.1, shard=True)
        trainer.step(classify, batches(1)[0])
        optimizer.step()
        assert "Optimizer: SGD is sharded: " in trainer.explain()
        change(trainer, optimizer)
        with torch.no_grad():  # which "differentiable" needs
            optimizer.step()
        assert re.search(f"Optimizer: SGD is not sharded, since {WHY_NOT[change]}", trainer.explain())


def test_modes_see_plain_steps_but_a_default_device_does_not_matter(fake: Any) -> None:
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        pair.step(batches(1)[0])
        with Watch():
            pair.optimizer.step()
        pair.plain.step()
        assert seen
        assert "Optimizer: AdamW is not sharded, since the last step was in a mode" in pair.trainer.explain()
        with torch.device("cpu"):
            pair.optimizer.step()
        pair.plain.step()
        assert held(pair.optimizer)
        assert "Optimizer: AdamW is sharded" in pair.trainer.explain()
        pair.expect_same_state()
        with torch.device("meta"):  # what names no device is not made on it
            optimizer: Any = pair.trainer.optimizer(torch.optim.AdamW, lr=0.01, shard=True)
            optimizer.step()
        assert held(optimizer)
        steps = {values["step"].device.type for owner in optimizer._shards._owners for values in owner.state.values()}
        assert steps == {"cpu"}


@pytest.mark.parametrize(
    ("make", "cls", "why"),
    [
        (lambda: DataParallel(network(), BOXES["one"]), torch.optim.SGD, "that takes a DataParallel with 2 GPUs"),
        (
            lambda: Pipeline(network().cpu(), ["host:0", "host:1"]),
            torch.optim.SGD,
            "that takes a DataParallel with 2 GPUs",
        ),
        (lambda: DataParallel(network(), BOXES["two"]), torch.optim.LBFGS, "only PyTorch's own optimizers are"),
    ],
)
def test_explain_says_why_an_optimizer_is_never_sharded(fake: Any, make: Any, cls: Any, why: str) -> None:
    with make() as trainer:
        others = [trainer.optimizer(cls, lr=0.1, shard=shard) for shard in ("auto", False)]
        assert len(others) == 2
        assert "Optimizer" not in trainer.explain(), "nobody asked for it"
        optimizer = trainer.optimizer(cls, lr=0.1, shard=True)
        assert f"Optimizer: {cls.__name__} is not sharded, since {why}" in trainer.explain()
        del optimizer
        assert "Optimizer" not in trainer.explain()
