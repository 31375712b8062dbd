"""What all trainers have in common: a step of one batch, its figures, its state and its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup
from paceline._stop import stop_requested
from paceline.torch._batch.batch import BatchDim
from paceline.torch._batch.items import Cost
from paceline.torch._batch.objective import Reduction, Total, Weight
from paceline.torch._batch.options import Options
from paceline.torch._batch.samples import Collate
from paceline.torch._batch.splits import Split
from paceline.torch._run.execution import Execution
from paceline.torch._run.train_run import LossFunction
from paceline.torch._trainer.alarms import Alarms
from paceline.torch._trainer.arguments import check_optimizer, check_shard
from paceline.torch._trainer.data import Data
from paceline.torch._trainer.host_workers import HostWorkers
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.optimizer import made_of, spread
from paceline.torch._trainer.parts import Core, carried_out_by
from paceline.torch._trainer.predictions import Predictions
from paceline.torch._trainer.proofs import Proofs
from paceline.torch._trainer.recent_steps import RecentSteps
from paceline.torch._trainer.reports import Reports
from paceline.torch._trainer.saving import Saving
from paceline.torch._trainer.sharded_optimizer import Sharded, why_unsharded
from paceline.torch._trainer.shards import Shards, unsharded
from paceline.torch._trainer.step_gaps import StepGaps
from paceline.torch._trainer.tracing import Tracing
from paceline.torch._trainer.training import Training
from paceline.torch._trainer.trials import Trials
from paceline.torch._trainer.verification import Verification
from paceline.torch._trainer.works import Works

_T = TypeVar("_T", bound="Trainer")


class Trainer:
    """A module, the devices that train it, and the parts that carry out the calls. `DataParallel` and `Pipeline` make these."""

    module: nn.Module
    group: DeviceGroup
    _kind_of_reports: type[Reports] = Reports
    _kind_of_proofs: type[Proofs] = Proofs
    _kind_of_tracing: type[Tracing] = Tracing

    def _assemble(
        self,
        module: nn.Module,
        group: DeviceGroup,
        *,
        works: Works,
        execution: Execution,
        reduction: Reduction,
        verify_every: int | None = None,
        prove: Literal["warn", "raise"] | None = None,
    ) -> None:
        """Make the parts. The group ends with the trainer."""
        self.module, self.group = module, group
        self._works, self._execution = works, execution
        self._gaps, self._recent = StepGaps(), RecentSteps(on_gpu=any(execution.places.on_gpu))
        self._lifetime = Lifetime(group, execution, works, self._gaps, self._recent)
        core = Core(works, execution, self._lifetime)
        self._proofs = proofs = self._kind_of_proofs(prove, works, execution)
        self._reports = self._kind_of_reports(core, self._gaps)
        self._alarms = Alarms(self._reports.report, works, group.devices)
        self._training = Training(core, self._recent, reduction, proofs, self._alarms.after_step)
        self._predictions = Predictions(core, self._training, proofs)
        self._trials = Trials(core, self._training)
        self._verification = Verification(core, self._training, verify_every)
        self._data = Data(core)
        self._saving = Saving(core, self._data)
        self._tracing = self._kind_of_tracing(module, works.names, self._recent, self._gaps, self._alarms)

    predict = carried_out_by("_predictions", Predictions.predict)
    check = carried_out_by("_trials", Trials.check)
    report = carried_out_by("_reports", Reports.report)
    progress = carried_out_by("_reports", Reports.progress)
    scalars = carried_out_by("_reports", Reports.scalars)
    prometheus = carried_out_by("_reports", Reports.prometheus)
    on_alarm = carried_out_by("_alarms", Alarms.on_alarm)
    events = carried_out_by("_reports", Reports.events)
    history = carried_out_by("_reports", Reports.history)
    plot = carried_out_by("_reports", Reports.plot)
    page = carried_out_by("_reports", Reports.page)
    live = carried_out_by("_reports", Reports.live)
    trace = carried_out_by("_tracing", Tracing.trace)
    opentelemetry = carried_out_by("_tracing", Tracing.opentelemetry)
    explain = carried_out_by("_reports", Reports.explain)
    training_state = carried_out_by("_saving", Saving.training_state)
    load_training_state = carried_out_by("_saving", Saving.load_training_state)
    save_async = carried_out_by("_saving", Saving.save_async)
    load = carried_out_by("_saving", Saving.load)
    close = carried_out_by("_lifetime", Lifetime.close)

    def step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        weight: Weight | None = None,
        scaler: Any = None,
        cost: Cost | None = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
    ) -> torch.Tensor:
        """Run one forward and backward over `batch` on all devices and add the gradient to the parameters' ``.grad``.

        Parameters
        ----------
        loss_fn
            ``loss_fn(module, slice)`` is called once per micro-batch, with a replica and a slice of `batch`. It returns the loss,
            0-dimensional or with one entry per item of the slice; further dimensions of 1 are dropped. It may return a pair
            ``(loss, extras)`` with a tensor or a nest of tensors beside the loss; `extras` then has them for the whole batch. If `weight` is a mapping, the loss is a mapping with the same keys.
        batch
            With `group` of the trainer: this rank's part of the batch, or None if that is empty. Else the whole batch.
            A tensor, or any nest of tuples, lists, mappings and dataclasses. Tensors with dimensions are split along dimension 0, where all
            need the same length B. 0-dimensional tensors, numbers, strings and the like go along unchanged. What seems to have one entry per
            item but cannot be split is refused: a list or an array with B entries, a tuple of B strings or objects, an object that holds tensors.
            `batch_dim` has None for those of them that belong to the whole batch.
        weight
            How much each item counts in the mean: a 1-D tensor with one weight per item, or a callable that makes one from the whole
            batch, e.g. the number of unmasked tokens. Default: every item counts 1. Slices without weight are not run. A mapping from names
            to such weights (or None) is for a loss of several terms, each of which is a mean over something else. The objective is the sum of
            the terms, each divided by its own weight. A term that nothing has weight in adds nothing. A slice's loss of a term that has no
            weight there is not used, and may be missing.
        scaler
            A ``torch.amp.GradScaler``: gradients come out scaled, as after ``scaler.scale(loss).backward()``.
        cost
            What each item costs, in any unit: a 1-D tensor with one number per item, or a callable that makes one from the whole batch,
            e.g. its length in tokens. Then the *costs* of the devices are balanced instead of their items. Each device's items are sorted
            and packed into micro-batches of similar cost, of at most `micro_batch` items. So a slice holds items from anywhere in the
            batch, longest first. `loss_fn` saves time if it trims the slice: ``tokens = b["tokens"][:, : b["length"].max()]``. The trainer
            learns the time of items as a function of their cost, up to its square. `explain` says this time, and how much padding was
            saved. Steps with `cost` and steps without are measured apart.
        total
            What to divide the sum over the items by, in place of the total weight: a positive number. For a mean over more than this batch,
            such as all micro-batches of an accumulation. With `group` the number is for all ranks together, and equal on all. With 1, and
            ``reduction="sum"``, the objective is the plain sum. If `weight` is a mapping, one number is for all terms, and a mapping is for those
            that it names.
        collate
            ``collate(samples)`` makes a slice. Then `batch` is a list of samples, of any type, one per item, and each worker puts its
            own slices together. For what no tensor of the whole batch can hold: packed sequences, graphs, strings, images of many sizes.
        batch_dim
            Which dimension of the tensors is the item: a number for all of them, or a nest like `batch`, where a number is for all tensors
            below it. Entries that a mapping leaves out have 0. None is for a tensor that belongs to the whole batch and is not split. For
            the batch ``(x, (hidden, cell))`` of an LSTM with ``batch_first=True`` it is ``(0, 1)``.
        split
            For batches of a type of your own: ``split(batch, begin, end)`` returns items ``[begin, end)`` of a batch, whose number of items is
            ``len(batch)``. Or an object with ``length(batch)`` and ``slice(batch, begin, end)``. A mapping from types to these is for objects
            inside of `batch`. Workers call it at the same time. Not together with `cost`. Packed sequences and nested tensors need no `split`.

        Returns
        -------
        torch.Tensor
            The objective over the whole batch, with `group` over those of all ranks: 0-dimensional, detached, unscaled. With GPUs it is
            on the module's GPU.

        Raises
        ------
        InvalidArgument
            For a batch, weight, loss or module that cannot be used. The message says what to do. On host devices also if the loss of a slice is not
            finite, and those of others and of the whole batch are: a mean over nothing, which `weight` cures.
        RuntimeError
            If the loss depends on no parameter.
        Timeout, DeviceLost
            If a GPU hangs, and after that, or after an error that only a new process repairs. The error may come from an earlier step. With
            `group`: if a rank is gone, or does not answer within the group's own time limit; the message names it where that is known.
        Error
            With `group`: if another rank has failed. The message has that rank and its error. No rank has committed anything.
            If NCCL fails, with the device's name. The next step makes new connections. If NCCL fails after `step` has returned, the next
            call raises the error. Then the gradients of that step are undefined, and so is what an optimizer has made of them. Go back to
            what you saved last. With `verify_every`: if devices differ, before anything is committed.
        Exception
            What `loss_fn` raised on a worker, with its own traceback and a note that names the device. Further notes have what other devices
            raised meanwhile. Gradients and buffers are then as before the step (random generators and Python state are not), and the next
            step works.
        KeyboardInterrupt
            On Ctrl-C. The first Ctrl-C ends the step like a failure, once every worker has left its micro-batch. If it comes while the
            gradients are being written, it is too late: the step is done, and ``report()["steps"]`` counts it. A second Ctrl-C does not
            wait: the trainer refuses steps until the workers are out. Until then a single device, which runs the module itself, may write
            to its ``.grad``, so call ``zero_grad`` afterwards. With GPUs the first Ctrl-C also waits until nothing runs any more; the
            second leaves that to the next step or `close`.
        Cancelled
            If another thread closed the trainer, or the `reducer` does not commit. Gradients and buffers are as before the step.
        """
        options = Options(weight, cost, total, scaler, collate, batch_dim, split)
        return self._measured("step", loss_fn, batch, options)

    def loss(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        weight: Weight | None = None,
        cost: Cost | None = None,
        scaler: Any = None,
        total: Total | None = None,
        collate: Collate | None = None,
        batch_dim: BatchDim = 0,
        split: Split | None = None,
    ) -> torch.Tensor:
        """Run `step`, and return a loss that carries the gradients. Its ``backward`` adds them to ``.grad``.

        For code that calls ``backward`` itself: training frameworks, gradient accumulation, a loss with more terms. ``loss / k``,
        ``3 * loss + penalty``, ``scaler.scale(loss)``, `torch.autograd.grad` and parameter hooks do what they do on one device. Hooks run
        once, on the caller's thread, with the gradient of the whole batch. The loss keeps one set of gradients alive until its ``backward``.
        From the first call on, a single device works on a copy of the module, too, and `step` refuses what it refuses on several devices.

        Parameters
        ----------
        loss_fn, batch, weight, cost, total, collate, batch_dim, split
            As for `step`. A loss that depends on tensors outside of the module gives these their gradients, too.
        scaler
            The ``torch.amp.GradScaler`` that ``scaler.scale(loss)`` is called on. The devices then scale their losses before their own
            backward, so that half-precision gradients do not vanish, and the loss counts the scale once.

        Returns
        -------
        torch.Tensor
            The objective over the whole batch: 0-dimensional, unscaled, with a graph.

        Raises
        ------
        InvalidArgument, RuntimeError, Timeout, DeviceLost, Error, Exception, KeyboardInterrupt, Cancelled
            As `step`. Gradients are as before, whether it raises or returns.

        Its ``backward`` raises RuntimeError if it is called a second time, with ``create_graph=True``, or after a parameter was written in
        place.

        Examples
        --------
        >>> for batch in loader:                                                     # doctest: +SKIP
        ...     loss = trainer.loss(loss_fn, batch)
        ...     (loss / 4 + penalty(model)).backward()
        """
        options = Options(weight, cost, total, scaler, collate, batch_dim, split)
        return self._measured("loss", loss_fn, batch, options, carries=True)

    @property
    def differs(self) -> bool:
        """Whether a proof has found that the devices give another result than one device. `explain` says how."""
        return self._proofs.differs

    @property
    def extras(self) -> Any:
        """What `loss_fn` returned beside the loss in the last step, for the whole batch, or None.

        `loss_fn` returns ``(loss, extras)``, where extras are a tensor or a nest of them. A tensor with one row per item comes back with the
        rows of all items, in the order of the batch. A 0-dimensional tensor is taken for a mean over its slice, and comes back as the mean
        over the batch, weighted like the loss. If `weight` is a mapping, ``extras["name"]`` is weighted like the term of that name, and other
        means count all items. The tensors are detached. With `group` they are those of this rank's part of the batch.
        """
        return self._execution.extras

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        parameters: Iterable[Any] | None = None,
        /,
        *,
        shard: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Make ``cls(parameters, **options)``, by default over the module's parameters. They may come in groups, as `cls` takes them.

        On several host devices its ``step`` runs on all of their workers, each with a part of the parameters, if there is enough to do and
        `cls` is an optimizer of PyTorch that treats parameters one by one (all but LBFGS and SparseAdam). The result is the same bit for
        bit. Instances, states, hooks and schedulers are those of `cls`.

        On several GPUs the same optimizers can be sharded: each GPU has the state of a range of the parameters, updates that range and sends
        it. So large states find room. On PCIe a step takes longer by it. Adafactor and Muon are divided between whole tensors. Adagrad makes
        its state on the module's GPU, and divides it at the first step. Reading ``state`` brings the state to the module's GPU until the next
        step, which no longer updates what was read; ``state_dict()`` has host tensors and leaves it where it is.

        Parameters
        ----------
        cls
            The class of the optimizer.
        parameters
            Parameters or groups of them.
        shard
            Whether to shard the state: True from two GPUs on, False never. ``"auto"``: from three GPUs on, if the first one has too little free
            memory for all of it at the first step. `explain` says which, and why not.
        **options
            What `cls` takes.

        Raises
        ------
        InvalidArgument
            If an argument cannot be used.
        Exception
            What `cls` raises for these parameters and options. If its ``step`` raises on a worker, as for a gradient of another type, the
            parts of other workers may be updated or not. Go on from what you saved last.
        """
        workers = HostWorkers(self._lifetime, self._recent.optimizer_times)
        parameters = self.module.parameters() if parameters is None else parameters
        check_shard(shard)
        check_optimizer(cls, parameters)
        why = why_unsharded(cls, shard, self._execution.places)
        if not why:
            shards = Shards(cls, self._lifetime, always=shard is True)
            made: torch.optim.Optimizer = made_of(Sharded, cls)(parameters, shards=shards, workers=workers, **options)
            return made
        optimizer = spread(cls, parameters, workers, options)
        if shard is True:
            self._lifetime.unsharded[optimizer] = unsharded(cls, why)
        return optimizer

    def retire(self, device: str | Device) -> None:
        """Give the device no work from the next call on. Nothing waits for it. Its share goes to the others; no item is lost.

        It stays in the group, with its replica and its worker, until `restore` brings it back. Use it for a GPU that somebody else needs for
        a while, for a core that a data loader needs, or for a device that you do not trust.

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
        """Give work to a retired device again. Its speed from before counts at first, and a change is noticed as usual.

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
        """Items that each device really ran in the last step. Before the first one: in the last `predict`."""
        return self._reports.shares

    def _measured(
        self, call: str, loss_fn: LossFunction, batch: Any, options: Options, *, carries: bool = False
    ) -> torch.Tensor:
        """A training step, whose time since the step before counts as waiting for the caller."""
        with self._lifetime.exclusive(call), self._execution.together(call):
            began, trained = time.perf_counter(), self._works.steps.trained
            try:
                self._verification.before_step(loss_fn, batch, options)
                loss = self._training.step(loss_fn, batch, options, carries=carries)
                self._reports.loss = loss.detach().clone() if carries else loss  # which the caller may change in place
            except BaseException:
                self._gaps.interrupted()
                raise
            self._reports.note_step(began, timed=self._works.steps.trained > trained)
        self._alarms.after_step()  # outside of the call, so that a callback may use the trainer
        return loss

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or a call has asked for a stop, in any `paceline.stop_on` that is open.

        With `group`: in any process, as of the last step. All ranks see the same value after the same step.
        """
        ranks = self._execution.ranks
        return stop_requested() if ranks is None else ranks.stop

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._lifetime.leave(raised=kind is not None)

    def __repr__(self) -> str:
        state = "open" if self._lifetime.is_open else "closed"
        names = ", ".join(self._works.names)
        return f"<paceline.torch.{type(self).__name__} {type(self.module).__name__} on {names}, {self._works.options['balance']}, {state}>"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>{self._reports._repr_html_()}"
