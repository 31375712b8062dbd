"""`state_dict`, `save_async` and `load`: a run that goes on from a save is the run that was not interrupted."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._trainer import saving
from save_cases import batches, digest, network, states, train
from torch_support import TWO, classifier, classify, hosts, noting, output_of


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


RESUMED = """
import sys, warnings
sys.path.insert(0, {tests!r})
import save_cases as t
warnings.simplefilter("ignore")  # of batch normalisation
module = t.network()
torch.manual_seed(123)
with DataParallel(module, ["host:0", "host:1"], balance="even") as trainer:
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
    assert trainer.load({saves!r}, optimizer=optimizer) == {{"step": 3}}
    t.train(trainer, optimizer, t.batches(7)[3:])
    print(t.states(module, optimizer), trainer.training_state()["steps"])
"""


def test_a_run_resumed_in_a_new_process_ends_in_the_same_bits(saved: tuple[Path, str]) -> None:
    path, end = saved
    assert output_of(RESUMED.format(tests=str(Path(__file__).parent), saves=str(path / "saves"))) == end


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


# The folder of saves when the disk, the file system or another process gets in the way, and what a save must not lose.


folder: Any = import_module("paceline.torch._save.folder")


@pytest.fixture
def trainer() -> Any:
    with DataParallel(nn.Linear(2, 2), TWO) as trainer:
        yield trainer


class Versioned(nn.Module):
    """Reads the states of other versions in another way, as modules of PyTorch do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") != 2:
            state_dict[f"{prefix}scale"] = -state_dict[f"{prefix}scale"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_learn_the_version_of_their_state(tmp_path: Path) -> None:
    module = nn.Sequential(Versioned())
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path).wait()
        trainer.load(tmp_path)
    assert torch.equal(module.state_dict()["0.scale"], torch.ones(2))


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as those of quantisation and of sharding are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a save computes nothing")


def test_tensors_without_memory_of_their_own_are_refused(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"extra\.a is a Wrapper"):
        trainer.save_async(tmp_path, extra={"a": Wrapper(torch.zeros(3)), "b": Wrapper(torch.ones(3))})


def test_what_cannot_be_removed_stays_and_saves_go_on(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    for number in range(1, 4):
        assert trainer.save_async(tmp_path, keep=1).wait().name == f"save-{number:08}"
    assert [path.name for path in tmp_path.glob("save-*")] == ["save-00000003"]


def test_a_failure_that_says_nothing_about_a_save_is_raised(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        trainer.save_async(tmp_path).wait()

    def no_more_files(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(folder, "read", no_more_files)
    with pytest.raises(OSError, match="Too many open files"):
        trainer.load(tmp_path)

    def no_memory(*args: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(folder, "read", no_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        trainer.load(tmp_path)


def test_a_save_that_its_writer_replaces_while_it_is_read_is_not_missed(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save_async(tmp_path, extra="old").wait()
    read = folder.read

    def replaced(path: Path, stamp: Any) -> Any:
        monkeypatch.setattr(folder, "read", read)
        trainer.save_async(tmp_path / "new", extra="new").wait()
        (tmp_path / "new" / "save-00000001").rename(tmp_path / "save-00000002")
        shutil.rmtree(path.parent)
        return read(path, stamp)

    with DataParallel(nn.Linear(2, 2), TWO) as reader:
        monkeypatch.setattr(folder, "read", replaced)
        assert reader.load(tmp_path) == "new"


def test_a_second_writer_is_told(trainer: Any, tmp_path: Path) -> None:
    with folder._only_writer(tmp_path):
        with pytest.raises(BlockingIOError, match="another process writes to this folder"):
            trainer.save_async(tmp_path).wait()
    trainer.save_async(tmp_path).wait()


def test_everything_is_on_the_disk_before_it_has_a_name(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink()).replace(str(tmp_path), "")))
        sync(descriptor)

    def renamed(path: Path, to: Path) -> Path:
        events.append(("rename", str(path).replace(str(tmp_path), "")))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    trainer.save_async(tmp_path / "a" / "b").wait()
    unfinished = next(name for what, name in events if what == "rename")
    before = events[: events.index(("rename", unfinished))]
    files = ("model.safetensors", "trainer.safetensors", "state.json", "manifest.json")
    assert {name for _, name in before} == {unfinished, *(f"{unfinished}/{name}" for name in files)}
    assert before[-1] == ("sync", unfinished), "the names come after the files"
    after = [name for what, name in events[len(before) + 1 :] if what == "sync"]
    assert after[:3] == ["/a/b", "/a", ""]
