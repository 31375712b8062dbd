"""Traces of a trainer's last steps, their format, and by how much two clocks of their spans differ."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument, Unavailable
from paceline.testing import faults
from paceline.torch import DataParallel
from paceline.torch._trainer.telemetry import clock_offset
from test_torch_reducer import Quorum, on_threads
from torch_support import TWO, classifier, classify, hosts, noting

THREE = hosts(3)


class Trace:
    """A trace that was read back, with times in nanoseconds."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        named = [event for event in events if event["ph"] == "M"]
        self.rows = {event["tid"]: event["args"]["name"] for event in named if event["name"] == "thread_name"}
        (self.process,) = (event["args"]["name"] for event in named if event["name"] == "process_name")
        self.spans = [event for event in events if event["ph"] == "X"]
        self.instants = [event for event in events if event["ph"] == "i"]
        assert len(events) == len(named) + len(self.spans) + len(self.instants)
        assert len({event["pid"] for event in events}) == 1
        for event in [*self.spans, *self.instants]:
            event["row"] = self.rows[event["tid"]]
            event["start"] = round(1e3 * event["ts"])
            event["end"] = event["start"] + round(1e3 * event.get("dur", 0))

    def of(self, kind: str, row: str | None = None) -> list[dict[str, Any]]:
        found = [event for event in [*self.spans, *self.instants] if event["cat"] == kind]
        return [event for event in found if row in (None, event["row"])]

    def ran(self, row: str, step: int) -> list[tuple[int, int]]:
        """The micro-batches of a device in a step, in order."""
        return [
            (one["args"]["begin"], one["args"]["end"])
            for one in self.of("micro_batch", row)
            if one["args"]["step"] == step
        ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.json"


def traced(trainer: DataParallel, path: Path) -> Trace:
    trainer.trace(path)
    return Trace(path)


def test_the_last_steps_are_there_with_every_item_once_and_rows_for_all_devices(path: Path) -> None:
    module, batch = classifier(60)
    late = noting(lambda _, part: time.sleep(2e-4 * len(part[0])))
    with DataParallel(module, THREE) as trainer:
        for _ in range(11):
            trainer.step(late, batch)
        assert all(step.times is None for step in trainer._recent.steps)  # nothing is read before somebody asks
        events, last = trainer.events(), trainer._execution.committed.claims
    trace = traced(trainer, path)
    assert trace.process == "Sequential on host:0, host:1, host:2"
    assert list(trace.rows.values()) == ["caller", *THREE]
    steps = trace.of("step", "caller")
    assert [step["args"]["step"] for step in steps] == list(range(3, 11))
    for step in steps:
        number = step["args"]["step"]
        spans = sorted(span for name in THREE for span in trace.ran(name, number))
        assert (spans[0][0], spans[-1][1]) == (0, 60)
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
        wanted = [
            (event["device"], event["begin"], event["end"], pytest.approx(1e9 * event["duration_seconds"], abs=2))
            for event in events
            if event["kind"] == "micro_batch" and event["step"] == number
        ]
        found = [
            (one["row"], one["args"]["begin"], one["args"]["end"], one["end"] - one["start"])
            for name in THREE
            for one in trace.of("micro_batch", name)
            if one["args"]["step"] == number
        ]
        assert found == wanted
    assert [
        (THREE.index(one["row"]), *(one["args"][key] for key in ("begin", "end", "excluded", "correction")))
        for name in THREE
        for one in trace.of("micro_batch", name)
        if one["args"]["step"] == 10
    ] == [(device, begin, end, *flags) for device, begin, end, _, _, *flags in last]
    for one in trace.of("micro_batch"):
        assert int(one["name"].split()[0]) == one["args"]["end"] - one["args"]["begin"]
        assert one["name"].endswith(" (correction)") == one["args"]["correction"]


@pytest.mark.alone
def test_spans_of_a_device_do_not_overlap_and_fill_the_step_up_to_its_end(path: Path) -> None:
    module, batch = classifier(64)
    late = noting(lambda _, part: time.sleep(2e-4 * len(part[0])))
    with DataParallel(module, TWO, balance="even", micro_batch=8) as trainer:
        for _ in range(4):
            trainer.step(late, batch)
        trace = traced(trainer, path)
    steps = {step["args"]["step"]: step for step in trace.of("step")}
    for name in TWO:
        spans = [span for span in trace.spans if span["row"] == name]
        assert all(one["end"] <= other["start"] for one, other in pairwise(spans))
        assert sum(span["cat"] == "micro_batch" for span in spans) == 16
        for number, step in steps.items():
            own = [span for span in spans if span["args"]["step"] == number]
            assert step["start"] <= own[0]["start"]
            assert own[-1]["end"] <= step["end"]
            assert own[-1]["cat"] == "reduction"
            assert all(other["start"] - one["end"] < 1000 for one, other in pairwise(own))  # waits are spans, too
    ends = [[one["end"] for one in trace.of("reduction", name)] for name in TWO]
    assert ends[0] == ends[1]


def test_the_caller_s_row_has_the_time_between_steps_with_the_optimizer_and_the_loader(path: Path) -> None:
    module, batch = classifier(16)

    def batches() -> Iterator[Any]:
        for _ in range(4):
            time.sleep(0.002)
            yield batch

    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        for one in trainer.progress(batches(), file=io.StringIO()):
            trainer.step(classify, one)
            optimizer.step()
        trace = traced(trainer, path)
    steps, gaps = trace.of("step", "caller"), trace.of("gap", "caller")
    assert [(gap["start"], gap["end"]) for gap in gaps] == [
        (one["end"], other["start"]) for one, other in pairwise(steps)
    ]
    for kind in ("optimizer", "batch"):
        inside = [span for span in trace.of(kind, "caller") if span["end"] <= steps[-1]["start"]]
        assert len(inside) == 3
        assert all(
            gap["start"] <= one["start"] <= one["end"] <= gap["end"] for gap, one in zip(gaps, inside, strict=True)
        )
    assert len(trace.of("optimizer", "caller")) == 4
    assert all(one["end"] - one["start"] >= 2e6 for one in trace.of("batch")[:3])


def test_a_loader_that_trains_does_not_cross_the_spans_of_steps(path: Path) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:

        def batches() -> Iterator[Any]:
            for _ in range(2):
                trainer.step(classify, batch)
                yield batch

        for one in trainer.progress(batches(), file=io.StringIO()):
            trainer.step(classify, one)
        trace = traced(trainer, path)
    for one in trace.spans:
        for other in trace.spans:
            apart = one["end"] <= other["start"] or other["end"] <= one["start"] or one["row"] != other["row"]
            inside = one["start"] >= other["start"] and one["end"] <= other["end"]
            assert apart or inside or (other["start"] >= one["start"] and other["end"] <= one["end"])


@pytest.mark.alone
def test_moves_of_shares_are_instants_with_their_reason(path: Path) -> None:
    module, batch = classifier(16)
    slow: set[int] = set()

    def one_is_slow(_: Any, part: Any) -> None:
        if not slow:
            slow.add(threading.get_ident())
        time.sleep((1e-3 if threading.get_ident() in slow else 1e-4) * len(part[0]))

    with DataParallel(module, TWO, micro_batch=16) as trainer:
        for _ in range(100):
            trainer.step(noting(one_is_slow), batch)
            if trainer.report()["moves"]:
                break
        else:
            pytest.fail(f"no move in 100 steps\n{trainer.explain()}")
        moves = [event["step"] for event in trainer.events() if event["kind"] == "move"]
        found = traced(trainer, path).of("move", "caller")
    assert [one["args"]["step"] for one in found] == moves[-1:]
    assert all(one["args"]["reason"] for one in found)


def test_a_failure_is_an_instant_on_its_device_and_the_next_steps_are_there(path: Path) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO, balance="even") as trainer:
        with faults.inject(trainer, faults.Error("host:1", steps=1), faults.OutOfMemory("host:0", steps=2)):
            trainer.step(classify, batch)
            with pytest.raises(faults.InjectedError):
                trainer.step(classify, batch)
            for _ in range(2):
                trainer.step(classify, batch)
        with pytest.raises(InvalidArgument, match="scaler"):
            trainer.step(classify, batch, scaler=3)
        trace = traced(trainer, path)
    assert [step["name"] for step in trace.of("step")] == ["step 0", "step 1 (failed)", "step 1", "step 2"]
    assert [step["args"]["attempts"] for step in trace.of("step")] == [1, 1, 2, 1]
    (failure,) = trace.of("failure")
    assert (failure["row"], failure["name"]) == ("host:1", "failed: InjectedError")
    assert failure["start"] == trace.of("step")[1]["end"]
    assert [sum(end - begin for name in TWO for begin, end in trace.ran(name, step)) for step in range(3)] == [16] * 3


