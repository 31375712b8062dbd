"""Steps with costs where memory is short, in ledgers, and run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline._ledger import read
from paceline.balance import replay
from paceline.torch import DataParallel
from torch_support import (
    TWO,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    held,
    hosts,
    loss_of_words,
    module_of,
    plain,
    words,
)


def trained(trainer: DataParallel, batch: Any, costs: Sequence[Any], loss_fn: Any = loss_of_words) -> list[Any]:
    """The gradients of a step with each of these costs."""
    seen = []
    for cost in costs:
        trainer.module.zero_grad()
        trainer.step(loss_fn, batch, cost=cost)
        seen.append(gradients(trainer.module))
    return seen


@pytest.mark.parametrize("call", ["step", "run"])
def test_memory_that_runs_out_makes_smaller_pieces(call: str) -> None:
    module, batch = classifier(32)
    _, wanted = plain(module, classify, batch)

    def greedy(one: Any, part: Any) -> Any:
        loss = classify(one, part)
        if len(part[1]) > 3:
            raise torch.OutOfMemoryError("simulated")
        return loss

    with DataParallel(module, TWO) as trainer:
        if call == "step":
            trainer.step(greedy, batch, cost=torch.rand(32))
        else:
            with trainer.batch(batch, cost=torch.rand(32)) as whole:
                whole.run(lambda one, part: part.backward(greedy(one, part.data)))
        assert "ran out of memory" in trainer.explain()
    assert_same_gradients(module, wanted)


@pytest.mark.parametrize("first", ["costs", "items"])
def test_a_ledger_of_both_kinds_of_steps_has_the_decisions_of_both(tmp_path: Path, first: str) -> None:
    module, batch = words(32, 4)
    path = tmp_path / "ledger.jsonl"
    by_cost = [first == "costs", first != "costs", first == "costs"]

    costs = [batch["length"] if cost else None for cost in by_cost]
    with DataParallel(module, TWO) as trainer:
        trainer.write_ledger(path)
        ran = trained(trainer, batch, costs)
    lines = path.read_text().splitlines()
    result = replay(path)
    assert (result.plans, result.records, result.mismatches) == (3, 3, [])
    assert [ledger.by_cost for ledger in read(lines)] == by_cost[:2]
    with_claims = [entry for entry in map(json.loads, lines) if "claims" in entry]
    assert [entry.get("balancer", 0) for entry in with_claims] == [0, 1, 0]
    claims = [entry["claims"] for entry in with_claims]
    assert [entry["step"] for entry in claims] == [0, 0, 1]
    assert ["order" in entry for entry in claims] == by_cost
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.replay_claims(path)
        if first == "items":
            with pytest.raises(InvalidArgument, match=r"cost= while claims are replayed of a step that ran without"):
                trainer.step(loss_of_words, batch, cost=batch["length"])
        for now, then in zip(trained(trainer, batch, costs), ran, strict=True):
            assert all(map(torch.equal, now, then))
    claims[-1]["pieces"] = [[0, 0, 1]]
    path.write_text("\n".join([lines[0], *(json.dumps({"claims": entry}) for entry in claims)]))
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match="pieces of step 2"):
        trainer.replay_claims(path)


def of_tokens(m: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Saves 100 numbers for each token, padding included, and what they are multiplied with."""
    longest = int(batch["length"].max())
    mask = torch.arange(longest)[None, :] < batch["length"][:, None]
    values = (batch["tokens"][:, :longest, None] * m.scale).exp().mean(2)
    return (values * mask).sum(1)


def tokens() -> Any:
    return module_of(of_tokens, scale=nn.Parameter(torch.ones(100)))


PER_TOKEN = 8 * 100


def mean_noting(ran: list[tuple[int, int]]) -> Any:
    """The mean, which notes items and the longest of them."""

    def loss_fn(one: Any, part: dict[str, torch.Tensor]) -> Any:
        loss = one(part).mean()
        ran.append((len(part["length"]), int(part["length"].max())))
        return loss

    return loss_fn


@pytest.mark.parametrize("devices", [1, 2])
def test_a_limit_on_memory_counts_padded_costs(devices: int) -> None:
    torch.manual_seed(3)
    module = tokens()
    _, batch = words(96, 3)
    batch["tokens"] = torch.rand(96, 60, dtype=torch.double)
    limit = 80 * PER_TOKEN
    ran: list[tuple[int, int]] = []
    _, wanted = plain(module, mean_noting([]), batch)
    with DataParallel(module, hosts(devices), memory=limit + held(module, devices)) as trainer:
        for _ in range(3):
            ran.clear()
            module.zero_grad()
            trainer.step(mean_noting(ran), batch, cost=batch["length"])
            assert_same_gradients(module, wanted)
        entry = trainer.report()["memory"]["host:0"]
        largest = entry["largest_padded_cost"]
        assert entry["bytes_per_cost"] * largest + entry["fixed_bytes_with_costs"] == pytest.approx(limit)
        assert 60 < largest < 80
        assert largest / 2 < max(items * longest for items, longest in ran) <= largest  # no smaller than they must be
        assert "a cost of at most" in trainer.explain()
        assert "largest_micro_batch" not in entry
        trainer.step(mean_noting(ran), batch)
        assert "largest_micro_batch" in trainer.report()["memory"]["host:0"]


