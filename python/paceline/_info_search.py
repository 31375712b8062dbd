"""Find the packages that this installation would use, without importing them, and the shared libraries."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from paceline._nccl import installed_nccl


class Wanted(NamedTuple):
    """A package or a shared library that paceline can use."""

    key: str  # the name of the distribution, or of the library's file
    why: str
    how: str
    name: str  # for people
    module: str = ""  # of a package


def _package(name: str, module: str, why: str, how: str) -> Wanted:
    return Wanted(name, why, f"pip install {how}", name, module)


PACKAGES = (
    _package("torch", "torch", "paceline.torch trains PyTorch modules", "'paceline[torch]'"),
    _package("numpy", "numpy", "PyTorch hands arrays to Python through it; paceline[torch] brings it", "numpy"),
    _package("scikit-learn", "sklearn", "the digits example reads its data from it", "'paceline[examples]'"),
    _package("matplotlib", "matplotlib", "trainer.plot() draws with it", "'paceline[plot]'"),
    _package("rich", "rich", "trainer.progress() draws with it on a terminal", "'paceline[progress]'"),
)
_DRIVER = "comes with NVIDIA's driver; not needed on a machine without an NVIDIA GPU"
_FOR_NCCL = "reductions between several GPUs go through it; host devices do not need it"
_GET_NCCL = "comes with PyTorch's CUDA wheels, or: pip install nvidia-nccl-cu13"
NCCL = Wanted("libnccl.so.2", _FOR_NCCL, _GET_NCCL, "NCCL")
LIBRARIES = (
    Wanted("libcuda.so.1", "GPUs can only be used through it", _DRIVER, "NVIDIA driver"),
    NCCL,
    Wanted("libnvidia-ml.so.1", "tells why a GPU is slow: clocks, heat, power", _DRIVER, "NVML"),
)
_ABSENT = {"found": False, "version": None, "path": None, "source": None}


def find_package(package: Wanted) -> dict[str, Any]:
    try:
        spec = find_spec(package.module)  # finds a top-level module without importing it
    except (ImportError, ValueError):  # a broken or half-imported package
        return dict(_ABSENT)
    # Without __init__ it is a namespace package: a directory that happens to have the library's name.
    if spec is None or spec.origin is None:
        return dict(_ABSENT)
    try:
        version = metadata.version(package.key)
    except metadata.PackageNotFoundError:
        version = None
    return {
        "found": True,
        "version": version,
        "path": str(Path(spec.origin).parent),
        "source": "loaded" if package.module in sys.modules else "Python path",
    }


def find_shared_library(library: Wanted) -> dict[str, Any]:
    """Open the library by its name, as paceline opens it."""
    try:
        ctypes.CDLL(library.key)
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return dict(_ABSENT)
    # The file has its full version in its name, where `key` has the first number.
    stem = library.key.partition(".so")[0] + ".so"
    files = [fields[5] for line in mapped.splitlines() if len(fields := line.split(maxsplit=5)) == 6]
    path = next((file for file in files if Path(file).name.startswith(stem)), None)
    return {"found": True, "version": None, "path": path, "source": "system"}


def find_nccl(used: Mapping[str, str] | None) -> dict[str, Any]:
    """Describe the NCCL that paceline uses, by what `nccl_info` returns.

    None stands for a build without the CUDA backend, which uses no NCCL. The file is then only looked for. Nothing is opened here, because a
    second copy of NCCL in the process would not know the work of the first.
    """
    installed = installed_nccl()
    if used is None:
        path, version = installed or ctypes.util.find_library("nccl"), None
    else:
        path, version = used.get("path"), used.get("version")
    if not path:
        return dict(_ABSENT)
    named = os.environ.get("PACELINE_NCCL_LIBRARY")
    source = "PACELINE_NCCL_LIBRARY" if path == named else "pip" if path == installed else "system"
    return {"found": True, "version": version, "path": path, "source": source}
