"""The lower level of a step: what the caller's function runs backward is exactly the gradient of one device."""

from __future__ import annotations

import copy
import functools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, Unavailable
from paceline.torch import DataParallel
from paceline.torch._trainer.global_batch import FunctionRun
from torch_support import (
    DEVICES,
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    plain,
    worst_difference,
)

F = nn.functional


def backward(module: Any, part: Any) -> None:
    part.backward(classify(module, part.data))


def pair() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module: Any = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6)),
            "c": nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)),
        }
    ).double()
    return module, (torch.randn(26, 6, dtype=torch.double), torch.randn(26, 4, dtype=torch.double))


def criticise(m: Any, part: Any) -> None:
    real, noise = part.data
    part.backward(F.softplus(-m["c"](real)).mean())
    part.backward(F.softplus(m["c"](m["g"](noise).detach())).mean())


def generate(m: Any, part: Any) -> None:
    part.backward(generator_loss(m, part.data))


def critic_loss(m: Any, batch: Any) -> Any:
    return F.softplus(-m["c"](batch[0])).mean() + F.softplus(m["c"](m["g"](batch[1]).detach())).mean()


def generator_loss(m: Any, batch: Any) -> Any:
    return F.softplus(-m["c"](m["g"](batch[1]))).mean()


@DEVICES
def test_two_optimizers_that_alternate_train_as_on_one_device(devices: int) -> None:
    module, batch = pair()
    alone = copy.deepcopy(module)

    def optimizers(m: Any) -> dict[str, torch.optim.Optimizer]:
        critic = torch.optim.Adam(m["c"].parameters(), lr=0.01)
        return {"c": critic, "g": torch.optim.SGD(m["g"].parameters(), lr=0.1)}

    ours, theirs = optimizers(module), optimizers(alone)
    with DataParallel(module, hosts(devices), micro_batch=4) as trainer:
        for _ in range(4):
            with trainer.batch(batch) as global_batch:
                for part, run, loss_fn in (("c", criticise, critic_loss), ("g", generate, generator_loss)):
                    found = global_batch.run(run, parameters=module[part])
                    loss = loss_fn(alone, batch)
                    loss.backward()
                    assert found.item() == pytest.approx(loss.item(), rel=1e-11)
                    for one, optimizer in ((module, ours[part]), (alone, theirs[part])):
                        optimizer.step()
                        one.zero_grad()
    assert worst_difference(list(module.parameters()), list(alone.parameters())) < 1e-11
    assert worst_difference(list(module.parameters()), list(pair()[0].parameters())) > 1e-3, "nothing was trained"


@DEVICES
@pytest.mark.parametrize("by_hand", [False, True])
def test_only_the_parameters_that_were_asked_for_get_gradients(devices: int, by_hand: bool) -> None:
    module, batch = pair()
    _, wanted = plain(module, generator_loss, batch)
    kept = [torch.ones_like(p) for p in module["c"].parameters()]
    for parameter, value in zip(module["c"].parameters(), kept, strict=True):
        parameter.grad = value

    def fn(m: Any, part: Any) -> None:
        if by_hand:
            part.weigh(generator_loss(m, part.data)).backward()
        else:
            generate(m, part)

    with DataParallel(module, hosts(devices), micro_batch=5) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn, parameters=module["g"].parameters())
    assert all(p.grad is value for p, value in zip(module["c"].parameters(), kept, strict=True))
    assert all(bool((value == 1).all()) for value in kept)
    assert_same_gradients(module["g"], wanted[: len(list(module["g"].parameters()))])


