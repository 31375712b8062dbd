"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline.balance import WhatIfAnswer
from paceline.comm import Transport
from paceline.torch._arguments import (
    Balance,
    Memory,
    check_corrections,
    check_devices,
    check_scaler,
    check_trains,
    check_transport,
    memory_limits,
    named_devices,
    policy_of,
)
from paceline.torch._batch import Batch
from paceline.torch._batch_size import BatchSizeSearch, check_size, search
from paceline.torch._check import check
from paceline.torch._check_report import CheckReport
from paceline.torch._claims import ClaimScript, ReplayedCaps
from paceline.torch._execution import Execution, Workload
from paceline.torch._global_batch import FunctionRun, GlobalBatch, RunFunction
from paceline.torch._items import Cost, costs_of
from paceline.torch._lifetime import Lifetime
from paceline.torch._objective import Objective, Reduction, Weight
from paceline.torch._places import Places
from paceline.torch._replicas import Replicas, Replicate
from paceline.torch._run import LossFunction, PredictRun, TrainRun
from paceline.torch._step_timer import StepTimer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline._progress import Progress

_T = TypeVar("_T")


class DataParallel(Lifetime):
    """Trains `module` on several devices of this machine, with exactly the gradient of one.

    Every call of `step` splits one batch over the devices in proportion to what was measured of them, runs forward and backward on
    persistent replicas that share the parameters, and commits the gradient of the *whole* batch to the parameters' ``.grad``.
    The module stays the user's: its parameters are the trained ones and its ``state_dict`` is the single-device one.

    Parameters
    ----------
    module
        The module to train. With two or more devices it is copied once per device (parameters shared within a memory, buffers own);
        attributes other than parameters, buffers, training mode and ``requires_grad`` that change later do not reach the copies. With
        GPUs among the devices it has to be on the first of them.
    devices
        ``"auto"`` (every GPU if the module is on one, else every host device), names such as ``["host:0", "host:1"]`` or
        ``["cuda:0", "cuda:1"]``, what `paceline.partition` returns, or a `paceline.DeviceGroup`, which then stays open on `close`.
    balance
        ``"auto"``: shares follow the measured speeds, and a device that is done early takes over work. ``"even"``: equal shares.
        A list with one number per device: fixed ratios. The last two never move work.
    micro_batch
        Items of one forward and backward; None: one large planned micro-batch per device, then small corrections where they pay.
    reduction
        What ``loss_fn`` returns for its slice: the ``"mean"`` over its items (or, with `weight`, over their weight), or their ``"sum"``.
        **The objective is the mean over the batch either way**, so gradients do not change with this; it must only be true.
    replicate
        ``replicate(module)`` returns a new module of the same structure, for modules that ``copy.deepcopy`` cannot copy.
    timeout
        Seconds that anything enqueued on a GPU may take; what takes longer is taken for a hang.
    transport
        What brings several GPUs the parameters, and the sums of their gradients to the first one: ``"nccl"``, ``"copies"`` through the
        first one's memory, or ``"auto"``: NCCL where it is found. `explain` says which it is and why. NCCL has a minute for a collective
        (half of `timeout` where that is less).
    memory
        What one micro-batch may take of a device's memory, beyond parameters and gradients: bytes, or a fraction of what the device has
        (of its memory, divided by the devices that share it); a dictionary says it for some devices only, by name. Two sizes are
        measured, and larger claims then worked off in pieces that fit. With `cost` of `step` a size is
        what the items cost when all are padded to the longest. Default: no limit but the memory itself.
    corrections
        Whether each device holds back a part of its share where times vary, from which those that are done early take ever smaller
        micro-batches within the step. None: on host devices. On GPUs it has to be asked for, since a new size may be compiled, captured or
        searched an algorithm for: `granularity` bounds how many there are. Needs ``balance="auto"`` and no `micro_batch`.
    granularity
        Shares and what devices take over from each other are multiples of so many items, so that no more than ``batch / granularity`` sizes
        of micro-batches ever run (and one for what is left of the batch): for modules that compile or tune anew for each size. Shares are
        the coarser for it. ``report()["sizes"]`` tells which ran.

    Notes
    -----
    *Exact* means: for an objective that is a weighted sum over items, the gradient equals the single-device one up to the order of
    floating-point sums. Losses that couple items (contrastive losses, BatchNorm in training) are no such sum; dropout stays valid but
    draws other masks for another split.

    While a trainer on host devices is open, the caller's own PyTorch operators run on one thread; `close` restores that.

    On GPUs a step is ordered on the caller's current stream of the module's GPU, as an operator is, and waits for nothing; the caller may
    be two steps ahead of the devices. Where memory runs out, the step runs again in smaller pieces.

    Examples
    --------
    >>> with DataParallel(model) as trainer:                                     # doctest: +SKIP
    ...     optimizer = trainer.optimizer(torch.optim.AdamW, lr=3e-4)
    ...     for batch in loader:
    ...         loss = trainer.step(lambda module, b: loss_fn(module(b[0]), b[1]), batch)
    ...         optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        module: nn.Module,
        devices: str | Sequence[str | Device] | DeviceGroup = "auto",
        *,
        balance: Balance = "auto",
        micro_batch: int | None = None,
        reduction: Reduction = "mean",
        replicate: Replicate | None = None,
        timeout: float = 600.0,
        transport: Transport = "auto",
        memory: Memory | None = None,
        corrections: bool | None = None,
        granularity: int = 1,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"DataParallel: module is a {type(module).__name__}; a torch.nn.Module is needed.")
        check_devices(devices)
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(f"DataParallel: reduction is {reduction!r}; it must be 'mean' or 'sum'.")
        if micro_batch is not None and (not isinstance(micro_batch, int) or micro_batch < 1):
            raise InvalidArgument(
                f"DataParallel: micro_batch is {micro_batch}; it must be an integer of at least 1, or None to have it planned."
            )
        check_transport(transport)
        if not isinstance(granularity, int) or granularity < 1:
            raise InvalidArgument(f"DataParallel: granularity is {granularity}; it must be an integer of at least 1.")
        policy, weights = policy_of(balance)
        check_corrections(corrections, policy, micro_batch)
        self.module = module
        self._reduction: Reduction = reduction
        group = devices if isinstance(devices, DeviceGroup) else DeviceGroup(named_devices(devices, module))
        owned = group is not devices
        try:
            self._names = [device.name for device in group.devices]
            places = Places(group, module, timeout, transport)
            self._options: dict[str, Any] = {
                "balance": policy,
                "weights": weights,
                "micro_batch": micro_batch or 0,
                "granularity": granularity,
                "corrections": corrections,
            }
            self._limits = memory_limits(memory, group)
            self._steps = Workload(group, places, self._limits, **self._options)
            self._others: dict[str, Workload] = {}
            self._temporary: list[Workload] = []  # of calls that leave no trace
            self._script: ClaimScript | None = None
            execution = Execution(group, module, places, Replicas(module, places, replicate))
        except BaseException:
            if owned:
                group.close()
            raise
        self._loss: torch.Tensor | None = None  # of the last step, for those who watch
        super().__init__(group, owned, execution)

    def step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        weight: Weight | None = None,
        scaler: Any = None,
        *,
        cost: Cost | None = None,
    ) -> torch.Tensor:
        """Run one forward and backward over `batch` on all devices and add the gradient to the parameters' ``.grad``.

        Parameters
        ----------
        loss_fn
            ``loss_fn(module, slice)``, called once per micro-batch with a replica and a slice of `batch`: the loss, 0-dimensional or with
            one entry per item of the slice.
        batch
            A tensor, or any nest of tuples, lists, mappings and dataclasses. Tensors with dimensions are split along dimension 0, where
            all have the same length B; 0-dimensional tensors and other objects go along unchanged. A list or an array with B entries is
            refused, since it looks like one entry per item but cannot be split.
        weight
            What the mean is over: a 1-D tensor with one weight per item, or a callable that makes one from the whole batch, e.g. the
            number of unmasked tokens. Default: every item counts 1. Slices without weight are not run.
        scaler
            A ``torch.amp.GradScaler``: gradients come out scaled, as after ``scaler.scale(loss).backward()``.
        cost
            What each item costs, in any unit: a 1-D tensor with one number per item, or a callable that makes one from the whole batch,
            e.g. its length in tokens. The devices' *costs* are then balanced instead of their items; each device's items are sorted
            and packed into micro-batches of similar cost, of at most `micro_batch` items. So a slice holds items from anywhere in the
            batch, longest first, and can be trimmed by `loss_fn`: ``tokens = b["tokens"][:, : b["length"].max()]``, which is where the
            time is saved. The time that items take is learned, up to its square in the cost; `explain` tells it, and what padding
            was saved. Steps with `cost` and steps without are measured apart.

        Returns
        -------
        torch.Tensor
            The objective over the whole batch: 0-dimensional, detached, unscaled; with GPUs on the module's.

        Raises
        ------
        InvalidArgument
            For a batch, weight, loss or module that cannot be used; the message says what to do.
        Timeout, DeviceLost
            If a GPU hangs, and after that, or after an error that only a new process repairs. It may be of an earlier step.
        Error
            If NCCL fails, with the device's name; the next step makes new connections. What NCCL finds only after `step` has returned is
            said by the next call: the gradients of that step are not defined then, nor is what an optimizer has made of them. Go back to
            what you saved last.
        Exception
            What `loss_fn` raised on a worker, with its own traceback and a note that names the device. Then gradients and buffers are as
            before the step (random generators and Python state are not), and the next step works.
        KeyboardInterrupt
            Ctrl-C. The first ends the step as a failure does, once every worker has left its micro-batch (one that comes while the
            gradients are being written comes too late: the step is done, and ``report()["steps"]`` counts it). A second one does not
            wait: the trainer refuses steps until the workers are out, and a single device, which runs the module itself, may write to
            its ``.grad`` until then; call ``zero_grad`` afterwards. With GPUs the first then waits until nothing runs any more, the second
            leaves that to the next step or `close`.
        Cancelled
            If another thread closed the trainer; gradients and buffers are as before the step.
        """
        with self._alone("step"):
            self._loss = self._step(loss_fn, batch, weight, scaler, cost)
            return self._loss

    def _step(
        self, loss_fn: LossFunction, batch: Any, weight: Weight | None, scaler: Any, cost: Cost | None
    ) -> torch.Tensor:
        check_trains("step", loss_fn)
        check_scaler("step", scaler)
        whole, objective = self._prepared(batch, weight)
        costs = costs_of(cost, batch, whole.size, self._places.check_values)
        if costs is not None:
            self._check_costs()
        if costs is not None and self._script is not None and self._script.peek(whole.size).order is None:
            raise InvalidArgument(
                "step: cost= while claims are replayed of a step that ran without. Leave it out, or end the replay first: "
                "replay_claims(None)."
            )
        self._places.begin(whole)
        return self._execution.repeated(lambda: self._try_step(loss_fn, whole, objective, scaler, costs))

    def _prepared(self, batch: Any, weight: Weight | None) -> tuple[Batch, Objective]:
        whole = Batch(batch)
        places = self._places
        return whole, Objective(batch, whole.size, self._reduction, weight, places.pin, places.check_values)

    def _try_step(
        self, loss_fn: LossFunction, whole: Batch, objective: Objective, scaler: Any, costs: list[float] | None
    ) -> torch.Tensor:
        work, claims = self._steps, None
        if self._script is not None:
            work, claims = self._work("replay"), self._script.peek(whole.size)
            work.caps = ReplayedCaps(self._places, claims)
        frame = self._execution.frame(work, whole, loss_fn, costs, claims.order if claims is not None else None)
        if frame.items is not None:
            objective = frame.items.objective(objective)
        scale = self._scale_of(scaler)
        run = TrainRun(frame, loss_fn=loss_fn, objective=objective, scale=scale, names=self._replicas.names)
        run.claims = claims.lanes if claims is not None else None
        before = self._execution.committed
        try:
            return self._execution.train(work, run)[0]
        finally:  # an interrupt that comes while gradients are written leaves a step that is done
            if self._script is not None and self._execution.committed is not before:
                self._script.advance()

    def _scale_of(self, scaler: Any) -> torch.Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self._places.home))
        return scale

    def _check_costs(self) -> None:
        if self._options["granularity"] > 1:
            raise InvalidArgument(
                "cost= together with granularity=, which counts items: by cost, devices get other numbers of them. Make the trainer without "
                "it, or with micro_batch= or memory=, which limit batches with costs, too."
            )

    def _workloads(self) -> list[Workload]:
        return [self._steps, *self._others.values(), *self._temporary]

    def _temporarily(self, **options: Any) -> Workload:
        """For the current call only; `close` in another thread ends it, too."""
        work = Workload(self.group, self._places, self._limits, **options)
        self._temporary.append(work)
        return work

    def _work(self, key: str) -> Workload:
        """Of other kinds of work than `step`, made when it is first run."""
        if key not in self._others:
            self._others[key] = Workload(self.group, self._places, self._limits, **self._options)
        return self._others[key]

    def batch(self, batch: Any, *, weight: Weight | None = None) -> GlobalBatch:
        """The lower level that `step` is made of, for several optimizers, adversarial networks, several losses, backward by hand.

        The library owns the split, the weights and the reduction; forward and backward are the caller's function's. Every run of the
        batch commits its gradients, or raises and commits none of them. Between runs anything may happen, such as a step of an optimizer.

        Parameters
        ----------
        batch, weight
            As for `step`.

        Returns
        -------
        GlobalBatch
            ``run(fn)`` calls ``fn(module, micro_batch)`` on all devices. It ends with its ``with`` block.

        Examples
        --------
        Networks that are trained against each other are parts of one module:

        >>> trainer = DataParallel(nn.ModuleDict({"generator": G, "critic": C}))      # doctest: +SKIP
        >>> def criticise(networks, micro_batch):
        ...     real, noise = micro_batch.data
        ...     fake = networks["generator"](noise).detach()
        ...     micro_batch.backward(bce(networks["critic"](real), 1) + bce(networks["critic"](fake), 0))
        >>> with trainer.batch((images, noise)) as global_batch:                     # doctest: +SKIP
        ...     global_batch.run(criticise, parameters=C); critic_optimizer.step()
        ...     global_batch.run(generate, parameters=G); generator_optimizer.step()
        """
        with self._alone("batch"):
            whole, objective = self._prepared(batch, weight)

        def start(fn: RunFunction, wanted: list[nn.Parameter] | None, scaler: Any, name: str) -> torch.Tensor:
            with self._alone("run"):
                check_trains("run", fn)
                check_scaler("run", scaler)
                self._places.begin(whole)
                work = self._work(f"run {name}")

                def attempt() -> torch.Tensor:
                    frame = self._execution.frame(work, whole, fn)
                    scale, replicas = self._scale_of(scaler), self._replicas
                    run = FunctionRun(frame, fn, objective, scale, replicas, wanted)
                    return self._execution.train(work, run)[0]

                return self._execution.repeated(attempt)

        return GlobalBatch(whole.size, start)

    def check(
        self, loss_fn: LossFunction, batch: Any, *, weight: Weight | None = None, tolerance: float | None = None
    ) -> CheckReport:
        """Compare one batch run whole with the same batch in several splits, and say what makes a difference.

        Leaves no trace: gradients, buffers, random generators, shares and ledger are as before. What `loss_fn` and the module change
        in Python stays changed. Takes the time of about a dozen forward and backward passes of one device, and the memory of a whole
        batch on one.

        Parameters
        ----------
        loss_fn, batch, weight
            As for `step`. 8 items or more tell most; they need not be many.
        tolerance
            Up to which relative difference results count as equal. Default: what rounding may bring for the types of the parameters.

        Returns
        -------
        CheckReport
            ``exact``, ``verdict``, ``causes``, ``splits``, ``differences`` by parameter; ``print`` shows all of it.

        Raises
        ------
        InvalidArgument
            As `step`, and for a batch of one item.
        Exception
            What `loss_fn` raised for the whole batch. What it raises for a slice only is part of the report.

        Examples
        --------
        >>> print(trainer.check(loss_fn, batch))                                  # doctest: +SKIP
        not exact: running statistics (32 items)
        """
        with self._alone("check"), _emptied(self._temporary):
            check_trains("check", loss_fn)
            whole, objective = self._prepared(batch, weight)
            self._places.begin(whole)
            micro_batch = self._options["micro_batch"]
            return check(
                self._execution,
                self._temporarily(micro_batch=micro_batch, balance="even"),
                whole,
                objective,
                loss_fn,
                reduction=self._reduction,
                micro_batch=micro_batch or None,
                tolerance=tolerance,
            )

    def find_batch_size(
        self,
        loss_fn: LossFunction,
        make_batch: Callable[[int], Any],
        *,
        weight: Weight | None = None,
        smallest: int = 8,
        largest: int = 65536,
        efficiency: float = 0.9,
        seconds: float = 0.5,
    ) -> BatchSizeSearch:
        """Measure steps of growing batches on all devices together, and find the knee of the throughput.

        The batch is doubled until that brings less than 5 %, or memory does not allow more; micro-batches keep to what fits (`memory`),
        so that memory seldom does. At the knee smaller micro-batches are measured, too, if the trainer was made without `micro_batch`.
        Leaves no trace, as `check`. Which batch is good for training is another question: learning rates belong to a batch size.

        Parameters
        ----------
        loss_fn, weight
            As for `step`; `weight` a callable, since batches differ in size.
        make_batch
            ``make_batch(items)`` returns a batch of so many items.
        smallest, largest
            Sizes to begin and to end with.
        efficiency
            The part of the highest throughput that is enough.
        seconds
            To time each size for, after a warm-up.

        Returns
        -------
        BatchSizeSearch
            ``batch_size``, ``micro_batch``, the times behind them; ``print`` and ``plot(path)`` show them.
        """
        with self._alone("find_batch_size"), _emptied(self._temporary):
            check_trains("find_batch_size", loss_fn)
            own = self._options["micro_batch"]

            def workload(micro_batch: int | None) -> Workload:
                options = {**self._options, "micro_batch": micro_batch or own}
                if options["micro_batch"]:
                    options["corrections"] = None
                return self._temporarily(**options)

            timer = StepTimer(self._execution, loss_fn, workload)

            def measure(size: int, micro_batch: int | None) -> float:
                whole, objective = self._prepared(make_batch(size), weight)
                check_size(whole.size, size)
                self._places.begin(whole)
                return timer.seconds(whole, objective, micro_batch, seconds)

            devices = len(self._names)
            return search(measure, smallest, largest, efficiency, micro_batches=not own, devices=devices)

    def predict(
        self, batch: Any, fn: Callable[[nn.Module, Any], Any] | None = None, *, cost: Cost | None = None
    ) -> Any:
        """Run the module forward over `batch` on all devices, without gradients.

        Parameters
        ----------
        batch
            As for `step`.
        fn
            ``fn(module, slice)``; default ``module(slice)``. Returns a tensor, or a nest of them, whose dimension 0 is the item.
        cost
            As for `step`. Outputs still come in the caller's order; where `fn` trims its slice, it has to pad what it returns to a common
            length.

        Returns
        -------
        Any
            What `fn` returns, for the whole batch, in the order of the items. The training mode is the module's own.
        """
        with self._alone("predict"):
            return self._predict(batch, fn if fn is not None else _forward, cost)

    def _predict(self, batch: Any, fn: Callable[[nn.Module, Any], Any], cost: Cost | None) -> Any:
        whole = Batch(batch)
        self._places.begin(whole)
        costs = costs_of(cost, batch, whole.size, self._places.check_values)
        if costs is not None:
            self._check_costs()
        work = self._work("predict")

        def attempt() -> Any:
            return self._execution.predict(work, PredictRun(self._execution.frame(work, whole, fn, costs), fn=fn))

        return self._execution.repeated(attempt)

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer over the module's parameters: exactly ``cls(module.parameters(), **options)``."""
        return cls(self.module.parameters(), **options)

    @property
    def shares(self) -> dict[str, int]:
        """Items that each device really ran in the last step."""
        return dict(zip(self._names, self._execution.items, strict=True))

    def report(self) -> dict[str, Any]:
        """Figures for a dashboard.

        Returns
        -------
        dict
            ``devices``: per name ``share`` (items of the last step), ``items``, ``busy_seconds``, ``idle_seconds`` (totals),
            ``items_per_second`` (recent, while busy), ``speed`` (that, over the fastest device's); ``imbalance`` (slowest busy time over the mean, minus 1; recent); ``moves`` (changes of
            shares), ``steps``, ``compute_seconds`` and ``step_seconds`` (totals, without and with the reduction; with GPUs, whose reduction
            is not timed, the latter is what the call of `step` took or what the devices computed, whichever was longer). ``sizes``: per
            device the micro-batches that ever ran, in items. ``memory``: per device with a limit ``limit_bytes``, and once measured ``fixed_bytes``, ``bytes_per_item`` and ``largest_micro_batch`` (of steps with `cost`
            ``fixed_bytes_with_costs``, ``bytes_per_cost`` and ``largest_padded_cost``);
            and per GPU ``pool_peak_bytes``, the most that paceline's own pool had given out at once to all trainers of the process, while there were any (what PyTorch and NCCL took is theirs to tell).
            ``runs``: as all but the last three, for each run of `batch` by its name. After a step with `cost` also ``items``: ``cost`` of
            all items, ``padded_cost`` of the micro-batches that ran (each its count times its largest), ``contiguous_cost`` of the same
            sizes cut from the batch as it came, ``padding_saved`` (the part of the latter's padding); and, once measured, the time of a
            micro-batch: ``fixed_seconds``, ``seconds_per_cost``, ``seconds_per_squared_cost``, whether it follows the ``"padded"`` cost, the
            ``"sum"`` or the ``"count"`` alone (``measure``), and its relative ``error``.
        """
        runs = {name[4:]: work.stepper.metrics for name, work in self._others.items() if name.startswith("run ")}
        sizes = {name: sorted(ran) for name, ran in zip(self._names, self._steps.seen.ever, strict=True)}
        steps = self._steps
        figures = {**steps.stepper.metrics, "sizes": sizes, "memory": steps.caps.report(), "runs": runs}
        if steps.stepper.items is not None:
            figures["items"] = steps.stepper.items
        return figures

    def progress(
        self, batches: Iterable[_T], *, total: int | None = None, every: float = 10.0, file: TextIO | None = None
    ) -> Progress[_T]:
        """Loop over `batches` and show step, loss, step time, imbalance, moves, and each device's share and busy time.

        On a terminal it is redrawn in place where rich is installed (``pip install 'paceline[progress]'``), at most four times a second. Everywhere
        else, in files, notebooks, and where log handlers write to the terminal, it is a plain line after the first batch, every
        `every` seconds, and at the end. No thread is started; Ctrl-C, ``break`` and exceptions leave the terminal as it was.

        Parameters
        ----------
        batches
            Any iterable, such as a DataLoader; its elements come unchanged.
        total
            How many there are; default ``len(batches)`` where it has one.
        every
            Seconds between two plain lines; 0: one after each batch.
        file
            Where to write; default ``sys.stderr``.

        Notes
        -----
        Shares, busy and step times are means since the figures before. Reading them and the loss waits for GPUs, only when something is shown.

        Examples
        --------
        >>> for batch in trainer.progress(loader):                                   # doctest: +SKIP
        ...     loss = trainer.step(loss_fn, batch)
        ...     optimizer.step(); optimizer.zero_grad()
        """
        from paceline._progress import Progress

        def loss() -> float | None:
            return None if self._loss is None else float(self._loss)

        return Progress(batches, self.report, loss, total=total, every=every, file=file)

    def events(self) -> list[dict[str, Any]]:
        """The last events, oldest first, at most 4096; reading them waits for GPUs.

        Returns
        -------
        list of dict
            ``kind``: ``"step"``, ``"micro_batch"``, ``"reduction"`` or ``"move"``; ``device``: its name, None for the group; ``step``: how many
            had succeeded before; ``begin`` and ``end``: items of the batch; ``start_seconds``, since the trainer was made, and
            ``duration_seconds``. A step that failed leaves none. With GPUs a ``"reduction"`` lasts 0 seconds, for it is not timed, and
            a ``"step"`` as `report` says.
        """
        return list(self._steps.stepper.events)

    def history(self) -> list[dict[str, Any]]:
        """The whole run in at most 1024 rows, oldest first: single steps, or in a longer run equally many steps added up.

        Returns
        -------
        list of dict
            ``first_step`` (from 0), ``steps`` (in this row), ``items`` and ``busy_seconds`` (sums, per name of a device), ``step_seconds``
            (sum, with the reduction, but as `report` has it with GPUs), ``longest_step_seconds`` (of one step), ``moves``. Reading it waits for GPUs, as `report` does.
        """
        return list(self._steps.stepper.history)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the run so far: shares with their moves, speeds, and step times. Also after `close`.

        Parameters
        ----------
        path
            A file to write, as .png, .svg, .pdf or what else matplotlib knows. None: only the figure is made.

        Returns
        -------
        matplotlib.figure.Figure
            With steps counted from 1 on its three axes, to add to and to save; no window opens and pyplot is not used.

        Raises
        ------
        ImportError
            If matplotlib is not installed, which ``pip install 'paceline[plot]'`` brings.
        InvalidArgument
            Before the first step.
        """
        from paceline._plot import draw_run, save

        names = ", ".join(self._names) if len(self._names) <= 4 else f"{len(self._names)} devices"
        title = f"{type(self.module).__name__} on {names}, balance {self._options['balance']}"
        return save(draw_run(self.history(), title=title), path)

    def explain(self) -> str:
        """In words: what was seen, what was decided and why, what a move would gain; of `step`, and of each run of `batch` by its name.

        Waits for GPUs; also after `close`.
        """
        runs = {name: work for name, work in self._others.items() if name.startswith("run ")}
        if runs and not self._steps.stepper.metrics["steps"]:  # there is nothing to tell of steps
            return "\n".join(f"{name}: {work.stepper.explain()}{work.caps.explain()}" for name, work in runs.items())
        text = self._steps.stepper.explain()
        busy = [entry["busy_seconds"] for entry in self._steps.stepper.metrics["devices"].values()]
        text += self._steps.caps.explain() + self._places.explain() + self._steps.launches.explain(busy)
        return text + "".join(f"\n{name}: {work.stepper.explain()}{work.caps.explain()}" for name, work in runs.items())

    def what_if(
        self,
        *,
        speeds: Mapping[str, float] | None = None,
        add: Sequence[tuple[str, float]] = (),
        remove: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> WhatIfAnswer:
        """What the best split of `step` would be, and how long a step, if devices had other speeds, came or left. Changes nothing.

        Parameters
        ----------
        speeds
            Device names and factors on their present speed: ``{"host:1": 2.0}`` is twice as fast.
        add
            ``(like, speed)`` each: one device more like the named one, so many times as fast.
        remove
            Names of devices that would get no work.
        batch_size
            Default: that of the last step.

        Raises
        ------
        InvalidArgument
            Before the first timing, for a name that is not there, or a speed that is not above zero.
        """
        self._steps.stepper.settle()
        return self._steps.stepper.what_if(
            speeds=dict(speeds or {}), add=list(add), remove=list(remove), batch_size=batch_size or 0
        )

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Write every measurement and decision of `step` to a file of JSON lines, and what each device really ran.

        `paceline.balance.replay` reproduces the decisions, `replay_claims` the steps themselves.

        Raises
        ------
        InvalidArgument
            After the first step (a ledger that lacks steps cannot be replayed), or if the file cannot be written.
        """
        self._steps.stepper.write_ledger(os.fspath(path))

    def replay_claims(self, path: str | os.PathLike[str] | None) -> None:
        """Run the steps that follow as those of a ledger ran: the same items on the same devices, in the same pieces and order.

        From the same parameters, with the same batches and as many threads per device, gradients on host devices are the same bit for
        bit, whatever the devices' speeds are now. Random draws are not: host devices draw from one generator, as they come. Nothing is
        measured meanwhile, and the balancer stays as it is.

        Parameters
        ----------
        path
            What `write_ledger` wrote, on as many devices. None: from now on steps are balanced again.

        Raises
        ------
        InvalidArgument
            If it is no such ledger. `step` raises it for a batch of another size, and when all steps have run.
        OSError
            If the file cannot be read.
        """
        with self._alone("replay_claims"):
            self._script = None if path is None else ClaimScript(path, self._names)

    def __repr__(self) -> str:
        state = "open" if self._finalizer.alive else "closed"
        return f"<paceline.torch.DataParallel {type(self.module).__name__} on {', '.join(self._names)}, {self._options['balance']}, {state}>"


@contextlib.contextmanager
def _emptied(entries: list[Workload]) -> Iterator[None]:
    """The list is empty afterwards."""
    try:
        yield
    finally:
        entries.clear()


def _forward(module: nn.Module, batch: Any) -> Any:
    return module(batch)
