"""`Batcher.publish` and what follows from it: which version answers a request, and that none is lost while versions change."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import Expired, InvalidArgument, Rejected
from paceline._page.pool_ledger import _Jobs, section
from paceline.sim import replay_pool, worth_pool
from paceline.torch import PoolFuture, Version
from paceline.torch._pool import warming
from pool_support import Held, pool_of, soon
from torch_support import hosts
from versions_support import Clients, State, States, adds, answer, ask, roles, versions_of


def test_a_request_is_answered_by_the_version_of_its_submit_and_its_future_says_which() -> None:
    with pool_of() as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        assert versions_of(ask(batcher, 3)) == {1: 3}
        publish = threading.Thread(target=batcher.publish, args=(adds(20),))
        with Held(pool, 2) as held:
            before = ask(batcher, 5)
            publish.start()
            assert soon(lambda: pool.waiting > 5)  # it warms
            before += ask(batcher, 5)
            held.release()
        publish.join()
        after = ask(batcher, 5)
        assert versions_of(before) == {1: 10}
        assert versions_of(after) == {2: 5}
        assert after[0].device in hosts(2)
        assert pool.submit(lambda _: 1).version == 0
        assert batcher.publish(adds(30)) == Version(3, batcher._name)
        assert roles(batcher) == {3: ("live", 1.0), 2: ("previous", 0.0)}
        assert batcher.rollback().number == 2
        assert versions_of(ask(batcher, 5)) == {2: 5}
        with pytest.raises(InvalidArgument, match="no version before"):
            batcher.rollback()


def test_what_is_refused_for_its_arguments_takes_no_number() -> None:
    with pool_of(1) as pool:
        for wrong in ({"max_batch": 0}, {"max_delay": -1.0}, {"resident": 8.0}):
            with pytest.raises(InvalidArgument):
                pool.serve(adds(10), **wrong)
        first = pool.serve(adds(10))
        assert first._name.endswith(" 1")
        for arguments in ({"weight": 2.0}, {"graph": True}, {"resident": 8.0}, {"memory": -1.0}):
            with pytest.raises(InvalidArgument):
                first.publish(adds(20), **arguments)
        assert first.publish(adds(20)).number == 2
        assert pool.serve(adds(30))._name.endswith(" 2")


def test_weights_are_exact_and_keys_stay_with_their_version() -> None:
    with pool_of() as pool:
        batcher = pool.serve(adds(10))
        with pytest.raises(InvalidArgument, match="must be a string"):  # before there is a version to choose
            batcher(torch.tensor(0.0), key=1.5)  # type: ignore[arg-type]
        second = batcher.publish(adds(20), weight=0.1)
        assert versions_of(ask(batcher, 1000)) == {1: 900, 2: 100}
        again = [one.version for one in ask(batcher, 50)]
        batcher.publish(adds(30), weight=0.25)
        assert [one.version for one in ask(batcher, 2000)].count(3) == 500
        batcher.retire(3)
        assert [one.version for one in ask(batcher, 50)] == again  # reproducible
        by_key = {key: ask(batcher, 1, key=key)[0].version for key in range(1000)}
        otherwise = sorted(
            range(1000), key=str
        )  # in the same order even turns would give each key the same version again
        assert {key: ask(batcher, 1, key=key)[0].version for key in otherwise} == by_key
        assert 60 < sum(version == 2 for version in by_key.values()) < 140
        assert ask(batcher, 1, key="a")[0].version == ask(batcher, 1, key="a")[0].version
        assert batcher.promote(second, weight=0.5).number == 2
        more = {key: ask(batcher, 1, key=key)[0].version for key in otherwise}
        assert all(more[key] == 2 for key, version in by_key.items() if version == 2)
        assert 430 < sum(version == 2 for version in more.values()) < 570
        assert roles(batcher) == {1: ("live", 0.5), 2: ("candidate", 0.5)}
        assert batcher.promote().number == 2
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        batcher.publish(adds(40), weight=0.5)
        assert batcher.rollback().number == 2  # the candidate goes
        assert versions_of(ask(batcher, 50)) == {2: 50}
        assert batcher.rollback().number == 1
        fifth, sixth = (batcher.publish(adds(number), weight=0.25) for number in (50, 60))
        assert batcher.promote(fifth).number == 5
        assert roles(batcher) == {5: ("live", 1.0), 1: ("previous", 0.0)}  # the other candidate goes, too
        with pytest.raises(InvalidArgument, match="no version 6"):
            batcher.promote(sixth)


def test_a_version_is_loaded_and_warmed_beside_the_service_and_the_old_one_is_freed() -> None:
    states, sizes = States(seconds=0.1), set()

    def answer_and_note(state: State, x: torch.Tensor) -> torch.Tensor:
        sizes.add((state.version, threading.current_thread().name, len(x)))
        return answer(state, x)

    with pool_of() as pool:
        batcher = pool.serve(answer_and_note, initializer=states.of(1), max_batch=8)
        with Clients(batcher) as clients:
            workers = {name for version, name in states.made if version == 1}
            batcher.publish(answer_and_note, initializer=states.of(2))
            swapped = [len(one) for one in clients.answers]
            assert soon(lambda: all(len(one) > count + 5 for one, count in zip(clients.answers, swapped, strict=True)))
        assert set(clients.versions()) == {1, 2}
        loaders = [name for version, name in states.made if version == 2]
        assert len(loaders) == 2
        assert not workers & set(loaders)  # no batch has waited for it
        for worker in workers:
            assert {size for version, name, size in sizes if (version, name) == (2, worker)} == set(range(1, 9))
        assert (states.count(1), states.count(2)) == (2, 2)  # kept for a rollback
        batcher.publish(answer_and_note, initializer=states.of(3))
        assert soon(lambda: states.count(1) == 0)
        assert (states.count(2), states.count(3)) == (2, 2)
        with Held(pool, 2):
            waits = ask(batcher, 4)
            batcher.rollback()
            assert states.count(3) == 2  # until its last batch
        assert versions_of(waits) == {3: 4}
        assert soon(lambda: states.count(3) == 0)


def test_what_warms_a_version_leaves_most_of_the_time_to_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    ran: list[float] = []
    rest = warming._rest

    def noted(after: PoolFuture[Any]) -> None:
        ran.append(after.seconds)
        rest(after)

    monkeypatch.setattr(warming, "_rest", noted)
    monkeypatch.setattr(warming, "time", SimpleNamespace(sleep=rests.append))
    with pool_of() as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        put, priorities = pool._jobs.put, set()

        def watched(work: Any, **how: Any) -> None:
            priorities.add(how["priority"])
            put(work, **how)

        monkeypatch.setattr(pool._jobs, "put", watched)
        batcher.publish(adds(20))
        assert priorities == {"normal"}  # requests come first
        # On each device after each of four sizes, and of six measured batches; on a GPU also after one of the version that is there.
        assert len(rests) >= 2 * (4 + 6)
        assert rests == [min(9 * seconds, 1.0) for seconds in ran]  # a tenth of the time, or a second
        late = PoolFuture[Any]()
        late.seconds = 2.0
        rest(late)
        assert rests[-1] == 1.0


@pytest.mark.parametrize("what", ["load", "warm", "answer"])
def test_a_version_that_fails_to_load_or_to_answer_leaves_the_service_as_it_was(what: str) -> None:
    states = States()
    states.fails = {2: OSError("no such file")} if what == "load" else {}

    def wrong(state: State, x: torch.Tensor) -> torch.Tensor:
        if state.version == 2 and what == "warm" and len(x) == 4:
            raise ValueError("four")
        return x.sum() if state.version == 2 and what == "answer" else answer(state, x)

    with pool_of() as pool:
        batcher = pool.serve(wrong, initializer=states.of(1), max_batch=4)
        with Clients(batcher) as clients:
            with pytest.raises(Rejected, match=r"version 2 was not taken, since .* on .* has raised") as error:
                batcher.publish(wrong, initializer=states.of(2))
            assert states.count(2) == 0
            assert roles(batcher) == {1: ("live", 1.0)}
        assert set(clients.versions()) == {1}
        cause, text = {
            "load": (OSError, f"loading on {hosts(2)[1]} .*no such file"),
            "warm": (ValueError, f"a batch of 4 on {hosts(2)[0]} .*four"),
            "answer": (InvalidArgument, "dimension 0 is the request"),
        }[what]
        assert isinstance(error.value.__cause__, cause)
        assert error.match(text)
        assert batcher.publish(wrong, initializer=states.of(3)).number == 3
        assert versions_of(ask(batcher, 4)) == {3: 4}


def test_a_version_that_fails_on_some_inputs_fails_these_alone() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise ValueError("thirteen")
        return x + 20

    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 10, max_batch=8, idempotent=True)
        batcher(torch.tensor(13.0)).result()  # an example for the next version
        with pytest.raises(Rejected, match="thirteen"):
            batcher.publish(picky)
    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 10, max_batch=8, idempotent=True)
        batcher(torch.tensor(0.0)).result()
        batcher.publish(picky, weight=0.5)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(float(number))) for number in [0, 1, 2, 3, 13, 13, 4, 5, 13, 13]]
        failed = [one for one in answers if one.exception() is not None]
        assert [one.version for one in failed] == [2, 2]
        assert [float(one.result()) % 10 for one in answers if one not in failed] == [0, 1, 2, 3, 3, 4, 5, 3]


def test_a_version_in_the_shadow_answers_copies_in_the_background() -> None:
    seen: list[tuple[float, float, float, int]] = []
    raised = threading.Event()

    def compare(item: torch.Tensor, live: PoolFuture[Any], shadow: PoolFuture[Any]) -> None:
        seen.append((float(item), float(live.result()), float(shadow.result()), shadow.version))
        if item == 3:
            raised.set()
            raise RuntimeError("of the user")

    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True, on_shadow=compare)
        items = [torch.tensor(float(number)) for number in range(20)]
        with Held(pool):
            answers = [batcher(one) for one in items]
            first = pool.submit(lambda _: len(seen), priority="batch")
            for one in items[:10]:
                one.add_(100)  # the caller may once they are answered; here these copies are made already
        assert [float(one.result()) for one in answers[10:]] == [10.0 + number for number in range(10, 20)]
        assert {one.version for one in answers} == {1}
        assert first.result() == 0
        assert soon(lambda: len(seen) == 20)
        assert raised.is_set()
        assert sorted(one[2] for one in seen) == [20.0 + number for number in range(20)]
        assert {one[3] for one in seen} == {2}
        with Held(pool):
            answers = ask(batcher, 32)
            shadows = pool.waiting - 32
            answers[0].cancel()
        assert shadows == 32  # as many as the queue holds
        with Held(pool):
            more = [batcher(torch.tensor(0.0), wait=False) for _ in range(40)]
        assert sum(isinstance(one.exception(), Rejected) for one in more) == 8
        assert roles(batcher) == {1: ("live", 1.0), 2: ("shadow", 0.0)}
        assert batcher.promote().number == 2
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        assert versions_of(ask(batcher, 3)) == {2: 3}


def test_a_version_in_the_shadow_stays_while_others_come_and_go() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10))
        batcher.publish(adds(20), shadow=True)
        batcher.publish(adds(30))
        assert roles(batcher) == {3: ("live", 1.0), 2: ("shadow", 0.0), 1: ("previous", 0.0)}
        batcher.promote(batcher.publish(adds(40), weight=0.5))
        assert roles(batcher) == {4: ("live", 1.0), 2: ("shadow", 0.0), 3: ("previous", 0.0)}
        batcher.rollback()
        assert roles(batcher) == {3: ("live", 1.0), 2: ("shadow", 0.0)}


def test_a_request_that_never_ran_is_not_compared() -> None:
    seen: list[PoolFuture[Any]] = []
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True, on_shadow=lambda _, live, __: seen.append(live))
        with Held(pool):
            (late,) = ask(batcher, 1, deadline=1e-4)
            assert isinstance(late.exception(), (Expired, Rejected))
            cancelled, answered = ask(batcher, 2)
            cancelled.cancel()
        assert soon(lambda: seen and not pool.waiting and not pool.running)
    assert seen == [answered]


@pytest.mark.parametrize("call", ["promote", "retire"])
def test_copies_that_wait_go_when_their_version_leaves_the_shadow(call: str) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True)
        with Held(pool):
            before = ask(batcher, 32)
            assert pool.waiting == 64  # the queues of both versions are full
            getattr(batcher, call)(2)
            assert pool.waiting == 32
            after = ask(batcher, 2 if call == "promote" else 0, wait=False)
        assert versions_of(before) == {1: 32}
        assert versions_of(after) == ({2: 2} if call == "promote" else {})


def test_requests_that_come_with_a_promotion_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True)
        versions = batcher._versions
        after: list[PoolFuture[Any]] = []
        turn_to = versions._turn_to

        def turned(*state: Any) -> None:
            turn_to(*state)
            after.extend(ask(batcher, 32, wait=False))

        monkeypatch.setattr(versions, "_turn_to", turned)
        with Held(pool):
            before = ask(batcher, 32)
            with pytest.raises(InvalidArgument, match="no version 7"):
                batcher.promote(7)
            assert pool.waiting == 64
            batcher.promote()
        assert versions_of(before) == {1: 32}
        assert versions_of(after) == {2: 32}


def test_a_promotion_that_fails_leaves_the_shadow_its_copies() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True)
        batcher.publish(adds(30), weight=0.5)
        with pytest.raises(InvalidArgument, match=r"weight=0\.5 is not there"):
            batcher.promote(2, weight=0.5)
        with Held(pool):
            ask(batcher, 4)
            assert len(pool._jobs.copies) == 4


def test_the_engine_forgets_versions_that_are_gone(tmp_path: Path) -> None:
    with pool_of(1) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        batcher = pool.serve(adds(10), max_batch=2)
        assert versions_of(ask(batcher, 2)) == {1: 2}
        for number in range(2, 7):
            batcher.publish(adds(10 * number))
            assert versions_of(ask(batcher, 2)) == {number: 2}
        batcher.publish(adds(70), weight=0.5)
        assert versions_of(ask(batcher, 4)) == {6: 2, 7: 2}
        with Held(pool):
            late = ask(batcher, 4)
            batcher.retire(7)  # it still has requests, so the engine forgets it after these
            assert batcher._versions._gone
        assert versions_of(late) == {6: 2, 7: 2}
        assert soon(lambda: not batcher._versions._gone)
    lines = [json.loads(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()]
    events = Counter(next(iter(line)) for line in lines)
    assert events["forget"] == 5  # versions 1 to 4, and 7


def test_errors_name_the_call_and_the_version() -> None:
    with pool_of() as pool:
        batcher, other = pool.serve(adds(10)), pool.serve(adds(10))
        with pytest.raises(InvalidArgument, match=r"^publish: the module, or a batch norm in it, is in training mode"):
            batcher.publish(adds(20).train())
        with pytest.raises(InvalidArgument, match=r"^serve: the module, or a batch norm in it, is in training mode"):
            pool.serve(adds(20).train())
        with pytest.raises(InvalidArgument, match=r"^retire: Adds 1 has no version 99, or not any more"):
            batcher.retire(99)
        with pytest.raises(InvalidArgument, match=r"^retire: Adds 1 has no version 1 of Adds 2, or"):
            batcher.retire(Version(1, other._name))


def test_what_the_pool_does_for_versions_counts_as_no_requests_of_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    with pool_of() as pool:
        pool.write_ledger(path)
        batcher = pool.serve(adds(10), max_batch=4)
        assert versions_of(ask(batcher, 3)) == {1: 3}
        batcher.publish(adds(20))
        batcher.publish(adds(30), shadow=True)
        assert versions_of(ask(batcher, 2)) == {2: 2}
        with pytest.raises(Rejected):  # a batch of one
            batcher.publish(torch.nn.Linear(3, 2).eval())
    lines = path.read_text().splitlines(keepends=True)
    assert sum('"submit"' in line for line in lines) > 5
    found = worth_pool(lines)
    assert replay_pool(lines).jobs == 5
    assert found.measured.outcomes == {"completed": 5}
    assert {tuple(one.devices): one.times.outcomes for one in found.choices} == {
        kept: {"completed": 5} for kept in (tuple(hosts(2)), *((name,) for name in hosts(2)))
    }
    assert "5 jobs" in section("pool", lines).title
    page = _Jobs()
    for line in lines[1:]:
        page.add(json.loads(line))
    told = page.report()
    assert (told["outcomes"]["completed"], sum(told["outcomes"].values())) == (5, 5)
    assert (told["waiting"], told["wait_counts"][-1][1], sum(one["jobs"] for one in told["devices"].values())) == (
        0,
        5,
        5,
    )
