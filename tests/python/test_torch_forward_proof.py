"""The first forward of each kind, by `predict` and calls, is that of one device, and says what devices would change."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import Error
from paceline.torch import DataParallel, ProofWarning, proving
from proof_cases import Seen, gradients, made, net, rows, said, same
from torch_support import module_of


def keep(m: Any, x: torch.Tensor) -> Any:
    """Leaves rows of the batch behind, as `nn.DataParallel`'s users read them after the call."""
    out = m.inner(x)
    m.kept, m.with_graph = out.detach(), out
    m.calls += 1
    return out


def test_what_a_module_leaves_is_that_of_one_device_and_a_difference_is_said() -> None:
    module, batch = made(module_of(keep, inner=net(), calls=0)), rows()
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
    other, batch = copy.deepcopy(inner), rows().requires_grad_()
    results = []
    for module in (made(inner), other):
        batch.grad = None
        torch.manual_seed(1)
        out = module(batch)
        out.square().mean().backward()
        results.append([out, batch.grad, torch.rand(1)])
    assert all(map(torch.equal, *results))
    assert same(inner, other, exact=True)
    assert all(map(torch.equal, inner.buffers(), other.buffers()))


@pytest.mark.parametrize("training", [True, False])
def test_the_graph_of_a_proved_forward_lasts_through_calls_on_the_devices(training: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double().train(training)
    other, first, second = copy.deepcopy(inner), rows(), rows()
    module = made(inner, batch_norm="synchronised")
    ours = functional.cosine_similarity(module(first), module(second)).mean()  # the second one runs on the devices
    ours.backward()
    functional.cosine_similarity(other(first), other(second)).mean().backward()
    assert same(inner, other)


def test_a_parameter_that_is_written_before_the_backward_is_refused_as_by_pytorch() -> None:
    last = nn.Linear(8, 3)
    out = made(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), last).double())(rows())
    with torch.no_grad():
        last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mean().backward()


def mixes() -> Any:
    """Each item depends on all others."""
    return module_of(lambda m, x: m.inner(x) - m.inner(x).mean(0), inner=net())


def test_outputs_that_depend_on_other_items_are_named_and_are_first_those_of_one_device() -> None:
    module, batch = mixes(), rows()
    found: list[Any] = []
    for call in (made(module), made(module).predict):
        text = said(lambda call=call: found.extend(call(batch) for _ in range(2)))  # type: ignore[misc]
        assert "the outputs differ" in text
        assert "depends on the other items" in text
    assert [torch.equal(one, module(batch)) for one in found] == [True, False] * 2


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
    def forward(m: Any, x: torch.Tensor) -> Any:
        m.calls += 1
        return m.mixes(x + 0 * torch.rand(()))

    module = module_of(forward, mixes=mixes(), calls=0)
    trainer = made(module, prove="raise")
    batch = rows()
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(Error, match=r"predict: split over .* Nothing was kept"):
            trainer.predict(batch)
        assert module.calls == 0
        assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_that_the_forward_changes_is_changed_once() -> None:
    batch = rows().requires_grad_()
    before = batch.detach().clone()
    with torch.no_grad():
        made(module_of(lambda m, x: m.inner(x.mul_(2)), inner=net())).predict(batch)
    assert torch.equal(batch, 2 * before)


def test_transforms_of_functions_run_in_a_proved_forward() -> None:
    def slopes(m: Any, x: torch.Tensor) -> Any:
        return torch.func.grad(lambda one: (one * m.weight).square().sum())(x)

    module = module_of(slopes, norm=nn.BatchNorm1d(4), weight=nn.Parameter(torch.ones(4)))
    made(module.eval())(rows()).mean().backward()


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
    def observe(m: Any, x: torch.Tensor) -> Any:
        m.seen.append(len(x))
        return m.inner(x)

    module = module_of(observe, inner=net(), seen=[])
    trainer = made(module)
    text = said(lambda: trainer.predict(rows()))
    assert module.seen == [16]
    assert "attribute 'seen' has 1 entries on one device and 0 entries here" in text


def test_nothing_is_said_of_an_equal_forward_or_where_proofs_are_off() -> None:
    equal, samples = made(net()), list(rows())
    assert not said(lambda: equal.predict(samples, collate=torch.stack))
    assert "Proof: predict 1 of _forward, 16 items: equal to one device" in equal.explain()
    assert torch.allclose(*(equal.predict(samples, collate=torch.stack) for _ in range(2)))
    assert gradients(equal.module) == [None] * 4
    for trainer in (made(mixes(), prove=False), DataParallel(mixes(), ["host:0"])):
        assert not said(functools.partial(trainer.predict, rows()))


def test_a_mean_over_labels_is_no_mean_of_a_prediction() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64)
    counted = x[:, 0] > -1  # most of them

    def fn(module: Any, part: Any) -> Any:
        return {"loss": (module(part[0]).square().mean(1) * part[1]).sum() / part[1].sum()}

    with made(net()) as trainer, pytest.warns(ProofWarning, match="sums and counts with one row per item"):
        trainer.predict(fn, (x, counted))
