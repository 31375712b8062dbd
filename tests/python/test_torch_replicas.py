"""Replicas: they share the parameters, keep the user's module the single-device one, and whoever gets around them is told so."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel, ProofWarning
from paceline.torch._devices.meeting import MeetingPoint
from paceline.torch._pipeline.gates import gated
from paceline.torch._replicas.synchronised import synchronised
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


# Reads, through the user's module, of what forwards write to attributes: as on one device, or seen by a proof.


class Tapped(nn.Module):
    """Leaves features behind: in an attribute, in a dictionary, in a tuple, as a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.features: Any = None
        self.by_name: dict[str, Any] = {}
        self.inner.register_forward_hook(lambda layer, _, output: setattr(layer, "kept", output))
        self.scale = torch.tensor(0.5, dtype=torch.double)
        self.calls = 0
        self.looked_up: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.features = self.by_name["x"] = self.inner(x)
        self.both = (self.features, x)
        self.calls += 1
        self.looked_up = lambda: None
        return self.head(self.features)


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda module: module.features,
    "hook on the module given": lambda module: module.inner.kept,
    "dictionary": lambda module: module.by_name["x"],
    "tuple": lambda module: module.both[0],
    "number": lambda module: torch.tensor(float(module.calls)),
    "getattr": lambda module: getattr(module, "features"),  # noqa: B009
    "vars": lambda module: module.__getattribute__("features"),
}


class Script:
    """A trainer of the user's, with the module on itself."""

    def __init__(self, module: Any, read: Callable[[Any], Any]) -> None:
        self.model, self.read = module, read

    def loss(self, replica: Any, part: Any) -> Any:
        return classify(replica, part) + self.read(self.model).pow(2).mean()

    def by_partial(self) -> Any:
        return functools.partial(lambda outer, replica, part: Script(outer, self.read).loss(replica, part), self.model)


def said_of_the_original(error: BaseException) -> bool:
    """Whether the error is what reading the original module makes, and says so."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    if isinstance(error, (AttributeError, TypeError, KeyError)):  # it has not got what is read yet
        missing = re.search("'(features|kept|both|x)'|NoneType", str(error))
        return missing is not None and "read from the original module" in text
    if isinstance(error, RuntimeError) and not isinstance(error, Error):  # an old graph, or rows of the whole batch
        old = "backward through the graph a second time" in text
        return old or ("must match the size" in str(error) and "read from the original module" in text)
    return bool(
        re.search(
            "another result than on one device.*(the loss is|the gradient of|outputs differ)|of the original module was touched",
            text,
            re.DOTALL,
        )
    )


@pytest.mark.parametrize("stale", ["no_grad", "predict", "grad", "nothing"])
@pytest.mark.parametrize("kind", READS)
def test_a_proof_sees_that_the_original_module_lacks_what_forwards_wrote(kind: str, stale: str) -> None:
    module, (_, batch) = Tapped().double(), classifier()
    script = Script(module, READS[kind])
    with DataParallel(module, TWO, balance="even", prove="raise") as trainer:
        if stale == "predict":
            with contextlib.suppress(Error):  # the features that it leaves are those of a slice
                trainer.predict(batch[0])
        else:
            with torch.set_grad_enabled(stale == "grad"):
                module(batch[0]) if stale != "nothing" else None
        for loss_fn in (script.loss, lambda m, b: script.loss(m, b), script.by_partial()):
            for _ in range(2):
                with pytest.raises((Error, AttributeError, TypeError, KeyError, RuntimeError)) as raised:
                    trainer.step(loss_fn, batch)
                assert said_of_the_original(raised.value)
            assert gradients(module) == [None] * 4


def test_a_module_keeps_its_class_while_devices_run() -> None:
    module, (_, batch) = Tapped().double(), classifier()
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.append(type(module))
        return classify(replica, part) * module.scale

    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_fn, batch)
    assert set(seen) == {Tapped}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_module_argument_and_what_no_forward_writes_are_free(devices: int) -> None:
    module, (_, batch) = Tapped().double(), classifier()

    def loss_fn(replica: Any, part: Any) -> Any:
        assert module.training
        assert isinstance(module, Tapped)
        assert callable(module.looked_up)
        return module.scale * classify(replica, part) + replica.features.pow(2).mean() + READS["tuple"](replica).mean()

    with torch.no_grad():
        module(batch[0])
    _, wanted = plain(module, loss_fn, batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for _ in range(3):
            module.zero_grad()
            trainer.step(loss_fn, batch)
            assert_same_gradients(module, wanted)


def test_one_device_reads_features_from_the_module_itself() -> None:
    module, (_, batch) = Tapped().double(), classifier()
    loss_fn = Script(module, READS["attribute"]).loss
    loss_fn(module, batch).backward()
    wanted = gradients(module)
    module.zero_grad()
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(loss_fn, batch)
    assert_same_gradients(module, wanted)


def test_check_and_a_proof_s_warning_name_reads_from_the_original_module() -> None:
    module, (_, batch) = Tapped().double(), classifier()
    loss_fn = Script(module, READS["attribute"]).loss
    with DataParallel(module, TWO, prove="warn") as trainer:
        with torch.no_grad():
            module(batch[0])
        report = trainer.check(loss_fn, batch)
        assert not report.exact
        assert "reads from the original module" in str(report)
        with pytest.warns(ProofWarning, match="reads from the original module"):
            trainer.step(loss_fn, batch)


def test_a_proof_of_predict_sees_it_too() -> None:
    module, (_, batch) = Tapped().double(), classifier()
    with DataParallel(module, TWO, prove="raise") as trainer:
        with torch.no_grad():
            module(batch[0])
        with pytest.raises((Error, RuntimeError)) as raised:
            trainer.predict(lambda m, x: m(x).sum(1) + module.features.sum(1), batch[0])
        assert said_of_the_original(raised.value)


def test_what_others_put_in_the_place_of_ours_meanwhile_stays() -> None:
    def other(*_: Any) -> None: ...

    compiled, forwarded = (nn.Linear(2, 2) for _ in range(2))
    with gated([[compiled]]), synchronised([("", forwarded)], MeetingPoint()):
        compiled._compiled_call_impl = other
        forwarded.forward = other  # type: ignore[method-assign, assignment]
    assert compiled._compiled_call_impl is other
    assert vars(forwarded)["forward"] is other
