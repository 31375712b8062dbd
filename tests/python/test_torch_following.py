"""Parameters, submodules, modes, attributes, hooks and states of the user's module that change after the trainer was made are followed."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    DEVICES,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    linear,
    module_of,
    noting,
    plain,
)


def assign_state(module: Any) -> None:
    state = {name: value.clone() + 0.1 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def load_state(module: Any) -> None:
    module.load_state_dict({name: value + 0.1 for name, value in module.state_dict().items()})


def swap_data(module: Any) -> None:
    """`torch.nn.Module.to` with the data swapped out and in again."""
    module.float()
    module.double()


def layer(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(7)
    return linear(inputs, outputs)


def write_in_place(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


def set_data(module: Any) -> None:
    module[0].weight.data = module[0].weight.data * 2


def set_bias(module: Any) -> None:
    module[0].bias = nn.Parameter(torch.full((10,), 0.5, dtype=torch.double))


CHANGES: dict[str, list[Callable[[Any], object]]] = {
    "load_state": [load_state],
    "assign_state": [assign_state],
    "set_data": [set_data],
    "set_data_twice": [set_data, set_data],
    "swap_data": [swap_data],
    "replace_parameter": [lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach() * 3))],
    "replace_submodule": [lambda m: m.__setitem__(2, layer(10, 3))],
    "replace_by_name": [lambda m: m._modules.update({"0": layer(6, 10)})],
    "add_submodule": [lambda m: m.append(layer(3, 3))],
    "remove_parameter": [lambda m: setattr(m[0], "bias", None)],
    "remove_and_set_parameter": [lambda m: setattr(m[0], "bias", None), set_bias],
    "tie": [lambda m: setattr(m[2], "bias", nn.Parameter(m[2].weight[:, 0].detach().clone()))],
    "write_in_place": [write_in_place],
    "parametrize": [lambda m: nn.utils.parametrizations.weight_norm(m[0])],
    "freeze": [lambda m: m[0].requires_grad_(False)],
    "freeze_and_thaw": [lambda m: m[0].requires_grad_(False), lambda m: m[0].requires_grad_(True)],
}


@DEVICES
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_parameters_between_steps_are_followed(name: str, devices: int) -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(classify, batch)
        for change in CHANGES[name]:
            change(module)
        loss, wanted = plain(module, classify, batch)
        for call in (trainer.step, trainer.loss):
            module.zero_grad()
            ours = call(classify, batch)
            if call == trainer.loss:
                ours.backward()
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
    same = [torch.equal(a, b) for a, b in zip(gradients(module), before, strict=True)]  # type: ignore[arg-type]
    assert same == [True, True, False, False]


@DEVICES
def test_the_training_mode_follows_part_by_part(devices: int) -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), nn.Dropout(0.5)).double()
    _, batch = classifier()
    seen: list[list[bool]] = []

    def modes(one: nn.Module) -> list[bool]:
        return [child.training for child in one.modules()]

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for part, training in ((module, False), (module[1], True), (module, True), (module[2], False)):
            part.train(training)
            trainer.step(noting(lambda replica, _: seen.append(modes(replica))), batch)
            assert seen[-devices:] == [modes(module)] * devices


class Settings:
    """A configuration, as several modules share one."""

    def __init__(self, **attributes: Any) -> None:
        self.power, self.inner = 1.0, None
        vars(self).update(attributes)


class Tunable(nn.Module):
    """Computes by everything that an attribute may be."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: Any = Settings()
        self.layer: Any = nn.Linear(6, 3)
        vars(self.layer)["settings"] = self.settings
        self.temperature = 1.0
        self.factors, self.table = [1.0, 2.0, 3.0], {"a": [1.0]}
        self.activation: Any = torch.tanh
        self.mask = torch.ones(3, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.activation(self.layer(x)) / self.temperature
        x = x * x.new_tensor(self.factors) * self.mask + self.table["a"][0]
        return torch.sign(x) * x.abs() ** self.layer.settings.power * getattr(self, "late", 1.0)


def shift(module: Any, inputs: Any, output: torch.Tensor) -> Any:
    return output + 0.5 * inputs[0].sum(1, keepdim=True) ** 2


def double_keywords(module: Any, inputs: Any, keywords: Any) -> Any:
    return tuple(2 * one for one in inputs), keywords


def set_in_place(module: Any) -> None:
    module.factors[1], module.table["a"][0] = 5.0, 2.0
    module.mask[0] = 0.25


def share_new_settings(module: Any) -> None:
    module.settings = module.layer.settings = Settings()
    module.settings.power = 1.5


def change_class(module: Any) -> None:
    module.layer.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})


