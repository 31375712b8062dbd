"""Memory that runs out on GPUs: the step runs again in smaller pieces, and nothing is lost."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, expect_step, home_of, module_and_batch, plain
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
        # At the release: whether the pools and cycles hold anything.
        released: list[tuple[bool, bool]] = []
        assert fake.unused_pool_bytes == 0
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
        assert fake.released == 0
        module, batch = module_and_batch()

        def draws(one: Any, part: Any) -> Any:
            return classify(one, part) * (1 + 0 * torch.rand(()))

        with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
            trainer.step(classify, batch)
            trainer.step(draws, batch)  # runs again, to draw by seeds
            assert fake.released == 0

    @pytest.mark.parametrize("devices", [BOXES["one"], BOXES["two"], BOXES["mixed"], ["host:0", "host:1"]], ids=str)
    def test_the_step_runs_again_in_smaller_pieces(self, fake: Any, devices: list[str]) -> None:
        with home_of(devices):
            module, batch = module_and_batch()
        ran: list[int] = []
        with DataParallel(module, devices, balance="even") as trainer:
            for _ in range(2):
                expect_step(trainer, batch, self.short_of(4, ran), whole=classify)
            assert max(ran) <= 4
            assert "ran out of memory" in trainer.explain()
            assert trainer.report()["steps"] == 2

    @pytest.mark.own_gpus("it tells GPUs apart by their numbers")
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
            expect_step(trainer, batch)

    def test_predict_runs_again_too(self, fake: Any) -> None:
        module, batch = module_and_batch()

        def forward(one: Any, part: Any) -> Any:
            if len(part) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return one(part)

        with DataParallel(module, BOXES["two"]) as trainer:
            torch.testing.assert_close(trainer.predict(forward, batch[0]), module(batch[0]).detach())


@pytest.mark.own_gpus("streams of parts end")
def test_memory_of_our_own_that_ran_out_is_asked_for_again(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", transport="copies") as trainer:
        fake.library.paceline_fake_fail_allocation(0)  # where the second GPU's gradients come home
        expect_step(trainer, batch)
        assert (fake.released, fake.streams_ended) == (1, 0), "streams of whole GPUs stay, and what belongs to them"


@pytest.mark.parametrize("box", ["two", "four"])
def test_micro_batches_become_smaller_where_their_sums_get_no_memory(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    whole = len(batch[0]) // len(BOXES[box])
    smaller: list[int] = []

    def loss_fn(one: Any, part: Any) -> Any:
        if len(part[0]) < whole:
            smaller.append(len(part[0]))
        fake.library.paceline_fake_fail_allocation(-1 if smaller else 0)  # all backward passes come before the sums
        return classify(one, part)

    with DataParallel(module, BOXES[box], balance="even", transport="copies") as trainer:
        expect_step(trainer, batch, loss_fn, whole=classify)
        assert f"at most {whole // 2} items at once" in trainer.explain()
    assert smaller == [whole // 2] * 2, "one device has halved its own"
    fake.library.paceline_fake_fail_allocation(-1)


@pytest.mark.parametrize("box", ["two", "four", "mixed"])
def test_memory_of_our_own_may_run_out_anywhere_in_a_step(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    again = 0
    for after in range(MOST_ALLOCATIONS):
        with DataParallel(module, BOXES[box], balance="even", transport="copies") as trainer:
            fake.released = 0
            fake.library.paceline_fake_fail_allocation(after)
            expect_step(trainer, batch)
            again += fake.released > 0
            fake.library.paceline_fake_fail_allocation(-1)
    assert 0 < again < MOST_ALLOCATIONS, "every allocation of a step has failed once, and further ones were not come to"
