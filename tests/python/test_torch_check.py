"""`check`: each kind of loss and module that a split changes is named, also in the order that costs give, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from check_cases import checked, inputs, kinds, loss_of_words_each, network
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import DEVICES, TWO, classifier, classify, gradients, hosts, loss_of_words, module_of, words

F = nn.functional
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@DEVICES
def test_a_sum_over_items_is_exact(devices: int, dtype: torch.dtype) -> None:
    report = checked(network(nn.LayerNorm(8), dtype=dtype), batch=inputs(dtype=dtype), devices=devices)
    assert report.exact, report
    assert report.causes == ()
    assert report.items == 24
    assert report.largest <= report.tolerance < 1e-3
    assert set(report.differences) == {name for name, _ in network(nn.LayerNorm(8)).named_parameters()}
    assert [split.name for split in report.splits][:2] == ["2 x 12 items", "18 + 6 items"]
    assert report.splits[-1].name == ", ".join(f"host:{device} {24 // devices}" for device in range(devices))
    assert str(report).startswith("exact: loss and gradients do not depend on the split (24 items)\n")
    assert "host:0" in str(report)


def test_attention_whose_key_bias_has_no_gradient_is_exact_in_single_precision() -> None:
    module = module_of(
        lambda m, x: m.attention(x, x, x, need_weights=False)[0].square().mean((1, 2)),
        attention=nn.MultiheadAttention(6, 2, batch_first=True),
    )
    report = checked(module, lambda m, b: m(b).mean(), torch.randn(24, 5, 6))
    assert report.exact, report


@DTYPES
def test_batch_norm_is_named_with_its_place(dtype: torch.dtype) -> None:
    module = network(nn.BatchNorm1d(8), dtype=dtype)
    report = checked(module, batch=inputs(dtype=dtype))
    assert not report.exact
    assert kinds(report) == ["running statistics"]
    assert report.causes[0].modules == ("1",)
    assert "1 (BatchNorm1d)" in str(report)
    assert "GroupNorm" in str(report)
    assert report.verdict.startswith(
        f"not exact: running statistics (loss or gradients differ by up to {report.largest:.0%})"
    )
    assert report.differences["0.weight"] > 1e-2
    assert checked(module.eval(), batch=inputs(dtype=dtype)).exact


class Counting(nn.Identity):
    """Keeps a mean of what it saw, and does not use it."""

    mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_buffers_of_a_module_of_ones_own_are_named_and_the_gradients_called_exact() -> None:
    counting = Counting()
    counting.register_buffer("mean", torch.zeros(8))
    report = checked(network(counting))
    assert kinds(report) == ["running statistics"]
    assert report.causes[0].modules == ("1",)
    assert "1 (Counting) keeps buffers" in report.causes[0].text
    assert report.verdict == "exact gradients; buffers end up with other values for another split"
    assert not report.exact
    assert report.largest < report.tolerance


def test_dropout_is_called_valid_and_compared_with_the_same_masks() -> None:
    report = checked(network(nn.Dropout(0.5)))
    assert kinds(report) == ["random draws"]
    assert report.verdict.startswith("valid")
    assert not report.exact
    assert report.largest < report.tolerance
    assert [split.name for split in report.splits][-1] == "host:0 12, host:1 12"


def contrastive(module: Any, batch: Any) -> Any:
    y = F.normalize(module(batch[0]), dim=1)
    return F.cross_entropy(y @ y.T / 0.5, torch.arange(len(y)))


def pairwise(module: Any, batch: Any) -> Any:
    scores = module(batch[0])[:, 0]
    return F.softplus(scores[None, :] - scores[:, None]).mean()


def whitened(module: Any, batch: Any) -> Any:
    """One loss for each item, and yet they are not their own."""
    y = module(batch[0])
    return (y - y.mean(0)).square().sum(1)


def sized(module: Any, batch: Any) -> Any:
    return classify(module, (batch[0] * (1 + 1 / len(batch[0])), batch[1]))


def square_root(module: Any, batch: Any) -> Any:
    return classify(module, batch) / len(batch[0]) ** 0.5


CALLS: list[int] = []


def counted(module: Any, batch: Any) -> Any:
    CALLS.append(1)
    return classify(module, batch) * len(CALLS)


CAUSES: dict[str, tuple[Any, list[str]]] = {
    "contrastive": (contrastive, ["coupled items"]),
    "pairwise": (pairwise, ["coupled items"]),
    "whitened": (whitened, ["coupled items"]),
    "sized": (sized, ["batch size"]),
    "square root": (square_root, ["batch size"]),
    "state in Python": (counted, ["not repeatable"]),
}


@pytest.mark.parametrize(("dtype", "norm"), [(torch.float32, False), (torch.float64, False), (torch.float64, True)])
@pytest.mark.parametrize("case", CAUSES)
def test_causes_are_told_from_each_other_also_beside_batch_norm(case: str, dtype: torch.dtype, norm: bool) -> None:
    loss_fn, wanted = CAUSES[case]
    between = [nn.BatchNorm1d(8, track_running_stats=False)] if norm else []
    report = checked(network(*between, dtype=dtype), loss_fn, inputs(dtype=dtype))
    assert kinds(report) == [*(["running statistics"] if norm and wanted != ["not repeatable"] else []), *wanted]
    assert wanted != ["coupled items"] or "no split of it is exact" in str(report)


def test_a_regulariser_is_exact_in_a_mean_and_counted_too_often_in_a_sum() -> None:
    def mean(module: Any, batch: Any) -> Any:
        return classify(module, batch) + 0.1 * sum(p.square().sum() for p in module.parameters())

    def total(module: Any, batch: Any) -> Any:
        return F.cross_entropy(module(batch[0]), batch[1], reduction="sum") + sum(
            p.square().sum() for p in module.parameters()
        )

    assert checked(network(), mean).exact
    report = checked(network(), total, trainer={"reduction": "sum"})
    assert kinds(report) == ["batch size"]
    assert "regulariser" in str(report)


def test_code_for_one_size_only_is_told_with_its_error() -> None:
    report = checked(network(), lambda m, b: classify(m, (b[0].view(24, 6), b[1])))
    assert kinds(report) == ["error"]
    assert "2 x 12 items" in report.causes[0].text
    assert "RuntimeError" in report.causes[0].text
    assert report.largest == float("inf")
    assert not report.exact


@DTYPES
@pytest.mark.parametrize(("said", "returned"), [("mean", "sum"), ("sum", "mean")])
def test_the_wrong_reduction_is_named(said: str, returned: str, dtype: torch.dtype) -> None:
    def check(reduction: str) -> Any:
        return checked(
            network(dtype=dtype),
            lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction=returned),
            inputs(dtype=dtype),
            trainer={"reduction": reduction},
        )

    report = check(said)
    assert kinds(report) == ["reduction"]
    assert f'reduction="{returned}"' in str(report)
    assert check(returned).exact


@DTYPES
def test_a_mean_over_tokens_without_their_weight_is_named_and_exact_with_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(24, 4, 6, generator=generator, dtype=dtype)
    labels = torch.randint(0, 3, (24, 4), generator=generator)
    labels[torch.arange(4)[None, :] >= torch.arange(24)[:, None] % 4 + 1] = -100

    def loss_fn(module: Any, batch: Any) -> Any:
        return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())

    report = checked(network(dtype=dtype), loss_fn, (tokens, labels))
    assert kinds(report) == ["weight"]
    assert "weight=lambda batch: (batch[1] != -100).sum(1)" in report.causes[0].text
    assert checked(network(dtype=dtype), loss_fn, (tokens, labels), weight=lambda b: (b[1] != -100).sum(1)).exact


def test_a_weight_that_the_loss_does_not_use_is_named() -> None:
    report = checked(network(), weight=torch.arange(1, 25))
    assert kinds(report) == ["weight"]
    assert "leave weight= out" in str(report)


def test_the_trainers_own_micro_batches_and_a_tolerance_of_ones_own_are_used() -> None:
    report = checked(network(), trainer={"micro_batch": 5}, tolerance=1e-30)
    assert [split.name for split in report.splits][2] == "4 x 5 + 4 items"
    assert report.tolerance == 1e-30
    assert not report.exact


@DEVICES
def test_no_trace_is_left(devices: int, tmp_path: Path) -> None:
    module = network(nn.BatchNorm1d(8), nn.Dropout(0.2))
    batch, path = inputs(), tmp_path / "ledger"
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.write_ledger(path)
        trainer.step(classify, batch)

        def state() -> list[Any]:
            said = (trainer.report(), trainer.shares, trainer.events(), trainer.explain(), path.read_text())
            return [said, *gradients(module), *(buffer.clone() for buffer in module.buffers()), torch.get_rng_state()]

        own, (said, *before) = [p.grad for p in module.parameters()], state()
        trainer.check(classify, batch)
        now, *after = state()
        assert now == said
        assert all(map(torch.equal, after, before))
        assert all(p.grad is grad for p, grad in zip(module.parameters(), own, strict=True))
        assert all(part.training for part in module.modules())


@DEVICES
def test_no_trace_is_left_by_a_loss_that_raises(devices: int) -> None:
    module, batch = classifier(12)

    def loss_fn(replica: Any, part: Any) -> Any:
        classify(replica, part).backward()
        raise ZeroDivisionError

    with DataParallel(module, hosts(devices)) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.check(loss_fn, batch)
        assert gradients(module) == [None] * 4
        if devices > 1:
            with pytest.raises(InvalidArgument, match="uses the original module"):
                trainer.check(lambda _, b: classify(module, b), batch)
            assert gradients(module) == [None] * 4
        assert trainer.check(classify, batch).exact


def test_a_loss_that_fails_over_one_item_is_told_why() -> None:
    module, (x, y) = classifier(16)
    squeezed = nn.Sequential(module, nn.Linear(3, 1)).double()

    def loss_fn(m: Any, b: Any) -> Any:
        return nn.functional.binary_cross_entropy(m(b[0]).squeeze().sigmoid(), b[1])

    batch = (x, (y > 1).double())
    with DataParallel(squeezed, TWO, balance=[15, 1]) as trainer:
        with pytest.raises(ValueError, match="target size") as raised:
            trainer.step(loss_fn, batch)
        assert "squeeze(-1)" in str(getattr(raised.value, "__notes__", raised.value.__cause__))


def test_a_loss_whose_terms_cancel_is_exact() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 1).double()
    advantages = torch.randn(16, dtype=torch.double)

    def ratio_times_advantage(one: Any, part: Any) -> Any:
        logits = -one(part[0]).squeeze(-1).square()
        return -(torch.exp(logits - logits.detach()) * part[1])

    with DataParallel(module, TWO) as trainer:
        batch = torch.randn(16, 3, dtype=torch.double), advantages - advantages.mean()
        assert trainer.check(ratio_times_advantage, batch).exact
        assert trainer.verify_replicas(ratio_times_advantage, batch)


@pytest.mark.parametrize("batch_norm", ["apart", "synchronised"])
def test_batch_norm_without_parameters_and_statistics_is_checked_in_the_modules_type(batch_norm: Any) -> None:
    module = network(nn.BatchNorm1d(8, affine=False, track_running_stats=False))
    assert checked(module, trainer={"batch_norm": batch_norm}).exact == (batch_norm == "synchronised")


@DEVICES
def test_costs_are_checked_with_the_order_that_they_give(devices: int) -> None:
    module, batch = words(24, 7)
    report = checked(module, loss_of_words, batch, devices=devices, cost=batch["length"])
    assert report.exact, report
    assert report.splits[-2].name.startswith("by cost, ")
    assert report.splits[-2].differences.keys() == report.splits[0].differences.keys()
    assert report.splits[-1].name.startswith("host:0 ")
    assert gradients(module) == [None] * 3
    weighted = checked(module, loss_of_words_each, batch, devices=devices, cost=batch["length"], weight=torch.rand(24))
    assert weighted.exact, weighted


def test_a_loss_that_goes_by_the_order_is_named_with_costs_only() -> None:
    inputs_, labels = inputs()

    def with_its_neighbour(module: Any, batch: Any) -> Any:
        x, y = batch
        pairs = (x[0::2] + x[1::2]).repeat_interleave(2, dim=0)
        return F.cross_entropy(module(pairs), y)

    module = network()
    fours = {"micro_batch": 4}
    assert checked(module, with_its_neighbour, (inputs_, labels), trainer=fours).exact
    report = checked(module, with_its_neighbour, (inputs_, labels), trainer=fours, cost=torch.rand(24))
    assert kinds(report) == ["order"]
    assert not report.exact
    assert "Put what belongs to an item into the batch" in report.causes[0].text


def test_a_loss_that_raises_for_another_order_is_named_with_its_error() -> None:
    x, y = inputs()

    def in_order(module: Any, batch: Any) -> Any:
        number, x, y = batch
        if (number.diff() < 0).any():
            raise ValueError("not in order")
        return F.cross_entropy(module(x), y)

    numbered = (torch.arange(24), x, y)
    report = checked(network(), in_order, numbered, cost=torch.rand(24))
    assert kinds(report) == ["order"]
    assert "It raised ValueError: not in order." in report.causes[0].text
    # Longest first is the order that a slice has, so who needs that is content.
    assert checked(network(), in_order, numbered, cost=torch.arange(24, 0, -1)).exact


def test_what_cannot_be_checked_is_refused() -> None:
    module, batch = words(24, 7)
    without: Any = torch.no_grad()
    with DataParallel(module, TWO, granularity=2) as trainer:
        for call, message in (
            (lambda: trainer.check(loss_of_words, words(1, 7)[1]), "one item"),
            (lambda: without(trainer.check)(loss_of_words, batch), "check: called under no_grad"),
            (lambda: trainer.check(batch["length"], batch), "check: loss_fn is a Tensor"),  # type: ignore[arg-type]
            (lambda: trainer.check(loss_of_words, batch, cost=batch["length"]), "granularity="),
        ):
            with pytest.raises(InvalidArgument, match=message):
                call()
    with pytest.raises(InvalidArgument, match="cost: item 0 costs -1"):
        checked(module, loss_of_words, batch, cost=-torch.ones(24))
