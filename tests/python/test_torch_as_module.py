"""`DataParallel` as an `nn.Module`: it stands for the module that it wraps, as users of `torch.nn.DataParallel` expect."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline
from paceline.torch._trainer.passes import PassesClock
from torch_support import TWO, assert_same_gradients, classifier, classify, module_of, plain


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_a_script_for_nn_data_parallel_runs_with_one_changed_import() -> None:
    """Devices as numbers and by position, moves to where the module is, an EMA, and the keys of old checkpoints."""

    def run(wrap: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        module, (x, y) = classifier(16, seed=3)
        model = wrap(module, [0, 1], 0).to("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average, losses = AveragedModel(model), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model)
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model.eval()(x), y).item())
        return losses, model.state_dict()

    (theirs, old), (ours, new) = run(nn.DataParallel), run(DataParallel)
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert [f"module.{name}" for name in new] == list(old)
    for mine, their in zip(new.values(), old.values(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-9, atol=1e-12)


def test_it_can_be_called_and_stepped_in_turn() -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, device_ids=TWO) as model:
        model.step(classify, batch)
        assert "Calls:" not in model.explain()
        assert "calls" not in model.report()
        for _ in range(3):
            model.zero_grad()
            classify(model, batch).backward()
            assert_same_gradients(module, wanted)
            model.zero_grad()
            model.step(classify, batch)
            assert_same_gradients(module, wanted)
        assert model.report()["steps"] == 4
        assert model.report()["calls"]["steps"] == 3
        text = model.explain()
    assert "Calls: 3 forwards, 3 backwards" in text
    assert "step(loss_fn, batch) computes the loss on the devices" in text


@pytest.mark.parametrize(("between", "says"), [(0.1, "waited 100 of 400 ms (25%): step would save most"), (1e-4, "")])
def test_what_a_step_would_save_is_said_where_it_is_something(
    monkeypatch: pytest.MonkeyPatch, between: float, says: str
) -> None:
    monkeypatch.setattr("time.perf_counter", iter([0.0, 0.1, 0.1 + between, 0.3 + between]).__next__)
    clock = PassesClock(on_gpu=False)
    with clock("forward"):
        pass
    with clock("backward"):
        pass
    assert says in clock.explain()
    assert ("step would save" in clock.explain()) == bool(says)


@pytest.mark.parametrize("options", [{"memory": 10**6}, {"micro_batch": 3}, {"granularity": 4}, {"hold_back": True}])
def test_each_device_runs_its_share_of_a_call_as_one_micro_batch(options: Any) -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, classify, batch)
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    with DataParallel(module, TWO, prove=False, **options) as model:
        for _ in range(3):
            model.step(classify, batch)
            model.zero_grad()
            sizes.clear()
            classify(model, batch).backward()
            assert len(sizes) <= 2
            assert_same_gradients(module, wanted)
            model.zero_grad()


def test_names_are_those_of_the_module_also_inside_of_another_one() -> None:
    module = normed()
    with DataParallel(module, TWO) as model:
        outer, alone = nn.Sequential(nn.Linear(2, 2), model), nn.Sequential(nn.Linear(2, 2), module)
        for mine, theirs in ((model, module), (outer, alone)):
            for names in (nn.Module.named_parameters, nn.Module.named_buffers, nn.Module.named_modules):
                ours: Any = getattr(mine, names.__name__)()
                assert [name for name, _ in ours] == [name for name, _ in getattr(theirs, names.__name__)()]
            assert list(mine.state_dict()) == list(theirs.state_dict())
        assert not any(isinstance(part, DataParallel) for part in outer.modules())
        assert list(model.children()) == list(module.children())
        assert model.get_submodule("1") is module[1]
        assert model.get_parameter("0.weight") is module[0].weight


@pytest.mark.parametrize("wrapped", [normed, lambda: nn.BatchNorm1d(2), lambda: nn.DataParallel(normed())])
@pytest.mark.parametrize("inside", [False, True])
def test_both_forms_of_keys_are_loaded(wrapped: Any, inside: bool) -> None:
    module = wrapped()
    with DataParallel(module, TWO) as model:
        target = nn.Sequential(nn.Linear(2, 2), model) if inside else model
        for source in (wrapped(), nn.DataParallel(wrapped())):
            state: Any = (nn.Sequential(nn.Linear(2, 2), source) if inside else source).state_dict()
            for value in state.values():
                value.fill_(7)
            keys = list(state)
            assert not any(target.load_state_dict(state))
            assert all((value == 7).all() for value in module.state_dict().values())
            assert list(state) == keys  # the caller's dictionary stays
            assert list(state._metadata)
            for value in module.state_dict().values():
                value.zero_()


def test_wrong_keys_and_states_of_a_training_run_are_errors() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as model:
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"0.weight": module[0].weight})
        assert model.load_state_dict({}, strict=False).missing_keys
        model.step(classify, batch)
        state = model.training_state()
        with pytest.raises(InvalidArgument, match=r"Use load_training_state\(state\)"):
            model.load_state_dict(state)
        model.load_training_state(state)
        with pytest.raises(InvalidArgument, match="not a state of a trainer"):
            model.load_training_state(model.state_dict())


def test_what_changes_a_module_changes_the_wrapped_one() -> None:
    module = normed()
    with DataParallel(module, TWO) as model:
        assert model.eval() is model
        assert not module.training
        assert not model.training
        assert model.train() is model
        assert module[1].training
        assert model.requires_grad_(False) is model
        assert not any(parameter.requires_grad for parameter in module.parameters())
        seen: list[Any] = []
        assert model.apply(seen.append) is model
        assert seen == [*module.children(), module]
        model.register_buffer("scale", torch.ones(2), persistent=False)
        model.register_parameter("bias", nn.Parameter(torch.ones(2)))
        model.add_module("more", nn.Linear(1, 1))
        model.head = nn.Linear(3, 3)
        model.training = False
        assert all(getattr(module, name) is getattr(model, name) for name in ("scale", "bias", "head", "more"))
        assert not module.training
        model.note = "mine"
        assert not hasattr(module, "note")
        assert model.note == "mine"
        nn.Sequential(model).train()
        assert module.training


def test_hooks_and_compile_go_to_the_module() -> None:
    module, (x, _) = classifier(16)
    sizes: list[int] = []
    with DataParallel(module, TWO, balance="even", prove=False) as model:
        handle = model.register_forward_hook(lambda *given: sizes.append(len(given[2])))
        model(x).sum().backward()
        assert sizes == [8, 8]
        handle.remove()
        model(x)
        assert sizes == [8, 8]
        model.compile(backend="eager")
        assert module._compiled_call_impl is not None


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.half(), lambda m: m.to(torch.float32)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_move_away_from_the_devices_is_refused(move: Any, inside: bool) -> None:
    module, _ = classifier(16)
    message = r"0.weight is torch.float64 on cpu, and would become .* Move the module before"
    with DataParallel(module, TWO) as model:
        with pytest.raises(InvalidArgument, match=message):
            move(nn.Sequential(model) if inside else model)
        assert module[0].weight.dtype is torch.float64
        assert model.double().cpu().to("cpu", torch.float64) is model
        assert model.to(memory_format=torch.channels_last) is model  # type: ignore[call-overload]


def test_copies_are_of_the_plain_module() -> None:
    module, (x, _) = classifier(16)
    with DataParallel(module, TWO) as model:
        copied: Any = copy.deepcopy(nn.ModuleDict({"one": model, "same": module}))
        assert type(copied["one"]) is nn.Sequential
        assert copied["one"] is copied["same"]
        assert copied["one"] is not module
        text = pickle.dumps(model)
        assert b"paceline" not in text
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        for loaded in (pickle.loads(text), torch.load(stream, weights_only=False)):
            assert type(loaded) is nn.Sequential
            assert torch.equal(loaded(x), module(x))


def test_errors_of_attributes_say_where_they_are() -> None:
    class Mine(DataParallel):
        @property
        def broken(self) -> Any:
            return self.module.no_such_thing

    class Named(nn.Linear):
        config = "of the module"

    with Mine(Named(2, 2), TWO) as model:
        with pytest.raises(AttributeError, match="'Named' object has no attribute 'no_such_thing'"):
            _ = model.broken
        with pytest.raises(AttributeError, match=r"use .module.config"):
            _ = model.config
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
            _ = model.nothing
        with pytest.raises(AttributeError, match="module cannot be replaced"):
            model.module = nn.Linear(1, 1)
        assert "weight" in dir(model)


def test_a_module_may_have_the_names_of_the_parts_of_the_trainer() -> None:
    group = nn.Linear(6, 3)
    module = module_of(lambda m, x: m.group(x) + m.step, group=group, _training=group, step=5)
    with DataParallel(module, TWO) as model:
        model.step(classify, classifier(16)[1])
        assert len(model.group) == 2
        assert module.group is module._training


def test_a_dimension_beside_the_first_is_split_and_joined() -> None:
    module = nn.LSTM(6, 5).double()
    x, hidden = torch.randn(7, 16, 6, dtype=torch.float64), torch.randn(1, 16, 5, dtype=torch.float64)
    given = (x, (hidden, hidden))
    _, expected = plain(module, lambda m, b: m(*b)[0].square().sum(), given)
    with DataParallel(module, TWO, dim=1) as model:
        for _ in range(2):
            module.zero_grad()
            got = model(*given)
            torch.testing.assert_close(got, module(*given))
            got[0].square().sum().backward()
            assert_same_gradients(module, expected)
        with torch.no_grad():
            torch.testing.assert_close(model(*given), module(*given))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: DataParallel(m, TWO, device_ids=TWO), "two names for the same"),
        (lambda m: DataParallel(m, TWO, dim=-1), "dim is -1"),
        (lambda m: DataParallel(m, TWO, output_device="nowhere"), "output_device is 'nowhere'"),
        (lambda m: DataParallel(DataParallel(m, TWO), TWO), r"already. Give what it wraps: DataParallel\(model.module"),
        (lambda m: Pipeline(DataParallel(m, TWO), TWO), r"already. Give what it wraps: Pipeline\(model.module\)"),
        (lambda m: DataParallel(m, TWO).predict(torch.rand(8, 6), lambda one, x: one(x)), r"It is predict\(fn, batch"),
    ],
    ids=["devices", "dim", "output", "twice", "pipeline", "predict"],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make(classifier(16)[0])


def test_ranks_meet_in_step_only() -> None:
    module, (x, _) = classifier(16)
    alone: Any = SimpleNamespace(all_reduce=lambda tensor: None, should_commit=lambda: True)
    with DataParallel(module, TWO, reducer=alone) as model:
        with pytest.raises(InvalidArgument, match="gradients of this rank only"):
            model(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), module(x))


def test_devices_follow_a_move_until_the_trainer_was_asked_for_something() -> None:
    class Mine(DataParallel):
        def __init__(self, module: nn.Module, note: str) -> None:
            super().__init__(module)
            self.note = note

    refused = pytest.raises(InvalidArgument, match="away from the devices")
    with Mine(nn.Linear(3, 2), "kept") as mine:
        with refused:
            mine.double()
        assert mine.note == "kept"
    asks: list[Any] = [lambda one: one(torch.ones(4, 3)).sum().backward(), lambda one: one.optimizer(torch.optim.SGD)]
    for ask in asks:
        with DataParallel(nn.Linear(3, 2).double()) as model:
            model.note = "kept"
            assert model.float() is model
            assert model.module.weight.dtype is torch.float32
            assert model.note == "kept"
            ask(model)
            with refused:
                model.double()
