"""The first step of each kind of work has the result of one device, and is compared with a split one."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel, ProofWarning, proving

HOSTS = ["host:0", "host:1"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def made(module: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(module, HOSTS, **({"balance": [3, 5], "prove": "warn"} | options))


def squares(module: Any, rows: Any) -> Any:
    return module(rows).square().mean()


def said_by(module: nn.Module, loss_fn: Any, batch: Any, steps: int = 1, **options: Any) -> str:
    """What proofs warn of in these steps."""
    with warnings.catch_warnings(record=True) as caught, made(module, **options) as trainer:
        warnings.simplefilter("always")
        for _ in range(steps):
            trainer.step(loss_fn, batch)
    return "\n".join(str(one.message) for one in caught if one.category is ProofWarning)


def gradients(module: Any) -> list[Any]:
    return [one.grad for one in ([module] if isinstance(module, torch.Tensor) else module.parameters())]


def same(ours: Any, theirs: Any, *, exact: bool = False) -> bool:
    compare: Any = torch.equal if exact else torch.allclose
    return all(map(compare, gradients(ours), gradients(theirs)))


class Seen:
    """A list that no run puts back."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


def test_the_first_step_is_that_of_one_device_bit_for_bit() -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    for one in (plain, module):
        weight: Any = one[0].weight
        weight.grad = torch.ones_like(weight)
    loss = squares(plain, batch)
    loss.backward()
    with made(module) as trainer:
        assert trainer.step(squares, batch).item() == loss.item()
        assert same(plain, module, exact=True)
        assert "equal to one device up to" in trainer.explain()
        trainer.step(squares, batch)
        assert trainer.shares == {"host:0": 6, "host:1": 10}


def test_the_function_runs_whole_once_for_each_kind_of_work() -> None:
    seen, sizes = Seen(), list[int]()

    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        sizes.append(len(slice))
        seen.items.append((len(slice), proving()))
        return squares(module, slice)

    with made(net()) as trainer:
        for _ in range(3):
            trainer.step(loss_fn, rows())
        assert sizes[0] == 16
        assert sorted(sizes[1:]) == [6, 6, 10, 10]
        assert seen.items[0] == (16, False)
        assert sorted(seen.items[1:]) == [(6, False), (6, False), (6, True), (10, False), (10, False), (10, True)]
        trainer.module.eval()
        trainer.step(loss_fn, rows())
        assert sizes.count(16) == 2
        trainer.step(lambda module, slice: loss_fn(module, slice[0]), (rows(), rows()))
        assert sizes.count(16) == 3
        trainer.step(loss_fn, rows(24))
        assert 24 not in sizes
    assert not proving()


COUNTED = {"calls": 0}
TOTAL = 0


def test_what_loss_fn_reaches_is_as_after_one_run() -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3, dtype=torch.float64))

        def forward(self, out: torch.Tensor) -> Any:
            center: Any = self.center
            center += 1
            return out.square().mean()

    class Metric:
        def __init__(self) -> None:
            self.count, self.sums = 0, torch.zeros(1)

        def update(self, out: torch.Tensor) -> None:
            self.count += len(out)
            self.sums += 1

    losses, count, criterion, metric = list[float](), 0, Center(), Metric()

    def loss_fn(module: Any, rows: torch.Tensor, known: dict[str, int] = COUNTED) -> Any:
        nonlocal count
        count += 1
        known["calls"] += 1
        out = module(rows)
        metric.update(out)
        loss = criterion(out)
        losses.append(loss.item())
        return loss

    with made(net()) as trainer:
        loss = trainer.step(loss_fn, rows())
    assert (losses, count, COUNTED["calls"], metric.count, metric.sums.item()) == ([loss.item()], 1, 1, 16, 1)
    assert torch.equal(criterion.center, torch.ones(3, dtype=torch.float64))  # type: ignore[arg-type]


