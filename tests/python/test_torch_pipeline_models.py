"""Models that a pipeline trains as they are, bit for bit as plain accumulation of the same micro-batches on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from pipeline_cases import differences_with
from pipeline_models import WIDTH, Batch, NanoGpt, loss_inside, sequential, text, two_stages, vectors
from torch_support import classify


class Residual(nn.Module):
    """torchvision's BasicBlock, with activations in place."""

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        same = inputs == planes and stride == 1
        self.downsample = (
            None if same else nn.Sequential(nn.Conv2d(inputs, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += early
        result: torch.Tensor = self.relu(x)
        return result


class ResNet(nn.Module):
    """A small one, arranged as torchvision's: the blocks of layer1 to layer4 are what is cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6, 2), Residual(6, 6))
        self.layer3 = nn.Sequential(Residual(6, 8, 2), Residual(8, 8))
        self.layer4 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        logits: torch.Tensor = self.fc(self.layer4(self.layer3(x)).mean((2, 3)))
        return logits


class UNet(nn.Module):
    """Each way down keeps its result for the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.ups = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.downs:
            x = down(x)
            kept.append(x)
        for up in self.ups:
            x = up(torch.cat([x, kept.pop()], -1))
        return x


class Recurrent(nn.Module):
    """Blocks that return tuples and take the hidden state of the block before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return x[:, -1]


def frozen() -> NanoGpt:
    model = NanoGpt()
    model.transformer["h"][0].requires_grad_(False)
    model.transformer["h"][2].requires_grad_(False)
    model.transformer["wpe"].requires_grad_(False)
    return model


def in_bfloat16(model: Any, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_inside(model, batch)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Batch]] = {
    "nn.Sequential": (sequential, classify, vectors()),
    "nanoGPT": (NanoGpt, loss_inside, text()),
    "ResNet": (ResNet, classify, vectors(9, 3, 8, 8)),
    "U-Net": (UNet, classify, vectors()),
    "recurrent": (Recurrent, classify, vectors(9, 5, WIDTH)),
    "checkpointing": (lambda: NanoGpt(checkpointed=True), loss_inside, text()),
    "frozen parts": (frozen, loss_inside, text()),
    "bfloat16": (NanoGpt, in_bfloat16, text()),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_unmodified_and_bit_for_bit(model: str) -> None:
    make, loss_fn, batch = MODELS[model]
    torch.manual_seed(0)
    assert differences_with(make(), loss_fn, batch) == []


def test_a_model_without_memory_is_filled_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = NanoGpt()
    torch.save(wanted.state_dict(), tmp_path / "state.pt")
    with torch.device("meta"):
        model = NanoGpt()
    with two_stages(model, init=tmp_path / "state.pt") as trainer:
        trainer.predict(lambda module, part: module(*part)[0], text())
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))
    assert model.lm_head.weight is model.transformer["wte"].weight


def test_what_init_leaves_out_is_named() -> None:
    with torch.device("meta"):
        model = NanoGpt()
    with two_stages(model, init=lambda name, part: None) as trainer:
        with pytest.raises(InvalidArgument, match=r"wte\.weight was on the device 'meta', and init= has not filled it"):
            trainer.step(loss_inside, text())


@pytest.mark.slow
def test_compiled_blocks_are_exact() -> None:
    torch.compiler.reset()
    model = NanoGpt()
    for block in model.transformer["h"]:
        block.compile(backend="aot_eager")
    assert differences_with(model, loss_inside, text(8), steps=6) == []
    torch.compiler.reset()
