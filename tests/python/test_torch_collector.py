"""Garbage collection while devices compute on threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import hosts, output_of


class Cycle:
    """Garbage that only the collector finds, with a tensor that has a graph."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(1, requires_grad=True).exp()


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "asks for the random state"])
def test_garbage_of_one_device_does_not_stop_another(asks: bool) -> None:
    program = f"""
        import gc
        import torch
        from paceline.torch import DataParallel

        class Cycle:
            def __init__(self):
                self.itself = self
                self.tensor = torch.ones(1, requires_grad=True).exp()

        def loss_fn(module, x):
            for _ in range(20):
                Cycle()
                if {asks}:
                    torch.get_rng_state()
            return module(x).mean()

        gc.set_threshold(3, 3, 3)  # many collections
        with DataParallel(torch.nn.Linear(2, 1), ["host:0", "host:1", "host:2"], balance="even", micro_batch=1) as trainer:
            for _ in range(100):
                trainer.step(loss_fn, torch.rand(24, 2))
        print("done")
    """
    assert output_of(program) == "done"


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_the_collector_is_as_before_after_a_step(enabled: bool, fails: bool) -> None:
    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        if fails:
            raise RuntimeError("planned")
        return module(x).mean()

    assert gc.isenabled()
    with DataParallel(nn.Linear(2, 1), hosts(2)) as trainer:
        try:
            (gc.enable if enabled else gc.disable)()
            if fails:
                with pytest.raises(RuntimeError, match="planned"):
                    trainer.step(loss_fn, torch.rand(8, 2))
            else:
                trainer.step(loss_fn, torch.rand(8, 2))
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_garbage_of_a_long_step_is_collected_on_the_way(enabled: bool) -> None:
    alive: list[weakref.ref[Cycle]] = []
    most = 0

    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        nonlocal most
        for _ in range(100):
            alive.append(weakref.ref(Cycle()))
        most = max(most, sum(one() is not None for one in alive))
        return module(x).mean()

    with DataParallel(nn.Linear(2, 1), hosts(2), balance="even", micro_batch=1) as trainer:
        try:
            (gc.enable if enabled else gc.disable)()
            trainer.step(loss_fn, torch.rand(100, 2))
        finally:
            gc.enable()
    assert len(alive) == 10_000
    assert (most < 5_000) == enabled  # who switched it off has what it kept
