"""What a proof leaves behind: the state of one run on one device. And what it says of state that devices would not leave so."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

from proof_cases import made, net, rows, said_by, squares

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


def test_a_value_that_changes_by_itself_and_the_size_of_a_slice_are_no_difference() -> None:
    class Timed(nn.Module):
        clock = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.net, self.last, self.items = net(), 0.0, 0

        def forward(self, rows: torch.Tensor) -> Any:
            Timed.clock += 1.0
            self.last, self.items = Timed.clock, len(rows)
            return self.net(rows)

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


def test_ordered_dictionaries_are_whole_after_they_were_put_back() -> None:
    """Hooks of modules are kept in these, which lose their order by the methods of a plain dictionary."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = net(), OrderedDict[str, int]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.inner[0]._forward_hooks:
                self.inner[0].register_forward_hook(lambda *_: None)
            self.seen["first"] = 1
            out: torch.Tensor = self.inner(x)
            return out

    module = Hooked()
    module.inner[2].register_forward_hook(lambda *_: None)
    said_by(module, squares, rows(), steps=2)
    tables = [part._forward_hooks for part in (module.inner[0], module.inner[2])]
    assert [len(list(table.items())) for table in tables] == [1, 1]
    assert list(reversed(module.seen.items())) == [("first", 1)]
    copy.deepcopy(module)
