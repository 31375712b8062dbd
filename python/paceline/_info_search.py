"""Find the packages that this installation would use, without importing them, and the shared libraries, by opening them."""

from __future__ import annotations

import ctypes
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from paceline._nccl import installed_nccl


class Package(NamedTuple):
    module: str
    distribution: str
    why: str
    how: str


class SharedLibrary(NamedTuple):
    name: str
    soname: str
    why: str
    how: str


PACKAGES = (
    Package("torch", "torch", "paceline.torch trains PyTorch modules", "pip install 'paceline[torch]'"),
    Package("numpy", "numpy", "the Python examples and tests use it; the library does not", "pip install numpy"),
    Package("sklearn", "scikit-learn", "the digits example reads its data from it", "pip install 'paceline[examples]'"),
    Package(
        "matplotlib",
        "matplotlib",
        "trainer.plot() draws with it",
        "pip install 'paceline[plot]'",
    ),
    Package("rich", "rich", "trainer.progress() draws with it on a terminal", "pip install 'paceline[progress]'"),
)
_DRIVER = "comes with NVIDIA's driver; not needed on a machine without an NVIDIA GPU"
LIBRARIES = (
    SharedLibrary("NVIDIA driver", "libcuda.so.1", "GPUs can only be used through it", _DRIVER),
    SharedLibrary(
        "NCCL",
        "libnccl.so.2",
        "reductions between several GPUs go through it; host devices do not need it",
        "comes with PyTorch's CUDA wheels, or: pip install nvidia-nccl-cu13",
    ),
    SharedLibrary("NVML", "libnvidia-ml.so.1", "tells why a GPU is slow: clocks, heat, power", _DRIVER),
)
_ABSENT = {"found": False, "version": None, "path": None, "source": None}


def find_package(package: Package) -> dict[str, Any]:
    try:
        spec = find_spec(package.module)  # finds a top-level module without importing it
    except (ImportError, ValueError):  # a broken or half-imported package
        return dict(_ABSENT)
    # Without __init__ it is a namespace package: a directory that happens to have the library's name.
    if spec is None or spec.origin is None:
        return dict(_ABSENT)
    try:
        version = metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        version = None
    return {
        "found": True,
        "version": version,
        "path": str(Path(spec.origin).parent),
        "source": "loaded" if package.module in sys.modules else "Python path",
    }


def find_shared_library(library: SharedLibrary) -> dict[str, Any]:
    """Open the library as paceline opens it: NCCL from pip's package if there is one, all else by the system's loader."""
    installed = installed_nccl() if library.name == "NCCL" else None
    try:
        ctypes.CDLL(installed or library.soname)
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return dict(_ABSENT)
    # The file has its full version in its name, where `soname` has the first number.
    stem = library.soname.partition(".so")[0] + ".so"
    files = [fields[5] for line in mapped.splitlines() if len(fields := line.split(maxsplit=5)) == 6]
    path = next((file for file in files if Path(file).name.startswith(stem)), installed)
    return {"found": True, "version": None, "path": path, "source": "pip" if installed else "system"}
