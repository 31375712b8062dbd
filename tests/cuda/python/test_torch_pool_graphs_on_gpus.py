"""`Pool.serve(graphs=True)`: replays give what the module gives, see what is written to it, and what cannot be captured runs as it is."""

from __future__ import annotations

import gc
import re
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gpu_cases import BOXES, GPUS
from paceline import InvalidArgument
from paceline.torch import Pool
from paceline.torch._pool import graphs
from pool_support import Held, served_by, soon

ONE = GPUS[:1]


_calls: list[int] = []  # how many rows Python ran a forward for


class Net(nn.Module):
    """Notes how often Python runs its forward, also that of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        _calls.append(len(x))
        return {"y": (self.first(x) * self.scale + self.shift).relu(), "rows": x.sum(1)}


def ask(batcher: Any, net: nn.Module, times: int) -> None:
    """Each answer is that of the module."""
    for _ in range(times):
        x = torch.randn(6)
        found = batcher(x).result()
        with torch.inference_mode():
            wanted = net(x.unsqueeze(0))
        for name, one in found.items():
            torch.testing.assert_close(one, wanted[name][0])


@pytest.mark.parametrize("devices", [BOXES["one"], BOXES["two"]], ids=["one", "two"])
def test_batches_of_a_size_are_replayed_once_two_have_run(fake: Any, devices: list[str]) -> None:
    net = Net().eval()
    with Pool(devices) as pool:
        batcher = pool.serve(net, graphs=True, max_batch=4)
        with Held(pool, len(devices)):
            asked = [(x, batcher(x)) for x in torch.randn(24, 6)]
        found = [one.result()["y"] for _, one in asked]
        torch.testing.assert_close(torch.stack(found), net(torch.stack([x for x, _ in asked]))["y"])
        _calls.clear()
        for _ in range(40):
            x = torch.randn(6)
            torch.testing.assert_close(batcher(x).result()["rows"], x.sum())
        assert len(_calls) <= 3 * len(devices), "the two runs before, and the capture"
        captured = sum(one.captures for one in served_by(batcher)._graphs.values())
        assert captured >= 1
        assert f"CUDA graphs: {captured} captured, " in pool.explain()


def test_replays_see_what_is_written_and_other_memory_is_captured_anew(fake: Any) -> None:
    net = Net().eval()

    def captures() -> int:
        (graphs,) = served_by(batcher)._graphs.values()
        return int(graphs.captures)

    with Pool(ONE) as pool:
        batcher = pool.serve(net, graphs=True)
        ask(batcher, net, 5)
        assert captures() == 1
        with torch.no_grad():
            next(net.parameters()).mul_(2)
            net.get_buffer("shift").add_(1)
        ask(batcher, net, 2)
        assert captures() == 1
        net.scale.data = torch.full((4,), 3.0)
        ask(batcher, net, 5)
        assert captures() == 2


def test_there_are_few_graphs_and_all_of_a_gpu_share_their_memory(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    with Pool(ONE) as pool:
        batcher = pool.serve(nn.Linear(6, 4).eval(), graphs=True)
        for shape in [(6,), (2, 6), (3, 6)] * 5:
            assert batcher(torch.randn(shape)).result().shape == (*shape[:-1], 4)
        (there,) = served_by(batcher)._graphs.values()
        captured = [one.graph for one in there._captured.values()]
        assert (len(captured), len({id(one.pool) for one in captured})) == (2, 1)
        assert "2 captured, 6 batches replayed" in pool.explain()


def test_graphs_go_with_the_copy_but_for_one_on_a_device_that_hangs(fake: Any) -> None:
    net = Net().eval()
    with Pool(ONE) as pool:
        batcher = pool.serve(net, graphs=True)
        served = served_by(batcher)

        def graphs_now() -> weakref.ref[Any]:
            ask(batcher, net, 4)
            return weakref.ref(served._graphs[ONE[0]])

        hung = graphs_now()
        served.drop(ONE[0])
        freed = graphs_now()
        assert freed() is not hung()
        served.free(pool._jobs.seats[ONE[0]])
        ask(batcher, net, 4)
        assert soon(lambda: (gc.collect(), freed())[1] is None)
        assert hung() is not None


class Reads(Net):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return found if float(found["y"].sum()) >= 0 else {}


class Sets(Net):
    def forward(self, x: torch.Tensor) -> Any:
        self.last = super().forward(x)
        return self.last


class Raises(Net):
    def forward(self, x: torch.Tensor) -> Any:
        if _get_current_dispatch_mode() is not None:  # in a capture of the fake
            raise ZeroDivisionError("as planned")
        return super().forward(x)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Reads, r"the forward cannot be captured at .*test_torch_pool_graphs_on_gpus.py:\d+, in forward"),
        (Sets, "sets its attribute 'last', which a replay would not do"),
        (Raises, "its capture has raised ZeroDivisionError"),
        (Hooked, "has a forward hook .*, which a replay would not call"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(fake: Any, make: Callable[[], Net], why: str) -> None:
    net = make().eval()
    with Pool(ONE) as pool, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batcher = pool.serve(net, graphs=True)
        ask(batcher, net, 6)
        other = pool.serve(Net().eval(), graphs=True)  # the next capture is well
        ask(other, served_by(other)._module, 5)
    (warning,) = [one for one in caught if "graphs=True" in str(one.message)]
    assert issubclass(warning.category, RuntimeWarning)
    assert re.search(why, str(warning.message)), warning.message
    assert "0 captured, 0 batches" in pool.explain()
    assert "1 captured, 3 batches" in pool.explain()


def test_a_version_is_captured_before_it_answers(fake: Any) -> None:
    net, other = Net().eval(), Net().eval()
    with Pool(ONE) as pool:
        batcher = pool.serve(net, graphs=True, max_batch=2)
        ask(batcher, net, 1)
        _calls.clear()
        batcher.publish(other)
        assert (_calls.count(1), _calls.count(2)) == (3, 6), (
            "twice, and the capture; the largest by the live version, too"
        )
        _calls.clear()
        found = batcher(x := torch.randn(6)).result()
        assert not _calls, "a replay"
        torch.testing.assert_close(found["y"], other(x.unsqueeze(0))["y"][0])
        batcher.retire(1)
        batcher.publish(Net().eval(), graphs=False)
        assert soon(lambda: "CUDA graphs" in pool.explain())


class Slotted:
    __slots__ = ("numbers",)


class Boxed:
    def __init__(self) -> None:
        self.box = [types.SimpleNamespace()]

    numbers = property(lambda self: self.box[0].numbers, lambda self, value: vars(self.box[0]).update(numbers=value))


class Named(dict[str, torch.Tensor]):
    numbers = property(lambda self: self["numbers"], lambda self, value: self.update(numbers=value))


class Grows(nn.Module):
    """Keeps a table of numbers, which it replaces when a longer request comes."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        self.tables.numbers = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.tables.numbers) < x.shape[1]:
            self.tables.numbers = torch.arange(float(x.shape[1]))
        found: torch.Tensor = x + self.tables.numbers[: x.shape[1]]
        return found


