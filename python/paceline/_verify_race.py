"""The race of `paceline verify`: automatic shares against even shares and against each device alone."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from paceline import Device
from paceline._verify_checks import home_of
from paceline.torch import DataParallel

Batch = tuple[torch.Tensor, torch.Tensor]

_STEPS_OF_A_BLOCK = 4
_LEAST_BLOCKS = 3  # per racer, even if time is short
_WARM_UP_STEPS = 12  # enough for the balancer to learn the speeds
_STEP_SECONDS = 0.05  # the wanted time of a step: long compared with the time that Python needs to start it
_MOST_ITEMS = 1 << 16
_MEMORY_PART = 0.02  # fraction of a GPU's memory for one batch of images


class Racer:
    """A trainer with its optimizer, its batch, and the times of its blocks."""

    def __init__(self, devices: Sequence[Device], balance: Literal["auto", "even"], items: int, seed: int) -> None:
        self._home = home_of(devices)
        self.items = items
        self._batch = _batch(items, self._home, seed)
        self.trainer = DataParallel(_network(seed).to(self._home), list(devices), balance=balance)
        self._optimizer = self.trainer.optimizer(torch.optim.SGD, lr=1e-3)
        self.rates: list[float] = []

    def steps(self, count: int) -> float:
        """Run `count` steps and return the seconds until every device has finished the last one."""
        begin = time.perf_counter()
        for _ in range(count):
            loss = self.trainer.step(_loss, self._batch)
            self._optimizer.step()
            self._optimizer.zero_grad()
        # Wait for the last step only. A wait in every step would keep Python from running ahead of GPUs.
        float(loss)
        if self._home.type == "cuda":
            torch.cuda.synchronize(self._home)
        return time.perf_counter() - begin

    def block(self) -> None:
        self.rates.append(self.items * _STEPS_OF_A_BLOCK / self.steps(_STEPS_OF_A_BLOCK))


def race(devices: Sequence[Device], seconds: float, seed: int) -> dict[str, Any]:
    """Run interleaved blocks of all racers until the time is up. Returns medians of their rates in items per second."""
    if len(devices) == 1:
        return {"status": "skipped", "why": "one device has nobody to share with"}
    deadline = time.monotonic() + seconds
    items = _items(devices, seed)
    share = -(-items // len(devices))
    teams: dict[str, tuple[Sequence[Device], Literal["auto", "even"], int]]
    teams = {"auto": (devices, "auto", items), "even": (devices, "even", items)}
    teams |= {device.name: ([device], "even", share) for device in devices}
    with contextlib.ExitStack() as stack:
        racers: dict[str, Racer] = {}
        for name, team in teams.items():
            racers[name] = Racer(*team, seed)
            stack.enter_context(racers[name].trainer)
        for racer in racers.values():
            racer.steps(_WARM_UP_STEPS)
        order = list(racers.values())
        while len(order[0].rates) < _LEAST_BLOCKS or time.monotonic() < deadline:
            for racer in order:
                racer.block()
            order.reverse()  # so that slow changes of the machine affect all racers alike
        explanation = racers["auto"].trainer.explain()
        shares = racers["auto"].trainer.shares
    return _summary(racers, devices, items) | {"shares": shares, "explain": explanation}


def _summary(racers: dict[str, Racer], devices: Sequence[Device], items: int) -> dict[str, Any]:
    medians = {name: statistics.median(racer.rates) for name, racer in racers.items()}
    alone = {device.name: medians[device.name] for device in devices}
    ratios = [auto / even for auto, even in zip(racers["auto"].rates, racers["even"].rates, strict=True)]
    return {
        "status": "measured",  # a race has no bound to pass
        "auto_over_alone": round(medians["auto"] / sum(alone.values()), 4),
        "even_over_alone": round(medians["even"] / sum(alone.values()), 4),
        "auto_over_even": round(statistics.median(ratios), 4),
        "auto_over_even_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "items_per_second": {name: round(rate, 1) for name, rate in medians.items()},
        "blocks": len(ratios),
        "batch": items,
        "step_milliseconds": round(1e3 * items / medians["auto"], 2),
        "shared_memory": len({device.memory_space for device in devices}) == 1,
    }


def _items(devices: Sequence[Device], seed: int) -> int:
    """Find a batch that keeps the devices busy long enough, by doubling."""
    items, most, home = 16 * len(devices), _MOST_ITEMS, home_of(devices)
    if home.type == "cuda":
        bytes_of_an_item = 4 * 3 * _SIDE * _SIDE
        most = min(most, int(_MEMORY_PART * torch.cuda.get_device_properties(home).total_memory / bytes_of_an_item))
    while items < most:
        racer = Racer(devices, "even", items, seed)
        with racer.trainer:
            racer.steps(2)
            if racer.steps(2) / 2 >= _STEP_SECONDS:
                break
        items *= 2
    return items


_SIDE = 32  # pixels per side of an image


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(_SIDE * _SIDE * 4, 10))


def _batch(items: int, device: torch.device, seed: int) -> Batch:
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.randn(items, 3, _SIDE, _SIDE, device=device, generator=generator)
    return images, torch.randint(0, 10, (items,), device=device, generator=generator)


def _loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])
