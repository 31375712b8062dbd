"""Which stages there are, in their order."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner import sanitizer
from runner.machine import nccl_library
from runner.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
GPU_TESTS = ROOT / "tests" / "gpu"
MINUTES = 9.5  # for everything; the limits of the stages add up to less. Each is what the stage took on an H200, and some more
HOSTS = "host:0,host:1"
# These measure nothing, and children spend most of their time loading PyTorch: they run side by side.
EXACTNESS = ("test_gpu_exactness.py", "test_gpu_collectives.py")
CHILDREN = ("test_gpu_exit.py", "test_gpu_graphs.py", "test_gpu_compile.py")
ALONE = ("test_gpu_streams.py", "test_gpu_memory.py")
# What may hang on parts of a GPU: a stage of its own, so that the others keep their results.
PARTS = ("test_gpu_overlap.py", "test_gpu_captured.py", "test_gpu_libraries.py")


@dataclass
class Setting:
    """Where the stages run, and with what."""

    build: Path
    scratch: Path
    path: str | None = None  # where programs are; None: as for this process
    python_path: str = ""
    cmake: list[str] = field(default_factory=list)
    gpu: bool = True
    rehearsal: bool = False
    given: bool = False  # the build has been finished before

    @property
    def on_host(self) -> list[str]:
        """Without a GPU what can runs on host devices."""
        return [] if self.gpu else ["--devices", HOSTS]

    def has(self, module: str) -> bool:
        """For the stages, whose path has what was carried along; that of this process has not."""
        folders = [folder for folder in self.python_path.split(os.pathsep) if folder]
        return bool(importlib.machinery.PathFinder.find_spec(module, folders) or importlib.util.find_spec(module))


def build(setting: Setting) -> Stage:
    """Configure and build the package; in a rehearsal only plan the build, because everything comes from another one."""
    folder = setting.scratch / "build" if setting.rehearsal else setting.build
    configure = [
        "cmake",
        *("-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        *("-DPACELINE_CUDA=ON", "-DPACELINE_PYTHON=ON", "-DPACELINE_EXAMPLES=ON", "-DPACELINE_GPU_TESTS=ON"),
        f"-DCMAKE_CUDA_ARCHITECTURES={'native' if setting.gpu else '90'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *setting.cmake,
    ]
    options = ["--", "-t", "query"] if setting.rehearsal else ["--parallel", str(len(os.sched_getaffinity(0)))]
    script = '"${@:3}" && cmake --build "$1" --target _core $2'
    return Stage("build", ["bash", "-c", script, "build", str(folder), " ".join(options), *configure], 65)


def programs(setting: Setting) -> Stage:
    """The rest of the build. One file that does not compile costs neither the other programs nor what runs in Python."""
    command = ["cmake", "--build", str(setting.build), "--", "-k", "0"]
    why_not = f"they are those of {setting.build}" if setting.rehearsal or setting.given else ""
    return Stage("programs", command, 18.5, ("build",), why_not)


def python_environment(setting: Setting) -> dict[str, str]:
    """For what runs in Python."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(setting.build / "python_package"), setting.python_path])),
        "PACELINE_GPU_DELAY": str(setting.build / "tests" / "gpu" / "libpaceline_test_delay.so"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what else is installed there must not change what runs
    }


