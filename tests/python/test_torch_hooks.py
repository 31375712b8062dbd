"""Hooks of the user's module on replicas: what they keep on the module works, what they keep elsewhere is refused."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    DEVICES,
    TWO,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("proved")

FEATURES: dict[str, Any] = {}
taps: Any = None


def keep_in(features: dict[str, Any], name: str, module: Any, inputs: Any, output: Any) -> None:
    features[name] = output


def save(value: Any) -> None:
    FEATURES["x"] = value


class Tap:
    """Keeps what it is given on itself."""

    def __init__(self) -> None:
        self.features: Any = None

    def keep(self, module: Any, inputs: Any, output: Any) -> None:
        self.features = output

    __call__ = keep


def by_variable() -> Any:
    feature: Any = None

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal feature
        feature = output

    return hook, lambda: feature


def by_global_variable() -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        global taps
        taps = output

    return hook, lambda: taps


def by(make: Callable[[], Any], keep: Callable[[Any, Any], object], features: Callable[[Any], Any]) -> Any:
    """A hook that keeps its output by `keep`, in what `make` makes, and what reads it."""
    store = make()

    def hook(module: Any, inputs: Any, output: Any) -> None:
        keep(store, output)

    return hook, lambda: features(store)


def by_tap(name: str) -> Any:
    tap = Tap()
    return getattr(tap, name) if name else tap, lambda: tap.features


def by_partial() -> Any:
    features: dict[str, Any] = {}
    return functools.partial(keep_in, features, "x"), lambda: features["x"]


def first(features: dict[str, Any]) -> Any:
    return features["x"]


TAPS: dict[str, Callable[[], Any]] = {
    "dictionary": lambda: by(dict, lambda features, output: features.update(x=output), first),
    "dictionary of lists": lambda: by(dict, lambda d, output: d.setdefault("x", []).append(output), first),
    "list": lambda: by(list, list.append, list.pop),
    "detached": lambda: by(dict, lambda features, output: features.update(x=output.detach()), first),
    "running sum": lambda: by(lambda: torch.zeros(10).double(), lambda t, x: t.add_(x.detach().sum(0)), lambda t: t),
    "variable": by_variable,
    "global dictionary": lambda: (lambda m, i, output: FEATURES.update(x=output), lambda: FEATURES.pop("x")),
    "global dictionary by a function": lambda: (lambda m, i, output: save(output), lambda: FEATURES.pop("x")),
    "global variable": by_global_variable,
    "partial": by_partial,
    "method": lambda: by_tap("keep"),
    "callable": lambda: by_tap(""),
}


@pytest.mark.parametrize(("kind", "late"), [*((kind, False) for kind in TAPS), ("dictionary", True), ("list", True)])
def test_a_hook_that_keeps_features_outside_of_the_module_is_refused_with_the_cure(kind: str, late: bool) -> None:
    module, batch = classifier()
    hook, features = TAPS[kind]()

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = classify(replica, part)
        found = features()
        return loss + sum(one.pow(2).mean() for one in (found if isinstance(found, list) else [found]))

    handle = None if late else module[0].register_forward_hook(hook)
    with DataParallel(module, TWO) as trainer:
        if handle is None:
            trainer.step(classify, batch)
            module.zero_grad()
            handle = module[0].register_forward_hook(hook)
        message = r"the forward hook of 0 \(.*keeps a tensor of shape.*module\.features = output.*loss_fn"
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=message):
                trainer.step(loss_fn, batch)
            assert gradients(module) == [None] * 4
        handle.remove()
        trainer.step(classify, batch)


def test_a_hook_may_keep_values_for_later_that_loss_fn_does_not_look_at() -> None:
    module, batch = classifier()
    kept: list[torch.Tensor] = []
    module[0].register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(classify, batch)
        kept.clear()  # what the proof of the first step has left
        trainer.step(classify, batch)
        assert sum(map(len, kept)) == len(batch[0])
        with pytest.raises(InvalidArgument, match=r"keeps a tensor of shape .* in 'kept'"):
            trainer.step(lambda m, b: classify(m, b) + 0 * kept[-1].sum(), batch)
        trainer.step(classify, batch)


def test_one_device_takes_features_from_anywhere() -> None:
    module, batch = classifier()
    hook, features = TAPS["variable"]()
    module[0].register_forward_hook(hook)

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) + features().pow(2).mean()

    assert_exact(module, loss_fn, batch, 1)


def tapped(kind: str) -> Any:
    """A module that reads the features of its layers in its own forward."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        m.inner(x)
        if "x" in m.features:
            return m.head(m.features["x"])
        return m.head(m.tap.features if m.tap.features is not None else m.inner.kept)

    module = module_of(forward, inner=nn.Linear(6, 6), head=nn.Linear(6, 3), features={}, tap=Tap())
    hooks: dict[str, Any] = {
        "the module": types.MethodType(lambda m, layer, _, output: m.features.update(x=output), module),
        "its dictionary": functools.partial(keep_in, module.features, "x"),
        "its object": module.tap.keep,
        "the module given": lambda layer, _, output: setattr(layer, "kept", output),
    }
    module.inner.register_forward_hook(hooks[kind])
    return module


