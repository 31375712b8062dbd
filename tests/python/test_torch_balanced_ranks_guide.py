"""The programs below "Stay on DDP or FSDP" in python/guide/processes.md train what one process trains."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rank_processes import Run
from torch_support import train_alone, worst_difference

GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "processes.md").read_text()
EPOCHS, BATCH, ITEMS = 2, 512, 1300


def programs() -> list[str]:
    part = re.search(r"\n## Stay on DDP or FSDP\n(.*?)(?=\n## )", GUIDE, re.DOTALL)
    assert part is not None
    return re.findall(r"```python\n(.*?)```", part[1], re.DOTALL)


def setting() -> dict[str, Any]:
    """What the programs leave to the reader."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    dataset = TensorDataset(torch.randn(ITEMS, 6, dtype=torch.float64), torch.randint(0, 3, (ITEMS,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    names = {"module": module, "dataset": dataset, "optimizer": optimizer, "epochs": EPOCHS, "dist": dist}
    names |= {"loss_fn": nn.functional.cross_entropy, "DataLoader": DataLoader, "nullcontext": nullcontext}
    return names | {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard, "torch": torch}


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [parameter.detach() for parameter in module.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def in_one_process(accumulate: int) -> list[torch.Tensor]:
    names = setting()
    module, data, optimizer = names["module"], names["dataset"].tensors, names["optimizer"]
    train_alone(module, data, optimizer, EPOCHS, BATCH, accumulate)
    return parameters_of(module)


def as_in_the_guide(rank: int, which: str) -> Any:
    first, sharded, accumulated = programs()[:3]
    if which == "fsdp":
        # FSDP puts other parameters into the module, so the optimizer is made afterwards.
        made = sharded + "optimizer = torch.optim.SGD(module.parameters(), lr=0.5)\n"
        first = first.replace("model = DistributedDataParallel(module)\n", made)
        assert "fully_shard" in first
    if which == "accumulate":
        loop = first.index("    for x, y")
        end = first.index("print(")
        indented = "".join(f"    {line}\n" for line in accumulated.splitlines())
        first = first[:loop] + indented + first[end:]
    names = setting()
    program = re.sub(r"dist.init_process_group.*\n", "", first)  # it is up
    assert program != first
    exec(compile(program, "<guide>", "exec"), names)
    return parameters_of(names["module"])


@pytest.mark.parametrize("which", ["ddp", "fsdp", "accumulate"])
def test_the_programs_train_what_one_process_trains(on_ranks: Run, which: str) -> None:
    wanted = in_one_process(4 if which == "accumulate" else 1)
    for found in on_ranks(2, as_in_the_guide, which):
        assert worst_difference(found, wanted) < 1e-12