@DEVICES
def test_a_gradient_penalty_by_hand_is_exact(devices: int) -> None:
    module, (x, _) = pair()

    def penalty(m: Any, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m["c"](x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    _, wanted = plain(module, penalty, x)
    with DataParallel(module, hosts(devices), micro_batch=4) as trainer, trainer.batch(x) as global_batch:
        global_batch.run(lambda m, part: part.backward(penalty(m, part.data)), parameters=module["c"])
    assert_same_gradients(module, wanted)


@DEVICES
@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"balance": [3, 1, 1]}], ids=str)
@pytest.mark.parametrize(
    ("reduction", "weight"), [("mean", None), ("mean", torch.arange(25)), ("sum", torch.arange(25))]
)
def test_a_run_has_the_loss_and_the_gradient_of_a_step(devices: int, options: Any, reduction: Any, weight: Any) -> None:
    module, (x, y) = classifier(25)
    factors = torch.ones(25) if weight is None else weight
    if "balance" in options:
        options = {"balance": options["balance"][:devices]}

    def losses(m: Any, b: Any) -> Any:
        losses = F.cross_entropy(m(b[0]), b[1], reduction="none")
        return losses * b[2] if reduction == "sum" else losses

    stepped = copy.deepcopy(module)
    with DataParallel(stepped, hosts(devices), reduction=reduction, **options) as trainer:
        loss = trainer.step(losses, (x, y, factors), weight=weight)
    with DataParallel(module, hosts(devices), reduction=reduction, **options) as trainer:
        with trainer.batch((x, y, factors), weight=None if weight is None else lambda b: b[2]) as global_batch:
            assert len(global_batch) == 25
            ours = global_batch.run(lambda m, part: part.backward(losses(m, part.data)))
        assert sum(trainer.shares.values()) == 25
    assert_same_gradients(module, gradients(stepped))
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    assert ours.dim() == 0
    assert not ours.requires_grad


