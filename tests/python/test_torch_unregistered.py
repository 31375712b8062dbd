"""What is trained without being registered with the module: in plain lists or as attributes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, hosts, linear, noting

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])


@dataclasses.dataclass
class Gains:
    inner: torch.Tensor
    outer: torch.Tensor


class Holder(nn.Module):
    """Has all its work done by something that it does not register."""

    def __init__(self, held: Any, apply: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.held = held
        self.apply_held = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_held(self.held, self.first(x).tanh())


def through_all(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double).requires_grad_()


HELD: dict[str, Callable[[], tuple[Any, Any]]] = {
    "list of modules": lambda: ([linear(6, 6), nn.Sequential(nn.Tanh(), linear(6, 3))], through_all),
    "tuple of modules": lambda: ((linear(6, 3),), through_all),
    "dictionary of modules": lambda: ({"a": linear(6, 3)}, lambda held, x: held["a"](x)),
    "nested": lambda: ({"a": [(linear(6, 3), nn.Parameter(tensor(3)))]}, lambda h, x: h["a"][0][0](x) * h["a"][0][1]),
    "list of parameters": lambda: ([nn.Parameter(tensor(6, 3)), nn.Parameter(tensor(3))], lambda h, x: x @ h[0] + h[1]),
    "one parameter twice": lambda: ([tensor(6, 6)] * 2, lambda held, x: x @ held[0] @ held[1]),
    "plain tensor": lambda: (tensor(6, 3), lambda held, x: x @ held),
    "dataclass": lambda: (Gains(tensor(6), tensor(6)), lambda held, x: (x * held.inner).tanh() * held.outer),
}


def unregistered(held: Any) -> list[torch.Tensor]:
    """In the order in which they are found."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, nn.Module):
        return list(held.parameters())
    inside = vars(held).values() if isinstance(held, Gains) else held.values() if isinstance(held, dict) else held
    return list({id(one): one for part in inside for one in unregistered(part)}.values())


def compare(trainer: DataParallel, module: Any, batch: Any) -> None:
    reference = copy.deepcopy(module)
    for one in (*reference.parameters(), *unregistered(reference.held)):
        one.grad = None
    wanted = classify(reference, batch)
    wanted.backward()
    assert trainer.step(classify, batch).item() == pytest.approx(wanted.item(), rel=1e-12)
    ours, theirs = unregistered(module.held), unregistered(reference.held)
    assert ours
    for mine, one in zip((*module.parameters(), *ours), (*reference.parameters(), *theirs), strict=True):
        torch.testing.assert_close(mine.grad, one.grad, rtol=1e-11, atol=1e-13)
        mine.grad = None


@DEVICES
@pytest.mark.parametrize("kind", HELD)
def test_what_is_not_registered_gets_its_gradient_and_is_trained(kind: str, devices: int) -> None:
    torch.manual_seed(3)
    module = Holder(*HELD[kind]()).double()
    _, batch = classifier()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        compare(trainer, module, batch)
        with torch.no_grad():
            for one in unregistered(module.held):
                one.mul_(1.5)
        compare(trainer, module, batch)
        held, _ = HELD[kind]()
        module.held = held
        compare(trainer, module, batch)
        if kind == "list of modules":  # parts that are added, exchanged and frozen later
            module.held.append(linear(3, 3))
            compare(trainer, module, batch)
            module.held[0] = linear(6, 6)
            compare(trainer, module, batch)
            module.held[0].weight.requires_grad_(False)
            compare(trainer, module, batch)
        assert [name for name in dict(module.named_parameters()) if "held" in name] == []


@pytest.mark.parametrize("kind", HELD)
def test_an_optimizer_over_what_is_not_registered_needs_no_new_replicas(kind: str) -> None:
    torch.manual_seed(3)
    module = Holder(*HELD[kind]()).double()
    reference, (_, batch) = copy.deepcopy(module), classifier()
    optimizers = [
        torch.optim.SGD([*one.parameters(), *unregistered(one.held)], lr=0.1, momentum=0.9)
        for one in (module, reference)
    ]
    seen: set[int] = set()
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(3):
            loss = trainer.step(noting(lambda replica, _: seen.add(id(replica))), batch)
            wanted = classify(reference, batch)
            wanted.backward()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-11)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) == 2


def test_names_of_what_is_not_registered_say_where_it_is() -> None:
    module = Holder([linear(6, 3)], through_all).double()
    _, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        report = trainer.check(classify, batch)
        assert {"held[0].weight", "held[0].bias"} <= set(report.differences)
        with pytest.raises(InvalidArgument, match=r"gradient of parameter held\[0\]\.weight of the original"):
            trainer.step(lambda _, b: classify(module.held[0], b), batch)


