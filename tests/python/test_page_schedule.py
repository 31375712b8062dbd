"""The schedules of a pipeline on its page."""

from __future__ import annotations

import random
import re

import torch
from torch import nn

from paceline._page.document import page_of_runs
from paceline._page.run import Row, Run
from paceline._page.schedule import MOST_BOXES, schedules
from paceline._plot_schedule import ScheduleRow, ScheduleSpan
from paceline.torch import Pipeline
from page_support import MOST_BYTES
from torch_support import TWO


def step(stages: int, micro_batches: int, scale: float = 1.0) -> list[ScheduleRow]:
    """Forwards, each after a wait, and then backwards."""
    found = []
    for stage in range(stages):
        spans = []
        for number in range(micro_batches):
            at = 0.0123456 * (stage + 2 * number)
            spans.append(ScheduleSpan("wait", number, scale * (at - 0.01), scale * at))
            spans.append(ScheduleSpan("forward", number, scale * at, scale * (at + 0.012)))
        for number in range(micro_batches):
            at = 0.0123456 * (2 * micro_batches + 2 * stages - stage + 2 * number)
            spans.append(ScheduleSpan("backward", number, scale * at, scale * (at + 0.02)))
        found.append(ScheduleRow(f"cuda:{stage}", stage, spans))
    return found


def boxes(html: str) -> int:
    return html.count("<i class=") - 4 * html.count('class="key')


def test_the_page_of_many_micro_batches_is_small_and_says_what_is_left_out() -> None:
    last = step(8, 64)
    found, lacks = schedules("The last step", last, last, [(f"step {n}", last) for n in range(7)])
    assert lacks == "A page has no room for the schedules of earlier steps."
    assert len(found) == 2
    assert 'class="stage planned"' in found[0]
    assert boxes("".join(found)) <= MOST_BOXES
    names = [f"cuda:{stage}" for stage in range(8)]
    draws = random.Random(0)
    rows = [
        Row(at, 1, [512.0] * 8, [draws.random() for _ in names], 1 + draws.random(), draws.random(), 2.5, 1.5, [3] * 8)
        for at in range(1024)
    ]
    page = page_of_runs("large", [Run("large", names, rows, pipeline=True, share_of="blocks", schedules=found)])
    assert len(page.encode()) < MOST_BYTES
    page = page_of_runs("larger", [Run("larger", names, rows, schedules=found * 2)])
    assert len(page.encode()) > MOST_BYTES  # so the budget is what keeps it small


def test_a_few_steps_are_shown_and_too_large_ones_are_not() -> None:
    last = step(2, 4)
    found, lacks = schedules("The last step", last, last, [(f"step {n}", last) for n in range(7)])
    assert (len(found), lacks) == (2, "")
    assert found[1].startswith("<details><summary>7 steps before it</summary>")
    assert found[1].count("<figure>") == 7
    large = step(8, 150)
    found, lacks = schedules("The last step", large, large, [])
    assert "planned" not in found[0]
    assert lacks.startswith("A page has no room for the plan of the last step.")
    found, lacks = schedules("The last step", step(16, 128), None, [])
    assert found == []
    assert "more than a page has room for. plot_schedule() draws it." in lacks


def test_a_bubble_ends_with_the_step() -> None:
    html = "".join(schedules("The last step", step(2, 4), step(2, 4, scale=0.5), [])[0])
    ends = re.findall(r'class="bubble" style="left:0;width:([\d.]+)%', html)
    assert ends == ["100.00", "50.00"] * 2


def test_steps_that_measure_blocks_do_not_count_in_means() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with Pipeline(module, TWO, prove=False) as trainer:
        for _ in range(12):
            trainer.step(lambda model, x: model(x).square().mean(), torch.randn(8, 8))
        (run,), measured = trainer._reports._runs(), trainer._reports._loop.measured
    assert 1 < measured < 12
    assert [row.first_step for row in run.counted] == list(range(measured, 12))
    assert any(line.startswith(f"The first {measured} steps measured blocks") for line in run.lacks)
