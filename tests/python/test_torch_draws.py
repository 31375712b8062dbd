"""Which functions draw: with a mode on, they draw from a generator of its source what they draw without from the global one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch._devices.draws import Draw, DrawMode
from torch_support import output_of

F = nn.functional
D = torch.distributions
attention = F.scaled_dot_product_attention

IMAGES = torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
HEADS = torch.linspace(-1, 1, 2 * 2 * 5 * 4).view(2, 2, 5, 4)
ONES = torch.ones(3)
torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8)
MASK = torch.ones(5, 5, dtype=torch.bool).tril()
ADDED = HEADS[0, 0, :, :1] - HEADS[1, 0, :, 0]
FEW_BITS = HEADS.bfloat16()

CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(2, 3),
    "rand of a tuple": lambda: torch.rand((2, 3)),
    "rand of a size": lambda: torch.rand(size=(2, 3), dtype=torch.float64),
    "rand of nothing": lambda: torch.rand(()),
    "rand into": lambda: torch.rand(3, out=torch.empty(3)),
    "randn": lambda: torch.randn(2, 3),
    "randint": lambda: torch.randint(5, (3,)),
    "randint from": lambda: torch.randint(1, 5, (3,)),
    "randint by name": lambda: torch.randint(low=1, high=5, size=(3,)),
    "randperm": lambda: torch.randperm(7),
    "rand_like": lambda: torch.rand_like(IMAGES),
    "randn_like": lambda: torch.randn_like(IMAGES, dtype=torch.float64),
    "randint_like": lambda: torch.randint_like(IMAGES, 5),
    "randint_like from": lambda: torch.randint_like(IMAGES, low=3, high=9, dtype=torch.int64),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal of means": lambda: torch.normal(IMAGES, 1.0),
    "normal of deviations": lambda: torch.normal(mean=0.0, std=IMAGES.abs()),
    "normal of both": lambda: torch.normal(IMAGES, IMAGES.abs()),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "Tensor.bernoulli": lambda: (ONES / 2).bernoulli(),
    "bernoulli_": lambda: torch.empty(3).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(3).bernoulli_(ONES / 2),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 3),
    "Tensor.multinomial": lambda: torch.ones(5).multinomial(3),
    "poisson": lambda: torch.poisson(ONES),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "normal_": lambda: torch.empty(20).normal_(),
    "exponential_": lambda: torch.empty(3).exponential_(2.0),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(9),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "geometric_": lambda: torch.empty(3).geometric_(0.3),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "dropout": lambda: F.dropout(IMAGES, 0.3),
    "dropout in place": lambda: F.dropout(IMAGES.clone(), 0.3, inplace=True),
    "torch.dropout": lambda: torch.dropout(IMAGES, 0.3, True),
    "dropout1d": lambda: F.dropout1d(IMAGES[0], 0.3),
    "dropout1d of one": lambda: F.dropout1d(IMAGES[0, 0], 0.3),
    "dropout2d": lambda: F.dropout2d(IMAGES, 0.3),
    "dropout3d": lambda: F.dropout3d(IMAGES[None], 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(IMAGES, 0.3, True),
    "AlphaDropout in place": lambda: nn.AlphaDropout(0.3, True)(IMAGES.clone()),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGES, 0.3, True),
    "gumbel_softmax": lambda: F.gumbel_softmax(IMAGES),
    "rrelu": lambda: F.rrelu(IMAGES, training=True),
    "rrelu in place": lambda: F.rrelu(IMAGES.clone(), training=True, inplace=True),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "xavier_normal_": lambda: nn.init.xavier_normal_(torch.empty(3, 3)),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(3, 3)),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "init.normal_": lambda: nn.init.normal_(torch.empty(3, 3)),
    "Linear": lambda: nn.Linear(3, 3).weight,
    "attention": lambda: attention(HEADS, HEADS, HEADS, dropout_p=0.5),
    "causal attention": lambda: attention(HEADS, HEADS, HEADS, None, 0.5, True),
    "masked attention": lambda: attention(HEADS, HEADS, HEADS, MASK, 0.5, scale=0.3),
    "grouped attention": lambda: attention(HEADS, HEADS[:, :1], HEADS[:, :1], dropout_p=0.5, enable_gqa=True),
    "attention with numbers to add": lambda: attention(HEADS, HEADS, HEADS, ADDED, 0.5, scale=-0.3),
    "attention to nothing": lambda: attention(HEADS, HEADS, HEADS, MASK.tril(-1), 0.5),
    "attention of few bits": lambda: attention(FEW_BITS, FEW_BITS, FEW_BITS, dropout_p=0.5),
    "attention in autocast": lambda: torch.autocast("cpu")(attention)(HEADS, HEADS, HEADS, dropout_p=0.5),
    "MultiheadAttention": lambda: ATTENTION(IMAGES[0], IMAGES[0], IMAGES[0])[0],
    "MultiheadAttention, fused": lambda: ATTENTION(IMAGES[0], IMAGES[0], IMAGES[0], need_weights=False)[0],
    "TransformerEncoderLayer": lambda: ENCODER(IMAGES[0]),
    "Gamma": lambda: D.Gamma(ONES, ONES).rsample(),
    "Dirichlet": lambda: D.Dirichlet(ONES).rsample(),
    "Categorical": lambda: D.Categorical(ONES).sample(),
    "Binomial": lambda: D.Binomial(10, ONES / 2).sample(),
    "Poisson": lambda: D.Poisson(ONES).sample(),
    "Normal": lambda: D.Normal(IMAGES, IMAGES.abs()).rsample(),
    "Normal, sampled": lambda: D.Normal(IMAGES, IMAGES.abs()).sample(),
    "VonMises": lambda: D.VonMises(ONES, ONES).sample(),
    "MultivariateNormal": lambda: D.MultivariateNormal(ONES, torch.eye(3)).rsample(),
    "svd_lowrank": lambda: torch.svd_lowrank(IMAGES[0, 0])[0],
}
EVERY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


class Own:
    """Draws each call as it is."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.drawn = 0
        self.names: list[str] = []
        self.unreached = self.names.append

    def draw(self, draw: Draw) -> Any:
        self.drawn += 1
        return draw(self.generator)

    def given(self, generator: torch.Generator) -> None:
        self.names.append("a generator of the caller's")


