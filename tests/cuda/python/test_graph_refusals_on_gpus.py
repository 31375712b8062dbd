"""What a replayed graph would not do is refused, with the line and the cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import BOXES, ON_A_GPU, expect_step, module_and_batch
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import classify


def reads(one: Any, part: Any) -> Any:
    loss = classify(one, part)
    return loss if loss.item() > 0 else 2 * loss  # the line that is named


def branches(one: Any, part: Any) -> Any:
    loss = classify(one, part)
    if loss > 0:
        return loss
    return 2 * loss


@pytest.mark.skipif(
    ON_A_GPU and torch.__version__ < "2.12", reason="before 2.12 PyTorch takes no capture after one that CUDA has ended"
)
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (reads, rf"cannot be captured at .*{__name__.rpartition('.')[2]}\.py:\d+, in reads.*Use torch\.where"),
        (branches, r"cannot be captured at .*, in branches"),
    ],
)
def test_what_cannot_be_captured_is_refused(fake: Any, loss_fn: Any, message: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        for _ in range(2):
            trainer.step(loss_fn, batch)
        module.zero_grad()
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(loss_fn, batch)
        assert all(parameter.grad is None for parameter in module.parameters())
        expect_step(trainer, batch)


def test_extras_that_are_no_tensors_are_refused(fake: Any) -> None:
    module, batch = module_and_batch()
    with (
        DataParallel(module, BOXES["one"], graphs=True) as trainer,
        pytest.raises(InvalidArgument, match=r"extras\['text'\] is str"),
    ):
        trainer.step(lambda one, part: (classify(one, part), {"text": "no tensor"}), batch)


def third_step_is_refused(module: Any, batch: Any, loss_fn: Any, message: str) -> None:
    with DataParallel(module, BOXES["two"], balance="even", graphs=True) as trainer:
        trainer.step(loss_fn, batch)
        trainer.step(loss_fn, batch)
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(loss_fn, batch)


def test_hooks_attributes_and_outside_tensors_are_refused(fake: Any) -> None:
    module, batch = module_and_batch()
    outside = torch.ones((), dtype=torch.float64, requires_grad=True)
    third_step_is_refused(
        module, batch, lambda one, part: outside * classify(one, part), "reaches a tensor outside of the module"
    )
    third_step_is_refused(
        module,
        (*batch, torch.tensor(2.0, device="cpu")),
        lambda one, part: part[2] * classify(one, part),
        r"batch\[2\] is a 0-dim",
    )
    activation: Any = next(one for one in module.modules() if isinstance(one, nn.Tanh))
    handle = activation.register_forward_hook(lambda *_: None)
    third_step_is_refused(module, batch, classify, "has a forward hook")
    handle.remove()

    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.detach().mean()
            return x

    third_step_is_refused(nn.Sequential(module, Remembers()), batch, classify, "sets its attribute 'mean'")

    class Averages(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()  # another tensor, which the graph would not keep
            return x

    averaging = nn.Sequential(module, Averages())
    with (
        DataParallel(averaging, BOXES["two"], balance="even", graphs=True, micro_batch=2) as trainer,
        pytest.raises(InvalidArgument, match="sets its attribute 'mean'"),
    ):
        trainer.step(classify, batch)


def test_graphs_need_gpus_and_one_weight(fake: Any) -> None:
    module, batch = module_and_batch()
    with pytest.raises(InvalidArgument, match=r"graphs=True needs GPUs, and host:0 computes on the host"):
        DataParallel(copy.deepcopy(module).cpu(), ["host:0"], graphs=True)
    with pytest.raises(InvalidArgument, match=r"graphs=True needs GPUs, and host:0"):
        DataParallel(module, BOXES["mixed"], graphs=True)
    with pytest.raises(InvalidArgument, match="must be True or False"):
        DataParallel(module, BOXES["one"], graphs=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="together with graphs=True"):
        DataParallel(module, BOXES["one"], graphs=True, batch_norm="synchronised")
    with (
        DataParallel(module, BOXES["one"], graphs=True) as trainer,
        pytest.raises(InvalidArgument, match="a weight= that is a mapping"),
    ):
        trainer.step(lambda one, part: {"a": classify(one, part)}, batch, weight={"a": None})


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.own_gpus("these are parts themselves")
def test_draws_on_parts_of_one_gpu_are_refused() -> None:
    paceline.partition("cuda:0", [0.5, 0.5])
    module = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 3)).double()
    _, batch = module_and_batch()
    with DataParallel(module, ["cuda:0/0", "cuda:0/1"], balance="even", graphs=True) as trainer:
        for _ in range(2):
            trainer.step(classify, batch)
        with pytest.raises(InvalidArgument, match=r"cuda:0/0, cuda:0/1 are parts of one GPU, which share its random"):
            trainer.step(classify, batch)
        module.eval()
        for _ in range(4):
            expect_step(trainer, batch)
        assert "2 captured" in trainer.explain()
