"""``torch.compile`` on the workers of several devices: state of each thread, and limits of recompilation."""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

from paceline.torch import DataParallel
from paceline.torch._devices import compile_gate
from paceline.torch._devices import compiling as compiler
from torch_support import TWO, classifier, noting

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's graph trees, which take seconds to import, and so not where tests are collected.

    As in PyTorch before 2.13, which gives a thread no state of its own when it is asked for.
    """
    import torch._inductor.cudagraph_trees as trees

    def get(local: Any, name: str) -> Any:
        if hasattr(local, name):
            return getattr(local, name)
        assert torch._C._is_key_in_tls(name)
        return torch._C._get_obj_in_tls(name)

    monkeypatch.setattr(trees, "get_obj", get)
    return trees


def test_each_worker_has_graph_trees_of_its_own(trees: Any) -> None:
    module, batch = classifier()
    module.compile(backend="eager")
    found: dict[int, list[Any]] = {}
    loss_fn = noting(lambda *_: found.setdefault(threading.get_ident(), []).append(trees.get_container(0)))
    after: list[Any] = []

    def steps() -> None:
        with DataParallel(module, TWO, balance="even", hold_back=False) as trainer:
            for _ in range(2):
                trainer.step(loss_fn, batch)
        after.append(trees.get_container(0))

    with ThreadPoolExecutor(1) as pool:  # not the thread that has loaded the trees
        pool.submit(steps).result()
    assert [len(set(map(id, containers))) for containers in found.values()] == [1, 1], "kept from step to step"
    everything = [*(containers[0] for containers in found.values()), *after, trees.get_container(0)]
    assert len(set(map(id, everything))) == 4, "of two workers, the caller's thread and this one"


def test_the_limits_of_all_threads_are_raised_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(recompile_limit=8, accumulated_recompile_limit=256)  # a PyTorch without contexts
    monkeypatch.setattr(compiler, "_config", lambda: config)
    monkeypatch.setattr(compiler, "_is_of_context", lambda config: False)
    seen = []

    def note() -> None:
        seen.append((config.recompile_limit, config.accumulated_recompile_limit))

    context = contextvars.copy_context()
    second = compiler.compiled_for_each(4, [context])
    with compiler.compiled_for_each(2, [context]):
        note()
        second.__enter__()  # of another trainer, which ends later
        note()
    note()
    second.__exit__(None, None, None)
    note()
    assert seen == [(16, 512), (32, 1024), (32, 1024), (8, 256)]


def test_a_limit_of_the_callers_own_is_what_is_multiplied() -> None:
    config: Any = torch._dynamo.config
    before, seen = config.recompile_limit, []
    module, batch = classifier()
    module.compile(backend="eager")
    with config.patch(recompile_limit=3), DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(noting(lambda *_: seen.append(config.recompile_limit)), batch)
        assert config.recompile_limit == 3
    assert seen == [6, 6]
    assert config.recompile_limit == before


def test_two_trainers_compile_one_after_the_other() -> None:
    """What PyTorch keeps while it compiles belongs to the process."""
    inside: list[str] = []
    together: list[list[str]] = []
    compiling, came = threading.Event(), threading.Event()

    def step(name: str) -> None:
        module, batch = classifier()
        module.compile(backend="eager")

        def note(*_: Any) -> None:
            inside.append(name)
            together.append(list(inside))
            if name == "host:0":
                compiling.set()
                deadline = time.monotonic() + 30
                while not came.is_set() and not compile_gate._of_process._condition._waiters:  # type: ignore[attr-defined]
                    assert time.monotonic() < deadline
                    time.sleep(1e-3)
            else:
                came.set()
            inside.remove(name)

        with DataParallel(module, [name]) as trainer:
            assert name == "host:0" or compiling.wait(30)
            trainer.step(noting(note), batch)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, TWO))
    assert together == [["host:0"], ["host:1"]]


def test_a_loss_may_wait_for_another_trainer_that_compiles_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_gate, "_PATIENCE_SECONDS", 0.5)
    teacher, batch = classifier()
    module, _ = classifier(seed=1)
    module.compile(backend="eager")
    teacher.compile(backend="eager")
    with (
        ThreadPoolExecutor(1) as pool,
        DataParallel(module, ["host:0"]) as trainer,
        DataParallel(teacher, ["host:1"]) as other,  # a trainer on the same device would wait for this step
    ):

        def distil(one: Any, part: Any) -> Any:
            wanted = pool.submit(other.predict, part[0])
            return (one(part[0]) - wanted.result()).square().mean()

        caller = threading.Thread(target=trainer.step, args=(distil, batch), daemon=True)
        caller.start()
        caller.join(60)
        assert not caller.is_alive()
    assert all(parameter.grad is not None for parameter in module.parameters())
