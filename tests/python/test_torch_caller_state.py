"""PyTorch's per-thread state: what the caller has set holds in the workers too."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
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


class _WithScaled(nn.Sequential):
    def forward(self, values: Any) -> Any:
        apply: Any = _Scaled.apply
        for part in self:
            values = part(values)
        return apply(values, self.matrix)


def _scaled() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = _WithScaled(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module.register_buffer("matrix", torch.randn(8, 8))
    return module, torch.randn(6, 8)


def _squares(module: Any, batch: torch.Tensor) -> Any:
    return module(batch).float().square().mean()


def _runs_of_batch(module: nn.Module, batch: torch.Tensor) -> None:
    with DataParallel(module, ["host:0"]) as trainer, trainer.batch(batch) as whole:
        whole.run(lambda replica, part: part.backward(_squares(replica, part.data)))


def _step(module: nn.Module, batch: torch.Tensor) -> None:
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(_squares, batch)


def _step_of_pipeline(module: nn.Module, batch: torch.Tensor) -> None:
    with Pipeline(module, TWO, micro_batches=1) as trainer:
        trainer.step(_squares, batch)


def _backward_of_loss(module: nn.Module, batch: torch.Tensor) -> None:
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.loss(_squares, batch).backward()


def _backward_of_outputs(module: nn.Module, batch: torch.Tensor) -> None:
    with DataParallel(module, ["host:0"]) as parallel:
        _squares(parallel, batch).backward()


@pytest.mark.parametrize("train", [_step, _runs_of_batch, _step_of_pipeline, _backward_of_loss, _backward_of_outputs])
def test_backward_runs_outside_of_the_callers_autocast(train: Callable[[nn.Module, torch.Tensor], None]) -> None:
    module, batch = _scaled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _squares(module, batch)
    loss.backward()
    wanted = gradients(module)
    module.zero_grad()
    _Scaled.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(module, batch)
        assert torch.is_autocast_enabled("cpu"), "the caller's own is as before"
    assert set(_Scaled.seen) == {False}
    assert worst_difference(gradients(module), wanted) == 0.0


def test_check_runs_backward_outside_of_autocast() -> None:
    module, batch = _scaled()
    _Scaled.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with DataParallel(module, ["host:0"]) as trainer:
            trainer.check(_squares, batch)
    assert set(_Scaled.seen) == {False}


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@DEVICES
@pytest.mark.parametrize("context", [torch.device, default_device], ids=["with torch.device", "set_default_device"])
def test_the_default_device_holds_in_the_workers(devices: int, context: Any) -> None:
    module, batch = classifier()
    seen = []
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with context("meta"):
            trainer.step(noting(lambda m, b: seen.append(torch.empty(1).device.type)), batch)
        assert seen == ["meta"] * devices
        trainer.step(noting(lambda m, b: seen.append(torch.empty(1).device.type)), batch)
    assert seen[devices:] == ["cpu"] * devices


@DEVICES
def test_the_autocast_type_that_the_caller_chose_holds_in_a_loss_fn_that_turns_autocast_on(devices: int) -> None:
    module, batch = classifier(dtype=torch.float32)
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        with torch.autocast("cpu"):
            output = replica(part[0])
        seen.append(output.dtype)
        return torch.nn.functional.cross_entropy(output.float(), part[1])

    before = torch.get_autocast_dtype("cpu")
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(loss_fn, batch)
        torch.set_autocast_dtype("cpu", torch.float16)
        try:
            trainer.step(loss_fn, batch)
        finally:
            torch.set_autocast_dtype("cpu", before)
        trainer.step(loss_fn, batch)
    assert seen == [dtype for dtype in (before, torch.float16, before) for _ in range(devices)]


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.linear = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linear += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


class CountingDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@DEVICES
def test_function_and_dispatch_modes_hold_in_the_workers(devices: int) -> None:
    module, batch = classifier()
    functions, operators = CountingFunctions(), CountingDispatch()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with functions, operators:
            trainer.step(classify, batch)
        assert functions.linear == 2 * devices
        assert operators.names.count("addmm") == 2 * devices
        assert operators.names.count("tanh_backward") == devices
        trainer.step(classify, batch)
    assert functions.linear == 2 * devices


@pytest.mark.parametrize("balance", ["even", [3, 1], "auto"], ids=str)
def test_the_flop_counter_counts_what_every_device_does(balance: Any) -> None:
    module, batch = classifier(32)
    with FlopCounterMode(display=False) as wanted:
        plain(module, classify, batch)
    with DataParallel(module, hosts(3) if balance == "even" else TWO, balance=balance) as trainer:
        with FlopCounterMode(display=False) as counter:
            trainer.step(classify, batch)
        assert counter.get_total_flops() == wanted.get_total_flops() > 0


@DEVICES
def test_saved_tensor_hooks_hold_in_the_workers(devices: int) -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor.numel())
        return tensor

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        counts = len(packed), len(unpacked)
        assert counts[0] >= counts[1] >= 2 * devices
        trainer.step(classify, batch)
        assert (len(packed), len(unpacked)) == counts


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
def test_global_settings_hold_in_the_workers(devices: int) -> None:
    """They are the process's own; here is only said that nothing comes in between."""
    module, batch = classifier()
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.append((torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()))
        return classify(replica, part)

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        try:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            trainer.step(loss_fn, batch)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
    assert seen == [(torch.float64, True)] * devices


@DEVICES
def test_anomaly_detection_finds_a_nan_in_a_worker(devices: int) -> None:
    module, batch = classifier()
    with DataParallel(module, hosts(devices)) as trainer:
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
            with (
                pytest.warns(UserWarning, match="SqrtBackward"),
                pytest.raises(RuntimeError, match="returned nan values"),
            ):
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