def test_a_kind_is_proved_again_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch._trainer.proofs._AGAIN", 10)
    with made(net()) as trainer:
        for _ in range(101):
            trainer.step(squares, rows())
        assert [int(line.split()[2]) for line in trainer.explain().splitlines() if line.startswith("Proof")] == [
            1,
            10,
            100,
        ]


def test_a_mean_over_labels_is_named_with_its_cure() -> None:
    labels = torch.randint(0, 3, (16, 6))
    labels[:6, 1:] = -100
    inputs = torch.randn(16, 6, 4, dtype=torch.float64)

    def loss_fn(module: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())

    said = said_by(net(), loss_fn, (inputs, labels), steps=50)
    assert said.count("another result than on one device") == 1
    assert "the gradient of" in said
    assert "weight=lambda batch:" in said
    with made(net(), prove="raise") as trainer:
        with pytest.raises(Error, match="Nothing was committed"):
            trainer.step(loss_fn, (inputs, labels))
        assert all(one.grad is None for one in trainer.module.parameters())


def test_means_of_items_draw_and_normalise_without_a_word() -> None:
    for module in (
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(),
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(),
    ):
        assert said_by(module, squares, rows(), steps=3) == ""


def test_generators_are_where_one_device_leaves_them() -> None:
    module, batch = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).double(), rows()
    plain, own = copy.deepcopy(module), torch.Generator().manual_seed(3)

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        return squares(module, rows + torch.randn(rows.shape, generator=own, dtype=rows.dtype))

    torch.manual_seed(1)
    random.seed(1)
    wanted = loss_fn(plain, batch).item()
    states = torch.get_rng_state(), own.get_state(), random.getstate()
    torch.manual_seed(1)
    random.seed(1)
    own.manual_seed(3)
    with made(module) as trainer:
        assert trainer.step(loss_fn, batch).item() == wanted
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])
    assert random.getstate() == states[2]


