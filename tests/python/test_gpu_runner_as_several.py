"""`tests/gpu/run --as-several`: parts of one GPU stand for GPUs, and two ranks share it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner import as_several, machine, plan
from runner.stage import Stage


def stages(folder: Path, **options: Any) -> dict[str, Stage]:
    return {stage.name: stage for stage in as_several.stages(plan.Setting(build=folder, scratch=folder, **options))}


def test_parts_stand_for_gpus_and_once_more_through_the_host(tmp_path: Path) -> None:
    found = stages(tmp_path)
    for name in ("python_as_gpus", "python_through_host"):
        assert found[name].environment["PACELINE_PARTS_AS_GPUS"] == "1"
    through_host = [name for name, stage in found.items() if stage.environment.get("PACELINE_PEER_ACCESS") == "0"]
    assert through_host == ["cpp_through_host", "python_through_host"]
    setting = plan.Setting(tmp_path, tmp_path)
    limits = [stage.limit for stage in (plan.build(setting), plan.programs(setting), *found.values())]
    assert sum(limits) <= 60 * plan.MINUTES - 10, limits


def test_what_users_would_miss_most_comes_first_and_nothing_is_left_out(tmp_path: Path) -> None:
    files = [Path(one) for one in stages(tmp_path)["python_as_gpus"].command if one.endswith(".py")]
    names = [file.name for file in files]
    assert names[:2] == ["test_gradients_on_gpus.py", "test_buffers_on_gpus.py"]
    assert names[-1] == "test_graph_refusals_on_gpus.py", "before 2.12 PyTorch may take no capture after a refused one"
    assert sorted(files) == sorted(as_several.ON_FAKES.glob("test_*.py"))


def test_nccl_is_told_to_take_two_ranks_on_a_gpu_and_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(as_several, "newest_nccl", lambda path: "/carried/libnccl.so.2")
    found = stages(tmp_path)
    assert list(found)[-2:] == ["ranks_gloo", "ranks_nccl"], "what may hang comes last"
    nccl, gloo = found["ranks_nccl"], found["ranks_gloo"]
    assert nccl.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert nccl.environment["LD_PRELOAD"] == "/carried/libnccl.so.2"
    assert [one.environment["PACELINE_RANKS_BACKEND"] for one in (gloo, nccl)] == ["gloo", "nccl"]
    assert "LD_PRELOAD" not in gloo.environment
    assert not nccl.why_not


def test_a_rehearsal_runs_on_the_fake_and_says_that_nccl_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "fake_python_package").mkdir()
    found = stages(tmp_path, gpu=False, rehearsal=True)
    for name in ("python_as_gpus", "python_through_host"):
        assert found[name].environment["PYTHONPATH"].startswith(str(tmp_path / "fake_python_package"))
        assert not found[name].why_not
    assert found["ranks_nccl"].why_not == "no GPU: NCCL has nothing to run on"
    assert found["ranks_gloo"].command[-3:-1] == ["--devices", plan.HOSTS]
    (tmp_path / "fake_python_package").rmdir()
    assert "not built" in stages(tmp_path, gpu=False, rehearsal=True)["python_as_gpus"].why_not


def test_the_newest_nccl_among_packages_is_preloaded(tmp_path: Path) -> None:
    for name, version in (("old", "2.9.9"), ("new", "2.30.7"), ("lost", "2.99.0")):
        (tmp_path / name / f"nvidia_nccl_cu13-{version}.dist-info").mkdir(parents=True)
        if name != "lost":
            library = tmp_path / name / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
            library.parent.mkdir(parents=True)
            library.touch()
    path = os.pathsep.join(str(tmp_path / name) for name in ("old", "new", "lost"))
    assert machine.newest_nccl(path) == str(tmp_path / "new" / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
