"""Pipelines whose stages are on GPUs, on a fake device that has memories of its own and notices what would not be ordered on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fake_device
from paceline import InvalidArgument
from paceline.torch import Pipeline, layout
from paceline.torch._devices import caller_state, cuda
from pipeline_cases import Case, Text, accumulated, random_case

BOXES = {
    "one": ["cuda:0"],
    "two": ["cuda:0", "cuda:1"],
    "three": ["cuda:2", "cuda:0", "cuda:1"],
    "host last": ["cuda:0", "host:0"],
    "host first": ["host:0", "cuda:1"],
    "host between": ["cuda:0", "host:0", "cuda:1"],
    "host around": ["host:0", "cuda:0", "host:1"],
}


@pytest.fixture
def gpus(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The extension of the fake device. Nothing may be used that its stream has not waited for."""
    built = fake_device.extension()
    fake_device.replace(cuda, monkeypatch)
    monkeypatch.setitem(caller_state._NEW_THREAD_AUTOCAST_DTYPE, "hpu", torch.get_autocast_dtype("hpu"))
    built.take_problems()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Let the plain backward run on this thread, too, and attention on the host be in the operators that the fake device runs it in.
    with torch.autograd.set_multithreading_enabled(False), sdpa_kernel(SDPBackend.MATH):
        yield built
    torch.set_num_threads(threads)
    assert built.take_problems() == []


def text(layers: int = 4, width: int = 8, **options: Any) -> Text:
    torch.manual_seed(0)
    return Text(layers, width, **{"tied": False, "skip": False, "checkpointed": False, "norm": "layer", **options})


def words(items: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 40, (items, 5)), torch.randint(0, 40, (items, 5))


def differences(case: Case, devices: list[str], steps: int = 5, retired: str | None = None) -> list[str]:
    """The names of what is not equal to the last bit to plain accumulation on one device: a GPU, if there is one."""
    alone = torch.device("cpu") if all(map(is_host, devices)) else fake_device.device(7)
    plain = copy.deepcopy(case.model).to(alone)
    there = copy.copy(case)
    there.batch = tuple(one.to(alone) for one in case.batch)
    found: list[str] = []
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (case.model, plain)
    ]
    with Pipeline(case.model, devices=devices, **case.options) as trainer:
        for step in range(steps):
            if step == steps - 1 and retired is not None:
                trainer.retire(retired)
            loss = trainer.step(case.loss_fn, case.batch, case.weight)
            wanted = accumulated(there, plain, trainer.report()["micro_batches"])
            if not torch.equal(loss.cpu(), wanted.cpu()):
                found.append(f"step {step}: loss {loss.item()} and {wanted.item()}")
            found += [f"step {step}: {name}" for name in different(case.model, plain)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one in (case.model, plain):
            one.eval()
        outputs = trainer.predict(case.batch[0])
        if not torch.allclose(outputs, plain(there.batch[0]).detach().cpu(), atol=1e-5):
            found.append("predict")
        found += [f"after: {name}" for name in different(case.model, plain)]
    assert {one.device.type for one in (*case.model.parameters(), *case.model.buffers())} == {"cpu"}, "back at home"
    case.loss_fn(case.model, case.batch).backward()
    optimizers[0].step()  # its state is at home, too
    return found


def is_host(name: str) -> bool:
    return name.startswith("host")


def different(model: nn.Module, plain: nn.Module) -> list[str]:
    pairs: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = [
        (name, one, other, one.grad, other.grad)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True)
    ]
    buffers = zip(model.named_buffers(), plain.buffers(), strict=True)
    pairs += [(name, one, other, None, None) for (name, one), other in buffers]
    return [
        name
        for name, one, other, gradient, wanted in pairs
        if not torch.equal(one.cpu(), other.cpu())
        or (gradient is None) != (wanted is None)
        or (gradient is not None and wanted is not None and not torch.equal(gradient.cpu(), wanted.cpu()))
    ]


@pytest.mark.parametrize("box", BOXES)
def test_gradients_are_those_of_plain_accumulation(gpus: Any, box: str) -> None:
    devices = BOXES[box]
    options = {"cuts": list(range(len(devices))), "micro_batches": 4, "schedule": "1f1b"}
    assert differences(Case(text(), words(), len(devices), options, False), devices) == []


@pytest.mark.parametrize("box", BOXES)
def test_random_pipelines(gpus: Any, box: str) -> None:
    devices = BOXES[box]
    found: dict[int, list[str]] = {}
    for seed in range(8):
        case = random_case(seed, len(devices))
        moves = seed % 2 and len(devices) > 1 and "cuts" not in case.options
        found[seed] = differences(case, devices, retired=devices[seed % len(devices)] if moves else None)
    assert {seed: names[:4] for seed, names in found.items() if names} == {}


class Conditioned(nn.Linear):
    """A block that uses what all blocks get more than once."""

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * start + x) * start + start


