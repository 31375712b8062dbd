"""`Pool.serve(graphs=True)` beside what compiles, captures, loads or hangs elsewhere in the process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gpu_cases import GPUS
from paceline.torch import Pool
from paceline.torch._devices import compile_gate, cuda
from paceline.torch._pool import graphs
from paceline.torch._replicas import capture
from pool_support import served_by, soon

ONE = GPUS[:1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def ask(batcher: Any, net: nn.Module, times: int) -> None:
    """Each answer is that of the module."""
    for _ in range(times):
        x = torch.randn(6)
        with torch.inference_mode():
            wanted = net(x.unsqueeze(0))[0]
        torch.testing.assert_close(batcher(x).result(20), wanted)


def test_a_capture_runs_alone(fake: Any) -> None:
    alone = []

    class Looks(Net):
        def forward(self, x: torch.Tensor) -> Any:
            alone.append([first for _, _, first in compile_gate._of_process._stays])
            return super().forward(x)

    with Pool(ONE) as pool:
        batcher = pool.serve(Looks().eval(), graphs=True)
        for _ in range(5):
            batcher(torch.randn(6)).result()
    assert alone == [[False], [False], [True]]


@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
def test_a_replay_does_not_wait_for_what_compiles_elsewhere(fake: Any, compiled: Any) -> None:
    net = Net().eval()
    with Pool(ONE) as pool:
        batcher = pool.serve(net, graphs=True, compile=compiled)
        ask(batcher, net, 4)
        with compile_gate.CompileGate.of_call().enter(True, "elsewhere"):
            assert batcher(torch.randn(6)).result(20).shape == (4,)


def add(state: float, x: torch.Tensor) -> torch.Tensor:
    return x + state


@contextlib.contextmanager
def publishing(batcher: Any, initializer: Any) -> Iterator[threading.Thread]:
    """While another version is published."""
    thread = threading.Thread(target=batcher.publish, args=(add,), kwargs={"initializer": initializer})
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("sees_it", [True, False])
def test_while_something_loads_onto_a_gpu_there_nothing_is_captured(
    fake: Any, sees_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, loading, go = Net().eval(), threading.Event(), threading.Event()
    enter, alone = compile_gate.CompileGate.enter, list[bool]()

    def entered(self: Any, first: bool, call: Any) -> Any:
        alone.append(first)
        return enter(self, first, call)

    def initializer(_: torch.device) -> float:
        loading.set()
        assert go.wait(20)
        return 2.0

    monkeypatch.setattr(compile_gate.CompileGate, "enter", entered)
    if not sees_it:  # as if it began just afterwards
        monkeypatch.setattr(graphs, "is_loading", lambda _: False)
    with Pool(ONE) as pool:
        batcher, other = pool.serve(net, graphs=True), pool.serve(add, initializer=lambda _: 1.0)
        assert float(other(torch.tensor(1.0)).result()) == 2
        with publishing(other, initializer):
            assert loading.wait(20)
            try:
                ask(batcher, net, 5)
                assert "0 captured" in pool.explain()
                assert any(alone) != sees_it  # nor does it wait for others, to be alone
            finally:
                go.set()
        ask(batcher, net, 2)
        assert "1 captured" in pool.explain()
        assert float(other(torch.tensor(1.0)).result()) == 3


def test_what_loads_onto_a_gpu_waits_for_a_capture_there(fake: Any) -> None:
    begun, go, loads = threading.Event(), threading.Event(), list[bool]()

    class Waits(Net):
        def forward(self, x: torch.Tensor) -> Any:
            if cuda.is_capturing() or _get_current_dispatch_mode() is not None:  # the fake's
                begun.set()
                go.wait(20)
            return super().forward(x)

    def initializer(_: torch.device) -> float:
        loads.append(go.is_set())
        return 2.0

    with Pool(ONE) as pool:
        batcher, other = pool.serve(Waits().eval(), graphs=True), pool.serve(add, initializer=lambda _: 1.0)
        assert float(other(torch.tensor(1.0)).result()) == 2
        other.publish(add, initializer=lambda _: 1.0)  # which measures what a batch takes, on the GPU
        for _ in range(2):
            batcher(torch.randn(6)).result()
        captured = batcher(torch.randn(6))
        assert begun.wait(20)
        with publishing(other, initializer):
            try:
                assert soon(lambda: capture._changed._waiters)  # type: ignore[attr-defined]
            finally:
                go.set()
        captured.result()
        assert loads == [True]
        assert "1 captured" in pool.explain()


def test_a_run_that_hung_and_goes_on_does_not_disturb_the_one_after_it(fake: Any) -> None:
    net = Net().eval()
    with Pool(ONE) as pool:
        batcher = pool.serve(net, graphs=True)
        served, seat = served_by(batcher), pool._jobs.seats[ONE[0]]
        served.of(seat)
        served.drop(seat.name)  # it is given up
        ask(batcher, net, 4)
        present = served._graphs[seat.name]
        key = present._key
        with served.running(seat.name, "another kind", ()):
            assert present._key is key
