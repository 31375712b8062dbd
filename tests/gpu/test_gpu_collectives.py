"""Collectives on tensors of several parts of a GPU: right to the bit, and ordered with who made the tensors."""

from __future__ import annotations

import pytest
import torch

from gpu_support import Box, delay
from paceline import Communicator, DeviceGroup


def tensors(box: Box, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    places = ["cpu" if device.kind == "host" else device.memory_space for device in box.devices]
    return [torch.full((count,), float(index + 1), dtype=dtype, device=place) for index, place in enumerate(places)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 1003, 1 << 20])
def test_all_reduce_gives_every_device_the_sum(dtype: torch.dtype, count: int, box: Box) -> None:
    with DeviceGroup(box.devices) as group:
        buffers = tensors(box, dtype, count)
        Communicator(group).all_reduce(buffers)
        for buffer in buffers:
            assert torch.equal(buffer.cpu().double(), torch.full((count,), len(box) * (len(box) + 1) / 2).double())


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
