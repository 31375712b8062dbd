"""The first forward of each kind, by `predict` and calls, is that of one device, and says what devices would change."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import Error
from paceline.torch import DataParallel, ProofWarning, proving
from proof_cases import HOSTS, Seen, gradients, made, net, rows, same


def module_of(inner: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(inner, HOSTS, balance=[3, 5], prove="warn", **options)


def said(call: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(one.message) for one in caught if one.category is ProofWarning)


class Keeps(nn.Module):
    """Leaves rows of its batch behind, as `nn.DataParallel`'s users read them after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.kept, self.with_graph = out.detach(), out
        self.calls += 1
        return out


def test_what_a_module_leaves_is_that_of_one_device_and_a_difference_is_said() -> None:
    module, batch = module_of(Keeps()), rows()
    text = said(lambda: module(batch))
    inner: Any = module.module
    assert len(inner.kept) == 16
    assert len(inner.with_graph) == 16
    assert inner.calls == 1
    assert "attribute 'kept' has shape (16, 3) on one device and shape (10, 3) here" in text
    assert "Let the forward return it" in text
    assert not said(lambda: module(batch))


def test_a_proved_forward_is_plain_pytorch() -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    other, batch = copy.deepcopy(inner), rows()
    module = module_of(inner)
    torch.manual_seed(1)
    out = module(batch)
    out.square().mean().backward()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    wanted = other(batch)
    wanted.square().mean().backward()
    assert torch.equal(out, wanted)
    assert same(inner, other, exact=True)
    assert torch.equal(drawn, torch.rand(1))
    assert all(map(torch.equal, inner.buffers(), other.buffers()))


@pytest.mark.parametrize("training", [True, False])
def test_the_graph_of_a_proved_forward_lasts_through_calls_on_the_devices(training: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double().train(training)
    other, first, second = copy.deepcopy(inner), rows(), rows()
    module = module_of(inner, batch_norm="synchronised")
    ours = functional.cosine_similarity(module(first), module(second)).mean()  # the second one runs on the devices
    ours.backward()
    functional.cosine_similarity(other(first), other(second)).mean().backward()
    assert same(inner, other)


def test_a_parameter_that_is_written_before_the_backward_is_refused_as_by_pytorch() -> None:
    last = nn.Linear(8, 3)
    out = module_of(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), last).double())(rows())
    with torch.no_grad():
        last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mean().backward()


def test_gradients_of_inputs_go_through_a_proved_forward() -> None:
    inner, batch = net(), rows().requires_grad_()
    found = [torch.autograd.grad(one(batch).square().mean(), batch)[0] for one in (module_of(inner), inner)]
    assert torch.equal(*found)


class Mixes(nn.Module):
    """Each item depends on all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out - out.mean(0)


def test_outputs_that_depend_on_other_items_are_named() -> None:
    batch = rows()
    for call in (module_of(Mixes()).__call__, made(Mixes()).predict):
        text = said(lambda call=call: call(batch))
        assert "the outputs differ" in text
        assert "depends on the other items" in text


def test_predict_gives_the_outputs_of_one_device_first() -> None:
    module, batch = Mixes(), rows()
    trainer = made(module)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", ProofWarning)
        assert torch.equal(trainer.predict(batch), module(batch))
        assert not torch.allclose(trainer.predict(batch), module(batch))


def test_an_equal_forward_is_listed_and_says_nothing() -> None:
    trainer = made(net())
    assert not said(lambda: trainer.predict(rows()))
    assert "Proof: predict 1 of _forward, 16 items: equal to one device" in trainer.explain()


def test_predict_may_be_called_in_inference_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double().eval()
    trainer, batch = made(module), rows()
    with torch.inference_mode():
        found = [trainer.predict(batch) for _ in range(2)]
    assert torch.allclose(found[0], found[1])
    trainer.step(
        lambda module, rows: module(rows).square().mean(), batch
    )  # with tensors that have no inference in them


def test_a_difference_raises_where_that_is_asked_and_leaves_all_as_before() -> None:
    class Counts(Mixes):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x + 0 * torch.rand(()))

    module = Counts()
    trainer = made(module, prove="raise")
    batch = rows()
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(Error, match=r"predict: split over .* Nothing was kept"):
            trainer.predict(batch)
        assert module.calls == 0
        assert torch.equal(torch.get_rng_state(), state)


def test_a_list_of_samples_is_predicted_and_proved() -> None:
    trainer = made(net())
    samples = list(rows(8))
    ours = trainer.predict(samples, collate=torch.stack)
    assert torch.allclose(ours, trainer.predict(samples, collate=torch.stack))


def test_a_batch_that_the_forward_changes_is_changed_once() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x.mul_(2))

    batch = rows().requires_grad_()
    before = batch.detach().clone()
    with torch.no_grad():
        made(Doubles()).predict(batch)
    assert torch.equal(batch, 2 * before)


def test_transforms_of_functions_run_in_a_proved_forward() -> None:
    class Transforms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slopes: torch.Tensor = torch.func.grad(lambda one: (one * self.weight).square().sum())(x)
            return slopes

    module_of(Transforms().eval())(rows()).mean().backward()


def test_what_is_thrown_away_is_marked() -> None:
    seen = Seen()

    def call(module: nn.Module, part: torch.Tensor) -> Any:
        seen.items.append((len(part), proving()))
        return module(part)

    trainer = made(net())
    trainer.predict(call, rows())
    assert seen.items[0] == (16, False)
    assert sum(size for size, thrown in seen.items if thrown) == 16


def test_a_forward_that_draws_is_replayed_by_item() -> None:
    module = nn.Sequential(net(), nn.Dropout(0.5))
    trainer, batch = made(module), rows()
    torch.manual_seed(3)
    ours = trainer.predict(batch)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(ours, module(batch))
    assert "equal to one device" in trainer.explain()


def test_lists_that_grow_in_predict_are_named() -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = net(), list[Any]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(x))
            out: torch.Tensor = self.inner(x)
            return out

    module = Observer()
    trainer = made(module)
    text = said(lambda: trainer.predict(rows()))
    assert module.seen == [16]
    assert "attribute 'seen' has 1 entries on one device and 0 entries here" in text


def test_no_proofs_where_they_are_off() -> None:
    for trainer in (made(Mixes(), prove=False), DataParallel(Mixes(), ["host:0"])):
        assert not said(lambda trainer=trainer: trainer.predict(rows()))


def test_gradients_are_untouched_by_predict() -> None:
    module = net()
    made(module).predict(rows())
    assert gradients(module) == [None] * 4


def test_a_mean_over_labels_is_no_mean_of_a_prediction() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64)
    counted = x[:, 0] > -1  # most of them

    def fn(module: Any, part: Any) -> Any:
        return {"loss": (module(part[0]).square().mean(1) * part[1]).sum() / part[1].sum()}

    with made(net()) as trainer, pytest.warns(ProofWarning, match="sums and counts with one row per item"):
        trainer.predict(fn, (x, counted))
