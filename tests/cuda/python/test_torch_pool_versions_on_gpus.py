"""Versions of a served model on GPUs: what another stream has loaded, and memory that holds one version."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, GPUS, home_of
from paceline import Rejected
from paceline.torch import Pool
from paceline.torch._devices import cuda
from paceline.torch._pool.answerer import Answerer
from paceline.torch._pool.served import Copies
from pool_support import served_by, soon


class Net(nn.Module):
    """Has parameters and a buffer."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.shift  # type: ignore[no-any-return]


def expect_answers(batcher: Any, net: Net, version: int) -> None:
    items = list(torch.randn(40, 6))
    asked = [batcher(one) for one in items]
    found = torch.stack([one.result() for one in asked])
    assert {one.version for one in asked} == {version}
    with torch.inference_mode():
        wanted = net(torch.stack(items).to(net.shift.device)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("where", ["host", "gpu"])
def test_a_version_that_was_loaded_on_another_stream_answers(streams: Any, devices: list[str], where: str) -> None:
    place = torch.device("cpu") if where == "host" else home_of(devices)
    first, second, third = (Net().eval().to(place) for _ in range(3))
    with Pool(devices) as pool:
        batcher = pool.serve(first, max_batch=4)
        expect_answers(batcher, first, 1)
        batcher.publish(second)
        expect_answers(batcher, second, 2)
        with torch.no_grad():
            second.shift.add_(1)
            next(second.parameters()).mul_(2)
        expect_answers(batcher, second, 2)
        batcher.publish(third, weight=0.5)
        batcher.promote()
        expect_answers(batcher, third, 3)
        batcher.rollback()
        expect_answers(batcher, second, 2)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_each_gpu_has_one_stream_on_which_versions_are_loaded(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, queue = [], cuda.Queue

    def counted(index: int) -> Any:
        made.append(index)
        return queue(index)

    net = Net().eval()
    with Pool(GPUS[:2]) as pool:
        batcher = pool.serve(net, max_batch=4)
        expect_answers(batcher, net, 1)
        monkeypatch.setattr(cuda, "Queue", counted)
        for _ in range(3):
            batcher.publish(net)
        assert len(made) == 2


def test_a_version_that_nobody_uses_leaves_the_memory_of_the_gpus(streams: Any) -> None:
    with Pool(GPUS[:2]) as pool:
        net = Net().eval()
        batcher = pool.serve(net, max_batch=4)
        expect_answers(batcher, net, 1)
        copies: Any = served_by(batcher)
        gone = [weakref.ref(one) for weights in copies._weights.values() for one in weights._copies]
        assert len(gone) >= 4
        del copies
        batcher.publish(net)
        assert all(one() is not None for one in gone)  # for a rollback
        batcher.publish(net)
        assert soon(lambda: all(one() is None for one in gone))
        expect_answers(batcher, net, 3)


def test_modules_are_exchanged_where_memory_runs_out_for_two(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [Net().eval() for _ in range(3)]
    there: dict[str, set[int]] = {name: set() for name in GPUS[:2]}
    load, free = Copies._of, Copies.free

    def limited(self: Copies, seat: Any) -> Any:
        number = nets.index(self._module)  # type: ignore[arg-type]
        if there[seat.name] - {number}:
            raise torch.OutOfMemoryError("CUDA out of memory")
        there[seat.name].add(number)
        return load(self, seat)

    def freed(self: Copies, seat: Any) -> None:
        there[seat.name].discard(nets.index(self._module))  # type: ignore[arg-type]
        free(self, seat)
        assert seat.space not in self._weights

    monkeypatch.setattr(Copies, "_of", limited)
    monkeypatch.setattr(Copies, "free", freed)
    with Pool(GPUS[:2]) as pool:
        batcher = pool.serve(nets[0], max_batch=4)
        expect_answers(batcher, nets[0], 1)
        over, asked = threading.Event(), []

        def ask() -> None:
            while not over.is_set():
                asked.append(batcher(torch.zeros(6)))
                asked[-1].exception()

        thread = threading.Thread(target=ask)
        thread.start()
        batcher.publish(nets[1])
        over.set()
        thread.join()
        assert {one.version for one in asked} <= {1, 2}
        assert all(one.exception() is None for one in asked)
        expect_answers(batcher, nets[1], 2)
        assert list(there.values()) == [{1}, {1}]
        batcher.rollback()
        expect_answers(batcher, nets[0], 1)
        assert list(there.values()) == [{0}, {0}]


def test_a_version_is_not_loaded_where_a_batch_would_have_no_room_beside_it(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets = [Net().eval() for _ in range(3)]
    size = sum(4 * one.numel() for one in [*nets[0].parameters(), *nets[0].buffers()])
    beside, load = [], Copies._of

    def noted(self: Copies, seat: Any) -> Any:
        beside.append(threading.current_thread().name.startswith("paceline publish"))
        return load(self, seat)

    monkeypatch.setattr(Copies, "_of", noted)
    monkeypatch.setattr(cuda, "mark_memory", lambda index: 1000)
    monkeypatch.setattr(cuda, "peak_memory", lambda index: 1300)  # of the largest batch
    rehearse, sizes = Answerer.rehearse, []

    def sized(self: Answerer, seat: Any, example: Any, size: int) -> None:
        sizes.append((self.version, size))
        rehearse(self, seat, example, size)

    monkeypatch.setattr(Answerer, "rehearse", sized)
    with Pool(GPUS[:2]) as pool:
        batcher = pool.serve(nets[0], max_batch=4)
        for name in GPUS[:2]:  # on both
            pool.retire(name)
            expect_answers(batcher, nets[0], 1)
            pool.restore(name)
        monkeypatch.setattr(cuda, "free_memory", lambda index: size + 300)
        batcher.publish(nets[1])
        assert sum(beside) == 2
        assert [size for version, size in sizes if version == 1] == [4, 4]  # the largest, on each device
        beside.clear()
        monkeypatch.setattr(cuda, "free_memory", lambda index: size + 299)
        batcher.publish(nets[2])  # without the previous one there is room, as far as is known
        assert not any(beside)
        expect_answers(batcher, nets[2], 3)
        with pytest.raises(Rejected, match="all requests must go to the new one"):
            batcher.publish(nets[0], weight=0.5)
