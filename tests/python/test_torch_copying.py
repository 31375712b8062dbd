"""Copying modules for several devices: what can be copied, what is refused by name, `replicate=`, and buffers in one call."""

from __future__ import annotations

import copy
import threading
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import InvalidArgument
from paceline._core.engine import TensorMemory
from paceline.torch import DataParallel, Pipeline
from paceline.torch._replicas.buffers import alias_of_data
from test_torch_buffers import batch_norm, mean_of_squares
from torch_support import (
    TWO,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    plain,
)


def store(m: Any, x: torch.Tensor) -> Any:
    """Keeps an activation, with its graph, on the module."""
    m.last = m.inner(x)
    return m.last


class Locking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.guard = threading.Lock()

    def forward(self, x: torch.Tensor) -> Any:
        with self.guard:
            return self.inner(x)


def test_a_tensor_with_a_graph_that_a_forward_has_left_is_copied_without_it() -> None:
    module, batch = nn.Sequential(nn.Identity(), module_of(store, inner=nn.Linear(6, 3))), classifier()[1]
    classify(module, batch).backward()
    wanted = gradients(module)
    module.zero_grad()
    left: Any = module.get_submodule("1")
    left.several = {"all": [left.last, (left.last,)]}
    with pytest.raises(InvalidArgument, match="cannot be copied"):  # nothing would see the effect
        DataParallel(module, TWO, prove=False)
    with pytest.raises(InvalidArgument, match="cannot be copied"):
        Pipeline(module, TWO, blocks=list(module.children()))
    with DataParallel(module, TWO, prove="raise") as trainer:
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        assert left.several["all"][0].requires_grad


@pytest.mark.parametrize("name", ["weight_norm", "orthogonal"])
def test_parametrizations_work_also_after_a_forward(name: str) -> None:
    module, batch = classifier()
    getattr(nn.utils.parametrizations, name)(module[0])
    module(batch[0])
    assert_exact(module, classify, batch)


def test_replicate_takes_modules_that_cannot_be_copied() -> None:
    module, (x, y) = Locking().double(), classifier()[1]
    inner = copy.deepcopy(module.inner)
    _, wanted = plain(nn.Sequential(inner), classify, (x, y))
    with DataParallel(module, hosts(3), replicate=lambda _: Locking().double()) as trainer:
        trainer.step(classify, (x, y))
        assert_same_gradients(module, wanted)
        trainer.optimizer(torch.optim.SGD, lr=0.1).step()
        module.zero_grad()
        trainer.step(classify, (x, y))  # the replicas see what the optimizer wrote
    assert_same_gradients(module, plain(nn.Sequential(module.inner), classify, (x, y))[1])


def test_what_replicate_makes_has_the_attributes_and_hooks_of_the_users_module() -> None:
    class Locked(Locking):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.settings = 2.0, types.SimpleNamespace(power=3.0)

        def forward(self, x: torch.Tensor) -> Any:
            return self.factor * super().forward(x).sigmoid() ** self.settings.power

    module, batch = Locked().double(), classifier()[1]
    twin = Locked().double()
    twin.inner = module.inner
    module.inner.register_forward_hook(lambda layer, _, output: output * 2)
    with DataParallel(module, TWO, replicate=lambda _: Locked().double()) as trainer:
        for step in range(3):
            module.zero_grad()
            classify(twin, batch).backward()
            wanted = gradients(module)
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted)
            for one in (module, twin):
                one.factor, one.settings.power = 3.0 + step, 2.0


def test_replicate_keeps_tied_parameters_tied() -> None:
    def tied() -> Any:
        module = module_of(
            lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(6, 6, bias=False), b=nn.Linear(6, 6, bias=False)
        )
        module.b.weight = module.a.weight
        return module

    assert_exact(tied(), classify, classifier()[1], replicate=lambda _: tied())


def other(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def replicate(_: Any) -> Any:
        made, _ = classifier()
        change(made)
        return made

    return replicate


RETURNED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the same": (lambda module: module, "not the module itself"),
    "None": (lambda module: None, "must return a new nn.Module"),
    "a layer short": (
        lambda module: nn.Sequential(nn.Linear(6, 10), nn.Tanh()),
        r"same parameters as the module, by name; it lacks 2\.bias, lacks 2\.weight",
    ),
    "other shape": (
        lambda module: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)),
        r"no parameter 0\.weight of shape",
    ),
    "parameter": (
        other(lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1)))),
        "same parameters.*has more, which",
    ),
    "buffer": (other(lambda m: m[0].register_buffer("b", torch.ones(1))), r"same buffers.*has 0\.b, which"),
    "submodule": (other(lambda m: m.append(nn.Tanh())), "same submodules.*has 3, which"),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_replicate_returns_is_checked(kind: str) -> None:
    replicate, message = RETURNED[kind]
    with pytest.raises(InvalidArgument, match=message):
        DataParallel(classifier()[0], TWO, replicate=replicate)


