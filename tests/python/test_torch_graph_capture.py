"""How `cuda.Graph` captures, on stand-ins for `torch.cuda` that keep the state of PyTorch 2.11 and of 2.13."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch._devices import cuda
from paceline.torch._replicas.capture import Attributes
from paceline.torch._run.graphs import Inputs


class State:
    """What PyTorch's allocator and generator hold during captures."""

    broken = False  # whether CUDA refuses to end the present capture
    generator_captures = False
    current = "side"

    def __init__(self, *, ends_all: bool) -> None:
        self.ends_all = ends_all  # whether a failed capture_end ends the rest nevertheless
        self.pools: list[Any] = []  # that allocations of a capture go to
        self.recorded: list[tuple[str, str]] = []  # events and waits, with their stream

    def draw(self) -> None:
        """What a random operator checks outside of a capture."""
        if self.generator_captures:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def end_pool(self, index: int, pool: Any) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)


@pytest.fixture(params=[False, True], ids=["2.11", "2.13"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> State:
    state = State(ends_all=request.param)
    failed = RuntimeError("CUDA error: operation failed due to a previous error during capture")

    class CUDAGraph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "relaxed"
            assert not torch.is_inference_mode_enabled(), "the generator's tensors would be of this mode"
            self.pool = self if pool is None else pool
            if self.pool in state.pools:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            state.pools.append(self.pool)
            state.generator_captures = True

        def capture_end(self) -> None:
            broken, state.broken = state.broken, False
            if broken and not state.ends_all:
                raise failed
            state.end_pool(0, self.pool)
            state.generator_captures = False
            if broken:
                raise failed

    class Stream(str):
        __slots__ = ()
        cuda_stream = 7

        def wait_stream(self, other: Any) -> None:
            state.recorded.append((f"wait for {other}", str(self)))

    class Event:
        cuda_event = 11

        def __init__(self, *, external: bool) -> None:
            assert external, "another stream could not wait for what a replay records"

        def record(self, stream: Any) -> None:
            state.recorded.append(("event", str(stream)))

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        before, state.current = state.current, stream
        try:
            yield
        finally:
            state.current = before

    for name, one in {
        "CUDAGraph": CUDAGraph,
        "Event": Event,
        "current_stream": lambda index: Stream(state.current),
        "default_stream": lambda index: Stream("default"),
        "Stream": lambda index: Stream("new"),
        "stream": on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", state.end_pool, raising=False)
    monkeypatch.setattr(cuda, "device", lambda index: torch.device("cpu"))
    return state


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("cannot wait"), ZeroDivisionError("of the program")], ids=str)
def test_after_a_failed_capture_the_gpu_draws_and_captures_again(
    state: State, broken: bool, error: Exception | None
) -> None:
    def capture() -> None:
        with cuda.Graph(0, "pool").capturing():
            state.broken = broken
            if error is not None:
                raise error

    if broken or error is not None:
        wanted = error or RuntimeError("previous error during capture")
        with pytest.raises(type(wanted), match=str(wanted)):
            capture()
    state.broken = broken = False
    error = None
    state.draw()
    assert state.pools == []
    capture()
    state.draw()


def test_a_capture_in_inference_mode_leaves_the_generator_to_training(state: State) -> None:
    with torch.inference_mode(), cuda.Graph(0, "pool").capturing():
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize(("current", "captured"), [("default", "new"), ("side", "side")])
def test_marks_are_external_events_on_the_stream_that_is_captured(state: State, current: str, captured: str) -> None:
    state.current = current
    graph = cuda.Graph(0, "pool")
    with graph.capturing():
        del state.recorded[:]
        assert graph.mark() == 11
        assert state.recorded == [("event", captured)]
        with torch.cuda.stream("another"):  # type: ignore[arg-type]  # where autograd adds a gradient
            graph.mark()
        assert state.recorded[1:] == [("wait for another", captured), ("event", captured)]


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


@pytest.mark.parametrize("gpu", ["meta", "meta:1"], ids=["its own", "another"])
def test_a_graph_keeps_what_it_may_read_and_not_what_modules_refer_to_besides(
    monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    monkeypatch.setattr(cuda, "device", lambda _: torch.device(gpu))
    pinned = torch.zeros(2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is pinned)

    def there() -> torch.Tensor:
        return torch.zeros(1, device="meta")

    def draws(unread: torch.Tensor) -> Iterator[torch.Tensor]:
        yield unread

    def frame(unread: torch.Tensor) -> types.FrameType:
        return sys._getframe()

    class Gone:
        pass

    class Driver:
        __module__ = "lightning.pytorch"

        def __init__(self, unread: torch.Tensor) -> None:
            self.unread = unread

    class Nameless:
        __module__ = property(lambda self: 1)
        rows = there()

    table, weight = there(), nn.Parameter(there())
    net: Any = nn.Module()
    net.weight, net.config = weight, types.SimpleNamespace(tables=[table, pinned, torch.zeros(3)])
    net.lock, net.entries = threading.Lock(), [{}, 1, weakref.proxy(Gone())]
    net.rows, net.draws, net.frame = _Rows(there()), draws(there()), frame(there())
    net.trainers = Driver(there()), type("Own", (Driver,), {"__module__": "script"})(there())
    net.nameless = Nameless(), type("None", (), {"__module__": None})()
    net.loader = torch.utils.data.DataLoader(_Rows(there()))
    net.optimizer = torch.optim.SGD([nn.Parameter(there())])
    held = Attributes([net], 0)._held
    tensors = [one for one in held if isinstance(one, torch.Tensor)]
    assert {id(one) for one in tensors} == {id(table), id(weight), id(pinned)}
    assert not any(one is net.lock for one in held)


def test_a_graph_sees_the_items_of_a_dataclass_that_is_a_mapping() -> None:
    @dataclasses.dataclass(eq=False)
    class Output(dict[str, Any]):
        rows: torch.Tensor

    def inputs(scale: Any) -> Inputs:
        part = Output(torch.zeros(2))
        part["scale"] = scale
        return Inputs(lambda move: (move(part.rows), part)[1], lambda one: one)

    assert not inputs(1.0).fits(inputs(2.0))
