"""Training with sharded optimizers: what the caller may do between steps, and when a step is a plain one."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, GPUS, gpu_type
from paceline.torch import DataParallel
from shard_cases import Pair, batches, expect_same_state, held, lay_out_anew, network, paired
from torch_support import classify

pytestmark = pytest.mark.usefixtures("small_shards")


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
    "edit", [write, write_data, load, replace, lay_out_anew, clip, write_gradients, transpose_gradients, drop_gradients]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_caller_writes_counts(fake: Any, edit: Callable[[nn.Module], None], when: str) -> None:
    if when == "after" and edit in (clip, write_gradients, transpose_gradients, drop_gradients):
        pytest.skip("gradients are new in each step")
    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        for batch in batches(3):
            if when == "after":
                pair.step(batch)
                edit(pair.module)
                edit(pair.reference)
            else:
                pair.step(batch, edit)
        pair.expect_same_state()


def test_version_counters_move_as_an_optimizers_do(fake: Any) -> None:
    with paired(torch.optim.SGD, {"lr": 0.1}) as pair:
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

    with paired(torch.optim.AdamW, {"lr": 0.01}, groups) as pair:
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


def test_devices_retire_and_come_back_with_their_ranges(fake: Any) -> None:
    with paired(torch.optim.AdamW, {"lr": 0.01, "fused": True}) as pair:
        few = batches(2)
        pair.step(few[0])
        pair.trainer.retire(GPUS[2])
        pair.step(few[1])
        assert list(dict.fromkeys(one.device for one in pair.optimizer._shards._owners)) == [0, 1, 3]
        pair.trainer.retire(GPUS[0])  # home, where the parameters are
        pair.step(few[0])
        assert held(pair.optimizer)[0] == 0
        pair.trainer.retire(GPUS[1])
        pair.step(few[0])
        assert not pair.optimizer._shards._owners
        for name in GPUS[:3]:
            pair.trainer.restore(name)
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
    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        few = batches(2)
        pair.step(few[0])
        inside, stepped = threading.Event(), threading.Event()

        def waiting(module: nn.Module, batch: Any) -> Any:
            inside.set()
            assert stepped.wait(30)
            return module(batch[0])

        thread = threading.Thread(target=lambda: pair.trainer.predict(waiting, few[0]))
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
    scalers = [torch.amp.GradScaler(gpu_type(), init_scale=4.0, growth_interval=2) for _ in range(2)]
    with paired(torch.optim.AdamW, {"lr": 0.01, "fused": fused}) as pair:
        for step, batch in enumerate(batches(5)):
            pair.optimizer.zero_grad()
            pair.plain.zero_grad()
            pair.trainer.step(classify, batch, scaler=scalers[0])
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
    with paired(torch.optim.SGD, {"lr": 0.1}) as pair:
        few = batches(2)
        pair.step(few[0])
        places = pair.trainer._execution.places
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
    with paired(torch.optim.AdamW, {"lr": 0.01}) as pair:
        pair.step(batches(1)[0])
        pair.trainer.save_async(tmp_path, optimizer=pair.optimizer).wait()
        assert held(pair.optimizer)
    with DataParallel(network(), BOXES["two"]) as other:
        again: Any = other.optimizer(torch.optim.AdamW, lr=0.5, shard=True)
        other.load(tmp_path, optimizer=again)
        expect_same_state(again.state_dict(), pair.plain.state_dict())
        pair.trainer, pair.module, pair.optimizer = other, other.module, again
        pair.step(batches(1)[0])
        pair.expect_same_state()


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
