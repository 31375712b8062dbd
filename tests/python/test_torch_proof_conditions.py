"""Proofs beside what else happens to a step: retired devices, scalers, anomaly mode, and an end of any phase."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.torch import DataParallel
from paceline.torch._replicas.compiled import eagerly
from paceline.torch._replicas.written import Written
from proof_cases import made, net, rows, same, squares
from torch_support import output_of

pytestmark = pytest.mark.usefixtures("proved")


class Keeps(nn.Module):
    """Draws, and writes a buffer and an attribute, of the same value for each split of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.steps = net(), 0
        self.register_buffer("largest", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        self.largest: torch.Tensor
        with torch.no_grad():
            self.largest.copy_(next(self.inner.parameters()).abs().amax())
        return F.dropout(self.inner(x), 0.3)


def test_devices_that_are_retired_take_no_part_in_a_proof() -> None:
    module, batch = net(), rows(24)
    with DataParallel(module, ["host:0", "host:1", "host:2"], prove="raise") as trainer:
        trainer.retire("host:1")
        for _ in range(4):
            trainer.step(squares, batch)
        assert trainer.explain().count("equal to one device") == 1
        assert trainer.shares["host:1"] == 0
        trainer.restore("host:1")
        trainer.step(lambda inner, part: squares(inner, part) + 0 * part.sum(), batch)
        assert trainer.explain().count("equal to one device") == 2


def test_a_scaler_scales_a_proved_step_once() -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with made(module, prove="raise") as trainer:
        loss = trainer.step(squares, batch, scaler=scaler)
        assert "equal to one device" in trainer.explain()
    wanted = squares(plain, batch)
    scaler.scale(wanted).backward()
    torch.testing.assert_close(loss, wanted.detach())
    assert same(module, plain, exact=True)


def test_a_scaled_gradient_that_overflows_is_left_to_the_scaler() -> None:
    module, batch = net().half().float(), rows().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = copy.deepcopy(module.state_dict())
    with made(module, prove="raise") as trainer:
        trainer.step(lambda inner, part: squares(inner, part) * 1e6, batch, scaler=scaler)
        assert "not a finite number" in trainer.explain()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_anomaly_mode_sees_a_proved_step() -> None:
    module, batch = net(), rows()

    def loss_fn(inner: Any, part: Any) -> Any:
        return (inner(part) * 0).sqrt().mean()  # 0 * inf in the backward

    with made(module, prove="raise") as trainer, torch.autograd.detect_anomaly(check_nan=True):
        with pytest.raises(RuntimeError, match="MulBackward0"):
            trainer.step(loss_fn, batch)
        assert all(one.grad is None for one in module.parameters())
        trainer.step(squares, batch)
        assert "equal to one device" in trainer.explain()


def everything(module: Keeps, random: bool = True) -> list[Any]:
    found = [value.clone() for value in module.state_dict().values()]
    found += [one.grad if one.grad is None else one.grad.clone() for one in module.parameters()]
    return [*found, torch.get_rng_state()] if random else found


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    return all(
        one is other is None or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(ours, theirs, strict=True)
    )


class Count:  # a class, since an object would be put back between the runs
    calls = 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["step", "loss", "run", "predict"])
def test_ctrl_c_in_any_phase_of_a_proof_leaves_everything_as_it_was(kind: str, where: str) -> None:
    batch = rows()
    plain = Keeps()

    def run_of(trainer: DataParallel, loss_fn: Callable[..., Any]) -> Any:
        if kind == "predict":
            return trainer.predict(lambda inner, part: loss_fn(inner, part, rows=True), batch)
        if kind == "run":
            with trainer.batch(batch) as whole:
                return whole.run(lambda inner, part: part.backward(loss_fn(inner, part.data)))
        return trainer.step(loss_fn, batch) if kind == "step" else trainer.loss(loss_fn, batch).backward()

    phases = 0
    for phase in range(1, 20):
        module = Keeps()
        Count.calls = 0

        def interrupted(gradient: torch.Tensor, phase: int = phase) -> torch.Tensor:
            if phase <= Count.calls < 100:
                Count.calls = 100
                raise KeyboardInterrupt
            return gradient

        def loss_fn(inner: Any, part: Any, rows: bool = False, phase: int = phase) -> Any:
            out = inner(part)
            Count.calls += 1
            if where == "forward" and Count.calls == phase:
                raise KeyboardInterrupt
            if where == "backward" and out.requires_grad:
                out.register_hook(interrupted)
            return out if rows else out.square().mean()

        torch.manual_seed(5)
        with made(module, prove="raise") as trainer:
            before = everything(module)
            try:
                run_of(trainer, loss_fn)
            except KeyboardInterrupt:
                phases += 1
                assert alike(everything(module), before)
                assert trainer.report()["steps"] == 0
            else:
                break
            Count.calls = 100
            run_of(trainer, loss_fn)
            assert "equal to one device" in trainer.explain()
    assert phases >= (0 if kind == "predict" and where == "backward" else 2)
    if kind in ("step", "loss"):  # the last one was not interrupted
        torch.manual_seed(5)
        squares(plain, batch).backward()
        assert same(module, plain, exact=True)


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_memory_that_runs_out_in_any_phase_of_a_proof_costs_nothing_but_slices(phase: int) -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    Count.calls = 0

    def loss_fn(inner: Any, part: Any) -> Any:
        loss = squares(inner, part)
        Count.calls += 1
        if Count.calls == phase:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    with made(module, prove="raise") as trainer:
        trainer.step(loss_fn, batch)
        assert "equal to one device" in trainer.explain()
    squares(plain, batch).backward()
    assert same(module, plain)


