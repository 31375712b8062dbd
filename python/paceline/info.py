"""What this machine offers and what this installation can use of it: `collect` for programs, `render` for people."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from paceline._core.comm import measure_links, reduce_isa
from paceline._core.runtime import (
    Device,
    DeviceGroup,
    build_facts,
    device_health,
    devices,
    gpu_facts,
    host_facts,
    why_no_devices,
)
from paceline._info_search import LIBRARIES, NCCL, PACKAGES, find_nccl, find_package, find_shared_library
from paceline._info_text import render
from paceline._nccl import nccl_info
from paceline._words import plural

__all__ = ["collect", "render"]

_OF_A_DEVICE = ("name", "kind", "index", "memory_space", "cores", "numa_node")


def collect(*, links: bool = False) -> dict[str, Any]:
    """Collect everything that `paceline info` shows, as plain values that `json` can write.

    Imports none of the packages it looks for. It opens the shared libraries, NVML also to read the health of GPUs.

    Parameters
    ----------
    links
        Whether to measure the links between GPUs, by copies: at most a second, and 64 MiB on each GPU.

    Returns
    -------
    dict
        ``version``, ``devices``, ``memory_spaces``, ``gpus`` (facts about each GPU and its present ``health``), ``gpu_links`` (for each two
        GPUs, both ways: ``from``, ``to``, ``kind``, ``bytes_per_second``, ``push_bytes_per_second`` if the source
        copies, 0 if unknown, and ``pushed``, whether it does; empty unless asked for), ``gpu_libraries``, ``cpu``, ``backends``, ``libraries``, ``missing``, ``build``, ``python``, ``platform``.
    """
    build = build_facts()
    host = host_facts()
    libraries = {package.key: find_package(package) for package in PACKAGES}
    nccl = nccl_info() if "cuda" in why_no_devices() else None
    for library in LIBRARIES:
        libraries[library.key] = find_nccl(nccl) if library is NCCL else find_shared_library(library)
    found = devices()
    spaces: dict[str, list[str]] = {}
    for device in found:
        spaces.setdefault(device.memory_space, []).append(device.name)
    return {
        "version": build.pop("version"),
        "devices": [
            {name: getattr(device, name) for name in _OF_A_DEVICE} | {"cores": list(device.cores)} for device in found
        ],
        "memory_spaces": spaces,
        "gpus": _gpus(found),
        "gpu_links": _links(found) if links else [],
        # The library that moves data between GPUs: version and path, or why there is none.
        "gpu_libraries": {"NCCL": nccl} if nccl is not None else {},
        "cpu": {
            "model": host["cpu_model"] or platform.processor() or platform.machine(),
            "affinity": host["affinity"],
            "cgroup_limit": host["cpu_limit"],
            "numa_nodes": {str(node): cores for node, cores in host["numa_nodes"].items()},
            "reduction_kernels": reduce_isa(),
        },
        "backends": {kind: _backend(kind, found) for kind in ("host", "cuda")},
        "libraries": libraries,
        "missing": list(_missing(libraries)),
        "build": build,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "gil": bool(getattr(sys, "_is_gil_enabled", lambda: True)()),
        },
        "platform": platform.platform(),
    }


def _gpus(found: list[Device]) -> list[dict[str, Any]]:
    known = {facts["device"]: facts for facts in gpu_facts()}
    return [
        {**known.get(device.name, {}), "device": device.name, "health": device_health(device.name)}
        for device in found
        if device.kind == "cuda"
    ]


def _links(found: list[Device]) -> list[dict[str, Any]]:
    gpus = [device for device in found if device.kind == "cuda"]
    if len(gpus) < 2:
        return []
    with DeviceGroup(gpus) as group:
        return measure_links(group)


def _backend(kind: str, found: list[Device]) -> dict[str, Any]:
    why_none = why_no_devices().get(kind)
    if why_none is None:
        return {"built": False, "detail": "not built; host devices only"}
    count = plural(sum(device.kind == kind for device in found), "device")
    return {"built": True, "detail": f"no devices: {why_none}" if why_none else count}


def _missing(libraries: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    if "cuda" not in why_no_devices():
        yield {
            "name": "cuda backend",
            "why": "this build runs on host devices only; GPUs are not used",
            "how": "build with CUDA's nvcc on the PATH; its absence costs nothing on a machine without an NVIDIA GPU",
        }
    for wanted in (*PACKAGES, *LIBRARIES):
        if not libraries[wanted.key]["found"]:
            name = wanted.name if wanted.name == wanted.key else f"{wanted.name} ({wanted.key})"
            yield {"name": name, "why": wanted.why, "how": wanted.how}
