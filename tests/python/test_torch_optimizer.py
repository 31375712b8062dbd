"""Optimizers whose step runs on all workers: the same bits as on one thread, and everything around it as always."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._trainer import host_workers as _workers
from paceline.torch._trainer import optimizer as _optimizer
from torch_support import TWO, hosts

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


@pytest.fixture(autouse=True)
def small_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth it on a clock is no matter here."""
    monkeypatch.setattr(_optimizer, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(_optimizer, "_LEAST_ELEMENTS_OF_A_LOOP", 1)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = None if index == 3 else torch.randn(parameter.shape, generator=generator)


def threads_of_steps(monkeypatch: pytest.MonkeyPatch, cls: type[torch.optim.Optimizer]) -> set[int]:
    """Filled with the threads that the class's own step runs on."""
    threads: set[int] = set()
    whole: Any = _optimizer.unhooked(cls.step)

    def noting(self: Any, closure: Any = None) -> Any:
        threads.add(threading.get_ident())
        return whole(self, closure)

    monkeypatch.setattr(cls, "step", noting)
    return threads


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_parts_give_the_bits_of_the_whole(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, options = CLASSES[name]
    module = network()
    reference = copy.deepcopy(module)
    threads = threads_of_steps(monkeypatch, cls)
    plain = cls(reference.parameters(), **options)
    with DataParallel(module, hosts(devices)) as trainer:
        optimizer = trainer.optimizer(cls, **options)
        for step in range(5):
            for one, its in ((reference, plain), (module, optimizer)):
                set_gradients(one, step)
                for group in its.param_groups:
                    group["lr"] = 0.01 / (1 + step)
                threads.clear()
                its.step()
        assert threads, "the parts' steps were not the class's own"
        assert threading.get_ident() not in threads, "parts run on the workers"
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    found, wanted = optimizer.state_dict(), plain.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)), (index, key)


def test_what_is_no_sum_of_parts_stays_what_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    with DataParallel(network(), TWO) as trainer:
        assert type(trainer.optimizer(torch.optim.LBFGS)) is torch.optim.LBFGS
        assert type(trainer.optimizer(Own, lr=0.1)) is Own


def test_copies_are_plain_optimizers() -> None:
    module = network()
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        set_gradients(module, 1)
        optimizer.step()
        assert isinstance(optimizer, torch.optim.AdamW)
        assert repr(optimizer).startswith("AdamW (")
        for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(one) is torch.optim.AdamW
            assert str(one.state_dict()) == str(optimizer.state_dict())
            one.step()


def test_hooks_closures_and_schedules_come_once() -> None:
    module = network()
    calls: list[str] = []
    with DataParallel(module, TWO) as trainer:
        torch.optim.AdamW(network().parameters()).step()  # which gives the class itself its hooks
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def closure() -> float:
            assert torch.is_grad_enabled()
            set_gradients(module, len(calls))
            calls.append("closure")
            return 0.25

        try:
            assert optimizer.step(closure) == 0.25
        finally:
            everywhere.remove()
        schedule.step()
    assert calls == ["before", "closure", "after"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_groups_that_come_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module, more = network(), network()
    with DataParallel(module, TWO) as trainer:
        first, *rest = module.parameters()
        optimizer = trainer.optimizer(torch.optim.SGD, [{"params": [first], "lr": 0.1}, {"params": rest}], lr=1.0)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
        set_gradients(module, 1)
        optimizer.step()
        optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})
        set_gradients(module, 2)
        set_gradients(more, 2)
        before = [parameter.detach().clone() for parameter in more.parameters()]
        optimizer.step()
    for old, new in zip(before, more.parameters(), strict=True):
        assert torch.equal(new, old if new.grad is None else old - 0.5 * new.grad)


@pytest.mark.parametrize("when", ["closed", "dropped", "observed", "one device", "little to do"])
def test_where_the_workers_are_not_to_be_had_the_caller_does_it(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if when == "little to do":
        monkeypatch.undo()
    threads = threads_of_steps(monkeypatch, torch.optim.SGD)
    module = network()
    trainer = DataParallel(module, hosts(1) if when == "one device" else TWO)
    optimizer = trainer.optimizer(torch.optim.SGD, lr=1.0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    set_gradients(module, 1)
    if when == "observed":
        with torch.device("cpu"):
            optimizer.step()
    else:
        if when == "closed":
            trainer.close()
        if when == "dropped":
            gone = weakref.ref(trainer)
            del trainer
            assert gone() is None, "an optimizer keeps no trainer"
        optimizer.step()
    assert threads == {threading.get_ident()}
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(new, old if new.grad is None else old - new.grad)


def test_within_a_step_it_is_strange_but_no_reason_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of_steps(monkeypatch, torch.optim.SGD)
    extra = network()
    set_gradients(extra, 1)
    first = threading.Lock()
    with DataParallel(network(), TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, extra.parameters(), lr=1.0)

        def loss_fn(one: Any, part: Any) -> Any:
            if first.acquire(blocking=False):
                optimizer.step()
            return one(part).sum()

        trainer.step(loss_fn, torch.randn(4, 16))
    assert len(threads) == 1


def test_an_update_is_done_whole_though_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=1.0)
        set_gradients(module, 1)
        before = [parameter.detach().clone() for parameter in module.parameters()]

        class Interrupted:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def plan(self, count: int) -> int:
                return count

            def run(self, plan: int, body: Any, finish: Any) -> None:
                assert body(0, 0, 1, 0) == 0
                raise KeyboardInterrupt

        monkeypatch.setattr(_workers, "StepLoop", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(new, old if new.grad is None else old - new.grad)


def test_an_error_of_a_part_is_the_callers() -> None:
    module = network()
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=1.0)
        set_gradients(module, 1)
        next(module.parameters()).grad = torch.zeros(16, 16).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        set_gradients(module, 1)
        optimizer.step()
        trainer.step(lambda one, part: one(part).sum(), torch.randn(4, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.optim.SGD, 0.1), r"parameters is 0\.1\. Options are given by name, as in optimizer\(SGD, lr=0\.1\)"),
        ((torch.optim.AdamW, "lr"), r"parameters is 'lr'.*optimizer\(AdamW, lr=0\.1\)"),
        (
            (torch.optim.SGD, nn.Linear(2, 2)),
            r"parameters is a Linear.*optimizer\(SGD, module\.parameters\(\), \.\.\.\)",
        ),
        ((torch.optim.SGD, nn.Sequential(nn.Linear(2, 2))), "parameters is a Sequential"),
        (
            (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),),
            r"is not a class.*optimizer\(torch\.optim\.SGD, lr=0\.1\)",
        ),
        (("sgd",), "'sgd' is not a class"),
    ],
    ids=["number", "text", "module", "container", "instance", "name"],
)
def test_what_makes_no_optimizer_is_refused_with_how_it_is_made(arguments: Any, message: str) -> None:
    with DataParallel(nn.Linear(2, 2), TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.optimizer(*arguments)
        parameters = nn.ParameterList(trainer.module.parameters())  # a module that is iterated over by parameters
        assert len(trainer.optimizer(torch.optim.SGD, parameters, lr=0.1).param_groups[0]["params"]) == 2
