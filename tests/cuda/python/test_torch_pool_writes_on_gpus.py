"""`Pool` on GPUs: what is written to a served module, or to the arguments of a job, while the GPU is still at it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import GPUS, home_of
from paceline.torch import Pool
from paceline.torch._devices import cuda
from paceline.torch._pool.weights import Weights
from pool_support import Held, served_by


def expect_answer(batcher: Any, net: nn.Module, x: torch.Tensor) -> None:
    found = batcher(x).result()
    with torch.inference_mode():
        wanted = net(x.unsqueeze(0).to(home_of(GPUS[:1])))[0].cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_follows_every_write_of_the_default_stream(streams: Any) -> None:
    net, x = nn.Linear(6, 3).eval().to(home_of(GPUS[:1])), torch.randn(6)
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        expect_answer(batcher, net, x)
        net.weight.data = torch.randn(3, 6, device=net.weight.device) * 2
        expect_answer(batcher, net, x)
        net.weight.data.mul_(3)
        expect_answer(batcher, net, x)
        net.double()
        expect_answer(batcher, net, x.double())


def test_a_scripted_module_follows_writes_of_the_default_stream(streams: Any) -> None:
    place, x = home_of(GPUS[:1]), torch.randn(6)
    net = torch.jit.trace(nn.Linear(6, 3).eval().to(place), torch.ones(1, 6, device=place))
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        with torch.no_grad():
            net.weight.copy_(torch.randn(3, 6, device=place))
        expect_answer(batcher, net, x)


def test_weights_are_renewed_in_the_memory_that_they_have(streams: Any) -> None:
    net, x = nn.Linear(6, 3).eval(), torch.randn(6)
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        batcher(x).result()
        (copy,) = served_by(batcher)._copies.values()
        before = copy.replica.parameters[0].data_ptr()
        for _ in range(2):
            with torch.no_grad():
                net.weight.copy_(torch.randn(3, 6))
            torch.testing.assert_close(batcher(x).result(), net(x).detach())
            assert copy.replica.parameters[0].data_ptr() == before
        net.double()
        torch.testing.assert_close(batcher(x.double()).result(), net(x.double()).detach())
        assert copy.replica.parameters[0].dtype == torch.float64


def test_a_device_that_runs_out_of_memory_for_new_weights_stays(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, full = nn.Linear(6, 3).eval(), torch.randn(6), False
    real = Weights.of

    def of(*args: Any) -> Any:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    with Pool(GPUS[:2]) as pool:
        batcher = pool.serve(net, needs=GPUS[0])
        monkeypatch.setattr(Weights, "of", of)
        batcher(x).result()
        full = True
        with pytest.raises(torch.OutOfMemoryError):
            batcher(x).result()
        full = False
        torch.testing.assert_close(batcher(x).result(), net(x).detach())
        assert not pool.report()["devices"][GPUS[0]]["retired"]


class Leaf(nn.Module):
    """Its weight is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 3), torch.ones(6, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x * self.weight)
        return found


def test_a_leaf_in_an_attribute_is_renewed_in_another_memory(streams: Any) -> None:
    net, x = Leaf().eval(), torch.randn(6)
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(net)
        for _ in range(2):
            torch.testing.assert_close(batcher(x).result(), net(x).detach())
            with torch.no_grad():
                net.weight.mul_(3)


@pytest.mark.parametrize("how", [lambda net: (net,), lambda net: ([{"net": net}],)])
def test_a_job_waits_for_the_weights_of_a_module_among_its_arguments(streams: Any, how: Any) -> None:
    net = nn.Linear(6, 3).to(home_of(GPUS[:1]))

    def job(device: torch.device, given: Any) -> float:
        found = given[0]["net"] if isinstance(given, list) else given
        return float(found.weight.detach().sum().cpu())

    with Pool(GPUS[:1]) as pool:
        with torch.no_grad():
            net.weight.fill_(2)
        assert pool.submit(job, *how(net)).result() == 36.0
        with torch.no_grad():
            net.weight.fill_(3)
        assert pool.submit(functools.partial(job, given=net)).result() == 54.0


def test_a_result_that_pytorch_cannot_keep_ends_its_job(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def keep(one: torch.Tensor) -> None:
        if len(one) == 1:
            raise ValueError("Attempted to use an uninitialized parameter")
        kept.append(len(one))

    monkeypatch.setattr(cuda, "keep_for_default", keep)
    with Pool(GPUS[:1]) as pool:
        found = pool.submit(lambda device: [torch.ones(size, device=device) for size in (1, 2, 3)]).result(20)
    assert len(found) == 3
    assert kept == [2, 3]


def test_answers_that_are_lazy_conjugates_are_written_out_on_the_gpu(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lazy = cuda.pinned_like, []

    def pinned_like(one: torch.Tensor) -> torch.Tensor:
        lazy.append(one.is_conj() or one.is_neg())
        return real(one)

    monkeypatch.setattr(cuda, "pinned_like", pinned_like)
    x = torch.randn(8)
    answers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.fft.fft(x).conj(),
        lambda x: torch.fft.fft(x).conj().imag,
    ]
    with Pool(GPUS[:1]) as pool:
        for fn in answers:
            torch.testing.assert_close(pool.serve(fn)(x).result(), fn(x).resolve_conj().resolve_neg())
    assert lazy == [False, False]


class Big:
    """Stands for an activation."""


def test_the_retry_after_out_of_memory_has_the_memory_of_what_failed(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []
    bigs: list[weakref.ref[Big]] = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        big = Big()
        if len(x) > 1:
            bigs.append(weakref.ref(big))
            try:
                raise KeyError("first")
            except KeyError:
                raise torch.OutOfMemoryError("CUDA out of memory") from None
        return x + 1

    def release_memory(streams_end: bool) -> None:
        if len(bigs) > len(alive):
            alive.append(bigs[-1]() is not None)

    monkeypatch.setattr(cuda, "release_memory", release_memory)
    with Pool(GPUS[:1]) as pool:
        batcher = pool.serve(answer, max_batch=4, idempotent=True)
        with Held(pool):
            answers = [batcher(torch.tensor(float(k))) for k in range(4)]
        assert [float(one.result()) for one in answers] == [k + 1.0 for k in range(4)]
    assert alive
    assert not any(alive)
