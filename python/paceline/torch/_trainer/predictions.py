"""`DataParallel.predict`: outputs of the module for a batch, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch, BatchDim
from paceline.torch._batch.items import Cost
from paceline.torch._batch.joining import concatenate
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._devices.caller_state import NoGrad
from paceline.torch._devices.failures import noted
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._run.call import Asked
from paceline.torch._run.executor import PredictRun
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.proofs import Proofs
from paceline.torch._trainer.training import Training


class Predictions(Part):
    """Runs the module forward on all devices."""

    def __init__(self, core: Core, training: Training, proofs: Proofs) -> None:
        super().__init__(core)
        self._training = training
        self._proofs = proofs

    def predict(
        self,
        fn: Any,
        batch: Any = None,
        *,
        cost: Cost | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
        pad: float | None = None,
    ) -> Any:
        """Run the module forward over `batch` on all devices, without gradients: ``predict(fn, batch)``, or ``predict(batch)``.

        Calls from several threads wait for each other.

        Parameters
        ----------
        fn
            ``fn(module, slice)``. In ``predict(batch)`` it is ``module(slice)``. Returns tensors or arrays whose dimension 0 is the item, lists with one entry of any kind per
            item (labels, detections, texts), or a nest or an object of these, such as an output of Hugging Face with its cache. A 0-dim
            floating-point tensor, such as a loss, is taken for the mean over its slice. Other values have to be the same for all slices.
        batch, collate, batch_dim, split
            As for `step`.
        cost
            As for `step`. Outputs still come in the caller's order. If `fn` trims its slice, `pad` brings the outputs to a common length.
        pad
            What fills rows up at their ends where slices give other widths: the ``pad_token_id`` of ``generate``. None: an error.

        Returns
        -------
        Any
            What `fn` returns, for the whole batch, in the order of the items. The training mode is the module's own.

        Raises
        ------
        InvalidArgument
            For a batch, costs or outputs that cannot be used. With `group` and ``batch_norm="synchronised"``, if a norm would write running
            statistics, which are equal on all ranks.
        Timeout, DeviceLost, Error, Cancelled, KeyboardInterrupt
            As `step`.
        Exception
            What `fn` raised on a worker, with a note that names the device.
        """
        fn, batch = (_forward, fn) if batch is None else (fn, batch)
        if not callable(fn):
            raise InvalidArgument(
                f"predict: its first argument is a {type(fn).__name__}, not a function. It is predict(fn, batch), with fn(module, slice), or "
                "predict(batch)."
            )
        with self._lifetime.between_steps("predict", waits=True):
            self._check_modes()
            options = Options(cost=cost, collate=collate, batch_dim=batch_dim, split=split)
            whole = options.whole(batch, gradients=not torch.is_grad_enabled())
            costs = self._training.costs(cost, batch, whole)
            return self._predict(whole, fn, costs, pad)

    def _check_modes(self) -> None:
        """Raise if this rank alone would write running statistics that are equal on all ranks."""
        if not self._execution.meets_ranks():
            return
        norms: list[tuple[str, Any]] = using_batch_statistics(self._execution.replicas.norms)
        writing = next((name for name, part in norms if part.training and part.running_mean is not None), None)
        if writing is not None:
            raise InvalidArgument(
                f"predict: {writing or 'the module'} is in training mode, so it would change its running statistics by this rank's batch. With "
                "batch_norm='synchronised' and group= these are equal on all ranks, which meet in step and loss only. Call eval() before."
            )

    def _predict(
        self, whole: Batch, fn: Callable[[nn.Module, Any], Any], costs: list[float] | None, pad: float | None
    ) -> Any:
        if (proved := self._proofs.forward("predict", fn, whole, graph=False, pad=pad)) is not None:
            return proved[0]
        self._execution.places.begin(whole)
        work, executor = self._works.of("predict"), partial(PredictRun, fn=fn)
        run: PredictRun = self._execution.forward(Asked(work, whole, fn, executor, costs, hooks=True))
        places = self._execution.places
        with NoGrad():
            own = places.owned if run.items is None else run.items.restored
            return concatenate(run.outputs, places.to_home, own, pad=pad)


def _forward(module: nn.Module, part: Any) -> Any:
    """``module(part)``. Where that fails for a nest of tensors, the error tells how to pass its entries one by one."""
    try:
        return module(part)
    except (TypeError, AttributeError) as error:
        if isinstance(part, Mapping):
            entries = "by name, predict(lambda model, b: model(**b), batch)"
        elif isinstance(part, (tuple, list)):
            entries = "one by one, predict(lambda model, b: model(*b), batch)"
        else:
            raise
        noted(
            error,
            f"predict called module(batch), with the whole {type(part).__name__} as its only argument. If the module takes the entries "
            f"{entries} passes them.",
        )
        raise
