"""`Pool`: independent jobs and requests on all devices, placed, batched and ordered by measured time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument, Rejected, find_device
from paceline import devices as all_devices
from paceline.torch._pool.batcher import Batcher
from paceline.torch._pool.figures import Collector
from paceline.torch._pool.job import Job, PoolFuture
from paceline.torch._pool.jobs import Jobs, Placement, Priority
from paceline.torch._pool.served import Copies, Served, ServedFunction, ServedScript, WithState
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.reach import Handle

_T = TypeVar("_T")


class Pool(Handle):
    """Runs many independent pieces of work on the devices of this machine.

    A job starts where it ends soonest by what was measured: a slow device leaves to faster ones what these end sooner. Until three jobs of a
    kind have run on a class of devices, every device takes what comes. Jobs start in the order of their deadlines; without one, of submit
    time and the patience of their priority: 0.1 s, 1 s, 60 s. Steps of trainers on the same devices come first, after each job, but for `budget`.

    Jobs are threads of one process. They share Python's lock, which PyTorch's operators run without, and PyTorch's default generator of each kind of
    device: give a job a ``torch.Generator`` of its own if its random numbers are to be the same each time.

    On a GPU a job works on a stream of the pool, and has ended when the GPU has done its work, for which no thread waits. A GPU has one job or batch
    at a time.

    A pool that is not closed ends its jobs when the program ends, as executors of `concurrent.futures` do. If an error has ended the program, it
    cancels what waits. Jobs keep their pool until they have ended.

    Parameters
    ----------
    devices
        ``"auto"``: every GPU, or every host device if there is no GPU. ``"cuda"``: every GPU. ``"host"``: every host device, one for each core. A
        list of devices, in which these two may be, too. A `DeviceGroup`, whose end is that of the pool. A trainer: its devices, on whose workers
        jobs run between the trainer's steps.
    placement
        ``"auto"``, or for comparison: ``"any"``, ``"weighted"`` (in the ratio of measured speeds), ``"round_robin"``, ``"least_outstanding"``,
        ``"earliest_finish"``.
    budget
        The part of a device's time, from 0 to 1, that jobs may take from steps of trainers on the same device. Then a job of priority ``"interactive"``,
        or with a deadline of less than a second, waits for one micro-batch, and not for the device's part of the step. All jobs run where a step has no work for the device,
        whatever the budget. On a GPU, where jobs compute beside the step, it holds for all of them.

    Raises
    ------
    InvalidArgument
        For devices or a placement that there is not, and for another budget.

    Examples
    --------
    >>> with Pool("host") as pool:                                                    # doctest: +SKIP
    ...     trial = pool.submit(train_trial, config, priority="batch")
    ...     print(trial.result(), trial.device, trial.seconds)
    """

    def __init__(
        self,
        devices: str | Sequence[str | Device] | DeviceGroup | Any = "auto",
        *,
        placement: Placement = "auto",
        budget: float = 0.1,
    ) -> None:
        self._jobs = Jobs(_group_of(devices), placement, budget)

    @property
    def devices(self) -> list[Device]:
        """The devices, those that are retired included."""
        return list(self._jobs.devices)

    def submit(
        self,
        fn: Callable[..., _T],
        /,
        *args: Any,
        priority: Priority = "normal",
        deadline: float | None = None,
        not_before: float = 0.0,
        gang: int = 1,
        after: Sequence[PoolFuture[Any]] = (),
        needs: str | Sequence[str] = (),
        kind: str | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> PoolFuture[_T]:
        """Run ``fn(device, *args, **kwargs)`` once, on one device. With a gang ``fn(devices, *args, **kwargs)``, on several at once.

        Arguments of `fn` that have the names of these options go into a ``functools.partial``.

        Parameters
        ----------
        fn
            `device` is a ``torch.device``. On the host PyTorch has as many threads as the device has cores. On a GPU the current stream is the
            pool's: work on other streams has to be waited for. Tensors of GPUs in the arguments may still be computed, on the stream that is
            current at the submit. What `fn` returns stays where it is. A tensor on a GPU may then be used on the default stream; call
            ``record_stream`` for another one, as after every change of streams.
        priority
            How long the job is content to wait. ``"background"`` starts only where nothing else waits.
        deadline
            In seconds from now. A job that cannot end in time by what was measured is not run.
        not_before
            In seconds from now: the job starts no earlier.
        gang
            On how many devices it runs. `fn` runs on the worker of the first one, and the others run no job meanwhile.
        after
            Jobs of this pool that must complete first. If one does not, this job is cancelled.
        needs
            Labels that the device must have: its name, or ``"host"``, or ``"cuda"``.
        kind
            Jobs of one kind take about the same time. None: the name of `fn`.
        wait
            Whether to wait while the queue of the kind is full. Otherwise the future has `Rejected`, as inside of a job.

        Returns
        -------
        PoolFuture
            Its ``result()`` raises what `fn` has raised; `Rejected`, `Expired` or `Cancelled` if it never ran;
            ``concurrent.futures.CancelledError`` after ``cancel()``.

        Raises
        ------
        InvalidArgument
            For arguments that cannot be used.
        Unavailable
            If the pool is closed, or is in another process.
        """
        if not callable(fn):
            raise InvalidArgument(f"submit: its first argument is a {type(fn).__name__}, not a function.")
        if "memory" in kwargs:
            raise InvalidArgument(
                "submit: memory= is not there yet: pools know no memory. An argument of the job with this name goes into a functools.partial."
            )
        future: PoolFuture[_T] = PoolFuture()
        self._jobs.put(
            Job(future, self._jobs, fn, args, kwargs, gang),
            kind=_name_of(fn) if kind is None else kind,
            priority=priority,
            deadline=deadline,
            not_before=not_before,
            gang=gang,
            after=after,
            needs=[needs] if isinstance(needs, str) else list(needs),
            wait=wait,
        )
        return future

    def try_submit(self, fn: Callable[..., _T], /, *args: Any, **options: Any) -> PoolFuture[_T]:
        """Like `submit`, but raises `Rejected` if the job is not taken, and does not wait for room in the queue."""
        future = self.submit(fn, *args, wait=False, **options)
        error = future.exception() if future.done() and not future.cancelled() else None
        if isinstance(error, Rejected):
            raise error
        return future

    def serve(
        self,
        model: nn.Module | Callable[..., Any],
        *,
        initializer: Callable[[torch.device], Any] | None = None,
        max_batch: int = 64,
        max_delay: float = 0.0,
        idempotent: bool | None = None,
        replicate: Replicate | None = None,
    ) -> Batcher:
        """Answer requests in batches of what waits, of the sizes that end soonest over all devices. Answers are computed in inference mode.

        Parameters
        ----------
        model
            A module on the host or on a GPU: each device has a copy, which shares the parameters, or a copy of them in each other memory. Each
            batch sees parameters and buffers that were written to or replaced before, on a GPU by its default stream. It does not see writes
            through ``.data`` to a buffer, to a tensor that inference mode has made, or in another memory than the module's. Other changes need
            another `serve`. A ``ScriptModule`` has no copies: all devices call it, and must be where it is. Or a function of a batch,
            ``fn(batch)``. The request is dimension 0 of every tensor of the batch, which is on the device, and of the answer, which may be
            anywhere.
        initializer
            Makes the state of a device on its worker, before its first batch. The function is then ``fn(state, batch)``. A device on which it raises
            is retired, unless it is the last one, whose requests get the error.
        max_batch
            Requests of a batch at most. Few sizes run: four between a power of two and the next one.
        max_delay
            Seconds that a batch may wait to become larger, from its first request on.
        idempotent
            Whether a batch that fails may run again in halves, so that only the request fails that is the reason. None: for modules. Otherwise all
            requests of the batch get its error.
        replicate
            ``replicate(module)`` returns a new module of the same structure, for modules that ``copy.deepcopy`` cannot copy.

        Raises
        ------
        InvalidArgument
            For a module in training mode or with a batch norm that keeps no statistics, and for arguments that cannot be used.
        """
        is_module = isinstance(model, nn.Module)
        if isinstance(model, nn.Module) and _mixes_requests(model):
            raise InvalidArgument(
                "serve: the module, or a batch norm in it, is in training mode, or a batch norm keeps no statistics (track_running_stats=False). "
                "Then an answer may depend on other requests. Call eval() before. "
                "If this is meant, give a function that calls the module."
            )
        if not callable(model):
            raise InvalidArgument(f"serve: its first argument is a {type(model).__name__}, not a module or a function.")
        if not (isinstance(max_batch, int) and max_batch >= 1 and 0 <= max_delay < math.inf):
            raise InvalidArgument(
                f"serve: max_batch={max_batch!r} must be at least 1, and max_delay={max_delay!r} finite and not negative."
            )
        if is_module and initializer is not None:
            raise InvalidArgument("serve: initializer= is for a function fn(state, batch). A module is its own state.")
        if not is_module and replicate is not None:
            raise InvalidArgument("serve: replicate= is for modules.")
        served: Served
        if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
            module = model
            served = self._jobs.serve(lambda seats: Copies(module, seats, replicate))
        elif isinstance(model, torch.jit.ScriptModule):
            script = model
            served = self._jobs.serve(lambda seats: ServedScript(script, seats))
        else:
            served = ServedFunction(model) if initializer is None else WithState(model, initializer)
        return Batcher(
            self._jobs,
            served,
            f"{_name_of(model).rpartition('.')[2]} {self._jobs.number()}",
            max_batch=max_batch,
            max_delay=max_delay,
            idempotent=is_module if idempotent is None else idempotent,
        )

    def add(self, device: str | Device) -> None:
        """Let one more device join, with its worker and a copy of every served module. It takes work at once.

        Raises
        ------
        InvalidArgument
            If there is no such device, if the pool has it already, or if a module that is served cannot be there.
        Unavailable
            If the pool is closed.
        """
        self._jobs.add(find_device(device) if isinstance(device, str) else device)

    def retire(self, device: str) -> None:
        """Let a device start nothing until `restore`. What runs there goes on."""
        self._jobs.engine.retire(device)

    def restore(self, device: str) -> None:
        """Let a device start jobs again."""
        self._jobs.engine.restore(device)

    def close(self, *, cancel: bool = False) -> None:
        """Take no more jobs, and wait until every job has ended. With `cancel`, jobs that have not started are cancelled. A second call does nothing.

        In a process that was forked from that of the pool it does nothing.

        Raises
        ------
        InvalidArgument
            In a job, which would wait for itself.
        """
        self._jobs.close(cancel)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return self._jobs.engine.waiting

    @property
    def running(self) -> int:
        """How many jobs or batches run."""
        return self._jobs.engine.running

    def explain(self) -> str:
        """Text: what each device has run, and why it leaves jobs waiting."""
        return self._jobs.engine.explain()

    def report(self) -> dict[str, Any]:
        """The figures of `explain` and `prometheus`.

        Returns
        -------
        dict
            ``devices``: by name ``jobs`` that completed, their ``runs`` alone or in batches, ``busy_seconds`` of these, and whether it is
            ``retired``, or lost. ``waiting`` and ``running``. ``backlog_seconds``: until what waits would be served, by measured times.
            ``outcomes``: how many jobs ended how. ``wait_counts``: how many jobs waited at most so many seconds, and ``wait_seconds``, of all of them together.
        """
        return {
            "devices": self._jobs.devices_now(),
            "waiting": self.waiting,
            "running": self.running,
            "backlog_seconds": self._jobs.engine.backlog_seconds,
            **self._jobs.figures.report(),
        }

    def prometheus(self, /, **labels: str) -> Collector:
        """A collector of ``prometheus_client`` with the figures of `report`, which you register. It starts no server.

        Parameters
        ----------
        labels
            Labels of your own for all samples: ``prometheus(service="a")``. Several pools in one registry need different ones.

        Raises
        ------
        InvalidArgument
            For labels that the samples have already: ``device``, ``outcome``, ``le``.
        """
        return Collector(self.report, labels)

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.devices)
        state = "closed" if self._jobs.closed else f"{self.waiting} jobs wait, {self.running} run"
        return f"<paceline.torch.Pool [{names}], {state}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)


def _group_of(devices: Any) -> DeviceGroup:
    if isinstance(devices, str):
        if devices not in ("auto", "cuda", "host"):
            raise InvalidArgument(
                f"Pool: devices is {devices!r}; it must be 'auto', 'cuda', 'host', or a list of devices."
            )
        return DeviceGroup(_of_kind("cuda") or _of_kind("host") if devices == "auto" else _some_of_kind(devices))
    if isinstance(devices, DeviceGroup):
        return devices
    group = getattr(devices, "group", None)  # of a trainer, which may be closed before the pool
    if isinstance(group, DeviceGroup):
        return DeviceGroup(list(group.devices))
    found = [_some_of_kind(one) if one in ("cuda", "host") else [one] for one in devices]
    return DeviceGroup([one for some in found for one in some])


def _of_kind(kind: str) -> list[str]:
    return [one.name for one in all_devices() if one.kind == kind]


def _some_of_kind(kind: str) -> list[str]:
    found = _of_kind(kind)
    if not found:
        raise InvalidArgument(f"Pool: there is no {kind!r} device here. `paceline info` says why.")
    return found


def _mixes_requests(model: nn.Module) -> bool:
    # Other parts may have the flag of training for no reason, as those that quantization makes.
    norms = (part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    return model.training or any(part.training or part.running_mean is None for part in norms)


def _name_of(fn: Any) -> str:
    """What jobs are called that take about the same time."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
