"""What carries parameters and gradients between GPUs: NCCL, or copies; and an NCCL that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_cases import BOXES, expect_step, module_and_batch
from paceline import Error, InvalidArgument, Timeout
from paceline.torch import DataParallel
from torch_support import classify

NCCL = pytest.mark.own_gpus("NCCL takes no two ranks of a process on one GPU")
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", pytest.param("nccl", marks=NCCL), "copies"])


def train(trainer: DataParallel, batch: Any) -> None:
    """Three steps, and a prediction."""
    module: Any = trainer.module
    for _ in range(3):
        expect_step(trainer, batch)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(trainer.predict(batch[0]), module(batch[0]).detach())


@TRANSPORTS
@pytest.mark.parametrize("box", ["two", "four", "mixed"])
def test_gradients_are_those_of_one_device(fake: Any, box: str, transport: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box], balance="even", micro_batch=4, transport=transport) as trainer:
        train(trainer, batch)


@TRANSPORTS
@pytest.mark.parametrize("box", ["two", "four", "mixed"])
def test_a_step_has_a_call_of_nccl_for_the_gradients_and_one_for_the_loss(fake: Any, box: str, transport: Any) -> None:
    calls = fake.nccl_calls
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box], balance="even", micro_batch=4, transport=transport) as trainer:
        before = [calls(name) for name in ("ncclReduce", "ncclBroadcast")]
        train(trainer, batch)
        after = [calls(name) for name in ("ncclReduce", "ncclBroadcast")]
    # And one broadcast for all parameters, whatever their number.
    gpus = sum(name.startswith("cuda") for name in BOXES[box])
    made = [now - then for now, then in zip(after, before, strict=True)]
    assert made == ([3 * 2 * gpus, 4 * gpus] if transport == "nccl" else [0, 0])


@NCCL
def test_explain_says_what_is_used_and_why(fake: Any) -> None:
    module, _ = module_and_batch()
    said = {}
    for transport in ("auto", "nccl"):
        trainer = DataParallel(module, BOXES["two"], transport=transport)
        trainer.close()
        said[transport] = trainer.explain()
    assert "Between GPUs: copies, each bucket while the devices still compute, by PCIe peer access.\n" in said["auto"]
    assert "Between GPUs: NCCL 2.30.7 (" in said["nccl"]
    assert "after the devices' last work.\n" in said["nccl"]
    with DataParallel(module, BOXES["one"]) as trainer:
        assert "Between GPUs" not in trainer.explain()


def test_what_is_no_transport_is_refused() -> None:
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match="no transport 'mpi'; use 'auto', 'nccl', 'copies'"):
        DataParallel(module, ["host:0", "host:1"], transport="mpi")  # type: ignore[arg-type]


@NCCL
@pytest.mark.parametrize("function", ["ncclBroadcast", "ncclReduce"])
def test_a_call_that_fails_discards_the_step_and_names_the_device(fake: Any, function: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", transport="nccl") as trainer:
        fake.fail_nccl(function, 1)
        with pytest.raises(Error, match=f"cuda:1: {function} failed") as error:
            trainer.step(classify, batch)
        assert error.value.device == "cuda:1"
        assert all(parameter.grad is None for parameter in module.parameters())
        expect_step(trainer, batch)


@NCCL
def test_a_collective_that_hangs_is_told_by_the_next_call(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", timeout=1.0, transport="nccl") as trainer:
        trainer.step(classify, batch)
        module.zero_grad()
        fake.hang_nccl("ncclReduce")
        # Waits for nothing. Memory that a GPU has yet to write is PyTorch's to keep, but here it is the host's.
        kept = [trainer.step(classify, batch), *(parameter.grad for parameter in module.parameters())]
        module.zero_grad()
        with pytest.raises(Timeout, match=r"ncclReduce did not end within 0\.5 s"):
            trainer.report()
        expect_step(trainer, batch)
    assert all(tensor is not None for tensor in kept)


@NCCL
def test_trainers_end_their_communicators(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["four"], balance="even", transport="nccl") as trainer:
        trainer.step(classify, batch)
    assert fake.nccl_calls("ncclCommDestroy") == 4
