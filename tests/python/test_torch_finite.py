"""A loss that is not finite in one slice, and finite for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, gradients, module_of, plain


def labelled(module: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the items that have a label."""
    return functional.cross_entropy(module(batch[0]), batch[1], ignore_index=-100)


def sparse_labels() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    module, (x, y) = classifier(8)
    y[4:] = -100
    return module, (x, y)


@pytest.mark.parametrize("call", ["step", "loss"])
def test_a_slice_without_labels_is_an_error_that_names_the_weight(call: str) -> None:
    module, batch = sparse_labels()
    loss, wanted = plain(module, labelled, batch)
    module.zero_grad()
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.raises(InvalidArgument, match=r"host:1 .* begins with item 4 is not finite.*weight="):
            getattr(trainer, call)(labelled, batch)
        assert gradients(module) == [None] * 4
        got = trainer.step(labelled, batch, weight=batch[1] != -100)
    assert got.item() == pytest.approx(float(loss))
    assert_same_gradients(module, wanted)


def test_it_is_seen_under_a_scaler_by_the_loss_alone() -> None:
    module, batch = sparse_labels()
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # gradients may overflow under a scaler
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.raises(InvalidArgument, match="is not finite"):
            trainer.step(labelled, batch, scaler=scaler)
        loss = trainer.step(lambda m, b: labelled(m, b) * 1e280, batch, weight=batch[1] != -100, scaler=scaler)
    assert loss.isfinite()
    assert any(not one.isfinite().all() for one in gradients(module) if one is not None)


def test_a_loss_that_is_not_finite_on_one_device_either_or_overflows_under_dropout_is_the_result() -> None:
    module, (x, y) = classifier(8)

    def dropped(replica: nn.Module, part: Any) -> torch.Tensor:
        loss = functional.dropout(replica(part[0]), 0.5).square().mean()
        return loss * torch.inf if len(part[1]) < 8 and part[0][0, 0] == x[4, 0] else loss

    with DataParallel(module, TWO, balance="even") as trainer:
        assert trainer.step(dropped, (x, y)).isinf()
        x[5] = torch.nan
        assert trainer.step(labelled, (x, y)).isnan()
        assert trainer.step(lambda m, b: labelled(m, b) * torch.inf, (x, y)).isnan()


def test_looking_at_the_whole_batch_leaves_no_trace() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        return functional.dropout(m.norm(m.linear(x)), 0.5)

    def draws() -> Any:
        return module_of(forward, linear=nn.Linear(6, 3), norm=nn.BatchNorm1d(3), calls=0)

    module, (x, y) = draws(), sparse_labels()[1]
    x[0] = torch.nan
    with DataParallel(module, TWO, balance="even", micro_batch=4) as trainer:
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
        torch.manual_seed(1)
        trainer.step(labelled, (x, y.clamp(min=0)))
        state, calls = torch.get_rng_state(), module.calls
    other = draws()
    other.load_state_dict(module.state_dict())
    assert calls == 2
    with DataParallel(other, TWO, balance="even", micro_batch=4) as trainer:
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
        torch.manual_seed(1)
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
    assert torch.equal(state, torch.get_rng_state())  # as a step that did not have to look
