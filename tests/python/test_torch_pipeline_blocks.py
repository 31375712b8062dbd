"""Which blocks are found, and in which order."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import Pipeline, layout
from pipeline_models import accumulate, assert_equal, squares
from pipeline_models import chain as chain_of
from torch_support import TWO


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 3, 3, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.transformer(x, x)


class Conv(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.conv(x))


class UNet(nn.Module):
    """Its ups are registered before its downs, and a list has one more block that runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([Conv(32, 8), Conv(16, 3)])
        self.downs = nn.ModuleList([Conv(3, 8), Conv(8, 16)])
        self.middle = nn.ModuleList([Conv(16, 16)])

    def forward(self, x: Any) -> Any:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        for middle in self.middle:
            x = middle(x)
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], 1))
        return x


class Levels(nn.Module):
    """A list of dictionaries, which nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleDict({"down": Conv(3, 3), "up": Conv(3, 3)}) for _ in range(2))

    def forward(self, x: Any) -> Any:
        levels: Any = self.levels
        for level in levels:
            x = level["down"](x)
        for level in reversed(levels):
            x = level["up"](x)
        return x


IN_ORDER: dict[str, tuple[type[nn.Module], torch.Size, list[str]]] = {
    "a translation transformer": (
        Translation,
        torch.Size((8, 5, 16)),
        [f"transformer.{part}.layers.{index}" for part in ("encoder", "decoder") for index in range(3)],
    ),
    "a U-Net": (UNet, torch.Size((8, 3, 6, 6)), ["downs.0", "downs.1", "middle.0", "ups.0", "ups.1"]),
    "dictionaries": (
        Levels,
        torch.Size((8, 3, 6, 6)),
        ["levels.0.down", "levels.1.down", "levels.1.up", "levels.0.up"],
    ),
}


def names_of(trainer: Pipeline) -> list[str]:
    return [block["name"] for block in trainer.report()["pipeline"]["blocks"]]


@pytest.mark.parametrize("what", IN_ORDER)
@pytest.mark.parametrize("on_meta", [False, True])
def test_blocks_are_found_and_run_in_the_order_of_the_forward(what: str, on_meta: bool) -> None:
    made, shape, order = IN_ORDER[what]
    torch.manual_seed(0)
    module, batch = made(), torch.randn(shape)
    plain = copy.deepcopy(module)
    options: dict[str, Any] = {"micro_batches": 4, "cuts": [0, 2]}
    if on_meta:
        module = module.to("meta")
        parts = dict(plain.named_modules())
        options["init"] = lambda name, part: part.load_state_dict(parts[name].state_dict())
    with Pipeline(module, TWO, **options) as trainer:
        for _ in range(4):
            module.zero_grad()
            trainer.step(squares, batch)
        assert names_of(trainer) == order
        assert len(trainer.report()["pipeline"]["stages"]) == 2
        accumulate(plain, squares, batch, trainer)
    assert_equal(module, plain)


def test_a_layout_keeps_the_order() -> None:
    batch = torch.randn(8, 3, 6, 6)
    found = layout(UNet(), squares, batch, TWO)
    with found.trainer("pipeline") as trainer:
        trainer.step(squares, batch)
        assert trainer.report()["pipeline"]["blocks"][0]["name"] == "downs.0"


def test_a_prediction_may_come_first() -> None:
    module, batch = UNet(), torch.randn(8, 3, 6, 6)
    with Pipeline(module, TWO) as trainer:
        torch.testing.assert_close(trainer.predict(batch), module(batch).detach())
        trainer.step(squares, batch)


class Alternates(nn.Module):
    """Every other forward calls the blocks in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.count = 0

    def forward(self, x: Any) -> Any:
        self.count += 1
        for index in (0, 1, 2, 3) if self.count % 2 else (1, 0, 2, 3):
            x = self.blocks[index](x)
        return x


def test_an_order_that_changes_is_refused() -> None:
    def steps() -> None:
        for _ in range(3):
            trainer.step(squares, torch.randn(8, 4))

    with Pipeline(Alternates(), TWO, micro_batches=4) as trainer:
        with pytest.raises(InvalidArgument, match="in the order of the blocks"):
            steps()


def test_an_order_that_was_given_is_kept() -> None:
    module = UNet()
    with Pipeline(module, TWO, blocks=[*module.ups, *module.downs]) as trainer:
        with pytest.raises(
            InvalidArgument, match=r"calls ups\.0 after downs\.1.*Give blocks= in the order of the forward"
        ):
            trainer.step(squares, torch.randn(8, 3, 6, 6))


def test_small_lists_beside_the_blocks_are_no_blocks() -> None:
    module: Any = nn.Sequential(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Sequential(nn.Tanh(), nn.Tanh())
    )
    with Pipeline(module, TWO, micro_batches=4) as trainer:
        for _ in range(3):
            trainer.step(squares, torch.randn(8, 8))
        assert names_of(trainer) == [f"0.{index}" for index in range(4)]


def test_lists_are_no_blocks() -> None:
    with pytest.raises(InvalidArgument, match=r"levels\.0, is a ModuleDict, which has no forward"):
        Pipeline(Levels(), TWO, blocks="levels")


# What `Pipeline` measures of blocks in its first steps, and when it measures again.


WIDTH = 16


def chain() -> Any:
    return chain_of(4, WIDTH)


