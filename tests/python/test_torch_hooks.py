"""Hooks of the user's module on replicas: what they keep on the module works, what they keep elsewhere is refused."""

from __future__ import annotations

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
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain

pytestmark = pytest.mark.usefixtures("proved")
DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])

FEATURES: dict[str, Any] = {}
latest: Any = None
taps: Any = None


def save(name: str, value: Any) -> None:
    FEATURES[name] = value


def keep_globally(module: Any, inputs: Any, output: Any) -> None:
    FEATURES["x"] = output


def keep_by_helper(module: Any, inputs: Any, output: Any) -> None:
    save("x", output)


def keep_by_statement(module: Any, inputs: Any, output: Any) -> None:
    global latest
    latest = output


def keep_in(features: dict[str, Any], name: str, module: Any, inputs: Any, output: Any) -> None:
    features[name] = output


class Tap:
    """Keeps what it is given on itself."""

    def __init__(self) -> None:
        self.features: Any = None

    def keep(self, module: Any, inputs: Any, output: Any) -> None:
        self.features = output

    __call__ = keep


def by_closure(store: Callable[[dict[str, Any], Any], Any]) -> Any:
    features: dict[str, Any] = {}
    return lambda module, inputs, output: store(features, output) and None, lambda _: features["x"]


def by_list(module: Any) -> Any:
    features: list[Any] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        features.append(output)

    return hook, lambda _: features.pop()


def by_variable(module: Any) -> Any:
    feature: Any = None

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal feature
        feature = output

    return hook, lambda _: feature


def by_partial(module: Any) -> Any:
    features: dict[str, Any] = {}
    return functools.partial(keep_in, features, "x"), lambda _: features["x"]


def by_tap(kind: str) -> Any:
    tap = Tap()
    return tap.keep if kind == "method" else tap, lambda _: tap.features


def by_detached_features(module: Any) -> Any:
    features: dict[str, Any] = {}

    def hook(module: Any, inputs: Any, output: Any) -> None:
        features["x"] = output.detach()

    return hook, lambda _: features["x"]


def by_running_sum(module: Any) -> Any:
    total = torch.zeros(10, dtype=torch.double)

    def hook(module: Any, inputs: Any, output: Any) -> None:
        total.add_(output.detach().sum(0))

    return hook, lambda _: total


TAPS: dict[str, Callable[[Any], Any]] = {
    "dictionary": lambda m: by_closure(lambda features, output: features.update(x=output)),
    "dictionary of lists": lambda m: by_closure(lambda features, output: features.setdefault("x", []).append(output)),
    "list": by_list,
    "variable": by_variable,
    "global dictionary": lambda m: (keep_globally, lambda _: FEATURES.pop("x")),
    "global dictionary by a function": lambda m: (keep_by_helper, lambda _: FEATURES.pop("x")),
    "global variable": lambda m: (keep_by_statement, lambda _: latest),
    "partial": by_partial,
    "method": lambda m: by_tap("method"),
    "callable": lambda m: by_tap("callable"),
    "detached": by_detached_features,
    "running sum": by_running_sum,
}


@pytest.mark.parametrize(("kind", "late"), [*((kind, False) for kind in TAPS), ("dictionary", True), ("list", True)])
def test_a_hook_that_keeps_features_outside_of_the_module_is_refused_with_the_cure(kind: str, late: bool) -> None:
    module, batch = classifier()
    hook, features = TAPS[kind](module)

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = classify(replica, part)
        found = features(replica)
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
    hook, features = TAPS["dictionary"](module)
    module[0].register_forward_hook(hook)

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) + features(replica).pow(2).mean()

    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(loss_fn, batch)
    wanted = gradients(module)
    module.zero_grad()
    loss_fn(module, batch).backward()
    assert_same_gradients(module, wanted)


class Tapped(nn.Module):
    """Reads the features of its layers in its own forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.features: dict[str, Any] = {}
        self.tap = Tap()
        hook: dict[str, Any] = {
            "method of the module": self.keep,
            "its dictionary": functools.partial(keep_in, self.features, "x"),
            "its object": self.tap.keep,
            "the module given": lambda layer, _, output: setattr(layer, "kept", output),
        }
        self.inner.register_forward_hook(hook[kind])

    def keep(self, layer: Any, inputs: Any, output: Any) -> None:
        self.features["x"] = output

    def forward(self, x: torch.Tensor) -> Any:
        self.inner(x)
        if "x" in self.features:
            return self.head(self.features["x"])
        return self.head(self.tap.features if self.tap.features is not None else self.inner.kept)


@DEVICES
@pytest.mark.parametrize("kind", ["method of the module", "its dictionary", "its object", "the module given"])
def test_a_hook_that_keeps_features_on_the_module_works(kind: str, devices: int) -> None:
    torch.manual_seed(2)
    module, (_, batch) = Tapped(kind).double(), classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices)) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


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
            if devices == 1:
                trainer.step(loss_fn, batch)
            else:
                with pytest.raises(InvalidArgument, match=r"the global forward hook .*lambda.*keeps a tensor"):
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
    _, wanted = plain(module, classify, batch)
    CALLS.clear()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)
    assert len(CALLS) == devices + (devices > 1)  # the whole batch first, which proves the step


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


class Symmetric(nn.Module):
    """A parametrization that needs its graph."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh() * weight


def twice(module: Any, x: torch.Tensor) -> Any:
    return module[2](module[0](x).tanh() + module[0](2 * x))


@DEVICES
@pytest.mark.parametrize("where", ["in loss_fn", "around the step"])
def test_cached_parametrizations_are_those_of_the_replica_and_the_micro_batch(where: str, devices: int) -> None:
    module, batch = classifier(64)
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    parametrize.register_parametrization(module[2], "weight", Symmetric())

    def loss_fn(replica: Any, part: Any) -> Any:
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
    assert [type(part).__name__ for part in module] == ["ParametrizedLinear", "Tanh", "ParametrizedLinear"]


def test_parametrizations_of_replicas_look_like_the_users() -> None:
    module, batch = classifier()
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.append((parametrize.type_before_parametrizations(replica[0]), type(replica[0]).__name__))
        return classify(replica, part)

    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_fn, batch)
    assert set(seen) == {(nn.Linear, "ParametrizedLinear")}