class Bridge(nn.Module):
    """A model with parts between its blocks, norms that are called in several stages, and tensors that cross by closure.

    Each stage uses `scale`, `start` and the norms more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.between, self.behind = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.first = nn.ModuleList(Conditioned(8, 8) for _ in range(2))
        self.last = nn.ModuleList(Conditioned(8, 8) for _ in range(4))
        self.last[3].weight = self.last[0].weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * self.scale)
        start = x
        for block in self.first:
            x = self.norm(block(x, start) + start).relu() + start
        x = self.between(x) + self.scale
        for block in self.last:
            x = self.norm(block(x * self.scale, start)) + x * start - start
        loss: torch.Tensor = (self.behind(self.norm(self.behind(x))) + start - targets).square().mean()
        return loss


@pytest.mark.parametrize("box", [name for name in BOXES if name != "one"])
def test_what_several_stages_use_gets_its_gradient_in_order(gpus: Any, box: str) -> None:
    devices = BOXES[box]
    torch.manual_seed(0)
    model = Bridge()
    plain = copy.deepcopy(model).to(fake_device.device(7))
    batch = torch.randn(12, 8), torch.randn(12, 8)
    there = tuple(one.to(fake_device.device(7)) for one in batch)

    def loss_fn(one: nn.Module, part: Any) -> torch.Tensor:
        loss: torch.Tensor = one(*part)
        return loss

    blocks = [*model.first, *model.last]
    with Pipeline(model, devices=devices, blocks=blocks, cuts=[0, 1, 4][: len(devices)], micro_batches=3) as trainer:
        for _ in range(5):
            model.zero_grad()
            plain.zero_grad()
            loss = trainer.step(loss_fn, batch)
            wanted = [loss_fn(plain, [one[k : k + 4] for one in there]) * (4 / 12) for k in (0, 4, 8)]
            for one in wanted:
                one.backward()
            assert torch.equal(loss.cpu(), torch.stack(wanted).sum().detach().cpu())
            assert different(model, plain) == []


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
        before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        fails[0] = True
        with pytest.raises(ValueError, match="no") as raised:
            trainer.step(case.loss_fn, batch)
        assert "cuda:1 in the forward in or after block layers.3 (stage 1" in raised.value.__notes__[0]
        fails[0] = False
        assert all(
            one.grad is not None and other is not None and torch.equal(one.grad, other)
            for one, other in zip(model.parameters(), before, strict=True)
        )
        trainer.step(case.loss_fn, batch)


def test_memory_that_runs_out_on_a_gpu_lets_less_be_in_flight(gpus: Any) -> None:
    model, batch = text(), words(16)
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=8, schedule="1f1b") as trainer:
        for _ in range(4):
            trainer.step(case.loss_fn, batch)
        for _ in range(10):  # measured times may change the plan between two steps, and with it what fits
            model.zero_grad()
            gpu = BOXES["two"].index(trainer.report()["pipeline"]["stages"][0]["device"])
            gpus.reset_peak(gpu)
            before = gpus.peak(gpu)
            trainer.step(case.loss_fn, batch)
            first = trainer.report()["pipeline"]["stages"][0]
            model.zero_grad()
            gpus.limit(gpu, before + (gpus.peak(gpu) - before) * 4 // 5)
            try:
                trainer.step(case.loss_fn, batch)
            finally:
                gpus.limit(gpu, 0)
            report = trainer.report()
            if report["out_of_memory"] > 0:
                break
        assert report["out_of_memory"] > 0
        assert report["pipeline"]["stages"][0]["in_flight"] < first["in_flight"]


def test_times_are_those_of_the_gpus(gpus: Any) -> None:
    model, batch = text(), words()
    case = Case(model, batch, 2, {}, False)
    with Pipeline(model, BOXES["two"], cuts=[0, 2], micro_batches=3) as trainer:
        for _ in range(5):
            trainer.step(case.loss_fn, batch)
        report = trainer.report()["pipeline"]
        assert not report["measuring"]
        assert all(block["forward_seconds"] > 0 and block["backward_seconds"] > 0 for block in report["blocks"])
        assert [stage["device"] for stage in report["stages"]] == BOXES["two"]
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
        saved = trainer.state_dict()
        trainer.load_state_dict(saved)
    assert {one.device for one in model.parameters()} == {home}


def test_what_gpus_cannot_do_is_refused(gpus: Any) -> None:
    model = text()
    with pytest.raises(InvalidArgument, match="is on hpu:5"):
        Pipeline(text().to(fake_device.device(5)), BOXES["two"])
    for layer in model.layers:
        layer.compile()
    with pytest.raises(InvalidArgument, match="compiled blocks on GPUs"):
        Pipeline(model, BOXES["two"])
    case = Case(text(), words(), 2, {}, False)
    with pytest.raises(InvalidArgument, match="layout: cuda:0 is a GPU"):
        layout(case.model, case.loss_fn, case.batch, BOXES["two"])
    with (
        Pipeline(case.model, BOXES["two"]) as trainer,
        pytest.raises(InvalidArgument, match="hpu:6, which is none of the devices"),
    ):
        trainer.step(case.loss_fn, tuple(one.to(fake_device.device(6)) for one in case.batch))
    with (
        Pipeline(case.model, BOXES["two"]) as trainer,
        pytest.raises(InvalidArgument, match="check: it runs the module on"),
    ):
        trainer.check(case.loss_fn, case.batch)


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