def test_what_replicate_returns_may_have_its_modules_in_another_order() -> None:
    def norms(*names: str) -> Any:
        """Two statistics, registered in either order."""
        return module_of(lambda m, x: m.second(m.first(x) * 0 + x * 3), **{name: nn.BatchNorm1d(2) for name in names})

    module = norms("first", "second")
    batch = torch.randn(16, 2, dtype=torch.double) + 5
    with DataParallel(module, TWO, balance="even", replicate=lambda _: norms("second", "first")) as trainer:
        trainer.step(lambda m, b: m(b).square().mean(), batch)
    means = [float(one.running_mean.mean()) for one in (module.first, module.second)]
    assert means == [pytest.approx(0.5, rel=0.5), pytest.approx(1.5, rel=0.5)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("devices", [["host:0"], TWO], ids=["one", "two"])
def test_what_no_trainer_takes_is_refused_by_name(devices: list[str]) -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match=r"the module is a torch\.jit\.ScriptModule.*torch\.compile"):
        DataParallel(script, devices)
    with pytest.raises(InvalidArgument, match=r"submodule 1 is a torch\.jit\.ScriptModule"):
        DataParallel(nn.Sequential(nn.Linear(2, 2), script), devices)
    module: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(InvalidArgument, match=r"parameter 1\.weight is on meta.*module\.to_empty\(device='cpu'\)"):
        DataParallel(module, devices)
    module.to_empty(device="cpu")  # as the message says
    DataParallel(module, devices).close()
    module, batch = nn.Sequential(nn.LazyLinear(10), nn.Tanh(), nn.Linear(10, 3)).double(), classifier()[1]
    with pytest.raises(InvalidArgument, match=r"parameter 0\.weight is not initialised yet"):
        DataParallel(module, devices)
    module(batch[0])
    assert_exact(module, classify, batch, devices)


def test_what_cannot_be_copied_is_named_leaves_no_threads_and_one_device_takes_it() -> None:
    module = nn.Sequential(nn.Identity(), Locking())
    before, threads = threading.active_count(), torch.get_num_threads()
    for _ in range(3):
        with pytest.raises(InvalidArgument, match=r"cannot be copied.*'1\.guard' \(lock\).*replicate="):
            DataParallel(module, TWO)
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads
    with DataParallel(module.double(), ["host:0"]) as trainer:
        trainer.step(classify, classifier()[1])
    assert all(parameter.grad is not None for parameter in module.parameters())


class Calls(TorchDispatchMode):
    """Counts the operators that the caller's thread runs. The workers run under it, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._caller = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() == self._caller:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("devices", [1, 2])
def test_many_buffers_are_kept_and_copied_without_an_operator_for_each(devices: int) -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(53)), nn.Linear(4, 4))
    module.register_buffer("scale", torch.ones(()))
    batch = torch.randn(8, 4)
    with DataParallel(module, hosts(devices), prove=False) as trainer:
        trainer.step(mean_of_squares, batch)
        trainer.step(mean_of_squares, batch)
        with Calls() as calls:
            trainer.step(mean_of_squares, batch)
        assert sum(calls.counts.values()) <= 12, calls.counts


def test_copies_in_plain_memory_leave_everything_else_to_pytorch() -> None:
    def tensors(value: float) -> dict[str, Any]:
        kinds = {
            "matrix": torch.full((2, 3), value),
            "number": torch.tensor(value),
            "bool": torch.tensor([bool(value)]),
            "empty": torch.empty(0),
            "none": None,
            "turned": torch.full((2, 3), value).t(),
            "complex": torch.full((2,), value, dtype=torch.complex64),
            "conjugated": torch.full((), value * 1j).conj(),
            "sparse": torch.full((2,), value).to_sparse(),
            "large": torch.full((1 << 18, 2), value),
            "meta": torch.empty(2, device="meta"),
            "parameter": nn.Parameter(torch.full((2,), value)),
            "shared": alias_of_data(torch.full((2,), value)),
        }
        return {**kinds, "shape": torch.full((int(value) + 1,), value), "type": torch.tensor([value, 1][: int(value)])}

    ours, theirs = tensors(1.0), tensors(0.0)
    theirs["type"], theirs["absent"], ours["only"] = torch.tensor([0]), None, torch.ones(2)
    written, left = TensorMemory(torch.Tensor).copy([(ours, theirs, name) for name in ours])
    copied = ["matrix", "number", "bool", "empty"]
    assert all(any(one is theirs[name] for one in written) for name in copied)
    assert [name for *_, name in left] == [name for name in ours if name not in (*copied, "none")]
    assert all(torch.equal(theirs[name], ours[name]) for name in copied)
    assert torch.equal(theirs["turned"], torch.zeros(3, 2))
    assert torch.equal(theirs["large"], torch.zeros(1 << 18, 2))


def test_a_graph_that_has_saved_a_buffer_notices_that_a_step_writes_to_it() -> None:
    module: Any = batch_norm()
    module.register_buffer("scale", torch.ones((), dtype=torch.double))
    module.register_forward_hook(lambda one, given, output: one.scale.mul_(2.0) and None)
    leaf = torch.ones((), dtype=torch.double, requires_grad=True)
    with DataParallel(module, TWO, prove=False) as trainer:
        saved = leaf * module.scale
        trainer.step(mean_of_squares, torch.randn(8, 4, dtype=torch.double))
        assert module.scale.item() == 2.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