# What a proof does with objects outside of the module that the function reaches: it puts them back, or names them.


def test_generators_are_where_one_device_leaves_them() -> None:
    module, batch = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).double(), rows()
    states = []
    for proved in (False, True):
        own = torch.Generator().manual_seed(3)
        python, numpys, old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)

        def loss_fn(
            module: Any, part: Any, own: Any = own, python: Any = python, numpys: Any = numpys, old: Any = old
        ) -> Any:
            noise = torch.randn(part.shape, generator=own, dtype=part.dtype)
            return squares(module, part + noise) * (1 + python.random() + numpys.random() + old.random())

        torch.manual_seed(1)
        random.seed(1)
        if proved:
            with made(copy.deepcopy(module)) as trainer:
                loss = trainer.step(loss_fn, batch)
                said = trainer.explain()
            assert all(f"a {name} of loss_fn" in said for name in ("Random", "Generator", "RandomState"))
        else:
            loss = loss_fn(copy.deepcopy(module), batch)
        found = [loss.item(), torch.get_rng_state().tolist(), own.get_state().tolist(), random.getstate()]
        states.append([*found, python.random(), numpys.random(), old.random()])
    assert states[0] == states[1]


def test_what_is_left_alone_is_named() -> None:
    lock, loader = threading.Lock(), DataLoader(TensorDataset(rows(4)))
    options = types.SimpleNamespace(scale=2.0, calls=0)

    def loss_fn(module: Any, part: Any) -> Any:
        with lock:
            options.calls += 1
        return squares(module, part) * options.scale * len(loader)

    with made(net()) as trainer:
        trainer.step(loss_fn, rows())
        assert "; not put back: DataLoader, lock; " in trainer.explain()
        assert options.calls == 1
        trainer.step(squares, rows())
        assert trainer.explain().count("not put back") == 1


# What proofs do to the process: threads, and compiled code.


def test_a_proof_leaves_the_number_of_threads_that_new_threads_get() -> None:
    program = """
    import os, threading
    os.environ.pop("PACELINE_PROVE", None)
    torch.set_num_threads(3)
    with DataParallel(module, ["host:0", "host:1"], prove="raise") as trainer:
        trainer.step(mean_of_squares, batch)
        trainer.predict(batch)
    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start(); thread.join()
    print(found)
    """
    assert output_of(program) == "[3, 3]"


def test_compiled_code_runs_compiled_again_when_the_last_thread_leaves() -> None:
    def stance() -> str:
        state: Any = torch._dynamo.eval_frame
        return str(state._stance.stance)

    import torch._dynamo.eval_frame

    before = stance()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with eagerly():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with eagerly():
        leave.set()
        thread.join()
        assert stance() == "force_eager"
    assert stance() == before


def test_an_interrupted_commit_counts_a_forward_once(monkeypatch: Any) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = net(), 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 2
            return self.inner(x)

    push, interrupts = Written.push, [KeyboardInterrupt]

    def interrupted(written: Written, home: torch.device) -> None:
        if interrupts:
            raise interrupts.pop()
        push(written, home)

    module = Counts()
    trainer = made(module, micro_batch=3, prove=False)
    monkeypatch.setattr(Written, "push", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.step(squares, rows())
    assert module.calls == 2
