"""Frameworks and scripts that take `DataParallel.loss` as it is: Fabric, Accelerate, and DistributedDataParallel over several machines."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from frameworks_support import TWO, difference, loss_fn, setting, within
from paceline.torch import DataParallel


@pytest.mark.parametrize("scaled", [False, True])
def test_accelerate(scaled: bool) -> None:
    module, batches = setting()
    reference = copy.deepcopy(module)
    for parallel in (False, True):
        accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if scaled:  # half precision needs a GPU there, so the scaler is put in by hand
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"scaler": accelerator.scaler} if scaled else {}
        ours = module if parallel else reference
        model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.5))
        with DataParallel(accelerator.unwrap_model(model), TWO) as trainer:
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = trainer.loss(loss_fn, batch, **options) if parallel else loss_fn(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and not scaled:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        assert not scaled or accelerator.scaler.get_scale() == 1024.0
        accelerator.free_memory()
    assert within(difference(module, reference), 1e-12)
    assert difference(module, setting()[0]) > 0.01


# One process for each machine; DistributedDataParallel takes the average of their gradients.
RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from paceline.torch import DataParallel
sys.path.insert(0, os.environ["TESTS"])
from frameworks_support import loss_fn, setting

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
module, batches = setting()
part = slice(0, 14) if rank == 0 else slice(14, 20)

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = module

    def forward(self, batch):
        items = len(batch[0])
        return trainer.loss(loss_fn, batch, total=20) * world

with DataParallel(module, [f"host:{rank}"], group="alone") as trainer:
    parallel = nn.parallel.DistributedDataParallel(Loss())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        parallel((x[part], y[part])).backward()
        optimizer.step()
    torch.save(module.state_dict(), os.environ["OUT"] + str(rank))
dist.destroy_process_group()
"""


def test_distributed_data_parallel_over_machines_with_unequal_batches(tmp_path: Any) -> None:
    module, batches = setting()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # Adam would hide a factor
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(module, batch).backward()
        optimizer.step()
    environment = {**os.environ, "TESTS": os.path.dirname(__file__), "OUT": str(tmp_path / "rank")}  # noqa: PTH120
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        theirs = copy.deepcopy(module)
        theirs.load_state_dict(torch.load(tmp_path / f"rank{rank}"))
        assert within(difference(module, theirs), 1e-12)