@pytest.mark.parametrize("make", [Named, Slotted, Boxed])
def test_what_a_forward_replaces_stays_as_long_as_a_graph_reads_it(fake: Any, make: Callable[[], Any]) -> None:
    with Pool(ONE) as pool:
        batcher = pool.serve(Grows(make()).eval(), graphs=True)
        tables = served_by(batcher)._copies[ONE[0]].replica.module.tables
        for _ in range(4):
            assert batcher(torch.ones(3)).result().tolist() == [1, 2, 3]
        read = weakref.ref(tables.numbers)
        assert batcher(torch.ones(5)).result().tolist() == [1, 2, 3, 4, 5]
        assert len(tables.numbers) == 5
        assert read() is not None
        assert batcher(torch.ones(3)).result().tolist() == [1, 2, 3]
        assert "1 captured, 3 batches" in pool.explain()


def test_a_capture_for_which_memory_is_short_is_tried_again_later(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_LATER", 5)
    short = [1]

    class Large(Net):
        def forward(self, x: torch.Tensor) -> Any:
            if _get_current_dispatch_mode() is not None and short and short.pop():
                raise torch.OutOfMemoryError("as planned")
            return super().forward(x)

    net = Large().eval()
    with Pool(ONE) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        batcher = pool.serve(net, graphs=True)
        ask(batcher, net, 3)
        assert not short
        _calls.clear()
        ask(batcher, net, 7)
        assert "0 captured" in pool.explain()
        ask(batcher, net, 2)
        assert "1 captured, 2 batches" in pool.explain()


def test_lengths_are_padded_without_graphs(fake: Any) -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1)

    with Pool(ONE) as pool:
        batcher = pool.serve(Sums().eval(), graphs=True, pad=0.0)
        for length in (3, 5) * 4:
            assert float(batcher(torch.ones(length)).result()) == length
        assert "CUDA graphs" not in pool.explain()


def test_graphs_need_modules_on_gpus(fake: Any) -> None:
    with Pool([*ONE, "host:0"]) as pool:
        net = Net().eval()
        with pytest.raises(InvalidArgument, match="graphs=True needs GPUs, and host:0 computes on the host"):
            pool.serve(net, graphs=True)
        with pytest.raises(InvalidArgument, match="graphs=True is for modules"):
            pool.serve(lambda x: x, graphs=True, needs="cuda")
        ask(pool.serve(net, graphs=True, needs="cuda"), net, 4)
        assert "1 captured" in pool.explain()
