"""Progress of a loop: the content of the lines, and the state of the terminal afterwards."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import pytest

from paceline import InvalidArgument
from paceline._progress import Progress

NAMES = ("host:0", "host:1")


class FakeTrainer:
    """Counts steps like a trainer's report. Each step takes 10 ms; host:1 is busy for half of them."""

    def __init__(self, devices: tuple[str, ...] = NAMES) -> None:
        self.steps = 0
        self.devices = devices

    def step(self) -> None:
        self.steps += 1

    def report(self) -> dict[str, Any]:
        busy = {name: 0.01 if name != "host:1" else 0.005 for name in self.devices}
        devices = {
            name: {"items": (3 + i) * self.steps, "busy_seconds": busy[name] * self.steps}
            for i, name in enumerate(self.devices)
        }
        return {
            "devices": devices,
            "steps": self.steps,
            "step_seconds": 0.01 * self.steps,
            "moves": self.steps // 2,
            "imbalance": 1 / 3,
        }

    def loss(self) -> float | None:
        return 1 / self.steps if self.steps else None

    def progress(self, batches: Any, **options: Any) -> Progress[Any]:
        return Progress(batches, self.report, self.loss, **options)


def lines_of(trainer: FakeTrainer, batches: Any, **options: Any) -> list[str]:
    file = io.StringIO()
    for _ in trainer.progress(batches, file=file, **options):
        trainer.step()
    return file.getvalue().splitlines()


def test_a_line_tells_everything() -> None:
    assert lines_of(FakeTrainer(), range(4), every=0)[2] == (
        "3/4  step 3  loss 0.3333  10.0 ms/step  imbalance 33.3%  moves 1  host:0 3 (100% busy)  host:1 4 (50% busy)"
    )


def test_lines_come_after_the_first_batch_and_at_the_end() -> None:
    assert [line.split()[0] for line in lines_of(FakeTrainer(), range(50), every=1000)] == ["1/50", "50/50"]
    assert [line.split()[0] for line in lines_of(FakeTrainer(), range(1))] == ["1/1"]
    assert lines_of(FakeTrainer(), []) == []


def test_figures_are_of_this_loop() -> None:
    trainer = FakeTrainer()
    lines_of(trainer, range(10))
    assert lines_of(trainer, range(2), every=0)[-1].startswith("2/2  step 2 ")
    assert " moves 1 " in lines_of(trainer, range(2), every=0)[-1]


def test_the_number_of_batches_may_be_unknown_or_given() -> None:
    assert lines_of(FakeTrainer(), iter(range(2)), every=0)[-1].startswith("2  step 2 ")
    assert lines_of(FakeTrainer(), iter(range(2)), every=0, total=2)[-1].startswith("2/2  step 2 ")
    assert len(FakeTrainer().progress(range(7))) == 7
    with pytest.raises(TypeError, match="total="):
        len(FakeTrainer().progress(iter(range(7))))


def test_a_loop_without_steps_has_no_times() -> None:
    file = io.StringIO()
    assert list(FakeTrainer().progress("ab", file=file, every=0)) == ["a", "b"]
    assert file.getvalue().splitlines()[0] == (
        "1/2  step 0  imbalance 33.3%  moves 0  host:0 0 (0% busy)  host:1 0 (0% busy)"
    )


def test_many_devices_are_told_together() -> None:
    names = tuple(f"host:{i}" for i in range(20))
    assert lines_of(FakeTrainer(names), range(2), every=0)[-1].endswith("  20 devices 3 to 22 (50% to 100% busy)")


class CostingTrainer(FakeTrainer):
    """Has costs of 10 and 20 in every step except the third."""

    def report(self) -> dict[str, Any]:
        report = super().report()
        with_costs = self.steps - (self.steps >= 3)
        if with_costs:
            report["items"] = {"steps": with_costs}
            for i, entry in enumerate(report["devices"].values()):
                entry["cost"] = 10 * (i + 1) * with_costs
        return report


def test_costs_are_told_where_all_steps_had_them() -> None:
    lines = lines_of(CostingTrainer(), range(5), every=0)
    assert [line.split("  host:0 ")[1] for line in lines] == [
        "cost 10 (100% busy)  host:1 cost 20 (50% busy)",
        "cost 10 (100% busy)  host:1 cost 20 (50% busy)",
        "3 (100% busy)  host:1 4 (50% busy)",
        "cost 10 (100% busy)  host:1 cost 20 (50% busy)",
        "cost 10 (100% busy)  host:1 cost 20 (50% busy)",
    ]
    names = tuple(f"host:{i}" for i in range(9))
    assert lines_of(CostingTrainer(names), range(1), every=0)[-1].endswith(
        "  9 devices cost 10 to 90 (50% to 100% busy)"
    )


