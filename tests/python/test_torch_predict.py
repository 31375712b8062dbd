"""`predict`: outputs of the whole batch, in the order of the items, without gradients."""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dataclass that is a mapping too, and keeps both in step by its own rules, as models of natural language return."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return self.__class__, (self.logits,)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_outputs_come_in_the_order_of_the_items(devices: int, micro_batch: int | None) -> None:
    module, (x, _) = classifier(17)
    with DataParallel(module, hosts(devices), micro_batch=micro_batch) as trainer:
        for _ in range(5):
            outputs = trainer.predict(x)
            torch.testing.assert_close(outputs, module(x), rtol=1e-12, atol=1e-12)
            assert not outputs.requires_grad


def test_nested_outputs_keep_their_kind() -> None:
    module, (x, _) = classifier(9)

    def fn(replica: nn.Module, part: torch.Tensor) -> Any:
        logits = replica(part)
        return {"out": Output(logits), "pair": Pair(logits + 1, part), "list": [logits.argmax(1)], "nothing": None}

    with DataParallel(module, TWO, balance=[2, 1]) as trainer:
        result = trainer.predict(fn, x)
    wanted = module(x).detach()
    torch.testing.assert_close(result["out"].logits, wanted)
    assert isinstance(result["out"], Output)
    assert result["out"].hidden is None
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].b, x)
    torch.testing.assert_close(result["pair"].a, wanted + 1)
    assert isinstance(result["list"], list)
    assert torch.equal(result["list"][0], wanted.argmax(1))
    assert result["nothing"] is None


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda module, part: module(part).argmax(), r"output has shape \(\) for 4 items"),
        (lambda module, part: {"scores": module(part)[:1]}, r"output\['scores'\] has shape \(1, 3\) for 4 items"),
        (
            lambda module, part: (module(part), float(part.sum())),
            r"output\[1\] is .* in one micro-batch and .* in another",
        ),
        (lambda module, part: (module(part), threading.Lock()), r"output\[1\] is <unlocked .* in another"),
    ],
    ids=["an index", "one row", "number", "object"],
)
def test_outputs_that_are_not_per_item_are_refused_by_name(fn: Any, message: str) -> None:
    module, (x, _) = classifier(8)
    with DataParallel(module, TWO, balance="even") as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.predict(fn, x)


def test_predicting_runs_without_gradients_in_the_modules_own_mode() -> None:
    module, (x, _) = classifier(8)
    seen = []

    def fn(replica: nn.Module, part: torch.Tensor) -> Any:
        seen.append((torch.is_grad_enabled(), replica.training))
        return replica(part)

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.predict(fn, x)
        assert set(seen) == {(False, True)}
        module.eval()
        trainer.predict(fn, x)
        assert seen[-1] == (False, False)


def test_predicting_between_steps_touches_neither_gradients_nor_shares() -> None:
    module, batch = classifier(8)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(classify, batch)
        own = [parameter.grad for parameter in module.parameters()]
        shares, steps = trainer.shares, trainer.report()["steps"]
        trainer.predict(batch[0][:3])
        assert (trainer.shares, trainer.report()["steps"]) == (shares, steps)
        assert all(a.grad is b for a, b in zip(module.parameters(), own, strict=True))
        assert_same_gradients(module, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_predicting_under_no_grad_and_inference_mode_leaves_the_next_step_alone(mode: Any) -> None:
    module, batch = classifier(8)
    norm = nn.Sequential(nn.BatchNorm1d(6), module).double()
    _, wanted = plain(norm.eval(), classify, batch)
    with DataParallel(norm, TWO) as trainer:
        with mode():
            torch.testing.assert_close(trainer.predict(batch[0]), norm(batch[0]))
        norm.load_state_dict({name: value.clone() for name, value in norm.state_dict().items()}, assign=True)
        with mode():  # the replicas are made anew here
            torch.testing.assert_close(trainer.predict(batch[0]), norm(batch[0]))
        trainer.step(classify, batch)
    assert_same_gradients(norm, wanted)


def test_an_exception_in_predict_names_the_device_and_the_next_call_works() -> None:
    module, (x, _) = classifier(8)

    def fn(replica: nn.Module, part: torch.Tensor) -> Any:
        if float(part[-1, 0]) == float(x[-1, 0]):
            raise KeyError("last")
        return replica(part)

    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.raises(KeyError, match="last") as caught:
            trainer.predict(fn, x)
        note = getattr(caught.value, "__notes__", None) or [str(caught.value.__cause__)]  # before Python 3.11 a cause
        assert note == ["raised on host:1 at items 4 to 7 of the batch; gradients are untouched"]
        torch.testing.assert_close(trainer.predict(x), module(x).detach())
    assert gradients(module) == [None] * 4


def test_outputs_that_are_dataclass_and_mapping_are_whole_either_way() -> None:
    module, (x, _) = classifier(9)
    with DataParallel(module, TWO, balance=[2, 1]) as trainer:
        output = trainer.predict(lambda replica, part: ModelOutput(replica(part)), x)
    assert isinstance(output, ModelOutput)
    torch.testing.assert_close(output.logits, module(x).detach())
    torch.testing.assert_close(output["logits"], module(x).detach())


class TakesNames(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return x.square() if scale is None else x * scale


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("kind", "advice", "fn"),
    [
        ("dict", r"the whole dict as its only argument.*lambda model, b: model\(\*\*b\)", lambda model, b: model(**b)),
        ("tuple", r"the whole tuple as its only argument.*lambda model, b: model\(\*b\)", lambda model, b: model(*b)),
    ],
    ids=["dict", "tuple"],
)
def test_a_nest_for_a_module_that_takes_its_entries_fails_with_advice_that_works(
    devices: int, kind: str, advice: str, fn: Any
) -> None:
    x, scale = torch.rand(6, 2), torch.rand(6, 2)
    batch: Any = {"x": x, "scale": scale} if kind == "dict" else (x, scale)
    with DataParallel(TakesNames(), TWO[:devices]) as trainer:
        with pytest.raises(AttributeError) as raised:
            trainer.predict(batch)
        if sys.version_info >= (3, 11):
            notes = " ".join(raised.value.__notes__)
            assert re.search(advice, notes)
            assert "raised on host:" in notes
        assert torch.equal(trainer.predict(fn, batch), x * scale)
    with DataParallel(nn.Embedding(4, 2), TWO[:devices]) as trainer, pytest.raises(RuntimeError) as caught:
        trainer.predict(torch.rand(6))  # a single tensor
    assert "predict called" not in " ".join(getattr(caught.value, "__notes__", []))
