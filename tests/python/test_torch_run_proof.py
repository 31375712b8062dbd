"""The first run of each kind of `batch` and the first forward of each kind are those of one device, and say what devices would change."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel, ProofWarning, proving
from proof_cases import Seen, gradients, made, net, rows, said, same
from torch_support import module_of


def ran(trainer: Any, batch: Any, *runs: Any, **options: Any) -> str:
    """What the proofs of these runs warn of."""
    with trainer.batch(batch) as global_batch:
        return said(lambda: [global_batch.run(run, **options) for run in runs])


def two_losses(module: Any, part: Any) -> None:
    out = module(part.data)
    part.backward(out.square().mean(), retain_graph=True)
    part.weigh(out.abs().mean()).backward()


def test_the_first_run_is_that_of_one_device_bit_for_bit() -> None:
    module, batch = net(), rows()
    other, trainer, seen = copy.deepcopy(module), made(module), Seen()

    def fn(module: Any, part: Any) -> None:
        seen.items.append(len(part))
        two_losses(module, part)

    assert not ran(trainer, batch, fn)
    out = other(batch)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()
    assert same(module, other, exact=True)
    assert seen.items[0] == 16
    assert sorted(seen.items[1:]) == [6, 10]
    assert "Proof: run 1 of" in trainer.explain()
    assert trainer.report()["proved"] == trainer.report()["steps"] == 0  # it was no step


def test_only_wanted_parameters_get_gradients() -> None:
    module: Any = net()
    other, trainer, batch = copy.deepcopy(module), made(module), rows()
    kept = torch.ones_like(module[0].weight)
    module[0].weight.grad = kept.clone()
    for one in (two_losses, lambda module, part: part.backward(module(part.data).square().mean())):
        assert not ran(trainer, batch, one, parameters=module[2])
    assert torch.equal(gradients(module)[0], kept)
    assert module[0].bias.grad is None
    out = other(batch)
    (2 * out.square().mean() + out.abs().mean()).backward()
    assert torch.allclose(module[2].weight.grad, other[2].weight.grad)


def by_its_size(module: Any, part: Any) -> None:
    part.backward(module(part.data).square().sum() / 16)


def test_a_loss_that_a_split_changes_is_named() -> None:
    trainer = made(net())
    text = ran(trainer, rows(), by_its_size)
    assert "run: split over the devices this batch of 16 items gives another result" in text
    assert "the loss is" in text
    assert "the gradient of" in text
    assert not ran(trainer, rows(), by_its_size)  # said once


def test_a_difference_raises_where_that_is_asked_and_commits_nothing() -> None:
    module = net()
    trainer = made(module, prove="raise")
    with pytest.raises(Error, match=r"run: split over .* Nothing was committed"):
        ran(trainer, rows(), by_its_size)
    assert gradients(module) == [None] * 4


def test_each_function_and_choice_of_parameters_is_a_kind() -> None:
    module = net()
    trainer, batch = made(module), rows()
    ran(trainer, batch, two_losses, two_losses)
    ran(trainer, batch, two_losses, parameters=module[0])
    assert trainer.explain().count("Proof: run") == 2


@pytest.mark.parametrize("wrong", ["own backward", "no backward"])
def test_functions_without_a_term_are_refused_as_by_the_devices(wrong: str) -> None:
    def fn(module: Any, part: Any) -> None:
        if wrong == "own backward":
            module(part.data).mean().backward()

    module = net()
    kind: Any = InvalidArgument if wrong == "own backward" else RuntimeError
    with pytest.raises(kind, match=r"run: (fn called backward|no gradient)"):
        ran(made(module), rows(), fn)
    assert gradients(module) == [None] * 4


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


@pytest.mark.parametrize("hole", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_compared_by_their_finite_entries(hole: float) -> None:
    def forward(self: Any, x: Any) -> Any:
        return torch.cat([self.part(x) * 0 + self.scale * len(x), torch.full((len(x), 1), hole, dtype=x.dtype)], 1)

    module = module_of(forward, part=nn.Linear(4, 3), scale=torch.zeros((), dtype=torch.float64))
    assert not said(lambda: made(module).predict(rows()))
    module.scale += 1.0
    assert "the outputs differ" in said(lambda: made(module).predict(rows()))


@pytest.mark.parametrize("graph", [False, True])
def test_the_difference_that_was_measured_is_said_and_not_the_tolerance(graph: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        out = 0 * self.part(x) + 1 + 1e-6 * len(x)  # 1 + 2e-5 with all items, 1 + 8e-6 with the fewer ones
        return {"out": out, "mask": [torch.full_like(out, -torch.inf)]}

    trainer = made(module_of(forward, part=nn.Linear(4, 3)))
    trainer(rows(20)) if graph else trainer.predict(rows(20))
    assert "20 items: equal to one device up to 1e-05 (outputs; within " in trainer.explain()


def test_numbers_in_outputs_are_measured_and_state_is_said_to_be_within_the_tolerance() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.seen = 1 + 1e-6 * len(x)
        return {"out": self.part(x), "scale": 1 + 1e-5 * (len(x) == 20), "most": float("inf"), "none": float("nan")}

    module = module_of(forward, part=nn.Linear(4, 3), seen=1.0)
    with torch.no_grad():
        module.part.weight.zero_()
    trainer = made(module)
    trainer.predict(rows(20))
    assert re.search(r"up to 1e-05 \(outputs; within \de-0\d: 0 buffers, \d+ attributes\)", trainer.explain())


def test_a_mean_over_labels_is_no_mean_of_a_prediction() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64)
    counted = x[:, 0] > -1  # most of them

    def fn(module: Any, part: Any) -> Any:
        return {"loss": (module(part[0]).square().mean(1) * part[1]).sum() / part[1].sum()}

    with made(net()) as trainer, pytest.warns(ProofWarning, match="sums and counts with one row per item"):
        trainer.predict(fn, (x, counted))