def test_negative_pauses_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 0"):
        FakeTrainer().progress(range(3), every=-1)


def test_an_exception_passes_and_nothing_is_printed_after_it() -> None:
    file, trainer = io.StringIO(), FakeTrainer()

    def loop() -> None:
        for number in trainer.progress(range(5), file=file, every=0):
            trainer.step()
            1 // (3 - number)

    with pytest.raises(ZeroDivisionError):
        loop()
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["1/5", "2/5", "3/5"]


def test_nothing_is_printed_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    torch_support = pytest.importorskip("torch_support", reason="needs PyTorch")
    from paceline.torch import DataParallel

    module, batch = torch_support.classifier(12)
    with DataParallel(module, torch_support.TWO) as trainer:
        for _ in range(20):
            trainer.step(torch_support.classify, batch)
        assert capfd.readouterr() == ("", "")
        for _ in trainer.progress(range(3), every=0):
            loss = trainer.step(torch_support.classify, batch)
    output = capfd.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 3
    assert f"3/3  step 3  loss {float(loss):.4g}  " in output.err
    assert re.search(r"  host:0 \d+ \(\d+% busy\)  host:1 \d+ \(\d+% busy\)$", output.err)


# Runs in a process of its own, on a terminal of its own.
PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
from test_progress import FakeTrainer
{setup}
trainer = FakeTrainer()
for number in trainer.progress(range({batches})):
    trainer.step()
    {body}
print("after the loop")
"""
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def on_a_terminal(batches: int, body: str, *, setup: str = "", interrupt_at: str = "", term: str = "xterm") -> str:
    """Return what a loop writes to a terminal. Send a Ctrl-C when it has written `interrupt_at`."""
    master, slave = os.openpty()
    program = PROGRAM.format(path=sys.path, setup=setup, batches=batches, body=body)
    environment = {**os.environ, "TERM": term, "COLUMNS": "150"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    output, deadline = "", time.monotonic() + 60
    with contextlib.suppress(OSError):  # Linux raises this when no process has the terminal open any more
        while time.monotonic() < deadline:
            if not select.select([master], [], [], 1.0)[0]:
                continue
            chunk = os.read(master, 65536).decode()
            if not chunk:
                break
            output += chunk
            if interrupt_at and interrupt_at in output:
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
    process.wait(timeout=30)
    os.close(master)
    return output


needs_rich = pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")


@needs_rich
def test_a_terminal_is_redrawn_and_left_as_it_was() -> None:
    output = on_a_terminal(4, "time.sleep(0.3)")
    assert output.count(HIDE) == output.count(SHOW) == 1
    assert output.count("4/4  step 4  loss 0.25  10.0 ms/step  imbalance 33.3%  moves 2") >= 1
    assert "4 items a step, 50% busy" in output
    assert output.index(SHOW) < output.index("after the loop")


@needs_rich
def test_what_is_printed_in_the_loop_stays_readable() -> None:
    output = on_a_terminal(3, "print('said', number); time.sleep(0.3)")
    assert all(re.search(rf"said {number}\s*\r?\n", output) for number in range(3)), output
    assert not re.search(r"busy *(\x1b\[\d*m)*said", output), output  # not on the redrawn line


@needs_rich
def test_ctrl_c_gives_the_terminal_back_before_the_traceback() -> None:
    output = on_a_terminal(10_000, "time.sleep(0.05)", interrupt_at="step 3")
    assert output.count(HIDE) == output.count(SHOW) == 1
    assert output.index(SHOW) < output.index("Traceback")
    assert "KeyboardInterrupt" in output
    assert "after the loop" not in output


@needs_rich
def test_no_thread_draws() -> None:
    output = on_a_terminal(2, "import threading; print('threads', threading.active_count())")
    assert output.count("threads 1") == 2


@pytest.mark.parametrize(
    ("setup", "term"),
    [
        ("sys.modules['rich'] = None", "xterm"),
        ("import logging; logging.basicConfig()", "xterm"),
        (
            "sys.modules['rich'] = None; import logging; logging.basicConfig(stream=open('/dev/null')); "
            "logging.getLogger().handlers[0].stream.close()",
            "xterm",
        ),
        pytest.param("", "dumb", marks=needs_rich),
    ],
    ids=["without rich", "with log handlers", "with a log that is closed", "dumb"],
)
def test_other_terminals_get_plain_lines(setup: str, term: str) -> None:
    output = on_a_terminal(3, "pass", setup=setup, term=term)
    assert [line.split()[0] for line in output.splitlines()] == ["1/3", "3/3", "after"]
    assert "\x1b" not in output