TUNINGS: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "temperature", 2.5),
    "function": lambda m: setattr(m, "activation", torch.sigmoid),
    "builtin function": lambda m: setattr(m, "activation", nn.functional.gelu),
    "list": lambda m: setattr(m, "factors", [3.0, 3.0, 1.0]),
    "in place": set_in_place,
    "tensor": lambda m: setattr(m, "mask", torch.full((3,), 0.5, dtype=torch.double)),
    "tensor through data": lambda m: setattr(m, "mask", m.mask * 3),
    "attribute of an object": lambda m: setattr(m.settings, "power", 2.0),
    "new object": share_new_settings,
    "the new object again": lambda m: setattr(m.layer.settings, "power", 2.5),
    "new attribute": lambda m: setattr(m, "late", 3.0),
    "deleted attribute": lambda m: delattr(m, "late"),
    "patched forward": lambda m: setattr(
        m.layer, "forward", types.MethodType(lambda s, x: -s.weight.sum() + x[:, :3], m.layer)
    ),
    "patch taken back": lambda m: delattr(m.layer, "forward"),
    "class": change_class,
    "forward hook": lambda m: setattr(m, "handle", m.layer.register_forward_hook(shift)),
    "removed hook": lambda m: m.handle.remove(),
    "hook with keywords": lambda m: m.layer.register_forward_pre_hook(double_keywords, with_kwargs=True),
    "all hooks cleared": lambda m: m.layer._forward_pre_hooks.clear(),
    "a submodule's attribute": lambda m: setattr(m.layer, "late", 0),
}


@DEVICES
def test_attributes_and_hooks_changed_between_steps_are_followed(devices: int) -> None:
    torch.manual_seed(0)
    module, (_, batch) = Tunable().double(), classifier()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for tuning in (None, *TUNINGS.values()):
            if tuning is not None:
                before = plain(module, classify, batch)[0]
                tuning(module)
                assert tuning is TUNINGS["a submodule's attribute"] or plain(module, classify, batch)[0] != before
            for _ in range(2):
                module.zero_grad()
                loss, wanted = plain(module, classify, batch)
                assert trainer.step(classify, batch).item() == pytest.approx(loss.item(), rel=1e-12)
                assert_same_gradients(module, wanted)


