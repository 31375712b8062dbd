"""Replicas: they share the parameters, keep the user's module the single-device one, and whoever gets around them is told so."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, noting, plain


def identifiers(trainer: DataParallel, batch: Any) -> list[int]:
    """The modules that loss_fn is given, one entry per micro-batch."""
    seen: list[int] = []

    def loss_fn(module: nn.Module, part: Any) -> Any:
        seen.append(id(module))
        return classify(module, part)

    trainer.step(loss_fn, batch)
    return seen


def test_one_device_runs_the_users_module_itself_in_one_micro_batch() -> None:
    module, batch = classifier(32)
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(4):
            assert identifiers(trainer, batch) == [id(module)]


def test_several_devices_run_only_replicas_and_keep_them() -> None:
    module, batch = classifier(32)
    with DataParallel(module, hosts(3), balance="even") as trainer:
        first = set(identifiers(trainer, batch))
        assert len(first) == 3
        assert id(module) not in first
        assert set(identifiers(trainer, batch)) == first


def test_replicas_share_the_memory_of_the_parameters() -> None:
    module, batch = classifier()
    addresses = set()
    with DataParallel(module, hosts(3), balance="even") as trainer:
        trainer.step(noting(lambda m, b: addresses.add(m[0].weight.data_ptr())), batch)
    assert addresses == {module[0].weight.data_ptr()}


def test_state_dict_and_parameters_stay_those_of_the_single_device_module() -> None:
    module, batch = classifier()
    parameters, names = list(module.parameters()), list(module.state_dict())
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        assert trainer.module is module
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        assert list(module.state_dict()) == names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.5)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_closure_over_the_users_module_raises_and_names_the_parameter() -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):  # without gradients before, then with some
            before = gradients(module)
            with pytest.raises(InvalidArgument, match=r"parameter 0\.weight of the original module was touched"):
                trainer.step(lambda _, b: classify(module, b), batch)
            for now, then in zip(gradients(module), before, strict=True):
                assert (now is None and then is None) or torch.equal(now, then)  # type: ignore[arg-type]
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted)


def test_a_closure_that_reaches_one_parameter_is_noticed() -> None:
    module, batch = classifier()
    weight = module[2].weight
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"gradient of parameter 2\.weight"):
        trainer.step(lambda m, b: classify(m, b) + 0.1 * weight.pow(2).sum(), batch)


class Acting(nn.Module):
    """Applies a function that it was given."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> Any:
        return (self.act[0][0] if isinstance(self.act, list) else self.act)(x)


def regularised_by(captured: Any) -> Any:
    """A function whose closure has a layer, or a list with it."""

    def act(x: torch.Tensor) -> Any:
        one: Any = captured[0] if isinstance(captured, list) else captured
        return x * one.weight.sum()

    return act


def test_a_function_over_the_module_that_is_hidden_in_lists_is_refused() -> None:
    module, batch = classifier()
    module[1] = Acting([[regularised_by([module[0]])]])
    message = r"parameter 0\.weight .*uses the original module.*replicate="
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(classify, batch)


def test_replicate_gives_a_function_over_a_submodule_to_each_device() -> None:
    def make() -> Any:
        module, _ = classifier()
        module[1] = Acting(regularised_by([module[0]]))
        return module

    module, (_, batch) = make(), classifier()
    classify(module, batch).backward()
    wanted = gradients(module)
    module.zero_grad()
    with DataParallel(module, TWO, replicate=lambda _: make()) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


def doubled(self: Any, x: torch.Tensor) -> Any:
    return 2 * nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]


def test_methods_bound_to_the_module_follow_the_replica() -> None:
    for patch in (lambda m: types.MethodType(doubled, m), lambda m: functools.partial(doubled, m)):
        module, batch = classifier()
        module.forward = patch(module)
        _, wanted = plain(module, classify, batch)
        with DataParallel(module, TWO) as trainer:
            trainer.step(classify, batch)
        assert_same_gradients(module, wanted)


@pytest.mark.parametrize("whose", ["replica", "user"])
def test_a_shared_parameter_written_in_place_during_a_step_raises_and_is_named(whose: str) -> None:
    module, batch = classifier()

    def loss_fn(replica: Any, part: Any) -> Any:
        with torch.no_grad():
            (replica if whose == "replica" else module)[2].bias.add_(0.0)
        return classify(replica, part)

    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=r"parameter 2\.bias was written in place while the step ran"):
            trainer.step(loss_fn, batch)
        assert gradients(module) == [None] * 4
        trainer.step(classify, batch)


def test_one_device_may_write_its_own_parameters_as_in_plain_pytorch() -> None:
    module = torch.nn.Embedding(5, 3, max_norm=0.5)
    tokens = torch.arange(5)
    with DataParallel(module, TWO[:1]) as trainer:
        trainer.step(lambda m, b: m(b).square().mean(), tokens)
    assert float(module.weight.detach().norm(dim=1).max()) <= 0.5001
    assert module.weight.grad is not None


REGISTER: list[Callable[[torch.Tensor, Any], Any]] = [
    lambda parameter, hook: parameter.register_hook(hook),
    lambda parameter, hook: parameter.register_post_accumulate_grad_hook(hook),
]


@pytest.mark.parametrize("register", REGISTER, ids=["hook", "post-accumulate hook"])
def test_parameter_hooks_run_on_one_device_and_are_refused_on_several(register: Any) -> None:
    (module, batch), calls = classifier(), list[int]()
    handle = register(module[2].weight, lambda _: calls.append(1))
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(classify, batch)
    assert calls == [1]
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=r"parameter 2\.weight has a gradient hook"):
            trainer.step(classify, batch)
        handle.remove()
        trainer.step(classify, batch)
