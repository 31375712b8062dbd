"""`Pipeline` where autograd, autocast and the compiler share something between micro-batches that are under way at once."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import Pipeline
from pipeline_models import accumulate, chain, same, squares
from torch_support import TWO, gradients

WIDTH, ITEMS = 16, 4


def assert_exact(
    module: Any,
    batch: Any,
    loss_fn: Any = squares,
    *,
    plain: Any = None,
    reference: Any = None,
    outside: Any = (),
    steps: int = 12,
) -> None:
    """Train in single items, as many in flight as there can be, beside plain accumulation."""
    plain = copy.deepcopy(module) if plain is None else plain
    with Pipeline(module, TWO, cuts=[0, 2], micro_batches=ITEMS, schedule="gpipe") as trainer:
        for _ in range(steps):
            for tensor in [*module.parameters(), *plain.parameters(), *outside]:
                tensor.grad = None
            trainer.step(loss_fn, batch)
            got = [one.grad for one in (*module.parameters(), *outside)]
            for tensor in outside:
                tensor.grad = None
            for item in batch.split(1):
                ((reference or loss_fn)(plain, item) * (1 / ITEMS)).backward()
            wanted = [one.grad for one in (*plain.parameters(), *outside)]
            assert same(got, wanted)


class AddsView(nn.Module):
    """Adds a tensor by a view that autograd takes the gradient of without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.shift[None]
        return x + self.linear(x).tanh()


OUTSIDE = torch.linspace(-1, 1, WIDTH).requires_grad_()


class AddsOutside(AddsView):
    """Adds a tensor that no module has."""

    def forward(self, x: Any) -> Any:
        return super().forward(x + OUTSIDE[None])


