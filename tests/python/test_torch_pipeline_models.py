"""Models that a pipeline trains as they are, bit for bit as plain accumulation of the same micro-batches on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline import InvalidArgument
from paceline.torch import Pipeline
from pipeline_cases import differences_with
from torch_support import TWO, classify, gradients

WIDTH = 8
Batch = tuple[torch.Tensor, ...]


class Block(nn.Module):
    """A residual block of a transformer that takes x only, and may checkpoint itself."""

    def __init__(self, *, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed else self._forward(x)
        )
        return result

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return hidden


class NanoGpt(nn.Module):
    """Tied embedding and head, blocks in a ModuleList of a ModuleDict, loss inside of the forward: as nanoGPT is written."""

    def __init__(self, layers: int = 4, **options: Any) -> None:
        super().__init__()
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(20, WIDTH),
                "wpe": nn.Embedding(6, WIDTH),
                "h": nn.ModuleList(Block(**options) for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, 20, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_inside(model: Any, batch: Any) -> Any:
    return model(*batch)[1]


def text(items: int = 9) -> Batch:
    words = torch.randint(0, 20, (items, 6), generator=torch.Generator().manual_seed(items))
    return words, words.roll(-1, 1)


def vectors(items: int = 9, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(items)
    return torch.randn(items, *(shape or (WIDTH,)), generator=generator), torch.arange(items) % 3


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


def sequential() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


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


def two_stages(model: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(model, TWO, **{"cuts": [0, 2], "micro_batches": 4, "schedule": "1f1b", **options})


def assert_equal(got: nn.Module, wanted: nn.Module) -> None:
    """Gradients and buffers, to the last bit."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, one.grad, other.grad)
        for (name, one), other in zip(got.named_parameters(), wanted.parameters(), strict=True)
    ]
    pairs += [(name, one, other) for (name, one), other in zip(got.named_buffers(), wanted.buffers(), strict=True)]
    assert any(one is not None for _, one, _ in pairs)
    different = [
        name
        for name, one, other in pairs
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other))
    ]
    assert different == []


def slices(batch: Batch, sizes: list[int]) -> list[Batch]:
    return list(zip(*(tensor.split(sizes) for tensor in batch), strict=True))


def test_dropout_draws_what_one_device_draws() -> None:
    torch.manual_seed(0)
    model = NanoGpt(dropout=0.5)
    alone = copy.deepcopy(model)
    with two_stages(model) as trainer, Pipeline(alone, ["host:0"], micro_batches=4) as reference:
        for step in range(5):
            for one in (trainer, reference):
                torch.manual_seed(step)
                loss = one.step(loss_inside, text())
            assert trainer.report()["micro_batches"] == reference.report()["micro_batches"]
            assert_equal(model, alone)
    assert loss > 0


def test_a_grad_scaler_scales_as_on_one_device() -> None:
    torch.manual_seed(0)
    model = NanoGpt()
    plain = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            plain.zero_grad()
            loss = trainer.step(loss_inside, text(), scaler=scaler)
            for part in slices(text(), trainer.report()["micro_batches"]):
                scaler.scale(loss_inside(plain, part) * (len(part[0]) / 9)).backward()
            assert loss < 10
            assert_equal(model, plain)


def test_several_terms_each_have_their_own_weight() -> None:
    torch.manual_seed(0)
    model, batch = sequential(), vectors()
    plain = copy.deepcopy(model)
    counted = torch.tensor([1.0, 0, 2, 1, 0, 3, 1, 1, 1])

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        weight = part[2]
        return {
            "class": functional.cross_entropy(output, part[1]),
            "size": (output.pow(2).mean(1) * weight).sum() / weight.sum().clamp(min=1e-9),
        }

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, (*batch, counted), weight={"class": None, "size": counted})
            for part in slices((*batch, counted), trainer.report()["micro_batches"]):
                terms = loss_fn(plain, part)
                (terms["class"] * (len(part[0]) / 9) + terms["size"] * (part[2].sum() / counted.sum())).backward()
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_loss_carries_gradients_to_backward() -> None:
    torch.manual_seed(0)
    model = NanoGpt()
    plain = copy.deepcopy(model)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            loss = trainer.loss(loss_inside, text())
            assert model.lm_head.weight.grad is None
            (loss * 3).backward()
        for part in slices(text(), trainer.report()["micro_batches"]):
            (loss_inside(plain, part) * (len(part[0]) / 9)).backward()
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other * 3)


