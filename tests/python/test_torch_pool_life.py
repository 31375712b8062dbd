"""`Pool`: closing, interrupts, forks, the end of the program, and what is dropped."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, InvalidArgument
from paceline.torch import PoolFuture
from pool_support import Held, pool_of, soon


def program(text: str, status: int = 0) -> tuple[str, str]:
    """What a program of its own prints, with `Pool` and some modules imported."""
    head = "import os, signal, sys, threading, time\nfrom paceline.torch import Pool\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_close_cancels_what_waits_if_asked() -> None:
    pool = pool_of(1)
    with Held(pool):
        jobs = [pool.submit(lambda _: 1) for _ in range(5)]
        closing = threading.Thread(target=lambda: pool.close(cancel=True))
        closing.start()
        for job in jobs:
            with pytest.raises(Cancelled):
                job.result(10)
    closing.join(10)
    assert not closing.is_alive()
    pool.close()


def test_an_error_in_the_block_cancels_what_waits() -> None:
    jobs: list[PoolFuture[int]] = []

    def block() -> None:
        with pool_of(1) as pool:
            held = Held(pool)
            held.__enter__()
            jobs.extend(pool.submit(lambda _: 1) for _ in range(5))
            threading.Timer(0.05, held.release).start()
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert len(jobs) == 5
    assert all(isinstance(job.exception(), Cancelled) for job in jobs)


def test_a_job_may_not_close_its_pool() -> None:
    with pool_of(1) as pool, pytest.raises(InvalidArgument):
        pool.submit(lambda _: pool.close()).result()


def test_ctrl_c_leaves_result_at_once_and_the_block_cancels_what_waits() -> None:
    out, err = program(
        """
        jobs = []

        def work(_):
            while len(jobs) < 8 or not all(job.done() for job in jobs[1:]):
                time.sleep(0.01)

        try:
            with Pool(["host:0"]) as pool:
                for _ in range(8):
                    jobs.append(pool.submit(work))
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                jobs[-1].result()
        except KeyboardInterrupt:
            print("interrupted", [type(job.exception()).__name__ for job in jobs][1:].count("Cancelled"))
        """
    )
    assert (out, err) == ("interrupted 7\n", "")


def test_ctrl_c_leaves_a_submit_that_waits_for_room() -> None:
    out, _ = program(
        """
        go = threading.Event()
        with Pool(["host:0"]) as pool:
            try:
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                for _ in range(100):
                    pool.submit(lambda _: go.wait(20), kind="work")
            except KeyboardInterrupt:
                print("interrupted")
            go.set()
            print(pool.submit(lambda _: 1, kind="other").result())
        """
    )
    assert out == "interrupted\n1\n"


def test_ctrl_c_leaves_close() -> None:
    out, _ = program(
        """
        go = threading.Event()
        pool = Pool(["host:0"])
        job = pool.submit(lambda _: go.wait(20))
        try:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            pool.close()
        except KeyboardInterrupt:
            print("interrupted")
        go.set()
        print(job.result())
        pool.close()
        """
    )
    assert out == "interrupted\nTrue\n"


def test_ctrl_c_while_a_job_ends_comes_after_all_who_wait_were_told() -> None:
    out, err = program(
        """
        go, told = threading.Event(), []
        with Pool(["host:0"]) as pool:
            pool.submit(lambda _: go.wait(20), kind="hold")
            first, second = (pool.submit(lambda _: 1, kind="work") for _ in range(2))
            for job in first, second:
                job.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))
                job.add_done_callback(told.append)
            try:
                first.cancel()
            except KeyboardInterrupt:
                print("interrupted", first.cancelled(), told == [first])
            try:
                pool.close(cancel=True)
            except KeyboardInterrupt:
                print("interrupted", type(second.exception()).__name__, told == [first, second])
            go.set()
        """
    )
    assert (out, err) == ("interrupted True True\ninterrupted Cancelled True\n", "")


def test_a_program_that_ends_runs_the_jobs_that_wait() -> None:
    out, err = program(
        """
        pool = Pool(["host:0"])
        done = []
        pool.submit(lambda _: time.sleep(0.3))
        jobs = [pool.submit(lambda _, k=k: print(k, flush=True), kind="print") for k in range(3)]
        print("ends", flush=True)
        """
    )
    assert (sorted(out.splitlines()), err) == (["0", "1", "2", "ends"], "")


def test_a_program_that_fails_cancels_the_jobs_that_wait() -> None:
    out, err = program(
        """
        pool = Pool(["host:0"])
        running, jobs = threading.Event(), []

        def work(_):
            running.set()
            while len(jobs) < 3 or not all(job.done() for job in jobs):
                time.sleep(0.01)
            print("ran", flush=True)

        pool.submit(work)
        running.wait()
        for _ in range(3):
            jobs.append(pool.submit(lambda _: print("never", flush=True), kind="print"))
        raise ValueError("mistake")
        """,
        status=1,
    )
    assert out == "ran\n"
    assert err.endswith("ValueError: mistake\n")


def test_an_interactive_session_that_ends_runs_the_jobs_that_wait_whatever_failed_before() -> None:
    out, err = program(
        """
        sys.ps1, sys.last_type = ">>> ", ValueError
        pool = Pool(["host:0"])
        pool.submit(lambda _: time.sleep(0.2))
        job = pool.submit(lambda _: print("ran", flush=True), kind="print")
        """
    )
    assert (out, err) == ("ran\n", "")


def test_a_program_may_end_while_threads_submit_and_wait() -> None:
    out, err = program(
        """
        pool = Pool(["host:0", "host:1"])
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        import torch
        item = torch.ones(1)  # here: PyTorch itself aborts if a thread is in one of its functions when Python ends
        def ask():
            while True:
                batcher(item).result()
                pool.submit(lambda _: None).result()
        for _ in range(3):
            threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.3)
        print("ends", flush=True)
        """
    )
    assert out == "ends\n"
    assert "Fatal" not in err


def test_a_forked_process_may_neither_use_nor_harm_the_pool() -> None:
    out, err = program(
        """
        import torch
        go = threading.Event()
        with Pool(["host:0", "host:1"]) as pool:
            batcher = pool.serve(torch.nn.Linear(2, 2).eval())
            job = pool.submit(lambda _: go.wait(20))
            ended = pool.submit(lambda _: 5, deadline=60)
            ended.result()
            child = os.fork()
            if child == 0:
                print(ended.result(), flush=True)
                for call in (lambda: job.result(5), lambda: pool.submit(print), lambda: batcher(torch.ones(2)), pool.report):
                    try:
                        print(call())
                    except Exception as error:
                        print(type(error).__name__, flush=True)
                pool.close()
                del batcher
                sys.exit(7)  # leaves the block, and ends the interpreter
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            go.set()
            print(job.result())
        """
    )
    assert out.splitlines() == ["5", *["Unavailable"] * 4, "child 7", "True"], out + err
    assert err == ""


def test_a_forked_process_does_not_wait_for_a_device_that_the_parent_adds() -> None:
    out, err = program(
        """
        with Pool(["host:0"]) as pool:
            held, go = threading.Event(), threading.Event()

            def hold():
                with pool._jobs._adding:
                    held.set()
                    go.wait(20)

            thread = threading.Thread(target=hold)
            thread.start()
            held.wait(20)
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                for call in (lambda: pool.add("host:1"), lambda: pool.serve(len)):
                    try:
                        call()
                    except Exception as error:
                        print(type(error).__name__, flush=True)
                os._exit(7)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            go.set()
            thread.join()
        """
    )
    assert out.splitlines() == ["Unavailable", "Unavailable", "child 7"], out + err


class Interrupted:
    """The engine, with an interrupt that Python raises before or after `add`."""

    def __init__(self, engine: Any, joins: bool) -> None:
        self._engine, self._joins = engine, joins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, *args: Any) -> None:
        if self._joins:
            self._engine.add(*args)
        raise KeyboardInterrupt


@pytest.mark.parametrize("joins", [False, True])
def test_an_interrupt_of_add_leaves_a_device_that_works_or_none(joins: bool) -> None:
    with pool_of(1) as pool:
        engine, first = pool._jobs.engine, pool.devices[0].name
        pool._jobs.engine = Interrupted(engine, joins)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            pool.add("host:1")
        pool._jobs.engine = engine
        if not joins:
            pool.add("host:1")
        assert [one.name for one in pool.devices] == list(pool.report()["devices"]) == [first, "host:1"]
        assert pool.submit(lambda _: 1, needs="host:1").result(20) == 1


def test_a_pool_that_is_dropped_ends_its_jobs_first() -> None:
    pool = pool_of(1)
    gone = weakref.ref(pool), weakref.ref(pool._jobs)
    with Held(pool) as held:
        jobs = [pool.submit(lambda _, k=k: k) for k in range(5)]
        del pool, held._pool
        gc.collect()
        assert gone[0]() is None
        assert gone[1]() is not None
    assert [job.result(10) for job in jobs] == list(range(5))
    assert soon(lambda: gone[1]() is None)


def test_ended_futures_and_errors_do_not_keep_a_pool() -> None:
    pool = pool_of(1)
    gone = weakref.ref(pool._jobs)
    good, bad = pool.submit(lambda _: 1), pool.submit(lambda _: 1 / 0)
    answer = pool.serve(lambda x: x)(torch.ones(1))
    assert good.result() == 1
    assert isinstance(bad.exception(), ZeroDivisionError)
    assert answer.result() == 1
    del pool
    assert soon(lambda: gone() is None)
    assert not bad.cancel()
    assert good.result() == 1


class Owner(nn.Module):
    """A module that has its own pool."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.pool = pool_of(1)
        self.eval()
        self.ranker = self.pool.serve(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def test_a_pool_in_a_cycle_with_its_module_is_collected() -> None:
    owner = Owner()
    assert owner.ranker(torch.ones(2)).result().shape == (2,)
    with owner.pool.__class__(["host:0"]) as other:  # a second copy, of a module that has a batcher already
        assert other.serve(owner)(torch.ones(2)).result().shape == (2,)
    gone = weakref.ref(owner.pool._jobs)
    del owner, other
    assert soon(lambda: gc.collect() >= 0 and gone() is None)


def test_the_last_job_of_a_dropped_pool_ends_it_on_its_worker() -> None:
    for _ in range(20):
        pool = pool_of(1)
        gone = weakref.ref(pool._jobs)
        job = pool.submit(lambda _: 3)
        del pool
        assert job.result(10) == 3
        assert soon(lambda gone=gone: gone() is None)  # type: ignore[misc]


def test_pools_come_and_go_on_one_device() -> None:
    for k in range(50):
        with pool_of(1) as pool:
            assert pool.submit(lambda _, k=k: k).result() == k
