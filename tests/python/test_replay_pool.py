"""`Pool.write_ledger`, `paceline.sim.replay_pool` and `what_if_pool`, and what `paceline replay` prints of a pool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline._cli import main
from paceline._core.plan import PoolState
from paceline.balance import Balancer
from paceline.sim import replay_pool, what_if_pool
from paceline.torch import Pool
from pool_support import Held, pool_of
from test_worth_pool import pool_ledger
from torch_support import hosts

PLACEMENTS = ["auto", "any", "round_robin", "least_outstanding", "weighted", "earliest_finish"]
OPTIONS: dict[str, Any] = {
    "decline": 0.5,
    "probe_seconds": 0.5,
    "samples": 1,
    "margin": 1.3,
    "memory_margin_bytes": 1.0,
    "patience": [0.1, 1.0, 60.0, 60.0],
}


class Script:
    """Random events for the decisions of a pool, which writes its ledger."""

    def __init__(self, seed: int, placement: str, path: Path) -> None:
        self.rng, self.pool = random.Random(seed), PoolState(placement=placement, **OPTIONS)
        self.pool.write_to(str(path))
        self.custom = placement == "custom"
        self.now, self.kinds, self.devices, self.needs, self.tenants = 0.0, 0, 0, 1, 1
        self.runs: dict[int, int] = {}
        self.jobs: list[int] = []
        self.forgotten = 0
        self.models: list[bool] = []  # whether kinds have one
        self.add_device()
        self.add_kind()

    def happens(self, event: str, **arguments: Any) -> int | None:
        self.now += self.rng.choice([0.0, 1e-3, 0.1, 1 / 3])
        if self.custom:  # half of the answers are no device, or a busy one
            self.pool.chose([self.rng.choice([None, *range(self.devices)]) for _ in range(50)])
        found = getattr(self.pool, event)(self.now, **arguments)
        job, text = found if event == "submit" else (None, found)
        decided = json.loads(text or "{}")
        for start in decided.get("starts", ()):
            self.runs[start["run"]] = start["kind"]
        return job

    def add_device(self) -> None:
        number = self.devices
        self.devices += 1
        self.happens(
            "add_device",
            name=f"d:{number}",
            device_class=self.rng.choice(["a", 'b "\n'])[: 1 + number],
            labels=["x"],
            memory_bytes=self.rng.choice([30.0, float("inf")]),
            shares_memory_of=self.rng.choice([None, 0]) if number else None,
            accepted=[self.rng.random() < 0.7 for _ in range(self.needs - 1)],
        )

    def add_kind(self, number: int | None = None) -> None:
        model = self.rng.random() < 0.5
        number = self.kinds if number is None else number
        made = self.pool.add_kind(
            name=f"k{number}",
            sizes=[1, 2, 4] if self.rng.random() < 0.6 else [1],
            max_delay_seconds=self.rng.choice([0.0, 0.05]),
            padded=number % 2 == 1,
            idempotent=self.rng.random() < 0.5,
            queue_limit=self.rng.choice([0, 5]),
            model=f"m{number}" if model else "",
            resident_bytes=10.0 if model else 0.0,
            reload_seconds=0.1 if model else 0.0,
            peak_bytes=self.rng.choice([0.0, 3.0]),
            peak_bytes_per_item=self.rng.choice([0.0, 1.0]),
        )
        assert made == number
        self.kinds = max(self.kinds, number + 1)
        self.models[number:] = [model, *self.models[number + 1 :]]

    def forget(self) -> None:
        """Another kind takes its number."""
        number = self.rng.randrange(self.kinds)
        if self.pool.forget(kind=number):
            self.add_kind(number)
            self.forgotten += 1

    def submit(self) -> None:
        kind = self.rng.randrange(self.kinds)
        job = self.happens(
            "submit",
            kind=kind,
            need=self.rng.randrange(self.needs),
            priority=self.rng.choice(["interactive", "normal", "batch", "background"]),
            deadline_seconds=self.rng.choice([float("inf"), 0.3, 2.0]),
            not_before_seconds=self.rng.choice([0.0, 0.0, 0.2]),
            cost=self.rng.uniform(0.1, 9.0) if kind % 2 == 1 else 1.0,
            gang=self.rng.choice([1, 1, 1, 1, 2]),
            after=[self.rng.choice(self.jobs)] if self.jobs and self.rng.random() < 0.2 else [],
            tenant=self.rng.randrange(self.tenants),
            charge=self.rng.choice([0.0, 2.5]),
            waits=self.rng.random() < 0.5,
        )
        assert job is not None
        self.jobs.append(job)

    def end_run(self, event: str) -> None:
        run, kind = self.rng.choice(list(self.runs.items()))
        del self.runs[run]
        if event == "withdraw":
            self.happens("withdraw", run=run)
            return
        result = self.rng.choice(["completed"] * 6 + ["failed", "out_of_memory", "given_up"])
        seconds = self.rng.uniform(0.001, 0.3)
        if result == "completed":
            device = self.rng.randrange(self.devices)
            self.happens("measure", device=device, kind=kind, model=(0.01 * device, seconds), samples=3)
            if self.models[kind]:
                self.happens("loaded", kind=kind, seconds=self.rng.uniform(0.0, 0.2))
        self.happens("finish", run=run, result=result, seconds=seconds)

    def go(self, events: int) -> None:
        for _ in range(events):
            what = self.rng.random()
            if what < 0.5:
                self.submit()
            elif what < 0.85 and self.runs:
                self.end_run("finish" if what < 0.82 else "withdraw")
            elif what < 0.88 and self.jobs:
                self.happens("cancel", job=self.rng.choice(self.jobs))
            elif what < 0.94:
                event = self.rng.choice(["retire", "restore", "restore", "lose"])
                self.happens(event, device=self.rng.randrange(self.devices))
            elif what < 0.95 and self.devices < 5:
                self.add_device()
            elif what < 0.96 and self.kinds < 5:
                self.add_kind()
            elif what < 0.97 and self.needs < 4:
                self.pool.add_need(accepted=[self.rng.random() < 0.7 for _ in range(self.devices)])
                self.needs += 1
            elif what < 0.98 and self.tenants < 4:
                quotas: dict[str, Any] = {"devices": 1, "memory_bytes": 20.0} if self.rng.random() < 0.5 else {}
                self.pool.add_tenant(name=f"t{self.tenants}", weight=self.rng.uniform(0.5, 3.0), **quotas)
                self.tenants += 1
            elif what < 0.985:
                self.forget()
            elif what < 0.99:
                model = f"m{self.rng.randrange(self.kinds)}"
                self.pool.unload(device=self.rng.randrange(self.devices), model=model)
            else:
                self.happens("tick")


@pytest.mark.parametrize("placement", [*PLACEMENTS, "custom"])
def test_every_decision_of_random_events_is_reproduced(placement: str, tmp_path: Path) -> None:
    unloaded = 0
    for seed in range(6):
        path = tmp_path / f"{seed}.jsonl"
        Script(seed, placement, path).go(500)
        result = replay_pool(path)
        assert result.mismatch is None
        assert result.placement == placement
        assert result.jobs > 100
        assert result.runs > 20
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert replay_pool(lines) == result
        unloaded += sum(line.startswith('{"unload"') for line in lines)
    assert unloaded > 0


def eventful(path: Path) -> None:
    """A pool that sees all that there is to see."""

    def fails_on_nine(batch: torch.Tensor) -> torch.Tensor:
        if bool((batch == 9).any()):
            raise ValueError("nine")
        return batch + 1

    with Pool(hosts(2), memory={"host:0": 100.0, "host:1": 200.0}) as pool:
        pool.write_ledger(path)
        batcher = pool.serve(fails_on_nine, max_batch=4, idempotent=True)
        padded = pool.serve(lambda x: x * 2, pad=0, idempotent=True, max_batch=4)
        with Held(pool, 2):
            late = pool.submit(lambda _: None, deadline=0.01)
            gang = pool.submit(lambda devices: len(devices), gang=2)
            after = pool.submit(lambda _: 3, after=[gang], priority="batch")
            gone = pool.submit(lambda _: None)
            asked = [batcher(torch.tensor(k)) for k in range(10)]
            texts = [padded(torch.ones(1 + k % 5)) for k in range(10)]
            needy = pool.submit(lambda _: None, needs=["host", lambda facts: facts.name == "host:1"], memory=150.0)
            assert gone.cancel()
            assert late.exception(20) is not None
        assert (gang.result(), after.result(), needy.result()) == (2, 3, None)
        assert [one.exception() is None for one in asked] == [True] * 9 + [False]
        assert [len(one.result()) for one in texts] == [1 + k % 5 for k in range(10)]
        pool.retire("host:1")
        assert pool.submit(lambda _: 5, not_before=0.02).result() == 5
        pool.restore("host:1")


def test_the_ledger_of_a_pool_is_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.jsonl"
    eventful(path)
    result = replay_pool(str(path))
    assert (result.mismatch, result.cut_off, result.devices) == (None, False, ["host:0", "host:1"])
    assert result.times is not None
    assert (result.times.outcomes["expired"], result.times.outcomes["cancelled"], result.times.outcomes["failed"]) == (
        *(1, 1, 1),
    )
    assert main(["replay", str(path)]) == 0
    text = capsys.readouterr().out
    assert "a pool on host:0, host:1, placement auto\n" in text
    assert "All decisions came out the same." in text
    assert main(["replay", str(path), "--json", "--what-if"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reproduced"]
    assert set(told["what_if"]) == set(PLACEMENTS)
    assert main(["replay", str(path), "--what-if"]) == 0
    assert "if round_robin" in capsys.readouterr().out


def test_the_first_decision_that_differs_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pool.jsonl"
    eventful(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    numbers = [n for n, line in enumerate(lines) if "starts" in json.loads(line).get("decided", {})]
    entry = json.loads(lines[numbers[3]])
    jobs = entry["decided"]["starts"][0]["jobs"]
    entry["decided"]["starts"][0]["jobs"] = [*jobs, 5]
    changed = [*lines[: numbers[3]], json.dumps(entry) + "\n", *lines[numbers[3] + 1 :]]
    found = replay_pool(changed).mismatch
    assert found is not None
    assert found.line == numbers[3] + 1
    assert found.what.startswith("starts: the ledger says [{")
    path.write_text("".join(changed), encoding="utf-8")
    assert main(["replay", str(path)]) == 1
    text = capsys.readouterr().out
    assert "came out DIFFERENTLY" in text
    assert f"line {found.line}, " in text
    with pytest.raises(InvalidArgument, match=f"line {found.line} of the ledger: its decision is not reproduced"):
        what_if_pool(changed, "any")
    cut = replay_pool([*lines[:-1], lines[-1][:-9]])
    assert (cut.cut_off, cut.mismatch) == (True, None)


def test_lines_that_are_no_events_are_named() -> None:
    head = json.dumps({"paceline_pool_ledger": 1, "options": {"placement": "auto", **OPTIONS}})
    for lines, what in (
        ([], "line 1 of the ledger: there is no header"),
        (["{}"], 'line 1 of the ledger: "paceline_pool_ledger" is missing'),
        (['{"paceline_pool_ledger": 99, "options": {}}'], "version 99"),
        ([head, "[]"], "line 2 of the ledger: it is no JSON object"),
        ([head, "{"], "line 2 of the ledger: column"),
        ([head, '{"at": 1, "jump": {}}'], "line 2 of the ledger: none of submit,"),
        ([head, '{"tick": {}}'], 'line 2 of the ledger: "at" is missing'),
        ([head, '{"at": 1, "tick": {"soon": 2}}'], "line 2 of the ledger"),
        ([head, '{"at": 1, "finish": {"run": 3, "result": "completed", "seconds": 1}}'], "run 3 does not run"),
        ([head, '{"at": 2, "tick": {}}', '{"at": 1, "tick": {}}'], "line 3 of the ledger: now is 1"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            replay_pool(lines)


def test_another_placement_is_asked_of_the_same_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    pool_ledger(path, (0.002, 0.03), every=0.0005, jobs=20)
    times = {placement: what_if_pool(path, placement) for placement in PLACEMENTS}
    assert all(one.outcomes == {"completed": 20} for one in times.values())
    assert times["auto"].mean_seconds + 0.01 < times["round_robin"].mean_seconds
    assert times["auto"].p99_wait_seconds < times["auto"].p99_seconds
    assert times["auto"].p50_seconds <= times["auto"].p99_seconds < times["round_robin"].p99_seconds
    with pytest.raises(InvalidArgument, match="placement is 'luck'"):
        what_if_pool(path, "luck")


def test_a_ledger_begins_before_the_first_job_and_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    with pool_of(1) as pool:
        with pytest.raises(InvalidArgument, match="cannot be opened for writing"):
            pool.write_ledger(tmp_path / "none" / "pool.jsonl")
        pool.write_ledger(path)
        pool.submit(lambda _: None).result()
        text = path.read_text(encoding="utf-8")
        with pytest.raises(InvalidArgument, match="writes a ledger already"):
            pool.write_ledger(path)
        assert path.read_text(encoding="utf-8") == text
    begins: list[Callable[[Pool], Any]] = [lambda pool: pool.submit(print).result(), lambda pool: pool.retire("host:0")]
    for begin in begins:
        with pool_of(1) as pool:
            begin(pool)
            with pytest.raises(InvalidArgument, match="after the first job"):
                pool.write_ledger(path)
            assert path.read_text(encoding="utf-8").startswith(text)
    with pool_of(1) as pool, pytest.raises(InvalidArgument, match="is the disk full"):
        pool.write_ledger("/dev/full")


def test_a_ledger_says_which_submits_wait_for_room(tmp_path: Path) -> None:
    with pool_of(1) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        pool.submit(lambda _: None).result()
        pool.try_submit(lambda _: None).result()
        pool.submit(lambda _: pool.submit(lambda _: None)).result().result()  # one in a job does not
    entries = map(json.loads, (tmp_path / "pool.jsonl").read_text().splitlines())
    assert [one["submit"].get("waits", False) for one in entries if "submit" in one] == [True, False, True, False]


def test_only_the_ledger_of_a_pool_is_asked_what_if(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    Balancer(["a", "b"], ledger=path).next_plan(8)
    assert main(["replay", str(path)]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path), "--what-if"])
    assert ended.value.code == 2
    assert "--what-if is for the ledgers of pools" in capsys.readouterr().err
