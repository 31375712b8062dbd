"""What ``loss_fn`` returns beside the loss, and batches that are lists of samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, hosts, module_of, plain


def with_extras(module: Any, part: Any) -> Any:
    output = module(part[0])
    losses = nn.functional.cross_entropy(output, part[1], reduction="none")
    return losses, {
        "output": output,
        "right": output.argmax(1) == part[1],
        "norm": (output.square().mean(), losses.mean()),
    }


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("call", ["step", "loss"])
@pytest.mark.parametrize("cost", [None, torch.arange(17) % 5 + 1.0], ids=["items", "costs"])
def test_rows_come_back_in_the_order_of_the_batch_and_means_as_means(count: int, call: str, cost: Any) -> None:
    module, batch = classifier(17)
    losses, wanted = with_extras(module, batch)
    with DataParallel(module, hosts(count)) as trainer:
        assert trainer.extras is None
        loss = getattr(trainer, call)(with_extras, batch, cost=cost)
        extras: Any = trainer.extras
        assert loss.item() == pytest.approx(losses.mean().item())
        torch.testing.assert_close(extras["output"], wanted["output"])
        assert extras["right"].equal(wanted["right"])
        assert not extras["output"].requires_grad
        torch.testing.assert_close(extras["norm"], wanted["norm"])
        trainer.step(classify, batch)
        assert trainer.extras is None


def test_extras_may_be_any_nest_and_are_no_views_of_the_batch() -> None:
    @dataclasses.dataclass
    class Outputs:
        rows: Any
        nothing: None = None

    module, batch = classifier(16)
    before = batch[0].clone()
    with DataParallel(module, ["host:0"], micro_batch=16) as trainer:
        trainer.step(lambda m, b: (classify(m, b), [Outputs(b[0])]), batch)
        (outputs,) = trainer.extras
        assert trainer.check(with_extras, batch).exact
    assert outputs.nothing is None
    assert torch.equal(outputs.rows, before)
    outputs.rows.zero_()
    assert torch.equal(batch[0], before)


def test_means_are_weighted_like_the_loss_and_items_without_weight_have_rows() -> None:
    module, batch = classifier(16)
    weight = torch.tensor([0] * 12 + [1, 2, 3, 4])
    output = module(batch[0])

    def loss_fn(replica: Any, part: Any) -> Any:
        output = replica(part[0])
        losses = nn.functional.cross_entropy(output, part[1], reduction="none")
        share = part[2].double()
        return losses, (output, (output[:, 0] * share).sum() / share.sum())

    with DataParallel(module, TWO, micro_batch=4) as trainer:
        for _ in range(2):
            trainer.step(loss_fn, (*batch, weight), weight=weight)
            rows, mean = trainer.extras
            torch.testing.assert_close(rows, output)
            torch.testing.assert_close(mean, (output[:, 0] * weight).sum() / weight.sum())


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (
            lambda output, part: (output.argmax(1) == part[1]).sum(),
            r"extras is a 0-dim tensor of torch.int64.*per item",
        ),
        (lambda output, part: output[:1], r"extras has shape \(1, 3\) for \d+ items"),
        (lambda output, part: {"a": 3.0}, r"extras\['a'\] is float, not a tensor"),
        (lambda output, part: output if part[0].shape[0] == 3 else {"a": output}, "in one micro-batch and"),
        (lambda output, part: {"a": output} | ({} if part[0].shape[0] == 3 else {"b": output}), "has other entries"),
        (lambda output, part: [output] * part[0].shape[0], "has other entries"),
    ],
    ids=["count", "shape", "number", "structure", "keys", "length"],
)
def test_extras_that_cannot_be_put_together_are_refused_and_nothing_is_committed(extras: Any, message: str) -> None:
    module, batch = classifier(10)
    with DataParallel(module, TWO, balance=[0.3, 0.7]) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(lambda m, b: (classify(m, b), extras(m(b[0]), b)), batch)
    assert module[0].weight.grad is None


def test_another_function_without_extras_does_not_run_on_items_without_weight() -> None:
    module, batch = classifier(16)
    weight = torch.tensor([0] * 12 + [1] * 4)
    data = (*batch, weight)

    def bare(replica: Any, part: Any) -> Any:
        assert part[2].any()
        return classify(replica, part)

    with DataParallel(module, TWO, micro_batch=4) as trainer:
        trainer.step(with_extras, data, weight=weight)
        assert len(trainer.extras["output"]) == 16
        trainer.step(bare, data, weight=weight)


def samples_of(batch: Any) -> list[Any]:
    return list(zip(*batch, strict=True))


def collate(samples: list[Any]) -> Any:
    return tuple(torch.stack(list(entry)) for entry in zip(*samples, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_samples_are_put_together_on_the_devices(count: int) -> None:
    module, batch = classifier(17)
    expected = plain(module, classify, batch)[1]
    sizes: list[int] = []

    def noted(samples: list[Any]) -> Any:
        sizes.append(len(samples))
        return collate(samples)

    with DataParallel(module, hosts(count)) as trainer:
        trainer.loss(classify, samples_of(batch), collate=noted).backward()
        assert sum(sizes) == 17
        assert max(sizes) < 17 or count == 1
        assert_same_gradients(module, expected)
        torch.testing.assert_close(
            trainer.predict(lambda m, b: m(b[0]), samples_of(batch), collate=collate), module(batch[0])
        )
        assert trainer.check(classify, samples_of(batch), collate=collate).exact


def test_samples_of_unequal_length_are_padded_or_packed_per_micro_batch() -> None:
    torch.manual_seed(0)

    module = module_of(lambda m, sequences: m.head(m.cell(sequences)[1][0]), cell=nn.GRU(3, 5), head=nn.Linear(5, 2))
    lengths = [1 + (7 * item) % 11 for item in range(20)]
    samples = [(torch.randn(length, 3, dtype=torch.float64), item % 2) for item, length in enumerate(lengths)]

    def pack(samples: list[Any]) -> Any:
        sequences, targets = zip(*samples, strict=True)
        return pack_sequence(list(sequences), enforce_sorted=False), torch.tensor(targets)

    def pad(samples: list[Any]) -> Any:
        packed, targets = pack(samples)
        return pad_sequence([sequence for sequence, _ in samples]), packed, targets

    expected = plain(module, classify, pack(samples))[1]
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, samples, collate=pack)
        assert_same_gradients(module, expected)
        module.zero_grad()
        trainer.step(lambda m, b: classify(m, b[1:]), samples, collate=pad, cost=torch.tensor(lengths))
        assert_same_gradients(module, expected)


def test_samples_may_be_of_any_type_and_weights_are_made_from_them() -> None:
    module = nn.EmbeddingBag(128, 2, dtype=torch.float64)
    texts = ["riders", "of", "unequal", "strength", "in", "one", "line"]

    def encode(texts: list[str]) -> Any:
        offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
        return torch.tensor(list("".join(texts).encode())), offsets

    def loss_fn(replica: Any, part: Any) -> Any:
        return replica(*part).square().sum(1)

    lengths = torch.tensor([float(len(text)) for text in texts], dtype=torch.float64)
    expected = plain(module, lambda m, b: (loss_fn(m, b) * lengths).sum() / lengths.sum(), encode(texts))[1]
    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_fn, texts, collate=encode, weight=lambda texts: torch.tensor([len(text) for text in texts]))
    assert_same_gradients(module, expected)


@pytest.mark.parametrize(
    ("batch", "collate", "message"),
    [
        ([], collate, "the list of samples is empty"),
        (torch.ones(4, 2), collate, "Tensor together with collate="),
        ({"a": 1}, collate, "dict together with collate="),
        ((torch.ones(4, 2), torch.ones(4)), collate, "tuple together with collate="),
        ([1, 2], "list", "collate: str; a function"),
    ],
    ids=["empty", "tensor", "mapping", "a tuple of tensors", "no function"],
)
def test_samples_that_cannot_be_used_are_refused(batch: Any, collate: Any, message: str) -> None:
    with DataParallel(classifier()[0], TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(classify, batch, collate=collate)


def test_a_large_extra_is_named_by_explain() -> None:
    module, batch = classifier(16)

    def loss_fn(one: Any, part: Any) -> Any:
        loss = classify(one, part)
        return loss, {"logits": (loss * torch.ones(len(part[1]), columns)).float(), "loss": loss}

    columns = 2**18
    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_fn, batch)
        assert "Large: extras['logits'] has 17 MB for the whole batch" in trainer.explain()
        columns -= 1
        trainer.step(loss_fn, batch)
        assert "Large" not in trainer.explain()
        trainer.step(classify, batch)
        assert "Large" not in trainer.explain()
