"""The programs of python/guide/processes.md that stay on the DDP of a framework, each in two processes, against the same steps in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworks_support import difference, within
from torch_support import train_alone

GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "processes.md").read_text()
EPOCHS, BATCH, ITEMS = 2, 16, 72  # four full batches in an epoch, and one of eight items

SETTING = """
import os, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline.torch
from paceline.torch import BalancedRanks
sys.path.insert(0, os.environ["TESTS"])
import torchvision_operators

EPOCHS, BATCH, ITEMS = 2, 16, 72
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
dataset = TensorDataset(torch.randn(ITEMS, 6, dtype=torch.float64), torch.randint(0, 3, (ITEMS,)))
loss_fn = nn.functional.cross_entropy
# Shares of three to one, so that equal weights of the ranks would train something else.
uneven = BalancedRanks.__init__
BalancedRanks.__init__ = lambda self, items, batch_size: uneven(self, items, batch_size, balance=[3, 1])
"""
END = """
torch.save(module.state_dict(), os.environ["OUT"] + os.environ["RANK"])
dist.barrier()  # a rank that ends takes the store of the others with it
dist.destroy_process_group()  # otherwise gloo's threads may end the process at its exit
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
ranks = BalancedRanks(len(dataset), batch_size=BATCH)
loader = DataLoader(dataset, batch_sampler=ranks.sampler)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for epoch in range(EPOCHS):
{program}
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = module

    def forward(self, x, labels):
        output = self.network(x)
        return {{"loss": loss_fn(output, labels), "logits": output}}

dataset = [{{"x": x, "labels": y}} for x, y in (dataset[index] for index in range(ITEMS))]
{program}
arguments = TrainingArguments(
    output_dir=os.environ["OUT"] + "transformers", use_cpu=True, num_train_epochs=EPOCHS, learning_rate=0.1, lr_scheduler_type="constant",
    max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True, eval_strategy="epoch", label_names=["labels"],
)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
trainer = BalancedTrainer(Classifier(), arguments, train_dataset=dataset, eval_dataset=dataset[:8], optimizers=(optimizer, None))
trainer.train()
assert trainer.state.global_step == 10
"""

LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
{program}
trainer = Trainer(
    strategy="ddp", use_distributed_sampler=False, accelerator="cpu", devices=2, max_epochs=EPOCHS, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=os.environ["OUT"],
)
trainer.fit(Balanced(module))
assert trainer.global_step == 10
"""


def program_of(title: str) -> str:
    found = re.search(rf"\n\*\*{title}\.\*\*.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def in_one_process(accumulate: int) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    data = torch.randn(ITEMS, 6, dtype=torch.float64), torch.randint(0, 3, (ITEMS,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_alone(module, data, optimizer, EPOCHS, BATCH, accumulate)
    return module


def in_two_processes(program: str, folder: Path) -> list[Any]:
    """The states of the module after a program, by rank."""
    script = folder / "program.py"
    script.write_text(SETTING + program + END)
    environment = {**os.environ, "OUT": str(folder / "out"), "TESTS": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[:4000]  # what follows is the launcher's
    return [torch.load(folder / f"out{rank}") for rank in range(2)]


@pytest.mark.parametrize(
    ("title", "around", "accumulate"),
    [("Accelerate", ACCELERATE, 2), ("transformers", TRANSFORMERS, 1), ("Lightning", LIGHTNING, 1)],
)
def test_the_program_in_the_guide_trains_what_one_process_trains(
    tmp_path: Path, title: str, around: str, accumulate: int
) -> None:
    program = program_of(title)
    if title == "Accelerate":
        program = "".join(f"    {line}\n" for line in program.splitlines())
        program = program.replace("    model, optimizer =", "    if epoch == 0:\n        model, optimizer =")
    wanted = in_one_process(accumulate)
    for state in in_two_processes(around.format(program=program), tmp_path):
        ours = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        ours.load_state_dict(state)
        assert within(difference(ours, wanted), 1e-12)
