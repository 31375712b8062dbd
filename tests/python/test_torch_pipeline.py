"""`Pipeline`: the gradient of plain accumulation, bit for bit, and what can be read about its steps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.torch import DataParallel, Pipeline
from pipeline_cases import differences
from pipeline_models import (
    Batch,
    NanoGpt,
    accumulate,
    assert_equal,
    loss_inside,
    same,
    sequential,
    slices,
    squares,
    text,
    two_stages,
    vectors,
)
from pipeline_models import chain as chain_of
from torch_support import TWO, classify, gradients, hosts, worst_difference

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


# What a call of `Pipeline` takes and gives: scalers, terms, totals, extras, predictions, hooks, optimizers. Each as on one device.


def twins(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def test_a_step_adds_to_gradients_that_are_there() -> None:
    module, batch = chain(), torch.randn(8, 8)
    plain = copy.deepcopy(module)
    with Pipeline(module, devices=TWO, micro_batches=1) as trainer:
        for _ in range(2):
            trainer.step(squares, batch)
            accumulate(plain, squares, batch, trainer)
    assert_equal(module, plain)


def test_a_grad_scaler_scales_as_on_one_device() -> None:
    model, plain = twins(NanoGpt)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            plain.zero_grad()
            assert trainer.step(loss_inside, text(), scaler=scaler) < 10
            # A power of two scales without rounding.
            accumulate(plain, lambda *given: scaler.scale(loss_inside(*given)), text(), trainer)
            assert_equal(model, plain)


def test_several_terms_each_have_their_own_weight() -> None:
    (model, plain), counted = twins(sequential), torch.tensor([1.0, 0, 2, 1, 0, 3, 1, 1, 1])
    batch = (*vectors(), counted)

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        weight = part[2]
        return {
            "class": functional.cross_entropy(output, part[1]),
            "size": (output.pow(2).mean(1) * weight).sum() / weight.sum().clamp(min=1e-9),
        }

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch, weight={"class": None, "size": counted})
            for part in slices(batch, trainer.report()["micro_batches"]):
                terms = loss_fn(plain, part)
                (terms["class"] * (len(part[0]) / 9) + terms["size"] * (part[2].sum() / counted.sum())).backward()
    assert worst_difference(gradients(model), gradients(plain)) < 1e-6


def test_loss_carries_gradients_to_backward() -> None:
    model, plain = twins(NanoGpt)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            loss = trainer.loss(loss_inside, text())
            assert model.lm_head.weight.grad is None
            (loss * 3).backward()
        wanted = accumulate(plain, loss_inside, text(), trainer)
    assert same(gradients(model), [None if one is None else one * 3 for one in wanted])


def test_extras_come_back_in_the_order_of_the_items() -> None:
    model, batch = sequential(), vectors()

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        return functional.cross_entropy(output, part[1]), {"output": output, "items": part[1]}

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch)
        assert torch.equal(trainer.extras["items"], batch[1])
        with torch.no_grad():
            torch.testing.assert_close(trainer.extras["output"], model(batch[0]))


def test_sums_of_samples_over_a_total_that_is_given() -> None:
    """collate=, total=, reduction= and accumulation over two steps."""
    (model, plain), (x, y) = twins(sequential), vectors(8)

    def loss_fn(module: Any, part: Any) -> Any:
        return functional.cross_entropy(module(part[0]), part[1], reduction="sum")

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    with two_stages(model, reduction="sum") as trainer:
        for _ in range(4):
            model.zero_grad(), plain.zero_grad()
            for half in (slice(0, 4), slice(4, 8)):
                trainer.step(loss_fn, list(zip(x[half], y[half], strict=True)), collate=collate, total=16)
            assert trainer.report()["micro_batches"] == [1, 1, 1, 1]
            (loss_fn(plain, (x, y)) / 16).backward()
    assert worst_difference(gradients(model), gradients(plain)) < 1e-6


def test_predict_keeps_the_order_and_leaves_gradients_alone() -> None:
    model, (x, _) = sequential(), vectors(17)
    with two_stages(model) as trainer:
        for _ in range(5):
            with torch.no_grad():
                torch.testing.assert_close(trainer.predict(x), model(x))
            trainer.step(classify, vectors())
        assert trainer.predict(x[:1]).shape == (1, 3)


def test_the_user_s_hooks_on_blocks_run_once_per_micro_batch() -> None:
    model, plain = twins(NanoGpt)
    calls: list[int] = []

    def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return output * 0.5

    for one in (model, plain):
        one.transformer["h"][2].register_forward_hook(halve)
        one.transformer["h"][2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with two_stages(model) as trainer:
        for _ in range(4):
            calls.clear()
            model.zero_grad()
            trainer.step(loss_inside, text())
        assert sorted(calls) == sorted(trainer.report()["micro_batches"])
        accumulate(plain, loss_inside, text(), trainer)
    assert_equal(model, plain)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_updates_as_on_one_device(optimizer: Any) -> None:
    model, plain = twins(NanoGpt)
    theirs = optimizer(plain.parameters(), lr=0.1)
    with two_stages(model) as trainer:
        ours = trainer.optimizer(optimizer, lr=0.1)
        for _ in range(5):
            trainer.step(loss_inside, text())
            accumulate(plain, loss_inside, text(), trainer)
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
