"""Collectives on tensors of several parts of a GPU: right to the bit, and ordered with who made the tensors."""

from __future__ import annotations

import pytest
import torch

from gpu_support import Box, delay
from paceline import Communicator, DeviceGroup
from paceline.comm import ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def tensors(box: Box, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    places = ["cpu" if device.kind == "host" else f"cuda:{device.index}" for device in box.devices]
    return [torch.full((count,), float(index + 1), dtype=dtype, device=place) for index, place in enumerate(places)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 1003, 1 << 20])
def test_all_reduce_gives_every_device_the_sum(dtype: torch.dtype, count: int, box: Box) -> None:
    with DeviceGroup(box.devices) as group:
        buffers = tensors(box, dtype, count)
        Communicator(group).all_reduce(buffers)
        for buffer in buffers:
            assert torch.equal(buffer.cpu().double(), torch.full((count,), len(box) * (len(box) + 1) / 2).double())


def reduced(sources: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """By torch on the host: exact for the small whole numbers of these tests, but for the rounding of a mean."""
    together = torch.stack([source.cpu() for source in sources])
    if op in ("min", "max"):
        return together.amin(0) if op == "min" else together.amax(0)
    total = together.sum(0)
    if op == "sum":
        return total.to(together.dtype)
    if not together.is_floating_point():
        return torch.div(total, len(sources), rounding_mode="trunc").to(together.dtype)
    return (total.double() / len(sources)).to(together.dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("part", [1, 1003])
def test_every_operation_is_there_for_every_type(dtype: torch.dtype, op: ReduceOp, part: int, box: Box) -> None:
    torch.manual_seed(part)
    with DeviceGroup(box.devices) as group, torch.no_grad():
        communicator = Communicator(group)
        wholes = tensors(box, dtype, part * len(box))
        for index, whole in enumerate(wholes):
            whole.copy_(torch.randint(-8, 16, whole.shape))
            if dtype in FLOATS:
                whole[index] = torch.nan
        parts = tensors(box, dtype, part)
        expected = reduced(wholes, op)
        communicator.reduce_scatter(wholes, parts, op)
        communicator.all_reduce(wholes, op)
        for whole in wholes:
            torch.testing.assert_close(whole.cpu(), expected, equal_nan=True)
        gathered = tensors(box, dtype, part * len(box))
        communicator.all_gather(parts, gathered)
        for each in gathered:
            torch.testing.assert_close(each.cpu(), expected, equal_nan=True)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("side_stream", [False, True], ids=["default_stream", "side_stream"])
def test_it_waits_for_who_made_the_tensors_and_who_reads_them_for_it(side_stream: bool, box: Box) -> None:
    with DeviceGroup(box.devices) as group:
        communicator = Communicator(group)
        buffers = tensors(box, torch.float32, 100_000)
        communicator.all_reduce(buffers)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for buffer in buffers:
                delay(box, 0.02)
                buffer.fill_(1.0)
            communicator.all_reduce(buffers)
            read = [buffer.clone() for buffer in buffers]
            for buffer in buffers:
                buffer.fill_(-1.0)
        torch.cuda.synchronize()
        for each in read:
            assert torch.equal(each.cpu(), torch.full((100_000,), float(len(box))))
