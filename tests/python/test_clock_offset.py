"""By how much two clocks of a trainer's spans differ."""

from __future__ import annotations

import pytest

from paceline.torch._trainer.telemetry import clock_offset

OFFSET = 10**18


class Clocks:
    """Each reading takes 100 ns, but for those before which the thread is switched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, switches: set[int]) -> None:
        self.now, self.reads, self.switches = 0, 0, switches
        monkeypatch.setattr("paceline.torch._trainer.telemetry.time.perf_counter_ns", self.read)
        monkeypatch.setattr("paceline.torch._trainer.telemetry.time.time_ns", lambda: self.read() + OFFSET)

    def read(self) -> int:
        self.now += 5_000_000 if self.reads in self.switches else 100
        self.reads += 1
        return self.now


@pytest.mark.parametrize(
    ("switches", "reads"),
    [(set(), 3), ({1}, 6), ({2, 4}, 9), (set(range(1, 24, 3)), 24)],
    ids=["none", "before the second clock", "twice", "always"],
)
def test_a_switch_of_threads_between_two_clocks_does_not_count(
    monkeypatch: pytest.MonkeyPatch, switches: set[int], reads: int
) -> None:
    clocks = Clocks(monkeypatch, switches)
    always = len(switches) == 8
    assert abs(clock_offset() - OFFSET) <= (2_500_100 if always else 2_000)
    assert clocks.reads == reads


def test_the_offset_is_that_of_the_machines_clocks() -> None:
    assert abs(clock_offset() - clock_offset()) < 10**9