def test_a_failed_step_leaves_gradients_of_what_is_not_registered() -> None:
    for devices in (1, 2):
        module = Holder([linear(6, 3)], through_all).double()
        _, batch = classifier()
        module.held[0].weight.grad = before = torch.ones(3, 6, dtype=torch.double)

        def loss_fn(replica: Any, part: Any, calls: list[int] = []) -> Any:  # noqa: B006
            calls.append(1)
            if len(calls) == 4:
                raise ZeroDivisionError
            return classify(replica, part)

        with DataParallel(module, hosts(devices), micro_batch=4) as trainer, pytest.raises(ZeroDivisionError):
            trainer.step(loss_fn, batch)
        assert module.held[0].weight.grad is before
        assert torch.equal(before, torch.ones_like(before))
        assert module.held[0].bias.grad is None


@DEVICES
def test_buffers_of_modules_in_plain_lists_follow_and_come_back(devices: int) -> None:
    module = Holder([nn.BatchNorm1d(6).double(), linear(6, 3)], through_all).double()
    _, batch = classifier()
    norm = module.held[0]
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(classify, batch)
        assert norm.running_mean.abs().sum() > 0
        norm.running_mean.fill_(7.0)
        norm.eval()
        reference = classify(module, batch)
        assert trainer.step(classify, batch).item() == pytest.approx(reference.item(), rel=1e-12)
        norm.train()

        def failing(replica: Any, part: Any) -> Any:
            classify(replica, part)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            trainer.step(failing, batch)
        assert torch.equal(norm.running_mean, torch.full_like(norm.running_mean, 7.0))


def test_replicate_refuses_what_has_no_name() -> None:
    def make() -> Holder:
        return Holder([linear(6, 3)], through_all)

    with pytest.raises(InvalidArgument, match=r"held\[0\]\.weight is not registered.*nn\.ModuleList"):
        DataParallel(make(), TWO, replicate=lambda _: make())


def test_a_buffer_that_requires_a_gradient_is_refused() -> None:
    module, _ = classifier()
    module.register_buffer("scale", torch.ones(3, requires_grad=True))
    with pytest.raises(InvalidArgument, match="buffer scale requires a gradient"):
        DataParallel(module, TWO)


@DEVICES
def test_a_check_names_batch_norm_in_a_plain_list_and_leaves_its_statistics(devices: int) -> None:
    module = Holder([linear(6, 3), nn.BatchNorm1d(3).double()], through_all).double()
    norm, (_, batch) = module.held[1], classifier()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        report = trainer.check(classify, batch)
    assert [cause.kind for cause in report.causes] == ["running statistics"]
    assert report.causes[0].modules == ("held[1]",)
    assert "held[1] (BatchNorm1d) normalises" in report.causes[0].text
    assert norm.num_batches_tracked == 0
    assert norm.running_mean.abs().max() == 0
    with (
        DataParallel(module, TWO) as trainer,
        pytest.warns(UserWarning, match=r"paceline: held\[1\] \(BatchNorm1d\): each micro-batch is"),
    ):
        trainer.step(classify, batch)


class Remembering(nn.Module):
    """A forward that counts, and that may use what the last one left on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.hidden: Any = None
        self.calls = 0
        self.uses = True

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        out = self.layer(x)
        if self.uses and self.hidden is not None:
            out = out + self.hidden
        self.hidden = out.detach().mean(0)
        return out


@DEVICES
@pytest.mark.parametrize("call", ["check", "find_batch_size"])
def test_attributes_that_a_forward_writes_are_as_before_on_every_device(devices: int, call: str) -> None:
    torch.manual_seed(0)
    module, (_, (x, y)) = Remembering(), classifier()
    module.uses = call != "check"  # which goes on to the devices only where the module can be repeated
    reference = copy.deepcopy(module)
    with DataParallel(reference, hosts(devices), balance="even") as trainer:
        wanted = [trainer.step(classify, (x, y)) for _ in range(3)]
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        assert trainer.step(classify, (x, y)) == wanted[0]
        calls = module.calls
        if call == "check":
            trainer.check(classify, (x, y))
        else:
            trainer.find_batch_size(classify, lambda n: (x[:n], y[:n]), smallest=16, largest=16, seconds=0)
        assert module.calls == calls
        assert [trainer.step(classify, (x, y)) for _ in range(2)] == wanted[1:]
        assert [replica.module.calls for replica in trainer._execution.replicas.list] == [3] * devices


def test_what_a_class_leaves_out_of_copies_is_no_part_of_the_module() -> None:
    class Owned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3, dtype=torch.float64)
            self.owner: Any = SimpleNamespace(module=self, other=nn.Linear(2, 2))

        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "owner": None}

        def forward(self, x: Any) -> Any:
            assert self.owner is None
            return self.linear(x)

    module, batch = Owned(), classifier()[1]
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
    assert module.owner.other.weight.grad is None
    assert module.linear.weight.grad is not None