@DEVICES
@pytest.mark.parametrize("kind", ["the module", "its dictionary", "its object", "the module given"])
def test_a_hook_that_keeps_features_on_the_module_works(kind: str, devices: int) -> None:
    torch.manual_seed(2)
    module, (_, batch) = tapped(kind), classifier()
    assert_exact(module, classify, batch, devices)


def test_features_that_loss_fn_reads_through_an_imported_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier()
    monkeypatch.setattr(sys.modules[__name__], "taps", types.ModuleType("taps"))
    exec("FEATURES = {}\ndef hook(module, inputs, output):\n    FEATURES['x'] = output.detach()\n", vars(taps))
    module[0].register_forward_hook(taps.hook)
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"keeps a tensor of shape .* in"):
        trainer.step(lambda m, b: classify(m, b) + taps.FEATURES["x"].pow(2).mean(), batch)


@DEVICES
def test_a_global_hook_that_keeps_something_is_refused_by_several_devices(devices: int) -> None:
    module, batch = classifier()
    features: dict[str, Any] = {}
    looked = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    keeping = nn.modules.module.register_module_forward_hook(lambda m, inputs, output: features.update(x=output))

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) + features["x"].pow(2).mean()

    try:
        with DataParallel(module, hosts(devices)) as trainer:
            refused = pytest.raises(InvalidArgument, match=r"the global forward hook .*lambda.*keeps a tensor")
            with refused if devices > 1 else contextlib.nullcontext():
                trainer.step(loss_fn, batch)
            keeping.remove()
            trainer.step(classify, batch)
    finally:
        looked.remove()
        keeping.remove()


CALLS: list[int] = []
LIMITS: dict[str, Any] = {"largest": 0.5, "mask": torch.ones(10, dtype=torch.double)}


def clip(module: Any, inputs: Any, output: torch.Tensor) -> Any:
    CALLS.append(len(inputs))
    module.last = output
    return output.clamp(max=LIMITS["largest"]) * LIMITS["mask"]


@DEVICES
def test_hooks_that_read_and_count_work(devices: int) -> None:
    module, batch = classifier()
    module[0].register_forward_hook(clip)
    CALLS.clear()
    assert_exact(module, classify, batch, devices, balance="even")
    assert len(CALLS) == 1 + devices + (devices > 1)  # PyTorch alone, and the whole batch, which proves the step


@pytest.mark.parametrize(
    ("register", "told"),
    [
        (nn.Module.register_full_backward_hook, "backward hook of 0"),
        (nn.Module.register_full_backward_pre_hook, "backward pre-hook of 0"),
        (nn.Module.register_forward_pre_hook, "forward pre-hook of 0"),
    ],
)
def test_other_hooks_that_keep_tensors_for_loss_fn_are_refused(register: Any, told: str) -> None:
    module, batch = classifier()
    kept: list[Any] = []
    register(module[0], lambda *arguments: kept.extend(arguments[-1]))

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = classify(replica, (part[0].clone().requires_grad_(), part[1]))
        return loss + sum(one.sum() for one in kept)

    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=told):
        trainer.step(loss_fn, batch)


def twice(module: Any, x: torch.Tensor) -> Any:
    return module[2](module[0](x).tanh() + module[0](2 * x))


@DEVICES
@pytest.mark.parametrize("where", ["in loss_fn", "around the step"])
def test_cached_parametrizations_are_those_of_the_replica_and_the_micro_batch(where: str, devices: int) -> None:
    module, batch = classifier(64)
    for layer in (module[0], module[2]):  # by what needs its graph
        parametrize.register_parametrization(layer, "weight", module_of(lambda m, weight: weight.tanh() * weight))

    seen = set()

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.add((parametrize.type_before_parametrizations(replica[0]), type(replica[0]).__name__))
        return nn.functional.cross_entropy(twice(replica, part[0]), part[1])

    def cached(replica: Any, part: Any) -> Any:
        with torch.no_grad():
            twice(replica, part[0])  # a value without a graph, which must not be used later
        with parametrize.cached():
            return loss_fn(replica, part)

    _, wanted = plain(module, loss_fn, batch)
    with DataParallel(module, hosts(devices), micro_batch=4) as trainer:
        for _ in range(3):
            if where == "in loss_fn":
                trainer.step(cached, batch)
            else:
                with parametrize.cached():
                    trainer.step(loss_fn, batch)
            assert_same_gradients(module, wanted)
            module.zero_grad()
    assert not parametrize._cache
    assert seen == {(nn.Linear, "ParametrizedLinear")}, "replicas look like the user's module"
    assert [type(part).__name__ for part in module] == ["ParametrizedLinear", "Tanh", "ParametrizedLinear"]
