"""`state_dict`, `save_async` and `load`: a run that goes on from a save is the run that was not interrupted."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import io
import json
import math
import os
import re
import resource
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Error, InvalidArgument, Timeout, Unavailable
from paceline.torch import DataParallel, PendingSave
from paceline.torch._save.folder import commit
from paceline.torch._trainer import saving
from torch_support import TWO, classifier, classify, hosts, noting, output_of, run_script

# The moments of a kill are random, so more of them find more: PACELINE_KILLS=50 pytest -k kill
KILLS = int(os.environ.get("PACELINE_KILLS", "10"))


def network() -> nn.Module:
    """Draws random numbers and writes buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)).double()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=generator, dtype=torch.double), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


def train(trainer: Any, optimizer: Any, data: Any, loss_fn: Any = classify) -> None:
    for batch in data:
        trainer.step(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()


def digest(*states: Any) -> str:
    """A number for all bits of nests of tensors and plain values."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            plain = value.detach().resolve_conj().contiguous()
            size = plain.numel() * plain.element_size()
            add([str(plain.dtype), list(plain.shape)])
            found.update(ctypes.string_at(plain.data_ptr(), size) if size else b"")
        elif isinstance(value, dict):
            add([[key, one] for key, one in value.items()])
        elif isinstance(value, (list, tuple)):
            found.update(b"(")
            for one in value:
                add(one)
            found.update(b")")
        else:
            found.update(repr(value).encode())

    add(list(states))
    return found.hexdigest()


def states(module: nn.Module, optimizer: Any) -> str:
    return digest(module.state_dict(), optimizer.state_dict())


RESUMED = """
    import warnings
    import test_torch_save as t
    warnings.simplefilter("ignore")  # of batch normalisation
    module = t.network()
    torch.manual_seed(123)
    with DataParallel(module, {devices}, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.01)
        {load}
        t.train(trainer, optimizer, t.batches(7)[3:])
        print(t.states(module, optimizer), trainer.state_dict()["steps"])
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
        parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "trainer": trainer.state_dict()}
        torch.save(parts, tmp_path / "parts.pt")
        train(trainer, optimizer, batches(7)[3:])
        return tmp_path, f"{states(module, optimizer)} {trainer.state_dict()['steps']}"


def test_a_run_resumed_in_a_new_process_ends_in_the_same_bits(saved: tuple[Path, str]) -> None:
    path, end = saved
    assert resumed(f'assert trainer.load({str(path / "saves")!r}, optimizer) == {{"step": 3}}') == end


