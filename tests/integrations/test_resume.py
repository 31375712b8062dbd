"""What belongs to the trainer, in the checkpoints of frameworks: a run with dropout goes on as if it had not been interrupted."""

from __future__ import annotations

import importlib
import io
import tarfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainingArguments

from frameworks_support import EVEN, adam, dataset, difference, loss_fn, network, within
from paceline.lightning import PacelineStrategy
from paceline.torch import DataParallel
from paceline.transformers import PacelineMixin


class Lit(pl.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed, dropout=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_fn(self.net, batch)

    def configure_optimizers(self) -> Any:
        return adam(self)


def lightning_trainer(epochs: int) -> Any:
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, strategy=PacelineStrategy(**EVEN), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip


def fit(epochs: int, *, seed: int, resume: Any = None, save: Any = None) -> Any:
    module, trainer = Lit(seed), lightning_trainer(epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(dataset(), batch_size=10, shuffle=True), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def test_a_second_fit_does_not_go_on_from_the_random_numbers_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(DataParallel, "load_training_state", lambda trainer, state: loaded.append(state))
    module, trainer = Lit(0), lightning_trainer(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, DataLoader(dataset(), batch_size=10))
    assert (trainer.current_epoch, loaded) == (2, [])


def test_lightning(tmp_path: Path) -> None:
    whole = fit(3, seed=0)
    fit(1, seed=0, save=tmp_path / "one.ckpt")
    resumed = fit(3, seed=7, resume=str(tmp_path / "one.ckpt"))
    assert within(difference(resumed, whole), 1e-12)
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["paceline"]["steps"] == 4


class Classifier(nn.Module):
    """As transformers' models: it computes the loss itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed, dropout=0.5)

    def forward(self, x: Any, labels: Any) -> Any:
        output = self.net(x)
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


class Parallel(PacelineMixin, Trainer):
    data_parallel_options: ClassVar[dict[str, Any]] = EVEN
    steps = 0

    def log(self, *arguments: Any, **options: Any) -> None:
        if self.data_parallel is not None:
            self.steps = self.data_parallel.training_state()["steps"]
        super().log(*arguments, **options)


def test_transformers(tmp_path: Path) -> None:
    def train(resume: Any) -> tuple[Any, int]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, save_steps=3, per_device_train_batch_size=10, learning_rate=1e-2, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_steps=6,
        )  # fmt: skip
        samples = [{"x": x, "labels": y} for x, y in (dataset()[index] for index in range(40))]
        trainer = Parallel(Classifier(7 if resume else 0), arguments, train_dataset=samples)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model, trainer.steps

    whole, _ = train(None)
    state = torch.load(tmp_path / "checkpoint-3" / "paceline_0.pt", weights_only=True)
    assert state["steps"] == 3
    resumed, steps = train(str(tmp_path / "checkpoint-3"))
    assert within(difference(resumed, whole), 1e-12)
    assert steps == 6


def test_accelerate(tmp_path: Path) -> None:
    def train(seed: int, steps: range, resume: bool = False, save: bool = False) -> Any:
        accelerator = Accelerator(cpu=True)
        model = network(seed, dropout=0.5)
        model, optimizer = accelerator.prepare(model, adam(model))
        with DataParallel(accelerator.unwrap_model(model), **EVEN) as trainer:
            accelerator.register_for_checkpointing(
                SimpleNamespace(state_dict=trainer.training_state, load_state_dict=trainer.load_training_state)
            )
            if resume:
                accelerator.load_state(str(tmp_path / "saved"))
                assert trainer.training_state()["steps"] == steps.start
            for step in steps:
                accelerator.backward(trainer.loss(loss_fn, dataset()[10 * (step % 4) : 10 * (step % 4) + 10]))
                optimizer.step()
                optimizer.zero_grad()
            if save:
                accelerator.save_state(str(tmp_path / "saved"))
        accelerator.free_memory()
        return model

    whole = train(0, range(6))
    train(0, range(3), save=True)
    assert within(difference(train(7, range(3, 6), resume=True), whole), 1e-12)


# What needs no change: safetensors, and the loaders of torchdata and WebDataset. (torch.distributed.checkpoint is among the tests of `torch`.)


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
    webdataset = importlib.import_module("webdataset")
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
