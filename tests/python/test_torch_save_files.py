"""What a save holds, the format of its files, which saves are kept, and what happens to damaged ones."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from paceline import Error, InvalidArgument, Unavailable
from paceline.torch import DataParallel
from save_cases import digest, network
from torch_support import TWO, classifier, classify


def everything() -> dict[Any, Any]:
    return {
        "none": None,
        "yes": True,
        "number": -(2**70),
        "real": 0.1,
        "infinite": [math.inf, -math.inf],
        "text": "ä\n€",
        "tuple": (0.9, (0.999,)),
        3: {"a.b": 1, "a": {"b": torch.ones(2)}, "$tensor": "no tensor"},
        ("a", 1): [],
        "milestones": Counter({30: 1, 80: 2}),
        "types": [
            torch.arange(6).to(dtype) for dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)
        ],
        "wide": [torch.arange(6).to(dtype) for dtype in (torch.int32, torch.uint32, torch.int64, torch.uint64)],
        "real types": [
            torch.randn(5).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ],
        "short": [torch.randn(5).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)],
        "complex": [torch.randn(3, 2, dtype=torch.complex64).conj(), torch.randn((), dtype=torch.complex128)],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "strided": torch.arange(12.0)[::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "__metadata__": torch.zeros(2),
        "for training": nn.Parameter(torch.ones(2)),
    }


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    module, _ = classifier()
    extra = everything()
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path, extra=extra)
        found = trainer.load(tmp_path)
    assert digest(found) == digest(extra)
    assert isinstance(found["milestones"], Counter)
    assert isinstance(found["tuple"], tuple)
    assert [one.dtype for one in found["short"]] == [one.dtype for one in extra["short"]]
    assert not found["for training"].requires_grad
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path, extra=torch.ones(3))
        assert torch.equal(trainer.load(tmp_path), torch.ones(3))


def test_what_cannot_be_saved_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer:
        for extra, where in (
            ({"a": [1, {"f": print}]}, r"extra\.a\.1\.f is a builtin_function_or_method"),
            ({"m": module}, r"extra\.m is a Sequential"),
            (torch.eye(3).to_sparse(), r"extra is a cpu tensor of layout torch\.sparse_coo"),
            ([torch.empty(2, device="meta")], r"extra\.0 is a meta tensor"),
        ):
            with pytest.raises(InvalidArgument, match=where):
                trainer.save_async(tmp_path, extra=extra)
        keep: Any
        for keep in (0, -1, 1.5, True):
            with pytest.raises(InvalidArgument, match="keep is"):
                trainer.save_async(tmp_path, keep=keep)
        with pytest.raises(InvalidArgument, match="optimizer is a"):
            trainer.save_async(tmp_path, optimizer=module.parameters())
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError):
            trainer.save_async(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(Unavailable, match="closed"):
        trainer.save_async(tmp_path)


def test_several_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        first = torch.optim.Adam(module[0].parameters())
        second = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)
        trainer.step(classify, batch)
        first.step()
        second.step()
        before = digest(first.state_dict(), second.state_dict())
        trainer.save_async(tmp_path, optimizer={"first": first, "second": second})
        first.step()
        second.step()
        assert digest(first.state_dict(), second.state_dict()) != before
        for wrong in (first, {"first": first}):
            with pytest.raises(InvalidArgument, match="saved with the optimizers first, second, which"):
                trainer.load(tmp_path, optimizer=wrong)
        assert digest(first.state_dict(), second.state_dict()) != before
        trainer.load(tmp_path, optimizer={"first": first, "second": second})
        assert digest(first.state_dict(), second.state_dict()) == before
        trainer.save_async(tmp_path)
        with pytest.raises(InvalidArgument, match="saved without optimizer"):
            trainer.load(tmp_path, optimizer=first)


def test_a_save_of_another_module_is_refused_with_the_name_of_the_save(tmp_path: Path) -> None:
    with DataParallel(network(), TWO) as trainer:
        folder = trainer.save_async(tmp_path).wait()
    with DataParallel(classifier()[0], TWO) as trainer, pytest.raises(RuntimeError, match="state_dict") as caught:
        trainer.load(tmp_path)
    assert str(folder) in str(getattr(caught.value, "__notes__", caught.value.__cause__))


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7))
    module[1].weight = module[0].weight
    return module


def test_the_safetensors_package_reads_the_files_with_tied_parameters_once(tmp_path: Path) -> None:
    module = tied()
    optimizer = torch.optim.Adam(module.parameters())
    with DataParallel(module, TWO) as trainer:
        trainer.step(lambda one, part: one(part).pow(2).mean(), torch.arange(14) % 7)
        optimizer.step()
        extra = everything()
        folder = trainer.save_async(tmp_path, optimizer=optimizer, extra=extra).wait()
        before = digest(module.state_dict())
        nn.init.zeros_(module.get_parameter("0.weight"))
        trainer.load(tmp_path)
        assert digest(module.state_dict()) == before
        assert module[1].weight is module[0].weight
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "1.weight": "0.weight"}
        assert set(file.keys()) == module.state_dict().keys() - {"1.weight"}
    other = tied()
    missing, unexpected = load_model(other, folder / "model.safetensors")
    assert not missing
    assert not unexpected
    assert digest(other.state_dict()) == before
    found = load_file(folder / "optimizer.safetensors")
    wanted = {
        f"state.{i}.{name}": one for i, state in optimizer.state_dict()["state"].items() for name, one in state.items()
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found = load_file(folder / "extra.safetensors")
    for key in ("types", "wide", "real types", "short"):
        for index, one in enumerate(extra[key]):
            assert found[f"{key}.{index}"].dtype == one.dtype
            assert torch.equal(found[f"{key}.{index}"].float(), one.float())
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1, "some files can be read by their owner only"


def test_the_newest_saves_are_kept_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer:
        for step in range(4):
            assert trainer.save_async(tmp_path, extra=step, keep=2).wait().name == f"save-{step + 1:08}"
        left = tmp_path / ".unfinished-save-00000005"
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "save-of-mine").mkdir()
        assert trainer.load(tmp_path) == 3
    with DataParallel(module, TWO) as trainer:  # another process would go on like this
        trainer.save_async(tmp_path, extra=4, keep=3)
        assert trainer.load(tmp_path) == 4
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "save-00000003", "save-00000004", "save-00000005", "save-of-mine"]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no files": lambda folder: list(map(os.unlink, folder.iterdir())),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 40),
    "a manifest of a later version": lambda folder: (folder / "manifest.json").write_text('{"version": 9}'),
    "no tensors": lambda folder: (folder / "model.safetensors").unlink(),
    "cut tensors": lambda folder: os.truncate(folder / "model.safetensors", 300),
    "a bit in the length": lambda folder: flip(folder / "model.safetensors", 1),
    "a bit in the header": lambda folder: flip(folder / "model.safetensors", 30),
    "a bit in the tensors": lambda folder: flip(folder / "model.safetensors", -9),
    "a bit in the state": lambda folder: flip(folder / "state.json", -9),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_save_is_skipped_with_a_warning(tmp_path: Path, damage: str) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path, extra="old")
        before = digest(module.state_dict())
        with torch.no_grad():
            module[0].weight.add_(1.0)
        folder = trainer.save_async(tmp_path, extra="new").wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trainer.load(tmp_path) == "new"
        DAMAGES[damage](folder)
        with pytest.warns(UserWarning, match=r"save-00000001 is loaded, .* not complete\. save-00000002: "):
            assert trainer.load(tmp_path) == "old"
        assert digest(module.state_dict()) == before
        DAMAGES[damage](tmp_path / "save-00000001")
        with pytest.raises(Error, match=r"no save in .* is complete\. save-00000002: .*; save-00000001: "):
            trainer.load(tmp_path)
        assert digest(module.state_dict()) == before
        with pytest.raises(FileNotFoundError, match="there is no save in"):
            trainer.load(tmp_path / "elsewhere")