def test_a_state_dict_read_with_weights_only_resumes_the_same_bits(saved: tuple[Path, str]) -> None:
    path, end = saved
    load = (
        f"parts = torch.load({str(path / 'parts.pt')!r}, weights_only=True); module.load_state_dict(parts['model']); "
        "optimizer.load_state_dict(parts['optimizer']); trainer.load_state_dict(parts['trainer'])"
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
                trainer.load_state_dict(parts["trainer"])
            train(trainer, optimizer, batches(7)[3:])
            return f"{states(module, optimizer)} {trainer.state_dict()['steps']}"

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
        assert trainer.load(tmp_path, optimizer) is None
        assert trainer.state_dict()["steps"] == 2
        train(trainer, optimizer, batches(5)[2:])
        assert trainer.state_dict()["steps"] == 5
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
        assert trainer.state_dict()["steps"] == 2


def test_a_state_holds_tensors_numbers_and_strings_only() -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        state = trainer.state_dict()
        drawn = torch.rand(3)
        assert state["version"] == 1
        assert state["steps"] == 1
        assert list(state["random"]) == ["host"]
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        trainer.load_state_dict(torch.load(buffer, weights_only=True))
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
        before = digest(trainer.state_dict())
        with pytest.raises(InvalidArgument, match=message):
            trainer.load_state_dict(state)
        assert digest(trainer.state_dict()) == before


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
        with pytest.raises(InvalidArgument, match="optimizer is"):
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
                trainer.load(tmp_path, wrong)
        assert digest(first.state_dict(), second.state_dict()) != before
        trainer.load(tmp_path, {"first": first, "second": second})
        assert digest(first.state_dict(), second.state_dict()) == before
        trainer.save_async(tmp_path)
        with pytest.raises(InvalidArgument, match="saved without optimizer"):
            trainer.load(tmp_path, first)


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


def test_files_have_the_safetensors_format_and_tied_parameters_once(tmp_path: Path) -> None:
    module = tied()
    with DataParallel(module, TWO) as trainer:
        folder = trainer.save_async(tmp_path).wait()
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert length % 8 == 0
        assert header.pop("__metadata__") == {"format": "pt", "1.weight": "0.weight"}
        spans = sorted(entry["data_offsets"] for entry in header.values())
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert 8 + length + spans[-1][1] == len(data)
        assert header.keys() == module.state_dict().keys() - {"1.weight"}
        begin, end = header["0.weight"]["data_offsets"]
        assert header["0.weight"] == {"dtype": "F32", "shape": [7, 5], "data_offsets": [begin, end]}
        bytes_of = bytearray(data[8 + length + begin : 8 + length + end])
        assert torch.equal(
            torch.frombuffer(bytes_of, dtype=torch.float32).reshape(7, 5), module.state_dict()["0.weight"]
        )
        before = digest(module.state_dict())
        nn.init.zeros_(module.get_parameter("0.weight"))
        trainer.load(tmp_path)
        assert digest(module.state_dict()) == before
        assert module[1].weight is module[0].weight


def test_the_safetensors_package_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    module = tied()
    optimizer = torch.optim.Adam(module.parameters())
    with DataParallel(module, TWO) as trainer:
        trainer.step(lambda one, part: one(part).pow(2).mean(), torch.arange(14) % 7)
        optimizer.step()
        extra = everything()
        folder = trainer.save_async(tmp_path, optimizer=optimizer, extra=extra).wait()
    other = tied()
    missing, unexpected = safetensors.load_model(other, folder / "model.safetensors")
    assert not missing
    assert not unexpected
    assert digest(other.state_dict()) == digest(module.state_dict())
    found = safetensors.load_file(folder / "optimizer.safetensors")
    wanted = {
        f"state.{i}.{name}": one for i, state in optimizer.state_dict()["state"].items() for name, one in state.items()
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found = safetensors.load_file(folder / "extra.safetensors")
    for key in ("types", "wide", "real types", "short"):
        for index, one in enumerate(extra[key]):
            assert found[f"{key}.{index}"].dtype == one.dtype
            assert torch.equal(found[f"{key}.{index}"].float(), one.float())


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


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves begin to be written when the event is set."""
    go = threading.Event()

    def late(*args: Any) -> Path:
        assert go.wait(60)
        return commit(*args)

    monkeypatch.setattr(saving, "commit", late)
    try:
        yield go
    finally:
        go.set()


def test_a_save_has_the_values_of_the_call_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = network()
    with DataParallel(module, TWO) as trainer, held(monkeypatch) as go:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=0.1)
        train(trainer, optimizer, batches(1))
        before, extra = states(module, optimizer), {"list": [1], "tensor": torch.zeros(3)}
        pending = trainer.save_async(tmp_path, optimizer=optimizer, extra=extra)
        extra["list"].append(2)  # type: ignore[attr-defined]
        extra["tensor"] += 1  # type: ignore[operator]
        train(trainer, optimizer, batches(3))
        assert states(module, optimizer) != before
        assert not pending.done
        assert "being written" in repr(pending)
        with pytest.raises(Timeout, match=r"still being written after 0\.01 s"):
            pending.wait(0.01)
        assert list(tmp_path.iterdir()) == []
        go.set()
        assert pending.wait() == tmp_path / "save-00000001"
        assert "save-00000001" in repr(pending)
        found = trainer.load(tmp_path, optimizer)
        assert found["list"] == [1]
        assert found["tensor"].tolist() == [0, 0, 0]
        assert states(module, optimizer) == before


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = classifier()
    with DataParallel(module, TWO) as trainer, held(monkeypatch) as go:
        first = trainer.save_async(tmp_path, extra=1)
        done: list[bool] = []
        waiter = threading.Thread(
            target=lambda: done.append(trainer.save_async(tmp_path, extra=2) is not first and first.done)
        )
        waiter.start()
        waiter.join(0.2)
        assert done == []
        go.set()
        waiter.join()
        assert done == [True]
        assert trainer.load(tmp_path) == 2


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can become larger than 2 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failed_save(trainer: Any, path: Path) -> PendingSave:
    with full_disk():
        pending: PendingSave = trainer.save_async(path, extra=torch.zeros(1000))
        pending.join()
    return pending


def test_an_error_of_the_thread_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    module, batch = classifier()
    with DataParallel(module, TWO) as trainer:
        trainer.save_async(tmp_path, extra="good").wait()
        assert "failed" in repr(failed_save(trainer, tmp_path))
        trainer.step(classify, batch)
        with pytest.raises(OSError, match="File too large"):
            trainer.save_async(tmp_path)
        assert trainer.load(tmp_path) == "good"
        pending = failed_save(trainer, tmp_path)
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                pending.wait()
        trainer.save_async(tmp_path, extra="better")
        assert trainer.load(tmp_path) == "better"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["save-00000001", "save-00000002"]


def test_an_error_of_the_thread_is_raised_by_close_but_hides_no_other(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), DataParallel(classifier()[0], TWO) as trainer:
        failed_save(trainer, tmp_path)
    trainer.close()
    pending = []

    def fails() -> None:
        with DataParallel(classifier()[0], TWO) as trainer:
            pending.append(failed_save(trainer, tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(OSError, match="File too large"):
        pending[0].wait()


def test_an_error_that_nobody_asks_for_is_a_warning(tmp_path: Path) -> None:
    trainer = DataParallel(classifier()[0], TWO)
    failed_save(trainer, tmp_path)
    with pytest.warns(RuntimeWarning, match="a save could not be written: OSError"):
        del trainer


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    program = f"""
    trainer = DataParallel(nn.Linear(2000, 1000), ["host:0", "host:1"])
    trainer.save_async({str(tmp_path)!r}, extra="all")
    print("end")
    """
    assert output_of(program) == "end"
    with DataParallel(nn.Linear(2000, 1000), TWO) as trainer:
        assert trainer.load(tmp_path) == "all"


def test_a_program_that_ends_tells_of_an_error(tmp_path: Path) -> None:
    program = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    trainer = DataParallel(nn.Linear(2000, 1000), ["host:0", "host:1"])
    trainer.save_async({str(tmp_path)!r}, extra="all")
    """
    done = run_script(program)
    assert done.returncode == 0
    assert "a save could not be written: OSError(27, 'File too large')" in done.stderr


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
        schedule.load_state_dict(trainer.load(tmp_path, optimizer))
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
        parts: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "trainer": trainer.state_dict()}
        speeds = parts["trainer"]["speeds"]
        dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
        drawn = torch.rand(3)
        train(trainer, optimizer, batches(1))
    other, _ = classifier(seed=1)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    model_state, optimizer_state = get_state_dict(other, plain)
    with DataParallel(classifier()[0], hosts(3)) as trainer:
        parts = {"model": model_state, "optimizer": optimizer_state, "trainer": trainer.state_dict()}
        dcp.load(parts, checkpoint_id=tmp_path, no_dist=True)
        trainer.load_state_dict(parts["trainer"])
        assert trainer.state_dict()["steps"] == 3
        assert trainer.state_dict()["speeds"] == speeds != "{}"
        assert torch.equal(torch.rand(3), drawn)
    set_state_dict(other, plain, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    classify(other, batches(1)[0]).backward()
    plain.step()
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# One process imports PyTorch and forks the ones that are killed. It has no thread but its own until the end.
KILLED = """
import ctypes, os, random, signal, sys, time, warnings
os.environ |= {{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}}  # NumPy's threads
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from paceline.torch import DataParallel
import test_torch_save as t

root, log, kills, seed = {root!r}, {log!r}, {kills}, random.randrange(10**6)
warnings.simplefilter("error")  # a save that is not complete would be a warning

def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def run(only_load):
    module = nn.Sequential(nn.Linear(6, 2000), nn.Dropout(0.5), nn.Linear(2000, 3)).double()
    t.seeded(module)
    with DataParallel(module, t.TWO, balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.Adam, lr=0.01)
        try:
            step = trainer.load(root, optimizer)["step"]
        except FileNotFoundError:
            step = 0
        note("loaded", step, t.states(module, optimizer))
        while not only_load:
            note("state", step, t.states(module, optimizer))
            trainer.save_async(root, optimizer=optimizer, extra={{"step": step}}, keep=2)
            note("begun", step)
            t.train(trainer, optimizer, t.batches(1))
            step += 1

def lines():
    return Path(log).read_text().splitlines() if os.path.exists(log) else []

# What PyTorch imports at the first step of an optimizer takes a second, so it is not left to every child.
weight = nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.Adam([weight]).step()
assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread may fork"
random.seed(seed)
for kill in range(kills):
    seen = len(lines())
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, whatever happens to it
        try:
            run(False)
        finally:
            os._exit(1)
    wanted = seen + 1 + random.randrange(10)
    while len(lines()) < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has failed by itself"
        time.sleep(0.002)
    time.sleep(random.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child has failed by itself"
    note("killed", kill)
run(True)
print("seed", seed)
"""


def seeded(module: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1)


def test_a_process_killed_at_any_moment_loses_at_most_the_steps_since_the_last_commit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = KILLED.format(tests=str(Path(__file__).parent), root=str(tmp_path / "saves"), log=str(log), kills=KILLS)
    done = run_script(program, timeout=20 + 2 * KILLS, preamble=False)
    assert done.returncode == 0, done.stdout + done.stderr
    digests: dict[str, str] = {}
    loaded, committed, reached, kills = 0, 0, 0, 0
    for line in log.read_text().splitlines():
        word, *rest = line.split()
        step = int(rest[0])
        if word == "killed":
            kills += 1
        elif word == "begun":  # then the save before is complete
            committed = max(loaded, step - 1)
        else:
            assert digests.setdefault(rest[0], rest[1]) == rest[1], f"step {step} has other bits; {done.stdout}"
            if word == "loaded":
                assert committed <= step <= reached, done.stdout
                loaded = committed = step
            reached = step
    assert kills == KILLS
    assert loaded > 0
    assert re.fullmatch(r"seed \d+", done.stdout.strip())
