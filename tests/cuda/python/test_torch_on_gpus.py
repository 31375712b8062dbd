"""The training step of PyTorch modules on GPUs: exact, nothing lost, nothing left."""

from __future__ import annotations

import copy
import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, DeviceGroup, DeviceLost, InvalidArgument, Timeout, Unavailable
from paceline.torch import DataParallel

BOXES = {
    "one": ["cuda:0"],
    "two": ["cuda:0", "cuda:1"],
    "four": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
    "mixed": ["host:0", "cuda:1", "host:1", "cuda:0"],
}
RATIOS = [[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 1.0, 2.0], [0.0, 5.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def module_and_batch(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    return module, (torch.randn(24, 6, dtype=dtype), torch.randint(0, 3, (24,)))


def classify(module: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def plain(module: nn.Module, batch: Any, loss_fn: Any = classify) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    alone = copy.deepcopy(module)
    loss = loss_fn(alone, batch)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in alone.parameters()]


def expect_same(module: nn.Module, expected: list[torch.Tensor | None], tolerance: float = 1e-12) -> None:
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("ratios", RATIOS, ids=str)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_gradient_is_that_of_one_device(
    fake: Any, devices: list[str], ratios: list[float], micro_batch: int | None
) -> None:
    module, batch = module_and_batch()
    balance = ratios[: len(devices)]
    if not any(balance):
        balance[0] = 1.0
    with DataParallel(module, devices, balance=balance, micro_batch=micro_batch) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3)
        for _ in range(4):
            loss, gradients = plain(module, batch)
            assert torch.allclose(trainer.step(classify, batch), loss, rtol=1e-12)
            expect_same(module, gradients)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(trainer.shares.values()) == 24
    del trainer, optimizer
    gc.collect()
    assert fake.leftovers == 0


def test_gradients_are_added_to_what_is_there(fake: Any) -> None:
    module, batch = module_and_batch()
    _, once = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        trainer.step(classify, batch)
    expect_same(module, [2 * gradient for gradient in once if gradient is not None])


def test_parameters_without_gradient_keep_none(fake: Any) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.frozen(self.used(x))
            return out

    module = Partly().double()
    _, batch = module_and_batch()
    _, expected = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
    expect_same(module, expected)


def test_element_types_have_buckets_of_their_own(fake: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 4).double(), nn.Linear(4, 3)
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second((self.first(x) * self.turn).real.float())
            return out

    module = Mixed()
    _, batch = module_and_batch()
    _, expected = plain(module, batch)
    with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
        trainer.step(classify, batch)
    expect_same(module, expected, 1e-6)


def test_weights_and_a_scaler_act_as_on_one_device(fake: Any) -> None:
    module, batch = module_and_batch()
    weight = torch.arange(24) % 5

    def weighted(one: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")

    def whole(one: Any, part: Any) -> Any:
        return 8.0 * (weighted(one, part) * weight).sum() / weight.sum()

    _, expected = plain(module, batch, whole)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        trainer.step(weighted, batch, weight=weight, scaler=scaler)
    expect_same(module, expected)


def test_predict_gives_the_items_back_in_order(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["mixed"], balance=[1.0, 2.0, 1.0, 4.0], micro_batch=3) as trainer:
        torch.testing.assert_close(trainer.predict(batch[0]), module(batch[0]).detach())
        assert trainer.predict(batch[0], lambda one, x: {"twice": one(x) * 2})["twice"].shape == (24, 3)


def test_batch_norm_statistics_come_home(fake: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    _, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance=[3.0, 1.0]) as trainer:
        trainer.step(classify, batch)
    expected = nn.BatchNorm1d(6).double()
    expected(batch[0][:18])  # of the device that ran most items
    torch.testing.assert_close(module[0].running_mean, expected.running_mean)


def test_each_worker_is_on_its_own_stream(fake: Any) -> None:
    module, batch = module_and_batch()
    seen: dict[str, set[Any]] = {}

    def looking(one: Any, part: Any) -> Any:
        seen.setdefault(str(len(fake.streams)), set()).add(tuple(fake.streams))
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4) as trainer:
        trainer.step(looking, batch)
        trainer.step(looking, batch)
        streams = queues_of(trainer).streams
        sources = queues_of(trainer).sources
    assert seen == {"1": {((0, streams[0]),)}, "2": {((0, sources[1]), (1, streams[1]))}}
    assert fake.streams == []


def queues_of(trainer: DataParallel) -> Any:
    return trainer._places.queues


class TestMemory:
    """Memory that runs out."""

    @staticmethod
    def short_of(limit: int, ran: list[int]) -> Any:
        def loss_fn(module: Any, part: Any) -> Any:
            if len(part[0]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            ran.append(len(part[0]))
            return classify(module, part)

        return loss_fn

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
        fake.poison(1)
        with pytest.raises(DeviceLost, match="cuda:1") as error:
            trainer.step(classify, batch)
        assert error.value.device == "cuda:1"


def test_a_hang_is_an_error_that_names_the_device(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=2, timeout=0.2) as trainer:
        trainer.step(classify, batch)
        fake.hang(queues_of(trainer).streams[1])
        with pytest.raises(Timeout, match="cuda:1"):
            trainer.step(classify, batch)
        with pytest.raises(DeviceLost):
            trainer.step(classify, batch)


def test_figures_wait_for_the_steps_they_tell_of(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        for _ in range(5):
            trainer.step(classify, batch)
        report = trainer.report()
        assert report["steps"] == 5
        assert [report["devices"][name]["items"] for name in BOXES["two"]] == [60, 60]
        assert all(report["devices"][name]["busy_seconds"] > 0 for name in BOXES["two"])


def test_auto_follows_the_module(fake: Any) -> None:
    module, _ = module_and_batch()
    with DataParallel(module) as trainer:  # it is on the host
        assert all(device.kind == "host" for device in trainer.group.devices)


def test_a_module_elsewhere_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch import _cuda

    monkeypatch.setattr(_cuda, "device", lambda index: torch.device("meta"))
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match=r"parameter 0\.weight is on cpu, but the first GPU .* is cuda:1"):
        DataParallel(module, ["host:0", "cuda:1"])


def test_launches_that_block_are_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    module, _ = module_and_batch()
    with pytest.raises(Unavailable, match="CUDA_LAUNCH_BLOCKING"):
        DataParallel(module, BOXES["two"])
    DataParallel(module, BOXES["one"]).close()


def test_a_group_that_was_passed_in_stays_open(fake: Any) -> None:
    module, batch = module_and_batch()
    with DeviceGroup(BOXES["two"]) as group:
        for _ in range(2):
            with DataParallel(module, group, balance="even") as trainer:
                trainer.step(classify, batch)
        deadline = time.monotonic() + 10
        while (
            fake.leftovers and time.monotonic() < deadline
        ):  # a worker lets go of the step just after the caller goes on
            time.sleep(0.01)
        assert fake.leftovers == 0


def test_a_parameter_with_gaps_is_not_sent(fake: Any) -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    with pytest.raises(InvalidArgument, match=r"weight.*gaps"):
        DataParallel(module, BOXES["two"])


def test_moving_shares_bring_no_new_sizes(fake: Any) -> None:
    module, batch = module_and_batch()
    sizes = set()

    def loss_fn(one: Any, part: Any) -> Any:
        sizes.add(len(part[0]))
        time.sleep(0.002 * (1 + fake.streams[-1][0]))  # the second GPU is slower, so shares move
        return classify(one, part)

    with DataParallel(module, BOXES["two"], micro_batch=4) as trainer:
        for _ in range(6):
            trainer.step(loss_fn, batch)
    assert sizes == {4}


def test_a_run_that_python_holds_up_is_told_so(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=1) as trainer:
        trainer.step(classify, batch)
        text = trainer.explain()  # here a micro-batch takes as long as its launch
    assert "Launch-bound: a micro-batch takes a GPU" in text
    assert "2 devices share Python's lock" in text


def test_shares_follow_speeds_though_nobody_waits(fake: Any) -> None:
    module, batch = module_and_batch()

    def loss_fn(one: Any, part: Any) -> Any:
        time.sleep(0.001 * len(part[0]) * (1 + 3 * fake.streams[-1][0]))  # the second GPU takes four times as long
        return classify(one, part)

    with DataParallel(module, BOXES["two"]) as trainer:
        for _ in range(12):
            trainer.step(loss_fn, batch)  # no report() in between, which would wait
        assert trainer.shares["cuda:0"] >= 17


def test_weights_that_leave_a_device_without_work(fake: Any) -> None:
    module, batch = module_and_batch()
    weight = torch.zeros(24)
    weight[20:] = 1.0
    _, expected = plain(module, (batch[0][20:], batch[1][20:]))
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        loss_fn = lambda one, part: nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")  # noqa: E731
        trainer.step(loss_fn, batch, weight=weight)
    expect_same(module, expected)


def test_gradients_lie_in_memory_as_parameters_do(fake: Any) -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    loss_fn = lambda one, x: one(x).square().mean()  # noqa: E731
    _, expected = plain(module, images, loss_fn)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(loss_fn, images)
    expect_same(module, expected)
    assert [parameter.grad.stride() for parameter in module.parameters() if parameter.grad is not None] == [
        parameter.stride() for parameter in module.parameters()
    ]


def test_complex_parameters_behind_odd_ones(fake: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x[:, :3] * self.real) * self.turn).abs().sum(1)

    module, (batch, _) = Odd(), module_and_batch()[1]
    loss_fn = lambda one, x: one(x).mean()  # noqa: E731
    _, expected = plain(module, batch, loss_fn)
    with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
        trainer.step(loss_fn, batch)
    expect_same(module, expected)


def test_memory_of_our_own_that_ran_out_is_asked_for_again(fake: Any) -> None:
    module, batch = module_and_batch()
    _, expected = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        fake.library.paceline_fake_fail_allocation(0)  # where the second GPU's gradients come home
        trainer.step(classify, batch)
        assert fake.released == 1
    expect_same(module, expected)


def test_a_step_inside_a_graph_capture_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch import _cuda

    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"]) as trainer:
        monkeypatch.setattr(_cuda, "is_capturing", lambda: True)
        with pytest.raises(InvalidArgument, match="CUDA graph"):
            trainer.step(classify, batch)


def test_closing_from_another_thread_gives_everything_back(fake: Any) -> None:
    module, batch = module_and_batch()
    inside, go_on = threading.Event(), threading.Event()

    def loss_fn(one: Any, part: Any) -> Any:
        inside.set()
        go_on.wait(10)
        return classify(one, part)

    trainer = DataParallel(module, BOXES["two"], balance="even")

    def close() -> None:
        inside.wait(10)
        threading.Timer(0.1, go_on.set).start()
        trainer.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(Cancelled):
        trainer.step(loss_fn, batch)
    closing.join()
    deadline = time.monotonic() + 10
    while fake.leftovers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.leftovers == 0
