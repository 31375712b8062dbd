"""What is said of Python's launches: that they hold GPUs up, or are held up by them, or nothing."""

from __future__ import annotations

import sys
import threading

import pytest

pytest.importorskip("torch")

from paceline.sim import launch_rate
from paceline.torch._run.launch import Launch, LaunchClock

BOUND = "Launch-bound: a micro-batch takes a GPU 10.00 ms and Python 4.00 ms to enqueue"
FULL = "Queue full: to enqueue a micro-batch takes Python 10.00 ms while the GPUs still have work and 4.00 ms"
ROOM = (0.004, True)


@pytest.mark.parametrize(
    ("launches", "busy", "said"),
    [
        ([ROOM], 0.01, BOUND),
        ([ROOM], 0.025, ""),  # long enough
        ([ROOM, (0.01, False), (0.01, False)], 0.03, FULL),  # who waits for room in a queue is not launch-bound
        ([ROOM, (0.005, False), (0.005, False)], 0.03, ""),  # ahead, and not held up
        ([(0.01, False)], 0.01, ""),  # nothing is known without a launch that had room
        ([ROOM, (9.0, None), (9.0, None), (9.0, None)], 0.04, BOUND),  # later ones of a step count for the time of one
    ],
)
def test_what_holds_two_gpus_up_is_said(launches: list[tuple[float, bool | None]], busy: float, said: str) -> None:
    clock = LaunchClock([True, True])
    clock.add(Launch(device, *launch) for launch in launches for device in range(2))
    text = clock.explain([busy, busy])
    assert text.startswith(said)
    assert bool(text) == bool(said)
    assert ("less than 24.00 ms" in text) == (said == BOUND)


def test_where_launching_sets_the_pace_processes_are_named_with_what_they_would_take() -> None:
    clock = LaunchClock([True] * 8)
    clock.add(Launch(device, 0.012, True) for device in range(8))
    alone = 0.012 * launch_rate(8) / (8 * launch_rate(1))
    assert f"8 processes (paceline run) would take about {1e3 * alone:.2f} ms" in clock.explain([0.001] * 8)
    assert "processes" not in clock.explain([0.0119] * 8)  # the GPUs are hardly faster
    alone_clock = LaunchClock([True])
    alone_clock.add([Launch(0, 0.012, True)])
    assert "processes" not in alone_clock.explain([0.001])


def test_host_devices_have_no_launches() -> None:
    found = LaunchClock([False, True])
    found.add([Launch(0, 1.0, True)])
    assert found.explain([1.0, 0.0]) == ""
    found.add([Launch(1, 0.001, True)])
    assert "takes a GPU 2.00 ms and Python 1.00 ms" in found.explain([500.0, 0.002])


def test_any_thread_may_read_while_steps_add() -> None:
    clock, over = LaunchClock([True] * 2), threading.Event()

    def step() -> None:
        while not over.is_set():
            clock.add([Launch(0, 0.004, True), Launch(1, 0.004, True)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=step)
    thread.start()
    try:
        for _ in range(1000):
            clock.explain([1.0, 1.0])
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
