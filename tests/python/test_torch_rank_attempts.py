"""`DataParallel(group=)`: attempts that do not count, after gradients were sent, and what comes between attempts."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._run.buckets import Layout
from rank_processes import Run, error_of, trainer_of
from test_torch_rank_sums import Deep, Twice, small_buckets, squares
from torch_support import gradients, hosts, plain, worst_difference


class SometimesTwice(Twice):
    """Backward comes to a parameter twice on this rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.plainly = rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.plainly:
            return super().forward(x)
        x = self.first(x).tanh()
        for _ in range(2):
            x = self.shared(x).tanh()
        return x


def batch_of(rank: int, step: int = 0, items: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(items, 6, dtype=torch.float64, generator=generator)


def wanted_of(step: int) -> list[torch.Tensor | None]:
    return plain(Twice(), squares, torch.cat([batch_of(0, step), batch_of(1, step)]))[1]


def stepping(rank: int, how: str) -> Any:
    """Rank 1 has to run again, once something was sent. Rank 0 does something else meanwhile."""
    module = SometimesTwice(rank)
    found: list[Any] = []
    again = 0

    def loss_fn(one: Any, x: torch.Tensor) -> torch.Tensor:
        if rank == 0 and how == "edits its batch":
            x[:, 0] = x[:, 0].clamp(max=0.1)
        if rank == 0 and how == "fails" and len(found) == 1:
            raise KeyError("bad item")
        return squares(one, x)

    with small_buckets(), trainer_of(module) as trainer:
        going_back = trainer._execution._go_back

        def go_back(retry: Any) -> None:
            nonlocal again
            again += 1
            if rank == 0 and how == "is interrupted":
                raise KeyboardInterrupt
            going_back(retry)

        trainer._execution._go_back = go_back  # type: ignore[method-assign]
        for step in range(5):
            module.zero_grad()
            part = batch_of(rank, step)
            try:
                error = error_of(lambda part=part: trainer.step(loss_fn, part))  # type: ignore[misc]
            except KeyboardInterrupt:
                error = KeyboardInterrupt, ""
            found.append((error, gradients(module)))
    return again, found


@pytest.mark.parametrize("how", ["waits", "edits its batch", "fails", "is interrupted"])
def test_ranks_stay_at_the_same_step_whatever_happens_between_attempts(on_ranks: Run, how: str) -> None:
    (again, first), (_, second) = on_ranks(2, stepping, how)
    assert again > 0 or how == "fails"
    for step, ((error, found), (theirs, other)) in enumerate(zip(first, second, strict=True)):
        assert (error[0] is type(None)) == (theirs[0] is type(None)), (step, error, theirs)
        if error[0] is not type(None):
            assert found == other == [None] * 4
            assert error[0] in ((KeyError,) if how == "fails" else (KeyboardInterrupt,)), error
            assert theirs[0] is Error
        elif how != "edits its batch":
            assert worst_difference(found, wanted_of(step)) < 1e-12
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, other, strict=True))


def seconds_of(rank: int, how: str) -> Any:
    """Rank 1 takes its time. Rank 0 waits for it: for its other attempt, or before the weights are exchanged."""
    module: Any = SometimesTwice(rank) if how == "attempts" else nn.Linear(6, 2).double()

    def loss_fn(one: Any, x: torch.Tensor) -> Any:
        if rank and how == "attempts":
            time.sleep(0.3)
        return squares(one, x) if how == "attempts" else {"a": one(x).square().mean(1)}

    figures = []
    with small_buckets(), trainer_of(module) as trainer:
        for step in range(4):
            if rank and how == "weights":
                time.sleep(0.3)
            trainer.step(loss_fn, batch_of(rank, step), weight=None if how == "attempts" else {"a": None})
            figures.append([one["seconds"] for one in trainer.report()["ranks"]])
    return figures


@pytest.mark.alone
@pytest.mark.parametrize("how", ["attempts", "weights"])
def test_what_a_rank_waits_for_others_is_not_its_own_work(on_ranks: Run, how: str) -> None:
    for figures in on_ranks(2, seconds_of, how):
        assert max(rank_0 for rank_0, _ in figures) < 0.2, figures


def failing_before(rank: int) -> Any:
    """Rank 1 fails before it has told anything, when rank 0 may have new shares to tell."""
    module = nn.Linear(6, 2).double()
    fails, kinds = False, []

    def weight(x: Any) -> torch.Tensor:
        if fails and rank == 1:
            raise ValueError("bad weight")
        return torch.ones(len(x[0]))

    def loss_fn(one: Any, x: Any) -> torch.Tensor:
        time.sleep(len(x[0]) * (0.002 if rank else 0.0004))
        return one(x[0]).square().sum(1)  # type: ignore[no-any-return]

    data = TensorDataset(torch.randn(64 * 20, 6, dtype=torch.float64))
    with trainer_of(module) as trainer:
        sampler = trainer.batch_sampler(len(data), 64)
        plans = set()
        for batch in sampler.batches(DataLoader(data, batch_sampler=sampler)):
            for fails in (True, False):  # noqa: B007
                module.zero_grad()
                kinds.append(error_of(lambda batch=batch: trainer.step(loss_fn, batch, weight=weight))[0])  # type: ignore[misc]
            plans.add(sampler.shares)
    return kinds, len(plans)


@pytest.mark.alone
def test_a_rank_that_fails_first_leaves_new_shares_to_the_next_exchange(on_ranks: Run) -> None:
    (first, plans), (second, _) = on_ranks(2, failing_before)
    assert first == [Error, type(None)] * 20
    assert second == [ValueError, type(None)] * 20
    assert plans > 1


