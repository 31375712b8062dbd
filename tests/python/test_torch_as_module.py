"""`DataParallel` as an `nn.Module`: it stands for the module that it wraps, as users of `torch.nn.DataParallel` expect."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline import InvalidArgument
from paceline.torch import DataParallel, Pipeline
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, output_of


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
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    with DataParallel(module, device_ids=TWO) as model:
        for _ in range(3):
            model.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            assert_same_gradients(module, gradients(reference))
            model.zero_grad()
            model.step(classify, batch)
            assert_same_gradients(module, gradients(reference))
        assert model.report()["steps"] == 3
        assert model.report()["calls"]["steps"] == 3
        text = model.explain()
    assert "Calls: 3 forwards, 3 backwards" in text
    assert "step(loss_fn, batch) computes the loss on the devices" in text


@pytest.mark.parametrize("options", [{"memory": 10**6}, {"micro_batch": 3}, {"granularity": 4}, {"hold_back": True}])
def test_each_device_runs_its_share_of_a_call_as_one_micro_batch(options: Any) -> None:
    module, batch = classifier(16)
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    with DataParallel(module, TWO, prove=False, **options) as model:
        for _ in range(3):
            model.zero_grad()
            model.step(classify, batch)
            model.zero_grad()
            sizes.clear()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            assert len(sizes) <= 2
            assert_same_gradients(module, gradients(reference))


def test_explain_says_nothing_of_calls_where_there_were_none() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as model:
        model.step(classify, batch)
        assert "Calls:" not in model.explain()
        assert "calls" not in model.report()


def test_names_are_those_of_the_module_also_inside_of_another_one() -> None:
    module = normed()
    names = [name for name, _ in module.named_parameters()]
    with DataParallel(module, TWO) as model:
        outer, plain = nn.Sequential(nn.Linear(2, 2), model), nn.Sequential(nn.Linear(2, 2), module)
        for mine, theirs in ((model, module), (outer, plain)):
            assert [name for name, _ in mine.named_parameters()] == [name for name, _ in theirs.named_parameters()]
            assert [name for name, _ in mine.named_buffers()] == [name for name, _ in theirs.named_buffers()]
            assert [name for name, _ in mine.named_modules()] == [name for name, _ in theirs.named_modules()]
            assert list(mine.state_dict()) == list(theirs.state_dict())
        assert not any(isinstance(part, DataParallel) for part in outer.modules())
        assert [name for name, _ in model.named_parameters()] == names
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
        assert module.scale is model.scale
        assert module.bias is model.bias
        assert module.head is model.head
        assert isinstance(module.more, nn.Linear)
        assert not module.training
        model.note = "mine"
        assert not hasattr(module, "note")
        assert model.note == "mine"
        outer = nn.Sequential(model)
        outer.train()
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
    with DataParallel(module, TWO) as model:
        with pytest.raises(
            InvalidArgument, match=r"0.weight is torch.float64 on cpu, and would become .* Move the module before"
        ):
            move(nn.Sequential(model) if inside else model)
        assert module[0].weight.dtype is torch.float64
        assert model.double().cpu().to("cpu", torch.float64) is model
        assert model.to(memory_format=torch.channels_last) is model  # type: ignore[call-overload]


def test_before_the_first_call_the_devices_follow_a_move() -> None:
    module, (x, y) = classifier(16)
    with DataParallel(module) as model:
        assert model.float() is model
        assert module[0].weight.dtype is torch.float32
        nn.functional.cross_entropy(model(x.float()), y).backward()
        with pytest.raises(InvalidArgument, match="away from the devices"):
            model.double()


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


def test_an_error_inside_of_a_property_is_not_masked() -> None:
    class Mine(DataParallel):
        @property
        def broken(self) -> Any:
            return self.module.no_such_thing

    module, _ = classifier(16)
    with (
        Mine(module, TWO) as model,
        pytest.raises(AttributeError, match="'Sequential' object has no attribute 'no_such_thing'"),
    ):
        _ = model.broken


def test_an_attribute_of_the_module_is_found_at_the_module() -> None:
    class Named(nn.Linear):
        config = "of the module"

    with DataParallel(Named(2, 2), TWO) as model:
        with pytest.raises(AttributeError, match=r"use .module.config"):
            _ = model.config
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
            _ = model.nothing
        with pytest.raises(AttributeError, match="module cannot be replaced"):
            model.module = nn.Linear(1, 1)
        assert "weight" in dir(model)


def test_a_module_may_have_the_names_of_the_parts_of_the_trainer() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.group = self._training = nn.Linear(6, 3, dtype=torch.float64)
            self.step = 5

        def forward(self, x: Any) -> Any:
            return self.group(x) + self.step

    module, batch = Odd(), classifier(16)[1]
    with DataParallel(module, TWO) as model:
        model.step(classify, batch)
        assert len(model.group) == 2
        assert module.group is module._training


def test_a_dimension_beside_the_first_is_split_and_joined() -> None:
    module = nn.LSTM(6, 5).double()
    x, hidden = torch.randn(7, 16, 6, dtype=torch.float64), torch.randn(1, 16, 5, dtype=torch.float64)
    wanted = module(x, (hidden, hidden))
    wanted[0].square().sum().backward()
    expected = gradients(module)
    module.zero_grad()
    with DataParallel(module, TWO, dim=1) as model:
        for _ in range(2):
            module.zero_grad()
            got = model(x, (hidden, hidden))
            torch.testing.assert_close(got, wanted)
            got[0].square().sum().backward()
            assert_same_gradients(module, expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x, (hidden, hidden)), wanted)


def test_a_dropped_trainer_ends_without_the_collector() -> None:
    module, (x, _) = classifier(16)
    model = DataParallel(module, TWO)
    outer = nn.Sequential(model)
    outer(x).sum().backward()
    lifetime = weakref.ref(model._lifetime)
    gc.disable()
    try:
        del model, outer
        assert lifetime() is None
    finally:
        gc.enable()


def test_pickles_are_read_without_paceline() -> None:
    program = """
        import io, pickle, subprocess, sys, torch
        from paceline.torch import DataParallel
        with DataParallel(torch.nn.Linear(2, 3), ["host:0"]) as model:
            text = pickle.dumps(model)
        reader = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()), 'paceline' in sys.modules)"
        print(subprocess.run([sys.executable, "-c", reader], input=text, capture_output=True).stdout.decode().strip())
    """
    assert output_of(program) == "Linear(in_features=2, out_features=3, bias=True) False"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: DataParallel(m, TWO, device_ids=TWO), "two names for the same"),
        (lambda m: DataParallel(m, TWO, dim=-1), "dim is -1"),
        (lambda m: DataParallel(m, TWO, output_device="nowhere"), "output_device is 'nowhere'"),
        (
            lambda m: DataParallel(DataParallel(m, TWO), TWO),
            r"already. Give what it wraps: DataParallel\(model.module\)",
        ),
        (lambda m: Pipeline(DataParallel(m, TWO), TWO), r"already. Give what it wraps: Pipeline\(model.module\)"),
        (
            lambda m: DataParallel(m, TWO).predict(torch.rand(8, 6), lambda one, x: one(x)),
            r"It is predict\(fn, batch\)",
        ),
    ],
    ids=["devices", "dim", "output", "twice", "pipeline", "predict"],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make(classifier(16)[0])


def test_ranks_meet_in_step_only() -> None:
    class Alone:
        def all_reduce(self, tensor: torch.Tensor) -> None:
            pass

        def should_commit(self) -> bool:
            return True

    module, (x, _) = classifier(16)
    with DataParallel(module, TWO, reducer=Alone()) as model:
        with pytest.raises(InvalidArgument, match="gradients of this rank only"):
            model(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), module(x))


def test_a_trainer_that_was_asked_for_something_is_not_made_anew_for_a_move() -> None:
    class Mine(DataParallel):
        def __init__(self, module: nn.Module, note: str) -> None:
            super().__init__(module)
            self.note = note

    with Mine(nn.Linear(3, 2), "kept") as mine:
        with pytest.raises(InvalidArgument, match="away from the devices"):
            mine.double()
        assert mine.note == "kept"
    with DataParallel(nn.Linear(3, 2)) as trainer:
        trainer.note = "kept"
        trainer.double()
        assert trainer.note == "kept"
        trainer.optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(InvalidArgument, match="away from the devices"):
            trainer.float()
