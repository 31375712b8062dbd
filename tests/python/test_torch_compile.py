"""Compiled modules: exact on several devices, compiled by one thread at a time, with state of each thread and limits of recompilation."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from paceline.torch import DataParallel, Pipeline
from paceline.torch._devices import compile_gate
from paceline.torch._devices import compiling as compiler
from paceline.torch._devices.compile_gate import CompileGate
from torch_support import TWO, assert_same_gradients, classifier, classify, noting, plain, recorded

pytestmark = pytest.mark.usefixtures("fresh_compiler")


COMPILE: dict[str, Any] = {
    "torch.compile(module)": lambda module, **options: torch.compile(module, **options),
    "module.compile()": lambda module, **options: module.compile(**options) or module,
}
HOW = pytest.mark.parametrize("how", COMPILE)


@HOW
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", torch.float64), pytest.param("inductor", torch.float32, marks=pytest.mark.slow)],
)
def test_gradients_are_exact(how: str, backend: str, dtype: torch.dtype) -> None:
    module, _ = classifier(dtype=dtype)
    compiled = COMPILE[how](module, backend=backend)
    with DataParallel(compiled, TWO, balance=[2, 1]) as trainer:
        for items in (12, 12, 7, 12, 7):
            _, batch = classifier(items, dtype=dtype, seed=items)
            _, wanted = plain(classifier(dtype=dtype)[0], classify, batch)
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted, dtype)
            with torch.no_grad():
                torch.testing.assert_close(trainer.predict(batch[0]), classifier(dtype=dtype)[0](batch[0]))


class Layer(nn.Linear):
    """The compiler leaves PyTorch's own modules alone."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).tanh()


@HOW
@pytest.mark.parametrize("kind", [DataParallel, Pipeline])
def test_parts_are_compiled_on_all_devices(kind: Any, how: str) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    layers = [COMPILE[how](Layer(width, width + 1), backend=backend) for width in (3, 4, 5, 6)]
    with kind(nn.Sequential(*layers), TWO) as trainer:
        trainer.step(lambda module, part: module(part).square().mean(), torch.randn(8, 3))
    assert len(compiled) >= len(layers)


@HOW
def test_the_first_run_of_each_size_is_alone(how: str) -> None:
    """The compiler is not thread-safe. Later runs are side by side again."""
    compiled = COMPILE[how](classifier()[0], backend="eager")
    inside: set[int] = set()
    known: set[tuple[int, int]] = set()
    crowded: list[tuple[int, int]] = []
    together = threading.Barrier(2)

    def loss_fn(replica: Any, part: Any) -> Any:
        key = (threading.get_ident(), len(part[0]))
        if inside and key not in known:
            crowded.append(key)
        inside.add(key[0])
        if key in known:
            together.wait(30)  # breaks if the other device does not come while this one is inside
        loss = classify(replica, part)
        inside.discard(key[0])
        known.add(key)
        return loss

    with DataParallel(compiled, TWO, balance="even") as trainer:
        for items in (16, 16, 6, 6, 10, 10):
            trainer.step(loss_fn, classifier(items)[1])
    assert crowded == []
    assert len(known) == 6


def test_a_compiled_loss_function_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []

    class NotingGate(CompileGate):
        def enter(self, first: bool, call: Any) -> Any:
            entered.append(first)
            return super().enter(first, call)

    monkeypatch.setattr("paceline.torch._devices.compile_gate._of_process", NotingGate())
    module, _ = classifier()
    compiled = torch.compile(classify, backend="eager")
    with DataParallel(module, TWO, balance="even") as trainer:
        for loss_fn, items, wanted_gates in (
            (classify, 16, []),
            (compiled, 16, [True, True]),
            (compiled, 16, [False, False]),
            (compiled, 6, [True, True]),
            (classify, 16, []),
        ):
            _, batch = classifier(items, seed=items)
            _, wanted = plain(classifier()[0], classify, batch)
            module.zero_grad()
            entered.clear()
            trainer.step(loss_fn, batch)
            assert_same_gradients(module, wanted)
            assert entered == wanted_gates


def test_a_first_run_that_fails_opens_the_gate_again() -> None:
    module, batch = classifier(8)
    module.compile(backend="eager")
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                trainer.step(lambda m, b: 1 / 0, batch)  # type: ignore[arg-type,return-value]
        trainer.step(classify, batch)
    assert_same_gradients(module, plain(classifier(8)[0], classify, batch)[1])


