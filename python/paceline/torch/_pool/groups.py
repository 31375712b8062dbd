"""What `Pool` takes as its devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline import Device, DeviceGroup, InvalidArgument
from paceline import devices as all_devices


def group_of(devices: Any) -> DeviceGroup:
    """A group of them, or the one that is given."""
    if devices == "auto":
        return DeviceGroup(_of_kind("cuda") or _of_kind("host"))
    if isinstance(devices, DeviceGroup):
        return devices
    group = getattr(devices, "group", None)  # of a trainer, which may be closed before the pool
    if isinstance(group, DeviceGroup):
        return DeviceGroup(list(group.devices))
    named = [devices] if isinstance(devices, (str, Device)) or not isinstance(devices, Iterable) else list(devices)
    if not all(isinstance(one, (str, Device)) for one in named):
        raise InvalidArgument(
            f"Pool: devices is {devices!r}; give 'auto', 'cuda', 'host', a device such as 'host:0', a list of these, a DeviceGroup or a trainer."
        )
    found = [_some_of_kind(one) if isinstance(one, str) and one in ("cuda", "host") else [one] for one in named]
    return DeviceGroup([one for some in found for one in some])


def work_beside(devices: Any, jobs: Any) -> None:
    """Let micro-batches of a trainer that gives its devices be short, as long as these jobs are open."""
    works = getattr(devices, "_works", None)
    if works is not None:
        works.beside.add(jobs)


def _of_kind(kind: str) -> list[str]:
    return [one.name for one in all_devices() if one.kind == kind]


def _some_of_kind(kind: str) -> list[str]:
    found = _of_kind(kind)
    if not found:
        raise InvalidArgument(f"Pool: there is no {kind!r} device here. `paceline info` says why.")
    return found
