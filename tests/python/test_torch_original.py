"""Reads, through the user's module, of what forwards write to attributes: as on one device, or seen by a proof."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error
from paceline.torch import DataParallel, ProofWarning
from paceline.torch._devices.meeting import MeetingPoint
from paceline.torch._pipeline.gates import gated
from paceline.torch._replicas.synchronised import synchronised
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain


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
