"""Memory that runs out, failures, hangs, lost devices, and what is refused: nothing is lost, and the device is named."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, expect_same, module_and_batch, plain, queues_of
from paceline import DeviceLost, InvalidArgument, Timeout, Unavailable
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify

MOST_ALLOCATIONS = 50  # of our own memory, in a step on the largest of the boxes


class TestMemory:
    """Memory that runs out."""

    @staticmethod
    def short_of(limit: int, ran: list[int], error: type[Exception] = torch.OutOfMemoryError, told: str = "") -> Any:
        def loss_fn(module: Any, part: Any) -> Any:
            if len(part[0]) > limit:
                raise error(told or "CUDA out of memory. Tried to allocate 2.00 GiB.")
            ran.append(len(part[0]))
            return classify(module, part)

        return loss_fn

    @pytest.mark.parametrize(
        "told",
        [
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA",
        ],
    )
    def test_libraries_and_the_driver_may_be_those_who_say_so(self, fake: Any, told: str) -> None:
        module, batch = module_and_batch()
        ran: list[int] = []
        with DataParallel(module, BOXES["two"], balance="even") as trainer:
            loss, _ = plain(module, batch)
            assert torch.allclose(trainer.step(self.short_of(4, ran, RuntimeError, told), batch), loss)
        assert max(ran) <= 4

    def test_unused_memory_is_given_back_before_the_step_runs_again(
        self, fake: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, batch = module_and_batch()
        wide, wide_batch = nn.Linear(300, 300).double(), torch.randn(8, 300, dtype=torch.float64)
        held: list[weakref.ref[Any]] = []
        released: list[tuple[bool, bool]] = []  # at the release: whether the pools and cycles hold anything
        release = cuda.release_memory

        class Holder:
            """Keeps a tensor in a cycle."""

            def __init__(self) -> None:
                self.itself, self.tensor = self, torch.ones(3)
                held.append(weakref.ref(self))

        def loss_fn(one: Any, part: Any) -> Any:
            holder = Holder() if len(part[0]) > 4 else None
            if holder is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            released.append((fake.unused_pool_bytes > 0, any(one() is not None for one in held)))
            return classify(one, part)

        def noted(streams_end: bool) -> None:
            released.append((fake.unused_pool_bytes > 0, any(one() is not None for one in held)))
            release(streams_end)

        gc.disable()
        try:
            with DataParallel(module, BOXES["two"], balance="even") as trainer:
                with DataParallel(wide, BOXES["two"], balance="even") as other:
                    other.step(lambda one, x: one(x).square().mean(), wide_batch)
                monkeypatch.setattr(cuda, "release_memory", noted)
                trainer.step(loss_fn, batch)
        finally:
            gc.enable()
        assert released[0] == (True, False), "cycles are collected first"
        assert released[1][0] is False, "PyTorch's memory was released, and that of the pools after it"

    def test_only_memory_that_runs_out_has_caches_emptied(self, fake: Any) -> None:
        module, batch = module_and_batch()

        def draws(one: Any, part: Any) -> Any:
            return classify(one, part) * (1 + 0 * torch.rand(()))

        with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
            trainer.step(classify, batch)
            trainer.step(draws, batch)  # runs again, to draw by seeds
            assert fake.released == 0

    @pytest.mark.parametrize("devices", [BOXES["one"], BOXES["two"], BOXES["mixed"], ["host:0", "host:1"]], ids=str)
    def test_the_step_runs_again_in_smaller_pieces(self, fake: Any, devices: list[str]) -> None:
        module, batch = module_and_batch()
        ran: list[int] = []
        with DataParallel(module, devices, balance="even") as trainer:
            for _ in range(2):
                loss, gradients = plain(module, batch)
                assert torch.allclose(trainer.step(self.short_of(4, ran), batch), loss)
                expect_same(module, gradients)
                module.zero_grad()
            assert max(ran) <= 4
            assert "ran out of memory" in trainer.explain()
            assert trainer.report()["steps"] == 2

    def test_only_the_memory_that_ran_out_gets_a_cap(self, fake: Any) -> None:
        module, batch = module_and_batch()
        sizes: dict[int, list[int]] = {}

        def loss_fn(one: Any, part: Any) -> Any:
            gpu = fake.streams[-1][0]
            if gpu == 1 and len(part[0]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.setdefault(gpu, []).append(len(part[0]))
            return classify(one, part)

        with DataParallel(module, BOXES["two"], balance="even") as trainer:
            trainer.step(loss_fn, batch)
            assert "cuda:1: at most 3 items" in trainer.explain()
            assert "cuda:0: at most" not in trainer.explain()
        assert max(sizes[0]) == 12
        assert max(sizes[1]) <= 3

    def test_random_draws_are_those_of_the_first_try(self, fake: Any) -> None:
        module, batch = module_and_batch()
        drawn: list[float] = []
        refused: list[int] = []

        def loss_fn(one: Any, part: Any) -> Any:
            value = torch.rand(())
            if not refused:
                refused.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            drawn.append(float(value))
            return classify(one, part)

        torch.manual_seed(5)
        expected = float(torch.rand(()))
        torch.manual_seed(5)
        with DataParallel(module, BOXES["one"]) as trainer:
            trainer.step(loss_fn, batch)
        assert drawn[0] == expected

    def test_one_item_that_does_not_fit_is_an_error(self, fake: Any) -> None:
        module, batch = module_and_batch()
        with DataParallel(module, BOXES["two"], balance="even") as trainer:
            with pytest.raises(torch.OutOfMemoryError):
                trainer.step(self.short_of(0, []), batch)
            assert all(parameter.grad is None for parameter in module.parameters())
            loss, gradients = plain(module, batch)
            assert torch.allclose(trainer.step(classify, batch), loss)
            expect_same(module, gradients)

    def test_predict_runs_again_too(self, fake: Any) -> None:
        module, batch = module_and_batch()

        def forward(one: Any, part: Any) -> Any:
            if len(part) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return one(part)

        with DataParallel(module, BOXES["two"]) as trainer:
            torch.testing.assert_close(trainer.predict(batch[0], forward), module(batch[0]).detach())


def test_memory_of_our_own_that_ran_out_is_asked_for_again(fake: Any) -> None:
    module, batch = module_and_batch()
    _, expected = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even", transport="copies") as trainer:
        fake.library.paceline_fake_fail_allocation(0)  # where the second GPU's gradients come home
        trainer.step(classify, batch)
        assert (fake.released, fake.streams_ended) == (1, 0), "streams of whole GPUs stay, and what belongs to them"
    expect_same(module, expected)


@pytest.mark.parametrize("box", ["two", "four", "mixed"])
def test_memory_of_our_own_may_run_out_anywhere_in_a_step(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    _, expected = plain(module, batch)
    again = 0
    for after in range(MOST_ALLOCATIONS):
        module.zero_grad()
        with DataParallel(module, BOXES[box], balance="even", transport="copies") as trainer:
            fake.released = 0
            fake.library.paceline_fake_fail_allocation(after)
            trainer.step(classify, batch)
            again += fake.released > 0
            fake.library.paceline_fake_fail_allocation(-1)
        expect_same(module, expected)
    assert 0 < again < MOST_ALLOCATIONS, "every allocation of a step has failed once, and further ones were not come to"


def test_a_failed_step_commits_nothing_and_the_next_one_works(fake: Any) -> None:
    module, batch = module_and_batch()

    def fails(one: Any, part: Any) -> Any:
        if fake.streams[-1][0] == 1:
            raise RuntimeError("no")
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4) as trainer:
        with pytest.raises(RuntimeError, match="no") as error:
            trainer.step(fails, batch)
        assert "cuda:1" in error.value.__notes__[0]
        assert all(parameter.grad is None for parameter in module.parameters())
        _, gradients = plain(module, batch)
        trainer.step(classify, batch)
    expect_same(module, gradients)


def test_a_lost_device_is_named(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        trainer.report()
        fake.poison(1)
        with pytest.raises(DeviceLost, match="cuda:1") as error:
            trainer.step(classify, batch)
        assert error.value.device == "cuda:1"
        assert set(trainer._execution.places.pool_peaks()) == {
            "cuda:0",
            "cuda:1",
        }  # as last known, and close() goes through


def test_closing_on_a_broken_gpu_hides_no_error_and_leaves_nothing_open(fake: Any) -> None:
    module, batch = module_and_batch()

    def breaks(one: Any, part: Any) -> Any:
        fake.broken = "CUDA error: device-side assert triggered"
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        with DataParallel(module, BOXES["two"]) as trainer:
            trainer.step(breaks, batch)
    assert trainer._execution.places.queues is None
    trainer.close()
    assert (fake.released, fake.leftovers) == (1, 0)


def test_memory_that_a_broken_gpu_does_not_take_back_fails_the_step(fake: Any) -> None:
    module, batch = module_and_batch()

    def short(one: Any, part: Any) -> Any:
        fake.broken = "CUDA error: device-side assert triggered"
        raise torch.OutOfMemoryError("CUDA out of memory")

    with DataParallel(module, BOXES["two"]) as trainer, pytest.raises(RuntimeError, match="device-side assert"):
        trainer.step(short, batch)


def test_a_hang_is_an_error_that_names_the_device(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=2, timeout=0.2) as trainer:
        trainer.step(classify, batch)
        fake.hang(queues_of(trainer).streams[1])
        with pytest.raises(Timeout, match="cuda:1"):
            trainer.step(classify, batch)
        with pytest.raises(DeviceLost):
            trainer.step(classify, batch)


def noting(order: list[str], name: str, call: Any) -> Any:
    """`call`, with its name put down."""

    def noted() -> None:
        order.append(name)
        call()

    return noted


def test_replicas_are_let_go_of_when_nothing_runs_any_more(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()
    order: list[str] = []
    with DataParallel(module, BOXES["two"]) as trainer:
        trainer.step(classify, batch)
        for owner, call in ((trainer._execution.places, "drain"), (trainer._execution.replicas, "release")):
            monkeypatch.setattr(owner, call, noting(order, call, getattr(owner, call)))
    assert order == ["drain", "release"]


def test_ctrl_c_leaves_every_wait_for_a_gpu_that_hangs(fake: Any) -> None:
    module, batch = module_and_batch()
    trainer = DataParallel(module, BOXES["two"], balance="even", micro_batch=2, timeout=60.0)
    trainer.step(classify, batch)
    hung = queues_of(trainer).streams[1]
    fake.hang(hung)

    def interrupted(call: Any) -> None:
        """The first Ctrl-C ends the step, which then waits until nothing runs any more; the second ends that."""
        ended = threading.Event()

        def press() -> None:
            while not ended.wait(0.4):
                os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            ended.set()
        presser.join()

    def steps() -> None:
        while True:  # some steps ahead nobody waits
            trainer.step(classify, batch)

    interrupted(steps)
    interrupted(trainer.close)
    fake.go_on(hung)
    trainer.close()
    assert fake.leftovers == 0


def test_a_module_elsewhere_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch._devices import cuda

    monkeypatch.setattr(cuda, "device", lambda index: torch.device("meta"))
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match=r"parameter 0\.weight is on cpu, but the first GPU .* is cuda:1"):
        DataParallel(module, ["host:0", "cuda:1"])


@pytest.mark.parametrize("devices", [BOXES["two"], BOXES["mixed"]], ids=str)
def test_a_batch_on_another_gpu_is_refused_before_anything_runs(fake: Any, devices: list[str]) -> None:
    module, batch = module_and_batch()
    elsewhere = batch[0], batch[1].to("meta")
    with DataParallel(module, devices) as trainer:
        for call in (lambda: trainer.step(classify, elsewhere), lambda: trainer.predict(elsewhere)):
            with pytest.raises(InvalidArgument, match=r"batch\[1\] is on meta, where nothing tells") as caught:
                call()
            assert not hasattr(caught.value, "__notes__"), "a worker has found it"


@pytest.mark.parametrize("devices", [BOXES["one"], BOXES["two"], BOXES["mixed"]], ids=str)
@pytest.mark.parametrize("of_batch", [False, True], ids=["tensor", "callable"])
def test_weights_and_costs_on_another_gpu_are_refused_before_anything_runs(
    fake: Any, devices: list[str], of_batch: bool
) -> None:
    module, batch = module_and_batch()
    elsewhere = torch.ones(len(batch[0]), device="meta")
    values: Any = (lambda _: elsewhere) if of_batch else elsewhere
    ran: list[int] = []

    def loss_fn(one: Any, part: Any) -> Any:
        ran.append(len(part[0]))
        return classify(one, part)

    with DataParallel(module, devices) as trainer:
        with pytest.raises(
            InvalidArgument, match=r"weight: the tensor is on meta, where nothing tells .* module is: cpu"
        ):
            trainer.step(loss_fn, batch, weight=values)
        with pytest.raises(InvalidArgument, match=r"cost: the tensor is on meta, where nothing tells"):
            trainer.step(loss_fn, batch, cost=values)
        with pytest.raises(InvalidArgument, match=r"cost: the tensor is on meta, where nothing tells"):
            trainer.predict(batch[0], cost=values)
        assert not ran
        trainer.step(loss_fn, batch, weight=torch.ones(len(batch[0])))


def test_launches_that_block_are_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    module, _ = module_and_batch()
    with pytest.raises(Unavailable, match="CUDA_LAUNCH_BLOCKING"):
        DataParallel(module, BOXES["two"])
    DataParallel(module, BOXES["one"]).close()


def test_a_parameter_with_gaps_is_not_sent(fake: Any) -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    with pytest.raises(InvalidArgument, match=r"weight.*gaps"):
        DataParallel(module, BOXES["two"])


def test_a_step_inside_a_graph_capture_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch._devices import cuda

    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"]) as trainer:
        monkeypatch.setattr(cuda, "is_capturing", lambda: True)
        with pytest.raises(InvalidArgument, match="CUDA graph"):
            trainer.step(classify, batch)


def test_a_gpu_that_failed_elsewhere_is_reported_lost(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    with DataParallel(module, BOXES["two"]) as trainer:
        trainer.step(classify, batch)
        with monkeypatch.context() as patched:
            patched.setattr("paceline.torch._devices.cuda.is_capturing", failed)
            with pytest.raises(
                DeviceLost, match=r"cuda:0: .*illegal memory access was encountered.*new process"
            ) as caught:
                trainer.step(classify, batch)
        assert caught.value.device == "cuda:0"
