"""`tests/gpu/run --as-several`: what several GPUs do, on a machine with one. Its parts stand for GPUs, and two processes share it as ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runner import plan
from runner.machine import newest_nccl
from runner.stage import Stage

ON_FAKES = plan.ROOT / "tests" / "cuda" / "python"
# What users would miss most comes first, and a capture that fails, or a hang, breaks little after it.
_FIRST = [
    "gradients",
    "buffers",
    "collectives",
    "overlap",
    "sharded",
    "steps",
    "arrivals",
    "failures",
]
_LAST = ["graphs", "graph_overlap", "graph_refusals"]
PARTS = {"PACELINE_PARTS_AS_GPUS": "1"}
THROUGH_HOST = {"PACELINE_PEER_ACCESS": "0"}
# Two ranks on one GPU share what NCCL's kernels take, and need as few as this; without NVLS, which needs a switch.
NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def in_order() -> list[Path]:
    """The files of tests that run on fakes of several GPUs, in the order in which they are worth most."""

    def place(file: Path) -> tuple[int, str]:
        topic = file.stem.removeprefix("test_").removesuffix("_on_gpus")
        if topic in _LAST:
            return len(_FIRST) + 1 + _LAST.index(topic), topic
        word = topic.partition("_")[0]
        return (_FIRST.index(word) if word in _FIRST else len(_FIRST)), topic

    return sorted(ON_FAKES.glob("test_*.py"), key=place)


def stages(setting: plan.Setting) -> list[Stage]:
    """What may hang comes last."""
    python = plan.python_environment(setting)
    on_fake = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(setting.build / "fake_python_package"), setting.python_path]))
    }
    run_tests = [sys.executable, "-m", "pytest", "-v", "--durations=15", "-p", "no:cacheprovider"]
    why_not = ""
    if setting.rehearsal and not (setting.build / "fake_python_package").is_dir():
        why_not = f"not built in {setting.build}: the package with the fake"

    def cpp(name: str, **environment: str) -> Stage:
        stage = plan.cpp(setting, "trainer", 10, "--gtest_filter=*TwoGpus:*AllGpus")
        stage.name = name
        stage.environment = {**stage.environment, "PACELINE_FAKE_GPUS": "1", **environment}
        return stage

    def as_on_fakes(name: str, limit: float, **environment: str) -> Stage:
        """The tests that run on fakes of several GPUs. Those that need a fake are skipped."""
        command = [*run_tests, *([] if setting.rehearsal else ["-o", f"faulthandler_timeout={0.8 * limit:g}"])]
        if setting.has("xdist"):  # on the GPU each process divides it, and they take turns
            command += ["-p", "xdist", "-n", str(min(4 if setting.gpu else 8, len(os.sched_getaffinity(0))))]
        told = {**python, **(on_fake if setting.rehearsal else {}), **PARTS, **environment}
        return Stage(name, [*command, *map(str, in_order())], limit, ("build",), why_not, environment=told)

    def real(name: str, files: Sequence[str], limit: float, chosen: str = "", why_not: str = "", **more: str) -> Stage:
        command = [*run_tests, *(["-k", chosen] if chosen and setting.gpu else []), *setting.on_host]
        paths = [str(plan.GPU_TESTS / file) for file in files]
        return Stage(name, [*command, *paths], limit, ("build",), why_not, environment=python | more)

    no_gpu = "" if setting.gpu else "no GPU: NCCL has nothing to run on"
    preloaded = newest_nccl(setting.python_path)
    nccl = NCCL | ({"LD_PRELOAD": preloaded} if preloaded else {})
    several = "" if setting.gpu else "no GPU: the stages before it have run these on the fake"
    return [
        cpp("cpp_as_gpus"),
        cpp("cpp_through_host", **THROUGH_HOST),
        as_on_fakes("python_as_gpus", 75),
        as_on_fakes("python_through_host", 75, **THROUGH_HOST),
        real("whole_tests_as_gpus", (*plan.EXACTNESS, *plan.ALONE, *plan.PARTS), 75, "as_gpus", several),
        real("ranks_gloo", ["test_gpu_ranks.py"], 40, PACELINE_RANKS_BACKEND="gloo"),
        real("ranks_nccl", ["test_gpu_ranks.py"], 40, why_not=no_gpu, PACELINE_RANKS_BACKEND="nccl", **nccl),
    ]
