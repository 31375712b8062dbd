"""Networks of real sizes for measurements on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Bottleneck(nn.Module):
    """The block of ResNet-50: https://arxiv.org/abs/1512.03385, with the stride in the 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first = [*_convolution(inputs, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU()]
        self.body = nn.Sequential(*first, *_convolution(width, 4 * width, 1))
        plain = stride == 1 and inputs == 4 * width
        self.skip = nn.Sequential() if plain else nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """By default of ResNet-50's size: 161 parameters and 159 buffers."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage > 0 and block == 0 else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def images(items: int, size: int, classes: int, device: torch.device) -> Pair:
    """Random ones, channels last."""
    pictures = torch.randn(items, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return pictures, torch.randint(0, classes, (items,), device=device)


def classify_in_bfloat16(module: nn.Module, batch: Pair) -> torch.Tensor:
    """A mean loss under autocast."""
    with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
        return functional.cross_entropy(module(batch[0]), batch[1])
