"""Lightning's Trainer with `PacelineStrategy`, against the same Trainer on one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworks_support import TWO, difference, within
from paceline import InvalidArgument
from paceline.lightning import PacelineStrategy

DTYPES: set[torch.dtype] = set()  # of the outputs that training steps have seen


class Classifier(pl.LightningModule):
    """Logs in every way that is merged."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        DTYPES.add(output.dtype)
        loss = nn.functional.cross_entropy(output, batch[1]) * self.scale
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"largest": output.max(), "steps": float(self.global_step)}, reduce_fx="max", on_step=True)
        self.log("constant size", loss, batch_size=20, on_epoch=True, on_step=False)
        self.log("right", (output.argmax(1) == batch[1]).sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader(items: int = 90, dtype: torch.dtype = torch.float64, size: int = 20) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 6, generator=generator, dtype=dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (items,), generator=generator)), batch_size=size)


class Record(pl.Callback):
    """Keeps every value that a batch logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append({key: float(value) for key, value in trainer.logged_metrics.items()})

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.cat([one.grad.flatten() for one in module.parameters()]).norm()))


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(module: Any, strategy: Any, folder: Any, **options: Any) -> tuple[Any, Record]:
    record = Record()
    given: dict[str, Any] = {**QUIET, "log_every_n_steps": 1, "logger": CSVLogger(folder), "callbacks": [record]}
    given |= options
    dtype = next(module.parameters()).dtype
    trainer = pl.Trainer(**given) if strategy is None else pl.Trainer(strategy=strategy, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(dtype=dtype), loader(dtype=dtype))
    return trainer, record


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "64-true"}],
    ids=["plain", "accumulation and clipping", "64-true"],
)
def test_a_fit_is_that_of_one_device(options: dict[str, Any], tmp_path: Any) -> None:
    ours, theirs = Classifier(), Classifier()
    trainer, got = fit(ours, PacelineStrategy(TWO, balance=[1, 2]), tmp_path, **options)
    _, wanted = fit(theirs, None, tmp_path, **options)
    assert within(difference(ours, theirs), 1e-12)
    assert got.norms == pytest.approx(wanted.norms, rel=1e-10)
    assert [step.keys() for step in got.steps] == [step.keys() for step in wanted.steps]
    for mine, reference in zip(got.steps, wanted.steps, strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)
    assert {key: float(value) for key, value in trainer.callback_metrics.items()}["loss_epoch"] > 0


def test_bf16_autocast_reaches_the_devices(tmp_path: Any) -> None:
    ours, theirs = Classifier(torch.float32), Classifier(torch.float32)
    DTYPES.clear()
    _, got = fit(ours, PacelineStrategy(TWO), tmp_path, precision="bf16-mixed")
    _, wanted = fit(theirs, None, tmp_path, precision="bf16-mixed")
    assert [step["loss_step"] for step in got.steps] == pytest.approx(
        [step["loss_step"] for step in wanted.steps], abs=2e-3
    )
    assert {torch.bfloat16} == DTYPES


def test_a_checkpoint_resumes_on_one_device(tmp_path: Any) -> None:
    ours = Classifier()
    trainer, _ = fit(ours, PacelineStrategy(TWO), tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    theirs = Classifier(seed=3)
    resumed = pl.Trainer(**QUIET, logger=False, enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.fit(theirs, loader(), ckpt_path=str(tmp_path / "one.ckpt"))
    reference = Classifier()
    fit(reference, None, tmp_path)
    assert within(difference(theirs, reference), 1e-12)


def test_outputs_beside_the_loss_come_back_whole(tmp_path: Any) -> None:
    class Outputs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.net(batch[0])
            return {"loss": nn.functional.cross_entropy(output, batch[1]), "output": output}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            shapes.append((tuple(outputs["output"].shape), len(batch[0])))

    shapes: list[Any] = []
    fit(Outputs(), PacelineStrategy(TWO), tmp_path, max_epochs=1)
    assert shapes == [((20, 3), 20)] * 4 + [((10, 3), 10)]


def test_weights_of_a_mean_over_tokens(tmp_path: Any) -> None:
    class Masked(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weight = batch[1].double()  # some slices have none
            losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            loss = (losses * weight).sum() / weight.sum()
            right = (self.net(batch[0]).argmax(1) == batch[1]).double().mean()
            self.log("loss", loss, on_step=True)
            self.log("mean over tokens", loss, on_step=True, batch_size=int(weight.sum()))
            self.log("mean over items", right, on_step=True, on_epoch=True, batch_size=len(batch[0]))
            return loss

    ours, theirs = Masked(), Masked()
    strategy = PacelineStrategy(TWO, balance=[1, 3], weight=lambda batch: batch[1], micro_batch=2)
    _, got = fit(ours, strategy, tmp_path)
    _, wanted = fit(theirs, None, tmp_path)
    for mine, reference in zip(got.steps, wanted.steps, strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)
    assert within(difference(ours, theirs), 1e-12)


@pytest.mark.parametrize("balance", ["even", [1, 2]])
def test_sizes_of_slices_add_up_also_if_they_are_equal(balance: Any, tmp_path: Any) -> None:
    class Tokens(Classifier):
        """Logs with a number of tokens that is that of the items in some slices, and that of the batch's items in others."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            tokens = batch[1].double()
            self.log("text of one length", losses.mean(), on_epoch=True, batch_size=len(batch[0]) * 4)
            self.log("masked", (losses * tokens).sum() / tokens.sum(), on_epoch=True, batch_size=int(tokens.sum()))
            return losses.mean()

    def run(strategy: Any) -> tuple[list[dict[str, float]], dict[str, float]]:
        trainer, got = fit(Tokens(), strategy, tmp_path, max_epochs=1, limit_train_batches=5)
        return got.steps, {key: float(value) for key, value in trainer.callback_metrics.items()}

    steps, means = run(PacelineStrategy(TWO, balance=balance, micro_batch=3))
    wanted_steps, wanted_means = run(None)
    for mine, reference in zip(steps, wanted_steps, strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)
    assert means == pytest.approx(wanted_means, rel=1e-9)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class Updates(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.accuracy.update(loss)
        return loss


class LogsMetric(Updates):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("accuracy", self.accuracy)
        return Classifier.training_step(self, batch, batch_idx)


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OwnReduction(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("middle", 1.0, reduce_fx=torch.median)
        return super().training_step(batch, batch_idx)


class Counts(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "items": len(batch[0])}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual, "manual optimization"),
        (Iterates, "dataloader_iter"),
        (Updates, "updates a torchmetrics object"),
        (LogsMetric, "with a torchmetrics object"),
        (OwnReduction, "reduce_fx=median"),
        (Skips, "returned no loss for a slice"),
        (Counts, "returned 'items', a value of type int"),
    ],
)
def test_what_a_split_would_make_wrong_is_refused(module: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(InvalidArgument, match=message):
        fit(module(), PacelineStrategy(TWO), tmp_path)


def test_the_module_is_left_as_it_was(tmp_path: Any) -> None:
    module = Classifier()
    before = set(vars(copy.copy(module)))
    fit(module, PacelineStrategy(TWO), tmp_path)
    assert set(vars(module)) - before <= {"_trainer", "_hparams"}  # these are Lightning's
    assert module.log.__self__ is module
