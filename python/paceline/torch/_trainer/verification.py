"""Looks from time to time whether the devices still agree."""

from __future__ import annotations

from typing import Any

from paceline import Error
from paceline.torch._batch.batch import BatchDim
from paceline.torch._batch.objective import Total, Weight
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._check.agreement import ReplicaReport, verify
from paceline.torch._run.train_run import LossFunction
from paceline.torch._trainer.arguments import check_trains
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.training import Training


class Verification(Part):
    """Compares the devices on request, and before each step whose number is a multiple of `every`."""

    def __init__(self, core: Core, training: Training, every: int | None) -> None:
        super().__init__(core)
        self._training = training
        self._every = every
        self._steps = 0

    def verify_replicas(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        weight: Weight | None = None,
        tolerance: float | None = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
    ) -> ReplicaReport:
        """Find out whether all devices have the same parameters and compute the same, for hardware that makes silent errors.

        One micro-batch of the batch runs on the module itself, on the caller's thread, and then on each device alone. Losses and gradients
        have to agree within rounding. Every copy of the parameters in another memory space has to have the same bits; host devices share
        one memory, so there are no copies. Items draw the same random numbers in all runs. Retired devices are left out.

        Leaves no trace, as `check` does. Takes the time of two micro-batches, and of one more for each device.

        Parameters
        ----------
        loss_fn, batch, weight, total, collate, batch_dim, split
            As for `step`.
        tolerance
            Up to this relative difference results count as equal. Default: what rounding may cause for the types of the parameters.

        Returns
        -------
        ReplicaReport
            ``agree``, ``verdict``, ``differences`` by device, ``copies`` by memory space. ``print`` shows all of it.

        Raises
        ------
        InvalidArgument, Exception
            As `step`.

        Examples
        --------
        >>> print(trainer.verify_replicas(loss_fn, batch))                          # doctest: +SKIP
        the devices agree (items 0 to 255 on each device)
        """
        with self._lifetime.between_steps("verify_replicas"):
            check_trains("verify_replicas", loss_fn)
            options = Options(weight, None, total, None, collate, batch_dim, split)
            return self._verify(loss_fn, batch, options, tolerance)

    def before_step(self, loss_fn: LossFunction, batch: Any, options: Options) -> None:
        """Compare, if it is time, inside of the exclusive call of the step.

        Raises
        ------
        Error
            If devices differ.
        """
        if self._every is None:
            return
        self._steps += 1
        if self._steps % self._every:
            return
        if self._execution.ranks is not None and not self._training.has_weight(batch, options):
            return
        check_trains("step", loss_fn)
        report = self._verify(loss_fn, batch, options, None)
        if not report.agree:
            error = Error(
                f"step: {report.verdict}. Rounding explains {report.tolerance:.0e}. Nothing was committed. retire() takes a device out; what was "
                "trained since the last comparison may be wrong."
            )
            error.device = report.differing[0] if len(report.differing) == 1 else None
            raise error

    def _verify(self, loss_fn: LossFunction, batch: Any, options: Options, tolerance: float | None) -> ReplicaReport:
        with self._works.no_trace():
            whole, objective, _ = self._training.prepared(batch, options._replace(cost=None))
            self._execution.places.begin(whole)
            devices = [device for device in range(len(self._works.names)) if device not in self._works.retired]
            return verify(
                self._execution,
                self._works.temporary(balance="even"),
                whole,
                objective,
                loss_fn,
                devices=devices,
                tolerance=tolerance,
            )
