"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline.comm import Transport
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.items import Cost
from paceline.torch._batch.objective import Objective, Reduction, Weight
from paceline.torch._devices.places import Places
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.execution import Execution, Workload
from paceline.torch._run.micro_batch_size import MicroBatchSizes
from paceline.torch._run.run import Frame, LossFunction, PredictRun, TrainRun
from paceline.torch._trainer.arguments import (
    Balance,
    Memory,
    check_corrections,
    check_devices,
    check_scaler,
    check_sizes,
    check_trains,
    check_transport,
    memory_limits,
    named_devices,
    policy_of,
)
from paceline.torch._trainer.claims import ClaimScript
from paceline.torch._trainer.forward import forward
from paceline.torch._trainer.global_batch import FunctionRun, GlobalBatch, RunFunction
from paceline.torch._trainer.optimizer import spread
from paceline.torch._trainer.reports import Reports
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.trials import Trials
from paceline.torch._trainer.work import kind_of
from paceline.torch._trainer.workers import HostWorkers


class DataParallel(Trials, Reports):
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
            self._works = {kind_of(None): Workload(group, places, self._limits, **self._options)}
            if micro_batch is None and granularity == 1 and corrections is not False and not any(places.on_gpu):
                self._steps.sizes = MicroBatchSizes()
                if policy == "auto" and len(group) > 1:
                    self._steps.alone = AloneTrials()
            self._temporary = []
            self._scripts = {}
            execution = Execution(group, module, places, Replicas(module, places, replicate))
        except BaseException:
            if owned:
                group.close()
            raise
        self._loss: torch.Tensor | None = None  # of the last step, for those who watch
        self._gaps = StepGaps()
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
        with self._alone("step"):
            began = self._gaps.begin()
            try:
                self._loss = self._step(loss_fn, batch, weight, scaler, cost)
            except BaseException:
                self._gaps.interrupted()
                raise
            self._gaps.end(began)
            return self._loss

    def _step(
        self, loss_fn: LossFunction, batch: Any, weight: Weight | None, scaler: Any, cost: Cost | None
    ) -> torch.Tensor:
        check_trains("step", loss_fn)
        check_scaler("step", scaler)
        whole, objective = self._prepared(batch, weight)
        costs = self._costs(cost, batch, whole.size)
        names = self._replicas.names

        def run_of(frame: Frame, objective: Objective) -> TrainRun:
            return TrainRun(frame, loss_fn=loss_fn, objective=objective, scale=self._scale_of(scaler), names=names)

        return self._train(kind_of(None), whole, objective, costs, loss_fn, run_of)

    def batch(self, batch: Any, *, weight: Weight | None = None, cost: Cost | None = None) -> GlobalBatch:
        """The lower level that `step` is made of, for several optimizers, adversarial networks, several losses, backward by hand.

        The library owns the split, the weights and the reduction; forward and backward are the caller's function's. Every run of the
        batch commits its gradients, or raises and commits none of them. Between runs anything may happen, such as a step of an optimizer.

        Parameters
        ----------
        batch, weight, cost
            As for `step`. With `cost` every run of the batch deals out its items by it, and as its own times say.

        Returns
        -------
        GlobalBatch
            ``run(fn)`` calls ``fn(module, micro_batch)`` on all devices, and raises what `step` does. It ends with its ``with`` block.

        Raises
        ------
        InvalidArgument
            For a batch, weight or costs that cannot be used.

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
            costs = self._costs(cost, batch, whole.size)

        def start(fn: RunFunction, wanted: list[nn.Parameter] | None, scaler: Any, name: str) -> torch.Tensor:
            def run_of(frame: Frame, objective: Objective) -> TrainRun:
                return FunctionRun(frame, fn, objective, self._scale_of(scaler), self._replicas, wanted)

            with self._beside("run"):
                check_trains("run", fn)
                check_scaler("run", scaler)
                return self._train(kind_of(name), whole, objective, costs, fn, run_of)

        return GlobalBatch(whole.size, start)

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

        Raises
        ------
        InvalidArgument
            For a batch, costs or outputs that cannot be used.
        Timeout, DeviceLost, Error, Cancelled, KeyboardInterrupt
            As `step`.
        Exception
            What `fn` raised on a worker, with a note that names the device.
        """
        with self._beside("predict"):
            return self._predict(batch, fn if fn is not None else forward, cost)

    def _predict(self, batch: Any, fn: Callable[[nn.Module, Any], Any], cost: Cost | None) -> Any:
        whole = Batch(batch)
        self._places.begin(whole)
        costs = self._costs(cost, batch, whole.size)
        work = self._work("predict")

        def attempt() -> Any:
            return self._execution.predict(work, PredictRun(self._execution.frame(work, whole, fn, costs), fn=fn))

        return self._execution.repeated(attempt)

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
        return spread(cls, self.module.parameters() if parameters is None else parameters, HostWorkers(self), options)

    def replay_claims(self, path: str | os.PathLike[str] | None, *, run: str | None = None) -> None:
        """Run the steps that follow as those of a ledger ran: the same items on the same devices, in the same pieces and order.

        From the same parameters, with the same batches and as many threads per device, gradients on host devices are the same bit for
        bit, whatever the devices' speeds are now. So are random draws from the same state of the caller's generator, but for those that
        `UnseededDrawsWarning` names. Not so gradients of tensors outside of the module: devices add to those in the order in which they are
        done, so their last bits may differ. Nothing is measured meanwhile, and the balancer stays as it is.

        Parameters
        ----------
        path
            What `write_ledger` wrote, on as many devices. None: from now on steps are balanced again.
        run
            The name of a run of `batch`, whose runs these claims are for. Default: those of `step`.

        Raises
        ------
        InvalidArgument
            If it is no such ledger. `step` and the run raise it for a batch of another size, and when all steps have run.
        OSError
            If the file cannot be read.
        """
        with self._alone("replay_claims"):
            if path is None:
                self._scripts.pop(kind_of(run), None)
            else:
                self._scripts[kind_of(run)] = ClaimScript(path, self._names, run)

    def __repr__(self) -> str:
        state = "open" if self._finalizer.alive else "closed"
        return f"<paceline.torch.DataParallel {type(self.module).__name__} on {', '.join(self._names)}, {self._options['balance']}, {state}>"