def test_several_backward_passes_over_one_graph_and_several_runs_add_up() -> None:
    module, batch = classifier(20)

    def fn(m: Any, part: Any) -> None:
        y = m(part.data[0])
        part.backward(F.cross_entropy(y, part.data[1]), retain_graph=True)
        part.backward(y.square().mean())

    _, wanted = plain(module, lambda m, b: classify(m, b) + m(b[0]).square().mean(), batch)
    with DataParallel(module, TWO, micro_batch=3) as trainer, trainer.batch(batch) as global_batch:
        for count in (1, 2):
            global_batch.run(fn)
            assert_same_gradients(module, [count * gradient for gradient in wanted if gradient is not None])
            assert len(trainer.predict(batch[0])) == 20  # between runs the trainer is free
        module.zero_grad()
        trainer.step(classify, batch)
    assert_same_gradients(module, plain(module, classify, batch)[1])


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_scaler_scales_what_comes_out(by_hand: bool) -> None:
    module, batch = classifier(20)
    wanted_loss, wanted = plain(module, classify, batch)

    def fn(m: Any, part: Any) -> None:
        part.weigh(classify(m, part.data)).backward() if by_hand else backward(m, part)

    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        loss = global_batch.run(fn, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    assert loss.item() == pytest.approx(wanted_loss.item())
    assert_same_gradients(module, [8 * gradient for gradient in wanted if gradient is not None])


@DEVICES
def test_an_exception_leaves_gradients_and_buffers_as_they_were_and_memory_that_runs_out_counts_nothing_twice(
    devices: int,
) -> None:
    module, batch = classifier(20)
    module.register_buffer("seen", torch.zeros(()))
    _, wanted = plain(module, classify, batch)

    def fn(m: Any, part: Any, error: type[Exception], most: int) -> None:
        m.seen += 1
        backward(m, part)
        if part.end == 20 and len(part) > most:
            raise error("as planned")

    with DataParallel(module, hosts(devices), balance="even") as trainer, trainer.batch(batch) as global_batch:
        with pytest.raises(ZeroDivisionError):
            global_batch.run(functools.partial(fn, error=ZeroDivisionError, most=0))
        assert gradients(module) == [None] * 4
        assert float(module.seen) == 0
        global_batch.run(functools.partial(fn, error=torch.OutOfMemoryError, most=4))
    assert_same_gradients(module, wanted)


def test_a_device_without_gradient_does_not_hide_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(24)
    looked = FunctionRun.any_gradient

    def late(run: FunctionRun, device: int) -> bool:
        return looked(run, device) or bool(time.sleep(0.1))  # type: ignore[func-returns-value]  # the other finds one

    def fn(m: Any, part: Any) -> None:
        loss = classify(m, part.data)
        part.backward(loss.detach() if part.begin == 0 else loss)

    monkeypatch.setattr(FunctionRun, "any_gradient", late)
    with DataParallel(module, TWO, balance="even") as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_runs_of_other_names_have_times_of_their_own_and_are_explained_as_steps_are() -> None:
    module, batch = pair()
    with DataParallel(module, TWO, balance="even", memory=10**8) as trainer:
        for _ in range(3):
            with trainer.batch(batch) as global_batch:
                global_batch.run(criticise, parameters=module["c"])
                global_batch.run(functools.partial(generate), parameters=module["g"])
                global_batch.run(generate, parameters=module["g"], name="again")
        report, told = trainer.report(), trainer.explain()
    assert report["steps"] == 0
    assert {name: run["steps"] for name, run in report["runs"].items()} == {"criticise": 3, "generate": 3, "again": 3}
    assert all(f"run {name}: " in told for name in report["runs"])
    assert told.count("host:0: at most ") == 3, "each has a model of its memory"
    assert "no steps" not in told


@DEVICES
def test_a_backward_that_knows_nothing_of_the_batch_is_refused(devices: int) -> None:
    module, batch = classifier(24)

    def both(replica: Any, part: Any) -> Any:
        loss = classify(replica, part)
        loss.backward(retain_graph=True)
        return loss

    with DataParallel(module, hosts(devices)) as trainer:
        with pytest.raises(InvalidArgument, match=r"micro_batch\.backward\(loss\)"):
            trainer.batch(batch).run(lambda m, part: classify(m, part.data).backward())
        with pytest.raises(InvalidArgument, match="called backward itself"):
            trainer.step(both, batch)
        assert gradients(module) == [None] * 4
        trainer.step(classify, batch)


def test_what_cannot_be_run_is_refused() -> None:
    module, batch = classifier(20)
    with DataParallel(module, TWO) as trainer:
        with trainer.batch(batch) as global_batch:
            for fn in (lambda m, part: None, lambda m, part: part.backward(m(part.data[0]).detach().mean())):
                with pytest.raises(RuntimeError, match=r"no gradient: fn has to call micro_batch\.backward"):
                    global_batch.run(fn)
            with pytest.raises(InvalidArgument, match="none of the trainer's module"):
                global_batch.run(backward, parameters=classifier(1)[0])
            with pytest.raises(InvalidArgument, match="parameters= is empty"):
                global_batch.run(backward, parameters=[])
            with pytest.raises(InvalidArgument, match="run: scaler is a int"):
                global_batch.run(backward, scaler=3)
            with torch.no_grad(), pytest.raises(InvalidArgument, match="run: called under no_grad"):
                global_batch.run(backward)
            with pytest.raises(InvalidArgument, match="a 0-dim tensor or a 1-D tensor"):
                global_batch.run(lambda m, part: part.backward(m(part.data[0])))
        with pytest.raises(Unavailable, match="ended with its with block"):
            global_batch.run(backward)
        assert gradients(module) == [None] * 4


def test_draws_that_no_seed_reaches_are_refused_with_recomputation_here_too() -> None:
    from torch.utils.checkpoint import checkpoint

    module = nn.LSTM(6, 3, 2, dropout=0.5).double()
    _, batch = classifier(20)

    def fn(m: Any, part: Any) -> None:
        output = checkpoint(m, part.data[0][None], use_reentrant=False)[0][0]
        part.backward(F.cross_entropy(output, part.data[1]))

    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        with pytest.raises(InvalidArgument, match=r"the dropout of nn\.LSTM.*activation checkpointing"):
            global_batch.run(fn)


def test_each_cached_block_has_a_graph_of_its_own_while_another_device_is_inside_one() -> None:
    module, (x, y) = classifier()
    nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Tanh())
    inside, done = threading.Event(), threading.Event()

    def run(replica: Any, part: Any) -> None:
        first = part.data[2][0] == 0
        with nn.utils.parametrize.cached():
            loss = classify(replica, part.data)
            if first:
                inside.set()
                done.wait(30)
        part.backward(loss)
        if first:
            return
        inside.wait(30)
        for _ in range(3):
            with nn.utils.parametrize.cached():
                loss = classify(replica, part.data)
            part.backward(loss / 3)
        done.set()

    with DataParallel(module, TWO, balance="even") as trainer, trainer.batch((x, y, torch.arange(16))) as batch:
        batch.run(run)
    assert module[0].parametrizations.weight.original.grad is not None
