"""Optimizers whose state lies in ranges on several GPUs: the bits of one device, and an ordinary optimizer to the outside."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from gpu_cases import BOXES
from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from paceline.torch._trainer import shard_ranges, shards
from torch_support import classify

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD-plain": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW-tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def small_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tensors, too, in several rounds."""
    monkeypatch.setattr(shard_ranges, "ALIGNMENT", 16)
    monkeypatch.setattr(shards, "_LEAST_BYTES_OF_ROUNDS", 1)


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)) for _ in range(count)
    ]


def held(optimizer: Any) -> list[int]:
    """How many elements of the parameters each device has."""
    counts = {owner.device: 0 for owner in optimizer._shards._owners}
    for owner, piece in optimizer._shards._all():
        counts[owner.device] += piece.end - piece.begin
    return list(counts.values())


class Pair:
    """A module with a trainer and its optimizer, and a plain optimizer that gets the same gradients."""

    def __init__(self, trainer: DataParallel, cls: Any, options: dict[str, Any], parameters: Any = None) -> None:
        self.trainer = trainer
        self.module: Any = trainer.module
        self.optimizer: Any
        self.reference: Any = copy.deepcopy(self.module)
        options = {"shard": True} | options
        self.optimizer = trainer.optimizer(cls, *([parameters(self.module)] if parameters else []), **options)
        del options["shard"]
        self.plain = cls(
            parameters(self.reference) if parameters else self.reference.parameters(), **copy.deepcopy(options)
        )

    def step(self, batch: Any, edit: Callable[[nn.Module], object] = lambda module: None) -> None:
        """One step of both. `edit` is done to both modules between the gradients and the update."""
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.trainer.step(classify, batch)
        for ours, theirs in zip(self.module.parameters(), self.reference.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.detach().clone()
        edit(self.module)
        edit(self.reference)
        self.optimizer.step()
        self.plain.step()
        self.expect_same_parameters()

    def expect_same_parameters(self) -> None:
        for ours, theirs in zip(self.module.parameters(), self.reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def expect_same_state(self) -> None:
        expect_same_state(self.optimizer.state_dict(), self.plain.state_dict())


def expect_same_state(found: Any, wanted: Any) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("box", ["two", "four", "mixed"])
@pytest.mark.parametrize("name", CLASSES)
def test_ranges_give_the_bits_of_the_whole(fake: Any, name: str, box: str) -> None:
    cls, options = CLASSES[name]
    with DataParallel(network(), BOXES[box]) as trainer:
        pair = Pair(trainer, cls, options)
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


def test_small_ranges_are_updated_in_one_round(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for least, rounds in ((1, {0, 1, 2, 3}), (1 << 20, {0})):
        monkeypatch.setattr(shards, "_LEAST_BYTES_OF_ROUNDS", least)
        with DataParallel(network(), BOXES["four"]) as trainer:
            pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
            pair.step(batches(1)[0])
            assert {owner.round for owner, _ in pair.optimizer._shards._all()} == rounds
            pair.expect_same_state()


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
        assert "Optimizer: AdamW is sharded: cuda:0 2" in text
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


def test_auto_shards_what_the_first_gpu_has_no_room_for(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(one.numel() for one in network().parameters())
    needed = 4 * 4 * count  # two moments, the gradient and what the update computes with
    for free, sharded in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(cuda, "spare_memory", lambda index, free=free: 2**34 if index else free)
        with DataParallel(network(), BOXES["four"]) as trainer:
            pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01, "shard": "auto"})
            assert "Optimizer" not in trainer.explain()
            pair.step(batches(1)[0])
            assert bool(held(pair.optimizer)) is sharded
            found = trainer.explain()
            if sharded:
                assert "Optimizer: AdamW is sharded: cuda:0" in found
                assert pair.optimizer.state, "which brings it home"
                monkeypatch.setattr(cuda, "spare_memory", lambda index: 2**34)
            else:
                assert (
                    "Optimizer: AdamW is not sharded, since it needs 0.0 MiB and cuda:0 has 0.0 MiB free. shard=True"
                    in found
                )
                monkeypatch.setattr(cuda, "spare_memory", lambda index: 0)
            pair.step(batches(1)[0])
            assert bool(held(pair.optimizer)) is sharded, "it stays as it was at the first step"
            pair.expect_same_state()


@pytest.mark.parametrize("options", [{"graphs": True}, {"transport": "nccl"}, {"micro_batch": 2}], ids=str)
def test_trainers_of_all_kinds_shard(fake: Any, options: dict[str, Any]) -> None:
    with DataParallel(network(), BOXES["four"], **options) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        for batch in batches(5):
            pair.step(batch)
        assert held(pair.optimizer)
        pair.expect_same_state()
        inputs = batches(1)[0][0]
        torch.testing.assert_close(trainer.predict(inputs), pair.reference(inputs).detach())


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
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, cls, options)
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
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        pair.step(batches(1)[0])
        assert repr(pair.optimizer).startswith("AdamW (")
        for one in (copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))):
            assert type(one) is torch.optim.AdamW
            expect_same_state(one.state_dict(), pair.plain.state_dict())
            one.step()
        pair.step(batches(1)[0])
        assert held(pair.optimizer), "sharded again"


