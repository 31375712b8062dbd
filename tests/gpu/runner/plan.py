"""Which stages there are, in their order."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from runner import sanitizer
from runner.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
GPU_TESTS = ROOT / "tests" / "gpu"
# These measure nothing, and children spend most of their time loading PyTorch: they run side by side.
EXACTNESS = ("test_gpu_exactness.py",)
CHILDREN = ("test_gpu_exit.py", "test_gpu_graphs.py")
ALONE = ("test_gpu_streams.py", "test_gpu_collectives.py", "test_gpu_memory.py")


def build(folder: Path, cmake: list[str], *, gpu: bool, jobs: int) -> Stage:
    configure = [
        "cmake",
        *("-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        *("-DPACELINE_CUDA=ON", "-DPACELINE_PYTHON=ON", "-DPACELINE_EXAMPLES=ON", "-DPACELINE_GPU_TESTS=ON"),
        f"-DCMAKE_CUDA_ARCHITECTURES={'native' if gpu else '90'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *cmake,
    ]
    command = [
        "bash",
        "-c",
        '"${@:3}" && cmake --build "$1" --parallel "$2"',
        "build",
        str(folder),
        str(jobs),
        *configure,
    ]
    return Stage("build", command, 300)


def probes(scratch: Path, *, gpu: bool) -> list[Stage]:
    nvcc = shutil.which("nvcc")
    arch = "native" if gpu else "sm_90"
    script = f'nvcc -std=c++20 -arch={arch} "{GPU_TESTS / "probe.cu"}" -o "{scratch}/probe" && exec "{scratch}/probe"'
    return [
        Stage("probe", ["bash", "-c", script], 90, why_not="" if nvcc else "no nvcc", json_result=True),
        Stage("probe_torch", [sys.executable, str(GPU_TESTS / "probe_torch.py")], 90, json_result=True),
    ]


def after_build(folder: Path, python_path: str, *, gpu: bool) -> list[Stage]:
    """Everything else. Where there is no GPU, on host devices as far as it goes."""
    python = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "python_package"), python_path])),
        "PACELINE_GPU_DELAY": str(folder / "tests" / "gpu" / "libpaceline_test_delay.so"),
    }
    on_host = [] if gpu else ["--devices", "host:0,host:1"]
    parts = ["--partition", "0.75,0.25"] if gpu else on_host
    race, digits = ROOT / "benchmarks" / "python", ROOT / "examples" / "python" / "digits.py"
    why_no_digits = "" if gpu else "no GPU; tests/python runs it on host devices"
    if gpu and not _is_there("sklearn", python_path):
        why_no_digits = "scikit-learn, which has the digits, is not installed"

    def paceline(name: str, *arguments: str, limit: float = 60, json_result: bool = False) -> Stage:
        command = [sys.executable, "-m", "paceline", *arguments]
        return Stage(name, command, limit, ("build",), environment=python, json_result=json_result)

    def script(
        name: str, path: Path, *arguments: str, limit: float, json_result: bool = True, why_not: str = ""
    ) -> Stage:
        command = [sys.executable, str(path), *arguments]
        return Stage(name, command, limit, ("build",), why_not, environment=python, json_result=json_result)

    def pytest(name: str, files: tuple[str, ...], limit: float, *, side_by_side: bool = False) -> Stage:
        # With names: one that runs out of time shall tell what it was at.
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *on_host]
        if side_by_side and _is_there("xdist", python_path):
            command += ["-n", "8"]
        command += [str(GPU_TESTS / file) for file in files]
        return Stage(name, command, limit, ("build",), environment=python)

    stages = [paceline("info", "info"), paceline("info_json", "info", "--json", json_result=True)]
    stages += [_cpp(folder, name, limit) for name, limit in (("reduction", 60), ("device", 30), ("trainer", 90))]
    stages.append(_program("sum_bandwidth", folder / "tests/gpu/gpu_sum_bandwidth", 30, json_result=True))
    stages.append(_program("digits_cuda", folder / "examples/cpp/digits_cuda", 40, [] if not gpu else ["cuda:0"]))
    stages += [
        pytest("python_exactness", EXACTNESS, 100, side_by_side=True),
        pytest("python_children", CHILDREN, 120, side_by_side=True),
        pytest("python_alone", ALONE, 150),
        script("digits", digits, "--devices", "cuda:0", limit=60, json_result=False, why_not=why_no_digits),
        script(
            "digits_in_parts", digits, "--partition", "0.75,0.25", limit=60, json_result=False, why_not=why_no_digits
        ),
        paceline("verify", "verify", "--json", "--seconds", "10", *parts, limit=60, json_result=True),
        script("race", race / "race_gpu.py", "--json", "--short", *on_host, limit=150),
        script("launch_scaling", race / "launch_scaling.py", "--json", "--short", *on_host, limit=45),
        *sanitizer.stages(folder, gpu=gpu),
        pytest("sticky", ("test_gpu_sticky.py",), 60),
    ]
    return stages


def _is_there(module: str, python_path: str) -> bool:
    """For the stages, whose path has what was carried along; that of this process has not."""
    folders = [folder for folder in python_path.split(os.pathsep) if folder]
    return bool(importlib.machinery.PathFinder.find_spec(module, folders) or importlib.util.find_spec(module))


def _program(
    name: str, path: Path, limit: float, arguments: list[str] | None = None, *, json_result: bool = False
) -> Stage:
    return Stage(name, [str(path), *(arguments or [])], limit, ("build",), json_result=json_result)


def _cpp(folder: Path, name: str, limit: float) -> Stage:
    """A C++ test that was not built is skipped: GoogleTest may be missing, and the rest goes on without it."""
    path = folder / "tests" / "gpu" / f"test_gpu_{name}"
    missing = f'[ -x "{path}" ] || {{ echo "not built: no GoogleTest"; echo "[  PASSED  ] 0 tests."; exit 0; }}'
    return Stage(f"cpp_{name}", ["bash", "-c", f'{missing}; exec "{path}" --gtest_brief=1'], limit, ("build",))
