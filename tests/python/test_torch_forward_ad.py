"""Forward-mode differentiation inside of a loss: exact on several devices through torch.func, refused where it is entered by hand."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as tracing

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_exact, assert_same_gradients, classifier, gradients, module_of, plain

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


def deep(inner: nn.Module) -> Any:
    """A module that differentiates itself, deep inside."""
    return module_of(lambda m, x: m.inner(x) + torch.func.jvp(m.inner, (x,), (torch.ones_like(x),))[1], inner=inner)


@pytest.mark.parametrize("loss_fn", [by_jvp, by_jacfwd, by_hessian, by_nested_jvp, by_functional])
def test_forward_mode_is_exact_on_several_devices(loss_fn: Any) -> None:
    module, batch = classifier(24)
    module = deep(module) if loss_fn in (by_jvp, by_functional) else module
    steps = 40 if loss_fn is by_jvp else 10
    assert_exact(module, loss_fn, batch, 3, alone=lambda m, b: loss_fn(m, b).mean(), steps=steps, micro_batch=4)


def test_runs_and_predictions_may_differentiate_forward_and_no_call_inside_of_a_level() -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, lambda m, b: by_jvp(m, b).mean(), batch)
    with DataParallel(module, TWO, micro_batch=2) as trainer:
        trainer.batch(batch).run(lambda replica, part: part.backward(by_jvp(replica, part.data)))
        assert_same_gradients(module, wanted)
        torch.testing.assert_close(trainer.predict(by_jvp, batch), by_jvp(module, batch).detach())
        with forward_ad.dual_level(), pytest.raises(InvalidArgument, match="forward-mode differentiation is under way"):
            trainer.step(by_jvp, batch)
        trainer.step(by_jvp, batch)


def by_hand(module: Any, batch: Any) -> Any:
    x = batch[0]
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(outputs(module, forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return tangent.square()


def linearized(module: Any, batch: Any) -> Any:
    return torch.func.linearize(lambda x: outputs(module, x), batch[0])[1](torch.ones_like(batch[0])).square()


def around(method: Any) -> Any:
    return lambda *args, **kwargs: method(*args, **kwargs)


@pytest.mark.parametrize("loss_fn", [by_hand, linearized])
def test_a_level_entered_by_hand_is_refused_but_on_one_device(loss_fn: Any) -> None:
    module, batch = classifier(16)
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
    assert_same_gradients(module, plain(module, lambda m, b: by_jvp(m, b).mean(), batch)[1])
    assert_exact(module, by_hand, batch, 1, alone=lambda m, b: by_hand(m, b).mean())


def test_an_error_of_the_loss_itself_stays_what_it_is() -> None:
    module, batch = classifier(16)

    def wrong(replica: Any, part: Any) -> Any:
        return torch.func.jvp(lambda x: outputs(replica, x), (part[0],), (torch.ones(3),))[1]

    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="different size"):
                trainer.step(wrong, batch)


def test_trainers_of_several_threads_share_the_level() -> None:
    def train(loss_fn: Any) -> None:
        module, batch = classifier(16)
        assert_exact(module, loss_fn, batch, alone=lambda m, b: loss_fn(m, b).mean(), steps=30, micro_batch=2)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, (by_jvp, by_functional)))


def test_patches_of_other_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They put something around a method of the module class, to see its calls."""
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        patches = {name: around(vars(nn.Module)[name]) for name in ("__call__", "__getattr__")}
        for name, patch in patches.items():
            monkeypatch.setattr(nn.Module, name, patch)
        for loss_fn in (by_hand, linearized):
            for _ in range(5):
                with pytest.raises(InvalidArgument, match=BY_HAND):
                    trainer.step(loss_fn, batch)
            assert all(vars(nn.Module)[name] is patch for name, patch in patches.items())


def test_a_trace_of_another_thread_goes_on() -> None:
    module, batch = classifier(16)
    inside, leave = threading.Event(), threading.Event()

    def wait(module: Any, x: Any) -> Any:
        inside.set()
        assert leave.wait(30)
        return x + 1

    thread = threading.Thread(target=lambda: tracing.Tracer().trace(module_of(wait)))
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
