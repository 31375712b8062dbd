"""Find the packages and shared libraries that this installation would use, without importing or opening any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Package(NamedTuple):
    module: str
    distribution: str
    why: str
    how: str


class SharedLibrary(NamedTuple):
    name: str
    soname: str
    wheels: tuple[str, ...]  # distributions that contain it
    why: str
    how: str


PACKAGES = (
    Package("torch", "torch", "paceline.torch trains PyTorch modules", "pip install 'paceline[torch]'"),
    Package("numpy", "numpy", "the Python examples and tests use it; the library does not", "pip install numpy"),
    Package("sklearn", "scikit-learn", "the digits example reads its data from it", "pip install 'paceline[examples]'"),
    Package(
        "matplotlib",
        "matplotlib",
        "trainer.plot() and paceline simulate --plot draw with it",
        "pip install 'paceline[plot]'",
    ),
    Package("rich", "rich", "trainer.progress() draws with it on a terminal", "pip install 'paceline[progress]'"),
)
_DRIVER = "comes with NVIDIA's driver; not needed on a machine without an NVIDIA GPU"
LIBRARIES = (
    SharedLibrary("NVIDIA driver", "libcuda.so.1", (), "GPUs can only be used through it", _DRIVER),
    SharedLibrary(
        "NCCL",
        "libnccl.so.2",
        ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "reductions between several GPUs go through it; host devices do not need it",
        "comes with PyTorch's CUDA wheels, or: pip install nvidia-nccl-cu13",
    ),
    SharedLibrary("NVML", "libnvidia-ml.so.1", (), "tells why a GPU is slow: clocks, heat, power", _DRIVER),
)
# Directories that the dynamic linker's cache does not list. Containers and WSL mount the driver there.
_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_package(package: Package) -> dict[str, Any]:
    absent = {"found": False, "version": None, "path": None, "source": None}
    try:
        spec = find_spec(package.module)  # finds a top-level module without importing it
    except (ImportError, ValueError):  # a broken or half-imported package
        return absent
    # Without __init__ it is a namespace package: a directory that happens to have the library's name.
    if spec is None or spec.origin is None:
        return absent
    return {
        "found": True,
        "version": _version_of(package.distribution),
        "path": str(Path(spec.origin).parent),
        "source": "loaded" if package.module in sys.modules else "Python path",
    }


def find_shared_library(library: SharedLibrary) -> dict[str, Any]:
    for source, version, path in _library_candidates(library):
        return {"found": True, "version": version, "path": str(path), "source": source}
    return {"found": False, "version": None, "path": None, "source": None}


def _library_candidates(library: SharedLibrary) -> Iterator[tuple[str, str | None, Path]]:
    """Places of a library, in the order in which the loader searches them."""
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
