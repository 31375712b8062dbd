"""Parameters, submodules and modes of the user's module that change after the trainer was made are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import assert_same_gradients, classifier, classify, gradients, hosts, linear, plain

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])


def assign_state(module: Any) -> None:
    state = {name: value.clone() + 0.1 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def load_state(module: Any) -> None:
    module.load_state_dict({name: value + 0.1 for name, value in module.state_dict().items()})


def set_data(module: Any) -> None:
    module[0].weight.data = module[0].weight.data * 2


def set_data_twice(module: Any) -> None:
    set_data(module)
    set_data(module)


def swap_data(module: Any) -> None:
    """`torch.nn.Module.to` with the data swapped out and in again."""
    module.float()
    module.double()


def replace_parameter(module: Any) -> None:
    module[2].weight = nn.Parameter(module[2].weight.detach() * 3)


def replace_submodule(module: Any) -> None:
    torch.manual_seed(7)
    module[2] = nn.Linear(10, 3).double()


def replace_by_name(module: Any) -> None:
    torch.manual_seed(7)
    module._modules["0"] = nn.Linear(6, 10).double()


def add_submodule(module: Any) -> None:
    torch.manual_seed(7)
    module.append(nn.Linear(3, 3).double())


def remove_parameter(module: Any) -> None:
    module[0].bias = None


def remove_and_set_parameter(module: Any) -> None:
    remove_parameter(module)
    module[0].bias = nn.Parameter(torch.full((10,), 0.5, dtype=torch.double))


def tie(module: Any) -> None:
    module[2].bias = nn.Parameter(module[2].weight[:, 0].detach().clone())


def write_in_place(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


def parametrize(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module[0])


def freeze(module: Any) -> None:
    module[0].requires_grad_(False)


def freeze_and_thaw(module: Any) -> None:
    module[0].requires_grad_(False)
    module[0].requires_grad_(True)


CHANGES: list[Callable[[Any], None]] = [
    load_state,
    assign_state,
    set_data,
    set_data_twice,
    swap_data,
    replace_parameter,
    replace_submodule,
    replace_by_name,
    add_submodule,
    remove_parameter,
    remove_and_set_parameter,
    tie,
    write_in_place,
    parametrize,
    freeze,
    freeze_and_thaw,
]


@DEVICES
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_parameters_between_steps_are_followed(change: Callable[[Any], None], devices: int) -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(classify, batch)
        change(module)
        module.zero_grad()
        loss, wanted = plain(module, classify, batch)
        ours = trainer.step(classify, batch)
        assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_gradients(module, wanted)
        torch.testing.assert_close(trainer.predict(batch[0]), module(batch[0]).detach())


def test_freezing_later_leaves_gradients_as_they_are() -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(2)) as trainer:
        trainer.step(classify, batch)
        before = gradients(module)
        module[0].requires_grad_(False)
        trainer.step(classify, batch)
    after = gradients(module)
    assert all(torch.equal(a, b) for a, b in zip(after[:2], before[:2], strict=True) if a is not None and b is not None)
    assert not torch.equal(after[2], before[2])  # type: ignore[arg-type]


@DEVICES
def test_the_training_mode_follows_part_by_part(devices: int) -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), nn.Dropout(0.5)).double()
    _, batch = classifier()
    seen: list[list[bool]] = []

    def loss_fn(replica: nn.Module, part: Any) -> Any:
        seen.append([child.training for child in replica.modules()])
        return classify(replica, part)

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for change in (
            lambda: module.eval(),
            lambda: module[1].train(),
            lambda: module.train(),
            lambda: module[2].eval(),
        ):
            change()  # type: ignore[no-untyped-call]
            trainer.step(loss_fn, batch)
            assert seen[-devices:] == [[child.training for child in module.modules()]] * devices


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_follows_a_layer_that_was_appended(devices: int) -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(devices)) as trainer:
        trainer.loss(classify, batch).backward()
        module.append(linear(3, 3))
        module.zero_grad()
        _, wanted = plain(module, classify, batch)
        trainer.loss(classify, batch).backward()
        assert_same_gradients(module, wanted)
        assert trainer.report()["steps"] == 2