def test_alarms_are_instants(path: Path) -> None:
    module, batch = classifier(16)
    heard: list[Any] = []
    with DataParallel(module, TWO) as trainer:
        trainer.on_alarm(heard.append, busy=None, memory_growth=None, throttled=False, step_seconds=1e-9, every=1)
        for _ in range(3):
            trainer.step(classify, batch)
        trace = traced(trainer, path)
    (alarm,) = trace.of("alarm", "caller")
    assert (alarm["name"], alarm["args"]["text"]) == ("alarm: step_seconds", str(heard[0]))


def test_a_replay_and_the_runs_of_a_batch_are_traced(path: Path, tmp_path: Path) -> None:
    module, batch = classifier(24)
    with DataParallel(module, TWO, micro_batch=4) as trainer:
        trainer.write_ledger(tmp_path / "ledger")
        trainer.step(classify, batch)
        first = traced(trainer, path)
    with DataParallel(module, TWO, micro_batch=4) as trainer:
        trainer.replay_claims(tmp_path / "ledger")
        trainer.step(classify, batch)
        with trainer.batch(batch) as whole:
            whole.run(lambda one, part: part.backward(classify(one, part.data)), name="critic")
        again = traced(trainer, path)
    assert [again.ran(name, 0) for name in TWO] == [first.ran(name, 0) for name in TWO]
    assert [call["name"] for call in again.of("step", "caller")] == ["step 0", "run critic 1"]
    assert sum(end - begin for name in TWO for begin, end in again.ran(name, 1)) == 24


