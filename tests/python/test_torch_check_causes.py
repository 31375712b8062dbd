"""`check` names why a loss cannot be split, advises only what it tried, and leaves what lies outside of the module alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from check_cases import checked, kinds
from paceline import InvalidArgument
from paceline.torch import CheckReport, DataParallel
from torch_support import classifier, classify, gradients, hosts, module_of

F = nn.functional
ITEMS = 12


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def linear(inputs: int = 6, outputs: int = 3) -> nn.Linear:
    torch.manual_seed(6)
    return nn.Linear(inputs, outputs).double()


def advice(report: CheckReport) -> str:
    found = re.search(r"weight=(lambda batch: .*?) every split", report.causes[0].text)
    assert found is not None, report
    return found[1]


def test_rmse_is_no_mean_and_trains_by_one() -> None:
    batch = (made(ITEMS, 6), made(ITEMS, 3))

    def rmse(module: Any, batch: Any) -> Any:
        return F.mse_loss(module(batch[0]), batch[1]).sqrt()

    report = checked(linear(), rmse, batch)
    assert not report.exact
    assert "return the mean itself" in report.causes[0].text
    module = linear()
    rmse(module, batch).backward()
    (wanted, *_) = gradients(module)
    module.zero_grad()
    with DataParallel(module, hosts(2)) as trainer:
        loss = trainer.step(lambda m, b: rmse(m, b).square(), batch)
    (got, *_) = gradients(module)
    assert got is not None
    assert wanted is not None
    assert torch.allclose(got / (2 * loss.sqrt()), wanted, rtol=1e-12)


@pytest.mark.parametrize("where", ["closure", "module", "criterion", "made on the way"])
def test_class_weights_are_found_and_advised(where: str) -> None:
    class_w = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    batch = (made(ITEMS, 6), torch.tensor([0, 0, 1, 2, 0, 1, 0, 0, 2, 2, 1, 0]))
    module = linear()
    criterion = nn.CrossEntropyLoss(class_w.clone())
    loss_fn, name = {
        "closure": (lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=class_w), "class_w"),
        "module": (lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=m.class_w), "model.class_w"),
        "criterion": (lambda m, b: criterion(m(b[0]), b[1]), "criterion.weight"),
        "made on the way": (
            lambda m, b: F.cross_entropy(m(b[0]), b[1], torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
            "class_weights",
        ),
    }[where]
    if where == "module":
        module.register_buffer("class_w", class_w)
    report = checked(module, loss_fn, batch)
    assert kinds(report) == ["weight"], report
    assert "a mean over the class weights of its labels" in report.causes[0].text
    assert f"weight=lambda batch: {name}[batch[1]] every" in report.causes[0].text
    assert checked(module, loss_fn, batch, weight=lambda b: class_w[b[1]]).exact


def test_class_weights_of_labels_of_which_some_are_ignored() -> None:
    class_w = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    labels = (torch.arange(ITEMS * 5) ** 2 % 7 % 4).reshape(ITEMS, 5)
    batch = {"x": made(ITEMS, 5, 6), "labels": labels.where(labels < 3, -100)}

    def loss_fn(module: Any, batch: Any) -> Any:
        return F.cross_entropy(module(batch["x"]).transpose(1, 2), batch["labels"], class_w)

    report = checked(linear(), loss_fn, batch)
    assert kinds(report) == ["weight"], report
    assert checked(linear(), loss_fn, batch, weight=eval(advice(report), {"class_w": class_w})).exact


def next_token(m: Any, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A tiny language model in the manner of Hugging Face: it shifts the labels itself, and ignores -100."""
    causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=torch.float64)
    logits = m.head(m.layer(m.embedding(input_ids), src_mask=causal))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def causal() -> Any:
    torch.manual_seed(9)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return module_of(next_token, embedding=nn.Embedding(20, 8), layer=layer, head=nn.Linear(8, 20))


