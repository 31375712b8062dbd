"""Pipelines whose stages are on GPUs, on a fake device that has memories of its own and notices what would not be ordered on a GPU."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_device
from paceline import Error, InvalidArgument
from paceline.torch import Pipeline, layout
from paceline.torch._devices import cuda
from paceline.torch._devices.stages import StagePlaces
from paceline.torch._pipeline.measure import Measured
from paceline.torch._pipeline.planner import Planner
from pipeline_cases import Case, random_case, steady
from pipeline_gpu_cases import BOXES, Bridge, bridge_differences, differences, different, text, words

pytestmark = pytest.mark.own_gpus("pipelines in Python are refused on parts")


@pytest.mark.parametrize("box", BOXES)
def test_gradients_are_those_of_plain_accumulation(gpus: Any, box: str) -> None:
    devices = BOXES[box]
    options = {"cuts": list(range(len(devices))), "micro_batches": 4, "schedule": "1f1b"}
    assert differences(Case(text(), words(), len(devices), options, False), devices) == []


@pytest.mark.parametrize("box", BOXES)
def test_random_pipelines(gpus: Any, box: str) -> None:
    devices = BOXES[box]
    found: dict[int, list[str]] = {}
    for seed in range(5):
        case = random_case(seed, len(devices))
        moves = seed % 2 and len(devices) > 1 and "cuts" not in case.options
        found[seed] = differences(case, devices, retired=devices[seed % len(devices)] if moves else None)
    assert {seed: names[:4] for seed, names in found.items() if names} == {}


@pytest.mark.parametrize("box", [name for name in BOXES if name != "one"])
def test_what_several_stages_use_gets_its_gradient_in_order(gpus: Any, box: str) -> None:
    torch.manual_seed(0)
    assert bridge_differences(Bridge(), BOXES[box]) == []


def test_a_failure_names_the_stage_and_commits_nothing(gpus: Any) -> None:
    model, batch = text(), words()
    case = Case(model, batch, 2, {}, False)
    fails = [False]

    def fail(module: nn.Module, args: Any) -> None:
        if fails[0]:
            raise ValueError("no")

    model.layers[3].register_forward_pre_hook(fail)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=4) as trainer:
        for _ in range(4):
            trainer.step(case.loss_fn, batch)
        before = [None if one.grad is None else one.grad.cpu() for one in model.parameters()]
        fails[0] = True
        with pytest.raises(ValueError, match="no") as raised:
            trainer.step(case.loss_fn, batch)
        assert re.search(r"cuda:[01] in the forward in or after block layers\.3 \(stage 1", raised.value.__notes__[0])
        fails[0] = False
        # The failed step may have moved stages to other devices first: measured times may say so.
        assert all(
            one.grad is not None and other is not None and torch.equal(one.grad.cpu(), other)
            for one, other in zip(model.parameters(), before, strict=True)
        )
        trainer.step(case.loss_fn, batch)


def test_memory_that_runs_out_on_a_gpu_lets_less_be_in_flight(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)
    model, batch = text(), words(16)
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=8, schedule="1f1b") as trainer:
        for _ in range(4):
            trainer.step(case.loss_fn, batch)
        model.zero_grad()
        first = trainer.report()["pipeline"]["stages"][0]
        gpu = BOXES["two"].index(first["device"])
        gpus.reset_peak(gpu)
        before = gpus.peak(gpu)
        trainer.step(case.loss_fn, batch)
        model.zero_grad()
        gpus.limit(gpu, before + (gpus.peak(gpu) - before) * 4 // 5)
        try:
            trainer.step(case.loss_fn, batch)
        finally:
            gpus.limit(gpu, 0)
        report = trainer.report()
        assert report["out_of_memory"] > 0
        assert report["pipeline"]["stages"][0]["device"] == first["device"]
        assert report["pipeline"]["stages"][0]["in_flight"] < first["in_flight"]


def test_gpus_whose_direct_copies_arrive_wrong_are_named(fake: Any, gpus: Any) -> None:
    fake.lie(1, 0)
    with Pipeline(text(), BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        assert fake.met == [[0, 1]]
        assert "through the host, because direct copies arrived wrong" in trainer.explain()


def test_times_are_those_of_the_gpus(gpus: Any) -> None:
    model, batch = text(), words()
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        for _ in range(5):
            trainer.step(case.loss_fn, batch)
        report = trainer.report()["pipeline"]
        assert not report["measuring"]
        assert all(block["forward_seconds"] > 0 and block["backward_seconds"] > 0 for block in report["blocks"])
        assert sorted(stage["device"] for stage in report["stages"]) == BOXES["two"]
        assert 0 < report["bubble"] < 1
        assert "cuda:1" in trainer.explain()


def test_a_loss_carries_gradients_to_all_memories(gpus: Any) -> None:
    model, batch = text(tied=True), words()
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        trainer.step(case.loss_fn, batch)
        once = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        loss = trainer.loss(case.loss_fn, batch)
        assert loss.device == torch.device("cpu"), "where the module was"
        (2 * loss).backward()
        for one, gradient in zip(model.parameters(), once, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad.cpu(), 2 * gradient)


def test_a_module_may_be_on_a_gpu_before(gpus: Any) -> None:
    home = fake_device.device(1)
    model, batch = text().to(home), tuple(one.to(home) for one in words())
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        assert trainer.step(case.loss_fn, batch).device == home
        assert {one.device for one in model.parameters()} == {home, fake_device.device(0)}
        assert trainer.predict(batch[0]).device == home
        saved = trainer.training_state()
        trainer.load_training_state(saved)
    assert {one.device for one in model.parameters()} == {home}


def test_what_gpus_cannot_do_is_refused(gpus: Any) -> None:
    model = text()
    with pytest.raises(InvalidArgument, match="is on hpu:5"):
        Pipeline(text().to(fake_device.device(5)), BOXES["two"])
    model.layers[1].compile(mode="reduce-overhead")
    with (
        Pipeline(model, BOXES["two"]) as trainer,
        pytest.raises(InvalidArgument, match=r"layers\.1 is compiled for CUDA graphs"),
    ):
        trainer.step(Case(model, words(), 2, {}, False).loss_fn, words())
    case = Case(text(), words(), 2, {}, False)
    with (
        Pipeline(case.model, BOXES["two"]) as trainer,
        pytest.raises(InvalidArgument, match="hpu:6, which is none of the devices"),
    ):
        trainer.step(case.loss_fn, tuple(one.to(fake_device.device(6)) for one in case.batch))


def test_running_statistics_that_a_function_would_not_reach_are_refused(gpus: Any) -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return nn.functional.batch_norm(
                x, self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias, self.training
            )

    def steps(trainer: Any) -> None:
        for _ in range(4):
            trainer.step(lambda module, x: module(x).square().mean(), torch.randn(8, 8))

    with (
        Pipeline(Normalised(), BOXES["two"], cuts=[0, 2], micro_batches=2) as trainer,
        pytest.raises(InvalidArgument, match="batch_norm is called as a function on another device"),
    ):
        steps(trainer)


def test_a_save_holds_what_lies_on_several_gpus(gpus: Any, tmp_path: Path) -> None:
    case = Case(text(tied=True), words(), 2, {}, False)
    with Pipeline(case.model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(4):
            trainer.step(case.loss_fn, case.batch)
            optimizer.step()
            optimizer.zero_grad()
        saved = copy.deepcopy({name: one.cpu() for name, one in case.model.state_dict().items()})
        trainer.save_async(tmp_path, optimizer=optimizer).wait()
        trainer.step(case.loss_fn, case.batch)
        optimizer.step()
        trainer.load(tmp_path, optimizer=optimizer)
        assert all(torch.equal(one.cpu(), saved[name]) for name, one in case.model.state_dict().items())
        trainer.step(case.loss_fn, case.batch)
        optimizer.step()


@pytest.mark.parametrize(
    ("box", "home", "draws"),
    [("two", "cpu", True), ("two", "hpu:1", False), ("host last", "cpu", False), ("host between", "hpu:0", True)],
)
@pytest.mark.filterwarnings("ignore:random numbers drawn")
def test_check_compares_what_gpus_compute_with_one_device(gpus: Any, box: str, home: str, draws: bool) -> None:
    model: Any = text(tied=True).to(home)
    case = Case(model, words(8), 2, {}, False)
    if draws:
        for layer in model.layers:
            layer.norm.register_forward_hook(lambda module, args, result: nn.functional.dropout(result, 0.25))

    def coupled(module: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = module(batch[0]).std(0).mean()
        return loss

    with Pipeline(model, BOXES[box], micro_batches=2) as trainer:
        for _ in range(3):
            trainer.step(case.loss_fn, case.batch)
        before = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        report = trainer.check(case.loss_fn, case.batch)
        assert [cause.kind for cause in report.causes] == (["random draws"] if draws else []), report
        assert report.splits[3].largest < report.tolerance, "on the devices"
        assert not trainer.check(coupled, case.batch).exact
        now = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
        trainer.step(case.loss_fn, case.batch)


def test_plans_keep_to_the_memory_that_is_free(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(text(), words(16), 2, {}, False)
    size = sum(one.nbytes for one in case.model.parameters())
    with Pipeline(case.model, BOXES["two"], micro_batches=4) as trainer:
        assert {one["limit_bytes"] for one in trainer.report()["memory"].values()} == {2**34}
    monkeypatch.setattr(
        cuda, "free_memory", lambda index: 3 * size
    )  # with gradients and Adam's states it takes four times its size
    with Pipeline(case.model, BOXES["two"], micro_batches=4, memory={"cuda:1": 7 * size}) as trainer:
        for _ in range(4):
            trainer.step(case.loss_fn, case.batch)
        report = trainer.report()
        assert len(report["pipeline"]["stages"]) == 2
        assert {name: one["limit_bytes"] for name, one in report["memory"].items()} == {
            "cuda:0": 3 * size,
            "cuda:1": 7 * size,
        }
        assert all(one["stage_bytes"] <= one["limit_bytes"] for one in report["memory"].values())
    case.model.to(fake_device.device(0))
    with Pipeline(case.model, BOXES["two"]) as trainer:
        assert trainer.report()["memory"]["cuda:0"]["limit_bytes"] == 4 * size, "the module itself is there already"


def test_plans_know_what_copies_take(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(text(), words(16), 2, {}, False)
    seconds = {"fast": 1e-12, "slow": 1e-3}  # a byte
    stages: dict[str, int] = {}
    measured: Any = Measured.samples

    def evenly(self: Measured) -> list[Any]:
        return [(*of, 1e-3 * of[-1]) for *of, _ in measured.fget(self)]

    for name, one in seconds.items():

        def copy_seconds(self: Any, source: Any, target: Any, size: int, one: float = one) -> float:
            return 1e-5 + one * size

        with monkeypatch.context() as patch:
            patch.setattr(StagePlaces, "copy_seconds", copy_seconds)
            patch.setattr(Measured, "samples", property(evenly))  # an item takes a millisecond in each block
            patch.setattr(Planner, "record", lambda *_: None)  # nor do later steps change speeds
            with Pipeline(case.model, BOXES["two"], micro_batches=4) as trainer:
                for _ in range(4):
                    trainer.step(case.loss_fn, case.batch)
                stages[name] = len(trainer.report()["pipeline"]["stages"])
                explained = trainer.explain()
    assert "cuda:0 to cuda:1 1e-06 GB/s and 10 us" in explained
    assert stages == {"fast": 2, "slow": 1}
    streams = [gpus.device(), gpus.current(0), gpus.current(1)]
    with Pipeline(case.model, BOXES["host between"], cuts=[0, 1, 2], micro_batches=4) as trainer:  # as measured
        for _ in range(4):
            trainer.step(case.loss_fn, case.batch)
        assert [gpus.device(), gpus.current(0), gpus.current(1)] == streams, "the caller's"
        for source, target in itertools.permutations(BOXES["host between"], 2):
            assert f"{source} to {target} " in trainer.explain()


@pytest.mark.parametrize("box", ["two", "three", "host between"])
def test_layout_measures_on_gpus_and_leaves_no_trace(gpus: Any, box: str) -> None:
    case = Case(text(), words(16), 2, {}, False)
    case.loss_fn(case.model, case.batch).backward()
    plain = copy.deepcopy(case.model)
    for one, other in zip(case.model.parameters(), plain.parameters(), strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    found = layout(case.model, case.loss_fn, case.batch, BOXES[box])
    assert different(case.model, plain) == []
    assert {one.device.type for one in case.model.parameters()} == {"cpu"}
    ways = {one.kind: one for one in found.candidates}
    assert ways["data parallel"].fits
    assert ways["pipeline"].runnable
    assert not ways["replicas of pipelines"].runnable or not ways["replicas of pipelines"].fits
    assert "16.0 GiB" in str(found)
    with found.trainer("pipeline") as trainer:
        trainer.step(case.loss_fn, case.batch)
        assert not trainer.report()["pipeline"]["measuring"]


def test_layout_plans_replicas_of_pipelines_on_gpus_only(gpus: Any) -> None:
    case = Case(text(), words(64), 2, {}, False)
    size = sum(one.nbytes for one in case.model.parameters())
    devices = [f"cuda:{index}" for index in range(4)]
    found = layout(case.model, case.loss_fn, case.batch, devices, memory=int(3.5 * size))
    replicas = next(one for one in found.candidates if one.kind == "replicas of pipelines")
    assert replicas.fits
    assert "cannot run on GPUs yet" in replicas.reason
    assert found.best.kind == "pipeline"
    with pytest.raises(InvalidArgument, match=r"replicas of pipelines: cuda:[0-3] is a GPU"):
        found.trainer("replicas of pipelines")


@pytest.mark.parametrize("read", ["the next step", "report", "retire", "another kind of step", "close"])
def test_a_step_does_not_wait_for_its_gpus(gpus: Any, read: str) -> None:
    home = fake_device.device(0)
    case = Case(text().to(home), tuple(one.to(home) for one in words()), 2, {}, False)
    with Pipeline(case.model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
        for _ in range(3):
            loss = trainer.step(case.loss_fn, case.batch)
            optimizer.step()
            optimizer.zero_grad()
        assert loss.device == home
        loop: Any = trainer._works.steps.step_loop
        last = loop.last
        assert not last.settled
        if read == "the next step":
            trainer.step(case.loss_fn, case.batch)
        elif read == "report":
            assert trainer.report()["steps"] == 3
            assert trainer.report()["pipeline"]["seconds"] > 0
        elif read == "retire":
            trainer.retire("cuda:1")
        elif read == "another kind of step":
            trainer.predict(case.batch[0])
    assert last.settled
    assert all(start < finish for actions in last.record for _, _, start, finish in actions)
    if read == "the next step":
        assert loop.metrics["steps"] == 4


@pytest.mark.parametrize("box", ["two", "host between"])
def test_a_step_is_proved_in_two_numbers_of_micro_batches_where_its_stages_are(gpus: Any, box: str) -> None:
    devices, batch = BOXES[box], words()
    wanted: list[Any] = []
    for prove in (False, "raise"):
        model = text()
        case = Case(model, batch, 2, {}, False)
        options: dict[str, Any] = {"cuts": list(range(len(devices))), "micro_batches": 4, "prove": prove}
        with Pipeline(model, devices, **options) as trainer:
            for _ in range(2):
                trainer.step(case.loss_fn, batch)
            said = trainer.explain()
        assert ("equal to 4 micro-batches" in said or "equal to 2 micro-batches" in said) == bool(prove)
        wanted.append([None if one.grad is None else one.grad.cpu() for one in model.parameters()])
    assert [one is None or torch.equal(one, other) for one, other in zip(*wanted, strict=True)] == [True] * len(
        wanted[0]
    )


def test_a_mean_over_labels_differs_and_nothing_moves_for_it(gpus: Any) -> None:
    model, batch = text(), words()

    def loss_fn(module: nn.Module, part: Any) -> torch.Tensor:
        out = module(part[0])
        loss: torch.Tensor = (out[0] if isinstance(out, tuple) else out).mean() * part[0].float().sum().detach()
        return loss

    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=4, prove="raise") as trainer:
        with pytest.raises(
            Error, match=r"(?s)another result than in .*check\(\), on devices that can run the whole batch"
        ):
            trainer.step(loss_fn, batch)
        assert all(one.grad is None for one in model.parameters())
