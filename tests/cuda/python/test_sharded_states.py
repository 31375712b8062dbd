"""The state of a sharded optimizer when ranges move, layouts change, or a step is cut short; and when a step is a plain one, and that `explain` says why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpu_cases import BOXES, GPUS
from paceline.torch import DataParallel, Pipeline
from paceline.torch._trainer import shards
from paceline.torch._trainer.shards import Shards
from shard_cases import Pair, batches, held, lay_out_anew, network, paired
from torch_support import classify

pytestmark = pytest.mark.usefixtures("small_shards")


def test_a_layout_that_changes_in_place_is_followed(fake: Any) -> None:
    def transpose(module: Any) -> None:
        module[2].weight.data = module[2].weight.data.t()  # where it was

    module = network()
    module[2], module[4] = nn.Linear(24, 24), nn.Linear(24, 3)
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        for batch in batches(3):
            pair.step(batch)
            inputs, targets = batch
            wanted = torch.autograd.grad(classify(pair.reference, batch), list(pair.reference.parameters()))
            trainer.module.zero_grad()
            trainer.step(classify, (inputs, targets))
            torch.testing.assert_close([one.grad for one in trainer.module.parameters()], list(wanted))
            pair.expect_same_state()
            for one in (pair.module, pair.reference):
                transpose(one)


def test_what_is_in_no_group_keeps_its_state(fake: Any) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        first, *rest = module.parameters()
        return [{"params": rest}, {"params": [first]}]

    with paired(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, groups) as pair:
        few = batches(4)
        pair.step(few[0])
        taken = [one.param_groups.pop() for one in (pair.optimizer, pair.plain)]
        pair.step(few[1])
        pair.trainer.retire(GPUS[2])  # moves the ranges again
        pair.step(few[2])
        for one, group in zip((pair.optimizer, pair.plain), taken, strict=True):
            one.param_groups.append(group)
        pair.step(few[3])
        pair.expect_same_state()


@pytest.mark.parametrize("at_home", [False, True])
def test_an_interrupt_while_ranges_move_loses_no_state(fake: Any, at_home: bool) -> None:
    code = Shards._cut.__code__

    def interrupt(line: int) -> Any:
        def trace(frame: Any, event: str, argument: Any) -> Any:
            if event == "line" and frame.f_lineno == line:
                raise KeyboardInterrupt
            return trace

        return lambda frame, event, argument: trace if frame.f_code is code else None

    with paired(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}) as pair:
        pair.step(batches(1)[0])
        pair.trainer.retire(GPUS[2])
        interrupts, before = 0, sys.gettrace()
        for line in sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno}):
            if at_home:
                assert pair.optimizer.state
            try:
                sys.settrace(interrupt(line))
                pair.optimizer.step()
                pair.plain.step()
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(before)
            pair.expect_same_state()
        assert interrupts > 20
        pair.step(batches(1)[0])
        pair.expect_same_state()


def fail_on_one(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """A step of the optimizer runs out of memory on the GPU cuda:2, once the ranges are there."""
    its, places = pair.optimizer._shards, pair.trainer._execution.places
    run, enter = its._run, places.enter

    def full(device: int) -> Any:
        if device == 2:
            raise torch.OutOfMemoryError("full")
        return enter(device)

    def failing(step: Any) -> None:
        patch.setattr(places, "enter", full)
        run(step)

    with monkeypatch.context() as patch:
        patch.setattr(its, "_run", failing)
        with pytest.raises(torch.OutOfMemoryError):
            pair.optimizer.step()


@pytest.mark.parametrize("then", ["state_dict", "state", "retire", "close"])
def test_a_first_step_that_failed_on_one_gpu_leaves_whole_states(
    fake: Any, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(shards, "_LEAST_BYTES_OF_ROUNDS", 1 << 20)
    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        pair.trainer.step(classify, batches(1)[0])
        fail_on_one(monkeypatch, pair)
        pieces = pair.optimizer._shards._pieces.items()
        complete = {one for one, of_it in pieces if all(owner.state.get(piece.tensor) for owner, piece in of_it)}
        assert 0 < len(complete) < 6
        if then == "state_dict":
            assert len(pair.optimizer.state_dict()["state"]) == len(complete)
            return
        if then == "close":
            pair.trainer.close()
        if then == "retire":
            pair.trainer.retire(GPUS[3])
            pair.optimizer.step()
        for one, values in pair.optimizer.state.items():
            assert values["step"] == (one in complete) + (then == "retire")
        assert pair.optimizer.state.keys() == (set(pair.module.parameters()) if then == "retire" else complete)


def test_close_releases_everything_if_the_state_cannot_come_home(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = DataParallel(network(), BOXES["four"])
    pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
    pair.step(batches(1)[0])
    lifetime = trainer._lifetime

    def fail() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(pair.optimizer._shards, "gather", fail)
    with pytest.raises(ValueError, match="broken"):
        trainer.close()
    assert not lifetime.places.holds
    assert not lifetime.replicas._sent._memory


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


def test_an_optimizer_may_be_made_while_another_thread_reads(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataParallel(network(), BOXES["two"]) as trainer:
        made = [trainer.optimizer(torch.optim.SGD, lr=0.1, shard=True) for _ in range(2)]
        trainer.step(classify, batches(1)[0])
        for optimizer in made:
            optimizer.step()
        explain = Shards.explain

        def explains(self: Shards) -> str:
            made.append(trainer.optimizer(torch.optim.SGD, lr=0.1, shard=True))
            return explain(self)

        monkeypatch.setattr(Shards, "explain", explains)
        assert trainer.explain().count("SGD is sharded") == 2
        assert len(made) == 4


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
