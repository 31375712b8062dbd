"""`DataParallel` in one of several processes that a launcher has started: its devices, and the group that it joins."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline._cli_run import command
from paceline.torch import DataParallel
from paceline.torch._trainer import launched
from rank_processes import Run, error_of, part_of
from torch_support import classifier, classify, gradients, hosts, plain, worst_difference

SCRIPT = """
import os
import torch
from torch import nn
from paceline.torch import DataParallel

torch.manual_seed(0)
data = torch.randn(48, 6, dtype=torch.float64)
model = nn.Linear(6, 1).double()
with DataParallel(model) as trainer:
    sampler = trainer.batch_sampler(len(data), batch_size=16, balance="even", shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    for batch in sampler.batches(loader):
        trainer.step(lambda m, x: m(x).square().mean(), batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    told = [len(trainer.shares), "ranks" in trainer.report(), model.weight.tolist()]
with open(f"{os.environ['TOLD']}.{os.environ.get('RANK', 'alone')}", "w") as file:
    file.write(repr(told))
"""


@dataclasses.dataclass(frozen=True)
class Found:
    kind: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"


class Moved(nn.Linear):
    """Notes where it is brought."""

    def to(self, *where: Any, **options: Any) -> Any:
        self.brought = str(where[0])
        return self


@pytest.fixture
def own_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What "auto" is on a machine with so many GPUs and three cores, in a process of so many."""

    def found(gpus: int, rank: int | None, processes: int, module: nn.Module, *, brings: bool = True) -> list[str]:
        all_of = [Found("cuda", i) for i in range(gpus)] + [Found("host", i) for i in range(3)]
        monkeypatch.setattr(launched, "all_devices", lambda: all_of)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(rank))
        return launched.own_devices("DataParallel", module, brings=brings)

    return found


@pytest.mark.filterwarnings("ignore:DataParallel. the module was in host memory")
@pytest.mark.parametrize(
    ("gpus", "processes", "wanted"),
    [
        (0, 1, [["host:0", "host:1", "host:2"]]),
        (0, 2, [["host:0"], ["host:1", "host:2"]]),
        (0, 4, [["host:0"], ["host:1"], ["host:2"], ["host:0"]]),
        (2, 1, [["cuda:0", "cuda:1"]]),
        (2, 2, [["cuda:0"], ["cuda:1"]]),
        (4, 2, [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]),
        (1, 2, [["cuda:0"], ["cuda:0"]]),  # each process may see a GPU of its own only
    ],
)
def test_each_process_of_a_machine_has_its_part_of_the_devices(
    own_devices: Callable[..., list[str]], gpus: int, processes: int, wanted: list[list[str]]
) -> None:
    for rank in range(processes):
        module = Moved(2, 2)
        assert own_devices(gpus, rank, processes, module) == wanted[rank]
        assert getattr(module, "brought", None) == (wanted[rank][0] if gpus else None)


def test_a_launcher_that_has_divided_the_cores_leaves_all_of_them_to_the_process(
    own_devices: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 4} if process else {1, 2})
    assert own_devices(0, 1, 2, nn.Linear(2, 2)) == ["host:0", "host:1", "host:2"]


def test_a_module_in_host_memory_is_brought_to_the_first_gpu_with_a_word(own_devices: Callable[..., list[str]]) -> None:
    with pytest.warns(UserWarning, match="is on cuda:0 now: devices='auto' means cuda:0, cuda:1.*devices='host'"):
        own_devices(2, None, 1, Moved(2, 2))
    assert own_devices(2, None, 1, nn.Identity()) == ["host:0", "host:1", "host:2"]
    assert own_devices(2, None, 1, nn.Linear(2, 2), brings=False) == ["cuda:0", "cuda:1"]


def test_one_of_several_processes_that_does_not_know_its_number_is_refused(
    own_devices: Callable[..., list[str]],
) -> None:
    with pytest.raises(InvalidArgument, match=r"one of 2 processes on this machine.*no LOCAL_RANK"):
        own_devices(0, None, 2, nn.Linear(2, 2))


def joining(rank: int, group: dict[str, Any]) -> Any:
    module, batch = classifier(17)
    with DataParallel(module, hosts(1), **group) as trainer:
        trainer.step(classify, part_of(batch, rank, [9, 8]))
        return gradients(module), "ranks" in trainer.report()


@pytest.mark.parametrize("alone", [False, True])
def test_a_trainer_joins_the_process_group_unless_it_is_told_to_stay_alone(on_ranks: Run, alone: bool) -> None:
    for rank, (found, knows) in enumerate(on_ranks(2, joining, {"group": "alone"} if alone else {})):
        module, batch = classifier(17)
        wanted = plain(module, classify, part_of(batch, rank, [9, 8]) if alone else batch)[1]
        assert worst_difference(found, wanted) < 1e-12
        assert knows is not alone


def called(rank: int) -> Any:
    module, batch = classifier(8)
    with DataParallel(module, hosts(1)) as model:
        return error_of(lambda: model(batch[0]).sum().backward())


def test_a_call_of_a_model_that_has_joined_says_how_to_stay_alone(on_ranks: Run) -> None:
    for kind, text in on_ranks(2, called):
        assert kind is InvalidArgument
        assert "group='alone'" in text


@pytest.mark.parametrize("launcher", ["paceline run", "torchrun"])
def test_one_script_runs_as_one_process_and_as_several(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TOLD": str(tmp_path / "told"), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    words = [sys.executable, "-m", "paceline._cli", "run", "--processes", "2", str(script)]
    if launcher == "torchrun":
        words = command(str(script), [], 2)
    subprocess.run(words, check=True, env=environment, timeout=100)
    (devices, knows, first), (_, _, second) = (
        ast.literal_eval((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1)
    )
    assert devices >= 1
    assert knows
    assert first == second
    subprocess.run([sys.executable, str(script)], check=True, env=environment, timeout=100)
    _, knows, alone = ast.literal_eval((tmp_path / "told.alone").read_text())
    assert not knows
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), rtol=1e-12)


def test_run_starts_one_process_for_each_device_and_refuses_none() -> None:
    assert "--nproc-per-node 3 train.py --lr 1" in " ".join(command("train.py", ["--lr", "1"], 3))
    assert int(command("train.py", [], None)[5]) >= 1
    with pytest.raises(InvalidArgument, match="at least 1 is needed"):
        command("train.py", [], 0)