def test_extras_come_back_in_the_order_of_the_items() -> None:
    model, batch = sequential(), vectors()

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        return functional.cross_entropy(output, part[1]), {"output": output, "items": part[1]}

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch)
        assert torch.equal(trainer.extras["items"], batch[1])
        with torch.no_grad():
            torch.testing.assert_close(trainer.extras["output"], model(batch[0]))


def test_sums_of_samples_over_a_total_that_is_given() -> None:
    """collate=, total=, reduction= and accumulation over two steps."""
    torch.manual_seed(0)
    model, (x, y) = sequential(), vectors(8)
    plain = copy.deepcopy(model)

    def loss_fn(module: Any, part: Any) -> Any:
        return functional.cross_entropy(module(part[0]), part[1], reduction="sum")

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    with two_stages(model, reduction="sum") as trainer:
        for _ in range(4):
            model.zero_grad(), plain.zero_grad()
            for half in (slice(0, 4), slice(4, 8)):
                trainer.step(loss_fn, list(zip(x[half], y[half], strict=True)), collate=collate, total=16)
                for part in slices((x[half], y[half]), trainer.report()["micro_batches"]):
                    (loss_fn(plain, part) * (1 / 16)).backward()
            assert trainer.report()["micro_batches"] == [1, 1, 1, 1]
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_predict_keeps_the_order_and_leaves_gradients_alone() -> None:
    model, (x, _) = sequential(), vectors(17)
    with two_stages(model) as trainer:
        for _ in range(5):
            with torch.no_grad():
                torch.testing.assert_close(trainer.predict(x), model(x))
            trainer.step(classify, vectors())
        assert trainer.predict(x[:1]).shape == (1, 3)


def test_the_user_s_hooks_on_blocks_run_once_per_micro_batch() -> None:
    model = NanoGpt()
    plain = copy.deepcopy(model)
    calls: list[int] = []

    def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return output * 0.5

    one: Any
    for one in (model, plain):
        one.transformer["h"][2].register_forward_hook(halve)
        one.transformer["h"][2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with two_stages(model) as trainer:
        for _ in range(4):
            calls.clear()
            model.zero_grad()
            trainer.step(loss_inside, text())
        assert sorted(calls) == sorted(trainer.report()["micro_batches"])
        for part in slices(text(), trainer.report()["micro_batches"]):
            (loss_inside(plain, part) * (len(part[0]) / 9)).backward()
    assert_equal(model, plain)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_updates_as_on_one_device(optimizer: Any) -> None:
    torch.manual_seed(0)
    model = NanoGpt()
    plain = copy.deepcopy(model)
    theirs = optimizer(plain.parameters(), lr=0.1)
    with two_stages(model) as trainer:
        ours = trainer.optimizer(optimizer, lr=0.1)
        for _ in range(5):
            trainer.step(loss_inside, text())
            for part in slices(text(), trainer.report()["micro_batches"]):
                (loss_inside(plain, part) * (len(part[0]) / 9)).backward()
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_without_memory_is_filled_part_by_part() -> None:
    torch.manual_seed(0)
    wanted = NanoGpt()
    state = wanted.state_dict()
    with torch.device("meta"):
        model = NanoGpt()
    filled = []

    def init(name: str, part: nn.Module) -> None:
        filled.append(name)
        part.load_state_dict({key: state[f"{name}.{key}"] for key in part.state_dict()})

    with two_stages(model, init=init) as trainer:
        for _ in range(4):
            model.zero_grad()
            trainer.step(loss_inside, text())
        for part in slices(text(), trainer.report()["micro_batches"]):
            (loss_inside(wanted, part) * (len(part[0]) / 9)).backward()
    assert len(filled) == len(set(filled))
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert_equal(model, wanted)


def test_a_model_without_memory_is_filled_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = NanoGpt()
    torch.save(wanted.state_dict(), tmp_path / "state.pt")
    with torch.device("meta"):
        model = NanoGpt()
    with two_stages(model, init=tmp_path / "state.pt") as trainer:
        trainer.predict(text(), lambda module, part: module(*part)[0])
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