def test_whoever_reads_the_state_finds_it(fake: Any) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})
        for batch in batches(3):
            pair.step(batch)
            for ours, theirs in zip(pair.module.parameters(), pair.reference.parameters(), strict=True):
                assert torch.equal(
                    pair.optimizer.state[ours]["momentum_buffer"], pair.plain.state[theirs]["momentum_buffer"]
                )
                pair.optimizer.state[ours]["momentum_buffer"].mul_(0.5)
                pair.plain.state[theirs]["momentum_buffer"].mul_(0.5)
        pair.expect_same_state()


def write(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)


def write_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def load(module: nn.Module) -> None:
    module.load_state_dict({name: one * 0.5 for name, one in module.state_dict().items()})


def replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def write_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.001, 0.001)


def transpose_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() == 2:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.t().contiguous().t()


def drop_gradients(module: Any) -> None:
    module[2].weight.grad = None
    module[4].bias.grad = None


@pytest.mark.parametrize(
    "edit", [write, write_data, load, replace, clip, write_gradients, transpose_gradients, drop_gradients]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_caller_writes_counts(fake: Any, edit: Callable[[nn.Module], None], when: str) -> None:
    if when == "after" and edit in (clip, write_gradients, transpose_gradients, drop_gradients):
        pytest.skip("gradients are new in each step")
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        for batch in batches(3):
            if when == "after":
                pair.step(batch)
                edit(pair.module)
                edit(pair.reference)
            else:
                pair.step(batch, edit)
        pair.expect_same_state()


def test_version_counters_move_as_an_optimizers_do(fake: Any) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.SGD, {"lr": 0.1})
        before = [one._version for one in pair.module.parameters()]
        pair.step(batches(1)[0])
        assert all(one._version > then for one, then in zip(pair.module.parameters(), before, strict=True))
        kept = pair.module[0].weight.sin()
        pair.step(batches(1)[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def test_frozen_and_unused_parameters_get_no_update_and_no_state(fake: Any) -> None:
    module = network()
    module.append(nn.Identity())
    module[5].unused = nn.Parameter(torch.ones(50))
    module[0].weight.requires_grad_(False)
    with DataParallel(module, BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})
        for step, batch in enumerate(batches(4)):
            pair.module[0].weight.requires_grad_(step > 1)
            pair.reference[0].weight.requires_grad_(step > 1)
            pair.step(batch)
        pair.expect_same_state()
        assert len(pair.optimizer.state_dict()["state"]) == 6


def test_groups_and_parameters_that_no_device_has(fake: Any) -> None:
    extra = nn.Linear(9, 9)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        first, *rest = module.parameters()
        return [{"params": rest, "lr": 0.1}, {"params": [first], "weight_decay": 0.1}]

    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01}, groups)
        batch = batches(1)[0]
        pair.step(batch)
        later = copy.deepcopy(extra)
        pair.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.3})
        pair.plain.add_param_group({"params": later.parameters(), "lr": 0.3})
        for _ in range(2):
            for one in (extra, later):
                one.weight.grad, one.bias.grad = torch.ones(9, 9), torch.ones(9)
            pair.step(batch, lambda module: None)
            extra.zero_grad()
        assert held(pair.optimizer)
        pair.expect_same_state()


def test_a_tied_parameter_is_updated_once(fake: Any) -> None:
    module = network()
    module.append(nn.Linear(3, 3))
    module.append(nn.Linear(3, 3))
    module[6].weight = module[5].weight
    with DataParallel(module, BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        for batch in batches(3):
            pair.step(batch)
        pair.expect_same_state()


def test_parameters_that_overlap_are_updated_as_always(fake: Any) -> None:
    module = network()
    with DataParallel(module, BOXES["four"]) as trainer:
        optimizer: Any = trainer.optimizer(torch.optim.SGD, lr=0.1)
        trainer.step(classify, batches(1)[0])
        module[0].bias.data = module[0].weight.data.view(-1)[:24]
        optimizer.step()
        assert not optimizer._shards._owners


def test_devices_retire_and_come_back_with_their_ranges(fake: Any) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01, "fused": True})
        few = batches(2)
        pair.step(few[0])
        trainer.retire("cuda:2")
        pair.step(few[1])
        assert list(dict.fromkeys(one.device for one in pair.optimizer._shards._owners)) == [0, 1, 3]
        trainer.retire("cuda:0")  # home, where the parameters are
        pair.step(few[0])
        assert held(pair.optimizer)[0] == 0
        trainer.retire("cuda:1")
        pair.step(few[0])
        assert not pair.optimizer._shards._owners
        for name in ("cuda:0", "cuda:1", "cuda:2"):
            trainer.restore(name)
        pair.step(few[1])
        assert len(held(pair.optimizer)) == 4
        pair.expect_same_state()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_after_the_trainer_it_goes_on_as_a_plain_one(fake: Any, how: str) -> None:
    trainer = DataParallel(network(), BOXES["four"])
    pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
    pair.step(batches(1)[0])
    if how == "closed":
        trainer.close()
        assert not pair.optimizer._shards._owners, "the state has come home"
    del trainer, pair.trainer
    gc.collect()
    for _ in range(2):
        pair.optimizer.step()
        pair.plain.step()
    pair.expect_same_parameters()
    pair.expect_same_state()


