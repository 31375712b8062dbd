"""The same seed and the same split give the same run, and what the caller does to PyTorch's generators is followed."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paceline.torch import DataParallel, UnseededDrawsWarning
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain, worst_difference

RANDOM: Any = torch.random

Gradients = list[list[torch.Tensor | None]]


def dropping(p: float = 0.5) -> Any:
    module, _ = classifier(32)
    return nn.Sequential(nn.Dropout(p), module)


def noisy(module: Any, batch: Any) -> Any:
    return classify(module, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def steps_of(module: Any, loss_fn: Any, *, seed: int = 5, count: int = 4, **options: Any) -> Gradients:
    """The gradients of some steps from a seed, on two devices."""
    _, batch = classifier(32)
    found = []
    with DataParallel(module, TWO, **{"balance": "even", **options}) as trainer:
        torch.manual_seed(seed)
        for _ in range(count):
            module.zero_grad()
            trainer.step(loss_fn, batch)
            found.append(gradients(module))
    return found


def largest_difference(one: Gradients, other: Gradients) -> float:
    return max(worst_difference(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize(("module", "loss_fn"), [(dropping, classify), (lambda: classifier(32)[0], noisy)])
@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"balance": [3, 1]}], ids=str)
def test_the_same_seed_and_split_give_the_same_run(module: Any, loss_fn: Any, options: dict[str, Any]) -> None:
    first = steps_of(module(), loss_fn, **options)
    for _ in range(5):
        assert largest_difference(steps_of(module(), loss_fn, **options), first) == 0
    assert largest_difference(steps_of(module(), loss_fn, seed=6, **options), first) > 1e-3
    assert min(worst_difference(one, other) for one, other in itertools.pairwise(first)) > 1e-3


def test_items_of_different_micro_batches_draw_different_numbers() -> None:
    seen: list[torch.Tensor] = []

    def loss_fn(module: Any, batch: Any) -> Any:
        seen.append(torch.rand(4))
        return classify(module, batch)

    steps_of(classifier()[0], loss_fn, micro_batch=4)
    assert len({tuple(numbers.tolist()) for numbers in seen}) == len(seen) == 4 * 8


def test_the_callers_generator_moves_by_what_is_drawn_and_is_followed() -> None:
    module, (_, batch) = dropping(), classifier(32)
    with DataParallel(module, TWO, balance="even") as trainer:

        def step() -> list[torch.Tensor | None]:
            module.zero_grad()
            trainer.step(classify, batch)
            return gradients(module)

        state = torch.get_rng_state()
        first, second = step(), step()
        torch.set_rng_state(state)
        assert worst_difference(step(), first) == 0
        assert worst_difference(step(), second) == 0
        module.eval()
        state = torch.get_rng_state()
        _, wanted = plain(module, classify, batch)
        step()
        assert_same_gradients(module, wanted)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("call", ["run", "predict"])
def test_runs_of_a_batch_and_predictions_are_seeded(call: str) -> None:
    module, (_, batch) = dropping(), classifier(32)

    def fn(replica: Any, micro_batch: Any) -> None:
        micro_batch.backward(classify(replica, micro_batch.data))

    found = []
    for _ in range(4):
        with DataParallel(module, TWO, balance="even") as trainer:
            torch.manual_seed(3)
            for _ in range(3):
                if call == "predict":
                    found.append([trainer.predict(batch[0])])
                    continue
                module.zero_grad()
                with trainer.batch(batch) as whole:
                    whole.run(fn)
                found.append(gradients(module))
    assert all(worst_difference(found[index], found[index % 3]) == 0 for index in range(12))
    assert worst_difference(found[0], found[1]) > 1e-3


def test_draws_that_come_late_are_seeded_too() -> None:
    """The first steps draw nothing, so that later ones are not looked into; the one that draws runs again."""
    _, batch = classifier(32)

    def gradients_of_a_late_start() -> tuple[list[torch.Tensor | None], int]:
        module, ran, late = classifier(32)[0], [], False

        def loss_fn(replica: Any, part: Any) -> Any:
            ran.append(len(part[0]))
            return noisy(replica, part) if late else classify(replica, part)

        with DataParallel(module, TWO, balance="even", micro_batch=16) as trainer:
            for _ in range(3):
                trainer.step(loss_fn, batch)
            _, wanted = plain(module, classify, batch)
            assert worst_difference([g / 3 for g in gradients(module) if g is not None], wanted) < 1e-12
            late = True
            ran.clear()
            torch.manual_seed(1)
            module.zero_grad()
            trainer.step(loss_fn, batch)
            assert len(ran) == 4, "the step was not run again"
            trainer.step(loss_fn, batch)
            assert len(ran) == 6, "a later one was"
        return gradients(module), len(ran)

    first = gradients_of_a_late_start()[0]
    for _ in range(5):
        assert worst_difference(gradients_of_a_late_start()[0], first) == 0


def test_replayed_claims_draw_what_they_drew(tmp_path: Path) -> None:
    """Also where shares follow times, and micro-batches have any size."""
    module, (_, batch) = dropping(), classifier(32)
    found: list[Gradients] = []
    for replay in (False, True):
        with DataParallel(module, TWO) as trainer:
            if replay:
                trainer.replay_claims(tmp_path / "ledger")
            else:
                trainer.write_ledger(tmp_path / "ledger")
            torch.manual_seed(2)
            found.append([])
            for _ in range(12):
                module.zero_grad()
                trainer.step(classify, batch)
                found[-1].append(gradients(module))
    assert largest_difference(*found) == 0


def twice_the_same(module: Any, batch: Any) -> Any:
    """The same masks for two views, as contrastive code has them."""
    with torch.random.fork_rng():
        one = module(batch[0])
    other = module(batch[0])
    assert torch.equal(one, other)
    return (one + 2 * other).pow(2).mean()


def restored(module: Any, batch: Any) -> Any:
    state = torch.get_rng_state()
    one = module(batch[0])
    torch.set_rng_state(state)
    assert torch.equal(one, module(batch[0]))
    return one.pow(2).mean()


def reseeded(module: Any, batch: Any) -> Any:
    torch.manual_seed(7)
    one = module(batch[0])
    torch.manual_seed(7)
    assert torch.equal(one, module(batch[0]))
    return one.pow(2).mean()


@pytest.mark.parametrize("loss_fn", [twice_the_same, restored, reseeded])
def test_a_loss_may_set_the_generator(loss_fn: Callable[[Any, Any], Any]) -> None:
    found = steps_of(dropping(), loss_fn, count=10, micro_batch=4)
    assert largest_difference(steps_of(dropping(), loss_fn, count=10, micro_batch=4), found) == 0
    fixed = loss_fn is reseeded
    assert (largest_difference(steps_of(dropping(), loss_fn, seed=9, count=10, micro_batch=4), found) == 0) == fixed


def test_other_threads_keep_the_global_generator() -> None:
    module, (_, batch) = dropping(), classifier(32)
    before = RANDOM.default_generator
    inside, done = threading.Event(), threading.Event()

    def loss_fn(replica: Any, part: Any) -> Any:
        inside.set()
        assert done.wait(20)
        return classify(replica, part)

    drawn: list[torch.Tensor] = []

    def other() -> None:
        assert inside.wait(20)
        torch.manual_seed(11)
        drawn.append(torch.rand(3))
        torch.manual_seed(11)
        drawn.append(torch.rand(3, generator=torch.default_generator))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with DataParallel(module, TWO, balance="even") as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore", UnseededDrawsWarning)  # of the other thread
        trainer.step(loss_fn, batch)
    thread.join()
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert RANDOM.default_generator is before


def test_a_step_that_fails_leaves_the_generator_functions_as_they_were() -> None:
    module, (_, batch) = dropping(), classifier(32)
    before = RANDOM.default_generator
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: 1 / 0, batch)  # type: ignore[arg-type,return-value]
        assert RANDOM.default_generator is before
        trainer.step(classify, batch)
    assert RANDOM.default_generator is before


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_backward_by_hand_recomputes_with_the_same_masks(reentrant: bool) -> None:
    """Also where it is called by PyTorch's own functions, and not by the trainer."""
    _, batch = classifier(32)

    class Checkpointing(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.body, self.on = nn.Sequential(nn.Dropout(0.5), classifier(32)[0]), on

        def forward(self, x: torch.Tensor) -> Any:
            x = x.clone().requires_grad_()
            return checkpoint(self.body, x, use_reentrant=reentrant) if self.on else self.body(x)

    def fn(replica: Any, micro_batch: Any) -> None:
        term = micro_batch.weigh(classify(replica, micro_batch.data))
        if micro_batch.begin:
            torch.autograd.backward(term)
        else:
            term.backward()

    found = []
    for on in (False, True):
        module = Checkpointing(on)
        with DataParallel(module, TWO, balance="even", micro_batch=4) as trainer:
            torch.manual_seed(4)
            for _ in range(10):
                with trainer.batch(batch) as whole:
                    whole.run(fn)
        found.append(gradients(module))
    assert worst_difference(found[1], found[0]) < 1e-12


@pytest.mark.alone
@pytest.mark.parametrize("late", [False, True], ids=["drawing", "drawing late"])
def test_fixed_shares_that_draw_are_not_cut_by_times_on_one_device(late: bool) -> None:
    """A loss that takes longer for more items lets a search cut the batch."""
    module, batch = classifier(512)
    sizes: list[int] = []
    draws = [not late]

    def loss_fn(replica: Any, part: Any) -> Any:
        sizes.append(len(part[0]))
        time.sleep((len(part[0]) / 512) ** 2 * 0.03)
        return noisy(replica, part) if draws[0] else classify(replica, part)

    with DataParallel(module, hosts(1), balance="even") as trainer:
        for _ in range(16):
            trainer.step(loss_fn, batch)
        assert (set(sizes) != {512}) == late, "without draws the batch is cut, with them it is not"
        draws[0] = True
        trainer.step(loss_fn, batch)
        assert sizes[-1] == 512


def test_modes_of_the_caller_see_the_calls_that_draw() -> None:
    class Watching(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    module, (_, batch), mode = dropping(), classifier(32), Watching()
    with DataParallel(module, TWO, balance="even") as trainer, mode:
        trainer.step(classify, batch)
        seen = list(mode.seen)
        state = torch.get_rng_state()
    assert seen.count(nn.functional.dropout) == 2
    assert torch.empty not in seen
    assert torch.Tensor.random_ not in seen
    assert not torch.equal(state, torch.Generator().manual_seed(0).get_state())


def test_replicate_draws_nothing_from_the_global_generator() -> None:
    module, batch = classifier(32)

    def replicate(_: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()

    state = torch.get_rng_state()
    with DataParallel(module, TWO, replicate=replicate) as trainer:
        assert torch.equal(torch.get_rng_state(), state)
        trainer.step(classify, batch)
        module[0] = nn.Linear(6, 10).double()  # replicas are made anew
        state = torch.get_rng_state()
        trainer.step(classify, batch)
        assert torch.equal(torch.get_rng_state(), state)