class Counts(nn.Module):
    """Keeps what belongs to the batch: in a buffer, an attribute, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("load", torch.zeros(3))
        self.seen, self.stat = 0, {"n": 0}
        self.outs: list[Any] = []

    def forward(self, rows: torch.Tensor) -> Any:
        out = self.net(rows)
        load: Any = self.load
        load += torch.bincount(out.detach().argmax(1), minlength=3)
        self.seen += len(rows)
        self.outs.append(out.detach().mean())
        self.stat["n"] += len(rows)
        return out


def test_state_over_the_batch_is_named_with_numbers() -> None:
    said = said_by(Counts(), squares, rows())
    assert "buffer 'load'" in said
    assert "attribute 'seen' has 16 on one device and 10 here" in said
    assert "attribute 'outs' has 1 entries on one device and 0 entries here" in said
    assert "attribute 'stat'" in said
    assert "the gradient" not in said


def test_what_a_first_forward_sets_up_is_on_the_module() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a: Any = nn.Linear(4, 4).double()
            self.b: Any = nn.Linear(4, 4).double()
            self.ready = False

        def forward(self, rows: torch.Tensor) -> Any:
            if not self.ready:
                for part in (self.a, self.b):
                    part.register_forward_hook(lambda part, given, out: setattr(part, "out", out))
                self.ready = True
            out = self.b(self.a(rows))
            kept = [part.out for part in (self.a, self.b) if getattr(part, "out", None) is not None]
            for part in (self.a, self.b):
                part.out = None
            return out + sum(kept)

    module: Any = Lazy()
    batch = rows()
    plain = copy.deepcopy(module)
    assert said_by(module, squares, batch, steps=3) == ""
    assert [len(part._forward_hooks) for part in (module.a, module.b)] == [1, 1]
    assert torch.equal(plain(batch), module(batch))


def test_a_forward_that_writes_parameters_is_named() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 3).double(), nn.Linear(4, 3).double().requires_grad_(False)

        def forward(self, rows: torch.Tensor) -> Any:
            for ours, theirs in zip(self.q.parameters(), self.k.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            return self.q(rows) - self.k(rows + 1)

    module, batch = Momentum(), rows()
    plain = copy.deepcopy(module)
    plain(batch)
    said = said_by(module, squares, batch)
    assert "the forward writes parameter k.weight" in said
    assert torch.equal(plain.k.weight, module.k.weight)


def test_a_value_that_changes_by_itself_is_no_difference() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = net(), 0.0

        def forward(self, rows: torch.Tensor) -> Any:
            Timed.clock += 1.0
            self.last = Timed.clock
            return self.net(rows)

        clock = 0.0

    assert said_by(Timed(), squares, rows()) == ""


def test_a_batch_that_is_changed_in_place_is_changed_once() -> None:
    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        slice.div_(2)
        return squares(module, slice)

    batch = rows()
    wanted = batch / 2
    assert said_by(net(), loss_fn, batch) == ""
    assert torch.equal(batch, wanted)


def test_a_failure_leaves_everything_as_it_was() -> None:
    class Fails(Counts):
        load: Any

        def forward(self, rows: torch.Tensor) -> Any:
            out = super().forward(rows)
            if len(rows) < 16:
                raise RuntimeError("a slice")
            return out

    module: Any = Fails()
    with made(module) as trainer:
        with pytest.raises(RuntimeError, match="a slice"):
            trainer.step(squares, rows())
        assert (module.seen, module.outs, module.stat, module.load.sum().item()) == (0, [], {"n": 0}, 0)
        assert all(one.grad is None for one in module.parameters())


def test_a_loss_carries_the_gradients_of_one_device() -> None:
    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    (squares(plain, batch) / 2).backward()
    with made(module) as trainer:
        loss = trainer.loss(squares, batch)
        assert all(one.grad is None for one in module.parameters())
        (loss / 2).backward()
    assert same(plain, module)


def test_tensors_outside_get_their_gradient_once() -> None:
    head = nn.Parameter(torch.ones(3, dtype=torch.float64))
    module, batch = net(), rows()
    wanted = torch.autograd.grad((copy.deepcopy(module)(batch) * head).square().mean(), head)[0]
    head.grad = torch.ones_like(head)

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        return (module(rows) * head).square().mean()

    assert said_by(module, loss_fn, batch) == ""
    assert torch.allclose(head.grad, wanted + 1)


def test_extras_and_weights_are_those_of_the_whole_batch() -> None:
    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        out = module(rows)
        return out.square().mean(1), {"out": out.detach(), "mean": out.detach().mean()}

    with made(net()) as trainer:
        trainer.step(loss_fn, rows())
        assert trainer.extras["out"].shape == (16, 3)
        assert "differs from one device" not in trainer.explain()
    with made(net()) as trainer:  # a plain mean is no mean by weight
        trainer.step(loss_fn, rows(), weight=torch.arange(16.0))
        assert "what loss_fn returns beside the loss differs" in trainer.explain()


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"memory": 0.5}])
def test_a_limited_micro_batch_limits_the_whole_run(options: dict[str, Any]) -> None:
    sizes: list[int] = []

    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        sizes.append(len(slice))
        return squares(module, slice)

    module, batch = net(), rows()
    plain = copy.deepcopy(module)
    squares(plain, batch).backward()
    assert said_by(module, loss_fn, batch, **options) == ""
    assert max(sizes[:4]) <= 4
    assert same(plain, module)


def test_where_memory_runs_out_slices_do() -> None:
    seen = Seen()

    def loss_fn(module: Any, slice: torch.Tensor) -> Any:
        seen.items.append(len(slice))
        if len(slice) > 8:
            raise torch.OutOfMemoryError("too many")
        return squares(module, slice)

    assert said_by(net(), loss_fn, rows(), balance="even") == ""
    assert seen.items[:3] == [16, 8, 8]


def test_what_is_not_finite_is_proved_by_a_later_step() -> None:
    factor = [float("inf")]
    with made(net()) as trainer:
        for factor[0] in (float("inf"), 1.0, 1.0):
            trainer.step(lambda module, rows: squares(module, rows) * factor[0], rows())
        proofs = [line for line in trainer.explain().splitlines() if line.startswith("Proof")]
    assert len(proofs) == 2
    assert "not a finite number" in proofs[0]
    assert "equal to one device" in proofs[1]


def test_the_environment_says_what_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PROVE", "sometimes")
    with pytest.raises(InvalidArgument, match="PACELINE_PROVE is 'sometimes'"):
        DataParallel(net(), HOSTS)
    with pytest.raises(InvalidArgument, match="prove is 'never'"):
        DataParallel(net(), HOSTS, prove="never")  # type: ignore[arg-type]
    monkeypatch.setenv("PACELINE_PROVE", "off")
    with DataParallel(net(), HOSTS) as trainer:
        trainer.step(squares, rows())
        assert "Proof" not in trainer.explain()


def test_a_number_that_counts_forwards_counts_steps() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = net(), 0

        def forward(self, rows: torch.Tensor) -> Any:
            self.calls += 1
            return self.net(rows)

    module = Counting()
    with made(module, micro_batch=3) as trainer:
        for step in range(1, 6):
            trainer.step(squares, rows(24))
            assert module.calls == (8 if step == 1 else 7 + step)  # the first step ran whole, in slices


def test_hooks_of_tensors_outside_run_once_for_a_loss() -> None:
    head, seen = nn.Parameter(torch.ones(3, dtype=torch.float64)), []
    head.register_hook(lambda gradient: seen.append(gradient.clone()))
    module, batch = net(), rows()
    with made(module) as trainer:
        trainer.loss(lambda module, rows: (module(rows) * head).square().mean(), batch).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], gradients(head)[0])


def test_lists_that_a_forward_fills_are_empty_for_the_next_one() -> None:
    class Aux(nn.Module):
        """Appends an auxiliary loss, as mixtures of experts do. The loop clears the list."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.aux: list[Any] = []

        def forward(self, rows: torch.Tensor) -> Any:
            out = self.net(rows)
            self.aux.append(out.square().mean())
            return out

    module, batch = Aux(), rows()

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        return squares(module, rows) + torch.stack(module.aux).sum()

    with made(module) as trainer:
        for step in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = trainer.step(loss_fn, batch)
            assert ["attribute 'aux' has 1 entries on one device" in str(one.message) for one in caught] == [True] * (
                not step
            )
            module.aux.clear()
            assert loss.item() == pytest.approx(2 * squares(module, batch).item())
            module.aux.clear()


