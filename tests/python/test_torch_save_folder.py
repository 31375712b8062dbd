"""The folder of saves when the disk, the file system or another process gets in the way, and what a save must not lose."""

from __future__ import annotations

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
from torch_support import TWO

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
