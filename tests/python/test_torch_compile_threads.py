"""``torch.compile`` on the workers of several devices: state of each thread, and limits of recompilation."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.torch import DataParallel
from paceline.torch._devices import compiling
from torch_support import TWO, classifier, classify


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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

    def loss_fn(one: Any, part: Any) -> Any:
        found.setdefault(threading.get_ident(), []).append(trees.get_container(0))
        return classify(one, part)

    after: list[Any] = []

    def steps() -> None:
        with DataParallel(module, TWO, balance="even", corrections=False) as trainer:
            for _ in range(2):
                trainer.step(loss_fn, batch)
        after.append(trees.get_container(0))

    caller = threading.Thread(target=steps)  # not the thread that has loaded the trees
    caller.start()
    caller.join()
    assert [len(set(map(id, containers))) for containers in found.values()] == [1, 1], "kept from step to step"
    everything = [*(containers[0] for containers in found.values()), *after, trees.get_container(0)]
    assert len(set(map(id, everything))) == 4, "of two workers, the caller's thread and this one"


def test_the_limits_of_all_threads_are_raised_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(recompile_limit=8, accumulated_recompile_limit=256)  # a PyTorch without contexts
    monkeypatch.setattr(compiling, "_config", lambda: config)
    monkeypatch.setattr(compiling, "_is_of_context", lambda config: False)
    seen = []

    def note() -> None:
        seen.append((config.recompile_limit, config.accumulated_recompile_limit))

    context = contextvars.copy_context()
    first, second = compiling.compiled_for_each(2, [context]), compiling.compiled_for_each(4, [context])
    with first:
        note()
        second.__enter__()  # of another trainer, which ends later
        note()
    note()
    second.__exit__(None, None, None)
    note()
    assert seen == [(16, 512), (32, 1024), (32, 1024), (8, 256)]
    with compiling.compiled_for_each(1, [context]):
        note()
    assert seen[-1] == (8, 256)


def test_a_limit_of_the_callers_own_is_what_is_multiplied() -> None:
    from torch._dynamo import config as dynamo_config

    config: Any = dynamo_config
    before = config.recompile_limit
    with config.patch(recompile_limit=3):
        context = contextvars.copy_context()
        with compiling.compiled_for_each(5, [context]):
            assert context.run(lambda: config.recompile_limit) == 15
        assert config.recompile_limit == 3
    assert config.recompile_limit == before
