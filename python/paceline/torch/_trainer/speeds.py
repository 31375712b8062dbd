"""The measured speeds of devices in a trainer's state: hints for another run, which may have other devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline import Device, DeviceGroup
from paceline._core.runtime import host_facts
from paceline.torch._run.execution import Workload

# By kind of work, with costs or without, and by class of devices: float64, a row (fixed seconds, seconds per item) for
# each device of the class in order, NaN for a device that was not measured.
Speeds = dict[str, dict[str, torch.Tensor]]

_BY_COST = {False: "", True: " by cost"}


def class_of(device: Device) -> str:
    """What devices of equal speed have in common, on any machine. Host devices of two models of processors are two classes."""
    return device.device_class if device.kind != "host" else f"{device.device_class}, {host_facts()['cpu_model']}"


def speeds_of(works: Mapping[str, Workload], group: DeviceGroup) -> Speeds:
    """What was measured. Kinds of work and classes of which nothing is known are left out."""
    classes = [class_of(device) for device in group.devices]
    found: Speeds = {}
    for kind, work in works.items():
        for by_cost, suffix in _BY_COST.items():
            rows: dict[str, list[tuple[float, float]]] = {}
            for name, speed in zip(classes, work.step_loop.speeds(by_cost), strict=True):
                rows.setdefault(name, []).append(speed or (torch.nan, torch.nan))
            known = {name: torch.tensor(some, dtype=torch.float64) for name, some in rows.items()}
            known = {name: table for name, table in known.items() if not table.isnan().all()}
            if known:
                found[kind + suffix] = known
    return found


def give_hints(speeds: Speeds, kind: str, work: Workload, group: DeviceGroup) -> None:
    """Let this work begin with these speeds. The k-th device of a class gets the k-th row, if there is one."""
    for by_cost, suffix in _BY_COST.items():
        rows = {name: iter(table.tolist()) for name, table in speeds.get(kind + suffix, {}).items()}
        hints = [next(rows.get(class_of(device), iter(())), None) for device in group.devices]
        work.step_loop.hint([None if row is None or row[0] != row[0] else (row[0], row[1]) for row in hints], by_cost)


def are_speeds(value: Any) -> bool:
    """Whether it is what `speeds_of` returns."""
    return isinstance(value, Mapping) and all(
        isinstance(tables, Mapping) and all(_is_table(table) for table in tables.values()) for tables in value.values()
    )


def _is_table(table: Any) -> bool:
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or table.shape[1] != 2 or not table.is_floating_point():
        return False
    missing = table.isnan()
    return bool((missing.all(1) | (~missing & (table >= 0) & (table != torch.inf)).all(1)).all())
