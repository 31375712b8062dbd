"""What proofs do to the process: threads, and compiled code."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from paceline.torch._replicas.compiled import eagerly
from paceline.torch._replicas.written import Written
from proof_cases import made, net, rows, squares
from torch_support import output_of


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
