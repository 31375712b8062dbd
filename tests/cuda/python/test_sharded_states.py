"""The state of a sharded optimizer when ranges move, layouts change, or a step is cut short."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, GPUS
from paceline.torch import DataParallel
from paceline.torch._trainer import shards
from paceline.torch._trainer.shards import Shards
from shard_cases import Pair, batches, network, paired
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
