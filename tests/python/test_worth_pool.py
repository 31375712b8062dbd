"""What the devices of a pool are worth: `paceline.sim.worth_pool`."""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument, _replay_pool
from paceline._core.plan import PoolState
from paceline._replay_pool_room import Waiting
from paceline.sim import what_if_pool, worth_pool


def pool_ledger(
    path: Path,
    seconds: Sequence[float],
    *,
    every: float,
    jobs: int = 40,
    names: Sequence[str] = (),
    needs: Sequence[bool] | None = None,
    released: Mapping[int, int] | None = None,
    lost: Mapping[int, int] | None = None,
    restored: Mapping[int, int] | None = None,
    warms: int = 0,
    waits: bool = False,
    after: Sequence[int] = (),
    cancelled: Sequence[int] = (),
    pause: Sequence[int] = (),
) -> list[str]:
    """Of a pool whose devices take so long for a job, of which one comes each `every` seconds.

    `needs`: the devices on which every other job may run. `released`, `lost`, `restored`: devices that are so before a job, by its number.
    `warms`: so many jobs of the pool itself for the last device, before the others. `waits`: whether a submit waits for room. `after`: jobs that come after the one
    before. `cancelled`: jobs that are cancelled when the next one comes, or would come. `pause`: jobs that do not come.
    """
    pool = PoolState(
        placement="any",
        decline=0.5,
        probe_seconds=5.0,
        samples=3,
        margin=1.3,
        memory_margin_bytes=0.0,
        patience=[0.1, 1, 60, 60],
    )
    pool.write_to(str(path))
    for device in range(len(seconds)):
        name = names[device] if names else f"d:{device}"
        pool.add_device(0.0, name=name, device_class=f"c{device}", labels=["d"], memory_bytes=1e9, accepted=[])
    pool.add_kind(name="k", sizes=[1], max_delay_seconds=0.0, padded=False, idempotent=False)
    need = 0 if needs is None else pool.add_need(accepted=needs)
    ends: list[tuple[float, int, int]] = []
    made: list[int] = []

    def decided(at: float, text: str) -> None:
        for start in json.loads(text or "{}").get("starts", ()):
            device = start["devices"][0]
            heapq.heappush(ends, (at + seconds[device], start["run"], device))

    last = pool.add_need(accepted=[device + 1 == len(seconds) for device in range(len(seconds))])
    for _ in range(warms):
        decided(0.0, pool.submit(0.0, kind=0, need=last, own=True)[1])
    for job in range(jobs + 1):
        at = every * job if job < jobs else float("inf")
        while ends and ends[0][0] <= at:
            end, run, device = heapq.heappop(ends)
            pool.measure(end, device=device, kind=0, model=(0.0, seconds[device]), samples=3)
            decided(end, pool.finish(end, run=run, result="completed", seconds=seconds[device]))
        for devices, change in ((released, pool.retire), (lost, pool.lose), (restored, pool.restore)):
            if devices and job in devices:
                decided(at, change(at, device=devices[job]))
        if job - 1 in cancelled:
            decided(at, pool.cancel(at, job=made[-1]))
        if job < jobs and job not in pause:
            before = made[-1:] if job in after else []
            one, text = pool.submit(at, kind=0, need=0 if job % 2 else need, waits=waits, after=before)
            made.append(one)
            decided(at, text)
    del pool
    return path.read_text().splitlines(keepends=True)


def test_the_requests_of_a_pool_are_served_again_by_each_subset(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.04], every=0.02)
    found = worth_pool(lines, {"d:0": 1.0, "d:1": 0.5}, latency=0.02)
    by_devices = {" ".join(one.devices): one for one in found.choices}
    assert set(by_devices) == {"d:0", "d:1", "d:0 d:1"}
    fast = by_devices["d:0"]  # it serves all of them alone, each at once
    assert (fast.lost, fast.times.outcomes) == (0, {"completed": 40})
    assert fast.seconds == pytest.approx(0.01)
    assert fast.cost == pytest.approx(1.0 * (39 * 0.02 + 0.01) / 3600 / 40 * 1000)
    assert by_devices["d:1"].seconds > 0.02
    assert found.cheapest is fast
    assert worth_pool(lines, {"d": 1.0}, latency=0.001).cheapest is None
    assert "No subset serves all requests" in str(worth_pool(lines, latency=0.001))
    assert what_if_pool(lines, remove=["d:1"]) == fast.times
    with pytest.raises(InvalidArgument, match="latency is 0"):
        worth_pool(lines, latency=0)
    with pytest.raises(InvalidArgument, match="no request has completed"):
        worth_pool(lines[:4])


