"""`check` of losses that draw random numbers: compared with the same draws for each item, or said not to be comparable."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.torch import CheckReport, DataParallel, UnseededDrawsWarning
from torch_support import classify, hosts

F = nn.functional
ITEMS = 12


def checked(module: nn.Module, loss_fn: Any, batch: Any, *, devices: int = 2, **options: Any) -> CheckReport:
    with DataParallel(module.double(), hosts(devices), **options.pop("trainer", {})) as trainer:
        return trainer.check(loss_fn, batch, **options)


def kinds(report: CheckReport) -> list[str]:
    return [cause.kind for cause in report.causes]


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(ITEMS, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(6), torch.arange(ITEMS) % 3


class Autoencoder(nn.Module):
    """Variational: a draw for each item between the two halves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
        return self.decoder(code), 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)


def evidence(module: Any, x: torch.Tensor) -> Any:
    output, divergence = module(x)
    return F.mse_loss(output, x) + divergence.sum(1).mean()


def denoising(module: Any, x: torch.Tensor) -> Any:
    time = torch.randint(0, 100, (len(x),))
    kept = torch.cos(time * 0.015).double()[:, None]
    noise = torch.randn_like(x)
    output = module(kept * x + (1 - kept.square()).sqrt() * noise)
    return F.mse_loss(output, noise)


class Attending(nn.Module):
    """`first`: the batch in dimension 1 inside, as nn.Transformer has it by default."""

    def __init__(self, first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = first
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=first)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) if self.first else self.layer(x.transpose(0, 1)).transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.recurrent = kind(8, 4, 3, dropout=0.4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.recurrent(x)[0]


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = network(nn.Dropout(0.5)), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x.requires_grad_(self.reentrant), use_reentrant=self.reentrant)


class Flat(nn.Module):
    """Drops out with items and places in one dimension, in either order."""

    def __init__(self, places_first: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.linear, self.places_first = nn.Linear(8, 8), places_first

    def forward(self, x: torch.Tensor) -> Any:
        x = x.transpose(0, 1) if self.places_first else x
        return F.dropout(self.linear(x.reshape(-1, 8)), 0.5).reshape(x.shape)


def squares(module: Any, x: torch.Tensor) -> Any:
    return module(x).square().mean()


def own_generator(generator: torch.Generator, draws: int = 1) -> Any:
    def loss_fn(module: Any, x: torch.Tensor) -> Any:
        return squares(module, x + sum(torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(draws)))

    return loss_fn


CASES: dict[str, Any] = {
    "variational": lambda: (Autoencoder(), evidence, inputs(6)),
    "denoising": lambda: (nn.Linear(6, 6), denoising, inputs(6)),
    "transformer": lambda: (Attending(), squares, inputs(5, 8)),
    "transformer, item second": lambda: (Attending(False), squares, inputs(5, 8)),
    "lstm": lambda: (Recurrent(nn.LSTM), squares, inputs(5, 8)),
    "gru": lambda: (Recurrent(nn.GRU), squares, inputs(5, 8)),
    "alpha dropout": lambda: (network(nn.AlphaDropout(0.3)), classify, labelled()),
    "feature dropout": lambda: (nn.Sequential(nn.Conv1d(5, 4, 1), nn.Dropout1d(0.5)), squares, inputs(5, 8)),
    "fused dropout": lambda: (
        nn.Linear(6, 6),
        lambda m, x: torch.native_dropout(m(x), 0.5, True)[0].square().mean(),
        inputs(6),
    ),
    "gumbel": lambda: (nn.Linear(6, 6), lambda m, x: (F.gumbel_softmax(m(x)) * x).mean(), inputs(6)),
    "recomputed": lambda: (Recomputed(False), lambda m, x: squares(m, x), inputs(6)),
    "recomputed, reentrant": lambda: (Recomputed(True), lambda m, x: squares(m, x.clone()), inputs(6)),
    "items and places in one": lambda: (Flat(False), squares, inputs(5, 8)),
    "places and items in one": lambda: (Flat(True), squares, inputs(5, 8)),
    "a generator of its own": lambda: (nn.Linear(6, 6), own_generator(torch.Generator().manual_seed(8)), inputs(6)),
    "chosen by probabilities": lambda: (
        nn.Linear(6, 6),
        lambda m, x: (m(x) * torch.bernoulli(x.sigmoid())).square().mean(),
        inputs(6),
    ),
}


@pytest.mark.parametrize(("case", "devices"), [*((case, 2) for case in CASES), ("transformer", 1), ("transformer", 3)])
def test_what_items_draw_is_drawn_again_in_every_split_and_compared(case: str, devices: int) -> None:
    module, loss_fn, batch = CASES[case]()
    report = checked(module, loss_fn, batch, devices=devices)
    assert kinds(report) == ["random draws"], report
    assert report.verdict == "valid: another split draws other random numbers, and apart from that nothing changes"
    assert len(report.splits) == 4
    assert report.largest < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_beside_the_draws_is_found(case: str) -> None:
    module, loss_fn, batch = CASES[case]()
    report = checked(module, lambda m, b: loss_fn(m, b) * (len(b[0]) if isinstance(b, tuple) else len(b)), batch)
    assert kinds(report) == ["random draws", "reduction"], report
    assert report.verdict.startswith("not exact: reduction (")


def test_items_dealt_out_by_cost_draw_the_same() -> None:
    report = checked(nn.Linear(6, 6), denoising, inputs(6), cost=torch.rand(ITEMS))
    assert kinds(report) == ["random draws"], report
    assert report.splits[-2].name.startswith("by cost")
    assert report.largest < 1e-9


def noisy_weights(module: Any, batch: Any) -> Any:
    noise = 0.1 * torch.randn(3, 6, dtype=torch.float64)
    return F.cross_entropy(F.linear(batch[0], module.weight + noise, module.bias), batch[1])


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
    numpy = pytest.importorskip("numpy")
    return classify(module, (batch[0] + torch.from_numpy(numpy.random.randn(*batch[0].shape)), batch[1]))


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


def test_a_generator_that_nothing_is_known_of_is_not_repeatable() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(1)
    report = checked(network(), lambda m, b: classify(m, b) * generator.random(), labelled())
    assert kinds(report) == ["not repeatable"]
    assert report.verdict == "cannot tell: the same batch gave two results"


def test_compiled_code_that_draws_cannot_be_told() -> None:
    compiled: Any = torch.compile(network(nn.Dropout(0.5)).double(), backend="eager")
    report = checked(compiled, classify, labelled())
    assert kinds(report) == ["unknown draws"]
    assert "compiled" in report.causes[0].text


def test_generators_are_where_they_were() -> None:
    own, module = torch.Generator().manual_seed(8), nn.Linear(6, 6)
    before, state = torch.get_rng_state(), own.get_state()
    for _ in range(10):  # devices that draw at the same moment
        checked(module, own_generator(own, draws=20), inputs(6))
    checked(module, denoising, inputs(6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), state)


def test_a_check_takes_nothing_from_what_a_step_says_of_draws() -> None:
    module, batch = Recurrent(nn.LSTM).double(), inputs(5, 8)
    with DataParallel(module, hosts(2)) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.check(squares, batch)
        with pytest.warns(UnseededDrawsWarning, match=r"nn\.LSTM"):
            trainer.step(squares, batch)
