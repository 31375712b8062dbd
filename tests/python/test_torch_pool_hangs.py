"""`Pool(hang_seconds=)`: jobs that hang are given up, and their devices go on."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, Rejected, Timeout
from paceline.torch import DataParallel, Pool
from paceline.torch._devices.compile_gate import CompileGate
from paceline.torch._pool import watchdog
from paceline.torch._replicas.capture import is_loading, loading
from pool_support import Held, give_up_after, pool_of, soon
from test_torch_pool_life import program
from torch_support import TWO, classifier, classify, gradients, hosts, plain, worst_difference
from versions_support import adds, ask, roles, versions_of


class Hang:
    """Hangs until the end of the block."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.over = threading.Event()

    def __enter__(self) -> Hang:
        return self

    def __exit__(self, *_: object) -> None:
        self._event.set()

    def __call__(self, *_: object) -> Any:
        self._event.wait(30)
        self.over.set()
        return torch.ones(4)


def is_in(thread: threading.Thread, function: str) -> bool:
    """Whether the thread is in a call of it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return any(one.name == function for one in traceback.extract_stack(frame)) if frame is not None else False


def stuck(pool: Pool, hang: Hang) -> tuple[Any, Any]:
    """A job that was given up, and one that comes after it."""
    job = pool.submit(hang, kind="stuck", needs="host:0")
    follows = pool.submit(lambda _: 1, after=[job])
    with pytest.raises(Timeout, match=r"'stuck' has run on host:0.*The pool has given it up"):
        job.result(20)
    assert soon(lambda: pool.report()["hangs"])
    give_up_after(pool, 60)
    return job, follows


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_that_hangs_is_named_and_its_device_goes_on(count: int) -> None:
    with Hang() as hang, pool_of(count, hang_seconds=0.1) as pool:
        text = r"'stuck' has run on host:0 for more than hang_seconds=0.1 s, and is at .*wait"
        with pytest.warns(RuntimeWarning, match=text):
            job, follows = stuck(pool, hang)
        assert isinstance(follows.exception(20), Exception)
        names = [pool.submit(lambda _: threading.current_thread().name, needs="host:0").result(20) for _ in range(5)]
        assert len(set(names)) == 1
        (found,) = pool.report()["hangs"]
        assert (found["device"], found["kind"], found["jobs"]) == ("host:0", "stuck", 1)
        assert job.device == "host:0"
        assert job.seconds >= 0.1
        assert pool.running == 0
        hang.__exit__()
        assert hang.over.wait(20)
        assert [pool.submit(lambda _: 7).result(20) for _ in range(3)] == [7] * 3
        with pytest.raises(Timeout):
            job.result()
        assert pool.report()["outcomes"]["failed"] == 1


def test_other_jobs_are_left_alone() -> None:
    with pool_of(1, hang_seconds=2.0) as pool:
        assert [pool.submit(lambda _: time.sleep(0.1)).result() for _ in range(22)] == [None] * 22
        assert not pool.report()["hangs"]
    with Hang() as hang, pool_of(1) as pool:
        job = pool.submit(hang)
        time.sleep(0.1)
        assert job.running()
        hang.__exit__()
        job.result()


class Stuck(nn.Module):
    """Hangs for one request, and counts in a buffer."""

    count: torch.Tensor

    def __init__(self, hang: Hang) -> None:
        super().__init__()
        _hangs[0] = hang
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if bool((x == 13).any()):
            _hangs[0]()
        self.count += 1
        assert self.count % 2 == 0, "another thread is in this copy"
        return x + 1


_hangs: list[Any] = [None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_batch_that_hangs_fails_once_and_its_device_gets_another_copy() -> None:
    with Hang() as hang, pool_of(1, hang_seconds=60) as pool:
        batcher = pool.serve(Stuck(hang).eval(), max_batch=4)
        with Held(pool):
            answers = [batcher(torch.tensor(k)) for k in (1, 13, 2, 3)]
        give_up_after(pool, 0.5)
        for answer in answers:
            with pytest.raises(Timeout, match="Stuck"):
                answer.result(20)
        assert len(pool.report()["hangs"]) == 1  # a batch that hangs does not run again in halves
        give_up_after(pool, 60)
        assert [int(one) for one in batcher.map(torch.arange(12))] == list(range(1, 13))
        hang.__exit__()
        assert hang.over.wait(20)
        assert [int(one) for one in batcher.map(torch.arange(12))] == list(range(1, 13))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nobody_waits_to_compile_or_capture_for_a_run_that_was_given_up() -> None:
    entered = threading.Event()

    def compiles(_: torch.device) -> None:
        with CompileGate.of_call().enter(True, "hangs"), loading(0):
            hang()

    def follows() -> None:
        with CompileGate.of_call().enter(True, "another call"):
            entered.set()

    with Hang() as hang, pool_of(1, hang_seconds=0.1) as pool:
        job = pool.submit(compiles)
        with pytest.raises(Timeout):
            job.result(20)
        give_up_after(pool, 60)
        thread = threading.Thread(target=follows, daemon=True)
        thread.start()
        assert entered.wait(20)
        assert soon(lambda: not is_loading(0))
        hang.__exit__()
        assert hang.over.wait(20)
        thread.join()
        assert pool.submit(lambda _: 1).result(20) == 1
    assert soon(lambda: not CompileGate.of_call()._stays)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [1, 2])
def test_a_load_that_hangs_is_given_up_and_the_old_version_answers(count: int) -> None:
    with Hang() as hang, pool_of(count, hang_seconds=60) as pool:
        batcher = pool.serve(adds(10), max_batch=2)
        ask(batcher, 1)[0].result()
        give_up_after(pool, 0.5)
        with pytest.raises(
            Rejected, match=r"loading on host:0 has raised Timeout\(.*hang_seconds=0\.5 s, and is at .* in "
        ) as raised:
            batcher.publish(lambda state, x: x + state, initializer=hang)
        assert isinstance(raised.value.__cause__, Timeout)
        give_up_after(pool, 60)
        assert versions_of(ask(batcher, 3)) == {1: 3}
        (found,) = pool.report()["hangs"]
        assert (found["device"], found["jobs"]) == ("host:0", 0)
        third = batcher.publish(lambda state, x: x + state, initializer=lambda _: 30)  # beside the load that hangs
        assert versions_of(ask(batcher, 3)) == {third.number: 3}
        hang.__exit__()
        assert hang.over.wait(20)
        assert versions_of(ask(batcher, 3)) == {third.number: 3}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_a_first_batch_loads_late_does_not_take_the_place_of_what_came_after_it() -> None:
    made: list[int] = []

    def initializer(_: torch.device) -> int:
        made.append(len(made))
        number = made[-1]
        if number == 0:
            hang()
        return number

    with Hang() as hang, pool_of(1, hang_seconds=1.0) as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=initializer)
        with pytest.raises(Timeout):
            batcher(torch.tensor(0)).result(20)
        give_up_after(pool, 60)
        assert int(batcher(torch.tensor(0)).result(20)) == 1
        (thread,) = [one for one in threading.enumerate() if is_in(one, "initializer")]
        hang.__exit__()
        assert soon(lambda: not is_in(thread, "initializer"))
        assert int(batcher(torch.tensor(0)).result(20)) == 1


def test_a_load_that_takes_its_time_without_a_limit_is_waited_for() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=2)
        with Hang() as hang:
            publish = threading.Thread(target=batcher.publish, args=(lambda state, x: x,), kwargs={"initializer": hang})
            publish.start()
            assert not hang.over.wait(1.0)
            assert publish.is_alive()
        publish.join()
        assert roles(batcher)[2] == ("live", 1.0)


def test_a_load_that_waits_for_another_one_does_not_hang() -> None:
    with pool_of(1, hang_seconds=1.0) as pool:
        batcher = pool.serve(adds(10), max_batch=2)
        with pool._jobs.seats["host:0"].loading():
            publish = threading.Thread(target=batcher.publish, args=(adds(20),))
            publish.start()
            publish.join(1.5)
            assert publish.is_alive()
        publish.join()
        assert roles(batcher)[2] == ("live", 1.0)
        assert not pool.report()["hangs"]


class Interrupted(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt


def test_interrupts_give_up_no_load_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1, hang_seconds=60) as pool:
        seat, dog = pool._jobs.seats["host:0"], pool._jobs.watchdog
        assert dog is not None
        monkeypatch.setattr(watchdog, "threading", SimpleNamespace(Event=Interrupted, Thread=threading.Thread))
        with seat.loading(), pytest.raises(KeyboardInterrupt):  # somebody else's load
            watchdog.run_beside(dog, seat, "loading", lambda: None)
        assert not dog.hangs


def test_several_jobs_may_hang_on_one_device_and_a_gang() -> None:
    with Hang() as hang, pool_of(hang_seconds=0.1) as pool:
        jobs = [pool.submit(hang, needs="host:0") for _ in range(3)]
        both = pool.submit(hang, gang=2)
        for job in (*jobs, both):
            with pytest.raises(Timeout):
                job.result(30)
        assert len(pool.report()["hangs"]) == 4
        give_up_after(pool, 60)
        assert pool.submit(lambda places: len(places), gang=2).result(20) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_pool_whose_job_hangs_closes() -> None:
    with Hang() as hang:
        for cancel in (False, True):
            pool = pool_of(1, hang_seconds=60)
            job = pool.submit(hang)
            assert soon(job.running)
            give_up_after(pool, 0.1)
            pool.close(cancel=cancel)
            with pytest.raises(Timeout):
                job.result(0)
        hang.__exit__()
        assert hang.over.wait(20)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_trainer_on_the_same_workers_goes_on() -> None:
    module, batch = classifier(64)
    wanted = plain(module, classify, batch)[1]
    with Hang() as hang, DataParallel(module, TWO) as trainer, Pool(trainer, hang_seconds=60) as pool:
        for name in hosts(2):
            trainer.step(classify, batch)
            job = pool.submit(hang, needs=name)
            assert soon(job.running)
            give_up_after(pool, 0.1)
            module.zero_grad()
            trainer.step(classify, batch)  # waits for the worker, which is replaced
            assert worst_difference(gradients(module), wanted) < 1e-12
            with pytest.raises(Timeout):
                job.result(20)
            give_up_after(pool, 60)
        hang.__exit__()
        assert hang.over.wait(20)
        module.zero_grad()
        trainer.step(classify, batch)
        assert worst_difference(gradients(module), wanted) < 1e-12


def test_the_watchdog_ends_with_its_pool_and_its_argument_is_checked() -> None:
    before = set(threading.enumerate())  # those of other pools may still end

    def watchdogs() -> int:
        return sum(one.name == "paceline pool watchdog" for one in set(threading.enumerate()) - before)

    with pool_of(1, hang_seconds=5):
        assert watchdogs() == 1
    assert soon(lambda: watchdogs() == 0)
    pool = pool_of(1, hang_seconds=5)
    assert pool.submit(lambda _: 1).result() == 1
    del pool
    assert soon(lambda: watchdogs() == 0)
    for value in (0, -1, "1", float("nan")):
        with pytest.raises(InvalidArgument, match="hang_seconds"):
            pool_of(1, hang_seconds=value)


def test_a_program_ends_while_jobs_hang_that_hold_the_lock_in_turn_or_sleep() -> None:
    out, _ = program(
        """
        from paceline import Timeout

        def spin(_):
            while True:
                pass

        with Pool(["host:0"], hang_seconds=1.0) as pool:
            for stuck in spin, lambda _: time.sleep(1e6):
                assert isinstance(pool.submit(stuck).exception(30), Timeout)
                print(pool.submit(lambda _: 1, kind="other").result(30))
        """
    )
    assert out == "1\n1\n"


def test_a_thread_that_hangs_drops_no_reference_while_the_interpreter_ends() -> None:
    out, _ = program(
        """
        def spin(_):
            while True:
                pass

        class Last:  # Python drops what `sys` has after the modules
            def __del__(self, write=os.write, sleep=time.sleep, count=sys.getrefcount):
                sleep(0.2)  # without Python's lock, which the thread that spins asks for
                write(1, b"%d" % (count(self.work) - self.before))

        with Pool(["host:0"], hang_seconds=60) as pool:
            job = pool.submit(spin)
            while not job.running():
                time.sleep(0.01)
            sys.last, last = (Last(),) * 2
            last.kept, last.work = (job, pool), pool._jobs.engine.runs_over(0.0)[0][3][0]
            pool._jobs.watchdog.seconds = 0.1
            job.exception(30)
        while any("watchdog" in one.name for one in threading.enumerate()):
            time.sleep(0.01)
        last.before = sys.getrefcount(last.work)
        del last
        """
    )
    assert out == "0"
