"""`Pool(placement=...)`: a placement of the user's own."""

from __future__ import annotations

import gc
import json
import math
import random
import threading
import warnings
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Cancelled, InvalidArgument
from paceline._cli import main
from paceline._core.plan import PoolState
from paceline.plan import PoolQuestion
from paceline.sim import replay_pool, what_if_pool, worth_pool
from paceline.torch import Pool, PoolFuture
from pool_support import Held, pool_of, soon
from test_torch_pool_life import program
from torch_support import hosts


def last(question: PoolQuestion) -> str | None:
    """The last idle device, by its name."""
    return max((one.device for one in question.candidates if one.idle), default=None)


def nothing(_: torch.device) -> None:
    """The job."""


def ran_on(job: PoolFuture[None]) -> str | None:
    job.result(20)
    return job.device


class LeastOutstanding:
    """Of the idle devices, which run nothing, the next one in turn."""

    def __init__(self, devices: list[str]) -> None:
        self._devices, self._next = devices, 0

    def __call__(self, question: PoolQuestion) -> str | None:
        idle = {one.device for one in question.candidates if one.idle}
        turns = [(self._next + number) % len(self._devices) for number in range(len(self._devices))]
        place = next(number for number in turns if self._devices[number] in idle)
        self._next = (place + 1) % len(self._devices)
        return self._devices[place]


def test_a_function_that_reimplements_least_outstanding_decides_as_it_does_in_a_pool(tmp_path: Path) -> None:
    draws, path, names = random.Random(3), tmp_path / "pool.jsonl", hosts(3)
    gates: list[threading.Event] = []
    running: dict[threading.Event, PoolFuture[bool]] = {}
    with pool_of(3, placement=LeastOutstanding(names)) as pool:
        pool.write_ledger(path)
        for _ in range(60):
            if len(running) < 3 and (not running or draws.random() < 0.6):
                gates.append(threading.Event())
                running[gates[-1]] = pool.submit(lambda _, gate: gate.wait(20), gates[-1], kind="held")
            else:
                gate = draws.choice(list(running))
                gate.set()
                running.pop(gate).result()
        for gate in gates:
            gate.set()
    header, *entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    other = PoolState(**{**header["options"], "placement": "least_outstanding"})
    starts: tuple[list[Any], list[Any]] = ([], [])
    for entry in entries:
        starts[0].extend(entry.get("decided", {}).get("starts", ()))
        name = next(one for one in entry if one not in ("at", "chosen", "decided", "job"))
        if name == "tick":  # an answer; the built-in one has decided at the submit
            continue
        made = getattr(other, name)(*([entry["at"]] if "at" in entry else []), **entry[name])
        text = made[1] if name == "submit" else made
        starts[1].extend(json.loads(text).get("starts", ()) if isinstance(text, str) and text else ())
    assert [(one["run"], one["jobs"], one["devices"]) for one in starts[0]] == [
        (one["run"], one["jobs"], one["devices"]) for one in starts[1]
    ]
    assert len(starts[0]) == len(gates) > 20


def test_the_function_sees_what_decides() -> None:
    asked: list[PoolQuestion] = []

    def place(question: PoolQuestion) -> str | None:
        asked.append(question)
        return last(question)

    with pool_of(3, placement=place) as pool, Held(pool) as held:
        asked.clear()
        job = pool.submit(nothing, priority="batch", deadline=100.0, kind="mine")
        assert ran_on(job) == "host:1"  # the last one is held
        assert held.jobs[0].running()
    (question,) = [one for one in asked if one.kind == "mine"]
    assert (question.priority, question.waiting) == ("batch", 1)
    assert 90.0 < question.deadline_seconds <= 100.0
    assert {one.device: one.idle for one in question.candidates} == dict(
        zip(hosts(3), (True, True, False), strict=True)
    )
    assert all(one.seconds == math.inf for one in question.candidates)  # nothing was measured
    assert all((one.free_in_seconds == 0.0) == one.idle for one in question.candidates)


