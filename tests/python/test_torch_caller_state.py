"""What the caller has set holds in the workers, too: PyTorch's per-thread state, and the default device."""

from __future__ import annotations

import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline
from rank_processes import Run, part_of
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    noting,
    plain,
    worst_difference,
)

DEVICES = pytest.mark.parametrize("devices", [1, 2])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_holds_in_the_workers(devices: int, dtype: torch.dtype) -> None:
    module, batch = classifier(dtype=torch.float32)
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        output = replica(part[0])
        seen.append((output.dtype, torch.is_autocast_cache_enabled()))
        return torch.nn.functional.cross_entropy(output.float(), part[1])

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for cache in (True, False):
            with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
                loss = trainer.step(loss_fn, batch)
            assert seen[-devices:] == [(dtype, cache)] * devices
            assert loss.dtype == torch.float32
        trainer.step(loss_fn, batch)
        assert seen[-devices:] == [(torch.float32, True)] * devices
        with torch.autocast("cpu", dtype=dtype):
            assert trainer.predict(batch[0]).dtype == dtype


def test_gradients_under_autocast_are_those_of_one_device_under_autocast() -> None:
    module, batch = classifier(64, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, wanted = plain(module, classify, batch)
        with DataParallel(module, TWO, balance=[3, 1]) as trainer:
            trainer.step(classify, batch)
    assert worst_difference(gradients(module), wanted) < 2e-2  # bfloat16 has 8 bits
    _, exact = plain(module, classify, batch)
    assert worst_difference(gradients(module), exact) > 1e-5, "this was not autocast"


class _Scaled(torch.autograd.Function):
    """Multiplies by a matrix, in the backward too, where it notes whether autocast is on."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, values: Any, matrix: Any) -> Any:
        ctx.save_for_backward(matrix)
        return values.float() @ matrix

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _Scaled.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient.float() @ ctx.saved_tensors[0].mT, None


def _scaled() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    apply: Any = _Scaled.apply
    module = module_of(lambda m, x: apply(m.layers(x), m.matrix), layers=layers, matrix=torch.randn(8, 8))
    return module.float(), torch.randn(6, 8)


def _squares(module: Any, batch: torch.Tensor) -> Any:
    return module(batch).float().square().mean()


ONE = ["host:0"]
TRAININGS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "step": lambda m, b: DataParallel(m, ONE).step(_squares, b),
    "step of a pipeline": lambda m, b: Pipeline(m, TWO, micro_batches=1).step(_squares, b),
    "loss": lambda m, b: DataParallel(m, ONE).loss(_squares, b).backward(),
    "call": lambda m, b: _squares(DataParallel(m, ONE), b).backward(),
    "run": lambda m, b: DataParallel(m, ONE).batch(b).run(lambda one, part: part.backward(_squares(one, part.data))),
    "check": lambda m, b: DataParallel(m, ONE).check(_squares, b),
}


@pytest.mark.parametrize("training", TRAININGS)
def test_backward_runs_outside_of_the_callers_autocast(training: str) -> None:
    module, batch = _scaled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _squares(module, batch)
    loss.backward()
    wanted = gradients(module)
    module.zero_grad()
    _Scaled.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        TRAININGS[training](module, batch)
        assert torch.is_autocast_enabled("cpu"), "the caller's own is as before"
    assert set(_Scaled.seen) == {False}
    assert training == "check" or worst_difference(gradients(module), wanted) == 0.0


def chosen_by_autocast() -> torch.dtype:
    with torch.autocast("cpu"):
        return nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


autocast_type: Any = functools.partial(torch.set_autocast_dtype, "cpu")


class Setting(NamedTuple):
    """A setting of the process or the thread, for a with block."""

    change: Callable[[Any], object]
    value: Any
    before: Any

    def __enter__(self) -> None:
        self.change(self.value)

    def __exit__(self, *_: object) -> None:
        self.change(self.before)


def device_type() -> str:
    return torch.empty(1).device.type


SETTINGS: dict[str, tuple[Any, Callable[[], Any], Any]] = {
    "with torch.device": (torch.device("meta"), device_type, "meta"),
    "default device": (Setting(torch.set_default_device, "meta", None), device_type, "meta"),
    "type of autocast": (Setting(autocast_type, torch.float16, torch.bfloat16), chosen_by_autocast, torch.float16),
    "default type": (
        Setting(torch.set_default_dtype, torch.float64, torch.float32),
        torch.get_default_dtype,
        torch.float64,
    ),
    "deterministic": (
        Setting(torch.use_deterministic_algorithms, True, False),
        torch.are_deterministic_algorithms_enabled,
        True,
    ),
}


@DEVICES
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_caller_hold_in_the_workers(devices: int, name: str) -> None:
    context, read, value = SETTINGS[name]
    module, batch = classifier()
    seen: list[Any] = []
    before = read()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with context:
            trainer.step(noting(lambda m, b: seen.append(read())), batch)
        trainer.step(noting(lambda m, b: seen.append(read())), batch)
    assert seen == [value] * devices + [before] * devices
    assert before != value


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.linear = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linear += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("devices", "balance"), [(1, "even"), (3, "even"), (2, [3, 1]), (2, "auto")], ids=str)
def test_function_and_dispatch_modes_see_what_every_device_does(devices: int, balance: Any) -> None:
    module, batch = classifier(32)
    functions = CountingFunctions()
    with FlopCounterMode(display=False) as wanted:
        plain(module, classify, batch)
    with DataParallel(module, hosts(devices), balance=balance) as trainer:
        with functions, FlopCounterMode(display=False) as counter:
            trainer.step(classify, batch)
        assert counter.get_total_flops() == wanted.get_total_flops() > 0
        seen = functions.linear
        assert seen == 2 * devices or balance == "auto"
        trainer.step(classify, batch)
        assert functions.linear == seen >= 2


@DEVICES
def test_saved_tensor_hooks_hold_in_the_workers(devices: int) -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    counts = Counter[str]()

    def count(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: counts.update([name]) or tensor

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with torch.autograd.graph.saved_tensors_hooks(count("pack"), count("unpack")):
            trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        before = counts.copy()
        assert counts["pack"] >= counts["unpack"] >= 2 * devices
        trainer.step(classify, batch)
        assert counts == before


@DEVICES
def test_context_variables_are_copied_once_for_each_device(devices: int) -> None:
    module, batch = classifier(24)
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.append(variable.get())
        variable.set(variable.get() + "+")
        return classify(replica, part)

    with DataParallel(module, hosts(devices), balance="even", micro_batch=24 // devices // 2) as trainer:
        trainer.step(loss_fn, batch)
        assert sorted(seen) == sorted(["unset", "unset+"] * devices)
        variable.set("caller")
        seen.clear()
        trainer.step(loss_fn, batch)
    assert sorted(seen) == sorted(["caller", "caller+"] * devices)
    assert variable.get() == "caller"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_an_error(mode: Any) -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        with mode(), pytest.raises(InvalidArgument, match=r"(no_grad|inference mode).*predict\(\)"):
            trainer.step(classify, batch)
        with torch.enable_grad():
            trainer.step(classify, batch)


@DEVICES
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_finds_a_nan_in_a_worker(devices: int) -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(devices)) as trainer, torch.autograd.detect_anomaly():
        told = pytest.warns(UserWarning, match="SqrtBackward"), pytest.raises(RuntimeError, match="returned nan values")
        with told[0], told[1]:
            trainer.step(lambda m, b: (m(b[0]) * 0).sqrt().sum() * 0, batch)
    assert gradients(module) == [None] * 4


def test_the_callers_own_state_is_untouched_by_a_step() -> None:
    module, batch = classifier(dtype=torch.float32)
    functions = CountingFunctions()
    with DataParallel(module, TWO) as trainer, torch.autocast("cpu", dtype=torch.bfloat16), functions:
        trainer.step(classify, batch)
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: 1 / 0, batch)  # type: ignore[arg-type,return-value]
        assert torch.is_autocast_enabled("cpu")
        before = functions.linear
        assert module(batch[0]).dtype == torch.bfloat16
        assert functions.linear == before + 2


@pytest.fixture
def made() -> tuple[Any, Any]:
    """A module and a batch on the host."""
    return classifier(16)


@pytest.fixture
def elsewhere(made: Any) -> Iterator[None]:
    """Another default device."""
    with torch.device("meta"):
        yield


def per_item(module: Any, part: Any) -> Any:
    return nn.functional.cross_entropy(module(part[0]), part[1], reduction="none")


@pytest.mark.usefixtures("elsewhere")
def test_steps_and_predictions_with_costs(made: Any) -> None:
    module, batch = made
    costs = torch.arange(16, device="cpu") % 5 + 1
    weight = torch.arange(16.0, dtype=torch.float64, device="cpu")
    _, wanted = plain(module, lambda one, part: (per_item(one, part) * weight).sum() / weight.sum(), batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            module.zero_grad()
            trainer.step(per_item, batch, cost=costs, weight=weight)
            assert_same_gradients(module, wanted)
        torch.testing.assert_close(trainer.predict(batch[0], cost=costs), module(batch[0]).detach())


@pytest.mark.usefixtures("elsewhere")
def test_lists_of_items_and_calls_as_a_module(made: Any) -> None:
    module, (x, y) = made
    with DataParallel(module, TWO) as trainer:
        cost = torch.arange(16, device="cpu")
        assert trainer.predict(lambda one, part: part[1].tolist(), (x, y), cost=cost) == y.tolist()
        torch.testing.assert_close(trainer(x), module(x))
        module.zero_grad()
        _, wanted = plain(module, classify, (x, y))
        classify(trainer, (x, y)).backward()
        assert_same_gradients(module, wanted)


@pytest.mark.usefixtures("elsewhere")
def test_checks_and_draws(made: Any) -> None:
    module, batch = made
    module.append(nn.Dropout(0.5))
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            assert trainer.step(classify, batch).isfinite()
        report = trainer.check(classify, batch)
        assert all(max(split.differences.values()) < report.tolerance for split in report.splits)


def training(rank: int) -> Any:
    module, batch = classifier(16)
    part = part_of(batch, rank, [10, 6])
    drawn = []
    for default in ("cpu", "meta"):
        module.zero_grad()
        with torch.device(default), DataParallel(module, ["host:0"], group=dist.group.WORLD) as trainer:
            trainer.step(classify, part)
            drawn.append(next(iter(trainer.batch_sampler(16, 8))))
    return drawn, gradients(module)


def test_ranks_that_train_together(on_ranks: Run) -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, classify, batch)
    for drawn, found in on_ranks(2, training):
        assert drawn[0] == drawn[1]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
