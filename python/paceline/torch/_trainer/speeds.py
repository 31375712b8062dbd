"""The measured speeds of devices in a trainer's state: hints for another run, which may have other devices."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from paceline import Device, DeviceGroup
from paceline._core.runtime import host_facts
from paceline.torch._run.workload import Workload

# By kind of work, with costs or without, and by class of devices: [fixed seconds, seconds per item] for each device of
# the class in order, None for a device that was not measured.
Speeds = dict[str, dict[str, list[list[float] | None]]]

_BY_COST = {False: "", True: " by cost"}


@functools.cache  # it reads files of the system
def _processor() -> str:
    return str(host_facts()["cpu_model"])


def class_of(device: Device) -> str:
    """What devices of equal speed have in common, on any machine. Host devices of two models of processors are two classes."""
    return device.device_class if device.kind != "host" else f"{device.device_class}, {_processor()}"


def speeds_of(works: Mapping[str, Workload], group: DeviceGroup) -> Speeds:
    """What was measured. Kinds of work of which nothing is known are left out."""
    classes = [class_of(device) for device in group.devices]
    found: Speeds = {}
    for kind, work in works.items():
        for by_cost, suffix in _BY_COST.items():
            speeds = work.step_loop.speeds(by_cost)
            if not any(speeds):
                continue
            rows = found[kind + suffix] = {}
            for name, speed in zip(classes, speeds, strict=True):
                rows.setdefault(name, []).append(None if speed is None else list(speed))
    return found


def give_hints(speeds: Speeds, kind: str, work: Workload, group: DeviceGroup) -> None:
    """Let this work begin with these speeds. The k-th device of a class gets the k-th speed, if there is one."""
    for by_cost, suffix in _BY_COST.items():
        rows = {name: iter(some) for name, some in speeds.get(kind + suffix, {}).items()}
        hints = [next(rows.get(class_of(device), iter(())), None) for device in group.devices]
        work.step_loop.hint([None if speed is None else (speed[0], speed[1]) for speed in hints], by_cost)


def written(speeds: Speeds) -> str:
    """The speeds as a text. A checkpoint that wants the same keys and shapes in each state (PyTorch's distributed one) takes it."""
    return json.dumps(speeds, allow_nan=False)


def read(text: str) -> Speeds:
    """The speeds of a text.

    Raises
    ------
    ValueError, TypeError, AttributeError
        If it is no such text.
    """
    return {
        kind: {name: [None if speed is None else _pair(*speed) for speed in some] for name, some in rows.items()}
        for kind, rows in json.loads(text).items()
    }


def _pair(fixed: Any, per_item: Any) -> list[float]:
    for seconds in (fixed, per_item):
        if type(seconds) not in (int, float) or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"{seconds} is no time")
    return [fixed, per_item]
