"""Kernels that size themselves for the whole GPU, on parts of it: cuDNN's convolutions and LSTMs, batch normalisation, flash attention.

A kernel that waits for blocks which a part has no room for would hang: `timeout` ends the step, and the run's limit the stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_models import classify_in_bfloat16, images, resnet
from gpu_support import Box
from paceline.torch import DataParallel
from torch_support import gradients, worst_difference

pytestmark = [
    pytest.mark.boxes("one_gpu", "two_unequal_parts", "four_parts"),
    pytest.mark.filterwarnings("ignore:.*each micro-batch is normalised"),
]

TIMEOUT = 20.0  # seconds, for anything enqueued
IN_BFLOAT16 = (
    0.1  # eight bits, through dozens of layers, by algorithms that differ; statistics of another slice differ by more
)


def even_slices(module: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, parts: int) -> list[Any]:
    """Gradients of plain PyTorch that runs the same slices one after the other: batch normalisation sees what it sees on the parts."""
    reference = copy.deepcopy(module)
    items = len(batch[0])
    for begin in range(0, items, items // parts):
        part = tuple(each[begin : begin + items // parts] for each in batch)
        (loss_fn(reference, part) * len(part[0]) / items).backward()
    return gradients(reference)


def check(box: Box, module: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, tolerance: float) -> None:
    wanted = even_slices(module, loss_fn, batch, len(box))
    with DataParallel(module, box.devices, balance="even", timeout=TIMEOUT) as trainer:
        for _ in range(3):
            module.zero_grad()
            loss = trainer.step(loss_fn, batch)
            assert bool(loss.isfinite())
            assert worst_difference(gradients(module), wanted) <= tolerance


def test_convolutions_with_channels_last_batch_norm_under_autocast(box: Box) -> None:
    torch.manual_seed(0)
    blocks, width, items, pixels = ((2, 2, 2, 2), 64, 32, 128) if box.is_cuda else ((1,), 4, 8, 16)
    module = box.put(resnet(blocks, width, classes=10)).to(memory_format=torch.channels_last)
    batch = images(items, pixels, 10, box.torch_device)
    check(box, module, classify_in_bfloat16, batch, IN_BFLOAT16)


def test_a_wide_lstm(box: Box) -> None:
    torch.manual_seed(0)
    width, length, items = (1024, 64, 64) if box.is_cuda else (16, 5, 8)
    module = box.put(nn.LSTM(width, width, num_layers=2, batch_first=True))
    batch = box.put((torch.randn(items, length, width), torch.randn(items, length, width)))
    check(box, module, lambda one, part: nn.functional.mse_loss(one(part[0])[0], part[1]), batch, 1e-3)


class Attention(nn.Module):
    """Causal self-attention over eight heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.unflatten(-1, (8, -1)).transpose(1, 2) for each in self.inward(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.outward(mixed.transpose(1, 2).flatten(2))
        return out


def test_flash_attention(box: Box) -> None:
    torch.manual_seed(0)
    width, length, items = (1024, 1024, 16) if box.is_cuda else (64, 32, 8)
    module = box.put(Attention(width).bfloat16())
    x = torch.randn(items, length, width, dtype=torch.bfloat16)
    batch = box.put((x, torch.randn_like(x)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        check(box, module, lambda one, part: nn.functional.mse_loss(one(part[0]), part[1]), batch, IN_BFLOAT16)
