"""Buffers between the memories of GPUs: few copies, whatever their number, and the values that one device would have."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import BOXES, home_of
from paceline.torch import DataParallel
from paceline.torch._devices.places import Places
from paceline.torch._replicas import arrivals
from torch_support import classify

pytestmark = pytest.mark.filterwarnings("ignore:.*each micro-batch is normalised.*")


class Sundry(nn.Module):
    """Buffers of all kinds, and a forward that writes to them in all ways. What it writes does not depend on the number of items."""

    in_place: Any
    set_anew: Any
    grows: Any
    later: Any
    mask: Any
    with_gaps: Any
    turn: Any

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("in_place", torch.arange(5.0, dtype=torch.float64))
        self.register_buffer("set_anew", torch.zeros((), dtype=torch.int64))
        self.register_buffer("grows", torch.ones(1))
        self.register_buffer("later", None)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("with_gaps", torch.arange(12.0).view(3, 4)[:, ::2])
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.in_place.mul_(1.5)
            self.set_anew = self.set_anew + 1
            self.grows = torch.cat([self.grows, self.grows[-1:] + 1])
            self.later = torch.full((2,), 7.0, device=x.device) if self.later is None else self.later + 1
            self.mask.logical_not_()
            self.with_gaps.add_(1)
            self.turn.mul_(1j)
        return self.linear(self.norm(x)) * self.with_gaps.sum()


def expect_buffers_of(module: nn.Module, plain: nn.Module, place: torch.device) -> None:
    wanted = dict(plain.named_buffers())
    assert dict(module.named_buffers()).keys() == wanted.keys()
    for name, buffer in module.named_buffers():
        assert buffer.device == place, name
        torch.testing.assert_close(buffer.cpu(), wanted[name], msg=name)


@pytest.mark.parametrize(("box", "busiest"), [("two", 0), ("two", 1), ("four", 3), *(("mixed", n) for n in range(4))])
def test_buffers_are_those_of_one_device(far_gpus: Any, box: str, busiest: int) -> None:
    torch.manual_seed(0)
    part = torch.randn(6, 6), torch.randint(0, 3, (6,))
    plain, devices = Sundry(), BOXES[box]
    home = home_of(devices)
    module = copy.deepcopy(plain).to(home)
    batch = tuple(torch.cat([tensor] * (len(devices) + 1)) for tensor in part)
    shares = [1.0 + (device == busiest) for device in range(len(devices))]
    losses = []  # graphs of earlier steps, for which later ones may not write to the buffers
    with DataParallel(module, devices, balance=shares) as trainer:
        for step in range(7):
            plain(part[0].repeat(2, 1))
            if step in (2, 3):
                losses.append(trainer.loss(classify, batch))
            elif step == 5:
                trainer.predict(batch[0])
            else:
                trainer.step(classify, batch)
            expect_buffers_of(module, plain, home)
            if step == 3:
                for one, place in ((plain, torch.device("cpu")), (module, home)):
                    one.in_place = torch.zeros(3, device=place)
                    one.set_anew.fill_(100)
    assert module.grows.tolist() == list(range(1, 9))


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_a_step_that_fails_leaves_buffers_as_they_were(far_gpus: Any, box: str) -> None:
    devices = BOXES[box]
    home = home_of(devices)
    module = Sundry().to(home)
    fails = [False]

    def loss_fn(one: Any, part: Any) -> Any:
        loss = classify(one, part)
        if fails[0]:
            raise ValueError("no")
        return loss

    batch = torch.randn(24, 6), torch.randint(0, 3, (24,))
    with DataParallel(module, devices, balance="even") as trainer:
        trainer.step(loss_fn, batch)
        before = copy.deepcopy(module).cpu()
        fails[0] = True
        with pytest.raises(ValueError, match="no"):
            trainer.step(loss_fn, batch)
        expect_buffers_of(module, before, home)
        fails[0] = False
        before(batch[0][:6])
        trainer.step(loss_fn, batch)
        for name in ("in_place", "set_anew", "grows", "later", "mask", "turn"):
            torch.testing.assert_close(getattr(module, name).cpu(), getattr(before, name))


class Factor(nn.Module):
    """The gradient of its weight depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("factor", torch.ones(3))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.factor


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_graphs_of_earlier_forwards_keep_their_buffers(far_gpus: Any, box: str) -> None:
    torch.manual_seed(0)
    plain = Factor()
    home = home_of(BOXES[box])
    module, x = copy.deepcopy(plain).to(home), torch.randn(24, 6)
    with DataParallel(module, BOXES[box], balance="even") as parallel:
        for one, inner in ((plain, plain), (parallel, module)):
            outputs = []
            for factor in (1.0, 3.0, 5.0):
                inner.factor = torch.full((3,), factor, device=inner.linear.weight.device)
                outputs.append(one(x))
            for output in outputs:
                output.sum().backward()
    gradient = module.linear.weight.grad
    assert gradient is not None
    torch.testing.assert_close(gradient.cpu(), plain.linear.weight.grad)


