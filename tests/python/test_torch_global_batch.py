"""The lower level of a step: what the caller's function runs backward is exactly the gradient of one device."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, Unavailable
from paceline.torch import DataParallel
from paceline.torch._trainer.global_batch import FunctionRun
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain, worst_difference

F = nn.functional
DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])
BALANCE = pytest.mark.parametrize("balance", ["auto", [3, 1]], ids=str)


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
    part.backward(F.softplus(-m["c"](m["g"](part.data[1]))).mean())


@DEVICES
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_one_run_is_a_step(devices: int, micro_batch: int | None) -> None:
    module, batch = classifier(25)
    loss, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices), micro_batch=micro_batch) as trainer:
        with trainer.batch(batch) as global_batch:
            assert len(global_batch) == 25
            ours = global_batch.run(backward)
        assert sum(trainer.shares.values()) == 25
    assert_same_gradients(module, wanted)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    assert ours.dim() == 0
    assert not ours.requires_grad


@DEVICES
def test_two_optimizers_that_alternate_train_as_on_one_device(devices: int) -> None:
    module, batch = pair()
    alone = copy.deepcopy(module)

    def optimizers(m: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(m["c"].parameters(), lr=0.01), torch.optim.SGD(m["g"].parameters(), lr=0.1)]

    ours, theirs = optimizers(module), optimizers(alone)
    with DataParallel(module, hosts(devices), micro_batch=4) as trainer:
        for _ in range(4):
            with trainer.batch(batch) as global_batch:
                critic_loss = global_batch.run(criticise, parameters=module["c"])
                ours[0].step()
                ours[0].zero_grad()
                generator_loss = global_batch.run(generate, parameters=module["g"].parameters())
                ours[1].step()
                ours[1].zero_grad()
            loss = (
                F.softplus(-alone["c"](batch[0])).mean() + F.softplus(alone["c"](alone["g"](batch[1]).detach())).mean()
            )
            loss.backward()
            theirs[0].step()
            alone.zero_grad()
            assert critic_loss.item() == pytest.approx(loss.item(), rel=1e-11)
            loss = F.softplus(-alone["c"](alone["g"](batch[1]))).mean()
            loss.backward()
            theirs[1].step()
            alone.zero_grad()
            assert generator_loss.item() == pytest.approx(loss.item(), rel=1e-11)
    assert worst_difference(list(module.parameters()), list(alone.parameters())) < 1e-11
    assert worst_difference(list(module.parameters()), list(pair()[0].parameters())) > 1e-3, "nothing was trained"


@DEVICES
@pytest.mark.parametrize("by_hand", [False, True])
def test_only_the_parameters_that_were_asked_for_get_gradients(devices: int, by_hand: bool) -> None:
    module, batch = pair()
    kept = [torch.ones_like(p) for p in module["c"].parameters()]
    for parameter, value in zip(module["c"].parameters(), kept, strict=True):
        parameter.grad = value

    def fn(m: Any, part: Any) -> None:
        loss = F.softplus(-m["c"](m["g"](part.data[1]))).mean()
        if by_hand:
            part.weigh(loss).backward()
        else:
            part.backward(loss)

    with DataParallel(module, hosts(devices), micro_batch=5) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn, parameters=module["g"])
    assert all(p.grad is value for p, value in zip(module["c"].parameters(), kept, strict=True))
    assert all(bool((value == 1).all()) for value in kept)
    _, wanted = plain(module, lambda m, b: F.softplus(-m["c"](m["g"](b[1]))).mean(), batch)
    names = [name for name, _ in module.named_parameters()]
    ones = [torch.ones_like(parameter) for parameter in module.parameters()]
    wanted = [ours if name.startswith("g.") else one for name, ours, one in zip(names, wanted, ones, strict=True)]
    assert_same_gradients(module, wanted)


@DEVICES
def test_a_gradient_penalty_by_hand_is_exact(devices: int) -> None:
    module, (x, _) = pair()

    def penalty(critic: Any, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square()

    def fn(m: Any, part: Any) -> None:
        part.backward(penalty(m["c"], part.data))

    reference: Any = copy.deepcopy(module)
    penalty(reference["c"], x).mean().backward()
    with DataParallel(module, hosts(devices), micro_batch=4) as trainer, trainer.batch(x) as global_batch:
        global_batch.run(fn, parameters=module["c"])
    assert_same_gradients(module, gradients(reference))


@DEVICES
@BALANCE
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_and_reduction_are_those_of_a_step(
    devices: int, balance: Any, reduction: Literal["mean", "sum"]
) -> None:
    module, (x, y) = classifier(25)
    weight = torch.arange(25)
    balance = balance if isinstance(balance, str) else [3, 1, 1][:devices]

    def losses(m: Any, b: Any) -> Any:
        losses = F.cross_entropy(m(b[0]), b[1], reduction="none")
        return losses * b[2] if reduction == "sum" else losses

    stepped = copy.deepcopy(module)
    with DataParallel(stepped, hosts(devices), balance=balance, reduction=reduction) as trainer:
        loss = trainer.step(losses, (x, y, weight), weight=weight)
    with DataParallel(module, hosts(devices), balance=balance, reduction=reduction) as trainer:
        with trainer.batch((x, y, weight), weight=lambda b: b[2]) as global_batch:
            ours = global_batch.run(lambda m, part: part.backward(losses(m, part.data)))
    assert_same_gradients(module, gradients(stepped))
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)


def test_several_backward_passes_over_one_graph_add_up() -> None:
    module, batch = classifier(20)

    def fn(m: Any, part: Any) -> None:
        y = m(part.data[0])
        part.backward(F.cross_entropy(y, part.data[1]), retain_graph=True)
        part.backward(y.square().mean())

    _, wanted = plain(module, lambda m, b: classify(m, b) + m(b[0]).square().mean(), batch)
    with DataParallel(module, TWO, micro_batch=3) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn)
    assert_same_gradients(module, wanted)


def test_gradients_of_several_runs_accumulate() -> None:
    module, batch = classifier(20)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(backward)
        global_batch.run(backward)
    assert_same_gradients(module, [2 * gradient for gradient in wanted if gradient is not None])


def weighed(module: Any, micro_batch: Any) -> None:
    micro_batch.weigh(classify(module, micro_batch.data)).backward()


@pytest.mark.parametrize("fn", [backward, weighed])
def test_a_scaler_scales_what_comes_out(fn: Any) -> None:
    module, batch = classifier(20)
    _, wanted = plain(module, classify, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        loss = global_batch.run(fn, scaler=scaler)
        assert loss.item() == pytest.approx(plain(module, classify, batch)[0].item())
    assert_same_gradients(module, [8 * gradient for gradient in wanted if gradient is not None])


def test_between_runs_the_trainer_is_free() -> None:
    module, batch = classifier(20)
    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(backward)
        assert len(trainer.predict(batch[0])) == 20
        trainer.step(classify, batch)
        global_batch.run(backward)


@DEVICES
def test_an_exception_leaves_gradients_and_buffers_as_they_were(devices: int) -> None:
    module, batch = classifier(20)
    module.register_buffer("seen", torch.zeros(()))

    def fn(m: Any, part: Any) -> None:
        m.seen += 1
        backward(m, part)
        if part.end == 20:
            raise ZeroDivisionError

    with DataParallel(module, hosts(devices), balance="even") as trainer, trainer.batch(batch) as global_batch:
        with pytest.raises(ZeroDivisionError):
            global_batch.run(fn)
        assert gradients(module) == [None] * 4
        assert float(module.seen) == 0
        global_batch.run(backward)
    assert_same_gradients(module, plain(classifier(20)[0], classify, batch)[1])


def test_memory_that_runs_out_makes_smaller_pieces_and_counts_nothing_twice() -> None:
    module, batch = classifier(20)
    sizes: list[int] = []

    def fn(m: Any, part: Any) -> None:
        backward(m, part)
        if len(part) > 4:
            raise torch.OutOfMemoryError("as planned")
        sizes.append(len(part))

    with DataParallel(module, TWO, balance="even") as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn, parameters=iter(module.parameters()))
    assert sum(sizes) >= 20
    assert_same_gradients(module, plain(classifier(20)[0], classify, batch)[1])


def test_runs_of_another_name_have_times_of_their_own() -> None:
    module, batch = pair()
    with DataParallel(module, TWO) as trainer:
        for _ in range(3):
            with trainer.batch(batch) as global_batch:
                global_batch.run(criticise, parameters=module["c"])
                global_batch.run(functools.partial(generate), parameters=module["g"])
                global_batch.run(generate, parameters=module["g"], name="again")
        runs = trainer.report()["runs"]
        assert {name: run["steps"] for name, run in runs.items()} == {"criticise": 3, "generate": 3, "again": 3}
        assert trainer.report()["steps"] == 0
        assert "run criticise: " in trainer.explain()


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (lambda m, part: None, {}, "no gradient: fn has to call micro_batch.backward"),
        (lambda m, part: part.backward(m(part.data[0]).detach().mean()), {}, "no gradient"),
    ],
)
def test_a_run_without_gradient_raises(fn: Callable[..., Any], options: Any, message: str) -> None:
    module, batch = classifier(20)
    with DataParallel(module, TWO) as trainer, trainer.batch(batch) as global_batch:
        with pytest.raises(RuntimeError, match=message):
            global_batch.run(fn, **options)


def test_a_device_without_gradient_does_not_hide_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = classifier(24)
    looked = FunctionRun.any_gradient

    def late(run: FunctionRun, device: int) -> bool:
        found = looked(run, device)
        if not found:
            time.sleep(0.1)  # the other has found one meanwhile
        return found

    def fn(m: Any, part: Any) -> None:
        loss = classify(m, part.data)
        part.backward(loss.detach() if part.begin == 0 else loss)

    monkeypatch.setattr(FunctionRun, "any_gradient", late)
    with DataParallel(module, TWO, balance="even") as trainer, trainer.batch(batch) as global_batch:
        global_batch.run(fn)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_runs_are_explained_as_steps_are() -> None:
    module, batch = classifier(24)
    with DataParallel(module, TWO, balance="even", memory=10**8) as trainer:
        for _ in range(3):
            with trainer.batch(batch) as global_batch:
                global_batch.run(backward, name="one")
                global_batch.run(backward, name="other")
        told = trainer.explain()
        assert "run one: " in told
        assert "run other: " in told
        assert told.count("host:0: at most ") == 2, "each has a model of its memory"
        assert "no steps" not in told


@DEVICES
def test_a_backward_that_knows_nothing_of_the_batch_is_refused(devices: int) -> None:
    module, batch = classifier(24)

    def own(replica: Any, part: Any) -> None:
        classify(replica, part.data).backward()

    def both(replica: Any, part: Any) -> Any:
        loss = classify(replica, part)
        loss.backward(retain_graph=True)
        return loss

    with DataParallel(module, hosts(devices)) as trainer:
        with (
            trainer.batch(batch) as global_batch,
            pytest.raises(InvalidArgument, match=r"micro_batch\.backward\(loss\)"),
        ):
            global_batch.run(own)
        with pytest.raises(InvalidArgument, match="called backward itself"):
            trainer.step(both, batch)
        assert gradients(module) == [None] * 4
        trainer.step(classify, batch)


def test_what_cannot_be_run_is_refused() -> None:
    module, batch = classifier(20)
    with DataParallel(module, TWO) as trainer:
        with trainer.batch(batch) as global_batch:
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
