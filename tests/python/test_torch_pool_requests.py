"""`Pool.serve`: requests that are answered in batches."""

from __future__ import annotations

import asyncio
import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, Rejected
from paceline.torch import Pool
from paceline.torch._pool.progress import watched
from pool_support import Held, pool_of


def test_requests_are_answered_in_batches_and_a_bad_one_fails_alone() -> None:
    sizes: list[int] = []

    def squares(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if bool((x == 13).any()):
            raise ValueError("thirteen")
        return x**2

    with pool_of() as pool:
        batcher = pool.serve(squares, max_batch=8, idempotent=True)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(float(k))) for k in range(40)]
        for k, answer in enumerate(answers):
            if k == 13:
                with pytest.raises(ValueError, match="thirteen"):
                    answer.result()
            else:
                assert answer.result() == k**2
    assert 1 < max(sizes) <= 8


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert torch.is_inference_mode_enabled()
        return {"y": self.layer(batch["x"]), "n": batch["n"] + 1}


def test_a_module_answers_nests_and_shapes_do_not_mix() -> None:
    model = TwoHeads().eval()
    with pool_of() as pool:
        batcher = pool.serve(model)
        items = [{"x": torch.randn(*([2] * (k % 2)), 3), "n": torch.tensor(k)} for k in range(20)]
        answers = [batcher(item) for item in items]
        for item, answer in zip(items, answers, strict=True):
            found = answer.result()
            assert torch.allclose(found["y"], model.layer(item["x"]), atol=1e-6)
            assert found["n"] == item["n"] + 1
        with pytest.raises(InvalidArgument, match="training mode"):
            pool.serve(TwoHeads())
        with pytest.raises(InvalidArgument, match="has a str"):
            batcher({"x": "text", "n": torch.tensor(1)})
        with pytest.raises(InvalidArgument, match="dimension 0 is the request"):
            pool.serve(lambda x: x.sum())(torch.ones(3)).result()


def test_map_keeps_the_order_and_reads_few_items_ahead() -> None:
    read: list[int] = []

    def items() -> Any:
        for k in range(500):
            read.append(k)
            yield torch.tensor(k)

    with pool_of() as pool:
        answers = pool.serve(lambda x: 2 * x, max_batch=4).map(items())
        assert next(answers) == 0
        assert len(read) <= 3 * 4 * 2
        assert [int(one) for one in answers] == [2 * k for k in range(1, 500)]
        broken = pool.serve(lambda x: 1 / 0 * x, max_batch=4).map(items())
        with pytest.raises(ZeroDivisionError):
            next(broken)


def test_requests_may_be_awaited_and_cancelled() -> None:
    async def ask(pool: Pool) -> Any:
        batcher = pool.serve(lambda x: x + 1)
        assert [int(one) for one in await asyncio.gather(*(batcher.ask(torch.tensor(k)) for k in range(10)))] == list(
            range(1, 11)
        )
        with Held(pool):
            task = asyncio.create_task(batcher.ask(torch.tensor(1)))
            await asyncio.sleep(0.01)
            assert pool.waiting == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.waiting == 0

    with pool_of(1) as pool:
        asyncio.run(ask(pool))


