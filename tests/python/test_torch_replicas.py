"""Replicas: which modules can be copied, what is refused with a name, and that one device needs no copy."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, noting, plain


def identifiers(trainer: DataParallel, batch: Any) -> list[int]:
    """The modules that loss_fn is given, one entry per micro-batch."""
    seen: list[int] = []

    def loss_fn(module: nn.Module, part: Any) -> Any:
        seen.append(id(module))
        return classify(module, part)

    trainer.step(loss_fn, batch)
    return seen


def test_one_device_runs_the_users_module_itself_in_one_micro_batch() -> None:
    module, batch = classifier(32)
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(4):
            assert identifiers(trainer, batch) == [id(module)]


def test_several_devices_run_only_replicas_and_keep_them() -> None:
    module, batch = classifier(32)
    with DataParallel(module, hosts(3), balance="even") as trainer:
        first = set(identifiers(trainer, batch))
        assert len(first) == 3
        assert id(module) not in first
        assert set(identifiers(trainer, batch)) == first


def test_replicas_share_the_memory_of_the_parameters() -> None:
    module, batch = classifier()
    addresses = set()
    with DataParallel(module, hosts(3), balance="even") as trainer:
        trainer.step(noting(lambda m, b: addresses.add(m[0].weight.data_ptr())), batch)
    assert addresses == {module[0].weight.data_ptr()}


def test_state_dict_and_parameters_stay_those_of_the_single_device_module() -> None:
    module, batch = classifier()
    parameters, names = list(module.parameters()), list(module.state_dict())
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        assert trainer.module is module
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        assert list(module.state_dict()) == names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.5)
        assert type(optimizer) is torch.optim.AdamW
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_closure_over_the_users_module_raises_and_names_the_parameter() -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):  # without gradients before, then with some
            with pytest.raises(InvalidArgument, match=r"parameter 0\.weight of the original module was touched"):
                trainer.step(lambda _, b: classify(module, b), batch)
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted)


def test_a_closure_that_reaches_one_parameter_is_noticed() -> None:
    module, batch = classifier()
    weight = module[2].weight
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"gradient of parameter 2\.weight"):
        trainer.step(lambda m, b: classify(m, b) + 0.1 * weight.pow(2).sum(), batch)


def test_a_forward_patched_by_a_closure_raises_and_names_the_parameter() -> None:
    module, batch = classifier()
    original = module.forward
    module.forward = lambda x: original(x) * 2
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=r"0\.weight.*patched forward"):
        trainer.step(classify, batch)


def doubled(self: Any, x: torch.Tensor) -> Any:
    return 2 * nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]


def test_methods_bound_to_the_module_follow_the_replica() -> None:
    for patch in (lambda m: types.MethodType(doubled, m), lambda m: functools.partial(doubled, m)):
        module, batch = classifier()
        module.forward = patch(module)
        _, wanted = plain(module, classify, batch)
        with DataParallel(module, TWO) as trainer:
            trainer.step(classify, batch)
        assert_same_gradients(module, wanted)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("whose", ["replica", "user"])
def test_a_shared_parameter_written_in_place_during_a_step_raises_and_is_named(devices: int, whose: str) -> None:
    module, batch = classifier()

    def loss_fn(replica: Any, part: Any) -> Any:
        with torch.no_grad():
            (replica if whose == "replica" else module)[2].bias.add_(0.0)
        return classify(replica, part)

    with DataParallel(module, TWO[:devices]) as trainer:
        with pytest.raises(InvalidArgument, match=r"parameter 2\.bias was written in place while the step ran"):
            trainer.step(loss_fn, batch)
        assert gradients(module) == [None] * 4
        trainer.step(classify, batch)


class Hook:
    """A hook that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


REGISTER: list[Callable[[torch.Tensor, Hook], Any]] = [
    lambda parameter, hook: parameter.register_hook(hook),
    lambda parameter, hook: parameter.register_post_accumulate_grad_hook(hook),
]


