"""`Pool.serve`: copies of a module follow what happens to the user's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pool_support import pool_of


class Shift(nn.Module):
    """Adds a buffer. Its forward replaces the buffer."""

    shift: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> Any:
        self.shift = self.shift + 0
        return x + self.shift[0]


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_buffers_that_a_forward_has_replaced_follow_the_users(size: int) -> None:
    model = Shift(size).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(model)
        for k in range(4):
            assert batcher(torch.tensor(1.0)).result() == 1 + k
            model.shift.add_(1)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_buffers_that_are_replaced_twice_between_two_requests_are_followed() -> None:
    norm = nn.BatchNorm1d(2).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(norm)
        for k in range(20):
            for value in (-1.0, float(k)):  # the second one may get the address of the one before the first
                norm.running_mean = torch.full((2,), value)
            assert torch.allclose(batcher(torch.zeros(2)).result(), torch.full((2,), -float(k)), atol=1e-3)


def assign_data(model: nn.Linear) -> None:
    model.weight.data = torch.full((2, 2), 3.0)


def assign_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.full((2, 2), 3.0))


def assign_state(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, assign=True)


def halve(model: nn.Linear) -> None:
    model.half()


def halve_in_inference_mode(model: nn.Linear) -> None:
    with torch.inference_mode():
        model.half()


@pytest.mark.parametrize("change", [assign_data, assign_parameter, assign_state, halve, halve_in_inference_mode])
@pytest.mark.parametrize("nested", [False, True])
def test_parameters_that_are_replaced_are_followed(change: Callable[[nn.Linear], None], nested: bool) -> None:
    layer = nn.Linear(2, 2).eval()
    model: nn.Module = nn.Sequential(nn.Identity(), layer).eval() if nested else layer
    with pool_of(1) as pool:
        batcher = pool.serve(model)
        x = torch.ones(2)
        assert torch.allclose(batcher(x).result(), model(x), atol=1e-6)
        for _ in range(2):
            change(layer)
            x = x.to(layer.weight.dtype)
            found = batcher(x).result()
            assert found.dtype == layer.weight.dtype
            assert torch.allclose(found, model(x), atol=1e-3)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.allclose(batcher(x).result(), model(x), atol=1e-3)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_flattened_weights_of_an_lstm_follow_the_users() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(nn.Sequential(lstm, First()).eval())
        x = torch.randn(5, 3)
        assert torch.allclose(batcher(x).result(), lstm(x)[0], atol=1e-6)
        lstm.load_state_dict({name: torch.randn_like(one) for name, one in lstm.state_dict().items()}, assign=True)
        assert torch.allclose(batcher(x).result(), lstm(x)[0], atol=1e-6)


class First(nn.Module):
    def forward(self, both: Any) -> Any:
        return both[0]