def test_a_step_inside_of_another_call_is_a_plain_one(fake: Any) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        few = batches(2)
        pair.step(few[0])
        inside, stepped = threading.Event(), threading.Event()

        def waiting(module: nn.Module, batch: Any) -> Any:
            inside.set()
            assert stepped.wait(30)
            return module(batch[0])

        thread = threading.Thread(target=lambda: trainer.predict(few[0], waiting))
        thread.start()
        assert inside.wait(30)
        try:
            pair.optimizer.step()
            assert not pair.optimizer._shards._owners
        finally:
            stepped.set()
            thread.join()
        pair.plain.step()
        pair.expect_same_parameters()
        pair.step(few[1])
        assert held(pair.optimizer)
        pair.expect_same_state()


def test_a_closure_and_hooks_come_once(fake: Any) -> None:
    calls: list[str] = []
    with DataParallel(network(), BOXES["four"]) as trainer:
        optimizer: Any = trainer.optimizer(torch.optim.AdamW, lr=0.01, shard=True)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def closure() -> Any:
            calls.append("closure")
            optimizer.zero_grad()
            return trainer.step(classify, batches(1)[0])

        before = [one.detach().clone() for one in trainer.module.parameters()]
        assert optimizer.step(closure) > 0
        schedule.step()
        assert not any(map(torch.equal, before, trainer.module.parameters()))
        assert held(optimizer)
    assert calls == ["before", "closure", "after"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_step_that_overflows(fake: Any, fused: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01, "fused": fused})
        for step, batch in enumerate(batches(5)):
            pair.optimizer.zero_grad()
            pair.plain.zero_grad()
            trainer.step(classify, batch, scaler=scalers[0])
            scalers[1].scale(torch.zeros(()))
            for ours, theirs in zip(pair.module.parameters(), pair.reference.parameters(), strict=True):
                assert ours.grad is not None
                if step == 2:
                    ours.grad.view(-1)[-1] = torch.inf
                theirs.grad = ours.grad.clone()
            for scaler, optimizer in zip(scalers, (pair.optimizer, pair.plain), strict=True):
                scaler.step(optimizer)
                scaler.update()
            pair.expect_same_parameters()
            for ours, theirs in zip(pair.module.parameters(), pair.reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
        pair.expect_same_state()
        assert scalers[0].get_scale() == scalers[1].get_scale()


def test_an_error_in_a_range_comes_out_and_the_next_step_works(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.SGD, {"lr": 0.1})
        few = batches(2)
        pair.step(few[0])
        places = trainer._execution.places
        enter = places.enter

        def fail(device: int) -> Any:
            if device == 2:
                raise ValueError("broken")
            return enter(device)

        with monkeypatch.context() as patch:
            patch.setattr(places, "enter", fail)
            with pytest.raises(ValueError, match="broken"):
                pair.optimizer.step()
        pair.reference.load_state_dict(pair.module.state_dict())
        pair.step(few[1])


def test_saves_have_the_state_of_one_device(fake: Any, tmp_path: Any) -> None:
    with DataParallel(network(), BOXES["four"]) as trainer:
        pair = Pair(trainer, torch.optim.AdamW, {"lr": 0.01})
        pair.step(batches(1)[0])
        trainer.save_async(tmp_path, optimizer=pair.optimizer).wait()
        assert held(pair.optimizer)
    with DataParallel(network(), BOXES["two"]) as other:
        again: Any = other.optimizer(torch.optim.AdamW, lr=0.5, shard=True)
        other.load(tmp_path, again)
        expect_same_state(again.state_dict(), pair.plain.state_dict())
        pair.trainer, pair.module, pair.optimizer = other, other.module, again
        pair.step(batches(1)[0])
        pair.expect_same_state()


@pytest.mark.parametrize("name", ["AdamW-foreach", "AdamW-fused", "NAdam", "Adagrad", "Adafactor"])
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
            trainer.retire("cuda:3")  # moves the ranges once, over the host
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


def test_a_dropped_optimizer_leaves_nothing_to_the_garbage_collector(fake: Any) -> None:
    gc.disable()
    try:
        with DataParallel(network(), BOXES["four"]) as trainer:
            optimizer: Any = trainer.optimizer(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False, shard=True)
            trainer.step(classify, batches(1)[0])
            optimizer.step()
            watch = weakref.ref(optimizer._shards)
            del optimizer
            assert watch() is None
            trainer.step(classify, batches(1)[0])
    finally:
        gc.enable()
