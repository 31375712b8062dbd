"""`check` of losses that draw random numbers: compared with the same draws for each item, or said not to be comparable."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from check_cases import checked, kinds, network
from paceline.torch import DataParallel, UnseededDrawsWarning
from torch_support import classify, hosts, module_of

F = nn.functional
ITEMS = 12


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(ITEMS, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(6), torch.arange(ITEMS) % 3


def variational(m: Any, x: torch.Tensor) -> Any:
    mean, log_variance = m.encoder(x).chunk(2, 1)
    code = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
    return m.decoder(code), 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)


def evidence(module: Any, x: torch.Tensor) -> Any:
    output, divergence = module(x)
    return F.mse_loss(output, x) + divergence.sum(1).mean()


def denoising(module: Any, x: torch.Tensor) -> Any:
    time = torch.randint(0, 100, (len(x),))
    kept = torch.cos(time * 0.015).double()[:, None]
    noise = torch.randn_like(x)
    output = module(kept * x + (1 - kept.square()).sqrt() * noise)
    return F.mse_loss(output, noise)


def attending(m: Any, x: torch.Tensor) -> Any:
    first = m.layer.self_attn.batch_first  # else the batch is in dimension 1, as nn.Transformer has it by default
    return m.layer(x) if first else m.layer(x.transpose(0, 1)).transpose(0, 1)


def attention(first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=first)


def recurrent(kind: Any) -> Any:
    return module_of(lambda m, x: m.cells(x)[0], cells=kind(8, 4, 3, dropout=0.4, batch_first=True))


def recomputed(reentrant: bool) -> Any:
    return module_of(
        lambda m, x: checkpoint(m.inner, x.requires_grad_(reentrant), use_reentrant=reentrant),
        inner=network(nn.Dropout(0.5)),
    )


def flat(places_first: bool) -> Any:
    """Drops out with items and places in one dimension, in either order."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = x.transpose(0, 1) if places_first else x
        return F.dropout(m.linear(x.reshape(-1, 8)), 0.5).reshape(x.shape)

    return module_of(forward, linear=nn.Linear(8, 8))


def squares(module: Any, x: torch.Tensor) -> Any:
    return module(x).square().mean()


def own_generator(generator: torch.Generator, draws: int = 1) -> Any:
    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        return squares(module, x + sum(torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(draws)))

    return loss_fn


CASES: dict[str, Any] = {
    "variational": lambda: (
        module_of(variational, encoder=nn.Linear(6, 4), decoder=nn.Linear(2, 6)),
        evidence,
        inputs(6),
    ),
    "denoising": lambda: (nn.Linear(6, 6), denoising, inputs(6)),
    "transformer": lambda: (module_of(attending, layer=attention(True)), squares, inputs(5, 8)),
    "transformer, item second": lambda: (module_of(attending, layer=attention(False)), squares, inputs(5, 8)),
    "lstm": lambda: (recurrent(nn.LSTM), squares, inputs(5, 8)),
    "gru": lambda: (recurrent(nn.GRU), squares, inputs(5, 8)),
    "alpha dropout": lambda: (network(nn.AlphaDropout(0.3)), classify, labelled()),
    "feature dropout": lambda: (nn.Sequential(nn.Conv1d(5, 4, 1), nn.Dropout1d(0.5)), squares, inputs(5, 8)),
    "fused dropout": lambda: (
        nn.Linear(6, 6),
        lambda m, x: torch.native_dropout(m(x), 0.5, True)[0].square().mean(),
        inputs(6),
    ),
    "gumbel": lambda: (nn.Linear(6, 6), lambda m, x: (F.gumbel_softmax(m(x)) * x).mean(), inputs(6)),
    "recomputed": lambda: (recomputed(False), lambda m, x: squares(m, x), inputs(6)),
    "recomputed, reentrant": lambda: (recomputed(True), lambda m, x: squares(m, x.clone()), inputs(6)),
    "items and places in one": lambda: (flat(False), squares, inputs(5, 8)),
    "places and items in one": lambda: (flat(True), squares, inputs(5, 8)),
    "a generator of its own": lambda: (nn.Linear(6, 6), own_generator(torch.Generator().manual_seed(8)), inputs(6)),
    "chosen by probabilities": lambda: (
        nn.Linear(6, 6),
        lambda m, x: (m(x) * torch.bernoulli(x.sigmoid())).square().mean(),
        inputs(6),
    ),
}


DRAWN = [*((case, 2, False) for case in CASES), ("transformer", 1, False), ("transformer", 3, False)]