def test_a_replay_proves_what_the_run_has_proved(tmp_path: Path) -> None:
    ledger, batches = tmp_path / "ledger", [rows() for _ in range(4)]

    def trained(replay: bool) -> list[float]:
        torch.manual_seed(0)
        with made(net(), balance="auto") as trainer:
            if replay:
                trainer.replay_claims(ledger)
            else:
                trainer.write_ledger(ledger)
            return [trainer.step(squares, batch).item() for batch in batches]

    assert trained(replay=False) == trained(replay=True)


def test_a_function_that_takes_the_whole_batch_is_told_so() -> None:
    whole = rows()
    said = said_by(net(), lambda module, _: squares(module, whole), whole, steps=3)
    assert said.count("refers to a tensor of the whole batch") == 1
    assert said_by(net(), squares, whole) == ""


def test_rounding_inside_of_the_function_is_no_difference() -> None:
    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(module, rows)

    module = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(4, 4), nn.Tanh())])
    assert said_by(module, loss_fn, rows(64).float()) == ""


def test_what_is_raised_leaves_nothing_and_the_next_step_is_proved() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    before, states, calls = copy.deepcopy(module.state_dict()), torch.get_rng_state(), list[int]()

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        calls.append(len(rows))
        return module(rows).square().sum()

    with made(module, prove="raise") as trainer:
        batch = rows()
        states = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(Error, match="Nothing was committed"):
                trainer.step(loss_fn, batch)
            assert all(torch.equal(module.state_dict()[name], one) for name, one in before.items())
            assert torch.equal(torch.get_rng_state(), states)
            assert calls == []


