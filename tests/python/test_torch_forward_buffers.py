"""Forwards that write buffers, as spectral normalisation does: each device runs them as often in a step as one device would."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts

SPECTRAL = pytest.mark.parametrize(
    "spectral_norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["parametrized", "hooked"]
)
Spectral = Callable[[nn.Module], nn.Module]


def network(spectral_norm: Spectral) -> nn.Sequential:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older of the two
        return nn.Sequential(spectral_norm(nn.Linear(6, 10)), nn.Tanh(), nn.Linear(10, 3)).double()


def twin(module: nn.Module, spectral_norm: Spectral) -> nn.Module:
    """Another network that is as this one. The older one cannot be copied once it has run."""
    made = network(spectral_norm)
    made.load_state_dict(module.state_dict())
    for ours, theirs in zip(module.modules(), made.modules(), strict=True):
        theirs.training = ours.training
    return made


class Unsteady:
    """`classify`, in times that vary so much that devices take work over from each other.

    By up to `spread` times as long: at 4, changes of speed are seen everywhere, and whether much is taken over is chance.
    """

    def __init__(self, seconds: float = 5e-5, spread: float = 4.0) -> None:
        self.seconds = seconds  # of an item, at least
        self.spread = spread
        self.runs = 0

    def __call__(self, module: Any, part: Any) -> Any:
        self.wait(len(part[0]))
        return classify(module, part)

    def wait(self, items: int) -> None:
        self.runs += 1
        time.sleep(self.seconds * items * (1 + self.runs * 7 % 5 / 4 * self.spread))

    def corrected(self, step: Callable[[], object]) -> bool:
        """Whether one of many steps has more micro-batches than devices."""
        for _ in range(300):
            before = self.runs
            step()
            if self.runs - before > 2:
                return True
        return False


def assert_steps_of_one_device(
    trainer: DataParallel, module: nn.Module, spectral_norm: Spectral, loss_fn: Any, steps: int
) -> None:
    _, batch = classifier(64)
    for step in range(steps):
        module.zero_grad()
        alone = twin(module, spectral_norm)
        classify(alone, batch).backward()
        trainer.step(loss_fn, batch)
        assert_same_gradients(module, gradients(alone))
        for ours, theirs in zip(module.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=f"step {step}")


@SPECTRAL
def test_spectral_normalisation_goes_on_as_on_one_device(spectral_norm: Spectral) -> None:
    module, loss_fn = network(spectral_norm), Unsteady()
    with DataParallel(module, TWO) as trainer:
        assert_steps_of_one_device(trainer, module, spectral_norm, loss_fn, 30)
    assert loss_fn.runs <= 60, "one micro-batch of each device"


@SPECTRAL
@pytest.mark.parametrize("devices", [1, 2])
def test_a_forward_that_begins_to_write_later_is_noticed_before_anything_is_committed(
    spectral_norm: Spectral, devices: int
) -> None:
    # So slow that micro-batches of other sizes are tried.
    module, loss_fn = network(spectral_norm).eval(), Unsteady(1e-3, spread=0.2)
    ran = []

    def steps(trainer: DataParallel, count: int) -> None:
        for _ in range(count):
            before = loss_fn.runs
            assert_steps_of_one_device(trainer, module, spectral_norm, loss_fn, 1)
            ran.append(loss_fn.runs - before)

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        steps(trainer, 7)
        # Every other step tries sizes, if nothing is written. The search begins when it is known that nothing is drawn.
        if ran[-1] > devices:
            steps(trainer, 1)
        assert ran[-2] > devices
        module[0].train()
        steps(trainer, 1)
        assert ran[-1] == ran[-3] + devices, "it was run again"
        steps(trainer, 5)
        assert ran[-5:] == [devices] * 5
        assert trainer.report()["steps"] == len(ran)


def test_other_buffers_leave_corrections_on() -> None:
    module, batch = classifier(64)
    module.register_buffer("scale", torch.ones(1))
    loss_fn = Unsteady(2e-4, spread=0.4)
    with DataParallel(module, TWO, granularity=2) as trainer:  # with which no other sizes are tried
        assert loss_fn.corrected(lambda: trainer.step(loss_fn, batch))


def test_corrections_that_are_asked_for_stay() -> None:
    module, loss_fn = network(nn.utils.parametrizations.spectral_norm), Unsteady(2e-4, spread=0.4)
    with DataParallel(module, TWO, hold_back=True) as trainer:
        assert loss_fn.corrected(lambda: trainer.step(loss_fn, classifier(64)[1]))


def test_prediction_in_training_mode_goes_on_as_on_one_device() -> None:
    module = network(nn.utils.parametrizations.spectral_norm)
    x, times = classifier(64)[1][0], Unsteady()

    def predict(replica: Any, part: Any) -> Any:
        times.wait(len(part))
        return replica(part)

    with DataParallel(module, TWO) as trainer:
        for _ in range(30):
            alone = copy.deepcopy(module)
            with torch.no_grad():
                wanted = alone(x)
            torch.testing.assert_close(trainer.predict(predict, x), wanted, rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(module.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
