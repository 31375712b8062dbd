"""The objective: what `reduction`, the shape of the loss and `weight` mean together."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, plain

F = nn.functional
Reduction = Literal["mean", "sum"]


def losses_of(module: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(module(batch["x"]), batch["y"], reduction="none")


def weighted_batch(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module, (x, y) = classifier(13)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 5, (13,), generator=generator)
    weights = {
        "none": torch.ones(13, dtype=torch.float64),
        "int64": counts,
        "int32": counts.int(),
        "float64": torch.rand(13, generator=generator, dtype=torch.float64),
        "float32": torch.rand(13, generator=generator),
        "bool": counts > 2,
    }
    return module, {"x": x, "y": y, "w": weights[kind]}


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("kind", ["none", "int64", "int32", "float64", "float32", "bool"])
@pytest.mark.parametrize("shape", ["scalar", "per item"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_formula_divides_once_by_the_total_weight(
    reduction: Reduction, shape: str, kind: str, micro_batch: int | None
) -> None:
    module, batch = weighted_batch(kind)

    def loss_fn(replica: nn.Module, part: dict[str, torch.Tensor]) -> Any:
        losses, w = losses_of(replica, part), part["w"].double()
        if reduction == "sum":  # weights, if any, are the user's to apply: it is not multiplied again
            return losses * w if shape == "per item" else (losses * w).sum()
        return losses if shape == "per item" else (losses * w).sum() / w.sum()

    def objective(replica: nn.Module, whole: dict[str, torch.Tensor]) -> Any:
        return (losses_of(replica, whole) * whole["w"].double()).sum() / whole["w"].double().sum()

    loss, wanted = plain(module, objective, batch)
    weight = None if kind == "none" else batch["w"]
    with DataParallel(module, TWO, balance=[3, 1], reduction=reduction, micro_batch=micro_batch) as trainer:
        ours = trainer.step(loss_fn, batch, weight=weight)
    assert_same_gradients(module, wanted)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    assert ours.dim() == 0
    assert not ours.requires_grad


def test_weight_may_be_a_callable_that_sees_the_whole_batch_once() -> None:
    module, batch = weighted_batch("int64")
    seen: list[int] = []

    def weight(whole: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(len(whole["x"]))
        return whole["w"]

    with DataParallel(module, TWO, micro_batch=2) as trainer:
        trainer.step(losses_of, batch, weight=weight)
    assert seen == [13]
    _, wanted = plain(module, lambda m, b: (losses_of(m, b) * b["w"]).sum() / b["w"].sum(), batch)
    assert_same_gradients(module, wanted)


def test_slices_without_weight_are_not_run() -> None:
    module, (x, y) = classifier(8)
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1])
    ran: list[int] = []

    def masked_mean(replica: nn.Module, part: Any) -> Any:
        ran.extend(part[3].tolist())
        losses = F.cross_entropy(replica(part[0]), part[1], reduction="none")
        return (losses * part[2]).sum() / part[2].sum()  # 0/0 where nothing is unmasked

    batch = (x, y, mask, torch.arange(8))
    _, wanted = plain(module, masked_mean, batch)
    ran.clear()
    with DataParallel(module, TWO, balance="even", micro_batch=2) as trainer:
        loss = trainer.step(masked_mean, batch, weight=mask)
        assert sorted(ran) == [0, 1, 6, 7]
        assert sum(trainer.shares.values()) == 8
    assert loss.isfinite()
    assert_same_gradients(module, wanted)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(8), "sum to 0"),
        (torch.tensor([-3.0] + [0.1] * 7), "sum to -2"),
        (torch.tensor([float("nan")] + [1.0] * 7), "nan"),
        (torch.tensor([float("inf")] + [1.0] * 7), "inf"),
        (torch.ones(7), r"\(7,\) for a batch of 8 items"),
        (torch.ones(8, 1), r"\(8, 1\)"),
        (torch.tensor(1.0), "one weight per item"),
        (torch.ones(8, dtype=torch.complex64), "complex"),
        (lambda batch: [1.0] * 8, "list for a batch of 8"),
        ([1.0] * 8, "list; a 1-D tensor with one weight per item, or a callable"),
    ],
    ids=["zero", "negative", "nan", "inf", "short", "2-D", "0-D", "complex", "makes a list", "list"],
)
def test_weights_that_cannot_be_used_are_refused_before_anything_runs(weight: Any, message: str) -> None:
    module, batch = classifier(8)
    ran: list[int] = []
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(lambda m, b: ran.append(1), batch, weight=weight)  # type: ignore[arg-type,return-value]
    assert ran == []
    assert gradients(module) == [None] * 4


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda module, batch: module(batch[0]), r"a tensor of shape \(4, 3\) for a slice of 4 items"),
        (lambda module, batch: module(batch[0])[:2, 0], r"shape \(2,\) for a slice of 4"),
        (lambda module, batch: classify(module, batch).item(), r"returned float .*Return the tensor itself.*item\(\)"),
        (lambda module, batch: None, "returned NoneType"),
        (
            lambda module, batch: (classify(module, batch), module(batch[0]), None),
            r"returned tuple .*return a pair \(loss, extras\): trainer\.extras",
        ),
        (lambda module, batch: {"loss": classify(module, batch)}, r"returned dict .*return a pair \(loss, extras\)"),
        (
            lambda module, batch: SimpleNamespace(loss=classify(module, batch)),
            r"returned SimpleNamespace .*Return its \.loss",
        ),
    ],
    ids=["matrix", "wrong length", "float", "None", "tuple", "dict", "object"],
)
def test_losses_of_another_shape_are_refused(loss_fn: Any, message: str) -> None:
    module, batch = classifier(8)
    with DataParallel(module, TWO, balance="even") as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(loss_fn, batch)
    assert gradients(module) == [None] * 4


@pytest.mark.parametrize("shape", ["[1]", "[B, 1]"])
def test_a_loss_may_have_dimensions_of_one(shape: str) -> None:
    module, batch = classifier(8)

    def loss_fn(replica: nn.Module, part: Any) -> torch.Tensor:
        losses = nn.functional.cross_entropy(replica(part[0]), part[1], reduction="none")
        return losses.mean().view(1) if shape == "[1]" else losses.unsqueeze(1)

    loss, wanted = plain(module, classify, batch)
    for devices in (["host:0"], TWO):
        module.zero_grad()
        with DataParallel(module, devices, micro_batch=1 if shape == "[1]" else None) as trainer:
            assert trainer.step(loss_fn, batch).item() == pytest.approx(float(loss))
        assert_same_gradients(module, wanted)


def test_a_loss_that_no_parameter_reaches_is_an_error_as_in_plain_pytorch() -> None:
    module, batch = classifier(8)
    with DataParallel(module, TWO) as trainer, pytest.raises(RuntimeError, match="does not require grad"):
        trainer.step(lambda m, b: classify(m, b).detach(), batch)


def test_a_slice_that_no_parameter_reaches_adds_nothing() -> None:
    module = nn.Linear(4, 1).double()
    batch = torch.arange(8 * 4, dtype=torch.double).view(8, 4)

    def loss_fn(m: Any, part: Any) -> Any:
        chosen = part[part[:, 0] < 12]  # the first three items
        return m(chosen).square().sum() if len(chosen) else torch.zeros((), dtype=torch.double)

    _, wanted = plain(module, lambda m, b: loss_fn(m, b) / 8, batch)
    with DataParallel(module, TWO, balance="even", reduction="sum") as trainer:
        loss = trainer.step(loss_fn, batch)
    assert_same_gradients(module, wanted)
    assert loss.item() == pytest.approx(loss_fn(module, batch).item() / 8)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_half_precision_loss_is_not_divided_in_half_precision(devices: int) -> None:
    """A sum of 4096 losses of 20 is beyond the largest float16."""
    module = nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        module.weight.fill_(20)
    with DataParallel(module, TWO[:devices], balance="even", reduction="sum") as trainer:
        loss = trainer.step(lambda m, b: m(b)[:, 0], torch.ones(4096, 1, dtype=torch.half))
    assert loss.item() == pytest.approx(20)
    assert loss.dtype == torch.float32
    assert module.weight.grad is not None
    assert module.weight.grad.item() == pytest.approx(1, rel=1e-2)


def test_reduction_is_one_of_two_words() -> None:
    with pytest.raises(InvalidArgument, match="'mean' or 'sum'"):
        DataParallel(nn.Linear(1, 1), TWO, reduction="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["step", "run"])
def test_backward_of_the_loss_says_that_it_has_been_called(call: str) -> None:
    module, batch = classifier(8)

    def run(replica: Any, micro_batch: Any) -> None:
        micro_batch.backward(classify(replica, micro_batch.data))

    with DataParallel(module, TWO) as trainer:
        if call == "step":
            loss = trainer.step(classify, batch)
        else:
            with trainer.batch(batch) as global_batch:
                loss = global_batch.run(run)
    wanted = gradients(module)
    with pytest.raises(RuntimeError, match=r"already called it for this loss.*Remove this call"):
        loss.backward()
    with pytest.raises(RuntimeError, match="already called"):
        loss.backward(retain_graph=True)
    assert_same_gradients(module, wanted)


def test_the_loss_is_an_ordinary_tensor_wherever_it_goes() -> None:
    module, batch = classifier(8)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.step(classify, batch)
    value = loss.item()
    assert type(loss) is torch.Tensor
    saved = io.BytesIO()
    torch.save({"loss": loss}, saved)
    saved.seek(0)
    others = [
        torch.load(saved, weights_only=True)["loss"],
        pickle.loads(pickle.dumps(loss)),
        copy.copy(loss),
        copy.deepcopy(loss),
        loss.clone(),
        loss + 0,
    ]
    for other in others:
        assert type(other) is torch.Tensor
        assert other.item() == value
    weight = torch.ones((), dtype=loss.dtype, requires_grad=True)
    (loss * weight).backward()  # the caller's own graph goes on from it
    assert weight.grad is not None
    assert weight.grad.item() == value


# What `loss_fn` hands out of a step: slices finish in any order, so it goes to places of its own.


def test_rows_of_their_own_are_right_whatever_device_is_first() -> None:
    module, (x, y) = classifier(30)
    finished: list[int] = []
    last_is_done = threading.Event()
    appended: list[torch.Tensor] = []

    # As in python/guide/losses.md, but for what makes the first slice the last one to finish.
    correct = torch.empty(len(x), dtype=torch.bool)

    def loss_fn(module: Any, b: Any) -> Any:
        x, y, row = b
        logits = module(x)
        if row[0] == 0:
            assert last_is_done.wait(60)
        correct[row] = logits.argmax(1) == y
        appended.append(logits.argmax(1))
        finished.append(int(row[0]))
        if row[0] > 0:
            last_is_done.set()
        return F.cross_entropy(logits, y)

    wanted = module(x).argmax(1)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(loss_fn, (x, y, torch.arange(len(x))))
    assert finished == [15, 0]
    assert torch.equal(correct, wanted == y)
    assert not torch.equal(torch.cat(appended), wanted), "a list that is appended to comes in the order of finishing"
