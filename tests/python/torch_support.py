"""Shared by the tests of `paceline.torch`: device names, gradients of plain PyTorch, comparisons, fresh interpreters."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled
from paceline.torch import DataParallel, GlobalBatchSampler
from program_server import SERVER

LossFunction = Callable[[Any, Any], Any]
Gradients = list[torch.Tensor | None]

TWO = ["host:0", "host:1"]
DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def hosts(count: int) -> list[str]:
    """Names of `count` host devices. Devices beyond the number of cores share cores."""
    return [f"host:{index}" for index in range(count)]


def held(module: nn.Module, devices: int = 1) -> int:
    """The bytes that each of so many host devices has for parameters, which they share, and for gradients and buffers of its own."""
    parameters, buffers = (sum(one.nbytes for one in ones) for ones in (list(module.parameters()), module.buffers()))
    return parameters // devices + parameters + buffers


def classify(module: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def classifier(
    items: int = 16, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """A small module and a batch for it, for use with `classify`."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
    return module, (
        torch.randn(items, 6, generator=generator, dtype=dtype),
        torch.randint(0, 3, (items,), generator=generator),
    )


def noting(note: Callable[[Any, Any], Any], then: LossFunction = classify) -> LossFunction:
    """Call `note(module, slice)`, then `then`."""

    def loss_fn(module: Any, part: Any) -> Any:
        note(module, part)
        return then(module, part)

    return loss_fn


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """A module in double precision with these parts and this forward, which is given the module first. Tensors become buffers."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made.double()


class Words(nn.Module):
    """Means of embeddings. Positions behind an item's length must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        longest = int(batch["length"].max())
        mask = torch.arange(longest)[None, :] < batch["length"][:, None]
        tokens = self.embedding(batch["tokens"][:, :longest]) * mask[..., None]
        return self.head(tokens.sum(1) / batch["length"].clamp(min=1)[:, None])