@pytest.mark.parametrize("register", REGISTER, ids=["hook", "post-accumulate hook"])
def test_parameter_hooks_are_refused_on_several_devices_whenever_they_come(register: Any) -> None:
    module, batch = classifier()
    handle = register(module[2].weight, Hook())
    with pytest.raises(InvalidArgument, match=r"parameter 2\.weight has a gradient hook"):
        DataParallel(module, TWO)
    handle.remove()
    with DataParallel(module, TWO) as trainer:
        handle = register(module[2].weight, Hook())
        with pytest.raises(InvalidArgument, match=r"parameter 2\.weight has a gradient hook"):
            trainer.step(classify, batch)
        handle.remove()
        trainer.step(classify, batch)


@pytest.mark.parametrize("register", REGISTER, ids=["hook", "post-accumulate hook"])
def test_parameter_hooks_run_on_one_device(register: Any) -> None:
    module, batch = classifier()
    hook = Hook()
    register(module[2].weight, hook)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(classify, batch)
    assert hook.calls == 1


class Storing(nn.Module):
    """Keeps an activation, with its graph, on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.inner(x)
        return self.last


class Locking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.guard = threading.Lock()

    def forward(self, x: torch.Tensor) -> Any:
        with self.guard:
            return self.inner(x)


def stored_activation() -> nn.Module:
    module = nn.Sequential(nn.Identity(), Storing())
    module(torch.zeros(1, 6))
    return module


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(6, 3))
    layer(torch.zeros(1, 6))
    return nn.Sequential(nn.Identity(), layer)


def old_spectral_norm() -> nn.Module:
    layer = nn.utils.spectral_norm(nn.Linear(6, 3))
    layer(torch.zeros(1, 6))
    return nn.Sequential(nn.Identity(), layer)


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (stored_activation, r"'1\.last' \(Tensor\)"),
        (lambda: nn.Sequential(nn.Identity(), Locking()), r"'1\.guard' \(lock\)"),
        (old_weight_norm, r"'1\.weight' \(Tensor\)"),
        (old_spectral_norm, r"'1\.weight' \(Tensor\)"),
    ],
    ids=["stored activation", "lock", "old weight_norm", "old spectral_norm"],
)
def test_what_cannot_be_copied_is_named_and_one_device_takes_it(make: Callable[[], nn.Module], attribute: str) -> None:
    module = make()
    with pytest.raises(InvalidArgument, match=rf"cannot be copied.*{attribute}.*replicate="):
        DataParallel(module, TWO)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(classify, (torch.ones(4, 6), torch.zeros(4, dtype=torch.long)))
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_lazy_module_is_refused_until_it_is_initialised() -> None:
    module: nn.Module = nn.Sequential(nn.LazyLinear(10), nn.Tanh(), nn.Linear(10, 3)).double()
    _, batch = classifier()
    with pytest.raises(InvalidArgument, match=r"parameter 0\.weight is not initialised yet"):
        DataParallel(module, TWO)
    module(batch[0])
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


@pytest.mark.parametrize(
    "parametrize",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal],
    ids=["weight_norm", "orthogonal"],
)
def test_parametrizations_work_also_after_a_forward(parametrize: Callable[[nn.Module], nn.Module]) -> None:
    module, batch = classifier()
    parametrize(module[0])
    module(batch[0])
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


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


def test_replicate_keeps_tied_parameters_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.b(self.a(x).tanh())

    module, batch = Tied().double(), classifier()[1]
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, replicate=lambda _: Tied().double()) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


@pytest.mark.parametrize(
    ("replicate", "message"),
    [
        (lambda module: module, "not the module itself"),
        (lambda module: None, "must return a new nn.Module"),
        (lambda module: nn.Sequential(nn.Linear(6, 10), nn.Tanh()), r"no parameter 2\.weight"),
        (lambda module: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), r"no parameter 0\.weight of shape"),
    ],
    ids=["the same", "None", "a layer short", "other shape"],
)
def test_what_replicate_returns_is_checked(replicate: Any, message: str) -> None:
    module, _ = classifier()
    with pytest.raises(InvalidArgument, match=message):
        DataParallel(module, TWO, replicate=replicate)


def test_parameters_elsewhere_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(InvalidArgument, match=r"parameter 1\.weight is on meta.*module\.to\('cpu'\)"):
        DataParallel(module, TWO)


def test_a_trainer_that_cannot_be_made_leaves_no_threads() -> None:
    before, threads = threading.active_count(), torch.get_num_threads()
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            DataParallel(Locking(), TWO)
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads
