"""Parts of a GPU as devices, from Python. tests/cuda tests what happens on them."""

from __future__ import annotations

import math

import pytest

import paceline
from paceline._core.runtime import gpu_facts, why_no_devices

GPUS = gpu_facts()
SPLITTABLE = [gpu["device"] for gpu in GPUS if not gpu["why_no_partitions"]]
needs_parts = pytest.mark.skipif(not SPLITTABLE, reason="no GPU here can be split into parts")
without_gpu = pytest.mark.skipif(bool(GPUS), reason="about machines without a GPU")


def test_gpu_facts_are_of_each_gpu() -> None:
    names = [device.name for device in paceline.devices() if device.kind == "cuda"]
    assert [gpu["device"] for gpu in GPUS] == names


def test_host_devices_have_no_parts() -> None:
    host = paceline.find_device("host:0")
    assert host.part is None
    assert host.sm_count is None
    assert host.fraction == 1.0
    with pytest.raises(paceline.Unavailable, match="host:0 has no parts") as caught:
        paceline.partition(host, [0.5, 0.5])
    assert caught.value.device == "host:0"
    paceline.release_partitions("host:0")


@pytest.mark.parametrize("fractions", [[], [0.0], [-0.5, 0.5], [math.nan], [math.inf], [0.75, 0.5]])
def test_fractions_that_make_no_sense_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ValueError, match=r"partition: .*fraction"):
        paceline.partition("host:0", fractions)


@pytest.mark.parametrize("timeout", [-1.0, math.nan])
def test_timeouts_that_make_no_sense_are_refused(timeout: float) -> None:
    with pytest.raises(paceline.InvalidArgument, match="release_partitions: timeout is"):
        paceline.release_partitions("host:0", timeout=timeout)


@without_gpu
def test_without_a_gpu_the_error_says_why() -> None:
    # A build without CUDA gives no reason, so use this one.
    why = why_no_devices().get("cuda", "this build has no CUDA backend")
    for call in (lambda: paceline.partition("cuda:0", [0.5, 0.5]), lambda: paceline.find_device("cuda:0/1")):
        with pytest.raises(paceline.InvalidArgument, match=why):
            call()


@needs_parts
def test_parts_are_devices() -> None:
    gpu = paceline.find_device(SPLITTABLE[0])
    with pytest.raises(paceline.InvalidArgument, match="Call partition"):
        paceline.find_device(f"{gpu}/1")
    parts = paceline.partition(gpu, [0.5, 0.5])
    try:
        assert [part.name for part in parts] == [f"{gpu}/0", f"{gpu}/1"]
        assert [part.part for part in parts] == [0, 1]
        assert all(part.memory_space == gpu.name and part.fraction == 0.5 for part in parts)
        assert parts[0].sm_count == parts[1].sm_count
        assert "SMs (0.5 asked for)" in repr(parts[0])
        assert paceline.partition(gpu, [0.5, 0.5]) == parts
        with paceline.DeviceGroup([part.name for part in parts]) as group:
            assert group.devices == parts
    finally:
        paceline.release_partitions(gpu)


@needs_parts
def test_too_small_a_fraction_is_answered_with_the_smallest() -> None:
    with pytest.raises(paceline.InvalidArgument, match="the smallest possible fraction is"):
        paceline.partition(SPLITTABLE[0], [0.9, 1e-4])
