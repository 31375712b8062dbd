"""`DataParallel(group=)`: several processes, each with devices of its own, train one module on parts of one batch. The gradient is that of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument
from rank_processes import Run, error_of, part_of, trainer_of
from test_torch_terms import COUNTS, losses_of, tasks, total_of
from torch_support import classifier, classify, descend, gradients, loss_of_words, plain, words, worst_difference

SIZES = [[14, 6], [9, 0, 8], [0, 12, 5]]


def two_steps(rank: int, sizes: list[int], call: str) -> Any:
    module, batch = classifier(sum(sizes))
    part = part_of(batch, rank, sizes)
    with trainer_of(module, rank, prove="raise") as trainer:  # the first step is that of one device of each rank
        if call == "step":
            losses = [trainer.step(classify, part), trainer.step(classify, part)]
        else:
            losses = [trainer.loss(classify, part), trainer.loss(classify, part)]
            (losses[0] + losses[1]).backward()
        shares = sum(trainer.shares.values())
    return [loss.detach() for loss in losses], gradients(module), shares


@pytest.mark.parametrize("call", ["step", "loss"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_gradient_is_that_of_one_device_on_every_rank(on_ranks: Run, sizes: list[int], call: str) -> None:
    module, batch = classifier(sum(sizes))
    loss, wanted = plain(module, classify, batch)
    twice = [2 * gradient for gradient in wanted if gradient is not None]
    results = on_ranks(len(sizes), two_steps, sizes, call)
    for rank, (losses, found, shares) in enumerate(results):
        assert worst_difference(found, twice) < 1e-12
        for one in losses:
            assert one.dtype == torch.float64
            assert one.item() == pytest.approx(loss.item(), rel=1e-13)
        assert shares == sizes[rank]
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][1], strict=True)), "ranks differ in a bit"


def of_labels(rank: int) -> Any:
    module, (inputs, labels) = classifier(20)
    labels[:5] = labels[12:15] = -100  # a mean over those that are left
    part = part_of((inputs, labels), rank, [12, 8])
    with trainer_of(module, rank, more=1, prove="raise") as trainer:
        return error_of(lambda: trainer.step(classify, part)), gradients(module)


def test_a_failed_proof_is_a_failure_of_its_rank(on_ranks: Run) -> None:
    for (kind, text), found in on_ranks(2, of_labels):
        assert kind is Error
        assert "another result than on one device" in text
        assert found == [None] * len(found)


def update(module: nn.Module) -> None:
    """Gradient descent with clipping."""
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    descend(module)


def training(rank: int, sizes: list[int]) -> Any:
    module, batch = classifier(sum(sizes), seed=rank)  # only rank 0 begins with the parameters of the reference
    batch = classifier(sum(sizes))[1]
    with trainer_of(module, rank, verify_every=3) as trainer:
        for _ in range(4):
            (trainer.loss(classify, part_of(batch, rank, sizes)) / 2).backward()
            trainer.step(classify, part_of(batch, rank, sizes))
            update(module)
    return [parameter.detach() for parameter in module.parameters()]


def test_all_ranks_train_the_module_of_rank_0(on_ranks: Run) -> None:
    module, batch = classifier(17)
    for _ in range(4):
        (1.5 * classify(module, batch)).backward()
        update(module)
    for found in on_ranks(3, training, [9, 0, 8]):
        assert worst_difference(found, [parameter.detach() for parameter in module.parameters()]) < 1e-12


WEIGHTS = {
    "integers": torch.arange(20) % 5,
    "floats": torch.linspace(0.1, 3.0, 20, dtype=torch.float64),
    "none on rank 1": torch.cat([torch.ones(14), torch.zeros(6)]),
    "negative on rank 1": torch.cat([torch.ones(14), -torch.ones(6) / 4]),
    "that cancel on rank 1": torch.cat([torch.ones(14), torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, 0.0])]),
}


def per_item(module: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")


def weighted_mean(module: Any, batch: Any) -> Any:
    return (per_item(module, batch) * batch[2]).sum() / batch[2].sum()


def a_fifth_of_the_sum(module: Any, batch: Any) -> Any:
    return per_item(module, batch).sum() / 5


class Case(NamedTuple):
    """A step on ranks, and its objective on one device."""

    sizes: list[int]
    batch: Any
    loss_fn: Any
    objective: Any
    step: dict[str, Any]  # its options
    trainer: dict[str, Any] = {}  # noqa: RUF012
    module: Callable[[], nn.Module] = lambda: classifier(1)[0]


CASES = {
    f"weights: {kind}": Case(
        [14, 6], (*classifier(20)[1], weights), per_item, weighted_mean, {"weight": lambda b: b[2]}
    )
    for kind, weights in WEIGHTS.items()
}
CASES["costs"] = Case(
    [17, 7],
    words(24, 0)[1],
    loss_of_words,
    loss_of_words,
    {"cost": lambda b: b["length"]},
    {"more": 1},
    lambda: words(24, 0)[0],
)
CASES["total"] = Case([9, 0, 8], classifier(17)[1], per_item, a_fifth_of_the_sum, {"total": 5}, {"reduction": "sum"})
CASES["scaler"] = Case(
    [20, 0], classifier(20)[1], classify, classify, {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
)


def step_of(rank: int, kind: str) -> Any:
    case = CASES[kind]
    module = case.module()
    with trainer_of(module, rank, **case.trainer) as trainer:
        loss = trainer.step(case.loss_fn, part_of(case.batch, rank, case.sizes), **case.step)
    scale = case.step["scaler"].get_scale() if kind == "scaler" else 1.0
    return loss, [None if one is None else one / scale for one in gradients(module)]


@pytest.mark.parametrize("kind", CASES)
def test_weights_totals_costs_and_scalers_are_those_of_all_ranks(on_ranks: Run, kind: str) -> None:
    case = CASES[kind]
    loss, wanted = plain(case.module(), case.objective, case.batch)
    for found, theirs in on_ranks(len(case.sizes), step_of, kind):
        assert worst_difference(theirs, wanted) < 1e-12
        assert found.item() == pytest.approx(loss.item(), rel=1e-12)


def two_groups(rank: int, sizes: list[int]) -> Any:
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)}).double()
    batch = classifier(sum(sizes))[1]

    def run(part: str) -> Callable[[Any, Any], None]:
        def fn(networks: Any, micro_batch: Any) -> None:
            x, y = micro_batch.data
            micro_batch.backward(nn.functional.cross_entropy(networks["a"](x) * networks["b"](x), y))

        fn.__qualname__ = part
        return fn

    with trainer_of(module, rank) as trainer, trainer.batch(part_of(batch, rank, sizes)) as global_batch:
        global_batch.run(run("a"), parameters=module["a"])
        assert module["b"].weight.grad is None
        loss = global_batch.run(run("b"), parameters=module["b"])
    return loss, gradients(module), module.state_dict()


def test_runs_of_a_batch_sum_the_gradients_that_they_are_for(on_ranks: Run) -> None:
    batch = classifier(17)[1]
    results = on_ranks(3, two_groups, [9, 0, 8])
    module = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)}).double()
    module.load_state_dict(results[0][2])
    loss, wanted = plain(module, lambda m, b: nn.functional.cross_entropy(m["a"](b[0]) * m["b"](b[0]), b[1]), batch)
    for found, theirs, _ in results:
        assert found.item() == pytest.approx(loss.item(), rel=1e-13)
        assert worst_difference(theirs, wanted) < 1e-12


def terms(rank: int, sizes: list[int], totals: Any) -> Any:
    module, batch = tasks(sum(sizes))
    part = part_of(batch, rank, sizes)
    with trainer_of(module, rank) as trainer:
        losses = [trainer.step(losses_of, part, weight=COUNTS, total=totals)]
        losses.append(trainer.loss(losses_of, part, weight=COUNTS, total=totals))
        losses[1].backward()
        with trainer.batch(part, weight=COUNTS, total=totals) as global_batch:
            losses.append(global_batch.run(lambda m, micro: micro.backward(losses_of(m, micro.data))))
    return [loss.detach() for loss in losses], gradients(module)


@pytest.mark.parametrize("totals", [None, {"label": 3, "depth": 5}], ids=["own weights", "totals"])
@pytest.mark.parametrize("sizes", [[14, 6], [9, 0, 8]])
def test_each_term_is_divided_by_its_weight_over_all_ranks(on_ranks: Run, sizes: list[int], totals: Any) -> None:
    module, batch = tasks(sum(sizes))  # the last rank has no label
    assert not COUNTS["label"](batch)[sizes[0] :].any()
    counts = {name: int(of(batch).sum()) for name, of in COUNTS.items()}
    factors = {name: 1 if totals is None else count / totals[name] for name, count in counts.items()}

    def objective(m: Any, b: Any) -> torch.Tensor:
        return torch.stack([factors[key] * one for key, one in losses_of(m, b).items()]).sum()

    loss, wanted = plain(module, objective, batch)
    for found, theirs in on_ranks(len(sizes), terms, sizes, totals):
        assert worst_difference(theirs, [None if one is None else 3 * one for one in wanted]) < 1e-12
        for one in found:
            assert one.item() == pytest.approx(loss.item(), rel=1e-13)


def other_terms(rank: int) -> Any:
    module, batch = tasks(20)
    part = part_of(batch, rank, [14, 6])
    names = [{"label": None, "depth": None}, {"depth": None, "label": None}]
    with trainer_of(module, rank) as trainer:
        found = error_of(lambda: trainer.step(losses_of, part, weight=names[rank]))
        failing = error_of(lambda: trainer.step(losses_of, part, weight={**COUNTS, "depth": torch.ones(6)}))
        trainer.step(losses_of, part, weight=COUNTS)
    return found, failing, gradients(module)


def test_ranks_whose_terms_differ_or_fail_raise_and_go_on(on_ranks: Run) -> None:
    module, batch = tasks(20)
    wanted = plain(module, total_of, batch)[1]
    results = on_ranks(2, other_terms)
    for (kind, text), _, found in results:
        assert kind is InvalidArgument
        assert "with the same terms in weight= and total=" in text
        assert worst_difference(found, wanted) < 1e-12
    assert results[0][1][0] is InvalidArgument  # its weights have another length
    assert results[1][1][0] is Error
    assert "rank 0: InvalidArgument: weight['depth']: (6,)" in results[1][1][1]


class Mixed(nn.Module):
    """Parameters of several types. One gets a gradient on rank 1 only, and one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(6, 4).double()
        self.narrow = nn.Linear(4, 3)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = (self.wide(x) * self.turn).abs().float()
        out = self.narrow(hidden)
        return out * self.sometimes if bool((x[:, 0] > 1).any()) else out