def seeded(call: Callable[[], Any], source: Own | None = None, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of dropout2d and batch_first
        if source is None:
            return call()
        source.generator.manual_seed(seed)
        with DrawMode(source):
            return call()


@EVERY_CALL
def test_a_call_draws_from_the_source_what_it_draws_from_the_global_generator(call: Callable[[], torch.Tensor]) -> None:
    wanted, source = seeded(call), Own()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    got = seeded(call, source)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was drawn from"
    assert source.drawn
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    torch.testing.assert_close(got, wanted)
    assert not torch.equal(seeded(call, source, 4), got) or got.numel() < 2


def attend(x: torch.Tensor, p: float, training: bool) -> Any:
    query = x.flatten(2)
    return F.scaled_dot_product_attention(query, 2 * query, 3 * query, None, p if training else 0.0, True)


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout, attend])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_has_the_gradient_of_pytorchs(drop: Callable[..., Any], p: float, training: bool) -> None:
    results = []
    for source in (None, Own()):
        x = IMAGES.double().requires_grad_()
        output = seeded(partial(drop, x, p, training), source)
        output.square().sum().backward()
        results.append((output, x.grad))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)


def test_attention_with_dropout_warns_of_nothing() -> None:
    """In a process of its own: PyTorch warns once in each."""
    output_of("""
        import warnings

        def loss_fn(module, x):
            return nn.functional.scaled_dot_product_attention(module(x), x, x, dropout_p=0.1).square().mean()

        warnings.simplefilter("error")
        with DataParallel(nn.Linear(4, 4), ["host:0", "host:1"], balance="even") as trainer:
            trainer.step(loss_fn, torch.randn(4, 2, 5, 4))
    """)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_that_is_none_is_refused_as_by_pytorch(p: float) -> None:
    for call in (lambda: F.dropout(IMAGES, p), lambda: torch.dropout(IMAGES, p, True)):
        with pytest.raises((ValueError, RuntimeError), match="between 0 and 1"):
            seeded(call, Own())


def test_a_generator_of_the_callers_own_and_what_is_not_on_the_host_stay() -> None:
    source, generator = Own(), torch.Generator().manual_seed(9)
    got = seeded(lambda: torch.rand(3, generator=generator), source)
    assert torch.equal(got, torch.rand(3, generator=torch.Generator().manual_seed(9)))
    for call in (
        lambda: torch.rand(3, device="meta"),
        lambda: torch.rand_like(IMAGES, device="meta"),
        lambda: F.dropout(IMAGES.to("meta")),
        lambda: torch.empty(3, device="meta").normal_(),
    ):
        assert seeded(call, source).is_meta
    assert not source.drawn
    assert source.names == ["a generator of the caller's"]


RECURRENT = {nn.LSTM: "nn.LSTM", nn.GRU: "nn.GRU", nn.RNN: "nn.RNN"}


@pytest.mark.parametrize(("kind", "name"), RECURRENT.items(), ids=RECURRENT.values())
def test_what_cannot_be_reached_is_named(kind: Any, name: str) -> None:
    source, module = Own(), kind(4, 3, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(IMAGES[0], torch.tensor([3, 3, 2, 1]))
    seeded(lambda: (module(IMAGES[0]), module(packed)), source)
    assert source.names == [f"the dropout of {name}"] * 2
    module.eval()
    seeded(lambda: module(IMAGES[0]), source)
    seeded(lambda: kind(4, 3, 2)(IMAGES[0]), source)
    assert len(source.names) == 2


VMAPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "in place": lambda x: x.clone().normal_(),
    "rand": lambda x: x + torch.rand(4),
    "dropout of what all share": lambda x: x + F.dropout(HEADS[0, 0], 0.5),
    "dropout2d of what all share": lambda x: x + F.dropout2d(IMAGES, 0.5),
    "alpha_dropout of what all share": lambda x: x + F.alpha_dropout(HEADS[0, 0], 0.5, True),
    "rand_like of what all share": lambda x: x + torch.rand_like(HEADS[0, 0]),
    "randn_like of what all share": lambda x: x + torch.randn_like(HEADS[0, 0], dtype=torch.float64),
    "randint_like of what all share": lambda x: x + torch.randint_like(HEADS[0, 0], 7),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5),
}


@pytest.mark.parametrize("call", VMAPPED.values(), ids=VMAPPED)
@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_vmap_has_its_say(call: Callable[[torch.Tensor], torch.Tensor], randomness: str) -> None:
    def run() -> Any:
        return torch.func.vmap(call, randomness=randomness)(torch.ones(3, 4))

    if randomness == "error":
        with pytest.raises(RuntimeError, match="random operation"):
            seeded(run, Own())
    else:
        torch.testing.assert_close(seeded(run, Own()), seeded(run))