def test_parts_of_a_gpu_are_paid_once_in_a_pool(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.04], every=0.02, names=["cuda:0/0", "cuda:0/1"])
    for one in worth_pool(lines, {"cuda:0": 2.0}).choices:
        assert one.cost == pytest.approx(
            2.0 * one.times.elapsed_seconds / 3600 / one.times.outcomes["completed"] * 1000
        )


def test_of_many_devices_those_stay_without_which_requests_are_lost(tmp_path: Path) -> None:
    only = [True, *[False] * 6]  # the slowest device is the only one that may serve half of the requests
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.03, *[0.01] * 6], every=0.05, needs=only)
    found = worth_pool(lines, {"d": 1.0})
    assert all(one.devices[0] == "d:0" and one.lost == 0 for one in found.choices)
    assert found.cheapest is not None
    assert found.cheapest.devices == ["d:0"]


def test_subsets_that_lose_requests_stand_behind_those_that_lose_none(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.04, 0.01], every=0.05, needs=[True, False])
    found = worth_pool(lines, {"d": 1.0})
    *good, worst = found.choices
    assert all(one.devices[0] == "d:0" and one.lost == 0 for one in good)
    assert worst.devices == ["d:1"]
    assert worst.lost >= 20
    assert any(re.search(r"^Fewer complete with d:1: \d+ \w+", note) for note in found.notes)
    assert worst.seconds < found.fastest.seconds == good[0].seconds
    waiting = worth_pool(
        pool_ledger(tmp_path / "waits.jsonl", [0.04, 0.01], every=0.05, needs=[True, False], waits=True)
    )
    (lost,) = {one.lost for one in waiting.choices} - {0}
    assert f"Fewer complete with d:1: {lost} never start." in waiting.notes


def test_devices_that_were_released_serve_in_each_subset(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.04, 0.01], every=0.02, released={20: 1})
    found = worth_pool(lines, {"d": 1.0})
    by_devices = {" ".join(one.devices): one for one in found.choices}
    assert by_devices["d:1"].times.outcomes == {"completed": 40}
    assert by_devices["d:1"].seconds == pytest.approx(0.01)
    assert by_devices["d:0 d:1"].seconds < found.measured.p99_seconds
    assert any("Devices were released" in note for note in found.notes)
    assert not any("d:1 ran requests in" in note for note in found.notes)  # it was idle by wish
    assert what_if_pool(lines, remove=["d:0"]) == by_devices["d:1"].times
    assert what_if_pool(lines).p99_seconds > by_devices["d:0 d:1"].seconds  # nothing is removed, so the release stays


def test_a_device_that_came_back_after_it_was_lost_serves_again(tmp_path: Path) -> None:
    changes: Any = {"lost": {10: 1}, "restored": {15: 1, 30: 1}, "released": {20: 1}}
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.04, 0.01], every=0.02, **changes)
    assert what_if_pool(lines, remove=["d:0"]).outcomes == {"completed": 40}  # some wait for it
    (alone,) = [one for one in worth_pool(lines, {"d": 1.0}).choices if one.devices == ["d:1"]]
    assert alone.lost == 0


def test_a_ledger_is_read_once_and_many_devices_are_not_all_combined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()

    def count(name: str) -> None:
        call = getattr(_replay_pool, name)

        def counted(*given: Any) -> Any:
            calls[name] += 1
            return call(*given)

        monkeypatch.setattr(_replay_pool, name, counted)

    count("_pool_of")
    count("with_kinds_kept")
    worth_pool(pool_ledger(tmp_path / "two.jsonl", [0.01, 0.04], every=0.02))
    assert calls == {"_pool_of": 1 + 3, "with_kinds_kept": 1}  # the ledger as it was, and each subset
    calls.clear()
    worth_pool(pool_ledger(tmp_path / "eight.jsonl", [0.01 + 0.001 * at for at in range(8)], every=0.02))
    assert calls["_pool_of"] <= 1 + 1 + sum(range(2, 9))


def test_a_table_of_many_subsets_of_a_pool_is_short(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.02 + 0.003 * at for at in range(5)], every=0.01)
    found = worth_pool(lines)
    rows = str(found).splitlines()
    assert len(found.choices) == 31
    assert any(row.startswith("and ") and "other subset" in row for row in rows)
    assert len(rows) < 24 + 12


def test_a_device_of_a_pool_that_stands_idle_is_named_with_the_cure(tmp_path: Path) -> None:
    busy = worth_pool(pool_ledger(tmp_path / "busy.jsonl", [0.01, 0.01], every=0.005, jobs=100))
    assert not any("less than 70%" in note for note in busy.notes)
    idle = worth_pool(pool_ledger(tmp_path / "idle.jsonl", [0.01, 0.01], every=0.02, released={0: 1}))
    assert "d:1 has run nothing." in idle.notes
    (note,) = [note for note in idle.notes if "less than 70%" in note]
    assert note.startswith("d:0 ran requests in 51% of the time")
    lone = pool_ledger(tmp_path / "lone.jsonl", [0.01], every=0.02)
    for found in (worth_pool(lone, {"d": 1.0}), worth_pool(lone, latency=0.001)):  # the best subset has the device
        assert any("Let Pool(autoscale=) release it" in note for note in found.notes)
    assert "autoscale" in note