class Slow(nn.Linear):
    """Takes 3 ms however few items there are."""

    def forward(self, x: Any) -> Any:
        time.sleep(0.003)
        return super().forward(x).tanh()


def slow_chain() -> nn.Sequential:
    return nn.Sequential(*(Slow(WIDTH, WIDTH) for _ in range(4)))


def saved(trainer: Any) -> list[int]:
    return [block["saved_bytes"] for block in trainer.report()["pipeline"]["blocks"]]


def measuring(trainer: Any) -> bool:
    return bool(trainer.report()["pipeline"]["measuring"])


def measure(trainer: Any, batch: Any, weight: Any = None) -> None:
    """Make the three steps that measure."""
    for step in range(3):
        trainer.step(squares, batch, weight=weight)
        assert measuring(trainer) == (step < 2)


@pytest.mark.alone
def test_a_batch_as_small_as_the_micro_batches_tells_what_each_of_them_costs() -> None:
    with Pipeline(slow_chain(), TWO) as trainer:
        for _ in range(5):
            trainer.step(squares, torch.randn(8, WIDTH))
        assert len(trainer.report()["micro_batches"]) <= 4


@pytest.mark.alone
def test_a_larger_batch_is_measured_where_one_item_told_nothing() -> None:
    with Pipeline(slow_chain(), TWO) as trainer:
        measure(trainer, torch.randn(1, WIDTH))
        measure(trainer, torch.randn(64, WIDTH))
        trainer.step(squares, torch.randn(64, WIDTH))
        assert len(trainer.report()["micro_batches"]) <= 16


def test_the_batch_itself_is_not_what_a_micro_batch_saves() -> None:
    with Pipeline(chain(), TWO, micro_batches=16) as trainer:
        for _ in range(2):
            trainer.step(squares, torch.randn(64, WIDTH))
        assert max(saved(trainer)) <= 2 * WIDTH * 4


def test_micro_batches_without_weight_measure_nothing() -> None:
    weight = torch.ones(16)
    weight[:10] = 0
    with Pipeline(chain(), TWO) as trainer:
        measure(trainer, torch.randn(16, WIDTH), weight)
        assert min(saved(trainer)[1:]) > 0
        trainer.step(squares, torch.randn(16, WIDTH), weight=weight)


def test_a_forward_may_leave_blocks_out() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chain()

        def forward(self, x: Any) -> Any:
            for layer in (self.layers[0], self.layers[2]):
                x = layer(x)
            return x

    with Pipeline(Skips(), TWO) as trainer:
        measure(trainer, torch.randn(16, WIDTH))
        trainer.step(squares, torch.randn(16, WIDTH))
        assert trainer.report()["steps"] == 4


@pytest.mark.parametrize("before", [1, 2])
def test_a_device_retired_while_blocks_are_measured_gets_no_stage(before: int) -> None:
    with Pipeline(chain(), TWO) as trainer:
        for _ in range(before):
            trainer.step(squares, torch.randn(16, WIDTH))
        trainer.retire("host:1")
        for _ in range(3):
            trainer.step(squares, torch.randn(16, WIDTH))
            assert trainer.shares["host:1"] == 0
        assert not measuring(trainer)


def test_longer_items_and_other_trained_parameters_are_measured_again() -> None:
    module = chain()
    module[3].requires_grad_(False)
    with Pipeline(module, TWO) as trainer:
        measure(trainer, torch.randn(16, 4, WIDTH))
        short = saved(trainer)
        trainer.step(squares, torch.randn(16, 5, WIDTH))
        assert not measuring(trainer)
        trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert measuring(trainer)
        for _ in range(2):
            trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert saved(trainer)[1] == 10 * short[1]
        frozen = trainer.report()["pipeline"]["blocks"][3]["parameter_bytes"]
        # Parameters that take the place of others are no reason, and are followed.
        module.load_state_dict({name: one.clone() for name, one in module.state_dict().items()}, assign=True)
        trainer.step(squares, torch.randn(16, 40, WIDTH))
        assert not measuring(trainer)
        module[3].requires_grad_(True)
        measure(trainer, torch.randn(16, 40, WIDTH))
        assert trainer.report()["pipeline"]["blocks"][3]["parameter_bytes"] == 4 * frozen


def test_steps_are_counted_as_they_were_called() -> None:
    with Pipeline(chain(), TWO, cuts=[0, 2], micro_batches=4) as trainer:
        for _ in range(5):
            trainer.step(squares, torch.randn(16, WIDTH))
        assert "; 5 steps measured" in " ".join(trainer.explain().split())
        assert trainer.report()["steps"] == 5
        trainer.retire("host:1")
        trainer.step(squares, torch.randn(16, WIDTH))
        assert "Last change at step 5" in trainer.explain()
        assert trainer.report()["recent_moves"][-1]["step"] == 5


def test_memory_that_runs_out_while_blocks_are_measured_makes_smaller_micro_batches() -> None:
    def loss_fn(module: Any, batch: Any) -> Any:
        if len(batch) > 2:
            raise MemoryError("as planned")
        return squares(module, batch)

    with Pipeline(chain(), TWO) as trainer:
        trainer.step(loss_fn, torch.randn(32, WIDTH))
        assert trainer.report()["micro_batches"] == [2] * 16