def test_an_interrupted_first_step_is_proved_again() -> None:
    interrupts = Seen()

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        if not interrupts.items:
            interrupts.items.append(1)
            raise KeyboardInterrupt
        return module(rows).square().sum()

    with made(net()) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.step(loss_fn, rows())
        with pytest.warns(ProofWarning, match="another result than on one device"):
            trainer.step(loss_fn, rows())


class Odd(dict[str, Any]):
    def update(self, *given: Any, **options: Any) -> None:
        raise RuntimeError("You cannot use update on this")

    def clear(self) -> None:
        raise RuntimeError("You cannot use clear on this")


def test_state_of_all_kinds_is_as_after_one_run() -> None:
    teacher = net().requires_grad_(False)
    start = copy.deepcopy(teacher)
    groups, moving, loop = defaultdict[str, list[int]](list), torch.zeros(1), deque([1.0, 2.0])

    class Count:
        def __init__(self) -> None:
            self.n = 0

    class Meters:
        def __init__(self) -> None:
            self.loss = Count()

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.count = net(), Count()
            self.odd = Odd(a=1)

        def forward(self, rows: torch.Tensor) -> Any:
            self.count.n += 1
            dict.__setitem__(self.odd, "a", 2)
            return self.net(rows)

    meters, module = Meters(), Holder()

    def loss_fn(module: Any, rows: torch.Tensor) -> Any:
        global TOTAL
        nonlocal moving
        TOTAL += 1
        moving = moving + 1
        groups["sizes"].append(len(rows))
        meters.loss.n += 1
        for one in teacher.parameters():
            one.data.add_(1)
        return squares(module, rows) * sum(loop)

    with made(module, prove="warn") as trainer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in loop:  # it may not change
            trainer.step(loss_fn, rows())
            break
    assert (TOTAL, moving.item(), dict(groups), meters.loss.n) == (1, 1, {"sizes": [16]}, 1)
    assert (module.count.n, dict(module.odd)) == (1, {"a": 2})
    assert all(torch.equal(one, two + 1) for one, two in zip(teacher.parameters(), start.parameters(), strict=True))


def test_near_an_optimum_rounding_is_no_difference() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Linear(4, 1), torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True) + torch.randn(64, 1)
    with torch.no_grad():
        found = torch.linalg.lstsq(
            torch.cat([inputs, torch.ones(64, 1)], 1).double(), targets.double()
        ).solution.float()
        module.weight.copy_(found[:4].T)
        module.bias.copy_(found[4])
    assert said_by(module, lambda module, batch: F.mse_loss(module(batch[0]), batch[1]), (inputs, targets)) == ""


def reducing(how: str, *, by_default: bool) -> Any:
    def reduced(module: Any, rows: torch.Tensor, how: str = how if by_default else "mean") -> Any:
        return getattr(module(rows).square(), how)()

    return reduced if by_default else functools.partial(reduced, how=how)


@pytest.mark.parametrize("by_default", [True, False])
def test_what_a_function_is_given_makes_a_kind_of_work(by_default: bool) -> None:
    with made(net()) as trainer:
        for how in ("mean", "sum"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.step(reducing(how, by_default=by_default), rows())
            assert len(caught) == (how == "sum")


def test_the_size_of_a_slice_is_no_difference() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.items = net(), 0

        def forward(self, rows: torch.Tensor) -> Any:
            self.items = len(rows)
            return self.net(rows)

    assert said_by(Sized(), squares, rows()) == ""
