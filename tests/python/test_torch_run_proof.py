"""The first run of each kind of `batch` is that of one device, and says what devices would change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument
from proof_cases import Seen, gradients, made, net, rows, said, same


def ran(trainer: Any, batch: Any, *runs: Any, **options: Any) -> str:
    """What the proofs of these runs warn of."""
    with trainer.batch(batch) as global_batch:
        return said(lambda: [global_batch.run(run, **options) for run in runs])


def two_losses(module: Any, part: Any) -> None:
    out = module(part.data)
    part.backward(out.square().mean(), retain_graph=True)
    part.weigh(out.abs().mean()).backward()


def test_the_first_run_is_that_of_one_device_bit_for_bit() -> None:
    module, batch = net(), rows()
    other, trainer, seen = copy.deepcopy(module), made(module), Seen()

    def fn(module: Any, part: Any) -> None:
        seen.items.append(len(part))
        two_losses(module, part)

    assert not ran(trainer, batch, fn)
    out = other(batch)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()
    assert same(module, other, exact=True)
    assert seen.items[0] == 16
    assert sorted(seen.items[1:]) == [6, 10]
    assert "Proof: run 1 of" in trainer.explain()
    assert trainer.report()["proved"] == trainer.report()["steps"] == 0  # it was no step


def test_only_wanted_parameters_get_gradients() -> None:
    module: Any = net()
    other, trainer, batch = copy.deepcopy(module), made(module), rows()
    kept = torch.ones_like(module[0].weight)
    module[0].weight.grad = kept.clone()
    for one in (two_losses, lambda module, part: part.backward(module(part.data).square().mean())):
        assert not ran(trainer, batch, one, parameters=module[2])
    assert torch.equal(gradients(module)[0], kept)
    assert module[0].bias.grad is None
    out = other(batch)
    (2 * out.square().mean() + out.abs().mean()).backward()
    assert torch.allclose(module[2].weight.grad, other[2].weight.grad)


def by_its_size(module: Any, part: Any) -> None:
    part.backward(module(part.data).square().sum() / 16)


def test_a_loss_that_a_split_changes_is_named() -> None:
    trainer = made(net())
    text = ran(trainer, rows(), by_its_size)
    assert "run: split over the devices this batch of 16 items gives another result" in text
    assert "the loss is" in text
    assert "the gradient of" in text
    assert not ran(trainer, rows(), by_its_size)  # said once


def test_a_difference_raises_where_that_is_asked_and_commits_nothing() -> None:
    module = net()
    trainer = made(module, prove="raise")
    with pytest.raises(Error, match=r"run: split over .* Nothing was committed"):
        ran(trainer, rows(), by_its_size)
    assert gradients(module) == [None] * 4


def test_each_function_and_choice_of_parameters_is_a_kind() -> None:
    module = net()
    trainer, batch = made(module), rows()
    ran(trainer, batch, two_losses, two_losses)
    ran(trainer, batch, two_losses, parameters=module[0])
    assert trainer.explain().count("Proof: run") == 2


@pytest.mark.parametrize("wrong", ["own backward", "no backward"])
def test_functions_without_a_term_are_refused_as_by_the_devices(wrong: str) -> None:
    def fn(module: Any, part: Any) -> None:
        if wrong == "own backward":
            module(part.data).mean().backward()

    module = net()
    kind: Any = InvalidArgument if wrong == "own backward" else RuntimeError
    with pytest.raises(kind, match=r"run: (fn called backward|no gradient)"):
        ran(made(module), rows(), fn)
    assert gradients(module) == [None] * 4


def test_adversarial_networks_train_as_on_one_device() -> None:
    torch.manual_seed(0)
    networks: Any = nn.ModuleDict({"generator": net(), "critic": nn.Linear(3, 1).double()})
    other = copy.deepcopy(networks)
    batch = (rows(), torch.randn(16, 3, dtype=torch.float64))

    def criticise(networks: Any, part: Any) -> None:
        noise, real = part.data
        fake = networks["generator"](noise).detach()
        part.backward(networks["critic"](fake).mean() - networks["critic"](real).mean())

    def generate(networks: Any, part: Any) -> None:
        part.backward(-networks["critic"](networks["generator"](part.data[0])).mean())

    with made(networks, prove="raise") as trainer:
        optimizers = [torch.optim.SGD(networks[name].parameters(), 0.1) for name in ("critic", "generator")]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with trainer.batch(batch) as global_batch:
                global_batch.run(criticise, parameters=networks["critic"])
                optimizers[0].step()
                global_batch.run(generate, parameters=networks["generator"])
                optimizers[1].step()
    for _ in range(3):
        noise, real = batch
        other.zero_grad()
        fake = other["generator"](noise).detach()
        (other["critic"](fake).mean() - other["critic"](real).mean()).backward()
        torch.optim.SGD(other["critic"].parameters(), 0.1).step()
        other.zero_grad()
        (-other["critic"](other["generator"](noise)).mean()).backward()
        torch.optim.SGD(other["generator"].parameters(), 0.1).step()
    assert all(torch.allclose(*pair) for pair in zip(networks.parameters(), other.parameters(), strict=True))
