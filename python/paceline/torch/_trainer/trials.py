"""Runs that leave no trace: they find out whether a loss can be split, and how large a batch should be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.torch._batch.batch import BatchDim
from paceline.torch._batch.items import Cost
from paceline.torch._batch.objective import Total, Weight
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._check.check import check
from paceline.torch._check.report import CheckReport
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.buffers import KeptAttributes
from paceline.torch._run.call import Asked
from paceline.torch._run.execution import Execution
from paceline.torch._run.train_run import LossFunction, TrainRun
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.arguments import check_trains
from paceline.torch._trainer.batch_size import BatchSizeSearch, check_arguments, check_size, search
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.training import Training

_WARM_UP = 3  # steps; first runs of a size are slow, and shares have to settle
_LEAST = 5  # steps that count


class Trials(Part):
    """Runs that commit nothing."""

    def __init__(self, core: Core, training: Training) -> None:
        super().__init__(core)
        self._training = training

    def check(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        weight: Weight | None = None,
        tolerance: float | None = None,
        cost: Cost | None = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
    ) -> CheckReport:
        """Run one batch whole and in several splits, compare the results, and say what makes a difference.

        The whole batch runs on the module itself, splits run on the module and on the devices. If something is drawn, each item draws in
        every split what it drew in the whole batch. If that is not possible, the verdict is "cannot tell": for permutations, draws by Python
        or NumPy, compiled code, and fused kernels of GPUs.

        Leaves no trace: gradients (also of parameters outside of the module), buffers, the module's attributes, random generators, shares
        and ledger are as before. What `loss_fn` changes in Python stays changed. Takes the time of about a dozen forward and backward passes
        of one device, some more to look for the cause of a difference, and the memory of a whole batch on one device.

        Parameters
        ----------
        loss_fn, batch, weight, cost, total, collate, batch_dim, split
            As for `step`. Use at least 8 items; more are not necessary. With `cost` the batch also runs in the order that the costs give.
        tolerance
            Up to this relative difference results count as equal. Default: what rounding may cause for the types of the parameters.

        Returns
        -------
        CheckReport
            ``exact``, ``verdict``, ``causes``, ``splits``, and ``differences`` by parameter. ``print`` shows all of it.

        Raises
        ------
        InvalidArgument
            As `step`, and for a batch of one item.
        Exception
            What `loss_fn` raised for the whole batch. An error for a slice only is part of the report.

        Examples
        --------
        >>> print(trainer.check(loss_fn, batch))                                  # doctest: +SKIP
        not exact: running statistics (loss or gradients differ by up to 43%) (32 items)
        """
        with self._lifetime.between_steps("check"), self._works.no_trace():
            check_trains("check", loss_fn)
            options = Options(weight, cost, total, None, collate, batch_dim, split)
            whole, objective, costs = self._training.prepared(batch, options)
            self._execution.places.begin(whole)
            micro_batch = self._works.options["micro_batch"]
            return check(
                self._execution,
                self._works.temporary(micro_batch=micro_batch, balance="even"),
                whole,
                objective,
                loss_fn,
                reduction=self._training.reduction,
                micro_batch=micro_batch or None,
                tolerance=tolerance,
                costs=costs,
            )

    def find_batch_size(
        self,
        loss_fn: LossFunction,
        make_batch: Callable[[int], Any],
        *,
        weight: Weight | None = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
        smallest: int = 8,
        largest: int = 65536,
        efficiency: float = 0.9,
        seconds: float = 0.5,
    ) -> BatchSizeSearch:
        """Measure steps of growing batches on all devices together, and find the knee of the throughput.

        The batch is doubled until that brings less than 5 %, or memory does not allow more. Memory is seldom the limit, since micro-batches
        keep to what fits (`memory`). At the knee smaller micro-batches are measured, too, if the trainer was made without `micro_batch`.
        Leaves no trace, like `check`. Which batch is good for training is another question: learning rates belong to a batch size.

        Parameters
        ----------
        loss_fn, weight, total, collate, batch_dim, split
            As for `step`. `weight` has to be a callable, or a mapping of callables, since batches differ in size.
        make_batch
            ``make_batch(items)`` returns a batch of so many items.
        smallest, largest
            The sizes to begin and to end with.
        efficiency
            How much of the highest throughput is enough, as a fraction.
        seconds
            How long to time each size, after a warm-up.

        Returns
        -------
        BatchSizeSearch
            ``batch_size``, ``micro_batch``, and the times behind them. ``print`` and ``plot(path)`` show them.

        Raises
        ------
        InvalidArgument
            For arguments that cannot be used (before anything runs), and as `step`.
        """
        with self._lifetime.between_steps("find_batch_size"), self._works.no_trace():
            check_trains("find_batch_size", loss_fn)
            check_arguments(make_batch, weight, seconds)
            given = Options(weight, None, total, None, collate, batch_dim, split)
            own = self._works.options["micro_batch"]
            self._execution.replicas.refresh()
            kept = KeptAttributes(self._execution.replicas.all_modules)
            works: dict[int | None, Workload] = {}

            def measure(size: int, micro_batch: int | None) -> float:
                whole, objective, _ = self._training.prepared(make_batch(size), given)
                check_size(whole.size, size)
                self._execution.places.begin(whole)
                if micro_batch not in works:
                    options = {**self._works.options, "micro_batch": micro_batch or own}
                    options |= {"corrections": None} if options["micro_batch"] else {}
                    works[micro_batch] = self._works.temporary(**options)
                executor = partial(TrainRun, loss_fn=loss_fn, objective=objective)
                return _median_seconds(self._execution, Asked(works[micro_batch], whole, loss_fn, executor), seconds)

            devices = len(self._works.names)
            smaller = not own and not self._execution.synchronised
            try:
                return search(measure, smallest, largest, efficiency, micro_batches=smaller, devices=devices)
            finally:
                kept.restore()


def _median_seconds(execution: Execution, asked: Asked, at_least: float) -> float:
    """The median time of several steps on all devices, which are timed for `at_least` so many seconds.

    They commit nothing. Gradients, buffers and random generators are put back after each.
    """
    step_loop, random = asked.work.step_loop, RandomStates(execution.places)
    times: list[float] = []
    spent = 0.0
    while len(times) < _WARM_UP + _LEAST or spent < at_least:
        began = time.perf_counter()
        step_loop.commit(execution.train(asked, keep=False).outcome)
        step_loop.settle()
        times.append(time.perf_counter() - began)
        spent += times[-1] if len(times) > _WARM_UP else 0.0
        random.restore()
    return statistics.median(times[_WARM_UP:])
