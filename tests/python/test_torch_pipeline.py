"""`Pipeline`: the gradient of plain accumulation, bit for bit, and what can be read about its steps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel, Pipeline
from pipeline_cases import differences
from pipeline_models import NanoGpt, accumulate, assert_equal, loss_inside, squares, text
from pipeline_models import chain as chain_of
from torch_support import TWO, hosts

ROUNDS = 60  # `python tests/python/pipeline_cases.py 1000` runs more
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_equal_plain_accumulation_bit_for_bit(part: int) -> None:
    found = {seed: differences(seed) for seed in range(part, ROUNDS, PARTS)}
    assert {seed: names for seed, names in found.items() if names} == {}


def chain() -> Any:
    return chain_of(6, 8)


def test_dropout_draws_what_one_device_draws() -> None:
    models = []
    for devices in (["host:0"], TWO, hosts(3)):
        torch.manual_seed(0)
        models.append(NanoGpt(dropout=0.5))
        with Pipeline(models[-1], devices=devices, micro_batches=4) as trainer:
            for _ in range(5):
                models[-1].zero_grad()
                trainer.step(loss_inside, text(12))
    for other in models[1:]:
        assert_equal(other, models[0])


def test_a_step_adds_to_gradients_that_are_there() -> None:
    module, batch = chain(), torch.randn(8, 8)
    plain = copy.deepcopy(module)
    with Pipeline(module, devices=TWO, micro_batches=1) as trainer:
        for _ in range(2):
            trainer.step(squares, batch)
            accumulate(plain, squares, batch, trainer)
    assert_equal(module, plain)


def test_the_report_says_where_the_module_is_cut() -> None:
    module = chain()
    with Pipeline(module, devices=TWO, cuts=[0, 4], micro_batches=4) as trainer:
        assert trainer.report()["pipeline"]["measuring"]
        for _ in range(4):
            trainer.step(squares, torch.randn(10, 8))
        report = trainer.report()
        pipeline = report["pipeline"]
        assert report["micro_batches"] == [3, 3, 2, 2]
        assert [stage["blocks"] for stage in pipeline["stages"]] == [4, 2]
        assert pipeline["stages"][0]["first_block"] == "0"
        assert pipeline["stages"][1]["last_block"] == "5"
        assert not pipeline["measuring"]
        assert pipeline["predicted_seconds"] >= pipeline["ideal_seconds"] > 0
        assert 0 <= pipeline["bubble"] < 1
        assert len(pipeline["schedule"].splitlines()) == 2
        # A linear layer has 72 parameters of 4 bytes, with a gradient and two states of Adam.
        assert [block["parameter_bytes"] for block in pipeline["blocks"]] == [72 * 4 * 4] * 6
        assert report["devices"]["host:0"]["items"] == 40
        assert "sets the pace" in trainer.explain()
    with DataParallel(chain(), devices=TWO) as other:
        assert [bound for bound, _ in report["step_counts"]] == [bound for bound, _ in other.report()["step_counts"]]
    assert report["step_counts"][-1][1] == report["steps"]


def test_events_and_history_say_what_each_stage_ran() -> None:
    with Pipeline(chain(), devices=TWO, cuts=[0, 4], micro_batches=4) as trainer:
        for _ in range(3):
            trainer.step(squares, torch.randn(8, 8))
        trainer.retire("host:1")
        trainer.step(squares, torch.randn(8, 8))
        assert [stage["device"] for stage in trainer.report()["pipeline"]["stages"]] == ["host:0"]
        events, rows = trainer.events(), trainer.history()
        trainer.restore("host:1")
        trainer.step(squares, torch.randn(8, 8))
    ran = {
        kind: sorted(
            (one["device"], one["begin"], one["end"]) for one in events if (one["kind"], one["step"]) == (kind, 2)
        )
        for kind in ("forward", "backward")
    }
    assert ran["forward"] == ran["backward"] == [(name, b, b + 2) for name in TWO for b in (0, 2, 4, 6)]
    step = next(one for one in events if one["kind"] == "step" and one["step"] == 2)
    assert (step["device"], step["begin"], step["end"]) == (None, 0, 8)
    assert sorted(rows[2]["blocks"].values()) == [2, 4]  # on the devices as fast as they were measured
    assert rows[3]["blocks"] == {"host:0": 6, "host:1": 0}
    assert [row["moves"] for row in rows] == [0, 0, 0, 1]
    assert rows[3]["items"] == {"host:0": 8, "host:1": 0}


def test_saved_bytes_are_those_of_distinct_tensors() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))
    with Pipeline(module, devices=TWO, blocks=list(module), micro_batches=2) as trainer:
        for _ in range(3):
            trainer.step(squares, torch.randn(8, 8))
        blocks = trainer.report()["pipeline"]["blocks"]
    # Tanh's output is the input of the second layer. The first layer's own input is kept, too, except that of the batch.
    assert blocks[1]["saved_bytes"] == (8 + 16) * 4
    assert blocks[1]["boundary_bytes"] == 8 * 4


def test_a_trace_has_every_action_once(tmp_path: Path) -> None:
    module = chain()
    with Pipeline(module, devices=TWO, cuts=[0, 3], micro_batches=3) as trainer:
        trainer.step(squares, torch.randn(6, 8))
        trainer.trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    actions = [
        (event["name"], event["args"]["stage"]) for event in events if event.get("cat") in ("forward", "backward")
    ]
    wanted = [(f"{kind} {b}-{b + 1}", stage) for kind in ("forward", "backward") for b in (0, 2, 4) for stage in (0, 1)]
    assert sorted(actions) == sorted(wanted)


def test_the_schedule_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    module = chain()
    with Pipeline(module, devices=TWO, micro_batches=4) as trainer:
        for _ in range(4):
            trainer.step(squares, torch.randn(8, 8))
        figure = trainer.plot_schedule(tmp_path / "pipe.svg")
    assert (tmp_path / "pipe.svg").read_text().lstrip().startswith("<?xml")
    assert figure.axes


class Remembers(nn.Module):
    """A block that leaves a term of the loss on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.penalty: Any = None

    def forward(self, x: Any) -> Any:
        x = self.layer(x).tanh()
        self.penalty = x.abs().mean()
        return x


def test_what_a_forward_writes_on_its_module_belongs_to_its_micro_batch() -> None:
    torch.manual_seed(0)
    module, batch = nn.Sequential(*(Remembers() for _ in range(4))), torch.randn(12, 8)
    plain = copy.deepcopy(module)

    def loss_fn(module: Any, batch: Any) -> Any:
        return squares(module, batch) + sum(block.penalty for block in module)

    with Pipeline(module, devices=TWO, micro_batches=4, schedule="gpipe") as trainer:
        for _ in range(4):
            module.zero_grad()
            trainer.step(loss_fn, batch)
        accumulate(plain, loss_fn, batch, trainer)
    assert_equal(module, plain)
