"""A step of a pipeline is proved: in two numbers of micro-batches it gives the same, or the difference is said."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import Error, Unavailable
from paceline.torch import Pipeline, ProofWarning, proving
from proof_cases import said
from torch_support import TWO


def net(dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout)) for _ in range(5)
    ]
    return nn.Sequential(*layers, nn.Linear(8, 8)).double()


def batch(items: int = 32, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    labels = torch.randint(0, 8, (items,))
    labels[: 3 * ignored : 3] = -100
    return torch.randn(items, 8, dtype=torch.float64), labels


def loss_of(module: nn.Module, rows: Any) -> torch.Tensor:
    return functional.cross_entropy(module(rows[0]), rows[1])


def steps(module: nn.Module, loss_fn: Any, rows: Any, count: int = 1, **options: Any) -> tuple[str, str, list[Any]]:
    """What was said, the line of the proof, and the gradients."""
    with Pipeline(module, TWO, **options) as trainer:
        told = said(lambda: [trainer.step(loss_fn, rows) for _ in range(count)])
        lines = [line for line in trainer.explain().splitlines() if line.startswith("Proof")]
        assert trainer.differs == any("differs" in line for line in lines)
    return told, "\n".join(lines), [one.grad for one in module.parameters()]


def test_a_mean_over_items_is_equal_in_two_numbers_and_the_step_is_the_planned_one() -> None:
    said, line, gradients = steps(net(), loss_of, batch(), count=2, prove="warn")
    _, nothing, wanted = steps(net(), loss_of, batch(), count=2, prove=False)
    assert not said
    assert not nothing
    assert "32 items in 16 micro-batches: equal to 8 micro-batches up to" in line
    assert "12 gradients" in line
    assert "attributes" not in line
    assert all(map(torch.equal, gradients, wanted))


def test_a_mean_over_labels_differs_and_the_line_that_cures_it_is_said() -> None:
    rows = batch(ignored=9)
    said, line, _ = steps(net(), loss_of, rows, prove="warn")
    assert "in 16 micro-batches this batch of 32 items gives another result than in 8: the loss is" in said
    assert "weight=lambda batch: (batch[1] != -100)" in said
    assert "differs from 8 micro-batches" in line
    with warnings.catch_warnings(), Pipeline(net(), TWO, prove="raise") as trainer:
        warnings.simplefilter("error")
        trainer.step(loss_of, rows, weight=lambda part: part[1] != -100)


def test_an_error_commits_nothing_and_the_next_step_is_proved_again() -> None:
    module, rows = net(), batch(ignored=9)
    with Pipeline(module, TWO, prove="raise") as trainer:
        for _ in range(2):
            with pytest.raises(Error, match="Nothing was committed"):
                trainer.step(loss_of, rows)
        assert trainer.report()["steps"] == 0
    assert all(one.grad is None for one in module.parameters())


@pytest.mark.parametrize(("options", "items"), [({"dropout": 0.4}, 32), ({"norm": True}, 32), ({"norm": True}, 16)])
def test_an_item_draws_the_same_in_both_and_norms_are_said_elsewhere(options: Any, items: int) -> None:
    rows = batch(items)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="paceline: .*BatchNorm1d", category=UserWarning)
        said, line, gradients = steps(net(**options), loss_of, rows, prove="raise")
        torch.manual_seed(3)
        _, _, wanted = steps(net(**options), loss_of, rows, prove=False)
    assert not said
    assert f"equal to {items // 4} micro-batches" in line
    assert all(map(torch.equal, gradients, wanted))


def test_tensors_outside_of_the_module_are_compared_and_keep_their_gradients() -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    scale.grad = torch.full_like(scale, 0.5)
    rows = batch()
    _, line, _ = steps(net(), lambda m, part: scale * loss_of(m, part), rows, prove="raise")
    assert "13 gradients" in line
    assert scale.grad.item() == pytest.approx(0.5 + loss_of(net(), rows).item())
    other = nn.Parameter(torch.ones((), dtype=torch.float64))
    said, _, _ = steps(net(), lambda m, part: loss_of(m, part) + other * (len(part[0]) - 2), rows, prove="warn")
    assert "the gradient of a tensor outside of the module differs" in said


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = net(), 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.register_buffer("growing", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.average: torch.Tensor
        self.average.mul_(0.9).add_(out.detach().mean(), alpha=0.1)
        self.count: torch.Tensor
        self.count += 1
        self.calls += 1
        return out


def test_a_buffer_that_depends_on_the_number_is_said_and_attributes_are_not() -> None:
    module = Averages()
    said, _, _ = steps(module, loss_of, batch(), prove="warn")
    assert "buffer 'average' has" in said
    assert "in 8 micro-batches and" in said
    assert "micro_batches= fixes it" in said
    assert "calls" not in said
    assert not any(name in said for name in ("count", "mask", "growing"))
    other = Averages()
    steps(other, loss_of, batch(), prove=False)
    assert torch.equal(module.average, other.average)
    assert module.calls == other.calls


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Unavailable])
def test_what_a_proof_raises_leaves_everything_as_it_was(kind: type[BaseException], tmp_path: Path) -> None:
    module, rows, once = Averages(), batch(), tmp_path / "raised"
    state = copy.deepcopy(module.state_dict())

    def loss_fn(inner: nn.Module, part: Any) -> torch.Tensor:
        if proving() and len(part[0]) == 2 and not once.exists():  # a file: a list would be put back with all else
            once.touch()
            raise kind("in the second run")
        return loss_of(inner, part)

    with Pipeline(module, TWO, prove="warn") as trainer:
        random = torch.get_rng_state()
        with pytest.raises(kind, match="in the second run"):
            trainer.step(loss_fn, rows)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        assert all(one.grad is None for one in module.parameters())
        with pytest.warns(ProofWarning, match="average"):
            trainer.step(loss_fn, rows)


def test_a_batch_that_is_edited_in_place_is_the_same_in_all_runs() -> None:
    def edits(module: nn.Module, part: Any) -> torch.Tensor:
        part[0].mul_(1.5)
        return loss_of(module, part)

    rows, other = batch(), batch()
    _, line, gradients = steps(net(), edits, rows, prove="raise")
    _, _, wanted = steps(net(), edits, other, prove=False)
    assert "equal" in line
    assert torch.equal(rows[0], other[0])
    assert all(map(torch.equal, gradients, wanted))


def test_the_loss_that_carries_its_gradients_is_proved() -> None:
    module = net()
    with Pipeline(module, TWO, prove="raise") as trainer:
        trainer.loss(loss_of, batch()).backward()
        assert "equal to 8" in trainer.explain()
    with pytest.warns(ProofWarning, match="weight="), Pipeline(net(), TWO, prove="warn") as trainer:
        trainer.loss(loss_of, batch(ignored=9)).backward()


@pytest.mark.parametrize(
    ("items", "micro_batches", "word"), [(2, None, "in 2 micro-batches: equal to 1 "), (5, 5, "in 5"), (32, 1, "")]
)
def test_few_items_and_a_fixed_number(items: int, micro_batches: int | None, word: str) -> None:
    _, line, _ = steps(net(), loss_of, batch(items), prove="raise", micro_batches=micro_batches)
    assert word in line
    assert bool(line) == bool(word)


def test_one_device_is_proved_too() -> None:
    with pytest.warns(ProofWarning, match="weight="), Pipeline(net(), ["host:0"], prove="warn") as trainer:
        trainer.step(loss_of, batch(ignored=9))


def test_a_module_without_memory_is_proved_once_it_is_filled(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        empty = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(5)), nn.Linear(8, 8)
        ).double()
    with Pipeline(empty, TWO, init=str(tmp_path / "weights.pt"), prove="raise") as trainer:
        trainer.step(loss_of, batch())
        assert "Proof" not in trainer.explain()
        trainer.step(loss_of, batch())
        assert "Proof: step 2 of loss_of, 32 items in " in trainer.explain()


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="prove is 'never'"):
        Pipeline(net(), TWO, prove="never")  # type: ignore[arg-type]


def test_a_slice_without_labels_is_an_error_that_names_the_weight() -> None:
    rows = batch()
    rows[1][:4] = -100
    with Pipeline(net(), TWO, prove="warn") as trainer, pytest.raises(ValueError, match="weight="):
        trainer.step(loss_of, rows)
    with (
        Pipeline(net(), TWO, prove=False) as trainer,
        pytest.raises(ValueError, match="slice that begins with item 0 is not finite"),
    ):
        trainer.step(loss_of, rows)


def test_what_cannot_run_in_smaller_slices_is_not_proved_and_trains() -> None:
    def loss_fn(module: nn.Module, part: Any) -> torch.Tensor:
        if len(part[0]) < 4:
            raise ValueError("four at least")
        return loss_of(module, part)

    _, line, gradients = steps(net(), loss_fn, batch(), prove="raise")
    assert "not proved: in 16 micro-batches it raises ValueError: four at least" in line
    assert gradients[0] is not None


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4}])
def test_outputs_of_a_prediction_are_proved(options: Any) -> None:
    module, (x, _) = net(**options), batch()
    with Pipeline(module, TWO, prove="raise") as trainer:
        torch.manual_seed(4)
        outputs = trainer.predict(x)
        assert "Proof: predict 1 of" in trainer.explain()
        assert "equal to 8 micro-batches up to" in trainer.explain()
    with Pipeline(module, TWO, prove=False) as trainer:
        torch.manual_seed(4)
        assert torch.equal(trainer.predict(x), outputs)


def test_outputs_that_depend_on_the_number_are_said_and_refused_where_that_is_asked() -> None:
    module, (x, _) = net(), batch()

    def centered(inner: nn.Module, part: torch.Tensor) -> Any:
        out = inner(part)
        return out - out.mean(0)

    with Pipeline(module, TWO, prove="warn") as trainer:
        with pytest.warns(ProofWarning, match="in 16 micro-batches .* than in 8: the outputs differ"):
            trainer.predict(centered, x)
        assert trainer.differs
    with Pipeline(module, TWO, prove="raise") as trainer, pytest.raises(Error, match="the outputs differ"):
        trainer.predict(centered, x)


class Aside(nn.Module):
    """Leaves a term of the loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.aside = net(), torch.zeros((), dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        self.aside = out.square().mean()
        return out


def test_a_read_from_the_original_module_is_said() -> None:
    module, rows = Aside(), batch()
    said, _, _ = steps(module, lambda m, part: loss_of(m, part) + module.aside, rows, prove="warn")
    assert "reads 'aside' from the original module" in said
    steps(Aside(), lambda m, part: loss_of(m, part) + m.aside, rows, prove="raise")
    with Pipeline(module, TWO, prove="raise") as trainer, pytest.raises(Error, match="reads 'aside' from the original"):
        trainer.predict(lambda m, part: m(part) + module.aside, rows[0])
    assert type(module) is Aside


def test_draws_that_cannot_be_repeated_are_not_proved() -> None:
    def loss_fn(module: nn.Module, part: Any) -> torch.Tensor:
        return loss_of(module, part) * (1 + np.random.rand())  # noqa: NPY002

    _, line, _ = steps(net(), loss_fn, batch(), prove="raise")
    assert "not proved: random draws that cannot be repeated (numpy.random)" in line


def test_a_prediction_that_needs_two_items_works_and_is_not_proved() -> None:
    def fn(inner: nn.Module, part: torch.Tensor) -> Any:
        out = inner(part)[:, :1].squeeze()
        assert out.dim() == 1
        return out

    with Pipeline(net(), TWO, prove="raise") as trainer:
        assert trainer.predict(fn, batch(16)[0]).shape == (16,)
        assert "in 16 micro-batches it raises AssertionError" in trainer.explain()


def test_memory_that_runs_out_in_a_proof_changes_no_plan() -> None:
    def loss_fn(module: nn.Module, part: Any) -> torch.Tensor:
        if proving() and len(part[0]) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(module, part)

    with Pipeline(net(), TWO, prove="raise", micro_batches=5) as trainer:
        trainer.step(loss_fn, batch(5))
        assert "not proved: memory ran out" in trainer.explain()
        assert trainer.report()["out_of_memory"] == 0
        assert trainer.report()["micro_batches"] == [1] * 5
        assert len(trainer._recent.steps) == 1


def test_a_step_that_overflows_is_proved_by_a_later_one() -> None:
    scaler, rows, large = torch.amp.GradScaler("cpu", init_scale=4.0), batch(), [1e308]
    with Pipeline(net(), TWO, prove="raise") as trainer:
        trainer.step(lambda m, part: loss_of(m, part) * large[0], rows, scaler=scaler)
        large[0] = 1.0
        trainer.step(lambda m, part: loss_of(m, part) * large[0], rows, scaler=scaler)
        assert "not a finite number" in trainer.explain()
        assert "equal to 8 micro-batches" in trainer.explain()


def test_a_number_that_the_user_has_fixed_is_not_called_planned() -> None:
    said, _, _ = steps(net(), loss_of, batch(ignored=9), prove="warn", micro_batches=4)
    assert "in 8 micro-batches this batch of 32 items gives another result than in 4" in said
    assert "micro_batches= fixes their number, so runs repeat" in said
    assert "planned" not in said
