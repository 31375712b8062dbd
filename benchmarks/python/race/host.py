"""The machine of the race: its hardware, and the time that the host of a virtual machine gave to others."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import paceline


class CoreSeconds(NamedTuple):
    """Sums over cores since the machine started."""

    passed: float
    stolen: float


def core_seconds(cores: Sequence[int]) -> CoreSeconds | None:
    """The values of /proc/stat for these cores; None if they are missing."""
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    # user nice system idle iowait irq softirq steal; guests' times follow, and are already part of user and nice
    ticks = [list(map(int, line[1:9])) for line in lines if line and line[0] in names]
    if len(ticks) != len(names) or any(len(core) < 8 for core in ticks):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return CoreSeconds(sum(map(sum, ticks)) / second, sum(core[7] for core in ticks) / second)


def hardware(devices: list[paceline.Device]) -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "devices": {device.name: device.cores for device in devices},
        "system": f"{platform.system()} {platform.release()}",
    }
