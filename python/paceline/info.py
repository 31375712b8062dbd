"""What this machine offers and what this installation can use of it: `collect` for programs, `render` for people."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from paceline._core import runtime as _runtime
from paceline._core.comm import reduce_isa
from paceline._core.runtime import (
    Device,
    build_facts,
    device_health,
    devices,
    health_sources,
    host_facts,
    why_no_devices,
)
from paceline._nccl import nccl_info
from paceline._words import counted

__all__ = ["collect", "render"]


class _Package(NamedTuple):
    module: str
    distribution: str
    why: str
    how: str


class _SharedLibrary(NamedTuple):
    name: str
    soname: str
    wheels: tuple[str, ...]  # distributions that bring it
    why: str
    how: str


_PACKAGES = (
    _Package("torch", "torch", "paceline.torch trains PyTorch modules", "pip install 'paceline[torch]'"),
    _Package("numpy", "numpy", "the Python examples and tests use it; the library does not", "pip install numpy"),
    _Package(
        "sklearn", "scikit-learn", "the digits example reads its data from it", "pip install 'paceline[examples]'"
    ),
    _Package(
        "matplotlib",
        "matplotlib",
        "trainer.plot() and paceline simulate --plot draw with it",
        "pip install 'paceline[plot]'",
    ),
    _Package("rich", "rich", "trainer.progress() draws with it on a terminal", "pip install 'paceline[progress]'"),
)
_DRIVER = "comes with NVIDIA's driver; not needed on a machine without an NVIDIA GPU"
_LIBRARIES = (
    _SharedLibrary("NVIDIA driver", "libcuda.so.1", (), "GPUs can only be used through it", _DRIVER),
    _SharedLibrary(
        "NCCL",
        "libnccl.so.2",
        ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "reductions between several GPUs go through it; host devices do not need it",
        "comes with PyTorch's CUDA wheels, or: pip install nvidia-nccl-cu13",
    ),
    _SharedLibrary("NVML", "libnvidia-ml.so.1", (), "tells why a GPU is slow: clocks, heat, power", _DRIVER),
)
# Where libraries lie that the dynamic linker's cache does not list: containers and WSL mount the driver there.
_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
)


def collect() -> dict[str, Any]:
    """Everything `paceline info` tells, as plain values that `json` can write.

    Imports none of the packages it looks for: what is loaded already is found in the process, the rest in package
    metadata, the linker's cache and the usual directories. GPUs are asked how they are, for which NVML is opened.

    Returns
    -------
    dict
        ``version``, ``devices``, ``memory_spaces``, ``gpus`` (what is known of each, its ``health`` now), ``gpu_libraries``,
        ``cpu``, ``backends``, ``libraries``, ``missing``, ``build``, ``python``, ``platform``.
    """
    build = build_facts()
    host = host_facts()
    libraries = {package.distribution: _find_package(package) for package in _PACKAGES}
    libraries |= {library.soname: _find_shared_library(library) for library in _LIBRARIES}
    found = devices()
    spaces: dict[str, list[str]] = {}
    for device in found:
        spaces.setdefault(device.memory_space, []).append(device.name)
    return {
        "version": build.pop("version"),
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "index": device.index,
                "memory_space": device.memory_space,
                "cores": list(device.cores),
                "numa_node": device.numa_node,
            }
            for device in found
        ],
        "memory_spaces": spaces,
        "gpus": _gpus(found),
        "gpu_libraries": _gpu_libraries(),
        "cpu": {
            "model": host["cpu_model"] or platform.processor() or platform.machine(),
            "affinity": host["affinity"],
            "cgroup_limit": host["cpu_limit"],
            "numa_nodes": {str(node): cores for node, cores in host["numa_nodes"].items()},
            "reduction_kernels": reduce_isa(),
        },
        "backends": {
            kind: _backend(kind, [device for device in found if device.kind == kind]) for kind in ("host", "cuda")
        },
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
    ask = getattr(_runtime, "gpu_facts", None)
    known = {facts.get("device"): facts for facts in (ask() if ask else [])}
    return [
        {**known.get(device.name, {}), "device": device.name, "health": device_health(device.name)}
        for device in found
        if device.kind == "cuda"
    ]


def _gpu_libraries() -> dict[str, dict[str, Any]]:
    """The libraries that GPUs are used through, as they were opened: version and path, or why there is none."""
    libraries: dict[str, dict[str, Any]] = {}
    for source in health_sources().values():
        libraries[source["name"]] = {key: value for key, value in source.items() if key != "name"}
    if "cuda" in why_no_devices():
        libraries["NCCL"] = dict(nccl_info())
    return libraries


def _backend(kind: str, found: list[Device]) -> dict[str, Any]:
    why_none = why_no_devices().get(kind)
    if why_none is None:
        return {"built": False, "detail": "not built; host devices only"}
    return {"built": True, "detail": f"no devices: {why_none}" if why_none else counted(len(found), "device")}


def _missing(libraries: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    if "cuda" not in why_no_devices():
        yield {
            "name": "cuda backend",
            "why": "this build runs on host devices only; GPUs are not used",
            "how": "build with CUDA's nvcc on the PATH; its absence costs nothing on a machine without an NVIDIA GPU",
        }
    for package in _PACKAGES:
        if not libraries[package.distribution]["found"]:
            yield {"name": package.distribution, "why": package.why, "how": package.how}
    for library in _LIBRARIES:
        if not libraries[library.soname]["found"]:
            yield {"name": f"{library.name} ({library.soname})", "why": library.why, "how": library.how}


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find_package(package: _Package) -> dict[str, Any]:
    absent = {"found": False, "version": None, "path": None, "source": None}
    try:
        spec = find_spec(package.module)  # of a top-level module: found, not imported
    except (ImportError, ValueError):  # a broken or half-imported package
        return absent
    # A folder without __init__ is a namespace package to Python: somebody's directory of that name is not the library.
    if spec is None or spec.origin is None:
        return absent
    return {
        "found": True,
        "version": _version_of(package.distribution),
        "path": str(Path(spec.origin).parent),
        "source": "loaded" if package.module in sys.modules else "Python path",
    }


def _find_shared_library(library: _SharedLibrary) -> dict[str, Any]:
    for source, version, path in _library_candidates(library):
        return {"found": True, "version": version, "path": str(path), "source": source}
    return {"found": False, "version": None, "path": None, "source": None}


def _library_candidates(library: _SharedLibrary) -> Iterator[tuple[str, str | None, Path]]:
    """Places of a library in the order in which the loader would come upon them."""
    for path in _loaded_files():
        if path.name.startswith(library.soname):
            yield "loaded", None, path
    for wheel in library.wheels:
        try:
            distribution = metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            if file.name == library.soname:
                path = Path(str(distribution.locate_file(file)))
                if path.exists():
                    yield f"wheel {wheel}", distribution.version, path
    directories = [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
    yield from (("LD_LIBRARY_PATH", None, path) for path in _in_directories(library.soname, directories))
    yield from (("linker cache", None, path) for path in _in_linker_cache(library.soname))
    yield from (("system directory", None, path) for path in _in_directories(library.soname, _LIBRARY_DIRECTORIES))


def _loaded_files() -> set[Path]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def _in_directories(soname: str, directories: Iterable[str]) -> Iterator[Path]:
    for directory in directories:
        path = Path(directory, soname)
        if path.exists():
            yield path


def _in_linker_cache(soname: str) -> Iterator[Path]:
    """Read `ldconfig -p`, whose lines are ``libcuda.so.1 (libc6,x86-64) => /usr/lib/.../libcuda.so.1``."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            listing = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in listing.splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow and name.split(" ", 1)[0] == soname and Path(path).exists():
                yield Path(path)
        return