def test_jobs_wait_for_a_device_that_is_busy_and_requests_are_placed_too() -> None:
    with pool_of(2, placement=lambda question: "host:1") as pool:
        with Held(pool) as held:
            job = pool.submit(nothing)
            assert not soon_done(job)
            held.release()
            assert ran_on(job) == "host:1"
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        assert [batcher(torch.ones(1)).result().item() for _ in range(3)] == [2.0] * 3
        assert [one["runs"] for one in pool.report()["devices"].values()] == [0, 5]


def soon_done(job: PoolFuture[Any]) -> bool:
    threading.Event().wait(0.12)  # it is asked twice
    return job.done()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (KeyError("luck"), "KeyError: 'luck'"),
        (SystemExit(3), "SystemExit: 3"),
        (7, "InvalidArgument: placement has answered 7; it must answer the name of a device"),
        ("host:9", "'host:9'; it must answer the name of a device that may run the job, one of host:"),
    ],
)
def test_an_error_or_a_wrong_answer_loses_no_job(answer: Any, told: str) -> None:
    def place(question: PoolQuestion) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pool_of(2, placement=place) as pool:
        with pytest.warns(RuntimeWarning, match="the placement test_an_error.* of a pool has failed") as warned:
            ran = [ran_on(job) for job in [pool.submit(nothing) for _ in range(6)]]
        assert set(ran) <= set(hosts(2))
        assert len(warned) == 1
        assert "The placement failed " in pool.explain()
        assert told in pool.explain()
        found = pool.report()["placement"]
        assert found["failures"] >= 6
        assert told in found["last_failure"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ran_on(pool.submit(nothing)) in hosts(2)


def test_a_warning_that_is_an_error_loses_no_job() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pool_of(2, placement=lambda question: 1 / 0) as pool:
            assert ran_on(pool.submit(nothing)) in hosts(2)
            assert pool.report()["placement"]["failures"] == 1


def test_only_names_and_functions_are_placements() -> None:
    with pytest.raises(InvalidArgument, match="placement is a int; it must be a name, or a function"):
        pool_of(placement=3)
    with pool_of(1) as pool:
        assert pool.report()["placement"] == {"name": "auto", "failures": 0, "last_failure": None}


def test_the_function_may_use_the_pool_but_not_wait_for_it() -> None:
    made: list[PoolFuture[None]] = []
    refused: list[Exception] = []

    def place(question: PoolQuestion) -> str | None:
        assert pool.waiting > 0
        assert "host:0" in pool.explain()
        assert pool.report()["waiting"] > 0
        if len(made) < 3:
            made.append(pool.submit(nothing, kind="inside"))
            made.append(pool.submit(nothing, kind="again", idempotent=True))
            for call in (made[-1].result, pool.close):
                with pytest.raises(InvalidArgument) as error:
                    call()
                refused.append(error.value)
        return last(question)

    with pool_of(2, placement=place) as pool:
        assert ran_on(pool.submit(nothing)) in hosts(2)
        assert all(ran_on(job) in hosts(2) for job in made)
        assert "failed" not in pool.explain()
    assert len(refused) == 4
    assert all("wait" in str(one) for one in refused), refused


def test_a_lock_that_a_submitting_thread_holds_may_be_taken_by_the_function() -> None:
    lock = threading.RLock()

    def place(question: PoolQuestion) -> str | None:
        with lock:
            return last(question)

    def submits() -> None:
        for _ in range(3):  # as many as may wait, so that submit does not wait for the function
            with lock:
                jobs.append(pool.submit(nothing))

    jobs: list[PoolFuture[None]] = []
    with pool_of(2, placement=place) as pool:
        threads = [threading.Thread(target=submits) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
            assert not one.is_alive()
        assert len([job.result(20) for job in jobs]) == 12


def test_a_pool_that_is_closed_while_the_function_runs() -> None:
    inside, go = threading.Event(), threading.Event()

    def place(question: PoolQuestion) -> str | None:
        inside.set()
        go.wait(20)
        return last(question)

    for cancel in (True, False):
        inside.clear()
        go.clear()
        jobs: list[PoolFuture[None]] = []
        pool = pool_of(1, placement=place)
        submits = threading.Thread(target=lambda: jobs.append(pool.submit(nothing)))  # noqa: B023
        submits.start()
        assert inside.wait(20)
        closing = threading.Thread(target=lambda: pool.close(cancel=cancel))  # noqa: B023
        closing.start()
        if cancel:
            closing.join(20)  # it does not wait for the function
            assert not closing.is_alive()
        go.set()
        closing.join(20)
        submits.join(20)
        assert not closing.is_alive()
        assert isinstance(jobs[0].exception(5), Cancelled) if cancel else ran_on(jobs[0]) == "host:0"


def test_a_function_that_always_waits_keeps_no_pool_open() -> None:
    with pool_of(2, placement=lambda question: None) as pool:
        jobs = [pool.submit(nothing) for _ in range(5)]
    assert {ran_on(job) for job in jobs} <= set(hosts(2))


def test_a_pool_that_nobody_closes_is_collected_with_its_function() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = pool_of(2, placement=self.place)

        def place(self, question: PoolQuestion) -> str | None:
            return last(question)

    owner = Owner()
    assert ran_on(owner.pool.submit(nothing)) == "host:1"
    gone = weakref.ref(owner)
    del owner

    def collected() -> bool:
        gc.collect()
        return gone() is None

    assert soon(collected)


def test_an_interrupt_or_the_end_of_the_program_while_the_function_runs_loses_no_job_and_does_not_hang() -> None:
    out, err = program(
        """
        inside = []
        def place(question):
            if not inside:
                inside.append(1)
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    time.sleep(0.01)
            time.sleep(0.001)
            return question.candidates[0].device
        pool = Pool(["host:0"], placement=place)
        try:
            pool.submit(lambda _: sys.stdout.write("ran\\n"))
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\\n")
        pool.submit(lambda _: None).result()
        pool.close()
        print(pool.report()["placement"]["failures"])
        pool = Pool(["host:0", "host:1"], placement=place)
        def submit():
            while True:
                pool.submit(lambda _: None).result()
        for _ in range(3):
            threading.Thread(target=submit, daemon=True).start()
        time.sleep(0.2)
        print("ends", flush=True)
        """
    )
    assert sorted(out.splitlines()) == ["0", "ends", "interrupted", "ran"], out + err
    assert "Fatal" not in err


def test_a_process_that_is_forked_while_the_function_runs_does_not_wait() -> None:
    out, err = program(
        """
        inside, go = threading.Event(), threading.Event()
        def place(question):
            inside.set()
            go.wait(20)
            return question.candidates[0].device
        with Pool(["host:0"], placement=place) as pool:
            thread = threading.Thread(target=lambda: pool.submit(lambda _: print("ran", flush=True)))
            thread.start()
            inside.wait(20)
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                try:
                    pool.submit(print)
                except Exception as error:
                    print(type(error).__name__, flush=True)
                pool.close()
                os._exit(7)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            go.set()
            thread.join()
        """
    )
    assert out.splitlines() == ["Unavailable", "child 7", "ran"], out + err


def test_a_ledger_is_replayed_by_the_answers_and_asks_no_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pool.jsonl"
    with pool_of(2, placement=last) as pool:
        pool.write_ledger(path)
        for job in [pool.submit(nothing) for _ in range(20)]:
            job.result()
    result = replay_pool(path)
    assert (result.mismatch, result.placement, result.jobs) == (None, "custom", 20)
    assert what_if_pool(path, "any").outcomes == {"completed": 20}
    with pytest.raises(InvalidArgument, match="the pool's placement was a function"):
        what_if_pool(path)
    with pytest.raises(InvalidArgument, match="worth: the pool's placement was a function"):
        worth_pool(path)
    assert main(["replay", str(path), "--what-if"]) == 0
    text = capsys.readouterr().out
    assert "placement by a function, whose answers the ledger has" in text
    assert "if earliest_finish" in text


def test_many_threads_submit_while_the_function_answers_at_random() -> None:
    draws = random.Random(5)
    done: list[Future[None]] = []

    def place(question: PoolQuestion) -> str | None:
        return None if draws.random() < 0.3 else draws.choice(question.candidates).device

    with pool_of(3, placement=place) as pool:

        def submits(thread: int) -> None:
            for number in range(60):
                pool.submit(lambda _: None, kind=str((thread + number) % 3)).add_done_callback(done.append)

        threads = [threading.Thread(target=submits, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
    assert len(done) == 240
    assert all(one.exception() is None for one in done)
    assert isinstance(pool, Pool)