class ByName(dict[str, Any]):
    """A dictionary whose entries are attributes, as libraries of configurations have it."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Labelled(dict[str, Any]):
    """A dictionary with attributes beside its entries."""

    label = 0.0


class Slotted:
    """An object without ``__dict__``."""

    __slots__ = ("p",)

    def __init__(self, p: Any) -> None:
        self.p = p


CONFIGURATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dictionary by name": (lambda: ByName(p=1.0), lambda c: c.p, lambda c: setattr(c, "p", 2.0)),
    "one in an object": (lambda: Settings(a=ByName(p=1.0)), lambda c: c.a.p, lambda c: setattr(c.a, "p", 2.0)),
    "one with attributes": (lambda: Labelled(p=1.0), lambda c: c["p"] + c.label, lambda c: setattr(c, "label", 1.0)),
    "slots": (lambda: Slotted(1.0), lambda c: c.p, lambda c: setattr(c, "p", 2.0)),
    "an object in slots": (lambda: Slotted(Settings(p=1.0)), lambda c: c.p.p, lambda c: setattr(c.p, "p", 2.0)),
    "list of objects": (lambda: [Settings(p=1.0)], lambda c: c[0].p, lambda c: setattr(c[0], "p", 2.0)),
    "dictionary of objects": (lambda: {"a": Settings(p=1.0)}, lambda c: c["a"].p, lambda c: setattr(c["a"], "p", 2.0)),
    "three levels": (
        lambda: Settings(a=[Settings(p=[1.0])]),
        lambda c: c.a[0].p[0],
        lambda c: c.a[0].p.__setitem__(0, 2.0),
    ),
    "array": (lambda: np.ones(1), lambda c: float(c[0]), lambda c: c.fill(2.0)),
}


def configured(configuration: Any, read: Callable[[Any], Any]) -> Any:
    """Multiplies by what it reads of its configuration."""
    layer = nn.Linear(6, 3)
    return module_of(
        lambda m, x: m.layer(x) * m.read(m.configuration), layer=layer, configuration=configuration, read=read
    )


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_what_changes_inside_of_a_configuration_is_followed(kind: str) -> None:
    make, read, change = CONFIGURATIONS[kind]
    module, (_, batch) = configured(make(), read).double(), classifier()
    with DataParallel(module, hosts(2), balance="even") as trainer:
        once = trainer.step(lambda m, b: m(b[0]).mean(), batch).item()
        change(module.configuration)
        for _ in range(2):
            assert trainer.step(lambda m, b: m(b[0]).mean(), batch).item() == pytest.approx(2 * once, rel=1e-12)


def count(m: Any, x: torch.Tensor) -> Any:
    """Counts the calls, and keeps the last output."""
    m.calls += 1
    m.last = m.layer(x)
    return m.last


def test_what_replicas_write_to_themselves_stays_unless_the_users_module_changed_there() -> None:
    module, (_, batch) = module_of(count, layer=nn.Linear(6, 3), calls=0, name="a"), classifier()
    seen: set[tuple[int, str]] = set()
    replicas: set[int] = set()

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = classify(replica, part)
        seen.add((replica.calls, replica.name))
        replicas.add(id(replica))
        return loss

    with DataParallel(module, hosts(2), balance="even", micro_batch=8) as trainer:
        for name in ("a", "b", "b"):
            module.name = name
            trainer.step(loss_fn, batch)
        assert seen == {(1, "a"), (2, "b"), (3, "b")}
        assert module.calls == 3
        module(batch[0])  # leaves an activation behind, which no copy can be made of and no forward reads
        seen.clear()
        trainer.step(loss_fn, batch)
        assert seen == {(5, "b")}
    assert len(replicas) == 2, "they are made once"


def go_on(m: Any, x: torch.Tensor) -> Any:
    """Goes on from the state that the last forward has left."""
    h = m.layer(x)
    if m.hidden is not None:
        h = h + m.hidden
    m.hidden = h.mean(0).detach()
    m.steps = (m.steps[0] + 1, m.hidden)
    return h


@DEVICES
def test_a_state_that_forwards_write_is_on_the_users_module_and_can_be_reset(devices: int) -> None:
    torch.manual_seed(3)
    module, (_, batch) = module_of(go_on, layer=nn.Linear(6, 3), hidden=None, steps=(0, None)), classifier()
    batch = (batch[0][:1].expand(16, -1).contiguous(), batch[1][:1].expand(16).contiguous())
    with DataParallel(module, hosts(devices), balance="even", micro_batch=16) as trainer:
        first, second = (trainer.step(classify, batch).item() for _ in range(2))
        assert first != second
        torch.testing.assert_close(module.hidden, 2 * module.layer(batch[0][0]).detach())
        assert module.steps[0] == 2
        for _ in range(3):
            module.hidden = None
            assert trainer.step(classify, batch).item() == pytest.approx(first, rel=1e-12)
        module.hidden.zero_()
        assert trainer.step(classify, batch).item() == pytest.approx(first, rel=1e-12)
        assert trainer.step(classify, batch).item() == pytest.approx(second, rel=1e-12)


@pytest.mark.parametrize("anew", [False, True])
def test_an_attribute_that_cannot_be_copied_is_refused_when_it_is_set(anew: bool) -> None:
    """Also where new parameters need new replicas: those that could not be made anew are not used."""
    module, batch = classifier()
    with DataParallel(module, hosts(2)) as trainer:
        trainer.step(classify, batch)
        module.zero_grad()
        if anew:
            module[0].weight = nn.Parameter(torch.zeros_like(module[0].weight))
        module[1].guard = threading.Lock()
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="'1.guard'" if anew else r"attribute 'guard' \(lock\) was set"):
                trainer.step(classify, batch)
        del module[1].guard
        _, wanted = plain(module, classify, batch)
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)