def chained(module: Any, x: torch.Tensor) -> Any:
    return module["b"](module["a"](x)).square().mean()


def freezing(rank: int) -> Any:
    """Two networks that are trained in turns."""
    module: Any = nn.ModuleDict({"a": Twice(), "b": Twice()})
    for name in module:
        module[name].forward = lambda x, one=module[name]: one.shared(one.first(x).tanh()).tanh()
    layouts = 0
    made = Layout.__init__

    def make(*given: Any) -> None:
        nonlocal layouts
        layouts += 1
        made(*given)

    with pytest.MonkeyPatch.context() as patch, small_buckets(), trainer_of(module) as trainer:
        patch.setattr(Layout, "__init__", make)
        for step in range(10):
            module["a"].requires_grad_(step % 2 == 0)
            module.zero_grad()
            trainer.step(chained, batch_of(rank, step))
    return layouts, gradients(module)


def test_networks_that_are_frozen_in_turns_keep_their_layouts(on_ranks: Run) -> None:
    (layouts, found), (_, other) = on_ranks(2, freezing)
    assert layouts <= 2 * 2 + 2  # in reverse order, then in that of a backward; and those that are empty
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, other, strict=True))


class Late:
    """A reducer of which the first sum fails while the second one is under way."""

    def __init__(self) -> None:
        self.sums = 0
        self.late: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.float64:  # a header
            return None
        self.sums += 1
        reducer, number = self, self.sums

        class Work:
            def wait(self) -> None:
                if number == 1:
                    raise ConnectionError("a rank is gone")
                if number == 2:
                    reducer.late.append(tensor)

        return Work()

    def should_commit(self) -> bool:
        return True


def test_memory_of_a_failed_sum_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch._run import rank_sums

    monkeypatch.setattr(rank_sums, "FIRST_BYTES", 1)
    module, reducer = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), Late()
    with DataParallel(module, hosts(1), reducer=reducer) as trainer:
        batch = torch.randn(8, 6)
        kind, text = error_of(lambda: trainer.step(squares, batch))
        assert kind is Error
        assert "a rank is gone" in text
        trainer.step(squares, batch)
        before = gradients(module)
        assert reducer.late
        reducer.late[0].fill_(7.0)  # the old sum ends
        assert worst_difference(gradients(module), before) == 0


def test_a_gpu_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.torch._trainer import launched

    class Gpu:
        kind = "cuda"

        def __init__(self, index: int) -> None:
            self.index, self.name = index, f"cuda:{index}"

    module: Any = nn.Module()
    module.parameters = lambda: iter([type("On", (), {"device": torch.device("cuda:0")})()])
    monkeypatch.setattr(launched, "all_devices", lambda: [Gpu(0), Gpu(1)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launched.own_devices("DataParallel", module, brings=True) == ["cuda:0"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InvalidArgument, match=r"the module is on cuda:0, and this process \(LOCAL_RANK 1\) has cuda:1"):
        launched.own_devices("DataParallel", module, brings=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match="3 processes on this machine and 2 GPUs"):
        launched.own_devices("DataParallel", module, brings=True)


def counted(rank: int, devices: list[int], fails: bool, several: bool) -> Any:
    """What each step of a rank with so many devices exchanges. Rank by rank one of them fails, in its last bucket."""
    module, said, who = Deep(), list[str](), -1
    reduce, gather = dist.all_reduce, dist.all_gather

    def between(left: int) -> None:
        if rank == who and left == 0:
            raise KeyError("bad gradient")

    def noted(name: str, call: Any) -> Any:
        def noting(*args: Any, **options: Any) -> Any:
            said.append(name)
            return call(*args, **options)

        return noting

    found = []
    with pytest.MonkeyPatch.context() as patch, small_buckets() if several else contextlib.nullcontext():
        patch.setattr(dist, "all_reduce", noted("sum", reduce))
        patch.setattr(dist, "all_gather", noted("header", gather))
        with DataParallel(module, hosts(devices[rank]), group=dist.group.WORLD) as trainer:
            for step in range(5):
                who = step - 3 if fails else -1
                said.clear()
                module.zero_grad()
                x = batch_of(rank, step)
                error = error_of(lambda x=x: trainer.step(lambda m, x: m(x, between).square().mean(), x))  # type: ignore[misc]
                found.append((*error, gradients(module), list(said)))
    return found


@pytest.mark.parametrize("devices", [[1, 1], [2, 2], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("several", [False, True], ids=["one bucket", "several"])
def test_ranks_that_send_early_and_ranks_that_do_not_exchange_the_same(
    on_ranks: Run, devices: list[int], several: bool
) -> None:
    both = on_ranks(2, counted, devices, False, several)
    for step, found in enumerate(zip(*both, strict=True)):
        wanted = plain(Deep(), squares, torch.cat([batch_of(0, step), batch_of(1, step)]))[1]
        for kind, text, gradient, _ in found:
            assert kind is type(None), text
            assert worst_difference(gradient, wanted) < 1e-12
    early = several and 1 in devices
    sums = ["sum"] * (4 if several else 1)
    for found in both:
        assert sorted(found[-1][-1]) == ["header"] * (1 + early) + sums
    if not early:
        assert both[0][-1][-1] == ["header", *sums]


@pytest.mark.parametrize("devices", [[1, 1], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("several", [False, True], ids=["one bucket", "several"])
def test_a_rank_may_fail_whether_it_sends_early_or_not(on_ranks: Run, devices: list[int], several: bool) -> None:
    both = on_ranks(2, counted, devices, True, several)
    for step in (3, 4):
        for rank, (kind, text, gradient, _) in enumerate(found[step] for found in both):
            assert kind is (KeyError if rank == step - 3 else Error), text
            assert gradient == [None] * 4