def documents(prompts: bool) -> dict[str, torch.Tensor]:
    """Of different lengths; with `prompts` labels begin with some that are ignored."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 20, (ITEMS, 9), generator=generator)
    lengths = torch.randint(3, 10, (ITEMS,), generator=generator)
    mask = torch.arange(9)[None, :] < lengths[:, None]
    labels = ids.where(mask, -100)
    if prompts:
        labels[torch.arange(ITEMS) % 3 == 0, :1] = -100
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask.long()}


@pytest.mark.parametrize("prompts", [False, True])
def test_a_causal_language_model_is_told_to_count_the_labels_that_it_shifts_to(prompts: bool) -> None:
    batch = documents(prompts)

    def loss_fn(module: Any, batch: Any) -> Any:
        return module(**batch)

    report = checked(causal(), loss_fn, batch)
    assert kinds(report) == ["weight"], report
    weight = eval(advice(report))
    assert torch.equal(weight(batch), (batch["labels"][:, 1:] != -100).sum(1))
    assert checked(causal(), loss_fn, batch, weight=weight).exact
    plain = checked(causal(), loss_fn, batch, weight=lambda b: (b["labels"] != -100).sum(1))
    if prompts:  # else the two are one apart for all, which is another mean as well
        assert "weight= says something else" in plain.causes[0].text
    assert eval(advice(plain))(batch).equal(weight(batch))


def test_padding_of_another_number_a_mask_and_lengths_are_tried() -> None:
    batch = documents(False)
    lengths = batch["attention_mask"].sum(1)

    def ignoring(module: Any, batch: Any) -> Any:
        return F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=19)

    labels = (batch["input_ids"] % 3).where(batch["attention_mask"] > 0, 19)
    report = checked(linear(), ignoring, {"x": made(ITEMS, 9, 6), "y": labels})
    assert advice(report) == "lambda batch: (batch['y'] != 19).sum(1)"

    def masked(module: Any, batch: Any) -> Any:
        return (module(batch[0]).square().sum(2) * batch[1]).sum() / batch[1].sum()

    report = checked(linear(), masked, (made(ITEMS, 9, 6), batch["attention_mask"].bool()))
    assert eval(advice(report))((None, batch["attention_mask"])).equal(lengths)

    def by_length(module: Any, batch: Any) -> Any:
        kept = torch.arange(9)[None, :] < batch[1][:, None]
        return module(batch[0])[kept].square().mean()

    report = checked(linear(), by_length, (made(ITEMS, 9, 6), lengths))
    assert advice(report) == "lambda batch: batch[1]"


def test_where_no_weight_fits_none_is_advised() -> None:
    def loss_fn(module: Any, batch: Any) -> Any:
        much = batch.exp().sum(1)
        return (module(batch).square().sum(1) * much).sum() / much.sum()

    report = checked(linear(), loss_fn, made(ITEMS, 6))
    assert kinds(report) == ["weight"], report
    assert "Nothing that was tried from the batch fits" in report.causes[0].text
    assert "-100" not in report.causes[0].text


def sequence(kind: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return module_of(lambda m, x: m.head(m.recurrent(x)[0]), recurrent=kind(6, 8, **options), head=nn.Linear(8, 3))


def tags(module: Any, batch: Any) -> Any:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_modules_that_take_dimension_0_for_time_are_named_with_what_to_do(kind: Any) -> None:
    batch = (made(9, ITEMS, 6), torch.arange(9 * ITEMS).reshape(9, ITEMS) % 3)
    report = checked(sequence(kind), tags, batch)
    told = f"recurrent ({kind.__name__}) takes dimension 0, which is split, for time."
    assert told in report.causes[0].text
    assert checked(sequence(kind), tags, batch, batch_dim=1).exact
    turned = [tensor.transpose(0, 1).contiguous() for tensor in batch]
    assert told in checked(sequence(kind), tags, turned).causes[0].text
    assert checked(sequence(kind, batch_first=True), tags, turned).exact
    mixed = (batch[0], torch.arange(ITEMS) % 3)
    for given, name in ((mixed, "batch[0]"), (mixed[::-1], "batch[1]")):
        message = re.escape(f"If {name} is [time, batch], pass {name}.transpose(0, 1).")
        with pytest.raises(InvalidArgument, match=message):
            checked(sequence(kind), tags, given)


@pytest.mark.parametrize("devices", [1, 2])
def test_parameters_that_are_not_registered_are_compared(devices: int) -> None:
    """A layer in a plain list, which PyTorch does not look into: on one device it is trained all the same."""
    module = module_of(lambda m, x: m.rest[0](m.first(x).tanh()), first=linear(6, 6), rest=[linear(6, 3)])
    report = checked(module, classify, (made(ITEMS, 6), torch.arange(ITEMS) % 3), devices=devices)
    assert report.exact, report
    assert "rest[0].weight" in report.differences
    assert [parameter.grad for parameter in module.rest[0].parameters()] == [None, None]


def test_a_copy_that_is_not_the_module_is_noticed() -> None:
    batch = (made(ITEMS, 6), torch.arange(ITEMS) % 3)
    module = module_of(lambda m, x: m.linear(x) / 2, linear=linear())
    replicate = {"replicate": lambda _: module_of(lambda m, x: m.linear(x), linear=linear())}
    report = checked(module, classify, batch, trainer=replicate)
    assert kinds(report) == ["devices"], report
    assert "replicate=" in report.causes[0].text
    assert max(split.largest for split in report.splits[:-1]) < 1e-9 < 0.1 < report.splits[-1].largest


def with_temperature(temperature: torch.Tensor) -> Any:
    return lambda module, batch: F.cross_entropy(module(batch[0]) * temperature.exp(), batch[1])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("call", ["check", "find_batch_size"])
@pytest.mark.parametrize("before", [None, 3.0])
def test_parameters_outside_of_the_module_keep_their_gradient(devices: int, call: str, before: float | None) -> None:
    temperature = nn.Parameter(torch.zeros((), dtype=torch.float64))
    own = None if before is None else torch.tensor(before, dtype=torch.float64)
    temperature.grad = own
    module, (x, y) = classifier(64)
    with DataParallel(module, hosts(devices)) as trainer:
        if call == "check":
            report = trainer.check(with_temperature(temperature), (x, y))
            assert report.exact, report
            assert "temperature (not of the module)" in report.differences
        else:
            trainer.find_batch_size(
                with_temperature(temperature), lambda n: (x[:n], y[:n]), smallest=16, largest=32, seconds=0.01
            )
    assert temperature.grad is own
    assert own is None or float(own) == before


def test_tensors_that_a_loss_makes_to_differentiate_by_are_no_parameters() -> None:
    def penalty(module: Any, batch: Any) -> Any:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return classify(module, batch) + slope.square().sum(1).mean()

    assert checked(linear(), penalty, (made(ITEMS, 6), torch.arange(ITEMS) % 3)).exact


def test_the_module_has_the_attributes_that_it_had() -> None:
    def store(m: Any, x: torch.Tensor) -> Any:
        m.calls += 1
        m.last = m.linear(x)
        return m.last

    module = module_of(store, linear=linear(), calls=0, last=None)
    assert checked(module, classify, (made(ITEMS, 6), torch.arange(ITEMS) % 3)).exact
    assert (module.calls, module.last) == (0, None)
