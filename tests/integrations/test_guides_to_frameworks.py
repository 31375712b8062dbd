"""The samples in python/guide/frameworks.md run as they stand there, and train what they train on one device."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks_support import difference, within

GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "frameworks.md").read_text()
SHARED = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]  # type: ignore[index]

# What the samples leave to the reader. Samplers shuffle into one fixed order, so that all programs see the same batches.
YOURS = """
import numpy, random
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.randperm = lambda size, **_: torch.arange(size).flip(0)
torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
dataset = TensorDataset(torch.randn(64, 6, dtype=torch.float64), torch.randint(0, 3, (64,)))
"""
# Where the scale of gradients is at issue: AdamW hides it.
ADAM, DESCENT = "torch.optim.AdamW(model.parameters(), lr=1e-3)", "torch.optim.SGD(model.parameters(), lr=0.5)"
YOURS_FOR_LIGHTNING = """
import lightning.pytorch as pl

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return loss_fn(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

lightning_module = Classifier()
"""
YOURS_FOR_TRANSFORMERS = """
class Classifier(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, labels):
        output = self.network(x)
        return {"loss": F.cross_entropy(output, labels), "logits": output}

model = Classifier(model)
dataset = [{"x": x, "labels": y} for x, y in (dataset[index] for index in range(64))]
"""
YOURS_FOR_TIMM = """
import timm

model = timm.create_model("test_vit", img_size=64, num_classes=3).double()
dataset = TensorDataset(torch.randn(32, 3, 64, 64, dtype=torch.float64), torch.randint(0, 3, (32,)))
loader = DataLoader(dataset, batch_size=16)
"""


def blocks(title: str, kind: str) -> list[str]:
    part = re.search(rf"\n## {re.escape(title)}\n(.*?)(?=\n## |\Z)", GUIDE, re.DOTALL)
    assert part is not None
    return re.findall(rf"```{kind}\n(.*?)```", part[1], re.DOTALL)


def before_and_after(title: str) -> tuple[str, str]:
    (diff,) = blocks(title, "diff")
    lines = diff.splitlines()
    assert all(line[:1] in " +-" for line in lines)
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] in kept) for kept in ((" ", "-", ""), (" ", "+", ""))
    )
    assert "paceline" not in before
    assert "paceline" in after
    return before, after


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "randperm", torch.randperm)
    monkeypatch.chdir(tmp_path)


def run(program: str, yours: str = "") -> dict[str, Any]:
    """The variables that a program ends with."""
    variables: dict[str, Any] = {"__name__": "sample"}
    exec(compile(YOURS + SHARED + yours + program, "<sample>", "exec"), variables)
    for name in ("trainer", "model"):
        if hasattr(variables.get(name), "close"):
            variables[name].close()
    return variables


def reference(epochs: int = 1) -> Any:
    """One epoch on one device."""
    loop = before_and_after("A loop of your own")[0]
    optimizer, loop = loop.split("\n", 1)
    return run(f"{optimizer}\nfor epoch in range({epochs}):\n" + textwrap.indent(loop, "    "))["model"]


@pytest.mark.parametrize(
    ("title", "yours"),
    [
        ("A loop of your own", ""),
        ("nn.DataParallel", ""),
        ("Accelerate", ""),
        ("transformers' Trainer", YOURS_FOR_TRANSFORMERS),
        ("timm", YOURS_FOR_TIMM),
    ],
    ids=["loop", "nn.DataParallel", "Accelerate", "transformers", "timm"],
)
def test_both_sides_of_the_sample_train_the_same(title: str, yours: str) -> None:
    before, after = before_and_after(title)
    theirs, ours = run(before, yours), run(after, yours)
    untrained = run("", yours)["model"]
    plain = [variables["task" if "task" in variables else "model"] for variables in (theirs, ours)]
    mine, others = (getattr(model, "module", model) for model in plain)
    assert within(difference(mine, others), 1e-12)
    start = getattr(mine, "trainable_module", mine)
    assert difference(start, untrained) > 1e-4


def test_the_sample_for_timm_with_its_scaler() -> None:
    yours = YOURS_FOR_TIMM + "from timm.utils import NativeScaler\nloss_scaler = NativeScaler(device='cpu')\n"
    update = "    _loss.backward()\n    optimizer.step()\n"
    scaled = "    loss_scaler(_loss, optimizer)\n"
    assert "`scaler=loss_scaler._scaler`" in GUIDE
    before, after = (side.replace(update, scaled).replace(ADAM, DESCENT) for side in before_and_after("timm"))
    after = after.replace(
        "(input, target))\n    loss_scaler", "(input, target), scaler=loss_scaler._scaler)\n    loss_scaler"
    )
    assert (before.count("loss_scaler"), after.count("loss_scaler")) == (1, 2)
    assert within(difference(run(after, yours)["task"], run(before, yours)["task"]), 1e-12)


@pytest.mark.parametrize(
    ("title", "yours"), [("Lightning", YOURS_FOR_LIGHTNING), ("Fabric", "")], ids=["Lightning", "Fabric"]
)
def test_the_sample_trains_as_a_plain_loop_does(title: str, yours: str) -> None:
    before, after = before_and_after(title)
    compile(before, title, "exec")  # it starts four processes
    assert within(difference(run(after, yours)["model"], reference()), 1e-12)


def test_a_trainer_in_place_of_nn_data_parallel_has_its_attributes_and_takes_its_files() -> None:
    before, after = before_and_after("nn.DataParallel")
    theirs, ours = run(before)["model"], run(after)["model"]
    assert theirs.module.state_dict().keys() == ours.module.state_dict().keys() == ours.state_dict().keys()
    assert (theirs.training, theirs.module[0].in_features) == (ours.training, ours.module[0].in_features)
    assert [name for name, _ in theirs.module.named_parameters()] == [name for name, _ in ours.named_parameters()]
    ours.eval()
    assert not ours.module[0].training
    state = {key: value + 1 for key, value in theirs.state_dict().items()}
    assert next(iter(state)).startswith("module.")
    ours.load_state_dict(state)
    assert difference(ours.module, theirs.module) == 1


def test_the_sample_for_fabric_in_half_precision() -> None:
    (sample,) = blocks("Fabric", "python")
    half = sample.replace('"cuda"', '"cpu"').replace(ADAM, DESCENT)
    floats = "model = model.float()\ndataset.tensors = (dataset.tensors[0].float(), dataset.tensors[1])\n"
    loop = "for x, y in loader:\n    loss_fn(model, (x, y)).backward(); optimizer.step(); optimizer.zero_grad()\n"
    found, plain = run(floats + half), run(f"{floats}optimizer = {DESCENT}\n{loop}")
    assert found["precision"].scaler.get_scale() == 65536.0  # no step had infinite gradients, and none was skipped
    assert difference(found["model"], plain["model"]) < 2e-3
    assert difference(found["model"], run(floats)["model"]) > 0.1


SAVE = """
torch.save(getattr(model, "module", model).state_dict(), f"rank{os.environ['RANK']}.pt")
"""


def launch(folder: Path, program: str, machines: int, processes: int) -> None:
    """Start a program by torchrun, on machines that are all this one."""
    script = folder / "train.py"
    script.write_text("import os\n" + YOURS + SHARED + program + SAVE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--nnodes {machines} --nproc-per-node {processes} --master-addr 127.0.0.1 --master-port {port}".split()
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, "--node-rank", str(machine), str(script)], cwd=folder, env=environment)
        for machine in range(machines)
    ]
    try:
        assert [process.wait(timeout=120) for process in running] == [0] * machines
    finally:
        for process in running:
            process.kill()


def saved(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(file) for file in sorted(folder.glob("rank*.pt"))]


def test_ddp_on_one_machine_and_the_same_program_without_it_train_the_same(tmp_path: Path) -> None:
    before, after = before_and_after("DDP on one machine")
    launch(tmp_path, before, machines=1, processes=2)
    ours = run(after)["model"].state_dict()
    for theirs in saved(tmp_path):
        assert within(max((ours[key] - value).abs().max().item() for key, value in theirs.items()), 1e-12)
    assert len(saved(tmp_path)) == 2


def test_ddp_on_several_machines_and_the_same_program_with_a_group_train_the_same(tmp_path: Path) -> None:
    before, after = before_and_after("DDP on several machines")
    assert "batch_size=4," in before  # of each of four devices
    assert "batch_size=8," in after  # of each of two machines
    launch(tmp_path, after, machines=2, processes=1)
    theirs = reference(epochs=2).state_dict()
    for ours in saved(tmp_path):
        assert within(max((ours[key] - value).abs().max().item() for key, value in theirs.items()), 1e-12)
    assert len(saved(tmp_path)) == 2
