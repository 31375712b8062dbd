"""Two processes that share one GPU and are ranks of a group. PACELINE_RANKS_BACKEND names what they talk by: nccl or gloo (the default).

NCCL takes several ranks on one GPU from 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment. `tests/gpu/run --as-several` sets it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpu_support import TOLERANCE
from paceline import Error
from paceline.torch import BalancedRanks, DataParallel
from rank_processes import BACKEND, Processes, Run, error_of, part_of
from test_torch_rank_sums import WARM, Deep, items, small_buckets, squares
from torch_support import classifier, classify, gradients, plain, worst_difference

RANKS = 2
LEAST_NCCL = 2, 30  # older ones refuse a second rank on a GPU
STEPS = 6
SIZES = [[14, 6], [0, 20]]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


@pytest.fixture
def on_ranks(processes: Processes, tmp_path: Path) -> Run:
    if BACKEND == "nccl" and torch.cuda.nccl.version() < LEAST_NCCL:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        pytest.skip(
            f"no NCCL: {version} refuses two ranks on one GPU, 2.30 takes them. PACK_WHEELS=nvidia-nccl-cu13==2.30.7 tests/gpu/pack carries it along"
        )
    return lambda call, *given: processes.results(RANKS, tmp_path / "store", call, *given)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> list[str]:
    """The device of each rank."""
    named = request.config.getoption("--devices")
    return named.split(",")[:RANKS] if named else ["cuda:0"] * RANKS


def place_of(name: str) -> torch.device:
    return torch.device("cpu" if name.startswith("host") else name)


def mine(rank: int, names: list[str], sizes: list[int], dtype: torch.dtype = torch.float64) -> Any:
    """The module and this rank's part of the batch, where its device is."""
    place = place_of(names[rank])
    module, batch = classifier(sum(sizes), dtype=dtype)
    part = part_of(batch, rank, sizes)
    return module.to(place), None if part is None else tuple(one.to(place) for one in part)


def trainer_of(module: nn.Module, rank: int, names: list[str]) -> DataParallel:
    return DataParallel(module, [names[rank]], group=dist.group.WORLD)


def on_host(tensors: Any) -> list[torch.Tensor]:
    return [one.detach().cpu() for one in tensors]


def two_steps(rank: int, names: list[str], sizes: list[int], call: str) -> Any:
    module, part = mine(rank, names, sizes)
    with trainer_of(module, rank, names) as trainer:
        if call == "step":
            losses = [trainer.step(classify, part) for _ in range(2)]
        else:
            losses = [trainer.loss(classify, part) for _ in range(2)]
            (losses[0] + losses[1]).backward()
    return on_host(losses), on_host(gradients(module)), dist.get_backend()


