"""Copies of modules with functions over their own parts, and with tensors that hooks derive from parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, descend, gradients


class Net(nn.Module):
    """``act`` is what the test makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.gate = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.slope = nn.Parameter(torch.ones(5))
        self.act: Any = torch.tanh
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        for act in self.act.values() if isinstance(self.act, dict) else [self.act]:
            hidden = act(hidden)
        return self.last(hidden)


def scaled(x: torch.Tensor, scale: torch.Tensor, *, gate: Any = torch.sigmoid) -> Any:
    return x * scale * gate(x)


def tripled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 3 * forward(*args, **kwargs)

    return wrapper


def itself(net: Net) -> Any:
    def act(x: torch.Tensor, depth: int = 2) -> Any:
        return act(net.gate(x), depth - 1) if depth else x.tanh()

    return act


def set_feature_hook(net: Net) -> Any:
    net.gate.register_forward_hook(lambda _, __, output: setattr(net, "kept", output))
    return lambda x: net.gate(x).tanh() + net.kept


def patch_forward(net: Net) -> Any:
    before = net.forward
    net.forward = lambda x: before(x) * 2  # type: ignore[method-assign]
    return net.act


ACTS: dict[str, Callable[[Net], Any]] = {
    "submodule": lambda net: (lambda gate: lambda x: gate(x).tanh())(net.gate),
    "self": lambda net: lambda x: net.gate(x) * net.slope,
    "parameter": lambda net: (lambda slope: lambda x: x * slope)(net.slope),
    "bound method": lambda net: (lambda forward: lambda x: forward(x).tanh())(net.gate.forward),
    "default argument": lambda net: lambda x, gate=net.gate, *, slope=net.slope: gate(x) * slope,
    "partial": lambda net: functools.partial(scaled, scale=net.slope, gate=net.gate),
    "partial in a closure": lambda net: (lambda f: lambda x: f(x))(functools.partial(scaled, scale=net.slope)),
    "functions in a dictionary": lambda net: {"a": lambda x: net.gate(x), "b": lambda x: x.tanh() * net.slope},
    "tuple": lambda net: (lambda parts: lambda x: parts[2](parts[0](x)) * parts[1])((net.gate, 2.0, torch.tanh)),
    "itself": itself,
    "hook": lambda net: net.gate.register_forward_hook(lambda _, __, output: output * net.slope) and net.gate,
    "hook that keeps features on the module": set_feature_hook,
    "wrapped method": lambda net: tripled(net.gate.forward),
    "patched forward": patch_forward,
}


BATCH = classifier(12)[1]


def made(kind: str) -> Net:
    net = Net()
    net.act = ACTS[kind](net)
    return net


@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("kind", ACTS)
def test_functions_over_parts_of_the_module_are_those_of_the_replica(kind: str, late: bool) -> None:
    reference = made(kind)
    classify(reference, BATCH).backward()
    net = Net() if late else made(kind)
    with DataParallel(net, TWO, balance=[2, 1]) as trainer:
        if late:
            trainer.step(classify, BATCH)
            net.zero_grad()
            net.act = ACTS[kind](net)
        act = net.act
        cells = [cell.cell_contents for cell in getattr(act, "__closure__", None) or ()]
        trainer.step(classify, BATCH)
        assert_same_gradients(net, gradients(reference))
        assert net.act is act
        assert all(a.cell_contents is b for a, b in zip(getattr(act, "__closure__", None) or (), cells, strict=True))
        classify(net, BATCH).backward()  # the user's module is as it was
        assert_same_gradients(net, [None if one is None else 2 * one for one in gradients(reference)])