@pytest.fixture
def parts() -> Iterator[list[str]]:
    """The first GPU, and two parts of the second one."""
    paceline.partition("cuda:1", [0.5, 0.5])
    yield ["cuda:0", "cuda:1/0", "cuda:1/1"]
    gc.collect()
    paceline.release_partitions("cuda:1")


@pytest.mark.parametrize("transport", ["nccl", "copies"])
@pytest.mark.own_gpus("GPUs have memory of their own")
def test_parts_of_another_gpu_have_buffers_of_their_own(far_gpus: Any, parts: list[str], transport: Any) -> None:
    module, batch = normalised(2)
    plain = copy.deepcopy(module)
    module.to("hpu:0")
    with DataParallel(module, parts, balance=[1.0, 1.0, 2.0], transport=transport) as trainer:
        for _ in range(2):
            plain(batch[0][12:])
            trainer.step(classify, batch)
            expect_buffers_of(module, plain, torch.device("hpu:0"))
        module.eval()
        plain.eval()
        torch.testing.assert_close(trainer.predict(batch[0]).cpu(), plain(batch[0]).detach())


def normalised(layers: int = 53) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A module with three buffers for each layer, of two types."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(layers)), nn.Linear(6, 3))
    return module, (torch.randn(24, 6), torch.randint(0, 3, (24,)))


@pytest.mark.parametrize("box", ["two", "four"])
@pytest.mark.own_gpus("GPUs have memory of their own")
def test_buffers_cross_in_one_copy_for_each_type(far_gpus: Any, box: str) -> None:
    module, batch = normalised()
    module.to("hpu:0")
    devices = BOXES[box]
    with DataParallel(module, devices, balance=[1.0] * (len(devices) - 1) + [2.0]) as trainer:
        trainer.step(classify, batch)
        far_gpus.take_crossings()
        trainer.step(classify, batch)
        assert far_gpus.take_crossings() == 2, "from the device that ran most items, by PyTorch"
        copies = trainer._execution.replicas._flat.copies  # type: ignore[union-attr]
        assert len(copies) == 2 * (len(devices) - 1), "to all others, by the queues"


def test_memory_that_pytorch_fills_is_waited_for(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = normalised(2)
    drained: list[Places] = []
    counts = []
    monkeypatch.setattr(Places, "drain", lambda places: drained.append(places))
    for filled in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda filled=filled: filled)
        with DataParallel(module, BOXES["two"], balance="even") as trainer:
            drained.clear()
            for _ in range(3):
                trainer.step(classify, batch)
            counts.append(len(drained))
    assert counts[1] == counts[0] + 1, "memory is filled once, on a stream that the copies do not wait for"


@pytest.mark.parametrize("buffers", [True, False])
def test_buffers_are_waited_for_before_the_forward(
    far_gpus: Any, monkeypatch: pytest.MonkeyPatch, buffers: bool
) -> None:
    monkeypatch.setattr(arrivals, "MOST_BYTES", 16)  # parameters come in many buckets, each awaited where it is used
    module, batch = normalised(2) if buffers else (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), normalised(1)[1])
    module.to(home := home_of(BOXES["two"]))
    plain = copy.deepcopy(module).cpu()
    waiting: list[set[int]] = []

    def loss_fn(one: Any, part: Any) -> Any:
        replica = trainer._execution.replicas.list[1]
        if one is replica.module:
            assert replica.arrivals is not None
            waiting.append(set(replica.arrivals.waiting))
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance=[1.0, 2.0], transport="copies") as trainer:
        for _ in range(2):
            trainer.step(loss_fn, batch)
            plain(batch[0][8:])
    assert [0 in buckets for buckets in waiting] == [not buffers] * 2
    assert all(len(buckets) > 1 for buckets in waiting)
    expect_buffers_of(module, plain, home)