@pytest.mark.parametrize(("kind", "outside"), [(AddsView, []), (AddsOutside, [OUTSIDE])])
def test_a_gradient_that_flows_on_is_not_added_to(kind: Any, outside: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    assert_exact(nn.Sequential(*(kind() for _ in range(4))), torch.randn(ITEMS, WIDTH), outside=outside)


def test_compiled_blocks_run_alone_where_something_new_is_compiled() -> None:
    torch.compiler.reset()
    module: Any = chain(4, WIDTH)
    plain = copy.deepcopy(module)
    for block in module:
        block.compile(backend="eager")

    with Pipeline(module, TWO, cuts=[0, 2], micro_batches=4) as trainer:
        known, new = [(5, True, False)] * 5, [(9, True, False), (9, False, False), (9, True, True), (7, False, True)]
        for length, training, autocast in [*known, *new, *new]:
            batch = torch.randn(8, length, WIDTH)
            for one in (module, plain):
                one.train(training).zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                trainer.step(squares, batch)
                wanted = accumulate(plain, squares, batch, trainer)
            assert same(gradients(module), wanted)
    torch.compiler.reset()


class Keeps(nn.Module):
    """Has a value of its forward in an attribute, around compiled blocks."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Any) -> Any:
        self.kept = x * 1.5
        for layer in self.layers:
            x = layer(x)
        return x + self.kept


def test_lanes_share_compiled_blocks_and_nothing_else() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    module = Keeps()
    plain = copy.deepcopy(module)
    for layer in module.layers:
        layer.compile(backend="eager")
    assert_exact(module, torch.randn(ITEMS, WIDTH), plain=plain)
    torch.compiler.reset()


class SharesWeight(nn.Module):
    """Has one weight in blocks of both stages."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Tanh()) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def in_bfloat16(module: Any, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return squares(module, batch)


def without_cache(module: Any, batch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return squares(module, batch)


def test_lanes_share_no_casts() -> None:
    torch.manual_seed(0)
    assert_exact(SharesWeight(), torch.randn(ITEMS, WIDTH), in_bfloat16, reference=without_cache)


def test_a_profiler_sees_more_micro_batches_than_devices() -> None:
    batch = torch.randn(8, WIDTH)
    with Pipeline(chain(4, WIDTH), TWO, cuts=[0, 2], micro_batches=8, schedule="gpipe") as trainer:
        for _ in range(3):
            trainer.step(squares, batch)
        with torch.profiler.profile():
            trainer.step(squares, batch)


def test_a_forward_that_catches_exceptions_does_not_run_on_without_its_turn() -> None:
    went_on = []

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                try:
                    x = layer(x)
                except RuntimeError:
                    raise
                except Exception:
                    went_on.append(1)
            return x

    def fails(module: Any, batch: Any) -> Any:
        loss = squares(module, batch)
        if bool((batch == 1).any()):
            raise RuntimeError("as planned")
        return loss

    batch = torch.zeros(8, WIDTH)
    batch[0] = 1
    with Pipeline(Catches(), TWO, cuts=[0, 2], micro_batches=8, schedule="gpipe") as trainer:
        for _ in range(4):
            trainer.step(squares, batch)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="as planned"):
                trainer.step(fails, batch)
    assert went_on == []


def test_draws_from_a_generator_of_the_user_are_warned_of() -> None:
    generator = torch.Generator()

    def noisy(module: Any, batch: Any) -> Any:
        return squares(module, batch + torch.randn(batch.shape, generator=generator))

    with Pipeline(chain(4, WIDTH), TWO, cuts=[0, 2], micro_batches=4) as trainer:
        for _ in range(2):  # they measure, on one lane
            trainer.step(noisy, torch.randn(8, WIDTH))
        with pytest.warns(UserWarning, match="generator="):
            trainer.step(noisy, torch.randn(8, WIDTH))


class Leaves(nn.Module):
    """Leaves something for its next forward, or seems to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.count = 0
        self.mean = torch.zeros(4)
        self.seen: list[float] = []
        self.cache: Any = None
        if kind == "a shared norm":
            norm = nn.BatchNorm1d(4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm) for _ in range(4))

    def forward(self, x: Any) -> Any:
        if self.kind == "a count":
            self.count += 1
            x = x * self.count
        elif self.kind == "a tensor":
            self.mean = 0.9 * self.mean + x.detach().mean(0)
            x = x - self.mean
        elif self.kind == "a tensor in place":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            x = x - self.mean
        elif self.kind == "a list":
            self.seen.append(float(x.mean()))
        elif self.kind == "a result":
            self.mean = x.detach().mean(0)
            x = x - self.mean
        elif self.kind == "a cache":
            if self.cache is None:
                self.cache = torch.ones(4)
            x = x * self.cache
        for layer in self.layers:
            x = layer(x)
        return x


CARRIED = {
    "a count": "attribute count",
    "a tensor": "attribute mean",
    "a tensor in place": "attribute mean",
    "a list": "attribute seen",
    "a shared norm": r"buffer layers\.0\.1\.running_mean, which layers\.0 and layers\.1 share",
    "a result": None,
    "a cache": None,
    "nothing": None,
}


@pytest.mark.parametrize("kind", CARRIED)
def test_what_a_forward_leaves_for_the_next_is_warned_of_once(kind: str) -> None:
    wanted = CARRIED[kind]
    with (
        Pipeline(Leaves(kind), TWO, micro_batches=8, cuts=[0, 2]) as trainer,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        for _ in range(4):
            trainer.step(squares, torch.randn(16, 4))
    ours = [str(one.message) for one in seen if "leaves something for the next" in str(one.message)]
    assert len(ours) == (wanted is not None)
    if wanted is not None:
        assert re.search(wanted, ours[0])


def test_norms_over_planned_micro_batches_are_warned_of() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)))
    with Pipeline(module, TWO, micro_batches=2) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(squares, torch.randn(8, WIDTH))
    with Pipeline(module, TWO) as trainer:
        with pytest.warns(UserWarning, match="Fix it with micro_batches="):
            trainer.step(squares, torch.randn(8, WIDTH))
        assert "0.1 (BatchNorm1d)" in trainer.explain()


def test_what_watches_the_first_steps_takes_no_part_in_later_ones() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    watching: list[set[str]] = []
    with Pipeline(module, TWO) as trainer:
        for _ in range(6):
            trainer.step(squares, torch.randn(8 * ITEMS, WIDTH))
            watching.append({"OtherOrder", "_Carries"} & set(trainer._works.steps.recipe.names))
    assert len(watching[0]) == 2
    assert not watching[-1]