@pytest.mark.parametrize("devices", [1, 2])
def test_long_items_that_run_alone_do_not_leave_short_ones_alone(devices: int) -> None:
    module, (_, batch) = tokens(), words(48, 3)
    batch["tokens"] = torch.rand(48, 60, dtype=torch.double)
    batch["length"] = torch.tensor([5] * 20 + [50] * 8 + [5] * 20)
    ran: list[tuple[int, int]] = []
    _, wanted = plain(module, mean_noting([]), batch)
    with DataParallel(module, hosts(devices), balance="even", memory=80 * PER_TOKEN + held(module, devices)) as trainer:
        for _ in range(2):
            ran.clear()
            module.zero_grad()
            trainer.step(mean_noting(ran), batch, cost=batch["length"])
            assert_same_gradients(module, wanted)
        text = trainer.explain()
        assert trainer.report()["memory"]["host:0"]["largest_padded_cost"] == 50
    assert max(items for items, longest in ran if longest == 50) == 1
    assert {items for items, longest in ran if longest == 5} == {10}
    told = "host:0: a cost of at most 50 at once, items counted as the longest, since it reached its limit with 100.\n"
    assert told in text


class Short:
    """`loss_of_words` on devices that have memory for so many tokens in a slice, padding included."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.ran: list[tuple[int, int]] = []  # items, and the longest
        self.failed: list[int] = []  # the tokens

    def __call__(self, module: Any, part: dict[str, torch.Tensor]) -> Any:
        items, longest = len(part["length"]), int(part["length"].max())
        if items * longest > self.tokens:
            self.failed.append(items * longest)
            raise torch.OutOfMemoryError("as planned")
        self.ran.append((items, longest))
        return loss_of_words(module, part)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_failure_pieces_are_of_half_its_cost(seed: int) -> None:
    module, batch = words(64, seed)
    _, wanted = plain(module, loss_of_words, batch)
    fn = Short(int(batch["length"].max()))
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(2):
            fn.ran.clear()
            module.zero_grad()
            trainer.step(fn, batch, cost=batch["length"])
            assert_same_gradients(module, wanted)
        cap = min(fn.failed) / 2
        assert (
            f"host: a cost of at most {cap:g} at once, items counted as the longest, since host:0 ran out of memory with {2 * cap:g}.\n"
            in trainer.explain()
        )
    assert all(items == 1 or items * longest <= cap for items, longest in fn.ran)
    assert max(items * longest for items, longest in fn.ran if items > 1) > cap / 2  # no smaller than they must be
    assert all(less <= more / 2 for more, less in pairwise(fn.failed))


@pytest.mark.parametrize("limit", ["none", "memory", "memory, even", "runs out"])
def test_steps_with_costs_run_again_to_the_same_bit(tmp_path: Path, limit: str) -> None:
    module, batch = words(48, 5)
    path = tmp_path / "ledger.jsonl"

    memory = 8000 + held(module, 2) if "memory" in limit else None
    balance: Any = "even" if "even" in limit else "auto"
    loss_fn: Any = Short(int(batch["length"].max())) if limit == "runs out" else loss_of_words
    with DataParallel(module, TWO, memory=memory, balance=balance) as trainer:
        trainer.write_ledger(path)
        first = trained(trainer, batch, [batch["length"]] * 6, loss_fn)
    claims = [line["claims"] for line in map(json.loads, path.read_text().splitlines()) if "claims" in line]
    assert len(claims) == 6
    assert all(sorted(entry["order"]) == list(range(48)) for entry in claims)
    if limit != "memory":  # where others take over, what is claimed at once may fit
        assert any("pieces" in entry for entry in claims) == (limit != "none")
    for cost in (batch["length"], None):  # the ledger says how they are dealt out
        with DataParallel(module, TWO, balance="even") as trainer:
            trainer.replay_claims(path)
            for now, then in zip(trained(trainer, batch, [cost] * 6), first, strict=True):
                assert all(map(torch.equal, now, then))
    path.write_text(path.read_text().replace('"order": [', '"order": [0, '))
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match="every item once"):
        trainer.replay_claims(path)


@pytest.mark.parametrize("costs_first", [True, False])
def test_a_cap_of_costs_is_none_of_items_and_the_other_way_round(costs_first: bool) -> None:
    module, batch = words(64, 3)
    short, any_size = Short(2 * int(batch["length"].max())), Short(10**6)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(short, batch, cost=batch["length"] if costs_first else None)
        assert ("at most 2 items at once" in trainer.explain()) != costs_first
        trainer.step(any_size, batch, cost=None if costs_first else batch["length"])
        ran = any_size.ran
        assert sum(items for items, _ in ran) == 64
        assert max(items for items, _ in ran) > 8
        assert not costs_first or len(ran) == 1
        trainer.step(short, batch, cost=batch["length"])
        assert "a cost of at most" in trainer.explain()


def test_one_item_whose_cost_does_not_fit_is_the_error() -> None:
    module, batch = words(20, 3)
    fn = Short(int(batch["length"].max()) - 1)
    with DataParallel(module, TWO) as trainer, pytest.raises(torch.OutOfMemoryError):
        trainer.step(fn, batch, cost=batch["length"])
    assert gradients(module) == [None] * len(gradients(module))


def test_memory_that_none_of_the_costs_tells_of_counts_items() -> None:
    module, batch = classifier(40)
    assert_exact(module, classify, batch, memory=1 << 14, given={"cost": torch.zeros(40)})