def test_variables_of_a_function_are_followed() -> None:
    net = Net()
    net.other = nn.Linear(5, 5).double()
    layer, scale, options = net.gate, 1.0, {"shift": 0.0}
    net.act = lambda x: layer(x) * scale + options["shift"]
    with DataParallel(net, TWO) as trainer:
        for new in (net.other, net.other, net.gate):
            net.zero_grad()
            classify(net, BATCH).backward()
            wanted = gradients(net)
            net.zero_grad()
            trainer.step(classify, BATCH)
            assert_same_gradients(net, wanted)
            layer, scale = new, scale + 1
            options["shift"] += 1.0
        del net.act.__closure__[0].cell_contents
        with pytest.raises(NameError, match="'layer'"):
            trainer.step(classify, BATCH)


def over_shared_graph(net: Net) -> Any:
    held: dict[str, Any] = {}

    def act(x: torch.Tensor) -> Any:
        held["gate"] = net.gate.weight.tanh()
        net.first(x.new_zeros(1, 6))  # another device may come here meanwhile
        return x @ held["gate"]

    return act


def over_counter(net: Net) -> Any:
    calls = 0

    def act(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return net.gate(x)

    return act


def with_attribute(net: Net) -> Any:
    def act(x: torch.Tensor) -> Any:
        return net.gate(x)

    act.calls = 0  # type: ignore[attr-defined]
    return act


def keeping(net: Net) -> Any:
    keep: Any = [].append
    return lambda x: (keep(1), net.gate(x))[1]


def with_helper(net: Net) -> Any:
    seen: list[Any] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    return lambda x: note(net.gate(x))


STATES: dict[str, Callable[[Net], Any]] = {
    "cache": lambda net: (lambda cache: lambda x: cache.setdefault("factor", 2.0) * net.gate(x))(dict[str, Any]()),
    "shared graph": over_shared_graph,
    "counter": over_counter,
    "method": keeping,
    "helper": with_helper,
    "attribute": with_attribute,
    "module": lambda net: (lambda teacher: lambda x: net.gate(x) + teacher(x))(nn.Tanh()),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_function_may_keep_state_beside_parts_of_the_module(kind: str) -> None:
    net = Net()
    net.act = STATES[kind](net)
    classify(net, BATCH).backward()
    wanted = gradients(net)
    net.zero_grad()
    with DataParallel(net, TWO) as trainer:
        trainer.step(classify, BATCH)
    assert_same_gradients(net, wanted)


def weight_norm(net: Net) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net.gate)


def pruned(net: Net) -> None:
    prune.random_unstructured(net.gate, "weight", amount=0.3)
    prune.l1_unstructured(net.gate, "weight", amount=0.2)  # a container of two methods
    prune.global_unstructured([(net.first, "weight"), (net.last, "bias")], prune.L1Unstructured, amount=0.25)


DERIVED: dict[str, Callable[[Net], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": lambda net: nn.utils.spectral_norm(net.gate, n_power_iterations=2),
    "pruned": pruned,
}


def hooked() -> Net:
    net = Net()
    net.act = nn.Sequential(net.gate, nn.Tanh())
    return net


@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("kind", DERIVED)
def test_tensors_that_hooks_derive_from_parameters_are_computed_on_each_device(kind: str, late: bool) -> None:
    net, reference = hooked(), hooked()

    def change() -> None:
        for one in (net, reference):
            DERIVED[kind](one)
        reference.load_state_dict(net.state_dict())
        for one in (net, reference):
            one(BATCH[0])  # leaves the tensor with its graph

    if not late:
        change()
    with DataParallel(net, TWO, balance="even") as trainer:
        if late:
            trainer.step(classify, BATCH)
            net.zero_grad()
            change()
        weight: Any = net.gate.weight
        for _ in range(3):
            classify(reference, BATCH).backward()
            trainer.step(classify, BATCH)
            assert_same_gradients(net, gradients(reference))
            for module in (net, reference):
                descend(module, 1.0, some=True)
        assert net.gate.weight is weight  # the user's attribute is the user's
        torch.testing.assert_close(list(net.buffers()), list(reference.buffers()), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(net.eval()(BATCH[0]), reference.eval()(BATCH[0]), rtol=1e-9, atol=1e-12)
