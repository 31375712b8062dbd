"""`Pool.serve`: copies of a module follow what happens to the user's parameters and buffers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._devices.compile_gate import CompileGate
from paceline.torch._pool.served import Copies
from pool_support import pool_of
from torch_support import hosts


class Shift(nn.Module):
    """Adds a buffer. Its forward replaces the buffer."""

    shift: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> Any:
        self.shift = self.shift + 0
        return x + self.shift[0]


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_buffers_that_a_forward_has_replaced_follow_the_users(size: int) -> None:
    model = Shift(size).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(model)
        for k in range(4):
            assert batcher(torch.tensor(1.0)).result() == 1 + k
            model.shift.add_(1)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_buffers_that_are_replaced_twice_between_two_requests_are_followed() -> None:
    norm = nn.BatchNorm1d(2).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(norm)
        for k in range(20):
            for value in (-1.0, float(k)):  # the second one may get the address of the one before the first
                norm.running_mean = torch.full((2,), value)
            assert torch.allclose(batcher(torch.zeros(2)).result(), torch.full((2,), -float(k)), atol=1e-3)


def assign_data(model: nn.Linear) -> None:
    model.weight.data = torch.full((2, 2), 3.0)


def assign_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.full((2, 2), 3.0))


def assign_state(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, assign=True)


def halve(model: nn.Linear) -> None:
    model.half()


def halve_in_inference_mode(model: nn.Linear) -> None:
    with torch.inference_mode():
        model.half()


@pytest.mark.parametrize("change", [assign_data, assign_parameter, assign_state, halve, halve_in_inference_mode])
@pytest.mark.parametrize("nested", [False, True])
def test_parameters_that_are_replaced_are_followed(change: Callable[[nn.Linear], None], nested: bool) -> None:
    layer = nn.Linear(2, 2).eval()
    model: nn.Module = nn.Sequential(nn.Identity(), layer).eval() if nested else layer
    with pool_of(1) as pool:
        batcher = pool.serve(model)
        x = torch.ones(2)
        assert torch.allclose(batcher(x).result(), model(x), atol=1e-6)
        for _ in range(2):
            change(layer)
            x = x.to(layer.weight.dtype)
            found = batcher(x).result()
            assert found.dtype == layer.weight.dtype
            assert torch.allclose(found, model(x), atol=1e-3)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.allclose(batcher(x).result(), model(x), atol=1e-3)
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_flattened_weights_of_an_lstm_follow_the_users() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True).eval()
    with pool_of(1) as pool:
        batcher = pool.serve(nn.Sequential(lstm, First()).eval())
        x = torch.randn(5, 3)
        assert torch.allclose(batcher(x).result(), lstm(x)[0], atol=1e-6)
        lstm.load_state_dict({name: torch.randn_like(one) for name, one in lstm.state_dict().items()}, assign=True)
        assert torch.allclose(batcher(x).result(), lstm(x)[0], atol=1e-6)


class First(nn.Module):
    def forward(self, both: Any) -> Any:
        return both[0]


class NotingGate(CompileGate):
    """Notes who enters."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[str, bool]] = []

    def enter(self, first: bool, call: Any) -> Any:
        self.entered.append((threading.current_thread().name, first))
        return super().enter(first, call)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["compile=", "torch.compile", "module.compile", "function"])
def test_first_runs_of_what_is_compiled_have_the_compiler_to_themselves_and_do_not_count(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        time.sleep(1.2)

        def call(*args: Any) -> Any:
            ran.add(threading.current_thread().name)
            return graph.forward(*args)

        return call

    gate = NotingGate()
    monkeypatch.setattr("paceline.torch._devices.compile_gate._of_process", gate)
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    plain = nn.Sequential(first, nn.ReLU(), last).eval()
    served: Any = plain
    options: dict[str, Any] = {}
    if how == "compile=":
        options["compile"] = {"backend": backend, "dynamic": True}
    elif how == "torch.compile":
        served = torch.compile(plain, backend=backend)
    elif how == "module.compile":
        served = Net(plain).eval()
        served.compile(backend=backend)
    else:

        def function(x: torch.Tensor) -> Any:
            return plain(x)

        served = torch.compile(function, backend=backend)
    items = list(torch.randn(30, 4))
    with pool_of() as pool:
        batcher = pool.serve(served, max_batch=4, **options)
        for name in hosts(2):
            pool.retire(name)
            for _ in range(3):
                batcher(items[0]).result()
            assert batcher(items[0], deadline=0.4).result().shape == (3,)
            pool.restore(name)
        assert len(ran) == 2
        found = torch.stack(list(batcher.map(items)))
        assert torch.allclose(found, plain(torch.stack(items)), atol=1e-5)
        with torch.no_grad():
            first.weight.zero_()
            first.bias.zero_()
        assert torch.allclose(batcher(items[0]).result(), last.bias, atol=1e-6)
    firsts = [thread for thread, alone in gate.entered if alone]
    assert set(firsts) == ran
    assert len(firsts) < len(gate.entered)


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def test_autocast_casts_what_the_model_computes() -> None:
    model = nn.Linear(4, 3).eval()
    x = torch.randn(4)
    with pool_of(1) as pool:
        found = pool.serve(model, autocast=torch.bfloat16)(x).result()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(x[None])[0]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)
        assert pool.serve(model)(x).result().dtype == torch.float32
        assert not pool.submit(lambda _: torch.is_autocast_enabled("cpu")).result()


def test_arguments_for_precision_and_compiling_are_checked() -> None:
    model = nn.Linear(4, 3).eval()
    with pool_of(1) as pool:
        serve: Any = pool.serve
        for call, text in [
            (lambda: serve(model, autocast=torch.float32), "autocast=torch.float32 must be"),
            (lambda: serve(model, autocast=True), "autocast=True must be"),
            (lambda: serve(print, compile=True), "compile= is for modules"),
            (lambda: serve(model, compile="max-autotune"), "compile='max-autotune' must be True"),
            (lambda: serve(torch.compile(model, backend="eager"), compile=True), "leave compile= out"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]


def test_a_device_is_freed_while_others_run_and_join() -> None:
    place = torch.device("cpu")
    seats: Any = [
        SimpleNamespace(name=str(number), space=str(number > 0), device=place, gpu=None) for number in range(3)
    ]
    served = Copies(nn.Linear(3, 2).eval(), None)
    for seat in seats[:2]:
        served.add(seat)
    weights = served._weights["True"]

    class Looked(set[str]):
        def __len__(self) -> int:
            count = super().__len__()
            joins.start()
            joins.join(0.2)  # it waits, or is through
            return count

    joins = threading.Thread(target=served.add, args=(seats[2],))
    weights.devices = Looked(weights.devices)
    served.free(seats[1])
    joins.join(20)
    assert served._copies["2"].weights is served._weights["True"]

    class Late(str):
        def __eq__(self, other: object) -> bool:
            served._sizes.setdefault(("0", f"kind {len(served._sizes)}"), set())
            return str(self) == other

        def __ne__(self, other: object) -> bool:
            return not self == other

        __hash__ = str.__hash__

    served._sizes = {(Late("0"), "a"): set(), (Late("1"), "a"): set()}
    served.drop("1")  # while other workers add sizes
    assert all(str(device) == "0" for device, _ in served._sizes)