def test_a_batch_that_may_not_run_again_fails_as_a_whole_and_runs_once() -> None:
    calls: list[int] = []

    def bad(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        raise ValueError("thirteen")

    with pool_of(1) as pool:
        batcher = pool.serve(bad, max_batch=4)
        with Held(pool):
            answers = [batcher(torch.tensor(k)) for k in range(4)]
        for answer in answers:
            with pytest.raises(ValueError, match="thirteen"):
                answer.result()
        assert sum(calls) == 4


class Notes(nn.Module):
    """Keeps what it is given, as a cache does, and answers from there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(1, 2))

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = x
        self.threads = threading.current_thread().name
        for _ in range(20):
            torch.randn(8, 8).sum()  # lets the other device run
        assert self.threads == threading.current_thread().name
        return self.layer(self.kept)


def test_devices_have_modules_of_their_own_that_share_parameters_and_follow_buffers() -> None:
    model = Notes().eval()
    items = list(torch.randn(200, 2))
    with pool_of() as pool:
        batcher = pool.serve(model, max_batch=4)
        found = torch.stack(list(batcher.map(items)))
        assert torch.allclose(found, model.layer(torch.stack(items)), atol=1e-6)
        assert not hasattr(model, "threads")
        with torch.no_grad():
            model.layer.weight.mul_(2)
        assert torch.allclose(batcher(items[0]).result(), model.layer(items[0]), atol=1e-6)

    norm = nn.BatchNorm1d(2).eval()
    with pool_of() as pool:
        batcher = pool.serve(norm)
        assert torch.allclose(batcher(items[0]).result(), items[0], atol=1e-4)
        norm.running_mean = torch.ones(2)
        assert torch.allclose(batcher(items[0]).result(), items[0] - 1, atol=1e-4)
        assert norm.running_mean is not None
        norm.running_mean.add_(1)
        assert torch.allclose(batcher(items[0]).result(), items[0] - 2, atol=1e-4)


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.compile(net, backend="eager"), copy.deepcopy])
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_are_compiled_or_scripted_are_served(make: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    items = list(torch.randn(40, 4))
    with pool_of() as pool, torch.no_grad():
        found = torch.stack(list(pool.serve(make(net), max_batch=8).map(items)))
        assert torch.allclose(found, net(torch.stack(items)), atol=1e-5)


def test_a_module_that_cannot_be_copied_needs_replicate() -> None:
    model = nn.Linear(2, 2).eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pool_of() as pool:
        with pytest.raises(InvalidArgument, match=r"'lock'.*Give replicate="):
            pool.serve(model)
        found = pool.serve(model, replicate=lambda _: nn.Linear(2, 2))(torch.ones(2)).result()
        assert torch.allclose(found, model(torch.ones(2)), atol=1e-6)


def test_answers_have_memory_of_their_own_and_autograd_takes_them() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(nn.Linear(3, 2).eval(), max_batch=8)
        with Held(pool):
            answers = [batcher(torch.ones(3, requires_grad=True)) for _ in range(8)]
        for answer in answers:
            found = answer.result()
            assert found.untyped_storage().nbytes() == found.nbytes
            assert not found.is_inference()
            (torch.ones(2, requires_grad=True) * found).sum().backward()


def test_answers_keep_the_strides_that_the_model_gives_them() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(lambda x: {"last": x.to(memory_format=torch.channels_last), "plain": x + 1}, max_batch=4)
        items = [torch.randn(3, 4, 5) for _ in range(4)]
        for item, found in zip(items, batcher.map(items), strict=True):
            assert torch.equal(found["last"], item)
            assert torch.equal(found["plain"], item + 1)
            assert (found["last"].stride(), found["plain"].stride()) == ((1, 15, 3), (20, 5, 1))
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in found.values())


def test_an_initializer_makes_the_state_of_each_device_once_on_its_worker() -> None:
    made: list[tuple[torch.device, str]] = []

    def initializer(device: torch.device) -> str:
        made.append((device, threading.current_thread().name))
        return threading.current_thread().name

    def answer(state: str, x: torch.Tensor) -> torch.Tensor:
        assert state == threading.current_thread().name
        return x + 1

    with pool_of() as pool:
        batcher = pool.serve(answer, initializer=initializer, max_batch=2)
        assert [int(one) for one in batcher.map(torch.arange(100))] == list(range(1, 101))
    assert 1 <= len(made) == len(set(made)) <= 2


def test_a_device_whose_initializer_fails_is_retired_and_others_answer() -> None:
    failed: list[str] = []

    def initializer(_: torch.device) -> int:
        if not failed:
            failed.append(threading.current_thread().name)
        if failed[0] == threading.current_thread().name:
            raise OSError("no such file")
        return 1

    with pool_of() as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=initializer, max_batch=4)
        with pytest.warns(RuntimeWarning, match=r"host:\d is lost to the pool.*no such file"):
            assert [int(one) for one in batcher.map(torch.arange(50))] == list(range(1, 51))
        assert sum(one["retired"] for one in pool.report()["devices"].values()) == 1
    with pool_of(1) as pool:
        failed.clear()
        batcher = pool.serve(lambda state, x: x + state, initializer=initializer)
        for _ in range(2):
            with pytest.raises(OSError, match="no such file"):
                batcher(torch.tensor(1)).result()
        assert pool.submit(lambda _: 1).result() == 1


def test_a_full_queue_refuses_requests_of_asyncio() -> None:
    async def ask(pool: Any) -> None:
        batcher = pool.serve(lambda x: x, max_batch=1)
        with Held(pool):
            tasks = [asyncio.create_task(batcher.ask(torch.tensor(k))) for k in range(9)]
            await asyncio.sleep(0)
            with pytest.raises(Rejected, match="queue"):
                await tasks[-1]
        assert [int(await task) for task in tasks[:-1]] == list(range(8))

    with pool_of(1) as pool:
        asyncio.run(ask(pool))


def test_what_map_leaves_is_cancelled() -> None:
    with pool_of() as pool:
        batcher = pool.serve(lambda x: x, max_batch=2)
        for answer in batcher.map(torch.arange(1000)):
            if answer == 3:
                break
        with pytest.raises(RuntimeError, match="stop"):
            for _ in batcher.map(stopping()):
                pass
        pool.submit(lambda _: None).result()
        assert sum(one["jobs"] for one in pool.report()["devices"].values()) < 60


def stopping() -> Any:
    for k in range(5):
        yield torch.tensor(k)
    raise RuntimeError("stop")


def test_map_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        assert [int(one) for one in batcher.map(torch.arange(30), progress=True)] == list(range(1, 31))
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("1/30  ")
        assert lines[-1].startswith("30/30  ")
        assert "items/s  host:0 " in lines[-1]
        assert "% busy)" in lines[-1]
    out = io.StringIO()
    answers = watched(iter(range(3)), None, lambda: {"host:0": {"jobs": 0, "busy_seconds": 0.0}}, every=0, file=out)
    assert list(answers) == [0, 1, 2]
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["1", "2", "3"]
    devices = {"host:0": {"jobs": 0, "busy_seconds": 0.0}}
    answers = watched(iter(range(3)), None, lambda: dict(devices), every=0, file=out)
    next(answers)
    devices["host:1"] = {"jobs": 1, "busy_seconds": 0.0}  # joins
    assert list(answers) == [1, 2]
    assert "host:1" in out.getvalue()


def test_threads_may_share_a_batcher_from_the_first_request_on() -> None:
    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 1, max_batch=4)
        barrier = threading.Barrier(8)
        found: list[bool] = []

        def ask(k: int) -> None:
            barrier.wait()
            found.append(all(int(batcher(torch.full((size,), k)).result()[0]) == k + 1 for size in range(1, 6)))

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 8


def test_arguments_of_serve_are_checked() -> None:
    part = nn.Sequential(nn.BatchNorm1d(3))
    part.training = False
    with pool_of(1) as pool:
        batcher: Any = pool.serve(nn.Identity().eval())
        serve: Any = pool.serve
        for call, text in [
            (lambda: serve(4), "not a module"),
            (lambda: serve(print, max_batch=0), "max_batch"),
            (lambda: serve(print, max_delay=float("nan")), "max_delay"),
            (lambda: serve(part), "training mode"),
            (lambda: serve(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)).eval()), "keeps no statistics"),
            (lambda: serve(nn.Identity().eval(), initializer=print), "its own state"),
            (lambda: serve(print, replicate=print), "for modules"),
            (lambda: batcher([]), "has no tensor"),
            (lambda: batcher({"x": torch.ones(1).numpy()}), r"has a ndarray\..* torch\.as_tensor\(\.\.\.\) makes one"),
            (lambda: batcher(torch.empty(1, device="meta")), "tensor on meta"),
            (lambda: batcher(torch.ones(1), priority="high"), "priority is 'high'"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]
        job = pool.submit(lambda _: next(iter(batcher.map([torch.ones(1)]))))
        with pytest.raises(InvalidArgument, match="waits for a job of a pool"):
            job.result()
