"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline import Device, DeviceGroup, Error, InvalidArgument, Timeout, Unavailable
from paceline.torch._arguments import (
    Balance,
    Memory,
    check_devices,
    check_scaler,
    check_trains,
    memory_limits,
    named_devices,
    policy_of,
)
from paceline.torch._batch import Batch
from paceline.torch._caller_state import CallerThreads
from paceline.torch._check import check
from paceline.torch._check_report import CheckReport
from paceline.torch._execution import Execution, Workload
from paceline.torch._exit import abandoned_runs, finalize, open_trainers
from paceline.torch._global_batch import FunctionRun, GlobalBatch, RunFunction, indices_of
from paceline.torch._objective import Objective, Reduction, Weight
from paceline.torch._places import Places
from paceline.torch._replicas import Replicas, Replicate
from paceline.torch._run import LossFunction, PredictRun, Run, TrainRun


class DataParallel:
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
    memory
        What one micro-batch may take of a device's memory, beyond parameters and gradients: bytes, or a fraction of what the device has
        (of its memory, divided by the devices that share it); a dictionary says it for some devices only, by name. Two sizes are
        measured, and larger claims then worked off in pieces that fit. Default: no limit but the memory itself.

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
        memory: Memory | None = None,
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
        policy, weights = policy_of(balance)
        self.module = module
        self._reduction: Reduction = reduction
        group = devices if isinstance(devices, DeviceGroup) else DeviceGroup(named_devices(devices, module))
        owned = group is not devices
        try:
            self._names = [device.name for device in group.devices]
            self._places = Places(group, module, timeout)
            self._options: dict[str, Any] = {"balance": policy, "weights": weights, "micro_batch": micro_batch or 0}
            self._limits = memory_limits(memory, group)
            self._steps = Workload(group, self._places, self._limits, **self._options)
            self._others: dict[str, Workload] = {}
            self._replicas = Replicas(module, self._places, replicate)
            self._execution = Execution(group, module, self._places, self._replicas)
        except BaseException:
            if owned:
                group.close()
            raise
        self.group = group
        self._lock = threading.Lock()
        self._abandoned = False
        if self._places.any_host:
            CallerThreads.limit()
        # Runs when the trainer is dropped without close(); the end of the program has _exit.
        self._finalizer = weakref.finalize(self, finalize, group if owned else None, self._places.any_host)
        self._finalizer.atexit = False
        open_trainers.add(self)

    def step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        weight: Weight | None = None,
        scaler: Any = None,
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
        Exception
            What `loss_fn` raised on a worker, with its own traceback and a note that names the device. Then gradients and buffers are as
            before the step (random generators and Python state are not), and the next step works.
        KeyboardInterrupt
            Ctrl-C. The first ends the step as a failure does, once every worker has left its micro-batch (one that comes while the
            gradients are being written comes too late: the step is done, and ``report()["steps"]`` counts it). A second one does not
            wait: the trainer refuses steps until the workers are out, and a single device, which runs the module itself, may write to
            its ``.grad`` until then; call ``zero_grad`` afterwards.
        Cancelled
            If another thread closed the trainer; gradients and buffers are as before the step.
        """
        with self._alone("step"):
            return self._step(loss_fn, batch, weight, scaler)

    def _step(self, loss_fn: LossFunction, batch: Any, weight: Weight | None, scaler: Any) -> torch.Tensor:
        check_trains("step", loss_fn)
        check_scaler("step", scaler)
        whole, objective = self._prepared(batch, weight)
        self._places.begin()
        return self._execution.repeated(lambda: self._try_step(loss_fn, whole, objective, scaler))

    def _prepared(self, batch: Any, weight: Weight | None) -> tuple[Batch, Objective]:
        whole = Batch(batch)
        return whole, Objective(batch, whole.size, self._reduction, weight, self._places.pin)

    def _try_step(self, loss_fn: LossFunction, whole: Batch, objective: Objective, scaler: Any) -> torch.Tensor:
        frame = self._execution.frame(self._steps, whole, loss_fn)
        scale = self._scale_of(scaler)
        run = TrainRun(frame, loss_fn=loss_fn, objective=objective, scale=scale, names=self._replicas.names)
        return self._execution.train(self._steps, run)[0]

    def _scale_of(self, scaler: Any) -> torch.Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self._places.home))
        return scale

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

        def start(fn: RunFunction, parameters: Iterable[nn.Parameter] | None, scaler: Any, name: str) -> torch.Tensor:
            with self._alone("run"):
                check_trains("run", fn)
                check_scaler("run", scaler)
                self._places.begin()
                # From an iterator, which an attempt that runs out of memory must not use up.
                wanted = None if parameters is None else list(parameters)
                work = self._work(f"run {name}")
                return self._execution.repeated(lambda: self._try_run(work, fn, wanted, whole, objective, scaler))

        return GlobalBatch(whole.size, start)

    def _try_run(
        self,
        work: Workload,
        fn: RunFunction,
        wanted: list[nn.Parameter] | None,
        whole: Batch,
        objective: Objective,
        scaler: Any,
    ) -> torch.Tensor:
        frame = self._execution.frame(work, whole, fn)
        run = FunctionRun(
            frame,
            fn=fn,
            objective=objective,
            scale=self._scale_of(scaler),
            names=self._replicas.names,
            wanted=None if wanted is None else indices_of(wanted, self._replicas.parameters),
        )
        return self._execution.train(work, run)[0]

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
        with self._alone("check"):
            check_trains("check", loss_fn)
            whole, objective = self._prepared(batch, weight)
            self._places.begin()
            micro_batch = self._options["micro_batch"]
            return check(
                self._execution,
                Workload(self.group, self._places, self._limits, micro_batch=micro_batch, balance="even"),
                whole,
                objective,
                loss_fn,
                reduction=self._reduction,
                micro_batch=micro_batch or None,
                tolerance=tolerance,
            )

    def predict(self, batch: Any, fn: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Run the module forward over `batch` on all devices, without gradients.

        Parameters
        ----------
        batch
            As for `step`.
        fn
            ``fn(module, slice)``; default ``module(slice)``. Returns a tensor, or a nest of them, whose dimension 0 is the item.

        Returns
        -------
        Any
            What `fn` returns, for the whole batch, in the order of the items. The training mode is the module's own.
        """
        with self._alone("predict"):
            return self._predict(batch, fn if fn is not None else _forward)

    def _predict(self, batch: Any, fn: Callable[[nn.Module, Any], Any]) -> Any:
        whole = Batch(batch)
        self._places.begin()
        work = self._work("predict")

        def attempt() -> Any:
            return self._execution.predict(work, PredictRun(self._execution.frame(work, whole, fn), fn=fn))

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
            shares), ``steps``, ``compute_seconds`` and ``step_seconds`` (totals, without and with the reduction). ``memory``: per
            device with a limit ``limit_bytes``, and once measured ``fixed_bytes``, ``bytes_per_item`` and ``largest_micro_batch``.
            ``runs``: as all but the last, for each run of `batch` by its name.
        """
        runs = {name[4:]: work.stepper.metrics for name, work in self._others.items() if name != "predict"}
        return {**self._steps.stepper.metrics, "memory": self._steps.caps.report(), "runs": runs}

    def events(self) -> list[dict[str, Any]]:
        """The last events, oldest first: steps, micro-batches, reductions, moves, with their times in seconds."""
        return list(self._steps.stepper.events)

    def explain(self) -> str:
        """In words: what was seen, what was decided and why, what a move would gain; of `step`, and of each run of `batch` by its name."""
        runs = {name: work for name, work in self._others.items() if name != "predict"}
        if runs and not self._steps.stepper.metrics["steps"]:  # there is nothing to tell of steps
            return "\n".join(f"{name}: {work.stepper.explain()}{work.caps.explain()}" for name, work in runs.items())
        text = self._steps.stepper.explain()
        busy = [entry["busy_seconds"] for entry in self._steps.stepper.metrics["devices"].values()]
        text += self._steps.caps.explain() + self._places.launches.explain(busy)
        return text + "".join(f"\n{name}: {work.stepper.explain()}{work.caps.explain()}" for name, work in runs.items())

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Write every measurement and decision of `step` to a file of JSON lines; `paceline.balance.replay` reproduces them.

        Raises
        ------
        InvalidArgument
            After the first step (a ledger that lacks steps cannot be replayed), or if the file cannot be written.
        """
        self._steps.stepper.write_ledger(os.fspath(path))

    def close(self) -> None:
        """End the workers and give the caller its PyTorch threads back; idempotent. A `DeviceGroup` that was passed in stays open.

        A step that runs in another thread is cancelled: it ends once every worker has left its micro-batch.
        """
        running = self._running
        if running is not None and running.on_a_worker:
            raise InvalidArgument(
                "close: called by loss_fn on a worker, which cannot wait for its own end. Leave the step first, by an exception if need be."
            )
        self._cancel()
        self._finalizer()
        self._give_back_once()

    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def _give_back_once(self) -> None:
        """Unless a call is still inside, which does it when it leaves, or workers are."""
        if self._places.queues is not None and not self.group.busy and self._lock.acquire(blocking=False):
            try:
                self._give_back()
            finally:
                self._lock.release()

    def _give_back(self) -> None:
        """Everything that the devices hold of this trainer; its figures stay."""
        with contextlib.suppress(Error):  # of a device that was lost: it has said so before
            for work in (self._steps, *self._others.values()):
                work.stepper.settle()
        self._execution.release()
        self._replicas.release()
        self._places.close()

    def _cancel(self) -> None:
        for work in (self._steps, *list(self._others.values())):
            work.stepper.cancel()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None or not self.group.busy:
            return self.close()
        # Left by a second Ctrl-C: its workers are inside user code, and whoever pressed it does not want to wait for them.
        self._cancel()
        ended = self._finalizer.detach()
        if ended is not None:
            group = ended[2][0]
            with contextlib.suppress(Timeout):
                finalize(group, self._places.any_host, timeout=0.0)
        return None

    def __repr__(self) -> str:
        state = "open" if self._finalizer.alive else "closed"
        return f"<paceline.torch.DataParallel {type(self.module).__name__} on {', '.join(self._names)}, {self._options['balance']}, {state}>"

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time: the replicas and their gradients are the trainer's, not the call's."""
        if not self._finalizer.alive:
            raise Unavailable(f"{call}: the trainer is closed. Make a new one.")
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(
                f"{call}: this trainer is in the middle of another call, in another thread or around this one (loss_fn must "
                "not call the trainer). One call at a time."
            )
        if self._places.any_host:
            CallerThreads.enter()
        try:
            if self.group.busy:
                raise InvalidArgument(
                    f"{call}: an earlier step of this group has not ended: its workers are still inside user code. Wait for it, or close "
                    "the trainer."
                )
            if self._abandoned:  # its workers have gone on to write gradients meanwhile
                self._execution.drop_gradients()
            yield
        finally:
            if self.group.busy and self._running is not None:
                abandoned_runs.add(self._running)
            self._execution.running = None
            self._abandoned = self.group.busy
            self._lock.release()
            if self._is_closed():  # meanwhile, by another thread
                self._give_back_once()

    @property
    def _running(self) -> Run | None:
        return self._execution.running


def _forward(module: nn.Module, batch: Any) -> Any:
    return module(batch)
