"""Forward-mode differentiation inside of a loss: exact on several devices through torch.func, refused where it is entered by hand."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as tracing

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, gradients, hosts, plain, worst_difference

BY_HAND = r"forward_ad\.dual_level.*torch\.func\.jvp.*one device"


@pytest.fixture(autouse=True)
def threads_that_alternate() -> Iterator[None]:
    """Every few instructions, so that what two threads can do to each other happens."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    assert torch._functorch.eager_transforms.JVP_NESTING == 0
    assert forward_ad._current_level == -1
    torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))  # the process's level is free


def outputs(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x).square().sum(1)
    return result


def by_jvp(module: Any, batch: Any) -> Any:
    x = batch[0]
    value, tangent, *_ = torch.func.jvp(lambda x: outputs(module, x), (x,), (torch.ones_like(x),))
    return value + tangent.square()


def by_jacfwd(module: Any, batch: Any) -> Any:
    return torch.func.vmap(torch.func.jacfwd(lambda x: outputs(module, x[None])[0]))(batch[0]).square().sum(1)


def by_hessian(module: Any, batch: Any) -> Any:
    return torch.func.vmap(torch.func.hessian(lambda x: outputs(module, x[None])[0]))(batch[0]).square().sum((1, 2))


def by_nested_jvp(module: Any, batch: Any) -> Any:
    x = batch[0]

    def along(f: Any) -> Any:
        return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]

    return along(along(lambda x: outputs(module, x)))(x).square()


def by_functional(module: Any, batch: Any) -> Any:
    x = batch[0]
    return torch.autograd.functional.jvp(lambda x: outputs(module, x), x, torch.ones_like(x), create_graph=True)[1] ** 2


class Deep(nn.Module):
    """A module that differentiates itself, deep inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("loss_fn", [by_jvp, by_jacfwd, by_hessian, by_nested_jvp, by_functional])
def test_forward_mode_is_exact_on_several_devices(loss_fn: Any) -> None:
    module, batch = classifier(24)
    module = Deep(module) if loss_fn in (by_jvp, by_functional) else module
    _, wanted = plain(module, lambda m, b: loss_fn(m, b).mean(), batch)
    with DataParallel(module, hosts(3), micro_batch=4) as trainer:
        for _ in range(10):
            module.zero_grad()
            trainer.step(loss_fn, batch)
            assert_same_gradients(module, wanted)


def test_many_steps_of_forward_mode_are_all_exact() -> None:
    module, batch = classifier(32)
    _, wanted = plain(module, lambda m, b: by_jvp(m, b).mean(), batch)
    with DataParallel(module, TWO, balance="even", micro_batch=8) as trainer:
        for _ in range(60):
            module.zero_grad()
            trainer.step(by_jvp, batch)
            assert_same_gradients(module, wanted)


def by_hand(module: Any, batch: Any) -> Any:
    x = batch[0]
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(outputs(module, forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return tangent.square()


def linearized(module: Any, batch: Any) -> Any:
    return torch.func.linearize(lambda x: outputs(module, x), batch[0])[1](torch.ones_like(batch[0])).square()


@pytest.mark.parametrize("loss_fn", [by_hand, linearized])
def test_a_level_entered_by_hand_is_refused(loss_fn: Any) -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, lambda m, b: by_jvp(m, b).mean(), batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(10):
            with pytest.raises(InvalidArgument, match=BY_HAND):
                trainer.step(loss_fn, batch)
            assert gradients(module) == [None] * 4
        # Workers that traced at once have left nothing changed.
        assert vars(torch.nn.Module)["__call__"] is tracing._orig_module_call
        assert tracing.CURRENT_PATCHER is None
        assert not tracing._is_fx_tracing_flag
        trainer.step(by_jvp, batch)
        assert_same_gradients(module, wanted)


def test_one_device_may_enter_it_by_hand() -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, lambda m, b: by_hand(m, b).mean(), batch)
    with DataParallel(module, hosts(1)) as trainer:
        trainer.step(by_hand, batch)
    assert_same_gradients(module, wanted)


def test_runs_of_a_batch_and_predictions_may_differentiate_forward() -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, lambda m, b: by_jvp(m, b).mean(), batch)

    def fn(replica: Any, micro_batch: Any) -> None:
        micro_batch.backward(by_jvp(replica, micro_batch.data))

    with DataParallel(module, TWO, micro_batch=2) as trainer:
        with trainer.batch(batch) as whole:
            whole.run(fn)
        assert_same_gradients(module, wanted)
        torch.testing.assert_close(trainer.predict(by_jvp, batch), by_jvp(module, batch).detach())


def test_an_error_of_the_loss_itself_stays_what_it_is() -> None:
    module, batch = classifier(16)

    def wrong(replica: Any, part: Any) -> Any:
        return torch.func.jvp(lambda x: outputs(replica, x), (part[0],), (torch.ones(3),))[1]

    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="different size"):
                trainer.step(wrong, batch)


def test_a_step_inside_of_a_level_is_refused() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        with forward_ad.dual_level(), pytest.raises(InvalidArgument, match="forward-mode differentiation is under way"):
            trainer.step(by_jvp, batch)
        trainer.step(by_jvp, batch)


def test_trainers_of_several_threads_share_the_level() -> None:
    errors: list[BaseException] = []

    def train(loss_fn: Any) -> None:
        module, batch = classifier(16)
        _, wanted = plain(module, lambda m, b: loss_fn(m, b).mean(), batch)
        try:
            with DataParallel(module, TWO, micro_batch=2) as trainer:
                for _ in range(30):
                    module.zero_grad()
                    trainer.step(loss_fn, batch)
                    if worst_difference(gradients(module), wanted) > 1e-12:
                        raise AssertionError("not exact")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(loss_fn,)) for loss_fn in (by_jvp, by_functional)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Patch:
    """What another library has put around a method of the module class, to see its calls."""

    def __init__(self, name: str) -> None:
        self.name, self.inner = name, vars(nn.Module)[name]

        def outer(*args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

        self.outer = outer
        setattr(nn.Module, name, outer)


@pytest.fixture
def module_class() -> Iterator[None]:
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    yield
    for name, method in before.items():
        setattr(nn.Module, name, method)


@pytest.mark.usefixtures("module_class")
def test_patches_of_other_libraries_stay() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        patches = [Patch(name) for name in ("__call__", "__getattr__")]
        for loss_fn in (by_hand, linearized):
            for _ in range(5):
                with pytest.raises(InvalidArgument, match=BY_HAND):
                    trainer.step(loss_fn, batch)
            assert all(vars(nn.Module)[one.name] is one.outer for one in patches)


def test_a_trace_of_another_thread_goes_on() -> None:
    module, batch = classifier(16)
    inside, leave = threading.Event(), threading.Event()

    class Traced(nn.Module):
        def forward(self, x: Any) -> Any:
            inside.set()
            assert leave.wait(30)
            return x + 1

    thread = threading.Thread(target=lambda: tracing.Tracer().trace(Traced()))
    thread.start()
    assert inside.wait(30)
    traced = vars(nn.Module)["__call__"]
    try:
        with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=BY_HAND):
            trainer.step(by_hand, batch)
        assert vars(nn.Module)["__call__"] is traced
    finally:
        leave.set()
        thread.join()
    assert vars(nn.Module)["__call__"] is tracing._orig_module_call
