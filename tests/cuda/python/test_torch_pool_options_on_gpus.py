"""`Pool` on GPUs: what requests and devices may be given, lengths, memory, precision, and what hangs."""

from __future__ import annotations

import json
import pathlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, GPUS, gpu_type, home_of
from paceline import InvalidArgument, Rejected, Timeout
from paceline.torch import Pool
from pool_support import Held, served_by, soon


class Tagger(nn.Module):
    """A number for each token, and one for all. It leaves padding, which is 0, out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, tokens: torch.Tensor) -> Any:
        real = (tokens != 0).unsqueeze(-1)
        found = self.table(tokens) * real
        return {"each": found.transpose(1, 2), "mean": found.sum(1) / real.sum(1)}  # each: not contiguous


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
def test_requests_of_different_lengths_share_batches(streams: Any, devices: list[str]) -> None:
    net = Tagger().eval()
    items = [torch.randint(1, 20, (length,)) for length in (3, 9, 4, 4, 7, 2, 8, 30) * 6]
    with Pool(devices) as pool:
        batcher = pool.serve(net, pad=0, max_batch=8)
        with Held(pool, len(devices)):
            answers = [batcher(one) for one in items]
        for item, answer in zip(items, answers, strict=True):
            found = answer.result()
            with torch.inference_mode():
                wanted = net(item.unsqueeze(0))
            for name, one in found.items():
                assert one.device.type == "cpu"
                torch.testing.assert_close(one, wanted[name][0])
        assert sum(one["runs"] for one in pool.report()["devices"].values()) < len(items)


def test_a_model_that_reads_padding_is_refused_on_a_gpu(streams: Any) -> None:
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(lambda x: x.cumsum(1).flip(1), pad=1.0, idempotent=True, max_batch=8)
        with Held(pool):
            answers = [batcher(torch.ones(length)) for length in (3, 5)]
        for one in answers:
            with pytest.raises(InvalidArgument, match="has to leave padding out"):
                one.result()


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
def test_autocast_is_that_of_the_device(streams: Any, devices: list[str]) -> None:
    types: set[str] = set()

    def answer(x: torch.Tensor) -> torch.Tensor:
        types.update(one for one in ("cpu", gpu_type()) if torch.is_autocast_enabled(one) and x.device.type == one)
        with torch.autocast(x.device.type, enabled=False):  # the fake device has no operators for it
            return x + 1

    with Pool(devices) as pool:
        batcher = pool.serve(answer, autocast=torch.bfloat16, max_batch=2)
        with Held(pool, len(devices)):
            answers = [batcher(torch.tensor(k)) for k in range(16)]  # more would wait for room in the queue
        assert [int(one.result()) for one in answers] == list(range(1, 17))
        assert types == {home_of([one.device]).type for one in answers}


def test_states_are_dropped_from_the_memory_of_a_gpu_and_made_there_again(streams: Any) -> None:
    made: list[str] = []

    def served(pool: Pool, name: str) -> Any:
        def load(device: torch.device) -> torch.Tensor:
            made.append(name)
            return torch.full((1,), float(len(name)), device=device)

        return pool.serve(lambda state, x: x + state, initializer=load, resident=100)

    gpu = GPUS[1]
    with Pool([GPUS[0]], memory={GPUS[0]: 10}) as pool:
        batchers = {name: served(pool, name) for name in ("a", "bb", "ccc")}
        pool.add(gpu, memory=250)
        for name in ("a", "bb", "a", "bb", "ccc"):
            answer = batchers[name](torch.ones(1))
            assert (float(answer.result()), answer.device) == (1 + len(name), gpu)
        assert made == ["a", "bb", "ccc"]
        job = pool.submit(lambda _: [len(served_by(one)._states) for one in batchers.values()], memory=200)
        assert (job.result(), job.device) == ([0, 0, 0], gpu)
        assert float(batchers["a"](torch.ones(1)).result()) == 2
        assert made == ["a", "bb", "ccc", "a"]
        with pytest.raises(Rejected, match=rf"{gpu} \(cuda, 250 bytes\)"):
            pool.submit(lambda _: None, memory=300).result()
    with pytest.raises(InvalidArgument, match=f"'{gpu}', and the pool has no such device"):
        Pool([GPUS[0]], memory={gpu: 1e9})


def test_needs_are_asked_for_a_device_that_is_added(streams: Any) -> None:
    def roomy(facts: Any) -> bool:
        return bool(facts.memory > 1e9)

    with Pool(GPUS[:1], memory={GPUS[0]: 1e9}) as pool:
        batcher = pool.serve(lambda x: x, needs=[roomy, "cuda"])
        with pytest.raises(Rejected, match="roomy of needs= accepts"):
            batcher(torch.tensor(1)).result()
        pool.add(GPUS[1], memory=2e9)
        pool.add("host:0", memory=3e9)
        answers = [batcher(torch.tensor(1)) for _ in range(5)]
        assert {(int(one.result()), one.device) for one in answers} == {(1, GPUS[1])}
        job = pool.submit(lambda _: None, needs=lambda facts: facts.memory == 3e9)
        job.result()
        assert job.device == "host:0"
        for wrong in (0, -1, "1"):
            with pytest.raises(InvalidArgument, match="memory"):
                pool.add(GPUS[2], memory=wrong)  # type: ignore[arg-type]
        assert [one.name for one in pool.devices] == [*GPUS[:2], "host:0"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_batch_that_hangs_on_a_gpu_is_given_up_and_its_device_answers_with_another_copy(streams: Any) -> None:
    hangs, over = threading.Event(), threading.Event()

    class Stuck(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3 and not hangs.is_set():
                hangs.wait(30)
                found = super().forward(x)
                over.set()
                return found
            return super().forward(x)

    torch.manual_seed(0)
    net = Stuck(4, 2).eval()
    items = list(torch.randn(3, 4))
    with Pool(GPUS[:1], hang_seconds=1.0) as pool:
        batcher = pool.serve(net, max_batch=3)
        before = pool._jobs.engine.stream(GPUS[0])
        with Held(pool) as held:
            answers = [batcher(one) for one in items]
            assert held.jobs[0].running()
        for one in answers:
            with pytest.raises(Timeout, match="Stuck"):
                one.result(20)
        assert soon(lambda: len(pool.report()["hangs"]) == 1)
        assert pool._jobs.engine.stream(GPUS[0]) != before
        for _ in range(2):
            for one in items:
                found = batcher(one).result(20)
                torch.testing.assert_close(found, nn.functional.linear(one, net.weight, net.bias).detach())
            hangs.set()
            assert over.wait(20)
        assert len(pool.report()["hangs"]) == 1
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def expect_hang(pool: Pool) -> None:
    job = pool.submit(lambda _: 1, kind="stuck")
    with pytest.raises(Timeout):
        job.result(20)
    assert soon(lambda: pool.report()["hangs"])
    assert [pool.submit(lambda _: 7).result(20) for _ in range(20)] == [7] * 20


def test_a_gpu_that_does_not_end_a_job_is_named_and_close_does_not_wait_for_it(fake: Any) -> None:
    for hangs in (False, True):
        released = fake.released
        with Pool(GPUS[:1], hang_seconds=1.0) as pool:
            if hangs:
                stream = pool._jobs.engine.stream(GPUS[0])
                assert stream is not None
                fake.hang(stream)
                text = f"'stuck' has run on {GPUS[0]} for more than.* The GPU goes on with it, beside later jobs"
                with pytest.warns(RuntimeWarning, match=text):
                    expect_hang(pool)
                outcomes = [run.outcome for run in pool._jobs.figures.runs._runs if run.kind == "stuck"]
                assert outcomes == ["given up"]
                assert pool.running == 0
                fake.go_on(stream)  # the pool lets go of the stream, which the fake needs for the next test
                assert [pool.submit(lambda _: 7).result(20) for _ in range(50)] == [7] * 50
        assert fake.released == released + (not hangs)  # giving memory back waits for the GPU


def test_a_gpu_is_busy_until_it_has_done_what_was_enqueued(fake: Any) -> None:
    called = threading.Event()
    with Pool(GPUS[:1]) as pool:
        stream = pool._jobs.engine.stream(GPUS[0])
        fake.hang(stream)
        job = pool.submit(lambda _: called.set())
        assert called.wait(20)
        first, second = (pool.report()["devices"][GPUS[0]]["busy_seconds"] for _ in range(2))
        assert 0 < first < second
        fake.go_on(stream)
        job.result(20)
        assert pool._jobs.figures.busy_since() == {}
        assert pool.report()["devices"][GPUS[0]]["busy_seconds"] >= second  # though the fake's clock says less
    assert pool._jobs.figures._open == {}


def test_a_trace_has_runs_of_gpus_with_their_seconds(streams: Any, tmp_path: pathlib.Path) -> None:
    def fails(device: torch.device) -> None:
        raise ValueError("no")

    with Pool([*GPUS[:2], "host:0"]) as pool:
        batcher = pool.serve(lambda x: x, max_batch=4)
        with Held(pool, 3):
            answers = [batcher(torch.tensor(k)) for k in range(12)]
        for one in answers:
            one.result()
        both = pool.submit(lambda places: len(places), gang=2, needs="cuda", kind="both")
        assert both.result() == 2
        with pytest.raises(ValueError, match="no"):
            pool.submit(fails, needs="cuda", kind="bad").result()
        runs = list(pool._jobs.figures.runs._runs)
        assert sum(run.jobs for run in runs if "shape" in run.kind) == 12
        assert [(run.outcome, run.jobs) for run in runs if run.kind == "bad"] == [("failed", 1)]
        (gang,) = [run for run in runs if run.kind == "both"]
        assert (list(gang.devices), gang.outcome) == (GPUS[:2], "completed")
        assert gang.ended - gang.begun == pytest.approx(both.seconds, abs=1e-6)
        assert soon(lambda: pool._jobs.figures._open == {})
        pool.trace(tmp_path / "pool.json")
    spans = [one for one in json.loads((tmp_path / "pool.json").read_text())["traceEvents"] if one.get("ph") == "X"]
    assert sum(one["name"] == "both" for one in spans) == 2


def test_graphs_of_the_compiler_are_refused_on_gpus_and_left_to_hosts(fake: Any) -> None:
    net = nn.Linear(2, 2).eval()
    compiled = torch.compile(nn.Linear(2, 2).eval(), mode="reduce-overhead")
    function = torch.compile(lambda x: x, mode="reduce-overhead")
    calls: list[Any] = [
        lambda pool: pool.serve(net, compile={"mode": "reduce-overhead"}),
        lambda pool: pool.serve(compiled),
        lambda pool: pool.serve(function),
        lambda pool: pool.serve(lambda state, x: x, initializer=lambda _: 1) and pool.serve(function),
    ]
    for call in calls:
        with (
            Pool(["host:0", GPUS[0]]) as pool,
            pytest.raises(InvalidArgument, match=r"CUDA graphs of its own.*on cuda:0"),
        ):
            call(pool)
    with Pool(["host:0"]) as pool:
        batcher = calls[0](pool)
        with pytest.raises(InvalidArgument, match="CUDA graphs of its own"):
            pool.add(GPUS[0])
        assert [one.name for one in pool.devices] == ["host:0"]
        del batcher
        pool.add(GPUS[0])
        assert pool.submit(lambda _: 7, needs="cuda").result() == 7
