"""What is said of Python's launches: that they hold GPUs up, or are held up by them, or nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from paceline.torch._run.launch import Launch, LaunchClock


def clock(*launches: tuple[float, bool | None]) -> LaunchClock:
    """Of two GPUs that have enqueued the same."""
    found = LaunchClock([True, True])
    found.add(Launch(device, *launch) for launch in launches for device in range(2))
    return found


def test_gpus_that_wait_for_python() -> None:
    text = clock((0.004, True)).explain([0.01, 0.01])
    assert "Launch-bound: a micro-batch takes a GPU 10.00 ms and Python 4.00 ms to enqueue" in text
    assert "less than 24.00 ms" in text


def test_micro_batches_that_are_long_enough_are_nothing_to_speak_of() -> None:
    assert clock((0.004, True)).explain([0.025, 0.025]) == ""


def test_who_waits_for_room_in_a_queue_is_not_launch_bound() -> None:
    text = clock((0.004, True), (0.01, False), (0.01, False)).explain([0.03, 0.03])
    assert "Launch-bound" not in text
    assert (
        "Queue full: to enqueue a micro-batch takes Python 10.00 ms while the GPUs still have work and 4.00 ms" in text
    )


def test_python_that_is_ahead_and_not_held_up_is_nothing_to_speak_of() -> None:
    assert clock((0.004, True), (0.005, False), (0.005, False)).explain([0.03, 0.03]) == ""


def test_without_a_launch_that_had_room_nothing_is_known() -> None:
    assert clock((0.01, False)).explain([0.01, 0.01]) == ""


def test_later_micro_batches_of_a_step_count_where_the_time_of_one_is_asked_for() -> None:
    launches = clock((0.004, True), (9.0, None), (9.0, None), (9.0, None))
    assert "takes a GPU 10.00 ms and Python 4.00 ms" in launches.explain([0.04, 0.04])


def test_host_devices_have_no_launches() -> None:
    found = LaunchClock([False, True])
    found.add([Launch(0, 1.0, True)])
    assert found.explain([1.0, 0.0]) == ""
    found.add([Launch(1, 0.001, True)])
    assert "takes a GPU 2.00 ms and Python 1.00 ms" in found.explain([500.0, 0.002])
