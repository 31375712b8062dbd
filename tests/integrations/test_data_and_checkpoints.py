"""What needs no change: safetensors, and the loaders of torchdata and WebDataset. (torch.distributed.checkpoint is among the tests of `torch`.)"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchdata.stateful_dataloader import StatefulDataLoader

from frameworks_support import EVEN, adam, dataset, difference, loss_fn, network, within
from paceline.torch import DataParallel


def trained(module: Any, batches: Iterable[Any]) -> Any:
    """On one device."""
    optimizer = adam(module)
    for batch in batches:
        loss_fn(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def train(trainer: DataParallel, optimizer: Any, batches: Iterable[Any]) -> None:
    for batch in batches:
        trainer.step(loss_fn, batch)
        optimizer.step()
        optimizer.zero_grad()


def test_safetensors_of_a_trained_module_load_into_plain_pytorch(tmp_path: Path) -> None:
    module, other = network(), network(seed=1)
    with DataParallel(module, **EVEN) as trainer:
        train(trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2), [dataset()[:]])
        save_file(module.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert within(difference(other, trained(network(), [dataset()[:]])), 1e-12)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    def loader() -> Any:
        return StatefulDataLoader(dataset(), batch_size=8, shuffle=True, num_workers=workers)

    state: dict[str, Any] = {}
    module = network(dropout=0.5)
    with DataParallel(module, **EVEN) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        batches = loader()
        for index, batch in enumerate(batches):
            train(trainer, optimizer, [batch])
            if index == 1:
                saved = io.BytesIO()
                parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "trainer": trainer.training_state(), "loader": batches.state_dict()}, saved)
        assert index == 4
    state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    resumed = network(seed=7, dropout=0.5)
    resumed.load_state_dict(state["model"])
    with DataParallel(resumed, **EVEN) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        optimizer.load_state_dict(state["optimizer"])
        batches = loader()
        batches.load_state_dict(state["loader"])
        rest = iter(batches)
        trainer.load_training_state(state["trainer"])  # after the loader has drawn its seeds
        train(trainer, optimizer, rest)
    assert within(difference(resumed, module), 1e-12)


def test_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for index, (x, y) in enumerate(zip(*dataset().tensors, strict=True)):
            for name, value in ((f"{index:04}.x.pth", x.clone()), (f"{index:04}.y.pth", y.clone())):
                file = io.BytesIO()
                torch.save(value, file)
                member = tarfile.TarInfo(name)
                member.size = len(file.getvalue())
                shard.addfile(member, io.BytesIO(file.getvalue()))

    def loader() -> Any:
        samples = (
            webdataset.WebDataset(str(tmp_path / "shard.tar"), shardshuffle=False).decode().to_tuple("x.pth", "y.pth")
        )
        return webdataset.WebLoader(samples.batched(8), batch_size=None, num_workers=1)

    module = network()
    with DataParallel(module, **EVEN) as trainer:
        train(trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2), loader())
    assert within(difference(module, trained(network(), loader())), 1e-12)
    assert difference(module, network()) > 1e-2