def render(facts: Mapping[str, Any]) -> str:
    """The result of `collect` as text for people, without a trailing newline."""
    cpu = facts["cpu"]
    limit = cpu["cgroup_limit"]
    python = facts["python"]
    build = facts["build"]
    blocks: list[tuple[str | None, list[tuple[str, str]]]] = [
        (None, [("paceline", facts["version"]), ("platform", facts["platform"])]),
        (
            "CPU",
            [
                ("processor", cpu["model"]),
                ("cores we may use", _ranges(cpu["affinity"]) or "unknown (no affinity mask)"),
                (
                    "cgroup CPU limit",
                    f"{limit['cores']:g} core{'' if limit['cores'] == 1 else 's'} ({limit['source']})"
                    if limit
                    else "none",
                ),
                (
                    "NUMA nodes",
                    "; ".join(f"{node}: {_ranges(c)}" for node, c in cpu["numa_nodes"].items()) or "unknown",
                ),
                ("reduction kernels", cpu["reduction_kernels"]),
            ],
        ),
        ("Backends", [(name, entry["detail"]) for name, entry in facts["backends"].items()]),
        ("Devices", [(device["name"], _device_text(device)) for device in facts["devices"]]),
        ("Memory", [("space " + space, ", ".join(names)) for space, names in facts["memory_spaces"].items()]),
        ("GPUs", [*_gpu_rows(facts["gpus"]), *_gpu_library_rows(facts["gpu_libraries"])]),
        (
            "Build",
            [
                ("built with", f"{build['compiler']} ({build['flags']})"),
                ("fmt, pybind11", f"{build['fmt']}, {build['pybind11']}"),
                (
                    python["implementation"],
                    f"{python['version']}{'' if python['gil'] else ' free-threaded'}, {python['executable']}",
                ),
            ],
        ),
        ("Libraries", [(name, _library_text(entry)) for name, entry in facts["libraries"].items()]),
    ]
    width = max(len(name) for _, block in blocks for name, _ in block)
    lines: list[str] = []
    for title, block in blocks:
        if not block:
            continue
        if title:
            lines += ["", title]
        indent = "  " if title else ""
        lines += [f"{indent}{name:<{width + 2 - len(indent)}}  {text}" for name, text in block]
    if facts["missing"]:
        lines += ["", "Missing"]
        for entry in facts["missing"]:
            lines += [
                f"  {entry['name']}",
                f"    why it matters: {entry['why']}",
                f"    how to get it:  {entry['how']}",
            ]
    return "\n".join(lines)