def after_build(setting: Setting) -> list[Stage]:
    """Everything else. What asks for a new process, or may break the GPU for those beside it, comes last."""
    folder, gpu = setting.build, setting.gpu
    python = python_environment(setting)
    digits = ROOT / "examples" / "python" / "digits.py"
    why_no_digits = "" if gpu else "no GPU; tests/python runs it on host devices"
    if gpu and not setting.has("sklearn"):
        why_no_digits = "scikit-learn, which has the digits, is not installed"

    # With names: one that runs out of time shall tell what it was at.
    run_tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]

    def paceline(name: str, *arguments: str, limit: float, on_fake: bool = False) -> Stage:
        command = [sys.executable, "-m", "paceline", *arguments]
        fake = {"PYTHONPATH": str(folder / "fake_python_package")} if on_fake else {}
        return Stage(name, command, limit, ("build",), environment=python | fake, json_result=True)

    def script(name: str, path: Path, *arguments: str, limit: float, json: bool = True, why_not: str = "") -> Stage:
        command = [sys.executable, str(path), *arguments]
        return Stage(name, command, limit, ("build",), why_not, environment=python, json_result=json)

    def pytest(
        name: str, files: Sequence[str], limit: float, *, side_by_side: bool = False, rehearsed: str = ""
    ) -> Stage:
        # A test that hangs says where, before the stage is ended.
        command = [*run_tests, *([] if setting.rehearsal else ["-o", f"faulthandler_timeout={0.8 * limit:g}"])]
        if side_by_side and setting.has("xdist"):
            command += ["-p", "xdist", "-n", str(min(8, len(os.sched_getaffinity(0))))]
        if setting.rehearsal and rehearsed:
            command += ["-k", rehearsed]
        command += [*setting.on_host, *(str(GPU_TESTS / file) for file in files)]
        return Stage(name, command, limit, ("build",), environment=python)

    def race(name: str, *arguments: str, limit: float) -> Stage:
        path = ROOT / "benchmarks" / "python" / f"{name}.py"
        return script(name, path, "--json", "--short", *arguments, *setting.on_host, limit=limit)

    # Its folder's conftest wants an installed package, and knows no --devices.
    names = ["--noconftest", str(ROOT / "tests" / "python" / "test_torch_names.py")]
    verified = ["--partition", "0.75,0.25"] if gpu else setting.on_host
    return [
        programs(setting),
        paceline("info", "info", "--json", limit=2, on_fake=setting.rehearsal),
        *(cpp(setting, name, limit) for name, limit in (("reduction", 10), ("device", 2), ("trainer", 7), ("nccl", 5))),
        program(setting, "sum_bandwidth", "tests/gpu/gpu_sum_bandwidth", 2, json_result=True),
        program(setting, "digits_cuda", "examples/cpp/digits_cuda", 2, ["cuda:0"] if gpu else []),
        script("measure", GPU_TESTS / "measure.py", *setting.on_host, limit=25),
        script("before_forward", GPU_TESTS / "before_forward.py", *setting.on_host, limit=8),
        race("race_gpu", *(["--parts", "d"] if setting.rehearsal else []), limit=112),
        paceline("verify", "verify", "--json", "--seconds", "1" if setting.rehearsal else "5", *verified, limit=20),
        race("launch_scaling", limit=18),
        pytest("python_exactness", EXACTNESS, 26, side_by_side=True, rehearsed="not float64"),
        Stage("torch_names", [*run_tests, *names], 14, ("build",), environment=python),
        pytest("python_alone", ALONE, 60, rehearsed="not (forward or backward or 1003)"),
        pytest("python_parts", PARTS, 24),
        script("digits", digits, "--partition", "0.75,0.25", limit=16, json=False, why_not=why_no_digits),
        *sanitizer.stages(folder, gpu=gpu),
        # Side by side: a part of a GPU that hangs costs the others nothing, and each of its children loads PyTorch.
        pytest("pool", ("test_gpu_pool.py",), 18, side_by_side=True),
        pytest("python_children", CHILDREN, 48, side_by_side=True, rehearsed="compile or closed"),
        pytest("allocators", ("test_gpu_allocators.py",), 24),
        pytest("sticky", ("test_gpu_sticky.py",), 24),
    ]


def program(
    setting: Setting,
    name: str,
    path: str,
    limit: float,
    arguments: list[str] | None = None,
    *,
    json_result: bool = False,
) -> Stage:
    program = setting.build / path
    why_not = f"not built in {setting.build}" if setting.rehearsal and not program.exists() else ""
    return Stage(name, [str(program), *(arguments or [])], limit, ("build",), why_not, json_result=json_result)


def cpp(setting: Setting, name: str, limit: float, *arguments: str) -> Stage:
    """A C++ test that was not built is skipped: GoogleTest may be missing, and the rest goes on without it. `programs` says why."""
    path = setting.build / "tests" / "gpu" / f"test_gpu_{name}"
    on_fake = path.with_name(f"{path.name}_on_fake")
    environment = {"PACELINE_NCCL_LIBRARY": nccl_library(setting.python_path)} if name == "nccl" and setting.gpu else {}
    if setting.rehearsal and on_fake.exists():
        path = on_fake
    missing = f'[ -x "{path}" ] || {{ echo "not built: no GoogleTest, or as the stage programs says"; echo "[  PASSED  ] 0 tests."; exit 0; }}'
    command = ["bash", "-c", f'{missing}; exec "{path}" --gtest_brief=1 "$@"', name, *arguments]
    return Stage(f"cpp_{name}", command, limit, ("build",), environment=environment)
