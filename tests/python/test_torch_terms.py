"""Losses of several terms, each of which is a mean over something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, hosts, plain

pytestmark = pytest.mark.usefixtures("proved")

F = nn.functional
COUNTS: dict[str, Any] = {"label": lambda b: b["label"] >= 0, "depth": lambda b: b["valid"].flatten(1).sum(1)}


class TwoTasks(nn.Module):
    """A label for an item, and a depth for each of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, 8)
        self.label = nn.Linear(8, 3)
        self.depth = nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x).tanh()
        return self.label(hidden), self.depth(hidden)


def tasks(items: int = 17, *, labelled: int = 7) -> tuple[TwoTasks, dict[str, torch.Tensor]]:
    """The first `labelled` items have a label. The pixels of some items are all invalid."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 3, (items,), generator=generator)
    label[labelled:] = -100
    valid = torch.rand(items, 4, generator=generator) < 0.6
    valid[2:5] = False
    return TwoTasks(), {
        "x": torch.randn(items, 6, generator=generator, dtype=torch.float64),
        "label": label,
        "target": torch.randn(items, 4, generator=generator, dtype=torch.float64),
        "valid": valid,
    }


def losses_of(module: Any, b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Both means. They are 0/0 for a slice without labels, or without valid pixels."""
    logits, depth = module(b["x"])
    return {
        "label": F.cross_entropy(logits, b["label"]),
        "depth": 3 * (depth - b["target"])[b["valid"]].square().mean(),
    }