def mixed_batch() -> tuple[torch.Tensor, torch.Tensor]:
    batch = classifier(20)[1]
    batch[0][:, 0] = 0
    batch[0][15, 0] = 2  # an item of rank 1
    return batch


def mixed_step(rank: int) -> Any:
    module = Mixed()
    with trainer_of(module, rank, balance="even", micro_batch=20) as trainer:
        trainer.step(classify, part_of(mixed_batch(), rank, [14, 6]))
    return gradients(module)


def test_types_may_be_mixed_and_gradients_may_exist_on_some_ranks_only(on_ranks: Run) -> None:
    batch = mixed_batch()
    module = Mixed()

    def reference(m: Any, b: Any) -> Any:  # the last three items are the micro-batch of rank 1's second device
        pieces = [(b[0][i:j], b[1][i:j], j - i) for i, j in ((0, 14), (14, 17), (17, 20))]
        return sum(nn.functional.cross_entropy(m(x), y) * n / 20 for x, y, n in pieces)

    wanted = plain(module, reference, batch)[1]
    found, theirs = on_ranks(2, mixed_step)
    assert all((a is None) == (b is None) for a, b in zip(found, wanted, strict=True))
    assert found[2:4] == [None, None]  # never and frozen
    for mine, other, right in zip(found, theirs, wanted, strict=True):
        assert mine is right is None or torch.equal(mine, other)
    found, wanted = (
        [torch.view_as_real(g) if g is not None and g.is_complex() else g for g in gs] for gs in (found, wanted)
    )
    assert worst_difference(found, wanted) < 1e-5  # the forward computes in float32 at its end


