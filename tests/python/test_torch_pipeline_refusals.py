"""What a pipeline refuses: the message says why, and what to do instead. Nothing of the step is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import InvalidArgument
from paceline.torch import Pipeline
from pipeline_models import chain, squares
from torch_support import TWO, gradients

BATCH = torch.linspace(-1, 1, 32).view(8, 4)
TWO_STAGES: dict[str, Any] = {"cuts": [0, 2], "micro_batches": 4, "schedule": "1f1b"}


class Calls(nn.Module):
    """Blocks that are called as `calls` says."""

    def __init__(self, calls: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = chain()
        self.calls = calls

    def forward(self, x: torch.Tensor) -> Any:
        return self.calls(self.layers, self.first(x))


def in_order(layers: Any, x: Any, order: list[int]) -> Any:
    for index in order:
        x = layers[index](x)
    return x


def spanning(layers: Any, x: Any, *, use_reentrant: bool) -> Any:
    x = layers[0](x)
    return layers[3](checkpoint(lambda x: layers[2](layers[1](x)), x, use_reentrant=use_reentrant))


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a block twice": (lambda layers, x: in_order(layers, x, [0, 1, 1, 2, 3]), "layers.1 again"),
    "out of order": (
        lambda layers, x: in_order(layers, x, [0, 2, 1, 3]),
        "layers.1 after layers.2.*order of the forward",
    ),
    "a loop": (lambda layers, x: in_order(layers, x, [0, 1, 2, 3] * 2), "layers.0 after layers.3.*DataParallel"),
    "a checkpoint over a cut": (
        lambda layers, x: spanning(layers, x, use_reentrant=False),
        "checkpoint.*each block by itself",
    ),
    "a reentrant checkpoint over a cut": (
        lambda layers, x: spanning(layers, x, use_reentrant=True),
        "use_reentrant=False",
    ),
    "a reentrant checkpoint at a cut": (
        lambda layers, x: layers[3](checkpoint(layers[2], layers[:2](x), use_reentrant=True)),
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_forward_that_cannot_be_cut(what: str) -> None:
    calls, message = CALLS[what]
    module = Calls(calls)
    with Pipeline(module, TWO, blocks="layers", **TWO_STAGES) as trainer:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=message):
                trainer.step(squares, BATCH)
        assert gradients(module) == [None] * 10
        module.calls = lambda layers, x: layers(x)
        trainer.step(squares, BATCH)  # the next step works


def penalty(module: Any, part: Any) -> Any:
    slope = torch.func.grad(lambda x: squares(module, x))(part)
    return squares(module, part) + slope.square().mean()


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": penalty,
    "vmap": lambda module, part: torch.func.vmap(module)(part).square().mean(),
    "jvp": lambda module, part: torch.func.jvp(module, (part,), (part,))[1].square().mean(),
    "jacrev": lambda module, part: torch.func.jacrev(module)(part).square().mean(),
}


@pytest.mark.parametrize("what", TRANSFORMS)
@pytest.mark.parametrize(("steps", "on_meta"), [(0, False), (3, False), (0, True)])
def test_transforms_of_torch_func(what: str, steps: int, on_meta: bool) -> None:
    module, options = chain(), TWO_STAGES
    if on_meta:
        full, module = module, chain().to("meta")
        parts = dict(full.named_modules())
        options = {**TWO_STAGES, "init": lambda name, part: part.load_state_dict(parts[name].state_dict())}
    with Pipeline(module, TWO, **options) as trainer:
        for _ in range(steps):
            trainer.step(squares, BATCH)
        module.zero_grad()
        with pytest.raises(InvalidArgument, match=r"transform of torch\.func.*use DataParallel"):
            trainer.step(TRANSFORMS[what], BATCH)
        assert gradients(module) == [None] * 8
        trainer.step(squares, BATCH)


def test_functional_call_alone_works() -> None:
    def loss_fn(module: Any, part: Any) -> Any:
        return torch.func.functional_call(module, dict(module.named_parameters()), (part,)).pow(2).mean()

    with Pipeline(chain(), TWO, **TWO_STAGES) as trainer:
        for _ in range(3):
            trainer.step(loss_fn, BATCH)


def test_a_loss_that_calls_the_module_twice() -> None:
    with Pipeline(chain(), TWO, **TWO_STAGES) as trainer:
        with pytest.raises(InvalidArgument, match=r"loss_fn that\s+calls the module twice"):
            trainer.step(lambda module, part: squares(module, part) + squares(module, part), BATCH)


def test_a_loss_that_calls_backward_itself() -> None:
    module = chain()

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = squares(replica, part)
        loss.backward(retain_graph=True)
        return loss

    with Pipeline(module, TWO, **TWO_STAGES) as trainer:
        for _ in range(4):
            trainer.step(squares, BATCH)
        module.zero_grad()
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="loss_fn called backward itself"):
                trainer.step(loss_fn, BATCH)
        assert gradients(module) == [None] * 8
        trainer.step(squares, BATCH)


def compiled(how: str) -> Any:
    module = chain()
    if how == "torch.compile":
        return torch.compile(module, backend="eager")
    module.compile(backend="eager")
    return module


ARGUMENTS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (lambda: compiled("torch.compile"), {}, r"block\.compile\(\)"),
    (lambda: compiled("module.compile"), {}, r"block\.compile\(\)"),
    (lambda: nn.Linear(4, 4), {}, "Name its blocks: blocks="),
    (chain, {"blocks": "layers"}, "no part of this name"),
    (chain, {"blocks": []}, "Name its blocks"),
    (chain, {"blocks": list(chain(2))}, r"blocks\[0\] is Sequential, and no part of the module"),
    (chain, {"blocks": 3}, "blocks"),
    (chain, {"cuts": [1, 2]}, "beginning with 0"),
    (chain, {"cuts": [0, 2, 1]}, "each greater than the one before"),
    (chain, {"cuts": [0, 4]}, "less than 4"),
    (chain, {"cuts": 2}, "cuts"),
    (chain, {"cuts": "auto"}, "give a list"),
    (chain, {"init": 3}, "init is 3"),
    (chain, {"cuts": [0, 1, 2]}, "2 devices"),
    (chain, {"schedule": "zero-bubble"}, "'auto', 'gpipe' or '1f1b'"),
    (chain, {"micro_batches": 0}, "micro_batches"),
    (chain, {"micro_batches": 2.5}, "micro_batches"),
    (chain, {"memory": "8 GB"}, "memory"),
    (chain, {"memory": {"host:7": 100}}, "host:7"),
    (chain, {"group": "world"}, r"DataParallel\(group=\)"),
    (chain, {"reduction": "max"}, "'mean' or 'sum'"),
    (lambda: chain().to("meta"), {}, r"init\(name, part\)"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), ARGUMENTS, ids=[str(number) for number in range(len(ARGUMENTS))]
)
def test_arguments_that_cannot_be_used(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Pipeline(make(), TWO, **options)


def test_costs_of_items() -> None:
    with Pipeline(chain(), TWO, **TWO_STAGES) as trainer:
        with pytest.raises(InvalidArgument, match=r"cost=.*Leave it out"):
            trainer.step(squares, BATCH, cost=torch.ones(8))
        with pytest.raises(InvalidArgument, match=r"cost=.*Leave it out"):
            trainer.check(squares, BATCH, cost=torch.ones(8))
        trainer.step(squares, BATCH)


def test_a_batch_smaller_than_micro_batches_runs_in_as_many_as_it_has_items() -> None:
    """The last batch of an epoch."""
    with Pipeline(chain(), TWO, **TWO_STAGES) as trainer:
        for items in (3, 8, 8, 8, 3, 1, 8):
            trainer.step(squares, BATCH[:items])
            assert len(trainer.report()["micro_batches"]) == min(items, 4)


def normalised() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))


def test_batch_normalisation_gets_two_items_in_each_micro_batch() -> None:
    for micro_batches in (None, 8):
        with Pipeline(normalised(), TWO, micro_batches=micro_batches) as trainer:
            for _ in range(6):
                trainer.step(squares, BATCH)
                assert min(trainer.report()["micro_batches"]) > 1


def test_check_names_cures_that_a_pipeline_has() -> None:
    with Pipeline(normalised(), TWO) as trainer:
        text = " ".join(str(trainer.check(squares, BATCH)).split())
    assert "Fix it with micro_batches=" in text
    assert "DataParallel" not in text


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("change", ["tied", "replaced", "added"])
def test_a_module_that_was_changed_since(change: str, steps: int) -> None:
    module, batch = chain(), torch.randn(8, 4)
    with Pipeline(module, TWO) as trainer:
        for _ in range(steps):
            trainer.step(squares, batch)
        if change == "tied":
            module[3][0].weight = module[0][0].weight
        elif change == "replaced":
            module[2] = chain(1)
        else:
            module[3].append(nn.Linear(4, 4))
        with pytest.raises(InvalidArgument, match="make a new Pipeline"):
            trainer.step(squares, batch)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("batch", r"Use loss\(\) for each loss"),
        ("write_ledger", "cuts and schedules are not decisions about items"),
        ("replay_claims", "The same cuts= and micro_batches= repeat a run"),
        ("state_dict", r"the weights are module.state_dict\(\)"),
        ("load_state_dict", "load_training_state"),
    ],
)
def test_calls_that_a_pipeline_does_not_have_say_why(call: str, why: str) -> None:
    with Pipeline(chain(), TWO) as trainer:
        assert not hasattr(trainer, call)
        with pytest.raises(AttributeError, match=rf"Pipeline has no {call}\(\): .*{why}"):
            getattr(trainer, call)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = trainer.nothing
