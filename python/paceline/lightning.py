"""PyTorch Lightning on all devices of one machine: `PacelineStrategy`.

Needs lightning 2.6 and PyTorch, which this package does not install by itself.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from paceline import Error, InvalidArgument
from paceline.torch import DataParallel
from paceline.torch._check.proof import EXTRAS_OF_SLICES

__all__ = ["PacelineStrategy"]

_Kind = tuple[str, dict[str, Any]]  # the reduction of a logged value, and the other arguments of self.log
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "amin": "min", "max": "max", "amax": "max"}


class PacelineStrategy(SingleDeviceStrategy):
    """Runs ``training_step`` on all devices: ``Trainer(strategy=PacelineStrategy(), devices=1)``.

    The loader yields the batch of all devices together. Each device's copy of the `LightningModule` runs ``training_step`` on its slices.
    What the slices log is merged, and logged once. ``training_step`` may return tensors beside the loss: a row per item, or a mean. Loss, accumulation, clipping, precision, callbacks and checkpoints are those of one device.
    Checkpoints have one more entry, ``"paceline"``: `DataParallel.training_state`, with the states of the random generators. Validation, test and prediction run on the module's own device.

    Parameters
    ----------
    devices
        As for `paceline.torch.DataParallel`.
    weight, cost
        As for `DataParallel.step`: functions of the batch. `weight` is needed if the loss is a mean over something other than items.
    options
        Further arguments of `DataParallel`.

    Attributes
    ----------
    data_parallel
        The `DataParallel`, from the start to the end of a fit.

    Raises
    ------
    InvalidArgument
        For what a split would make wrong: manual optimization, ``training_step(dataloader_iter)``, torchmetrics that a training step updates or
        logs, reductions of its own in ``self.log``, and numbers that ``training_step`` returns beside the loss.

    Notes
    -----
    A mean that is logged without `batch_size` is weighted like the loss. Numbers that ``training_step`` logs are those of a slice: the mean of
    ``len(batch)`` is that of the slices' lengths. ``reduce_fx="sum"`` counts.

    `batch_size` in ``self.log`` is the slice's own, such as ``len(batch)`` or its number of tokens. It weighs the slice's mean, and the
    sum over the slices weighs the batch in the mean over an epoch. If all slices give the size of a full batch, it is taken for the batch's.

    What ``training_step`` writes to attributes of the module stays with the copy that ran, except for simple values and tensors without a graph
    (see `DataParallel`).
    """

    strategy_name = "paceline"

    def __init__(self, devices: Any = "auto", *, weight: Any = None, cost: Any = None, **options: Any) -> None:
        super().__init__()
        self.data_parallel: DataParallel | None = None
        self._devices = devices
        self._step_options = {"weight": weight, "cost": cost}
        self._options = options
        self._full = 0  # the size of the largest batch of this fit
        self._loaded: dict[str, Any] | None = None  # the state in a checkpoint that the next run goes on from
        self._last: dict[str, Any] | None = None  # the state of the last fit, for a checkpoint after it

    @property
    def root_device(self) -> torch.device:
        """Where the module is: the first GPU, or the host."""
        gpu = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot be split, and go on from the state in a checkpoint, before loaders draw random numbers."""
        super().setup(trainer)
        state, self._loaded = self._loaded, None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            raise InvalidArgument(
                "PacelineStrategy: manual optimization. training_step would step the optimizer for every slice of the batch. Use automatic "
                "optimization, or a loop of your own around paceline.torch.DataParallel.batch."
            )
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise InvalidArgument(
                "PacelineStrategy: training_step(dataloader_iter) fetches batches itself, so there is nothing to split. Use "
                "training_step(batch, batch_idx)."
            )
        self.data_parallel = DataParallel(module, self._devices, **self._options)
        self._full = 0
        if state is not None:
            self.data_parallel.load_training_state(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the state of the `DataParallel`, too."""
        state = self._last if self.data_parallel is None else self.data_parallel.training_state()
        if state is not None:
            checkpoint["paceline"] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Keep the state for the `DataParallel`."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = checkpoint.get("paceline")
        return checkpoint

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Leave batches for training on the host, since each device copies its own slices."""
        module: Any = self.lightning_module
        if module is not None and module.trainer.training:
            device = torch.device("cpu")
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """The loss of the whole batch, which carries the gradients, and what ``training_step`` returns beside it."""
        module: Any = self.lightning_module
        batch, *others = arguments
        assert self.data_parallel is not None  # since `setup`
        owner = module.trainer
        size = extract_batch_size(batch)
        self._full = max(self._full, size)
        kinds: dict[str, _Kind] = {}  # filled by the workers, which all log the same names
        counts = any(isinstance(part, Metric) for part in module.modules())

        def loss_fn(replica: Any, part: Any) -> Any:
            log = _Log(kinds, part)
            replica._trainer = owner  # copies leave it out
            before = _updates(replica) if counts else []
            vars(replica)["log"] = log.log
            try:
                output = replica.training_step(part, *others, **options)
            finally:
                del vars(replica)["log"]  # the module itself runs, too
            if counts and _updates(replica) != before:
                raise InvalidArgument(
                    "PacelineStrategy: training_step updates a torchmetrics object. Each device would update a copy, and the state would be lost. "
                    "Log tensors with self.log, which are merged, or update the metric in on_train_batch_end with what training_step returns."
                )
            beside = {} if output is None or isinstance(output, torch.Tensor) else dict(output)
            loss = beside.pop("loss", None) if beside else output
            if loss is None:
                raise InvalidArgument(
                    "PacelineStrategy: training_step returned no loss for a slice of the batch. A slice cannot be skipped by itself. Return a loss "
                    "for each, and skip a batch before it reaches training_step."
                )
            for name, value in beside.items():
                if isinstance(value, (int, float, str)):
                    raise InvalidArgument(
                        f"PacelineStrategy: training_step returned {name!r}, a value of type {type(value).__name__}, for a slice of the batch. Such "
                        "values cannot be merged from slices. Return a tensor with a row per item, or a 0-dimensional tensor that is a mean."
                    )
            return loss, (log.values, beside)

        vars(loss_fn)[EXTRAS_OF_SLICES] = True  # logged rows say how large a part of their slice they are
        loss: Any
        with self.precision_plugin.train_step_context():
            loss = self.data_parallel.loss(
                loss_fn, batch, **self._step_options, scaler=getattr(self.precision_plugin, "scaler", None)
            )
        logged, beside = self.data_parallel.extras
        for name, value in logged.items():
            reduction, log_options = kinds[name]
            merged, counts_as = _merged(reduction, value, size, self._full)
            module.log(name, merged, reduce_fx=reduction, batch_size=counts_as, **log_options)
        return {"loss": loss, **beside} if beside else loss

    def teardown(self) -> None:
        """End the workers, before the module moves."""
        if self.data_parallel is not None:
            with contextlib.suppress(Error):  # in the middle of an interrupted step there is none
                self._last = self.data_parallel.training_state()
            self.data_parallel.close()
            self.data_parallel = None
        super().teardown()


class _Log:
    """Takes the place of ``self.log`` of a device's copy for one slice, and keeps the values as extras.

    A mean without a `batch_size` of its own is 0-dimensional, so it is weighted like the loss. All else has a row per item, and beside it two
    rows, of the `batch_size` and of the part that an item is of its slice.
    """

    _signature = inspect.signature(LightningModule.log)

    def __init__(self, kinds: dict[str, _Kind], part: Any) -> None:
        self.values: dict[str, Any] = {}
        self._kinds = kinds
        self._part = part

    def log(self, *arguments: Any, **options: Any) -> None:
        given = self._signature.bind(None, *arguments, **options).arguments
        del given["self"]
        name, value, weight = given.pop("name"), given.pop("value"), given.pop("batch_size", None)
        asked = given.pop("reduce_fx", "mean")
        reduction = _REDUCTIONS.get(getattr(asked, "__name__", str(asked)).lower())
        if isinstance(value, Metric) or reduction is None:
            what = (
                "a torchmetrics object"
                if isinstance(value, Metric)
                else f"reduce_fx={getattr(asked, '__name__', asked)}"
            )
            raise InvalidArgument(
                f"PacelineStrategy: self.log({name!r}) with {what}, which cannot be merged from the slices of a batch. Log a number or a tensor, with "
                "one of the reductions mean, sum, min, max."
            )
        value = torch.as_tensor(value).detach().double().reshape(())
        self._kinds[name] = reduction, given
        if reduction == "mean" and weight is None:
            self.values[name] = value
            return
        items = extract_batch_size(self._part)
        row = (value / items if reduction == "sum" else value).expand(items)
        self.values[name] = (
            row,
            torch.full_like(row, items if weight is None else weight),
            torch.full_like(row, 1 / items),
        )


def _merged(reduction: str, value: Any, size: int, full: int) -> tuple[torch.Tensor, int]:
    """What is logged for a batch of `size` items, and how much it counts in an epoch's mean. `full` is the size of a full batch."""
    if isinstance(value, torch.Tensor):
        return value, size
    rows, given, part = value
    if reduction == "mean" and bool((given == full).all()):  # the caller's constant, which says nothing about slices
        return rows.mean(), full
    weights = given * part
    # Without slices that count nothing: their means may be 0/0.
    mean = (rows * weights)[weights > 0].sum() / weights.sum()
    merged = {"mean": mean, "sum": rows.sum(), "min": rows.amin(), "max": rows.amax()}
    return merged[reduction], max(1, round(weights.sum().item()))


def _updates(module: Any) -> list[int]:
    """How often each torchmetrics object in the module was updated."""
    return [part._update_count for part in module.modules() if isinstance(part, Metric)]
