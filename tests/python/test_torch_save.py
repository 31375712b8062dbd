"""`state_dict`, `save_async` and `load`: a run that goes on from a save is the run that was not interrupted."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._trainer import saving
from save_cases import batches, digest, network, states, train
from torch_support import TWO, classifier, classify, hosts, noting, output_of

RESUMED = """
    import warnings
    import save_cases as t
    warnings.simplefilter("ignore")  # of batch normalisation
    module = t.network()
    torch.manual_seed(123)
    with DataParallel(module, {devices}, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        {load}
        t.train(trainer, optimizer, t.batches(7)[3:])
        print(t.states(module, optimizer), trainer.training_state()["steps"])
"""


def resumed(load: str, devices: list[str] = TWO) -> str:
    return output_of(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        + "\n".join(line[4:] for line in RESUMED.format(load=load, devices=devices).splitlines())
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str]:
    """A run on two devices that was saved after three steps, and the end of the run, which went on to seven."""
    module = network()
    torch.manual_seed(5)
    with DataParallel(module, TWO, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        train(trainer, optimizer, batches(7)[:3])
        trainer.save_async(tmp_path / "saves", optimizer=optimizer, extra={"step": 3})
        parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "trainer": trainer.training_state()}
        torch.save(parts, tmp_path / "parts.pt")
        train(trainer, optimizer, batches(7)[3:])
        return tmp_path, f"{states(module, optimizer)} {trainer.training_state()['steps']}"


def test_a_run_resumed_in_a_new_process_ends_in_the_same_bits(saved: tuple[Path, str]) -> None:
    path, end = saved
    assert resumed(f'assert trainer.load({str(path / "saves")!r}, optimizer=optimizer) == {{"step": 3}}') == end


def test_a_state_dict_read_with_weights_only_resumes_the_same_bits(saved: tuple[Path, str]) -> None:
    path, end = saved
    load = (
        f"parts = torch.load({str(path / 'parts.pt')!r}, weights_only=True); module.load_state_dict(parts['model']); "
        "optimizer.load_state_dict(parts['optimizer']); trainer.load_training_state(parts['trainer'])"
    )
    assert resumed(load) == end


def test_without_the_state_of_the_trainer_the_bits_are_others(saved: tuple[Path, str]) -> None:
    path, end = saved
    module = network()
    with DataParallel(module, TWO, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)

        def last_steps(*, whole: bool) -> str:
            parts = torch.load(path / "parts.pt", weights_only=True)
            module.load_state_dict(parts["model"])
            optimizer.load_state_dict(parts["optimizer"])
            if whole:
                trainer.load_training_state(parts["trainer"])
            train(trainer, optimizer, batches(7)[3:])
            return f"{states(module, optimizer)} {trainer.training_state()['steps']}"

        others = {last_steps(whole=False).split()[0] for _ in range(2)}
        assert end.split()[0] not in others
        assert len(others) == 2
        assert last_steps(whole=True) == end


@pytest.mark.parametrize("count", [1, 3])
def test_a_save_goes_on_on_another_number_of_devices(tmp_path: Path, count: int) -> None:
    module, _ = classifier()
    reference = copy.deepcopy(module)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for batch in batches(5):
        classify(reference, batch).backward()
        plain.step()
        plain.zero_grad()
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        train(trainer, optimizer, batches(5)[:2])
        trainer.save_async(tmp_path, optimizer=optimizer)
    other, _ = classifier(seed=1)
    with DataParallel(other, hosts(count)) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.5)
        assert trainer.load(tmp_path, optimizer=optimizer) is None
        assert trainer.training_state()["steps"] == 2
        train(trainer, optimizer, batches(5)[2:])
        assert trainer.training_state()["steps"] == 5
    for mine, theirs in zip(other.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_runs_of_a_batch_and_losses_for_backward_count_as_steps() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.loss(classify, batch).backward()
        with trainer.batch(batch) as whole:
            whole.run(lambda one, part: part.backward(classify(one, part.data)))
        trainer.check(classify, batch)
        with pytest.raises(ZeroDivisionError):
            trainer.step(noting(lambda one, part: 1 / 0), batch)
        assert trainer.training_state()["steps"] == 2


def test_a_state_holds_tensors_numbers_and_strings_only() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        state = trainer.training_state()
        drawn = torch.rand(3)
        assert state["version"] == 1
        assert state["steps"] == 1
        assert list(state["random"]) == ["host"]
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        trainer.load_training_state(torch.load(buffer, weights_only=True))
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "not a state of a trainer"),
        ({"version": 1, "steps": 1, "random": {}}, "not a state of a trainer"),
        (
            {"version": 1, "steps": "1", "random": {"host": torch.zeros(8, dtype=torch.uint8)}},
            "not a state of a trainer",
        ),
        ({"version": 1, "steps": 1, "random": {"host": torch.zeros(8)}}, "not a state of a trainer"),
        *(
            (
                {"version": 1, "steps": 1, "random": {"host": torch.zeros(8, dtype=torch.uint8)}, "speeds": speeds},
                "not a state of a trainer",
            )
            for speeds in (None, "{", "[]", '{"step": []}', '{"step": {"host": 1}}', '{"step": {"host": [[1, -1]]}}')
        ),
        ({"version": 2}, "has version 2, and this paceline reads version 1"),
        (None, "not a state of a trainer"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer:
        before = digest(trainer.training_state())
        with pytest.raises(InvalidArgument, match=message):
            trainer.load_training_state(state)
        assert digest(trainer.training_state()) == before


def test_gpus_get_their_states_by_uuid_and_unknown_ones_get_seeds_of_their_own() -> None:
    def drawn(generators: dict[str, torch.Generator]) -> dict[str, list[float]]:
        return {name: torch.rand(4, generator=one).tolist() for name, one in generators.items()}

    here = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(["host", "GPU-a", "GPU-b"])}
    state = {name: one.get_state() for name, one in here.items()}
    wanted = drawn(here)
    there = {name: torch.Generator() for name in ["host", "GPU-b", "GPU-c", "GPU-d", "GPU-a"]}
    saving.restore_random(there, state)
    found = drawn(there)
    assert {name: found[name] for name in wanted} == wanted
    assert len(set(map(tuple, found.values()))) == 5
    saving.restore_random(there, state)
    assert drawn(there) == found


def test_the_learning_rate_schedule_goes_on_from_extra(tmp_path: Path) -> None:
    module, _ = classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
    with DataParallel(module, TWO) as trainer:
        for _ in range(3):
            train(trainer, optimizer, batches(1))
            schedule.step()
        trainer.save_async(tmp_path, optimizer=optimizer, extra=schedule.state_dict())
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
        schedule.load_state_dict(trainer.load(tmp_path, optimizer=optimizer))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
        for _ in range(2):
            train(trainer, optimizer, batches(1))
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_distributed_checkpoints_of_two_devices_load_into_plain_pytorch(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    module, _ = classifier()
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        train(trainer, optimizer, batches(3))
        model_state, optimizer_state = get_state_dict(module, optimizer)
        parts: dict[str, Any] = {
            "model": model_state,
            "optimizer": optimizer_state,
            "trainer": trainer.training_state(),
        }
        speeds = parts["trainer"]["speeds"]
        dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
        drawn = torch.rand(3)
        train(trainer, optimizer, batches(1))
    other, _ = classifier(seed=1)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    model_state, optimizer_state = get_state_dict(other, plain)
    with DataParallel(classifier()[0], hosts(3)) as trainer:
        parts = {"model": model_state, "optimizer": optimizer_state, "trainer": trainer.training_state()}
        dcp.load(parts, checkpoint_id=tmp_path, no_dist=True)
        trainer.load_training_state(parts["trainer"])
        assert trainer.training_state()["steps"] == 3
        assert trainer.training_state()["speeds"] == speeds != "{}"
        assert torch.equal(torch.rand(3), drawn)
    set_state_dict(other, plain, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    classify(other, batches(1)[0]).backward()
    plain.step()
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_state_of_an_optimizer_is_refused_in_place_of_the_optimizer(tmp_path: Path) -> None:
    module, _ = classifier()
    state = torch.optim.AdamW(module.parameters()).state_dict()
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument) as caught:
        trainer.save_async(tmp_path, optimizer=state)  # a dictionary, as of optimizers by name
    assert str(caught.value).startswith("save_async: optimizer['state'] is a dict, and no optimizer")
    assert not list(tmp_path.iterdir())