def words(items: int, seed: int) -> tuple[Words, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    lengths = torch.empty(items).log_normal_(2.0, 0.7).long().clamp(1, 60)
    batch = {"tokens": torch.randint(0, 20, (items, 60)), "length": lengths, "label": torch.randint(0, 3, (items,))}
    return Words().double(), batch


def loss_of_words(module: Any, batch: dict[str, torch.Tensor]) -> Any:
    return nn.functional.cross_entropy(module(batch), batch["label"])


def gradients(module: nn.Module) -> Gradients:
    """Copies of the present gradients."""
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def descend(module: nn.Module, rate: float = 0.5, *, some: bool = False) -> None:
    """A step of gradient descent; with `some`, of parameters that have a gradient, which otherwise all must have. The first optimizer of PyTorch in a process takes seconds to import."""
    pairs = [(one, one.grad) for one in module.parameters() if one.grad is not None]
    assert pairs
    assert some or len(pairs) == len(list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in pairs:
            parameter.sub_(gradient, alpha=rate)
    module.zero_grad()


def plain(module: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of PyTorch alone, on a copy of `module` without gradients."""
    reference = copy.deepcopy(module)
    reference.zero_grad(set_to_none=True)
    loss = loss_fn(reference, batch)
    loss.backward()
    return loss.detach(), gradients(reference)


def worst_difference(got: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> float:
    """The largest norm of a difference, relative to the tensor's norm or to a thousandth of the norm of all tensors.

    The second bound is for gradients that are zero in exact arithmetic (the key bias of attention), whose relative error means nothing. A
    None on one side only is an infinite difference.
    """
    total = sum(float(tensor.double().norm()) ** 2 for tensor in wanted if tensor is not None) ** 0.5
    worst = 0.0
    for mine, theirs in zip(got, wanted, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return float("inf")
            continue
        difference = float((mine.double() - theirs.double()).norm())
        relative = difference / max(float(theirs.double().norm()), 1e-3 * total, 1e-300)
        worst = max(worst, relative if relative == relative else float("inf"))  # NaN counts as infinite
    return worst


def assert_same_gradients(
    module: nn.Module, wanted: Sequence[torch.Tensor | None], dtype: torch.dtype = torch.float64
) -> None:
    assert any(tensor is not None and tensor.abs().sum() > 0 for tensor in wanted), "nothing to compare"
    assert worst_difference(gradients(module), wanted) <= TOLERANCE[dtype]


def assert_exact(
    module: Any,
    loss_fn: LossFunction,
    batch: Any,
    devices: int | Sequence[str] = 2,
    *,
    alone: LossFunction | None = None,
    given: dict[str, Any] | None = None,
    steps: int = 1,
    **options: Any,
) -> None:
    """Each of some steps has the loss and the gradients of PyTorch alone.

    `alone`: what PyTorch alone computes, if not `loss_fn`; `given`: what `step` is given beside the batch.
    """
    loss, wanted = plain(module, alone or loss_fn, batch)
    with DataParallel(module, hosts(devices) if isinstance(devices, int) else devices, **options) as trainer:
        for _ in range(steps):
            module.zero_grad()
            ours = trainer.step(loss_fn, batch, **(given or {}))
            assert_same_gradients(module, wanted, loss.dtype)
            torch.testing.assert_close(ours, loss)


def train_alone(
    module: nn.Module, data: Any, optimizer: Any, epochs: int, batch_size: int, accumulate: int = 1
) -> None:
    """What all ranks together train, in one process: on the global batches, of which some accumulate for a step of the optimizer."""
    for epoch in range(epochs):
        sampler = GlobalBatchSampler(len(data[0]), batch_size)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for k in range(0, len(batches), accumulate):
            items = list(chain(*batches[k : k + accumulate]))
            classify(module, [one[items] for one in data]).backward()
            optimizer.step()
            optimizer.zero_grad()


def recorded(trainer: DataParallel, monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """From now on, for each step: which of its micro-batches are no evidence."""
    excluded: list[list[bool]] = []
    execute = trainer._execution._execute

    def recording(*arguments: Any) -> Any:
        outcome = execute(*arguments)
        excluded.append([claim[5] for claim in outcome.claims])
        return outcome

    monkeypatch.setattr(trainer._execution, "_execute", recording)
    return excluded


def run_script(
    program: str, *, timeout: float = 60, preamble: bool = True, fork: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `program` in a fresh process. Shortly before the timeout, a running program prints where it hangs.

    Without `fork` the process imports torch itself, which takes seconds.
    """
    source = _PREAMBLE.format(seconds=max(1.0, timeout - 5)) if preamble else ""
    source += textwrap.dedent(program)
    if fork:
        return SERVER.run(source, timeout)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(program: str, *, timeout: float = 60, fork: bool = True) -> str:
    """Return the output of `program`, which must exit with status 0 and print nothing to stderr."""
    done = run_script(program, timeout=timeout, fork=fork)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout.strip()


_PREAMBLE = """
import faulthandler
faulthandler.dump_traceback_later({seconds}, exit=True)
import gc, os, signal, sys, threading, time
import torch
from torch import nn
from paceline.torch import DataParallel

def mean_of_squares(module, batch):
    return module(batch).pow(2).mean()

# The number of threads. Threads have two seconds to end until it is the wanted one.
def thread_count(wanted=None):
    end = time.monotonic() + 2
    while True:
        count = len(os.listdir("/proc/self/task"))
        if wanted in (None, count) or time.monotonic() > end:
            return count
        time.sleep(0.01)

module = nn.Linear(4, 2).double()
batch = torch.ones(8, 4, dtype=torch.double)
"""


def cancelled_by_close(trainer: Any, loss_fn: LossFunction, batch: Any) -> int:
    """Close the trainer while another thread is in a step. How many micro-batches ran before the step was cancelled."""
    inside, ran = threading.Event(), list[int]()

    def slow(module: Any, part: Any) -> Any:
        loss = loss_fn(module, part)
        ran.append(len(part))
        inside.set()
        time.sleep(0.1)
        return loss

    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(trainer.step, slow, batch)
        assert inside.wait(30)
        trainer.close()
        with pytest.raises(Cancelled):
            step.result(30)
    return len(ran)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs).double()


def on_worker(name: str) -> bool:
    """Whether the calling thread is the worker of this device."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip().endswith(name)


# The rest of a program with a trainer: children that it forks step, or leave in one of the ways. Then it steps.
CHILDREN = """
def child(what):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        if what == "step":
            try:
                trainer.step(mean_of_squares, batch)
            except paceline.Unavailable as error:
                os._exit(3 if "fork" in str(error) else 4)
        if what == "close":
            trainer.close()
        if what == "drop":
            globals().pop("trainer")
            gc.collect()
        if what == "exit":
            sys.exit(0)
    except Exception:
        os._exit(5)
    os._exit(0)
print([child(what) for what in ("step", "close", "drop", "exit", "nothing")], flush=True)
trainer.step(mean_of_squares, batch)
"""
