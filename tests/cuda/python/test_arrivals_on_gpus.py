"""Devices in other memory spaces wait for parameters when they first use them, whoever uses them, and how."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu_cases import BOXES, expect_same, expect_step, module_and_batch
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from paceline.torch._devices.places import Places
from paceline.torch._replicas import arrivals
from torch_support import classify


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter in a bucket of its own."""
    monkeypatch.setattr(arrivals, "MOST_BYTES", 1)


class Watched:
    """What the devices wait for, in place of the queues' own `need`."""

    def __init__(self, queues: Any) -> None:
        self._queues = queues
        self.needs: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queues, name)

    def need(self, device: int, bucket: int) -> None:
        self.needs.setdefault(device, []).append(bucket)
        self._queues.need(device, bucket)


def watched(trainer: DataParallel, monkeypatch: pytest.MonkeyPatch) -> Watched:
    places: Places = trainer._execution.places
    watch = Watched(places.queues)
    replicas = trainer._execution.replicas
    begin = arrivals.Arrivals.begin

    def begun(one: arrivals.Arrivals, need: Any, *, compiled: bool) -> None:
        device = next(k for k, replica in enumerate(replicas.list) if replica.arrivals is one)
        begin(one, lambda bucket: watch.need(device, bucket), compiled=compiled)

    monkeypatch.setattr(arrivals.Arrivals, "begin", begun)
    return watch


class Tangled(nn.Module):
    """Uses a parameter of another module before that module runs, ties two, and leaves one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = functional.linear(x, self.second.weight)
        out: torch.Tensor = self.second(self.tied(self.first(x))) + early
        return out


def test_first_uses_are_waited_for_in_their_order_and_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (_, batch) = Tangled().double(), module_and_batch()
    names = [name for name, _ in module.named_parameters()]
    with DataParallel(module, BOXES["mixed"], balance="even", micro_batch=2) as trainer:
        watch = watched(trainer, monkeypatch)
        for _ in range(3):
            watch.needs.clear()
            expect_step(trainer, batch)
            wanted = ["second.weight", "first.weight", "first.bias", "second.bias"]
            home = trainer._execution.places.home_space
            foreign = [k for k, space in enumerate(trainer._execution.places.spaces) if space != home]
            assert sorted(watch.needs) == foreign
            for order in watch.needs.values():
                assert [names[bucket] for bucket in order] == wanted


def all_at_once(one: Any, part: Any) -> Any:
    return classify(one, part) + 0.0 * sum(parameter.sum() for parameter in one.parameters())


def copied(one: Any, part: Any) -> Any:
    return classify(one, part) + 0.0 * sum(parameter.sum() for parameter in copy.deepcopy(one).parameters())


def called(one: Any, part: Any) -> Any:
    return functional.cross_entropy(torch.func.functional_call(one, dict(one.named_parameters()), part[0]), part[1])


@pytest.mark.parametrize("loss_fn", [all_at_once, copied, called])
def test_whoever_reads_all_parameters_waits_for_all(
    fake: Any, monkeypatch: pytest.MonkeyPatch, loss_fn: Callable[..., Any]
) -> None:
    module, (_, batch) = Tangled().double(), module_and_batch()
    count = len(list(module.parameters()))
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watch = watched(trainer, monkeypatch)
        expect_step(trainer, batch, loss_fn)
        assert sorted(watch.needs[1]) == list(range(count))


class Held(nn.Module):
    """Holds parameters outside of the modules' own dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.rnn = nn.GRU(8, 4, batch_first=True)  # has a list of its weights
        self.last = nn.Linear(4, 3)
        self.also = [self.last.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.first(x)[:, None])
        return functional.linear(hidden[:, 0], self.also[0], self.last.bias)


def test_what_is_held_elsewhere_is_waited_for_at_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (_, batch) = Held().double(), module_and_batch()
    names = [name for name, _ in module.named_parameters()]
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watch = watched(trainer, monkeypatch)
        expect_step(trainer, batch)
        at_once = [name for name in names if name.startswith("rnn") or name == "last.weight"]
        order = [names[bucket] for bucket in watch.needs[1]]
        assert order == [*at_once, "first.weight", "first.bias", "last.bias"]


