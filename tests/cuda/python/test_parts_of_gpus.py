"""The training step of PyTorch modules on parts of GPUs."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import expect_step, module_and_batch
from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline
from paceline.torch._devices.whole_gpu_kernels import WholeGpuKernelsWarning
from torch_support import classify

pytestmark = pytest.mark.own_gpus("these are parts themselves")

BOXES = {
    "equal": ([0.5, 0.5], ["cuda:0/0", "cuda:0/1"]),
    "unequal": ([0.75, 0.25], ["cuda:0/0", "cuda:0/1"]),
    "four": ([0.25, 0.25, 0.25, 0.25], ["cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3"]),
    "mixed": ([0.5, 0.25], ["cuda:0/1", "host:0", "cuda:1", "cuda:0/0"]),
}


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize(("fractions", "devices"), BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("balance", ["even", "auto"])
def test_the_gradient_is_that_of_one_device(
    fractions: list[float], devices: list[str], balance: Literal["auto", "even"]
) -> None:
    paceline.partition("cuda:0", fractions)
    module, batch = module_and_batch()
    with DataParallel(module, devices, balance=balance) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3)
        for _ in range(4):
            expect_step(trainer, batch)
            optimizer.step()


@pytest.mark.usefixtures("whole_afterwards")
def test_parts_are_in_use_until_the_trainer_is_closed(fake: Any) -> None:
    paceline.partition("cuda:0", [0.75, 0.25])
    module, batch = module_and_batch()
    trainer = DataParallel(module, ["cuda:0/0", "cuda:0/1"])
    trainer.step(classify, batch)
    for call in (lambda: paceline.release_partitions("cuda:0"), lambda: paceline.partition("cuda:0", [0.5, 0.5])):
        with pytest.raises(paceline.InvalidArgument, match="cuda:0/0, cuda:0/1 are still in use"):
            call()
    trainer.close()
    assert (fake.released, fake.streams_ended) == (1, 1), "PyTorch lets go of the streams before they go"
    assert [part.sm_count for part in paceline.partition("cuda:0", [0.5, 0.5])] == [64, 64]


@pytest.fixture
def torch_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch has used a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.usefixtures("whole_afterwards", "torch_on_gpus")
def test_pytorch_forgets_the_streams_of_parts_before_they_end(fake: Any) -> None:
    paceline.release_partitions("cuda:0")
    paceline.partition("cuda:0", [0.5, 0.5])
    paceline.partition("cuda:0", [0.5, 0.5])
    paceline.partition("cuda:1", [0.5])
    assert fake.released == 0, "nothing has ended"
    paceline.partition("cuda:0", [0.75, 0.25])
    assert (fake.released, fake.streams_ended) == (1, 1)
    fake.broken = "CUDA error: an illegal memory access was encountered"
    for gpu in paceline.find_device("cuda:0"), paceline.find_device("cuda:1"):
        paceline.release_partitions(gpu)
    assert (fake.released, fake.streams_ended) == (3, 3)
    fake.broken = ""


@pytest.mark.usefixtures("whole_afterwards")
def test_pytorch_is_left_alone_where_it_has_used_no_gpu(fake: Any) -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    paceline.release_partitions("cuda:0")
    assert fake.released == 0


def test_parts_end_without_pytorch(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    monkeypatch.delitem(sys.modules, "torch")
    paceline.release_partitions("cuda:0")
    assert "torch" not in sys.modules
    assert fake.leftovers == 0


@pytest.mark.usefixtures("whole_afterwards")
def test_pipelines_want_whole_gpus() -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    with pytest.raises(InvalidArgument, match="cuda:0/0 is a part of a GPU"):
        Pipeline(module_and_batch()[0], ["cuda:0/0", "cuda:0/1"], blocks="")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True).double()
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.rnn(x[:, None])[0][:, -1])
        return scores


class Normalised(nn.Sequential):
    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        layers = nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, (1, 2)), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)
        super().__init__(*layers)
        self.double().to(memory_format=memory_format)  # type: ignore[call-overload]


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Recurrent, r"rnn \(LSTM\)"),
        (lambda: Normalised(torch.channels_last), r"2 \(BatchNorm2d\)"),
        (Normalised, ""),
        (lambda: module_and_batch()[0], ""),
    ],
    ids=["recurrent", "channels last", "contiguous", "neither"],
)
def test_modules_whose_kernels_need_a_whole_gpu_are_warned_of_once(make: Callable[[], nn.Module], named: str) -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    batch = module_and_batch()[1]
    with warnings.catch_warnings(record=True) as seen, DataParallel(make(), ["cuda:0/0", "cuda:0/1"]) as trainer:
        warnings.simplefilter("always")
        for _ in range(3):
            trainer.step(classify, batch)
    seen = [one for one in seen if one.category is WholeGpuKernelsWarning]
    assert len(seen) == bool(named)
    if named:
        assert re.search(named, str(seen[0].message))
        assert "cudnn" in str(seen[0].message)
        assert seen[0].filename == __file__


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0/0", "cuda:0/1"]], ids=["whole", "without cuDNN"])
def test_whole_gpus_and_modules_without_cudnn_are_not_warned_of(devices: list[str]) -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    batch = module_and_batch()[1]
    off = torch.backends.cudnn.flags(enabled=len(devices) == 1)
    with warnings.catch_warnings(), off, DataParallel(Recurrent(), devices) as trainer:
        warnings.simplefilter("error", WholeGpuKernelsWarning)
        trainer.step(classify, batch)


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("how", ["module", "part", "function"])
def test_graphs_of_the_compiler_are_refused_on_parts_of_a_gpu(how: str) -> None:
    """PyTorch 2.11 aborts the process."""
    module: Any = nn.Sequential(nn.Linear(4, 4))
    loss_fn = lambda one, x: one(x).mean()  # noqa: E731
    if how == "module":
        module = torch.compile(module, mode="reduce-overhead")
    elif how == "part":
        module[0].compile(mode="max-autotune")
    else:
        loss_fn = torch.compile(loss_fn, mode="reduce-overhead")
    paceline.partition("cuda:0", [0.5, 0.5])
    with DataParallel(module, ["cuda:0/0", "cuda:0/1"]) as trainer:
        with pytest.raises(InvalidArgument, match="several parts of one GPU"):
            trainer.step(loss_fn, torch.randn(4, 4))
