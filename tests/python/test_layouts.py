"""`StagePlanner.layouts`: which way of laying out a model is best, by what is known of its blocks and devices."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import InvalidArgument
from paceline._core.engine import StagePlanner
from paceline.plan import BlockCost, StageDevice

MIB = 1 << 20


def ranked(limit: int | None, **options: Any) -> list[dict[str, Any]]:
    block = BlockCost(
        forward_fixed=1e-4,
        forward_per_item=4e-4,
        backward_fixed=2e-4,
        backward_per_item=8e-4,
        parameter_bytes=64 * MIB,
        saved_bytes_per_item=MIB,
        boundary_bytes_per_item=MIB // 16,
    )
    devices = [StageDevice(f"gpu:{i}", memory_bytes=limit, memory_space=i) for i in range(3)]
    planner = StagePlanner([block] * 6, devices, measure=False)
    planner.set_link(0.0, 1e10)
    planner.know(*planner.known)
    found = planner.layouts(48, micro_batches=8, **options)
    assert sorted(layout["kind"] for layout in found) == ["data parallel", "pipeline", "replicas of pipelines"]
    return found


def test_what_fits_everywhere_is_data_parallel() -> None:
    first = ranked(None)[0]
    assert first["kind"] == "data parallel"
    assert first["items"] == [16, 16, 16]
    assert first["reduction_seconds"] == pytest.approx(4 / 3 * 6 * 16 * MIB / 1e10)
    assert "bubble of a pipeline" in first["reason"]


def test_what_fits_no_device_is_cut() -> None:
    found = ranked(300 * MIB)
    first = found[0]
    assert first["kind"] == "pipeline"
    (plan,) = first["pipelines"]
    assert plan.cuts[0] == 0
    assert max(first["bytes"]) <= 300 * MIB
    data = next(layout for layout in found if layout["kind"] == "data parallel")
    assert not data["fits"]
    assert "384.0 MiB" in data["reason"]


def test_gradient_bytes_may_be_given() -> None:
    first = ranked(None, weight_bytes=[62 * MIB] * 6, gradient_bytes=[2 * MIB] * 6)[0]
    assert first["reduction_seconds"] == pytest.approx(4 / 3 * 6 * 2 * MIB / 1e10)
    with pytest.raises(InvalidArgument, match="weight_bytes is of length 1 instead of 6"):
        ranked(None, weight_bytes=[1])
    with pytest.raises(InvalidArgument, match="overlap"):
        ranked(None, overlap=2.0)
