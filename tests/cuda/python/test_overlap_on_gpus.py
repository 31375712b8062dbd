"""Gradients of several GPUs are summed bucket by bucket while backward goes on, and are those of one device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, Shared, expect_same, expect_step, flat_of, module_and_batch, plain
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify

SEVERAL = {name: devices for name, devices in BOXES.items() if len(devices) > 1}


pytestmark = pytest.mark.usefixtures("small_buckets")


class Backwards(nn.Module):
    """Uses its layers in the reverse order of their registration, and one of them only where there are large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.rare, self.first = nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(6, 8)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        large = x.abs().amax(1) > 2.0
        if large.any():
            hidden = hidden + self.rare(hidden) * large[:, None]
        out: torch.Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize("devices", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_all_but_what_is_unused_is_sealed_in_the_backward(
    fake: Any, devices: list[str], micro_batch: int | None
) -> None:
    module, (inputs, targets) = Backwards().double(), module_and_batch()[1]
    with DataParallel(module, devices, balance="even", micro_batch=micro_batch) as trainer:
        for step in range(5):
            batch = (inputs if step == 3 else inputs.clamp(-2.0, 2.0), targets)
            expect_step(trainer, batch)
            if step != 3:
                assert flat_of(trainer).early == 4
        assert [piece.index for bucket in flat_of(trainer)._layout.buckets for piece in bucket.pieces][:4] in (
            [1, 0, 5, 4],
            [0, 1, 5, 4],
            [1, 0, 4, 5],
            [0, 1, 4, 5],
        ), "last first, as the backward comes to them"


def test_a_sum_is_there_before_the_backward_is_over(fake: Any) -> None:
    module, batch = module_and_batch()
    _, gradients = plain(module, batch)
    met = threading.Barrier(2)
    seen: list[torch.Tensor] = []

    def loss_fn(one: Any, part: Any) -> torch.Tensor:
        hidden = one[0](part[0])
        hidden.register_hook(lambda gradient: look() if steps else None)
        loss: torch.Tensor = nn.functional.cross_entropy(one[2](one[1](hidden)), part[1])
        return loss

    def look() -> None:
        met.wait(60)  # both devices have sealed what is behind the first layer, and neither has come to it
        flat = flat_of(trainer)
        seen.append(flat._layout.gradients(flat._sums[:-1])[2].clone())

    steps = 0
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(loss_fn, batch)
        module.zero_grad()
        steps = 1
        trainer.step(loss_fn, batch)
    assert len(seen) == 2
    for one in seen:
        torch.testing.assert_close(one, gradients[2])


@pytest.mark.parametrize("devices", SEVERAL.values(), ids=SEVERAL)
def test_a_gradient_that_comes_twice_in_one_backward_counts_twice(fake: Any, devices: list[str]) -> None:
    module, (_, batch) = Shared().double(), module_and_batch()
    with DataParallel(module, devices, balance="even", micro_batch=4) as trainer:
        for _ in range(3):
            expect_step(trainer, batch)
        assert any(one.again for one in flat_of(trainer)._devices), "the case is not what it should be"


@pytest.mark.parametrize("devices", SEVERAL.values(), ids=SEVERAL)
def test_a_gradient_that_is_not_the_view_is_moved_there(fake: Any, devices: list[str]) -> None:
    module, batch = module_and_batch()

    def clearing(one: Any, part: Any) -> torch.Tensor:
        loss: torch.Tensor = classify(one, part)
        if not flat_gradients_found(one):
            for parameter in one.parameters():
                parameter.grad = None  # as zero_grad() in a loss would
        return loss

    def flat_gradients_found(one: Any) -> bool:
        return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in one.parameters())

    with DataParallel(module, devices, balance="even") as trainer:
        for _ in range(2):
            expect_step(trainer, batch, clearing, whole=classify)


def test_backward_passes_of_the_caller_are_summed_when_all_are_done(fake: Any) -> None:
    module, batch = module_and_batch()
    _, gradients = plain(module, batch)

    def fn(replica: Any, micro_batch: Any) -> None:
        half = classify(replica, micro_batch.data) / 2
        micro_batch.backward(half, retain_graph=True)
        micro_batch.backward(half)

    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        with trainer.batch(batch) as whole:
            whole.run(fn)
        expect_same(module, gradients)
        module.zero_grad()
        with trainer.batch(batch) as whole:
            whole.run(fn, parameters=module[2].parameters())  # type: ignore[index]
        expect_same(module, [None, None, *gradients[2:]])


def test_devices_that_may_still_get_work_seal_in_the_end(fake: Any) -> None:
    module, batch = module_and_batch()
    for corrections in (None, True):
        with DataParallel(module, BOXES["two"], micro_batch=4, hold_back=corrections) as trainer:
            for _ in range(4):
                expect_step(trainer, batch)
                if corrections is None:
                    assert flat_of(trainer).early == 4


def test_accumulation_frozen_parts_and_new_modules(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        for _ in range(2):
            trainer.step(classify, batch)
        _, once = plain(module, batch)
        expect_same(module, [2 * one for one in once if one is not None])
        module[0].weight.requires_grad_(False)  # type: ignore[index]
        for _ in range(2):
            expect_step(trainer, batch)
        module[0].weight.requires_grad_(True)  # type: ignore[index]
        module.append(nn.Linear(3, 3).double())  # type: ignore[operator]
        for _ in range(2):
            expect_step(trainer, batch)


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_seal_follows_the_stream_that_autograd_adds_on(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()
    followed: list[tuple[int, int]] = []
    with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
        trainer.step(classify, batch)
        monkeypatch.setattr(cuda, "let_follow_current", lambda index, handle: followed.append((index, handle)))
        trainer.step(classify, batch)
        streams = trainer._execution.places.queues.streams  # type: ignore[union-attr]
    assert sorted(followed) == sorted([*[(1, streams[1])] * 4, *[(0, streams[3])] * 4])


def test_everything_may_be_frozen_but_the_inputs(fake: Any) -> None:
    module, batch = module_and_batch()
    module.requires_grad_(False)
    inputs = batch[0].clone().requires_grad_()
    wrapped = DataParallel(module, BOXES["two"])
    wrapped(inputs).square().sum().backward()
    plainly = batch[0].clone().requires_grad_()
    module(plainly).square().sum().backward()
    torch.testing.assert_close(inputs.grad, plainly.grad)
    wrapped.close()


def test_sparse_gradients_are_refused(fake: Any) -> None:
    module = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 3)).double()
    batch = torch.randint(0, 5, (24,)), module_and_batch()[1][1]
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        with pytest.raises(InvalidArgument, match=r"the gradient of parameter 0\.weight is sparse"):
            trainer.step(classify, batch)
        module[0].weight.requires_grad_(False)
        trainer.step(classify, batch)


def test_memory_of_gradients_stays(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        for _ in range(2):
            trainer.step(classify, batch)
        before = [bucket.data_ptr() for one in flat_of(trainer)._devices for bucket in one.buckets]
        replicas = trainer._execution.replicas.list
        trainer.step(classify, batch)
        assert before == [bucket.data_ptr() for one in flat_of(trainer)._devices for bucket in one.buckets]
        assert all(parameter.grad is None for replica in replicas for parameter in replica.parameters)
        assert flat_of(trainer)._sums == [], "the user's .grad alone keeps the sums"
