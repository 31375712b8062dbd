"""`Pool.what_if`: the wait with other devices."""

from __future__ import annotations

import math
import time

import pytest

torch = pytest.importorskip("torch")

from paceline import InvalidArgument  # noqa: E402
from pool_support import pool_of  # noqa: E402
from scale_support import looked, scripted  # noqa: E402


def test_what_if_predicts_the_wait_of_other_devices() -> None:
    engine, scale = scripted(2)
    engine.work, engine.jobs = 0.6, 6.0
    looked(scale, 5)
    now, less = scale.wait_of((), ()), scale.wait_of(["host:1"], ())
    assert (now["devices"], less["devices"]) == (2, 1)
    assert now["busy"] == pytest.approx(0.6)
    assert less["busy"] == pytest.approx(1.2)
    assert math.isinf(less["wait_seconds"])
    assert 0 < now["wait_seconds"] < 1
    more = scale.wait_of((), ["host:0", 0.5])
    assert more["devices"] == 4
    assert more["busy"] == pytest.approx(0.6 / 1.75)
    assert more["wait_seconds"] < now["wait_seconds"]
    assert scale.wait_of(["host:0", "host:1"], ())["devices"] == 0
    with pytest.raises(InvalidArgument, match="remove has 'host:7'"):
        scale.wait_of(["host:7"], ())
    for wrong in ("host:7", 0.0, -1.0, math.inf):
        with pytest.raises(InvalidArgument, match="add has"):
            scale.wait_of((), [wrong])
    engine.waiting = 0.5
    looked(scale)
    assert scale.wait_of((), ())["wait_seconds"] == pytest.approx(now["wait_seconds"] + 0.5, abs=0.1)


def test_what_if_says_that_it_knows_nothing_before_the_first_job_has_run() -> None:
    with pool_of(2) as pool:
        with pytest.raises(InvalidArgument, match="nothing is known of the work yet"):
            pool.what_if(remove=["host:1"], add=[1.0])
        assert [pool.submit(lambda _: time.sleep(0.001)).result() for _ in range(3)] == [None] * 3
        answer = pool.what_if(remove=["host:1"], add=[1.0])  # at once, although a look has just been
    assert answer["devices"] == 2
    assert answer["busy"] > 0
