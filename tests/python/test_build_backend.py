"""What pip's build fetches for GPUs, from what it finds on the machine. Nothing is fetched or built here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
import build_backend
from build_backend import OldDriverError, cmake_options, cuda_requirements, find_nvcc

ROOT = Path(__file__).resolve().parents[2]
NVCC = ["cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]


@pytest.mark.parametrize(
    ("wanted", "has_nvcc", "driver", "fetched"),
    [
        ("AUTO", False, (13, 0), NVCC),
        ("AUTO", False, (14, 1), NVCC),
        ("AUTO", False, None, []),
        ("AUTO", True, (13, 0), []),
        ("ON", False, (13, 0), NVCC),
        ("ON", False, None, NVCC),
        ("ON", True, None, []),
        ("OFF", False, (13, 0), []),
        ("OFF", True, (12, 4), []),
        ("AUTO", True, (12, 4), []),
    ],
)
def test_only_a_machine_with_a_driver_and_without_nvcc_fetches_one(
    wanted: str, has_nvcc: bool, driver: tuple[int, int] | None, fetched: list[str]
) -> None:
    assert cuda_requirements(wanted, has_nvcc, driver) == fetched


@pytest.mark.parametrize("wanted", ["AUTO", "ON"])
def test_a_driver_of_cuda_12_is_told_what_to_do(wanted: str) -> None:
    with pytest.raises(OldDriverError, match=r"runs CUDA 12\.8 at most(.|\n)*update the driver to 580"):
        cuda_requirements(wanted, has_nvcc=False, driver=(12, 8))


@pytest.mark.parametrize(
    ("settings", "environ", "wanted"),
    [
        ({}, {}, "AUTO"),
        ({}, {"PACELINE_CUDA": "ON"}, "ON"),
        ({"cmake.define.PACELINE_CUDA": "OFF"}, {"PACELINE_CUDA": "ON"}, "OFF"),
        ({"cmake.args": ["-Wno-dev", "-DPACELINE_CUDA:STRING=ON"]}, {}, "ON"),
        ({"cmake.define.PACELINE_CUDA": "OFF"}, {"CMAKE_ARGS": "-G Ninja -DPACELINE_CUDA=ON"}, "ON"),
        ({}, {"SKBUILD_CMAKE_DEFINE": "PACELINE_TESTS=ON;PACELINE_CUDA=OFF"}, "OFF"),
    ],
)
def test_what_is_wanted_comes_from_all_places_that_the_build_reads(
    settings: dict[str, str | list[str]], environ: dict[str, str], wanted: str
) -> None:
    assert cmake_options(settings, environ)["PACELINE_CUDA"] == wanted


def test_a_compiler_for_cmake_is_an_nvcc() -> None:
    environ = {"CMAKE_ARGS": "-DCMAKE_CUDA_COMPILER=/opt/cuda/bin/nvcc"}
    assert cmake_options({}, environ)["CMAKE_CUDA_COMPILER"] == "/opt/cuda/bin/nvcc"


def fake_nvcc(folder: Path, release: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "nvcc"
    program.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(("release", "found"), [("11.8", False), ("12.4", False), ("12.5", True), ("13.0", True)])
def test_an_nvcc_of_one_s_own_must_be_new_enough(release: str, found: bool, tmp_path: Path) -> None:
    toolkit = fake_nvcc(tmp_path / "toolkit", release)
    none = str(tmp_path / "none")
    assert find_nvcc({"PATH": none, "CUDA_HOME": none}) is False
    assert find_nvcc({"PATH": f"{toolkit}/bin", "CUDA_HOME": none}) is found
    assert find_nvcc({"PATH": none, "CUDA_HOME": str(toolkit)}) is found
    assert find_nvcc({"PATH": none, "CUDA_PATH": str(toolkit)}) is found
    assert find_nvcc({"PATH": none, "CUDA_HOME": none, "CUDACXX": "/anywhere"}) is True


def test_an_old_nvcc_on_path_does_not_hide_a_new_one(tmp_path: Path) -> None:
    old, new = fake_nvcc(tmp_path / "old", "12.0"), fake_nvcc(tmp_path / "new", "13.0")
    assert find_nvcc({"PATH": f"{old}/bin", "CUDA_HOME": str(new)})


PROGRAM = """
import sys, types
sys.path.insert(0, sys.argv[1])
import build_backend
build_backend._build = types.SimpleNamespace(get_requires_for_build_wheel=lambda s: [], get_requires_for_build_editable=lambda s: [])
print(build_backend.find_driver())
print(build_backend.get_requires_for_build_wheel(), build_backend.get_requires_for_build_editable({}))
"""


def asked_with_driver(version: int, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Ask the backend on a machine whose driver says that it runs CUDA `version`."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler to make a driver's library with")
    source = tmp_path / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {version}; return {version == 0:d}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    environ = {"LD_LIBRARY_PATH": str(tmp_path), "PATH": "", "CUDA_HOME": str(tmp_path), **environ}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUDA", "PACELINE", "CMAKE", "SKBUILD"))
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "cmake")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**kept, **environ},
    )


@pytest.mark.parametrize(
    ("version", "environ", "lines", "said"),
    [
        (13010, {}, ["(13, 1)", f"{NVCC} {NVCC}"], ""),
        (0, {}, ["None", "[] []"], ""),  # it fails
        (12080, {}, ["(12, 8)", "[] []"], "update the driver to 580"),
        (12080, {"PACELINE_CUDA": "ON"}, ["(12, 8)"], "error: PACELINE_CUDA=ON(.|\n)*update the driver to 580"),
    ],
)
def test_the_driver_s_library_is_asked(
    version: int, environ: dict[str, str], lines: list[str], said: str, tmp_path: Path
) -> None:
    done = asked_with_driver(version, tmp_path, **environ)
    assert done.returncode == bool(environ)
    assert done.stdout.splitlines() == lines, done.stderr
    assert re.search(said, done.stderr)
    assert bool(done.stderr) == bool(said)


def test_cmake_names_the_same_packages() -> None:
    assert f'"{build_backend.PYPI_NVCC}"' in (ROOT / "cmake" / "PacelineCuda.cmake").read_text()