@pytest.mark.parametrize("call", ["step", "loss"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gradient_is_that_of_the_whole_batch(on_ranks: Run, names: list[str], sizes: list[int], call: str) -> None:
    module, batch = classifier(sum(sizes))
    loss, wanted = plain(module, classify, batch)
    results = on_ranks(two_steps, names, sizes, call)
    for losses, found, backend in results:
        assert backend == BACKEND
        assert worst_difference(found, [2 * one for one in wanted if one is not None]) < TOLERANCE[torch.float64]
        assert [one.item() for one in losses] == pytest.approx([loss.item()] * 2, rel=1e-12)
        assert all(map(torch.equal, found, results[0][1])), "ranks differ in a bit"


def watching(rank: int, names: list[str], sizes: list[int]) -> Any:
    place, seen = place_of(names[rank]), list[list[int]]()
    module, part = Deep().to(place), part_of((items(sum(sizes)),), rank, sizes)
    with small_buckets() as sent, trainer_of(module, rank, names) as trainer:
        for _ in range(WARM + 1):
            module.zero_grad()
            sent.clear()
            seen.append([])
            trainer.step(
                lambda m, x: squares(lambda y: m(y, lambda left: seen[-1].append(len(sent))), x), part[0].to(place)
            )
    return seen[-1], on_host(gradients(module))


@pytest.mark.skipif(BACKEND == "nccl", reason="without gloo beside it, ranks send at the end")
def test_a_bucket_is_sent_before_the_backward_has_come_to_the_next_one(on_ranks: Run, names: list[str]) -> None:
    wanted = plain(Deep(), squares, items())[1]
    for seen, found in on_ranks(watching, names, [9, 8]):
        assert seen == [0, 1, 2, 3]
        assert worst_difference(found, wanted) < TOLERANCE[torch.float64]


def training(rank: int, names: list[str], sizes: list[int], dtype: torch.dtype) -> Any:
    module, part = mine(rank, names, sizes, dtype)
    with trainer_of(module, rank, names) as trainer:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            trainer.step(classify, part)
            optimizer.step()
    return on_host(module.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ranks_train_one_module(on_ranks: Run, names: list[str], dtype: torch.dtype) -> None:
    alone, batch = classifier(20, dtype=dtype)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        classify(alone, batch).backward()
        optimizer.step()
    first, second = on_ranks(training, names, [14, 6], dtype)
    assert all(map(torch.equal, first, second)), "ranks differ in a bit"
    torch.testing.assert_close(first, on_host(alone.parameters()), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def failing(rank: int, names: list[str], when: str) -> Any:
    module, part = mine(rank, names, [14, 6])
    fails = False

    def loss_fn(one: Any, some: Any) -> Any:
        if fails and rank == 1 and when == "forward":
            raise KeyError("bad item")
        loss = classify(one, some)
        if fails and rank == 1:
            loss.register_hook(_raise)
        return loss

    with trainer_of(module, rank, names) as trainer:
        for _ in range(STEPS):
            trainer.step(loss_fn, part)
        before = on_host(gradients(module))
        fails = True
        error = error_of(lambda: trainer.step(loss_fn, part))
        kept = all(map(torch.equal, before, on_host(gradients(module))))
        fails = False
        module.zero_grad()
        trainer.step(loss_fn, part)
    return error, kept, on_host(gradients(module))


def _raise(gradient: torch.Tensor) -> None:
    raise KeyError("bad item")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_if_one_rank_fails_no_rank_commits_and_the_next_step_is_right(
    on_ranks: Run, names: list[str], when: str
) -> None:
    module, batch = classifier(20)
    wanted = plain(module, classify, batch)[1]
    for rank, ((kind, text), kept, found) in enumerate(on_ranks(failing, names, when)):
        assert kind is KeyError if rank == 1 else issubclass(kind, Error), text
        assert "bad item" in text
        assert kept
        assert worst_difference(found, wanted) < TOLERANCE[torch.float64]


class Mixed(nn.Module):
    """Parameters of several types, which are sums of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8).double()
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).tanh().float())
        return found


def of_two_types(rank: int, names: list[str]) -> Any:
    _, part = mine(rank, names, [14, 6])
    module = Mixed().to(place_of(names[rank]))
    with trainer_of(module, rank, names) as trainer:
        trainer.step(classify, part)
    return on_host(gradients(module))


def test_types_may_be_mixed(on_ranks: Run, names: list[str]) -> None:
    wanted = plain(Mixed(), classify, classifier(20)[1])[1]
    for found in on_ranks(of_two_types, names):
        assert worst_difference(found, wanted) < TOLERANCE[torch.float32]


def balanced(rank: int, names: list[str], epochs: int) -> Any:
    """DDP with balanced ranks: the gradients of each batch, and its items."""
    place = place_of(names[rank])
    module, (inputs, labels) = classifier(40)
    module, inputs, labels = module.to(place), inputs.to(place), labels.to(place)
    model = nn.parallel.DistributedDataParallel(module, device_ids=[place.index] if place.type == "cuda" else None)
    ranks = BalancedRanks(40, 20)
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_sampler=ranks.sampler)
    found = []
    for _ in range(epochs):
        for (numbers,) in ranks.batches(loader):
            with ranks.step():
                ranks.weigh(classify(model, (inputs[numbers], labels[numbers]))).backward()
            found.append((numbers.tolist(), on_host(gradients(module))))
            model.zero_grad()
    return found


def test_balanced_ranks_weigh_what_ddp_sums(on_ranks: Run, names: list[str]) -> None:
    module, (inputs, labels) = classifier(40)
    first, second = on_ranks(balanced, names, 2)
    assert len(first) == len(second) == 4
    for (some, found), (others, theirs) in zip(first, second, strict=True):
        numbers = some + others
        wanted = plain(copy.deepcopy(module), classify, (inputs[numbers], labels[numbers]))[1]
        assert worst_difference(found, wanted) < TOLERANCE[torch.float64]
        assert worst_difference(theirs, wanted) < TOLERANCE[torch.float64]