def test_the_latency_of_a_pool_has_an_error(tmp_path: Path) -> None:
    found = worth_pool(pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.04], every=0.03, jobs=20))
    by_devices = {" ".join(one.devices): one for one in found.choices}
    assert by_devices["d:0"].error == pytest.approx(0.0)  # each request takes as long as the others
    parts = [0.04 + 0.01 * (2 * part + 1) for part in range(10)]  # each request waits 0.01 s longer for d:1
    mean = sum(parts) / 10
    spread = (sum((part - mean) ** 2 for part in parts) / 9) ** 0.5
    assert by_devices["d:1"].error == pytest.approx(spread / 10**0.5 / mean)
    assert "+-" in str(found)
    few = worth_pool(pool_ledger(tmp_path / "few.jsonl", [0.01], every=0.02, jobs=19))
    assert few.fastest.error is None
    assert "p99 10 ms" in str(few)


def test_what_warms_a_device_does_not_wait_for_it_where_it_is_left_out(tmp_path: Path) -> None:
    found = worth_pool(pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.001], every=0.02, warms=12))
    (alone,) = [one for one in found.choices if one.devices == ["d:0"]]
    assert (alone.lost, alone.times.outcomes) == (0, {"completed": 40})


def test_a_moment_in_which_a_device_was_slow_is_not_taken_for_its_speed(tmp_path: Path) -> None:
    lines = pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.04], every=0.02)
    last = max(number for number, line in enumerate(lines) if '"measure": {"device": 0' in line)
    entry = json.loads(lines[last])
    entry["measure"]["model"] = [0.0, 1.0]
    lines[last] = json.dumps(entry) + "\n"
    (alone,) = [one for one in worth_pool(lines).choices if one.devices == ["d:0"]]
    assert alone.times.p99_seconds == pytest.approx(0.01)


def test_a_job_whose_submit_waits_for_room_waits_longer_for_fewer_devices(tmp_path: Path) -> None:
    options: Any = {"every": 0.006, "after": [39], "cancelled": [30]}
    found = worth_pool(pool_ledger(tmp_path / "waits.jsonl", [0.01, 0.01], waits=True, **options))
    assert found.measured.outcomes == {"completed": 40}
    for one in found.choices:
        alone = len(one.devices) == 1  # then one is cancelled before it begins
        assert one.lost == alone == one.times.outcomes.get("cancelled", 0)
        assert not one.times.outcomes.get("rejected")
        assert one.times.elapsed_seconds == pytest.approx(0.01 * 39 if alone else 0.006 * 39 + 0.01, abs=0.006)
        assert one.seconds == pytest.approx(0.01 * 39 - 0.006 * 39 if alone else 0.01, abs=0.011)
    refused = worth_pool(pool_ledger(tmp_path / "refused.jsonl", [0.01, 0.01], **options))
    assert refused.choices[-1].lost > 5


def test_a_burst_after_the_last_job_that_waited_was_cancelled_is_served(tmp_path: Path) -> None:
    for last in range(
        46, 54
    ):  # alone, one device has not begun with the last job before the pause, which waits for room until then
        options: Any = {"every": 0.006, "jobs": 140, "waits": True, "pause": range(40, 100), "cancelled": [last]}
        lines = pool_ledger(tmp_path / "pool.jsonl", [0.01, 0.01], **options)
        assert what_if_pool(lines, remove=["d:1"]).outcomes == {"completed": 79, "cancelled": 1}


def test_a_job_that_waits_for_the_submit_of_another_keeps_none_back_that_has_room() -> None:
    full, made = {0}, list[int]()
    ids: dict[int, int] = {}

    class Rooms:
        def has_room(self, *, kind: int, tenant: int) -> bool:
            return kind not in full

    def happens(name: str, arguments: Any, entry: Any) -> None:
        made.append(entry["job"])
        ids[entry["job"]] = len(made)

    rooms: Any = Rooms()
    waiting = Waiting(rooms, ids, happens)
    for job, kind, waits, after in ((0, 0, True, []), (1, 1, False, [0]), (2, 1, True, [1]), (3, 1, True, [])):
        waiting.comes({"job": job, "submit": {"kind": kind, "waits": waits, "after": after}})
    assert made == [3]
    full.clear()
    waiting.go_on()
    assert made == [3, 0, 1, 2]
