"""The build backend: scikit-build-core, and CUDA's compiler from PyPI where there is an NVIDIA driver and no nvcc.

Nearly nobody with PyTorch and GPUs has nvcc, and without it the library could not use their GPUs. PacelineCuda.cmake finds what is fetched.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, "str | list[str]"]
Version = tuple[int, int]

PYPI_NVCC = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"
PYPI_CUDA: Version = (13, 0)
OLDEST_CUDA: Version = (12, 5)

OLD_DRIVER = """\
paceline: no CUDA backend is built. This machine's driver runs CUDA {}.{} at most, and PyPI's nvcc is that of CUDA 13 (it has none for
CUDA 12). For GPUs, update the driver to 580 or newer, or install a CUDA toolkit, 12.5 or newer, that your driver runs: its nvcc is taken if
it is on PATH or in CUDA_HOME."""


class OldDriverError(Exception):
    """The driver is older than PyPI's compiler."""


def cuda_requirements(wanted: str, has_nvcc: bool, driver: Version | None) -> list[str]:
    """Return what a build needs from PyPI for the CUDA backend.

    `wanted` is AUTO, ON or OFF. `driver` is the newest CUDA that the driver runs, and None without a driver.
    """
    if wanted == "OFF" or has_nvcc or (wanted == "AUTO" and driver is None):
        return []
    if driver is not None and driver < PYPI_CUDA:
        raise OldDriverError(OLD_DRIVER.format(*driver))
    return [PYPI_NVCC]


def cmake_options(config_settings: ConfigSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options for CMake that pip and the environment give. Later places override earlier ones, as in scikit-build-core."""
    places = [environ.get("SKBUILD_CMAKE_DEFINE", "")]
    for name, value in config_settings.items():
        places += [f"{name}={text}" for text in ([value] if isinstance(value, str) else value)]
    places += [environ.get("SKBUILD_CMAKE_ARGS", ""), environ.get("CMAKE_ARGS", "")]
    options = {"PACELINE_CUDA": environ.get("PACELINE_CUDA", "AUTO")}
    for place in places:
        options.update(re.findall(r"(?:\b|-D)(PACELINE_CUDA|CMAKE_CUDA_COMPILER)(?::\w+)?=([^\s;]+)", place))
    return options


def find_nvcc(environ: Mapping[str, str]) -> bool:
    """Whether PacelineCuda.cmake will find an nvcc without PyPI."""
    if environ.get("CUDACXX"):
        return True
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    for nvcc in (shutil.which("nvcc", path=environ.get("PATH")), f"{home}/bin/nvcc"):
        try:
            said = subprocess.run([nvcc or "", "--version"], capture_output=True, text=True, check=False).stdout
        except OSError:
            continue
        release = re.search(r"release (\d+)\.(\d+)", said)
        if release and (int(release[1]), int(release[2])) >= OLDEST_CUDA:
            return True
    return False


def find_driver() -> Version | None:
    """Return the newest CUDA that this machine's driver runs. The driver's library is what paceline opens, too.

    None where PyPI's compiler would not run: it is for glibc, on two processors.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def _cuda_requirements_here(config_settings: ConfigSettings | None) -> list[str]:
    options = cmake_options(config_settings or {}, os.environ)
    wanted = options["PACELINE_CUDA"].upper()
    try:
        return cuda_requirements(wanted, "CMAKE_CUDA_COMPILER" in options or find_nvcc(os.environ), find_driver())
    except OldDriverError as word:
        if wanted == "ON":
            raise SystemExit(f"error: PACELINE_CUDA=ON cannot be done here. {word}") from None
        print(word, file=sys.stderr)
        return []


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """Return what building a wheel needs."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_cuda_requirements_here(config_settings)]


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """Return what an editable installation needs."""
    return [*_build.get_requires_for_build_editable(config_settings), *_cuda_requirements_here(config_settings)]
