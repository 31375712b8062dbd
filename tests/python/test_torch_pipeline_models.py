"""Models that a pipeline trains as they are, bit for bit as one device; what `init=` does to them on the device "meta", and what measuring leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import InvalidArgument
from paceline.torch import Pipeline
from pipeline_cases import differences_with
from pipeline_models import WIDTH, Batch, NanoGpt, loss_inside, sequential, text, two_stages, vectors
from pipeline_models import squares as square
from torch_support import TWO, classify


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


X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.linear(x)


class Cached(Block):
    """Keeps what it computes from a buffer, as rotary embeddings do."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(8) / 10, persistent=False)
        self.cache: dict[str, dict[int, Any]] = {"cosines": {}}

    def forward(self, x: Any) -> Any:
        known = self.cache["cosines"]
        if x.shape[1] not in known:
            known[x.shape[1]] = self.frequencies.cos()
        if not hasattr(self, "sines"):
            self.register_buffer("sines", self.frequencies.sin())
        return x + self.linear(x) * known[x.shape[1]] + self.sines


class Inner(Block):
    """Has one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)
        self.other.weight = self.linear.weight

    def forward(self, x: Any) -> Any:
        return x + self.other(torch.tanh(self.linear(x)))


class Positions(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(8), persistent=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x)[:, self.positions]


class Counting(nn.Sequential):
    """Counts in a buffer of a module that is never called."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.counter = nn.Module()
        self.counter.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.counter.calls.add_(1)  # type: ignore[operator]
        for block in list(self)[:-1]:
            x = block(x)
        return x


def made(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4)))


def on_meta(block: Callable[[], nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return made(block)


def filled_as(other: nn.Module) -> Callable[[str, nn.Module], object]:
    parts = dict(other.named_modules())

    def init(name: str, part: nn.Module) -> None:
        theirs = {**dict(parts[name].named_parameters()), **dict(parts[name].named_buffers())}
        for key, one in [*part.named_parameters(), *part.named_buffers()]:
            one.copy_(theirs[key])

    return init


def saved(module: nn.Module, path: Path) -> Path:
    torch.save(module.state_dict(), path)
    return path


def loss_of(module: nn.Module, **options: Any) -> float:
    with Pipeline(module, TWO, micro_batches=4, **options) as trainer:
        return float(trainer.step(square, X))


@pytest.mark.parametrize("block", [Block, Cached, Inner, Positions])
def test_measuring_leaves_nothing_behind(block: Callable[[], nn.Module]) -> None:
    assert loss_of(on_meta(block), init=filled_as(made(block))) == loss_of(made(block))


def test_buffers_of_modules_that_are_not_called_are_put_back() -> None:
    with torch.device("meta"):
        module = Counting(*(Block() for _ in range(4)))
    module.counter.calls = torch.zeros(())
    loss_of(module, init=filled_as(made(Block)), blocks=[module[index] for index in range(4)])
    assert module.counter.calls == 4


def test_integers_that_a_file_does_not_fill_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"0\.positions was on the device 'meta'"):
        loss_of(on_meta(Positions), init=saved(made(Positions), tmp_path / "model.pt"))


def test_a_file_of_other_shapes_or_names_is_refused(tmp_path: Path) -> None:
    state = made(Block).state_dict()
    torch.save({**state, "1.linear.weight": state["1.linear.weight"][:1]}, tmp_path / "short.pt")
    with pytest.raises(InvalidArgument, match=r"1\.linear\.weight has shape \(8, 8\), but shape \(1, 8\) in"):
        loss_of(on_meta(Block), init=tmp_path / "short.pt")
    torch.save({"model": state}, tmp_path / "wrapped.pt")
    with pytest.raises(InvalidArgument, match=r"has none of the module's names\. It has 'model'"):
        loss_of(on_meta(Block), init=tmp_path / "wrapped.pt")


def test_a_file_fills_only_what_has_no_memory(tmp_path: Path) -> None:
    module, expected = on_meta(Block), made(Block)
    other = nn.Parameter(torch.full((8,), 0.25))
    module[1].linear.bias = other  # type: ignore[union-attr]
    expected[1].linear.bias = nn.Parameter(other.detach().clone())  # type: ignore[union-attr]
    assert loss_of(module, init=saved(made(Block), tmp_path / "model.pt")) == loss_of(expected)


def test_hooks_of_parameters_stay() -> None:
    module, calls = on_meta(Block), []
    module[0].linear.weight.register_hook(lambda gradient: calls.append("gradient"))  # type: ignore[union-attr, operator]
    handle = module[1].linear.weight.register_post_accumulate_grad_hook(lambda one: calls.append("accumulated"))  # type: ignore[union-attr, operator]
    with Pipeline(module, TWO, micro_batches=4, init=filled_as(made(Block))) as trainer:
        trainer.loss(square, X).backward()
        assert sorted(calls) == ["accumulated", "gradient"]
        handle.remove()
        trainer.loss(square, X).backward()
        assert sorted(calls) == ["accumulated", "gradient", "gradient"]


def test_an_optimizer_with_a_state_on_meta_is_refused() -> None:
    reference = made(Block)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    square(reference, X).backward()
    optimizer.step()
    state = optimizer.state_dict()
    module = on_meta(Block)
    late = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    late.load_state_dict(state)
    with Pipeline(module, TWO, micro_batches=4, init=filled_as(reference)) as trainer:
        trainer.step(square, X)
        with pytest.raises(InvalidArgument, match="SGD has loaded its state while the parameters were on the device"):
            late.step()
        late.load_state_dict(state)
        late.step()


def test_other_parameters_from_init_are_refused() -> None:
    module = on_meta(lambda: nn.Linear(8, 8))

    def init(name: str, part: Any) -> None:
        part.weight = nn.Parameter(torch.eye(8))
        part.bias.zero_()

    with pytest.raises(InvalidArgument, match="put other parameters in the place"):
        loss_of(module, init=init)


def test_errors_of_the_user_are_not_taken_for_missing_memory() -> None:
    def fails(module: Any, batch: Any) -> Any:
        raise RuntimeError("bad metadata in record 17")

    with (
        Pipeline(on_meta(Block), TWO, init=filled_as(made(Block))) as trainer,
        pytest.raises(RuntimeError, match=r"^bad metadata in record 17"),
    ):
        trainer.step(fails, X)


def test_the_order_is_found_after_a_call_of_some_blocks() -> None:
    class Backwards(nn.Module):
        """Its blocks are called in the reverse of their order."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Any, least: int = 0) -> Any:
            for block in list(self.blocks)[: least - 1 if least else None : -1]:
                x = block(x)
            return x

    module = Backwards()
    with Pipeline(module, TWO, micro_batches=4) as trainer:
        trainer.predict(lambda module, batch: module(batch, 2), X)
        trainer.step(square, X)
        plain = F.mse_loss(module(X), torch.zeros_like(X))
        assert float(trainer.step(square, X)) == pytest.approx(float(plain))


def test_statistics_that_functions_write_in_several_blocks_are_warned_of() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x: Any) -> Any:
            return F.batch_norm(x, self.mean, self.variance, training=self.training)  # type: ignore[arg-type]

    norm = Norm()

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), norm)

    module = made(block)
    with (
        Pipeline(module, TWO, micro_batches=4, cuts=[0, 2], blocks=list(module)) as trainer,
        pytest.warns(UserWarning, match=r"the buffer 0\.1\.mean, which 0 and 1 share"),
    ):
        trainer.step(square, X)