def sums_of(module: Any, b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    logits, depth = module(b["x"])
    return {
        "label": F.cross_entropy(logits, b["label"], reduction="sum"),
        "depth": 3 * (depth - b["target"])[b["valid"]].square().sum(),
    }


def total_of(module: Any, b: Any) -> torch.Tensor:
    return torch.stack(list(losses_of(module, b).values())).sum()


@pytest.mark.parametrize(
    "options",
    [
        {"balance": [9, 1]},
        {"micro_batch": 2},  # some micro-batches have no labels, and some no valid pixels
        {"reduction": "sum", "balance": [0, 3, 1]},
    ],
    ids=["uneven shares", "micro-batches", "sums, and a device without items"],
)
def test_each_term_is_divided_by_its_own_weight(options: dict[str, Any]) -> None:
    module, batch = tasks()
    loss, wanted = plain(module, total_of, batch)
    fn = sums_of if "reduction" in options else losses_of
    with DataParallel(module, hosts(len(options.get("balance", TWO))), **options) as trainer:
        assert trainer.step(fn, batch, weight=COUNTS).item() == pytest.approx(loss.item(), rel=1e-13)
        assert_same_gradients(module, wanted)
        module.zero_grad()
        trainer.step(fn, batch, weight=COUNTS, cost=batch["valid"].sum(1))  # slices hold items from anywhere
        assert_same_gradients(module, wanted)
        module.zero_grad()
        (trainer.loss(fn, batch, weight=COUNTS) / 2).backward()
    assert_same_gradients(module, [None if one is None else one / 2 for one in wanted])


def test_a_term_without_weight_adds_nothing() -> None:
    module, batch = tasks(labelled=0)
    loss, wanted = plain(module, lambda m, b: losses_of(m, b)["depth"], batch)
    with DataParallel(module, TWO, micro_batch=3) as trainer:
        assert trainer.step(losses_of, batch, weight=COUNTS).item() == pytest.approx(loss.item(), rel=1e-13)
        assert_same_gradients(module, wanted)
        batch["valid"][:] = False
        with pytest.raises(InvalidArgument, match="no item has weight in any term"):
            trainer.step(losses_of, batch, weight=COUNTS)


def test_totals_per_term_make_one_mean_of_several_batches() -> None:
    module, batch = tasks(20)
    _, wanted = plain(module, total_of, batch)
    totals = {"label": COUNTS["label"](batch).sum(), "depth": int(batch["valid"].sum())}
    with DataParallel(module, TWO, balance=[2, 1]) as trainer:
        for begin, end in ((0, 9), (9, 20)):  # the second has no label
            part = {name: one[begin:end] for name, one in batch.items()}
            trainer.step(losses_of, part, weight=COUNTS, total=totals)
        assert_same_gradients(module, wanted)
        # One number is for all terms, and a term that total= does not name has its own weight.
        module.zero_grad()
        trainer.step(losses_of, batch, weight=COUNTS, total={"label": 2 * totals["label"]})
    _, wanted = plain(module, lambda m, b: losses_of(m, b)["label"] / 2 + losses_of(m, b)["depth"], batch)
    assert_same_gradients(module, wanted)


def test_extras_with_the_name_of_a_term_are_means_over_its_weight() -> None:
    module, batch = tasks()
    wanted = losses_of(module, batch)

    def with_extras(m: Any, b: Any) -> Any:
        losses = losses_of(m, b)
        return losses, {**losses, "mean": b["x"].mean(), "rows": b["label"]}

    with DataParallel(module, TWO, micro_batch=3) as trainer:
        trainer.step(with_extras, batch, weight=COUNTS)
        for name, value in (*wanted.items(), ("mean", batch["x"].mean())):
            assert trainer.extras[name].item() == pytest.approx(value.item(), rel=1e-12), name
        assert torch.equal(trainer.extras["rows"], batch["label"])


def test_terms_may_be_means_over_all_items_and_backward_may_be_by_hand() -> None:
    module, batch = tasks()
    weight = {"label": COUNTS["label"], "size": None}

    def fn(m: Any, b: Any) -> Any:
        logits, depth = m(b["x"])
        return {"label": F.cross_entropy(logits, b["label"], reduction="none"), "size": depth.square().mean()}

    _, wanted = plain(
        module, lambda m, b: F.cross_entropy(m(b["x"])[0], b["label"]) + m(b["x"])[1].square().mean(), batch
    )
    with DataParallel(module, TWO, micro_batch=4) as trainer:
        with trainer.batch(batch, weight=weight) as global_batch:
            global_batch.run(lambda m, micro: micro.backward(fn(m, micro.data)))
        assert_same_gradients(module, wanted)
        assert trainer.check(fn, batch, weight=weight).exact
        assert trainer.verify_replicas(fn, batch, weight=weight).agree
        found = trainer.find_batch_size(fn, lambda n: tasks(n)[1], weight=weight, smallest=8, largest=8, seconds=0.001)
        assert list(found.seconds) == [8]
        with pytest.raises(InvalidArgument, match="weight is a Tensor, which fits one size"):
            trainer.find_batch_size(fn, lambda n: tasks(n)[1], weight={"label": torch.ones(8)})


def test_a_check_names_the_term_whose_weight_is_wrong() -> None:
    module, batch = tasks(16, labelled=16)
    with DataParallel(module, TWO) as trainer:
        report = trainer.check(losses_of, batch, weight={"label": None, "depth": None})
        added = trainer.check(total_of, batch)
    assert not report.exact
    assert [cause.kind for cause in report.causes] == ["weight"]
    assert "term 'depth': loss_fn returns a mean over" in report.causes[0].text
    assert "return these as a mapping, and give weight= a mapping" in added.causes[0].text


@pytest.mark.parametrize(
    ("result", "options", "message"),
    [
        (lambda d: d["label"], {}, r"returned Tensor, and weight= names several terms.*'label', 'depth'"),
        (lambda d: {"label": d["label"]}, {}, r"returned 'label' without 'depth', and it has weight in this slice"),
        (lambda d: {**d, "more": d["label"]}, {}, r"with 'more', which weight= does not name"),
        (lambda d: {**d, "depth": 1.0}, {}, r"returned float as \['depth'\] for a slice.*the tensor itself"),
        (lambda d: d, {"weight": None}, r"returned dict for a slice.*name them in weight="),
        (lambda d: d, {"total": {"labels": 3}}, r"total: it names 'labels', and the terms in weight= are label, depth"),
        (lambda d: d, {"total": {"label": 0}}, r"total\['label'\]: 0; a positive"),
        (lambda d: d, {"weight": None, "total": {"label": 3}}, r"total: a mapping, and weight= is none"),
        (lambda d: d, {"weight": {}}, r"weight: a mapping with the keys \[\]"),
        (lambda d: d, {"weight": {**COUNTS, "label": torch.ones(3)}}, r"weight\['label'\]: \(3,\) for a batch of 17"),
        (lambda d: d, {"weight": {**COUNTS, "label": -torch.ones(17)}}, r"weight\['label'\]: .*sum to -17\.0"),
    ],
)
def test_terms_that_do_not_fit_are_named(result: Callable[[Any], Any], options: dict[str, Any], message: str) -> None:
    module, batch = tasks()
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(lambda m, b: result(losses_of(m, b)), batch, **{"weight": COUNTS, **options})


def test_batch_norm_over_the_batch_meets_also_for_terms_without_weight() -> None:
    module, batch = tasks(16, labelled=4)
    module.label = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()  # type: ignore[assignment]

    def fn(m: Any, b: Any) -> Any:
        logits, depth = m(b["x"])
        return {
            "label": F.cross_entropy(logits, b["label"], reduction="none"),
            "depth": (depth - b["target"]).square().mean(),
        }

    weight = {"label": COUNTS["label"], "depth": None}
    _, wanted = plain(module, lambda m, b: fn(m, b)["label"].sum() / (b["label"] >= 0).sum() + fn(m, b)["depth"], batch)
    with DataParallel(module, TWO, batch_norm="synchronised") as trainer:
        trainer.step(fn, batch, weight=weight)
        assert_same_gradients(module, wanted)
        with pytest.raises(InvalidArgument, match="no item of a slice has weight"):
            trainer.step(lambda m, b: {**fn(m, b), "label": losses_of(m, b)["label"]}, batch, weight=weight)


# ``total=``: a denominator that the caller gives, for `step`, `loss` and runs of a batch.


@pytest.mark.parametrize("total", [1, 37, 37.0, torch.tensor(37)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_total_takes_the_place_of_the_weight(reduction: Any, weighted: bool, total: Any) -> None:
    module, batch = classifier(16)
    weight = torch.arange(1, 17) if weighted else None
    counts = weight if weight is not None and reduction == "mean" else torch.ones(16)

    def items(module: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")

    loss, wanted = plain(module, lambda m, b: (items(m, b) * counts).sum() / total, batch)
    with DataParallel(module, TWO, reduction=reduction) as trainer:
        assert trainer.step(items, batch, weight=weight, total=total).item() == pytest.approx(loss.item(), rel=1e-12)
    assert_same_gradients(module, wanted)


def test_accumulation_over_unequal_batches_is_the_mean_over_all_their_items() -> None:
    module, batch = classifier(20)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        for part in (slice(0, 7), slice(7, 20)):
            trainer.loss(classify, (batch[0][part], batch[1][part]), total=20).backward()
    assert_same_gradients(module, expected)


def test_runs_of_a_batch_take_a_total_too() -> None:
    module, batch = classifier(16)
    expected = [one * 16 / 5 for one in plain(module, classify, batch)[1] if one is not None]
    with DataParallel(module, TWO) as trainer, trainer.batch(batch, total=5) as whole:
        whole.run(lambda m, part: part.backward(classify(m, part.data)))
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("total", [0, -1, float("nan"), float("inf"), "4", True, torch.ones(2)])
def test_totals_that_cannot_be_used_are_refused(total: Any) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"total: .*positive finite number"):
        trainer.step(classify, batch, total=total)
