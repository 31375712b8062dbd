"""`DataParallel`: the training step over all devices of one machine."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, Error, InvalidArgument, OutOfMemory, Timeout, Unavailable
from paceline._core.engine import Stepper
from paceline.torch._arguments import Balance, check_devices, named_devices, policy_of
from paceline.torch._batch import Batch, concatenate
from paceline.torch._buckets import Buckets
from paceline.torch._buffers import KeptBuffers
from paceline.torch._caller_state import CallerState, CallerThreads
from paceline.torch._exit import abandoned_runs, finalize, open_trainers
from paceline.torch._failures import raise_failure
from paceline.torch._gradients import UserGradients
from paceline.torch._items import Cost, Items, costs_of
from paceline.torch._memory import MemoryCaps, is_out_of_memory
from paceline.torch._objective import Objective, Reduction, Weight
from paceline.torch._places import Places, RandomStates
from paceline.torch._replicas import Replicas, Replicate
from paceline.torch._run import LossFunction, PredictRun, Run, Seen, TrainRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline._progress import Progress

_T = TypeVar("_T")


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
            self._caps, self._caps_predicting = MemoryCaps(self._places), MemoryCaps(self._places)
            self._options: dict[str, Any] = {"balance": policy, "weights": weights, "micro_batch": micro_batch or 0}
            self._stepper = Stepper(group, **self._options)
            self._predictor: Stepper | None = None
            self._replicas = Replicas(module, self._places, replicate)
        except BaseException:
            if owned:
                group.close()
            raise
        self.group = group
        self._seen = Seen(len(group))
        self._seen_predicting = Seen(len(group))
        self._lock = threading.Lock()
        self._running: Run | None = None
        self._committed: Any = None  # the last outcome that was
        self._shares = dict.fromkeys(self._names, 0)
        self._loss: torch.Tensor | None = None  # of the last step, for those who watch
        # What host devices have delivered to GPUs, until these have read it: PyTorch would hand it on.
        self._delivered: list[tuple[Any, Any]] = []
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
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            mode = "inference mode" if torch.is_inference_mode_enabled() else "no_grad"
            raise InvalidArgument(
                f"step: called under {mode}, so there would be no gradients. Leave it for the step, or use predict()."
            )
        if not callable(loss_fn):
            raise InvalidArgument(
                f"step: loss_fn is a {type(loss_fn).__name__}, not a function. It is step(loss_fn, batch), with loss_fn(module, slice)."
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InvalidArgument(f"step: scaler is a {type(scaler).__name__}; a torch.amp.GradScaler is needed.")
        whole = Batch(batch)
        self._places.begin()
        objective = Objective(batch, whole.size, self._reduction, weight, self._places.pin)
        costs = costs_of(cost, batch, whole.size)
        return self._repeated(lambda: self._try_step(loss_fn, whole, objective, scaler, costs))

    def _planned(self, stepper: Stepper, whole: Batch, costs: list[float] | None) -> Items | None:
        return None if costs is None else Items(stepper.plan_items(costs), whole, self._places.pin)

    def _repeated(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns. Where memory ran out it is made again from where it began, in smaller pieces."""
        random = RandomStates(self._places)
        released = False
        while True:
            try:
                return attempt()
            except _TryAgainError:
                pass
            except OutOfMemory:  # paceline's own: PyTorch may sit on memory that it does not use
                if released:
                    raise
                released = True
            # Not in the handler, where the traceback still holds what the first attempt had allocated.
            self._places.release_memory()
            random.restore()

    def _try_step(
        self, loss_fn: LossFunction, whole: Batch, objective: Objective, scaler: Any, costs: list[float] | None
    ) -> torch.Tensor:
        self._replicas.refresh()
        items = self._planned(self._stepper, whole, costs)
        self._seen.follow(self._replicas, self.module, loss_fn, self._places.types)
        # With one device the user's module itself runs, so its buffers are kept for the case that the step fails.
        kept = None if self._replicas.shared else KeptBuffers(self.module)
        scale = None
        if scaler is not None and scaler.is_enabled():
            scale = scaler.scale(torch.ones((), device=self._places.home))
        run = TrainRun(
            whole if items is None else items.batch,
            self._replicas.list,
            self._seen,
            CallerState(self._places.types, len(self._names)),
            self._places,
            self._caps,
            loss_fn=loss_fn,
            objective=objective if items is None else items.objective(objective),
            scale=scale,
            names=self._replicas.names,
        )
        user = UserGradients(self._replicas)
        try:
            outcome = self._execute(self._stepper, run, items)
            user.check()
            if run.without_gradient and not run.with_gradient:
                raise RuntimeError(  # the type that plain PyTorch raises
                    "step: the loss does not require grad: no parameter that does reaches it (is it detached, or everything frozen?)."
                )
            if run.drawn and run.recomputed:
                raise InvalidArgument(
                    "step: random draws (dropout?) together with activation checkpointing on devices that share a random generator, as host "
                    "devices and the parts of one GPU do: so a recomputed forward would silently draw other masks than the first. Set dropout to 0, train "
                    "without checkpointing, or use one device. Nothing was committed."
                )
            with torch.no_grad():
                loss = run.loss()
                totals = user.totals(run.left_out) if run.buckets is None else run.buckets.totals()
                self._commit(user, totals, outcome)
            if run.buckets is not None:
                self._keep_delivered(outcome, run.buckets)
            return loss
        except BaseException:
            if user.written:  # interrupted in the middle of writing: a step is done or not done
                with torch.no_grad():
                    self._commit(user, totals, outcome)
                raise
            user.restore()
            if kept is not None:
                with torch.no_grad():
                    kept.restore()
            raise
        finally:
            self._drop_gradients()

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
        self._places.begin()
        if self._predictor is None:
            self._predictor = Stepper(self.group, **self._options)
        predictor = self._predictor
        costs = costs_of(cost, batch, whole.size)
        return self._repeated(lambda: self._try_predict(predictor, whole, fn, costs))

    def _try_predict(
        self, predictor: Stepper, whole: Batch, fn: Callable[[nn.Module, Any], Any], costs: list[float] | None
    ) -> Any:
        self._replicas.refresh()
        items = self._planned(predictor, whole, costs)
        self._seen_predicting.follow(self._replicas, self.module, fn, self._places.types)
        run = PredictRun(
            whole if items is None else items.batch,
            self._replicas.list,
            self._seen_predicting,
            CallerState(self._places.types, len(self._names)),
            self._places,
            self._caps_predicting,
            fn=fn,
        )
        outcome = self._execute(predictor, run, items)
        predictor.commit(outcome)
        with torch.no_grad():
            if self.module.training:  # as in plain PyTorch, running statistics follow
                self._commit_buffers(outcome)
            output = concatenate(run.outputs, self._places.to_home, self._places.owned)
            return output if items is None else items.restored(output)

    def optimizer(self, cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """An optimizer over the module's parameters: exactly ``cls(module.parameters(), **options)``."""
        return cls(self.module.parameters(), **options)

    @property
    def shares(self) -> dict[str, int]:
        """Items that each device really ran in the last step."""
        return dict(self._shares)

    def report(self) -> dict[str, Any]:
        """Figures for a dashboard.

        Returns
        -------
        dict
            ``devices``: per name ``share`` (items of the last step), ``items``, ``busy_seconds``, ``idle_seconds`` (totals),
            ``items_per_second`` (recent, while busy), ``speed`` (that, over the fastest device's); ``imbalance`` (slowest busy time over the mean, minus 1; recent); ``moves`` (changes of
            shares), ``steps``, ``compute_seconds`` and ``step_seconds`` (totals, without and with the reduction). After a step with
            `cost` also ``items``: ``cost`` of all items, ``padded_cost`` of the micro-batches that ran (each its count times its
            largest), ``contiguous_cost`` of the same sizes cut from the batch as it came, ``padding_saved`` (the part of the latter's
            padding); and, once measured, the time of a micro-batch: ``fixed_seconds``, ``seconds_per_cost``,
            ``seconds_per_squared_cost``, whether it follows the ``"padded"`` cost, the ``"sum"`` or the ``"count"`` alone
            (``measure``), and its relative ``error``.
        """
        figures = dict(self._stepper.metrics)
        if self._stepper.items is not None:
            figures["items"] = self._stepper.items
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
            ``duration_seconds``. A step that failed leaves none.
        """
        return list(self._stepper.events)

    def history(self) -> list[dict[str, Any]]:
        """The whole run in at most 1024 rows, oldest first: single steps, or in a longer run equally many steps added up.

        Returns
        -------
        list of dict
            ``first_step`` (from 0), ``steps`` (in this row), ``items`` and ``busy_seconds`` (sums, per name of a device), ``step_seconds``
            (sum, with the reduction), ``longest_step_seconds`` (of one step), ``moves``. Reading it waits for GPUs, as `report` does.
        """
        return list(self._stepper.history)

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
        """In words: what was seen, what was decided and why, what a move would gain. Waits for GPUs; also after `close`."""
        text = self._stepper.explain()
        busy = [entry["busy_seconds"] for entry in self._stepper.metrics["devices"].values()]
        return text + self._caps.explain() + self._places.launches.explain(busy)

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Write every measurement and decision of `step` to a file of JSON lines; `paceline.balance.replay` reproduces them.

        Raises
        ------
        InvalidArgument
            After the first step (a ledger that lacks steps cannot be replayed), or if the file cannot be written.
        """
        self._stepper.write_ledger(os.fspath(path))

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
            for stepper in (self._stepper, self._predictor):
                if stepper is not None:
                    stepper.settle()
        self._committed = None
        self._delivered.clear()
        self._predictor = None
        self._replicas.release()
        self._places.close()

    def _cancel(self) -> None:
        self._stepper.cancel()
        if self._predictor is not None:
            self._predictor.cancel()

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
                self._drop_gradients()
            yield
        finally:
            if self.group.busy and self._running is not None:
                abandoned_runs.add(self._running)
            self._running = None
            self._abandoned = self.group.busy
            self._lock.release()
            if self._is_closed():  # meanwhile, by another thread
                self._give_back_once()

    def _execute(self, stepper: Stepper, run: Run, items: Items | None) -> Any:
        self._running = run
        calls = (run.body, run.finish, self._places.queues, run.sums)
        outcome = stepper.run(run.batch.size, *calls) if items is None else stepper.run_items(items.plan, *calls)
        if run.failures:
            device, begin, end, error = run.failures[0]
            run.failures.clear()
            try:
                if is_out_of_memory(error) and run.caps.shrink(device, end - begin):
                    raise _TryAgainError from error
                told = run.batch.told(begin, end) if end > begin else ""
                raise_failure(error, self._names[device], told, run.kept)
            finally:
                del error  # which refers to this frame: a dropped trainer shall end without the garbage collector
        if outcome.failed_at is not None:
            raise Error(
                f"step: {self._names[outcome.failed_at[0]]} failed outside of user code. Nothing was committed."
            )
        return outcome

    def _keep_delivered(self, outcome: Any, buckets: Buckets) -> None:
        """Until the GPUs have read it. PyTorch keeps what lies on a GPU by itself."""
        pinned = buckets.take_pinned()
        if pinned:
            self._delivered.append((outcome, pinned))
        with contextlib.suppress(Error):  # a device that was lost says so at the next step
            self._delivered = [entry for entry in self._delivered if not entry[0].settled]

    def _commit(self, user: UserGradients, totals: list[torch.Tensor | None], outcome: Any) -> None:
        user.commit(totals)
        self._commit_buffers(outcome)
        if self._committed is not outcome:
            self._stepper.commit(outcome)
            self._committed = outcome
            self._shares = dict(zip(self._names, outcome.items, strict=True))

    def _commit_buffers(self, outcome: Any) -> None:
        if not self._replicas.shared:
            return
        ran = outcome.items
        buffers = self._replicas.list[ran.index(max(ran))].buffers
        if buffers is not None:
            buffers.push()

    def _drop_gradients(self) -> None:
        if self._replicas.shared:
            for replica in self._replicas.list:
                replica.clear_gradients()


class _TryAgainError(Exception):
    """Memory ran out, and smaller pieces may fit: nothing was committed, and the step can be run once more."""


def _forward(module: nn.Module, batch: Any) -> Any:
    return module(batch)