@pytest.mark.parametrize(("case", "devices", "costs"), [*DRAWN, ("denoising", 2, True), ("lstm", 2, True)])
def test_what_items_draw_is_drawn_again_in_every_split_and_compared(case: str, devices: int, costs: bool) -> None:
    module, loss_fn, batch = CASES[case]()
    report = checked(module, loss_fn, batch, devices=devices, cost=torch.rand(ITEMS) if costs else None)
    assert kinds(report) == ["random draws"], report
    assert report.verdict == "valid: another split draws other random numbers, and apart from that nothing changes"
    assert len(report.splits) == 4 + costs
    assert report.splits[-2].name.startswith("by cost") == costs
    assert report.largest < 1e-9


@pytest.mark.parametrize("case", ["variational", "transformer", "gru", "alpha dropout", "recomputed"])
def test_what_is_wrong_beside_the_draws_is_found(case: str) -> None:
    module, loss_fn, batch = CASES[case]()
    report = checked(module, lambda m, b: loss_fn(m, b) * (len(b[0]) if isinstance(b, tuple) else len(b)), batch)
    assert kinds(report) == ["random draws", "reduction"], report
    assert report.verdict.startswith("not exact: reduction (")


@pytest.mark.parametrize("features", [6, ITEMS])
def test_a_draw_that_items_share_is_valid_in_expectation_only(features: int) -> None:
    """Even where its size is that of the batch."""

    def noisy(module: Any, batch: Any) -> Any:
        weight = module.weight + 0.1 * torch.randn(features, 6, dtype=torch.float64)
        return F.linear(batch[0], weight).square().mean()

    report = checked(nn.Linear(6, features), noisy, labelled())
    assert kinds(report) == ["shared draws"]
    assert report.verdict.startswith("valid in expectation: ")
    assert f"randn of shape ({features}, 6)" in report.causes[0].text
    assert report.largest < 1e-9


def mixed(module: Any, batch: Any) -> Any:
    order = torch.randperm(len(batch[0]))
    return classify(module, ((batch[0] + batch[0][order]) / 2, batch[1]))


def some(module: Any, batch: Any) -> Any:
    """Noise for the entries above zero only, of which every slice has its own number."""
    x = batch[0].clone()
    x[x > 0] += torch.randn(int((x > 0).sum()), dtype=x.dtype)
    return classify(module, (x, batch[1]))


def by_python(module: Any, batch: Any) -> Any:
    return classify(module, batch) * random.random()


def by_numpy(module: Any, batch: Any) -> Any:
    return classify(module, (batch[0] + torch.from_numpy(np.random.randn(*batch[0].shape)), batch[1]))  # noqa: NPY002


def by_own_generator(module: Any, batch: Any) -> Any:
    return classify(module, batch) * GENERATOR.random()


GENERATOR = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [(mixed, "randperm"), (some, "randn"), (by_python, "Python's random"), (by_numpy, "numpy.random")],
)
def test_draws_that_cannot_be_repeated_for_a_part_leave_nothing_to_tell(loss_fn: Any, told: str) -> None:
    state = random.getstate()
    report = checked(network(), loss_fn, labelled())
    assert kinds(report) == ["unknown draws"], report
    assert report.verdict.startswith("cannot tell: ")
    assert told in report.causes[0].text
    assert "pass them in the batch" in report.causes[0].text
    assert report.splits == ()
    assert not report.exact
    assert random.getstate() == state


def test_draws_of_which_nothing_is_known_cannot_be_told() -> None:
    report = checked(network(), by_own_generator, labelled())
    assert kinds(report) == ["not repeatable"]
    assert report.verdict == "cannot tell: the same batch gave two results"
    report = checked(torch.compile(network(nn.Dropout(0.5)), backend="eager"), classify, labelled())  # type: ignore[arg-type]
    assert kinds(report) == ["unknown draws"]
    assert "compiled" in report.causes[0].text


def test_generators_are_where_they_were() -> None:
    own, module = torch.Generator().manual_seed(8), nn.Linear(6, 6)
    before, state = torch.get_rng_state(), own.get_state()
    for _ in range(4):  # devices that draw at the same moment
        checked(module, own_generator(own, draws=20), inputs(6))
    checked(module, denoising, inputs(6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), state)


def test_a_check_takes_nothing_from_what_a_step_says_of_draws() -> None:
    module, batch = recurrent(nn.LSTM).double(), inputs(5, 8)
    with DataParallel(module, hosts(2)) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.check(squares, batch)
        with pytest.warns(UnseededDrawsWarning, match=r"nn\.LSTM"):
            trainer.step(squares, batch)
