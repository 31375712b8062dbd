"""Optimizers whose state lies in ranges on several GPUs: the bits of one device, and an ordinary optimizer to the outside."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import BOXES, GPUS
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from paceline.torch._trainer import shards
from shard_cases import CLASSES, Pair, batches, expect_same_state, held, network, paired
from torch_support import classify

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.mark.parametrize("box", ["two", "four", "mixed"])
@pytest.mark.parametrize("name", CLASSES)
def test_ranges_give_the_bits_of_the_whole(fake: Any, name: str, box: str) -> None:
    cls, options = CLASSES[name]
    with paired(cls, options, box=box) as pair:
        for step, batch in enumerate(batches(4)):
            for one in (pair.optimizer, pair.plain):
                one.param_groups[0]["lr"] = one.param_groups[0]["lr"] * 0.9
            pair.step(batch)
            shares = held(pair.optimizer)
            assert len(shares) == len({one for one in BOXES[box] if one.startswith("cuda")})
            assert shares.count(0) <= (name == "Adafactor"), step  # no tensor of it is cut, and one is large
        pair.expect_same_state()
        assert held(pair.optimizer), "reading the state has not moved it"
        for batch in batches(2):
            pair.step(batch)
    assert isinstance(pair.optimizer, cls)


def test_muon_keeps_matrices_whole(fake: Any) -> None:
    def matrices(module: nn.Module) -> list[nn.Parameter]:
        return [one for one in module.parameters() if one.dim() == 2]

    with paired(torch.optim.Muon, {"lr": 0.05}, matrices, box="two") as pair:
        for batch in batches(4):
            pair.step(batch)
        assert held(pair.optimizer) == [6 * 24, 24 * 40 + 40 * 3], "ranges, cut between matrices"
        pair.expect_same_state()


def test_small_ranges_are_updated_in_one_round(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for least, rounds in ((1, {0, 1, 2, 3}), (1 << 20, {0})):
        monkeypatch.setattr(shards, "_LEAST_BYTES_OF_ROUNDS", least)
        with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
            pair.step(batches(1)[0])
            assert {owner.round for owner, _ in pair.optimizer._shards._all()} == rounds
            pair.expect_same_state()


@pytest.mark.own_gpus("GPUs have memory of their own")
def test_ranges_follow_memory_and_bandwidth(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidths = {0: 1e12, 1: 2e12, 2: 1e12, 3: 1e12}
    monkeypatch.setattr(cuda, "memory_bandwidth", bandwidths.__getitem__)
    module = network()
    count = sum(one.numel() for one in module.parameters())
    with DataParallel(module, BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        pair.step(batches(1)[0])
        shares = held(pair.optimizer)
        assert sum(shares) == count
        assert shares == pytest.approx([count / 5, 2 * count / 5, count / 5, count / 5], abs=17)
        text = trainer.explain()
        assert f"Optimizer: AdamW is sharded: {GPUS[0]} 2" in text
        monkeypatch.setattr(cuda, "spare_memory", lambda index: 4000 if index == 1 else 2**30)
        optimizer: Any = trainer.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, shard=True)
        optimizer.step()
        assert held(optimizer)[1] <= 4000 // 16 + 16
        monkeypatch.setattr(cuda, "spare_memory", lambda index: (10 + 10 * (index == 2)) * 4)
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, shard=True)
        optimizer.step()  # too little for all, and nothing better is known
        assert held(optimizer) == pytest.approx([count / 5, count / 5, 2 * count / 5, count / 5], abs=17)


def test_shard_says_from_how_many_gpus_on(fake: Any) -> None:
    cases: list[tuple[str, Any, bool]] = [
        ("one", True, False),
        ("two", "auto", False),
        ("two", True, True),
        ("four", "auto", True),
        ("four", False, False),
    ]
    for box, shard, sharded in cases:
        with DataParallel(network(), BOXES[box]) as trainer:
            optimizer: Any = trainer.optimizer(torch.optim.SGD, lr=0.1, shard=shard)
            assert hasattr(optimizer, "_shards") is sharded, (box, shard)
    with DataParallel(network(), BOXES["four"]) as trainer:
        assert hasattr(trainer.optimizer(torch.optim.SGD, lr=0.1), "_shards")
        assert type(trainer.optimizer(torch.optim.LBFGS, lr=0.1)) is torch.optim.LBFGS
        for wrong in ("yes", 1, None):
            with pytest.raises(InvalidArgument, match=r"shard is .*'auto'"):
                trainer.optimizer(torch.optim.SGD, lr=0.1, shard=wrong)  # type: ignore[arg-type]


@pytest.mark.own_gpus("GPUs have memory of their own")
def test_auto_shards_what_the_first_gpu_has_no_room_for(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(one.numel() for one in network().parameters())
    needed = 4 * 4 * count  # two moments, the gradient and what the update computes with
    for free, sharded in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(cuda, "spare_memory", lambda index, free=free: 2**34 if index else free)
        with paired(torch.optim.AdamW, {"lr": 0.01, "shard": "auto"}) as pair:
            assert "Optimizer" not in pair.trainer.explain()
            pair.step(batches(1)[0])
            assert bool(held(pair.optimizer)) is sharded
            found = pair.trainer.explain()
            if sharded:
                assert f"Optimizer: AdamW is sharded: {GPUS[0]}" in found
                assert pair.optimizer.state, "which brings it home"
                monkeypatch.setattr(cuda, "spare_memory", lambda index: 2**34)
            else:
                assert (
                    f"Optimizer: AdamW is not sharded, since it needs 0.0 MiB and {GPUS[0]} has 0.0 MiB free. shard=True"
                    in found
                )
                monkeypatch.setattr(cuda, "spare_memory", lambda index: 0)
            pair.step(batches(1)[0])
            assert bool(held(pair.optimizer)) is sharded, "it stays as it was at the first step"
            pair.expect_same_state()


@pytest.mark.parametrize(
    "options",
    [
        {"graphs": True},
        pytest.param(
            {"transport": "nccl"}, marks=pytest.mark.own_gpus("NCCL takes no two ranks of a process on one GPU")
        ),
        {"micro_batch": 2},
    ],
    ids=str,
)
def test_trainers_of_all_kinds_shard(fake: Any, options: dict[str, Any]) -> None:
    with DataParallel(network(), BOXES["four"], **options) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        for batch in batches(5):
            pair.step(batch)
        assert held(pair.optimizer)
        pair.expect_same_state()
        inputs = batches(1)[0][0]
        torch.testing.assert_close(trainer.predict(inputs), pair.reference(inputs).detach())


@pytest.mark.own_gpus("GPUs have memory of their own")
def test_parts_of_a_gpu_are_one_owner(fake: Any) -> None:
    for gpu in ("cuda:0", "cuda:1"):
        paceline.partition(gpu, [0.5, 0.5])
    with DataParallel(network(), ["cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1", "cuda:2"]) as trainer:
        pair = Pair(trainer, torch.optim.Adam, {"lr": 0.01})
        for batch in batches(3):
            pair.step(batch)
        assert len(held(pair.optimizer)) == 3
        pair.expect_same_state()


@pytest.mark.parametrize("name", ["AdamW-foreach", "Adagrad", "NAdam", "Adafactor", "AdamW-fused"])
def test_states_go_to_plain_torch_and_to_other_devices(fake: Any, name: str) -> None:
    cls, options = CLASSES[name]
    with paired(cls, options) as pair:
        for batch in batches(2):
            pair.step(batch)
        saved = copy.deepcopy(pair.optimizer.state_dict())
        plain = cls(pair.reference.parameters(), **options)
        plain.load_state_dict(saved)
        expect_same_state(plain.state_dict(), pair.plain.state_dict())
    with DataParallel(pair.module, BOXES["two"]) as trainer:
        pair.trainer, pair.optimizer = trainer, trainer.optimizer(cls, shard=True, **options)
        pair.optimizer.load_state_dict(saved)
        for batch in batches(2):
            pair.step(batch)
        pair.expect_same_state()
        pair.optimizer.load_state_dict(pair.plain.state_dict())  # the other way, into ranges that are there
        pair.step(batches(1)[0])
        pair.expect_same_state()


def test_copies_are_plain_optimizers(fake: Any) -> None:
    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        pair.step(batches(1)[0])
        assert repr(pair.optimizer).startswith("AdamW (")
        for one in (copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))):
            assert type(one) is torch.optim.AdamW
            expect_same_state(one.state_dict(), pair.plain.state_dict())
            one.step()
        pair.step(batches(1)[0])
        assert held(pair.optimizer), "sharded again"


def test_a_shallow_copy_keeps_the_state_that_it_was_made_with(fake: Any) -> None:
    with paired(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}) as pair:
        few = batches(2)
        pair.step(few[0])
        shallow, wanted = copy.copy(pair.optimizer), copy.deepcopy(pair.plain.state_dict())
        pair.step(few[1])
        expect_same_state(shallow.state_dict(), wanted)


def test_whoever_reads_the_state_finds_it(fake: Any) -> None:
    with paired(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}) as pair:
        for batch in batches(3):
            pair.step(batch)
            for ours, theirs in zip(pair.module.parameters(), pair.reference.parameters(), strict=True):
                assert torch.equal(
                    pair.optimizer.state[ours]["momentum_buffer"], pair.plain.state[theirs]["momentum_buffer"]
                )
                pair.optimizer.state[ours]["momentum_buffer"].mul_(0.5)
                pair.plain.state[theirs]["momentum_buffer"].mul_(0.5)
        pair.expect_same_state()


@pytest.mark.parametrize("name", ["AdamW-foreach", "AdamW-fused", "NAdam", "Adagrad", "Adafactor"])
@pytest.mark.own_gpus("GPUs have memory of their own")
def test_states_lie_where_their_owners_are(far_gpus: Any, name: str) -> None:
    cls, options = CLASSES[name]
    if options.get("fused"):
        options = options | {"fused": None}
    module = network().to(cuda.device(0))
    with DataParallel(module, BOXES["four"]) as trainer:
        optimizer: Any = trainer.optimizer(cls, shard=True, **options)
        plain = cls((reference := copy.deepcopy(module)).parameters(), **options)
        counterparts = dict(zip(module.parameters(), reference.parameters(), strict=True))
        for batch in batches(3):
            optimizer.zero_grad()
            trainer.step(classify, batch)
            for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                assert ours.grad is not None
                theirs.grad = ours.grad.clone()
            optimizer.step()
            plain.step()
            for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours, theirs)
            for owner, piece in optimizer._shards._all():
                assert piece.tensor.device == cuda.device(owner.device)
                for key, value in owner.state[piece.tensor].items():
                    on_host = plain.state[counterparts[piece.parameter]][key].device.type == "cpu"
                    assert value.device == (torch.device("cpu") if on_host else piece.tensor.device), key
            trainer.retire(GPUS[3])  # moves the ranges once, over the host
        saved = optimizer.state_dict()
        assert all(
            value.device.type == "cpu"
            for values in saved["state"].values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        )
        optimizer.load_state_dict(saved)
        optimizer.step()
        plain.step()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.own_gpus("GPUs have memory of their own")
def test_parameters_on_another_gpu_stay_there(far_gpus: Any) -> None:
    module = network().to(cuda.device(0))
    extra, plain = (nn.Parameter(torch.ones(10, device=cuda.device(1))) for _ in range(2))
    with DataParallel(module, BOXES["four"]) as trainer:
        options: dict[str, Any] = {"lr": 0.01, "foreach": False}
        optimizer: Any = trainer.optimizer(torch.optim.AdamW, [*module.parameters(), extra], shard=True, **options)
        reference = torch.optim.AdamW([plain], **options)
        for then in (lambda: trainer.retire(GPUS[3]), lambda: optimizer.state, lambda: trainer.restore(GPUS[3])):
            optimizer.zero_grad()
            trainer.step(classify, batches(1)[0])
            extra.grad, plain.grad = (torch.full_like(extra, 2.0) for _ in range(2))
            optimizer.step()
            reference.step()
            assert held(optimizer)
            assert torch.equal(extra, plain)
            then()
        moment = optimizer.state[extra]["exp_avg"]
        assert moment.device == extra.device
        assert torch.equal(moment, reference.state[plain]["exp_avg"])