def test_a_rank_without_items_has_its_step_on_the_caller_s_row(tmp_path: Path) -> None:
    def rank(member: Any) -> Trace:
        module, batch = classifier(16)
        with DataParallel(module, hosts(1), reducer=member) as trainer:
            trainer.step(classify, batch if member.rank == 0 else None)
            return traced(trainer, tmp_path / str(member.rank))

    for trace, counts in zip(on_threads(Quorum(2).members, rank), (1, 0), strict=True):
        assert [step["name"] for step in trace.of("step", "caller")] == ["step 0"]
        assert len(trace.of("reduction", "host:0")) == counts


def test_before_the_first_step_there_is_nothing_to_trace(path: Path) -> None:
    with DataParallel(classifier()[0], TWO) as trainer:
        with pytest.raises(Unavailable, match="no step has run"):
            trainer.trace(path)
    assert not path.exists()


def test_a_file_is_written_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("the trace before")

    def full(self: Path, text: str, **options: Any) -> int:
        with self.open("w") as file:
            file.write(text[:20])
        raise OSError("no space left")

    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", full)
            with pytest.raises(OSError, match="no space"):
                trainer.trace(path)
        assert path.read_text() == "the trace before"
        assert list(path.parent.iterdir()) == [path]
        assert traced(trainer, path).of("step")
        assert list(path.parent.iterdir()) == [path]
        with pytest.raises(FileNotFoundError):
            trainer.trace(path.parent / "missing" / "step.json")


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