class Lonely(nn.Module):
    """The loss of slices without a marked item does not depend on the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))


def marked_loss(module: Any, batch: Any) -> Any:
    marked = batch[0][batch[0][:, 0] > 1]
    return (marked @ module.weight).sum() if len(marked) else torch.zeros((), dtype=torch.float64)


def lonely_step(rank: int, mark: float) -> Any:
    module, batch = Lonely(), mixed_batch()
    batch[0][15, 0] = mark
    with trainer_of(module, rank, reduction="sum") as trainer:
        error = error_of(lambda: trainer.step(marked_loss, part_of(batch, rank, [14, 6])))
    return error, gradients(module)


def test_a_rank_may_have_no_gradient_if_another_has_one(on_ranks: Run) -> None:
    wanted = plain(Lonely(), lambda m, b: marked_loss(m, b) / 20, mixed_batch())[1]
    for (kind, text), found in on_ranks(2, lonely_step, 2.0):
        assert kind is type(None), text
        assert worst_difference(found, wanted) < 1e-12


def test_no_gradient_on_any_rank_is_an_error_on_all(on_ranks: Run) -> None:
    for (kind, text), found in on_ranks(2, lonely_step, 0.0):
        assert kind is RuntimeError
        assert "does not require grad on any rank" in text
        assert found == [None]
