"""What belongs to the trainer, in the checkpoints of frameworks: a run with dropout goes on as if it had not been interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from paceline.lightning import PacelineStrategy
from paceline.torch import DataParallel
from paceline.transformers import PacelineMixin

OPTIONS: dict[str, Any] = {"devices": ["host:0", "host:1"], "balance": "even"}  # so that devices draw the same numbers


def loss_fn(module: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def network() -> Any:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (40,), generator=generator))


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_fn(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(epochs: int, *, seed: int, resume: Any = None, save: Any = None) -> Any:
    torch.manual_seed(seed)
    module = Lit()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, strategy=PacelineStrategy(**OPTIONS), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data(), batch_size=10, shuffle=True), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def test_lightning(tmp_path: Path) -> None:
    whole = fit(3, seed=0)
    fit(1, seed=0, save=tmp_path / "one.ckpt")
    resumed = fit(3, seed=7, resume=str(tmp_path / "one.ckpt"))
    assert difference(resumed, whole) < 1e-12
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["paceline"]["steps"] == 4


class Classifier(nn.Module):
    """As transformers' models: it computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Any, labels: Any) -> Any:
        output = self.net(x)
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


class Parallel(PacelineMixin, Trainer):
    data_parallel_options: ClassVar[dict[str, Any]] = OPTIONS
    steps = 0

    def log(self, *arguments: Any, **options: Any) -> None:
        if self.data_parallel is not None:
            self.steps = self.data_parallel.state_dict()["steps"]
        super().log(*arguments, **options)


def test_transformers(tmp_path: Path) -> None:
    def train(resume: Any) -> tuple[Any, int]:
        torch.manual_seed(7 if resume else 0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, save_steps=3, per_device_train_batch_size=10, learning_rate=1e-2, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_steps=6,
        )  # fmt: skip
        samples = [{"x": x, "labels": y} for x, y in (data()[index] for index in range(40))]
        trainer = Parallel(Classifier(), arguments, train_dataset=samples)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model, trainer.steps

    whole, _ = train(None)
    state = torch.load(tmp_path / "checkpoint-3" / "paceline_0.pt", weights_only=True)
    assert state["steps"] == 3
    resumed, steps = train(str(tmp_path / "checkpoint-3"))
    assert difference(resumed, whole) < 1e-12
    assert steps == 6


def test_accelerate(tmp_path: Path) -> None:
    def train(seed: int, steps: range, resume: bool = False, save: bool = False) -> Any:
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        with DataParallel(accelerator.unwrap_model(model), **OPTIONS) as trainer:
            accelerator.register_for_checkpointing(trainer)
            if resume:
                accelerator.load_state(str(tmp_path / "saved"))
                assert trainer.state_dict()["steps"] == steps.start
            for step in steps:
                accelerator.backward(trainer.loss(loss_fn, data()[10 * (step % 4) : 10 * (step % 4) + 10]))
                optimizer.step()
                optimizer.zero_grad()
            if save:
                accelerator.save_state(str(tmp_path / "saved"))
        accelerator.free_memory()
        return model

    whole = train(0, range(6))
    train(0, range(3), save=True)
    assert difference(train(7, range(3, 6), resume=True), whole) < 1e-12
