"""Random numbers on GPUs: each GPU draws its own, and the same seed gives the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_cases import BOXES, module_and_batch
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify

pytestmark = pytest.mark.own_gpus("each GPU has a random generator, and its parts share it")

Seed = Callable[[int], None]


@pytest.fixture
def generators(fake: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """One for each GPU."""
    made = [torch.Generator() for _ in range(4)]
    monkeypatch.setattr(cuda, "generator", lambda index: made[index])
    return made


@pytest.fixture
def seed(generators: list[torch.Generator]) -> Seed:
    """Stands for ``torch.manual_seed``, which seeds all GPUs alike."""

    def seed(value: int) -> None:
        for generator in generators:
            generator.manual_seed(value)

    return seed


class Drawing:
    """A loss whose micro-batches draw a number from their GPU's generator."""

    def __init__(self, fake: Any, generators: list[torch.Generator]) -> None:
        self._fake = fake
        self._generators = generators
        self.drawn: dict[int, list[float]] = {}
        self.refuses = 0

    def __call__(self, module: Any, part: Any) -> Any:
        gpu = self._fake.streams[-1][0]
        number = float(torch.rand((), generator=self._generators[gpu]))
        if gpu == 1 and self.refuses:
            self.refuses -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.drawn.setdefault(gpu, []).append(number)
        return classify(module, part)

    def take(self) -> dict[int, list[float]]:
        drawn, self.drawn = self.drawn, {}
        return drawn


def test_gpus_draw_other_numbers_and_the_same_seed_the_same_again(
    fake: Any, generators: list[torch.Generator], seed: Seed
) -> None:
    module, batch = module_and_batch()
    loss_fn = Drawing(fake, generators)
    runs = []
    for value in (7, 7, 8):
        with DataParallel(module, BOXES["four"], balance="even") as trainer:
            seed(value)
            for _ in range(3):
                trainer.step(loss_fn, batch)
        runs.append(loss_fn.take())
    assert runs[0] == runs[1] != runs[2]
    everything = [number for numbers in runs[0].values() for number in numbers]
    assert len(set(everything)) == len(everything) == 12
    assert runs[0][0][0] == float(torch.rand((), generator=torch.Generator().manual_seed(7))), "the first is left alone"


def test_seeds_of_the_callers_own_are_left_alone(fake: Any, generators: list[torch.Generator]) -> None:
    module, batch = module_and_batch()
    for index, generator in enumerate(generators):
        generator.manual_seed(100 + index)
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        trainer.step(classify, batch)
    assert [generator.initial_seed() for generator in generators] == [100, 101, 102, 103]


def test_a_step_that_runs_again_draws_the_same(fake: Any, generators: list[torch.Generator], seed: Seed) -> None:
    module, batch = module_and_batch()
    loss_fn = Drawing(fake, generators)
    runs = []
    for refuses in (0, 1):
        loss_fn.refuses = refuses
        with DataParallel(module, BOXES["two"], balance="even", micro_batch=6) as trainer:
            seed(3)
            trainer.step(loss_fn, batch)
        runs.append(loss_fn.take())
    assert runs[0][0][:2] == runs[1][0][-2:]
    assert runs[0][1][0] == runs[1][1][0]


def test_a_resumed_run_draws_what_would_have_come(fake: Any, generators: list[torch.Generator], seed: Seed) -> None:
    module, batch = module_and_batch()
    loss_fn = Drawing(fake, generators)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        seed(5)
        trainer.step(loss_fn, batch)
        state = trainer.training_state()
        loss_fn.take()
        trainer.step(loss_fn, batch)
        wanted = loss_fn.take()
    seed(5)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.load_training_state(state)
        trainer.step(loss_fn, batch)
    assert loss_fn.take() == wanted
