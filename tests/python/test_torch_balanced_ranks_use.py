"""`BalancedRanks` as it is used: arguments that do not fit, incomplete steps, lengths, positions in the data, and the programs of the guide."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline import InvalidArgument
from paceline.balance import replay
from paceline.torch import BalancedRanks
from rank_processes import Run, error_of
from torch_support import train_alone, worst_difference

ITEMS, BATCH = 40, 8


def loader_of(ranks: BalancedRanks, items: int = ITEMS, workers: int = 0) -> Any:
    return DataLoader(TensorDataset(torch.arange(items)), batch_sampler=ranks.sampler, num_workers=workers)


def trained(ranks: BalancedRanks, model: Any, batch: Any) -> list[int]:
    """A step. Returns the numbers of the items."""
    numbers: torch.Tensor = batch[0]
    with ranks.step():
        ranks.weigh(model(numbers[:, None].float()).square().mean()).backward()
    return numbers.tolist()


def parallel() -> Any:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Linear(1, 1))


# What does not fit.

ARGUMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], list[str]]] = {
    "few": (lambda rank: {"batch_size": 1}, ["batch_size is 1 for 2 ranks"] * 2),
    "one of them": (
        lambda rank: {"batch_size": 1 if rank else BATCH},
        ["rank 1 failed, so no rank goes on. InvalidArgument: BalancedRanks: batch_size is 1", "batch_size is 1"],
    ),
    "sizes": (lambda rank: {"batch_size": BATCH + rank}, ["rank 1 has batch_size=9, and rank 0 has 8"] * 2),
    "items": (lambda rank: {"items": ITEMS + rank}, ["rank 1 has items=41, and rank 0 has 40"] * 2),
    "seeds": (lambda rank: {"seed": rank}, ["rank 1 has seed=1, and rank 0 has 0"] * 2),
    "lengths": (lambda rank: {"items": [1.0 + rank] * 9}, ["rank 1 has costs="] * 2),
    "ratios": (lambda rank: {"balance": [1.0, 0.0]}, ["Every rank needs a number above 0"] * 2),
    "policy": (lambda rank: {"balance": [1, 1 + rank]}, ["rank 1 has balance="] * 2),
    "cost": (lambda rank: {"cost": [1.0] * ITEMS}, ["need the lengths of all items"] * 2),
    "ledger": (lambda rank: {"ledger": 3}, ["ledger is 3; it must be the path of a file"] * 2),
    "folder": (
        lambda rank: {"ledger": "/none/ranks.jsonl"},
        [
            "ledger: /none/ranks.jsonl cannot be opened",
            "rank 0 failed, so no rank goes on. InvalidArgument: ledger: /none",
        ],
    ),
}


def refused(rank: int, how: str) -> Any:
    given = {"items": ITEMS, "batch_size": BATCH, **ARGUMENTS[how][0](rank)}
    found = error_of(lambda: BalancedRanks(**given))
    BalancedRanks(ITEMS, BATCH)  # the ranks are still together
    return found


@pytest.mark.parametrize("how", ARGUMENTS)
def test_arguments_that_do_not_fit_are_an_error_on_all_ranks(on_ranks: Run, how: str) -> None:
    for (_, text), message in zip(on_ranks(2, refused, how), ARGUMENTS[how][1], strict=True):
        assert message in text


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"Call torch.distributed.init_process_group\(\) before"):
        BalancedRanks(ITEMS, BATCH)


def misused(_: int) -> list[tuple[type, str]]:
    model = nn.Linear(1, 1)
    ranks = BalancedRanks(ITEMS, BATCH)
    loader = loader_of(ranks)
    loss = model(torch.ones(1, 1)).mean()

    def in_a_step(call: Callable[[], Any], **options: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in ranks.batches(loader, **options):
                with ranks.step():
                    call()
                break

        return run

    def direct() -> None:
        for _ in loader:
            with ranks.step():
                pass

    return [
        error_of(call)
        for call in (
            lambda: ranks.weigh(loss),
            lambda: ranks.step().__enter__(),
            direct,
            in_a_step(lambda: ranks.step().__enter__()),
            in_a_step(lambda: None),
            in_a_step(lambda: ranks.weigh(loss)),
            in_a_step(lambda: ranks.weigh(loss.detach())),
            in_a_step(lambda: ranks.weigh(model(torch.ones(2, 1)))),
            in_a_step(lambda: ranks.weigh(loss, weight=1), accumulate=2),
            in_a_step(lambda: ranks.weigh(loss, weight=1), weight=lambda batch: 1),
            in_a_step(lambda: ranks.weigh(loss, weight=-1.0 if dist.get_rank() else 1.0)),
            in_a_step(lambda: ranks.weigh(loss, weight=torch.zeros(()))),
            in_a_step(lambda: ranks.weigh(loss, weight=float("nan") if dist.get_rank() else 1.0)),
            lambda: list(ranks.batches(loader, accumulate=0)),
            lambda: list(ranks.batches(DataLoader(TensorDataset(torch.arange(ITEMS)), batch_size=4))),
        )
    ]


def test_steps_that_are_incomplete_say_what_is_missing(on_ranks: Run) -> None:
    messages = [
        "outside of step()",
        "no batch that it is for",
        "no batch that it is for",
        "inside of another step",
        "0 losses went through weigh()",
        "1 losses went through weigh(), and 0 had their backward",
        "requires grad",
        "one number",
        "Give batches(loader, weight=)",
        "Give batches(loader, weight=)",
        "rank 1 has a weight that is no number of at least 0",
        "the weights of all ranks are 0",
        "rank 1 has a weight that is no number of at least 0",
        "accumulate is 0",
        "does not have this sampler",
    ]
    for found in on_ranks(2, misused):
        for (kind, text), message in zip(found, messages, strict=True):
            assert message in text
            assert issubclass(kind, InvalidArgument)


def apart(rank: int) -> Any:
    ranks = BalancedRanks(ITEMS, BATCH)
    model = nn.Linear(1, 1)
    batches = ranks.batches(loader_of(ranks))
    next(batches)
    if rank:
        next(batches)  # left out
    assert trained(ranks, model, [torch.ones(1)])
    next(batches)
    return error_of(lambda: trained(ranks, model, [torch.ones(1)]))[1]  # one step later


def test_ranks_at_different_batches_are_an_error_on_all_ranks(on_ranks: Run) -> None:
    assert all("rank 1 is at another global batch than rank 0" in text for text in on_ranks(2, apart))


def failing(rank: int) -> Any:
    """A rank that fails before its backward and goes on, alone in its group."""
    model = nn.Linear(1, 1)
    ranks = BalancedRanks(ITEMS, BATCH, shuffle=False)
    found = []
    for _ in ranks.batches(loader_of(ranks)):
        with contextlib.suppress(KeyError), ranks.step():
            raise KeyError
        break
    for batch in ranks.batches(loader_of(ranks)):
        found += trained(ranks, model, batch)
    return found


def test_a_batch_that_failed_comes_again(on_ranks: Run) -> None:
    assert on_ranks(1, failing) == [list(range(ITEMS))]


# Lengths.


def by_length(rank: int, padded: bool, cost: bool) -> Any:
    """Ranks of which the second takes three times as long, by a clock that only work moves."""
    lengths = [(7 * index) % 23 + 1 for index in range(400)]
    square = [length**2 for length in lengths]
    ranks = BalancedRanks(lengths, 40, padded=padded, cost=square if cost else None, ledger=True)
    ranks._clock._mark = lambda: (now[0], None)  # type: ignore[method-assign]
    now, model, parts = [0.0], parallel(), []
    each = square if cost else lengths
    while ranks.sampler.epoch < 4:
        for (numbers,) in ranks.batches(loader_of(ranks, 400)):
            costs = [each[index] for index in numbers]
            with ranks.step():
                now[0] += 1e-3 * (max(costs) * len(costs) if padded else sum(costs)) * (3 if rank else 1)
                ranks.weigh(model(numbers[:, None].float()).square().mean()).backward()
            parts.append(numbers.tolist())
    return parts, ranks.shares, ranks.report(), ranks.explain(), ranks.ledger() if rank == 0 else ""


@pytest.mark.parametrize(("padded", "cost"), [(False, False), (False, True), (True, False)])
def test_items_are_dealt_out_by_cost_and_by_speed(on_ranks: Run, padded: bool, cost: bool) -> None:
    (mine, shares, report, text, ledger), (theirs, others, _, said, _) = on_ranks(2, by_length, padded, cost)
    assert shares == others
    assert abs(shares[0] / sum(shares) - 0.75) < 0.03
    epochs = [sorted(itertools.chain(*mine[k : k + 10], *theirs[k : k + 10])) for k in range(0, 40, 10)]
    assert epochs == [list(range(400))] * 4
    seconds = [row["seconds"] for row in report["ranks"]]
    assert max(seconds) / min(seconds) < 1.15
    assert [row["items"] for row in report["ranks"]] == [len(mine[-2]), len(theirs[-2])]  # ranks know one step later
    assert report["rank_shares"]["unit"] == "units of work"
    assert "an average batch has 1000000 units of work" in text
    assert f"shares of ranks: {shares} of 1000000 units of work" in said
    assert not replay(ledger.splitlines()).mismatches
    assert len({len(part) for part in mine[-10:]}) > 1, "items were dealt by count"


def accumulating(rank: int) -> Any:
    """Two batches in each step of the optimizer. The second rank takes three times as long."""
    ranks = BalancedRanks(400, 40)
    now, model = [0.0], parallel()
    ranks._clock._mark = lambda: (now[0], None)  # type: ignore[method-assign]
    while ranks.sampler.epoch < 6:
        for (numbers,) in ranks.batches(loader_of(ranks, 400), accumulate=2):
            with ranks.step(), contextlib.nullcontext() if ranks.sync_gradients else model.no_sync():
                now[0] += 1e-3 * len(numbers) * (3 if rank else 1)
                ranks.weigh(model(numbers[:, None].float()).square().mean()).backward()
    return ranks.shares, ranks.report()["ranks"]


def test_batches_without_a_sum_of_gradients_are_timed_too(on_ranks: Run) -> None:
    for shares, rows in on_ranks(2, accumulating):
        assert abs(shares[0] - 30) <= 1
        assert [row["items"] for row in rows] == list(shares)
        assert [row["seconds"] for row in rows] == pytest.approx([1e-3 * shares[0], 3e-3 * shares[1]])


def few_by_length(rank: int, padded: bool) -> Any:
    ranks = BalancedRanks([3.0, 1.0, 2.0, 5.0, 4.0], 4, padded=padded, shuffle=False)
    model = parallel()
    return [
        (trained(ranks, model, batch), stamp.shares)
        for batch in ranks.batches(loader_of(ranks, 5))
        if (stamp := ranks._loop.taken[0].stamp)
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_with_lengths_a_rank_without_items_repeats_one(on_ranks: Run, padded: bool) -> None:
    first, second, third = on_ranks(3, few_by_length, padded)
    assert sorted(first[0][0] + second[0][0] + third[0][0]) == [0, 1, 2, 3]
    assert [part[1][0] for part in (first, second, third)] == [[4]] * 3
    assert sorted(first[1][1]) == [0, 0, 1]


# Where the training is in the data.


def part_of_an_epoch(rank: int, state: Any, steps: int, workers: int) -> Any:
    model = parallel()
    ranks = BalancedRanks(ITEMS, BATCH, seed=3)
    if state is not None:
        ranks.load_state_dict(state)
    loader = loader_of(ranks, workers=workers)
    assert len(ranks.sampler) == 5
    found = [trained(ranks, model, batch) for batch in itertools.islice(ranks.batches(loader), steps)]
    return found, ranks.state_dict()


def joined(results: list[Any]) -> list[list[int]]:
    return [sorted(itertools.chain(*parts)) for parts in zip(*(found for found, _ in results), strict=True)]


def test_a_resumed_run_goes_on_with_the_next_global_batch_on_any_number_of_ranks(processes: Any, tmp_path: Any) -> None:
    whole = joined(processes.results(1, tmp_path / "one", part_of_an_epoch, None, 5, 0))
    first = processes.results(2, tmp_path / "two", part_of_an_epoch, None, 2, 1)
    state = first[0][1]
    assert state == first[1][1]
    assert (state["epoch"], state["position"]) == (0, 2)
    second = processes.results(3, tmp_path / "three", part_of_an_epoch, state, 99, 0)
    assert joined(first) + joined(second) == whole
    assert second[0][1]["epoch"] == 1


def of_a_framework(rank: int, ahead: int) -> Any:
    """A loop that takes batches ahead, and that stops by counting."""
    model = parallel()
    ranks = BalancedRanks(ITEMS, BATCH)
    loader = ranks.loader(loader_of(ranks))
    found, positions = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches, taken = iter(loader), list[Any]()
        for step in range(len(loader)):
            while len(taken) < min(ahead, len(loader) - step):
                taken.append(next(batches))
            found.append(trained(ranks, model, taken.pop(0)))
            positions.append((ranks.state_dict()["epoch"], ranks.state_dict()["position"]))
    return found, positions, len(loader.dataset)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_frameworks_may_take_batches_ahead_and_stop_by_counting(on_ranks: Run, ahead: int) -> None:
    (mine, positions, items), (theirs, _, _) = on_ranks(2, of_a_framework, ahead)
    assert items == ITEMS
    for k in (0, 5):
        assert sorted(itertools.chain(*mine[k : k + 5], *theirs[k : k + 5])) == list(range(ITEMS))
    assert positions == [(epoch, position) for epoch in (0, 1) for position in range(1, 6)]


GUIDE = (Path(__file__).resolve().parents[2] / "python" / "guide" / "processes.md").read_text()
GUIDE_EPOCHS, GUIDE_BATCH, GUIDE_ITEMS = 2, 512, 1300


def programs() -> list[str]:
    part = re.search(r"\n## Stay on DDP or FSDP\n(.*?)(?=\n## )", GUIDE, re.DOTALL)
    assert part is not None
    return re.findall(r"```python\n(.*?)```", part[1], re.DOTALL)


def setting() -> dict[str, Any]:
    """What the programs leave to the reader."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    dataset = TensorDataset(torch.randn(GUIDE_ITEMS, 6, dtype=torch.float64), torch.randint(0, 3, (GUIDE_ITEMS,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    names = {"module": module, "dataset": dataset, "optimizer": optimizer, "epochs": GUIDE_EPOCHS, "dist": dist}
    names |= {"loss_fn": nn.functional.cross_entropy, "DataLoader": DataLoader, "nullcontext": nullcontext}
    return names | {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard, "torch": torch}


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [parameter.detach() for parameter in module.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


def in_one_process(accumulate: int) -> list[torch.Tensor]:
    names = setting()
    module, data, optimizer = names["module"], names["dataset"].tensors, names["optimizer"]
    train_alone(module, data, optimizer, GUIDE_EPOCHS, GUIDE_BATCH, accumulate)
    return parameters_of(module)


def as_in_the_guide(rank: int, which: str) -> Any:
    first, sharded, accumulated = programs()[:3]
    if which == "fsdp":
        # FSDP puts other parameters into the module, so the optimizer is made afterwards.
        made = sharded + "optimizer = torch.optim.SGD(module.parameters(), lr=0.5)\n"
        first = first.replace("model = DistributedDataParallel(module)\n", made)
        assert "fully_shard" in first
    if which == "accumulate":
        loop = first.index("    for x, y")
        end = first.index("print(")
        indented = "".join(f"    {line}\n" for line in accumulated.splitlines())
        first = first[:loop] + indented + first[end:]
    names = setting()
    program = re.sub(r"dist.init_process_group.*\n", "", first)  # it is up
    assert program != first
    exec(compile(program, "<guide>", "exec"), names)
    return parameters_of(names["module"])


@pytest.mark.parametrize("which", ["ddp", "fsdp", "accumulate"])
def test_the_programs_train_what_one_process_trains(on_ranks: Run, which: str) -> None:
    wanted = in_one_process(4 if which == "accumulate" else 1)
    for found in on_ranks(2, as_in_the_guide, which):
        assert worst_difference(found, wanted) < 1e-12
