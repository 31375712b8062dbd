"""What models keep on GPUs that a pool releases, also on parts that share one memory, and CUDA graphs that are captured anew before a GPU comes back."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import GPUS
from paceline.torch._devices import cuda
from pool_support import served_by
from released_support import Box, box


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def expect_answers(two: Box, batcher: Any, module: nn.Module) -> None:
    """Of each device that takes work."""
    for name in two.engine.active:
        others = [one for one in two.engine.active if one != name]
        for other in others:
            two.pool.retire(other)
        items = list(torch.randn(7, 6))
        found = torch.stack([one.result(20) for one in [batcher(one) for one in items]])
        with torch.inference_mode():
            torch.testing.assert_close(found, module(torch.stack(items)), rtol=1e-5, atol=1e-5)
        for other in others:
            two.pool.restore(other)


@pytest.mark.parametrize(
    "parts",
    [False, pytest.param(True, marks=pytest.mark.own_gpus("these are parts themselves"))],
    ids=["gpus", "parts"],
)
def test_weights_leave_a_released_gpu_and_stay_where_a_part_of_it_uses_them(
    request: pytest.FixtureRequest, streams: Any, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    names = GPUS[:2]
    if parts:
        request.getfixturevalue("whole_afterwards")
        names = [one.name for one in paceline.partition("cuda:0", [0.75, 0.25])]
    back, release = [], cuda.release_memory

    def releases(streams_end: bool) -> None:
        back.append(streams_end)
        release(streams_end)

    monkeypatch.setattr(cuda, "release_memory", releases)
    with box(monkeypatch, names) as two:
        module = net()
        batcher = two.pool.serve(module, max_batch=4)
        expect_answers(two, batcher, module)
        served: Any = served_by(batcher)
        space = two.pool._jobs.seats[two.name].space
        there = [weakref.ref(one) for one in served._weights[space]._copies]
        assert len(there) == 4
        before = len(back)
        two.release()
        assert len(back) == before + 1
        assert two.name not in served._copies
        assert [one() is not None for one in there] == [parts] * 4
        expect_answers(two, batcher, module)
        with torch.no_grad():
            next(module.parameters()).mul_(2)
        expect_answers(two, batcher, module)
        two.come_back()
        assert two.name in served._copies
        assert [one() is not None for one in there] == [parts] * 4, "the same ones, if they were there"
        assert len(served._weights) == 2 - parts
        expect_answers(two, batcher, module)


def test_the_weights_of_a_load_that_hangs_and_ends_late_leave_the_gpu(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def replicate(module: nn.Module) -> nn.Module:
        if threading.current_thread().name.startswith("paceline cuda:"):
            over.wait(60)
        return copy.deepcopy(module)

    with box(monkeypatch, GPUS[:2], hang_seconds=1.0) as two:
        module = net()
        batcher = two.pool.serve(module, replicate=replicate, max_batch=4)
        expect_answers(two, batcher, module)
        served: Any = served_by(batcher)
        space = two.pool._jobs.seats[two.name].space
        two.release()
        assert space not in served._weights
        with pytest.warns(RuntimeWarning, match="stays released"):
            two.fail()
        (thread,) = [one for one in threading.enumerate() if one.name == f"paceline {two.name}"]
        over.set()
        thread.join(20)
        assert not thread.is_alive()
        assert two.name not in served._copies
        assert space not in served._weights
        two.scale._models._failed.clear()
        two.come_back()
        assert space in served._weights
        expect_answers(two, batcher, module)


def test_graphs_go_with_the_weights_and_are_captured_before_the_gpu_takes_work(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with box(monkeypatch, GPUS[:2]) as two:
        module = net()
        batcher = two.pool.serve(module, max_batch=2, graphs=True)
        for _ in range(4):
            expect_answers(two, batcher, module)
        served: Any = served_by(batcher)
        gone = weakref.ref(served._graphs[two.name])
        two.release()
        assert gone() is None
        capture, threads = cuda.Graph, []

        def captured(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return capture(*given)

        monkeypatch.setattr(cuda, "Graph", captured)
        two.come_back()
        assert threads == [f"paceline {two.name}"] * 2, "for one request, and for two"
        assert served._graphs[two.name].captures == 2
        expect_answers(two, batcher, module)
        assert len(threads) == 2
        assert served._graphs[two.name].replays > 2


def test_a_gpu_without_room_stays_released(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with box(monkeypatch, GPUS[:2]) as two:
        module = net()
        batcher = two.pool.serve(module, max_batch=2)
        expect_answers(two, batcher, module)
        served: Any = served_by(batcher)
        two.release()
        load = type(served)._of

        def short(self: Any, seat: Any) -> Any:
            if threading.current_thread().name == f"paceline {two.name}":
                load(self, seat)  # all but the last tensor, so to say
                raise torch.OutOfMemoryError("CUDA out of memory")
            return load(self, seat)

        monkeypatch.setattr(type(served), "_of", short)
        with pytest.warns(RuntimeWarning, match="stays released"):
            two.fail()
        assert two.name not in served._copies
        assert not two.active
        expect_answers(two, batcher, module)
