"""The parts of race_gpu.py. Each returns its figures, the fraction of the ideal first."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline import Communicator, Device, DeviceGroup
from race import gpu_networks as networks
from race.figures import ratio_summary, steps_to_recover
from race.gpu_clock import Clock
from race.gpu_field import Lanes, Paced, Plain, batch_size, together
from race.gpu_networks import Network, Pair

STEP_SECONDS = 0.01  # the shortest time of a share
WARM_UP_STEPS = 15


@dataclass(frozen=True)
class Length:
    """How long to measure."""

    rounds: int
    steps: int  # per block
    seconds: float  # in each round, for the devices alone


def overhead(network: Network, device: Device, length: Length) -> dict[str, Any]:
    """(a) One device: plain PyTorch and paceline in turns."""
    clock = Clock(network.device)
    items, size = batch_size(network, clock, 1, STEP_SECONDS)
    with Paced(network, [device], items, "even") as paced:
        rivals = {"plain": Plain(network, items), "paceline": paced}
        seconds = _turns(clock, rivals, length)
    ratios = [plain / ours for plain, ours in zip(seconds["plain"], seconds["paceline"], strict=True)]
    return {
        "fraction_of_ideal": statistics.median(ratios),
        "goal": 0.99,
        "plain_over_paceline": ratio_summary(ratios),
        **size,
    }


def partitions(network: Network, devices: Sequence[Device], weights: Sequence[float], length: Length) -> dict[str, Any]:
    """(b) Several devices of unequal speed: auto and even shares, against the devices running alone at the same time.

    Neither side updates the parameters: paceline has one update on the whole GPU, while each device alone would need its own.
    """
    clock = Clock(network.device)
    items, size = batch_size(network, clock, len(devices), STEP_SECONDS)
    own = [max(1, round(items * weight / sum(weights))) for weight in weights]
    with contextlib.ExitStack() as stack:
        lanes = Lanes(network, devices)
        stack.callback(lanes.close)
        rivals = {
            balance: stack.enter_context(Paced(network, devices, items, balance, update=False))
            for balance in ("auto", "even")
        }
        for rival in rivals.values():
            clock.block(rival, WARM_UP_STEPS)
        rates: dict[str, list[float]] = {"auto": [], "even": [], "ideal": []}
        order = list(rates)
        for _ in range(length.rounds):
            for name in order:
                if name == "ideal":
                    rates[name].append(together(network, devices, lanes, own, length.seconds))
                else:
                    rates[name].append(items * length.steps / clock.block(rivals[name], length.steps))
            order.reverse()
        shares = list(rivals["auto"].trainer.shares.values())
    fractions = {
        name: [rate / ideal for rate, ideal in zip(rates[name], rates["ideal"], strict=True)]
        for name in ("auto", "even")
    }
    return {
        "fraction_of_ideal": statistics.median(fractions["auto"]),
        "goal": 0.95,
        "auto": ratio_summary(fractions["auto"]),
        "even": ratio_summary(fractions["even"]),
        "items_per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "shares": shares,
        "devices": [str(device) for device in devices],
        **size,
    }


def disturbed(network: Network, devices: Sequence[Device], length: Length) -> dict[str, Any]:
    """(c) The first device has other work in its queue during the middle third: how soon are steps as fast as possible again?"""
    clock = Clock(network.device)
    items, size = batch_size(network, clock, len(devices), STEP_SECONDS)
    third = 4 * length.steps
    victim = Victim(items, len(devices))

    with Paced(network, devices, items, "auto", victim.loss_fn) as paced:
        paced()
        clock.block(paced, WARM_UP_STEPS)

        def step(number: int) -> None:
            victim.disturbed = third <= number < 2 * third
            paced()

        seconds = clock.each(step, 3 * third)
    quiet, busy = statistics.median(seconds[:third]), statistics.median(seconds[third + third // 2 : 2 * third])
    # Two equal devices, one of them slowed to a third: two thirds of the full speed remain.
    slowest = len(devices) / (len(devices) - 1 + 1 / (1 + Victim.EXTRA))
    return {
        "fraction_of_ideal": quiet * slowest / busy,
        "goal_steps": 2,
        "steps_to_recover": steps_to_recover(seconds, third, 2 * third),
        "steps_to_recover_afterwards": steps_to_recover(seconds, 2 * third, 3 * third),
        "milliseconds": {
            "quiet": round(1e3 * quiet, 3),
            "at_the_change": round(1e3 * seconds[third], 3),
            "disturbed": round(1e3 * busy, 3),
        },
        **size,
    }


class Victim:
    """A loss whose first device does other work first: extra forward passes over its items, so many that it runs at a third of its
    speed."""

    EXTRA = 2  # extra passes per pass of its own

    def __init__(self, items: int, devices: int) -> None:
        self.disturbed = False
        self._share = -(-items // devices)
        # The first device's worker thread, found in the first step, whose shares are even.
        self._thread: int | None = None

    def loss_fn(self, module: nn.Module, part: Pair) -> torch.Tensor:
        if self._thread is None and part[0].storage_offset() == 0:
            self._thread = threading.get_ident()
        if self.disturbed and threading.get_ident() == self._thread:
            x, target = part[0].detach(), part[1]
            for _ in range(self.EXTRA):
                # As much work as the step's own; nobody uses the result.
                loss = networks.loss_fn(module, (x, target))
                torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
        return networks.loss_fn(module, part)


def reduction(devices: Sequence[Device], device: torch.device, length: Length) -> dict[str, Any]:
    """(d) The sum over buffers in one memory, in bytes read and written per second, against copying them."""
    clock = Clock(device)
    bytes_each = (256 << 20) if device.type == "cuda" else (8 << 20)
    tensors = [torch.zeros(bytes_each // 4, device=device) for _ in devices]
    target = torch.empty_like(tensors[0])
    with DeviceGroup(list(devices)) as group:
        communicator = Communicator(group)
        rivals: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(tensors[0]),
            "sum": lambda: communicator.all_reduce(tensors),
        }
        seconds = _turns(clock, rivals, length)
    moved = buffers_moved(len(devices), device)
    ratios = [moved / 2 * copy / ours for copy, ours in zip(seconds["copy"], seconds["sum"], strict=True)]
    least = [len(devices) * copy / ours for copy, ours in zip(seconds["copy"], seconds["sum"], strict=True)]
    return {
        "fraction_of_ideal": statistics.median(ratios),
        "goal": 0.85,
        "of_copy": ratio_summary(ratios),
        "of_copy_if_each_buffer_were_moved_twice": ratio_summary(least),  # the least that any all-reduce can move
        "copy_gigabytes_per_second": round(2e-9 * bytes_each * length.steps / statistics.median(seconds["copy"]), 1),
        "megabytes": bytes_each >> 20,
        "buffers": len(devices),
    }


def buffers_moved(count: int, device: torch.device) -> int:
    """The number of buffers that an all-reduce over `count` buffers reads and writes.

    On a GPU one kernel reads all buffers and writes one, which is then copied to each of the others. On the host each buffer is read and
    written once. A copy reads one and writes one.
    """
    return (count + 1) + 2 * (count - 1) if device.type == "cuda" else 2 * count


def _turns(clock: Clock, rivals: dict[str, Any], length: Length) -> dict[str, list[float]]:
    """Blocks in the order A B, B A, ..., so that slow changes affect all rivals alike."""
    for rival in rivals.values():
        clock.block(rival, WARM_UP_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    order = list(rivals)
    for _ in range(2 * length.rounds):
        for name in order:
            seconds[name].append(clock.block(rivals[name], length.steps))
        order.reverse()
    return seconds