def _device_text(device: Mapping[str, Any]) -> str:
    cores = device["cores"]
    where = f"pinned to core{'s' if len(cores) > 1 else ''} {_ranges(cores)}" if cores else "not pinned"
    node = device["numa_node"]
    return where if node is None else f"{where}, NUMA node {node}"


def _gpu_rows(gpus: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for gpu in gpus:
        yield gpu["device"], str(gpu.get("model", ""))
        health = gpu["health"]
        for key, value in {**gpu, **(health or {"health": "unknown"})}.items():
            if key in ("device", "model") or (key == "health" and health is not None):
                continue
            label, text = _quantity(key, value)
            if text:
                yield f"  {label}", text


def _gpu_library_rows(libraries: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, entry in libraries.items():
        rest = {key: value for key, value in entry.items() if key not in ("why_none", "version", "path")}
        parts = [_quantity(key, value) for key, value in rest.items()]
        text = f"{entry.get('version') or 'version unknown'}  ({entry.get('path') or 'path unknown'})"
        if why := entry.get("why_none"):
            text = f"none: {why}"
        yield name, "; ".join([text, *(f"{label}: {value}" for label, value in parts if value)])


_UNITS = {
    "_bytes": (1 / 2**30, "{:.1f} GiB"),
    "_hz": (1e-9, "{:.2f} GHz"),
    "_mhz": (1e-3, "{:.2f} GHz"),
    "_celsius": (1.0, "{:.0f} C"),
    "_watts": (1.0, "{:.0f} W"),
    "_seconds": (1.0, "{:.1f} s"),
}


def _quantity(key: str, value: Any) -> tuple[str, str]:
    """``("memory_bytes", 85899345920)`` as ``("memory", "80.0 GiB")``; text is empty where nothing is known."""
    label = key.replace("_", " ")
    if value is None or value == "":
        return label, ""
    if isinstance(value, bool):
        return label, "yes" if value else "no"
    for suffix, (factor, text) in _UNITS.items():
        if not key.endswith(suffix):
            continue
        label = key.removesuffix(suffix).replace("_", " ")
        if isinstance(value, (int, float)):
            return label, text.format(factor * value)
        if isinstance(value, Mapping):
            return label, "; ".join(f"{name} {text.format(factor * amount)}" for name, amount in value.items())
    if isinstance(value, Mapping):
        parts = [_quantity(str(name), entry) for name, entry in value.items()]
        return label, "; ".join(f"{name}: {text}" for name, text in parts if text)
    if isinstance(value, (list, tuple)):
        return label, ", ".join(str(entry) for entry in value) or "none"
    return label, str(value)


def _library_text(entry: Mapping[str, Any]) -> str:
    if not entry["found"]:
        return "not found"
    return f"{entry['version'] or 'version unknown'}  ({entry['source']}: {entry['path']})"


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