class Caching(nn.Module):
    """Keeps a list of its parameters from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept:
            self.kept.extend(self.parameters())
        weight, bias, *_ = self.kept
        out: torch.Tensor = self.last(functional.linear(x, weight, bias))
        return out


def test_what_a_forward_has_kept_is_waited_for_at_once_from_then_on(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (_, batch) = Caching().double(), module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watch = watched(trainer, monkeypatch)
        for _ in range(3):
            watch.needs.clear()
            trainer.step(classify, batch)
            assert sorted(watch.needs[1]) == [0, 1, 2, 3]


def test_compiled_code_waits_for_all_before_it_begins(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    module, batch = module_and_batch()
    module.compile(backend="eager")
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watch = watched(trainer, monkeypatch)
        expect_step(trainer, batch)
        assert watch.needs[1] == [0, 1, 2, 3]
        assert all(type(part._parameters) is dict for part in trainer._execution.replicas.list[1].modules)
    torch.compiler.reset()


class Losses:
    """Code that calls compiled code out of sight of whoever looks at a loss function."""

    def __init__(self) -> None:
        self.held = {"classify": torch.compile(classify, backend="eager")}

    def __call__(self, one: Any, part: Any) -> Any:
        return self.held["classify"](one, part)


def test_compiled_code_that_anything_calls_waits_for_all(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    module, batch = module_and_batch()
    losses = Losses()
    waited: list[bool] = []

    def loss_fn(one: Any, part: Any) -> Any:
        if one is not trainer._execution.replicas.list[1].module:
            return classify(one, part)  # two workers must not compile at once
        waited.append(watch.needs.get(1, [])[-4:] == [0, 1, 2, 3])
        return losses(one, part)

    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watch = watched(trainer, monkeypatch)
        for expected in ([False, True], [True], [True]):  # the first step compiles, and therefore runs again
            watch.needs.clear()
            waited.clear()
            expect_step(trainer, batch, loss_fn, whole=classify)
            assert waited == expected
    torch.compiler.reset()


def test_nothing_is_waited_for_between_steps(fake: Any) -> None:
    module, (_, batch) = Tangled().double(), module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        for _ in range(2):
            trainer.step(classify, batch)
            mine: Any = trainer._execution.replicas.list[1].arrivals
            assert mine.waiting == set()
        with pytest.raises(RuntimeError, match="no"):
            trainer.step(lambda one, part: (_ for _ in ()).throw(RuntimeError("no")), batch)
        assert mine.waiting == set()
        trainer.step(classify, batch)


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_replay_waits_for_all_parameters(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second GPU nothing is waited for any more when a capture or a replay begins."""
    found: list[set[int]] = []

    def look(graph: Any) -> None:
        if graph.index == 1:
            found.append(set(trainer._execution.replicas.list[1].arrivals.waiting))  # type: ignore[union-attr]

    graph: Any = cuda.Graph

    class Looking(graph.func):  # type: ignore[misc]
        def capturing(self) -> Any:
            look(self)
            return super().capturing()

        def replay(self) -> None:
            look(self)
            super().replay()

    monkeypatch.setattr(cuda, "Graph", functools.partial(Looking, fake))
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(5):
            trainer.step(classify, batch)
    assert found == [set()] * 4, "a capture and three replays"


class Counting(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = module_and_batch()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.inner(x)
        return out


def test_what_runs_again_counts_once(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    module, (_, batch) = Counting(), module_and_batch()
    losses = Losses()

    def loss_fn(one: Any, part: Any) -> Any:
        second = one is trainer._execution.replicas.list[1].module
        return losses(one, part) if second else classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        watched(trainer, monkeypatch)
        for steps in (1, 2):
            trainer.step(loss_fn, batch)
            assert module.count == steps
    torch.compiler.reset()


@torch.compile(backend="eager")
def slope(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return gradient * (1 - y * y)


class CompiledBackward(torch.autograd.Function):
    """tanh, whose backward calls compiled code."""

    lock = threading.Lock()  # two threads must not compile at once

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with CompiledBackward.lock:
            return slope(gradient, *ctx.saved_tensors)


class Slopes(nn.Module):
    """Two layers around the function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10).double(), nn.Linear(10, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(CompiledBackward.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


def test_a_backward_that_compiles_is_not_run_again(fake: Any) -> None:
    """Its graph is gone."""
    module, (x, y) = Slopes(), module_and_batch()[1]
    plain_module = copy.deepcopy(module)
    functional.cross_entropy(plain_module(x), y).backward()
    torch.compiler.reset()
    parallel = DataParallel(module, devices=BOXES["two"])
    functional.cross_entropy(parallel(x), y).backward()
    expect_same(module, [parameter.grad for parameter in plain_module.parameters()])
    parallel.close()
    torch.compiler.reset()


def test_parameters_of_a_bucket_lie_in_one_piece_and_count_their_own_writes(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST_BYTES", 2000)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 8, bias=False))
    module = module.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        home, far = (replica.parameters for replica in trainer._execution.replicas.list)
        buckets = arrivals.buckets_of(far)
        assert len(set(buckets)) > 1
        for one, other, bucket, following in zip(far, far[1:], buckets, buckets[1:], strict=False):
            together = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert together == (bucket == following)
            assert not together or other.data_ptr() - one.data_ptr() == -(-one.nbytes // 256) * 256
        versions = [one._version for one in far]
        with torch.no_grad():
            far[0].add_(1.0)
        assert [one._version for one in far] == [versions[0] + 1, *versions[1:]]
        assert [one.stride() for one in far] == [one.stride() for one in home]
        x = torch.randn(12, 3, 4, 4, dtype=torch.float64)
        trainer.step(lambda one, part: one(part).square().mean(), x)
        assert all(torch.equal(one, other) for one, other in zip(far, home, strict=True))