def lengths(*longest: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Batches of eight items, all of one length: padded to the same width, trimmed to what they cost."""
    batches = []
    for length in longest:
        batch = {"x": torch.ones(8, 9, 3, dtype=torch.double), "length": torch.full((8,), length)}
        batches.append((batch, batch["length"]))
    return batches


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return nn.RNN(3, 4, batch_first=True).double()


def loss_of_trimmed(module: Any, batch: Any) -> Any:
    return module(batch["x"][:, : int(batch["length"].max())])[0].square().mean()


def compiled_trimmed() -> Any:
    return torch.compile(loss_of_trimmed, backend="eager", dynamic=False)


@pytest.mark.parametrize(("compiled", "cost"), [(True, True), (True, False), (False, True)])
def test_the_first_run_of_each_longest_item_is_no_evidence(
    compiled: bool, cost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_fn = compiled_trimmed() if compiled else loss_of_trimmed
    with DataParallel(recurrent(), TWO, balance="even") as trainer:
        excluded = recorded(trainer, monkeypatch)
        for batch, costs in lengths(3, 3, 5, 5, 3):
            if not cost:  # the shapes say it
                batch["x"] = batch["x"][:, : int(costs[0])]
            trainer.step(loss_fn, batch, cost=costs if cost else None)
    assert excluded == [
        [one] * len(step) for one, step in zip((True, False, compiled, False, False), excluded, strict=True)
    ]


def test_the_lengths_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch._run.executor.MOST_SIZES", 3)
    compiled = torch.compile(loss_of_trimmed, backend="eager")
    with DataParallel(recurrent(), ["host:0"], balance="even") as trainer:
        excluded = recorded(trainer, monkeypatch)
        for batch, costs in lengths(2, 3, 4, 5):  # nothing to tune: no room is taken
            trainer.step(loss_of_trimmed, batch, cost=costs)
        excluded.clear()
        for batch, costs in lengths(2, 3, 4, 5):
            trainer.step(compiled, batch, cost=costs)
        assert all(len(sizes) == 3 for sizes in trainer._works.steps.seen.sizes)
    assert [all(step) for step in excluded] == [True, True, False, False]


def test_a_replay_with_costs_compiles_each_length_alone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batches, compiled = recurrent(), lengths(3, 5, 3), compiled_trimmed()
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.write_ledger(tmp_path / "ledger.jsonl")
        for batch, cost in batches:
            trainer.step(loss_of_trimmed, batch, cost=cost)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.replay_claims(tmp_path / "ledger.jsonl")
        excluded = recorded(trainer, monkeypatch)
        for batch, cost in batches:
            trainer.step(compiled, batch, cost=cost)
    assert [all(step) for step in excluded] == [True, True, False]


@pytest.mark.parametrize("compiled", [True, False])
def test_first_runs_are_no_evidence_for_the_balancer(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each size where something compiles, else the very first of a device."""
    module = classifier()[0]
    if compiled:
        module.compile(backend="eager")
    with DataParallel(module, TWO, balance="even", micro_batch=4) as trainer:
        excluded = recorded(trainer, monkeypatch)
        for items in (16, 16, 6, 6):
            trainer.step(classify, classifier(items)[1])
    assert excluded[0][0::2] == [True, True]
    if not compiled:  # else a second run may have waited for the other device's first
        assert excluded[0][1::2] == [False, False]
    assert excluded[1:] == [[False] * 4, [compiled] * 2, [False] * 2]


def test_a_run_that_waited_for_another_to_compile_is_no_evidence() -> None:
    gate = CompileGate()
    compiling, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with gate.enter(True, "call"):
            compiling.set()
            go_on.wait(30)

    def waited() -> bool:
        with gate.enter(False, "call") as found:
            return bool(found)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(first)
        assert compiling.wait(30)
        other = pool.submit(waited)
        deadline = time.monotonic() + 30
        while not gate._condition._waiters and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(1e-3)
        go_on.set()
        assert other.result()
    assert not waited()


CHANGES: dict[str, Callable[[Any], object]] = {
    "new replicas": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "eval": lambda m: m.eval(),
    "autocast": lambda m: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_first_runs_after_a_change_that_compiles_anew_are_no_evidence(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = classifier(8, dtype=torch.float32)
    module.compile(backend="eager")
    with DataParallel(module, TWO, balance="even") as trainer:
        excluded = recorded(trainer, monkeypatch)
        for step in range(4):
            if step == 2:
                CHANGES[change](module)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast" and step >= 2):
                trainer.step(classify, batch)
    assert excluded == [[True] * 2, [False] * 2] * 2


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
