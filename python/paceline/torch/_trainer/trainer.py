"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline.comm import Transport
from paceline.torch._batch.items import Cost
from paceline.torch._batch.objective import Reduction, Weight
from paceline.torch._devices.places import Places
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.execution import Execution
from paceline.torch._run.run import LossFunction
from paceline.torch._trainer.arguments import (
    Balance,
    Memory,
    check_corrections,
    check_devices,
    check_sizes,
    check_transport,
    memory_limits,
    named_devices,
    policy_of,
)
from paceline.torch._trainer.host_workers import HostWorkers
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.optimizer import spread
from paceline.torch._trainer.parts import carried_out_by
from paceline.torch._trainer.predictions import Predictions
from paceline.torch._trainer.reports import Reports
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.training import Training
from paceline.torch._trainer.trials import Trials
from paceline.torch._trainer.works import Works

_T = TypeVar("_T", bound="DataParallel")


class DataParallel:
    """Trains `module` on several devices of this machine, with exactly the gradient of one.

    Every call of `step` splits one batch over the devices in proportion to what was measured of them, runs forward and backward on
    persistent replicas that share the parameters, and commits the gradient of the *whole* batch to the parameters' ``.grad``.
    The module stays the user's: its parameters are the trained ones and its ``state_dict`` is the single-device one.

    Parameters
    ----------
    module
        The module to train. With two or more devices it is copied once per device (parameters shared within a memory, buffers own). Before
        each call the copies take over what you changed on it since: parameters, buffers, attributes, hooks, training mode and
        ``requires_grad``. What a forward writes to attributes of its own module stays with that copy until you change it on yours. After each
        call yours has the values of the copy that ran most items: simple values and tensors without a graph. Parameters and modules in plain
        lists, dictionaries or objects get their gradients, too; `optimizer` and ``state_dict`` know registered ones only. With GPUs among the
        devices the module has to be on the first of them.
    devices
        ``"auto"`` (every GPU if the module is on one, else every host device), names such as ``["host:0", "host:1"]`` or
        ``["cuda:0", "cuda:1"]``, what `paceline.partition` returns, or a `paceline.DeviceGroup`, which then stays open on `close`.
    balance
        ``"auto"``: shares follow the measured speeds, and a device that is done early takes over work. On host devices, where steps take
        less than 20 ms, a few of them (after 32 steps, then ever more seldom) run on one device alone: `explain` and `what_if` tell by
        them whether one device would be faster. ``"even"``: equal shares.
        A list with one number per device: fixed ratios. The last two never move work.
    micro_batch
        Items of one forward and backward; None: one large planned micro-batch per device, then small corrections where they pay. On host
        devices, be it one, `step` then also measures, in some steps by turns, whether smaller ones are faster (they may fit a cache) and
        takes them if so; a loss that couples items needs `micro_batch` of the whole batch on one device to stay as it is. Not where the forward writes buffers, as batch and spectral normalisation do, nor where fixed shares draw random
        numbers, nor with `torch.compile`, ``corrections=False``,
        `granularity` or costs.
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
        micro-batches within the step. None: on host devices, unless the forward writes buffers, as batch and spectral normalisation in
        training do: then each device runs one micro-batch. On GPUs it has to be asked for, since a new size may be compiled, captured or
        searched an algorithm for: `granularity` bounds how many there are. Needs ``balance="auto"`` and no `micro_batch`.
    granularity
        Shares and what devices take over from each other are multiples of so many items, so that no more than ``batch / granularity`` sizes
        of micro-batches ever run (and one for what is left of the batch): for modules that compile or tune anew for each size. With 1 any
        size up to the batch may run. Shares are the coarser for it. ``report()["sizes"]`` tells which ran.

    Notes
    -----
    *Exact* means: for an objective that is a weighted sum over items, the gradient equals the single-device one up to the order of
    floating-point sums. Losses that couple items (contrastive losses, BatchNorm in training) are no such sum.

    Dropout stays valid but draws other masks for another split. On host devices the same seed and the same split give the same numbers, so
    ``balance="even"`` and `replay_claims` can be repeated; an `UnseededDrawsWarning` names what cannot be seeded. The first step that draws
    after others that did not runs twice, with what `loss_fn` does in Python. Forward-mode differentiation goes through ``torch.func``.

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
        check_sizes(micro_batch, granularity)
        check_transport(transport)
        policy, weights = policy_of(balance)
        check_corrections(corrections, policy, micro_batch)
        self.module = module
        group = devices if isinstance(devices, DeviceGroup) else DeviceGroup(named_devices(devices, module))
        owned = group is not devices
        try:
            places = Places(group, module, timeout, transport)
            options: dict[str, Any] = {
                "balance": policy,
                "weights": weights,
                "micro_batch": micro_batch or 0,
                "granularity": granularity,
                "corrections": corrections,
            }
            free = micro_batch is None and granularity == 1 and corrections is not False and not any(places.on_gpu)
            works = Works(group, places, memory_limits(memory, group), options, searches=free)
            if free and policy == "auto" and len(group) > 1:
                works.steps.alone = AloneTrials()
            execution = Execution(group, module, places, Replicas(module, places, replicate))
        except BaseException:
            if owned:
                group.close()
            raise
        self.group = group
        self._works = works
        self._execution = execution
        self._gaps = StepGaps()
        self._lifetime = lifetime = Lifetime(group, owned, execution, works, self._gaps)
        self._training = Training(works, execution, lifetime, reduction)
        self._predictions = Predictions(works, execution, lifetime, self._training)
        self._trials = Trials(works, execution, lifetime, self._training)
        self._reports = Reports(module, works, execution, lifetime, self._gaps)

    batch = carried_out_by("_training", Training.batch)
    predict = carried_out_by("_predictions", Predictions.predict)
    replay_claims = carried_out_by("_training", Training.replay_claims)
    check = carried_out_by("_trials", Trials.check)
    find_batch_size = carried_out_by("_trials", Trials.find_batch_size)
    report = carried_out_by("_reports", Reports.report)
    progress = carried_out_by("_reports", Reports.progress)
    events = carried_out_by("_reports", Reports.events)
    history = carried_out_by("_reports", Reports.history)
    plot = carried_out_by("_reports", Reports.plot)
    explain = carried_out_by("_reports", Reports.explain)
    what_if = carried_out_by("_reports", Reports.what_if)
    write_ledger = carried_out_by("_reports", Reports.write_ledger)
    close = carried_out_by("_lifetime", Lifetime.close)

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
        RuntimeError
            If the loss depends on no parameter.
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
        with self._lifetime.exclusive("step"):
            began = self._gaps.begin()
            try:
                loss = self._reports.loss = self._training.step(loss_fn, batch, weight, scaler, cost)
            except BaseException:
                self._gaps.interrupted()
                raise
            self._gaps.end(began)
            return loss

    def optimizer(
        self, cls: type[torch.optim.Optimizer], parameters: Iterable[Any] | None = None, /, **options: Any
    ) -> torch.optim.Optimizer:
        """``cls(parameters, **options)``; by default over the module's parameters. They may come in groups, as `cls` takes them.

        On several host devices its ``step`` runs on all of their workers, each with a part of the parameters, if `cls` is one of
        PyTorch's own that treats parameters one by one (all but LBFGS and SparseAdam), and there is enough to do. The result is the same
        bit for bit. Instances, states, hooks and schedulers are those of `cls`.

        Raises
        ------
        Exception
            What `cls` raises, for these parameters and options. Where its ``step`` raises on a worker, as for a gradient of another type, parts
            that others have are updated or not: go on from what you saved last.
        """
        return spread(
            cls, self.module.parameters() if parameters is None else parameters, HostWorkers(self._lifetime), options
        )

    def retire(self, device: str | Device) -> None:
        """Give the device no work from the next call on. Nothing waits for it. Its share goes to the others; no item is lost.

        It stays in the group, with its replica and its worker, until `restore` brings it back: for a GPU that somebody else needs for a while,
        a core that a data loader shall have, or a device that one does not trust.

        Parameters
        ----------
        device
            A device of the trainer, or its name: ``"host:1"``. One that is retired already stays so.

        Raises
        ------
        InvalidArgument
            If the trainer has no such device, or no other one works.
        """
        with self._lifetime.exclusive("retire"):
            self._works.retire(device)

    def restore(self, device: str | Device) -> None:
        """Give a device that `retire` has taken out work again. What was known of its speed counts; a change is noticed as ever.

        Parameters
        ----------
        device
            As for `retire`. One that works stays as it is.

        Raises
        ------
        InvalidArgument
            If the trainer has no such device.
        """
        with self._lifetime.exclusive("restore"):
            self._works.restore(device)

    @property
    def shares(self) -> dict[str, int]:
        """Items that each device really ran in the last step."""
        return dict(zip(self._works.names, self._execution.items, strict=True))

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._lifetime.leave(raised=kind is not None)

    def __repr__(self) -> str:
        state = "open" if self._lifetime.is_open else "closed"
        names = ", ".join(self._works.names)
        return f"<paceline.torch.DataParallel {type(self.module).__name__} on {names}, {self._works.options['balance']}, {state}>"
