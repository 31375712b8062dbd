"""A module that was made on the device "meta": it is measured block by block, planned, and only then filled."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from paceline import InvalidArgument, OutOfMemory
from paceline.torch import Pipeline, layout
from torch_support import TWO

WIDTH = 64
BLOCKS = 8


def held() -> int:
    """Bytes of all parameters and buffers in this process that have this test's width."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta]
    return sum(one.nbytes for one in found if one.shape in ((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)))


class Block(nn.Module):
    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Any, gain: Any) -> Any:
        if hasattr(Block, "seen"):
            Block.seen.append(held())
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * self.scale * gain


class Tied(nn.Module):
    """An embedding that is used again at the end, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any
        self.embedding = nn.Embedding(16, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Any) -> Any:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.gain)
        return F.linear(x + first, self.embedding.weight)


def loss_fn(module: Any, tokens: Any) -> Any:
    return F.cross_entropy(module(tokens), tokens)


def models(trained: bool = True) -> tuple[Any, Any]:
    """One with values, and one without memory."""
    torch.manual_seed(0)
    full = Tied()
    with torch.device("meta"):
        empty = Tied()
    for one in (full, empty):
        one.blocks[0].requires_grad_(trained)
    return full, empty


def filled_from(full: nn.Module, calls: list[str] | None = None) -> Any:
    parts = dict(full.named_modules())

    def init(name: str, part: nn.Module) -> None:
        if calls is not None:
            calls.append(name)
        theirs = parts[name]
        pairs = [
            *zip(part.parameters(), theirs.parameters(), strict=True),
            *zip(part.buffers(), theirs.buffers(), strict=True),
        ]
        for one, other in pairs:
            if not one.is_meta:
                one.copy_(other)

    return init


TOKENS = torch.arange(32) % 16


def test_one_block_has_memory_at_a_time_until_the_stages_are_planned() -> None:
    full, empty = models()
    one_block = sum(one.nbytes for one in (full.blocks[0].up.weight, full.blocks[0].down.weight))
    before = held()
    calls: list[str] = []
    measuring: list[int] = []
    Block.seen = measuring

    def init(name: str, part: nn.Module) -> None:
        Block.seen = []  # measuring is over
        filled_from(full, calls)(name, part)

    try:
        with Pipeline(empty, TWO, init=init) as trainer:
            assert all(one.is_meta for one in [*empty.parameters(), *empty.buffers()])
            trainer.step(loss_fn, TOKENS)
            assert measuring
            assert max(measuring) - before <= 2 * one_block  # a block and its gradients
            assert max(Block.seen) - before >= BLOCKS * one_block
            assert len(calls) == len(set(calls)) == BLOCKS + 2
            assert trainer.report()["pipeline"]["predicted_seconds"] is not None  # the first step was planned
    finally:
        del Block.seen


@pytest.mark.parametrize("trained", [True, False])
def test_training_is_exactly_that_of_a_module_with_memory(trained: bool) -> None:
    full, empty = models(trained)
    torch.manual_seed(1)
    optimizer = None
    with Pipeline(empty, TWO, init=filled_from(full), micro_batches=4, cuts=[0, 3]) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1)  # made while there is no memory
        for _ in range(3):
            optimizer.zero_grad()
            trainer.step(loss_fn, TOKENS)
            optimizer.step()
        state = torch.get_rng_state()
    torch.manual_seed(1)
    with Pipeline(full, ["host:0"], micro_batches=4) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trainer.step(loss_fn, TOKENS)
            optimizer.step()
        assert torch.equal(state, torch.get_rng_state())
    names = [name for name, _ in full.named_parameters()]
    for name, one, other in zip(names, empty.parameters(), full.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one.grad is None) == (other.grad is None), name
    assert all(map(torch.equal, empty.buffers(), full.buffers()))


def test_costs_are_those_that_steps_measure() -> None:
    full, empty = models()
    with Pipeline(full, TWO) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, TOKENS)
        wanted = trainer.report()["pipeline"]["blocks"]
    with Pipeline(empty, TWO, init=filled_from(full)) as trainer:
        trainer.step(loss_fn, TOKENS)
        for block, other in zip(trainer.report()["pipeline"]["blocks"], wanted, strict=True):
            for figure in ("name", "parameter_bytes", "boundary_bytes"):
                assert block[figure] == other[figure]
            assert 0.8 < block["saved_bytes"] / other["saved_bytes"] < 1.3
            assert block["forward_seconds"] + block["fixed_seconds"] > 0
            assert block["backward_seconds"] + block["fixed_seconds"] > 0


def test_a_plan_that_does_not_fit_is_refused_before_anything_has_memory() -> None:
    full, empty = models()
    with Pipeline(empty, TWO, init=filled_from(full), memory=1000) as trainer:
        with pytest.raises(OutOfMemory, match="no plan fits"):
            trainer.step(loss_fn, TOKENS)
        assert all(one.is_meta for one in empty.parameters())


def test_after_an_init_that_failed_the_next_step_begins_anew() -> None:
    full, empty = models()
    fill, fails = filled_from(full), [True]

    def init(name: str, part: nn.Module) -> None:
        if name == "blocks.3" and fails.pop() if fails else False:
            raise OSError("no disk")
        fill(name, part)

    with Pipeline(empty, TWO, init=init) as trainer:
        with pytest.raises(OSError, match="no disk"):
            trainer.step(loss_fn, TOKENS)
        assert all(one.is_meta for one in empty.parameters())
        trainer.step(loss_fn, TOKENS)
    assert torch.equal(empty.blocks[3].up.weight, full.blocks[3].up.weight)


def test_the_state_of_an_optimizer_may_be_loaded_before_the_first_step() -> None:
    full, empty = models()
    for one in full.parameters():
        one.grad = torch.ones_like(one)
    before = torch.optim.AdamW(full.parameters(), lr=0.1)
    before.step()
    with Pipeline(empty, TWO, init=filled_from(full)) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1)
        optimizer.load_state_dict(before.state_dict())
        for one, other in zip(empty.parameters(), full.parameters(), strict=True):
            assert torch.equal(optimizer.state[one]["exp_avg"], before.state[other]["exp_avg"])
        trainer.step(loss_fn, TOKENS)
        optimizer.step()


@pytest.mark.parametrize("call", ["predict", "check", "save", "load"])
def test_other_calls_fill_the_module(call: str, tmp_path: Path) -> None:
    full, empty = models()
    full.eval(), empty.eval()
    with Pipeline(full, TWO) as trainer:
        trainer.save_async(tmp_path / "full")
    with Pipeline(empty, TWO, init=filled_from(full)) as trainer:
        if call == "predict":
            with torch.inference_mode():  # what it fills can be trained
                trainer.predict(TOKENS)
        elif call == "check":
            assert trainer.check(loss_fn, TOKENS).exact
        elif call == "save":
            trainer.save_async(tmp_path / "empty")
        else:
            trainer.load(tmp_path / "full")
        trainer.step(loss_fn, TOKENS)
    assert all(map(torch.equal, empty.parameters(), full.parameters()))


def test_layout_measures_without_filling() -> None:
    full, empty = models()
    found = layout(empty, loss_fn, TOKENS, TWO, init=filled_from(full))
    assert all(one.is_meta for one in empty.parameters())
    with found.trainer("pipeline") as trainer:
        trainer.step(loss_fn, TOKENS)
    full, empty = models()
    with layout(empty, loss_fn, TOKENS, TWO, init=filled_from(full)).trainer("data parallel") as trainer:
        trainer.step(loss_fn, TOKENS)


def test_measuring_leaves_what_has_memory_as_it_is() -> None:
    full, empty = models()
    empty.embedding = copy.deepcopy(full.embedding)
    empty.blocks[0].norm = copy.deepcopy(full.blocks[0].norm)
    empty.embedding.weight.grad = gradient = torch.ones_like(empty.embedding.weight)
    outside = torch.ones(1, requires_grad=True)
    layout(empty, lambda module, tokens: loss_fn(module, tokens) * outside, TOKENS, TWO, init=filled_from(full))
    assert empty.embedding.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert outside.grad is None
    assert empty.blocks[0].norm.weight.grad is None
    assert all(map(torch.equal, empty.blocks[0].norm.buffers(), full.blocks[0].norm.buffers()))
    assert empty.blocks[1].norm.weight.is_meta


def test_a_block_whose_tensors_are_used_outside_of_its_call_is_refused_with_the_cure() -> None:
    class Peeks(Tied):
        def forward(self, tokens: Any) -> Any:
            return super().forward(tokens) + self.blocks[0].up.bias.sum()

    with torch.device("meta"):
        module = Peeks()
    with Pipeline(module, TWO, init=lambda name, part: None) as trainer:
        with pytest.raises(InvalidArgument, match=r"to_empty\(device='cpu'\)"):
            trainer.step(loss_fn, TOKENS)


class Layers(nn.Module):
    """Recurrent, checkpointed, or writing in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(8, 8)
        made: dict[str, Any] = {
            "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
            "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
        }
        self.layers = nn.ModuleList(
            made.get(kind, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))() for _ in range(4)
        )

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.kind == "checkpoint" else layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize("kind", ["lstm", "in place", "checkpoint"])
@pytest.mark.parametrize("autocast", [False, True])
def test_unusual_blocks(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    full = Layers(kind)
    with torch.device("meta"):
        empty = Layers(kind)
    x = torch.randn(16, 3, 8)
    gradients = []
    for module, options in ((full, {}), (empty, {"init": filled_from(full)})):
        with (
            Pipeline(module, TWO, micro_batches=4, cuts=[0, 2], **options) as trainer,
            torch.autocast("cpu", enabled=autocast),
        ):
            trainer.step(lambda module, part: module(part).float().square().mean(), x)
        gradients.append([one.grad for one in module.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("end", ["close", "module"])
def test_the_hook_on_all_optimizers_ends(end: str) -> None:
    hooks = dict(_global_optimizer_pre_hooks)
    full, empty = models()
    trainer = Pipeline(empty, TWO, init=filled_from(full))
    trainer.step(loss_fn, TOKENS)
    assert len(_global_optimizer_pre_hooks) == len(hooks) + 1
    if end == "close":
        trainer.close()
    else:
        del trainer, empty
        gc.collect()
    assert _global_optimizer_pre_hooks == hooks


def test_the_hook_on_all_optimizers_bears_another_one_behind_it() -> None:
    full, empty = models()
    with Pipeline(empty, TWO, init=filled_from(full)) as trainer:
        trainer.step(loss_fn, TOKENS)
        stepped: list[Any] = []
        handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: stepped.append(optimizer))
        try:
            optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
            optimizer.step()
        finally:
            handle.remove()
    assert stepped == [optimizer]
