"""`Pool`: independent jobs and requests on all devices, placed, batched and ordered by measured time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline import devices as all_devices
from paceline._core.engine import Pool as Engine
from paceline.torch._devices.places import prepare_worker
from paceline.torch._pool.batcher import Batcher
from paceline.torch._pool.job import PoolFuture, Work

_T = TypeVar("_T")
Priority = Literal["interactive", "normal", "batch", "background"]
Placement = Literal["auto", "any", "weighted", "round_robin", "least_outstanding", "earliest_finish"]

_PRIORITIES = ("interactive", "normal", "batch", "background")


class Pool:
    """Runs many independent pieces of work on the devices of this machine.

    A job starts where it ends soonest by what was measured: a slow device leaves to faster ones what these end sooner. Until three jobs of a
    kind have run on a class of devices, every device takes what comes. Jobs start in the order of their deadlines; without one, of submit
    time and the patience of their priority: 0.1 s, 1 s, 60 s. Steps of trainers on the same devices come first, after each job.

    Host devices only so far. Jobs of several threads share Python's lock: PyTorch's operators run without it.

    Parameters
    ----------
    devices
        As for `DataParallel`; ``"host"`` are all host devices, one for each core.
    placement
        ``"auto"``, or for comparison: ``"any"``, ``"weighted"`` (in the ratio of measured speeds), ``"round_robin"``, ``"least_outstanding"``,
        ``"earliest_finish"``.

    Raises
    ------
    InvalidArgument
        For devices or a placement that there is not, and for GPUs.

    Examples
    --------
    >>> with Pool("host") as pool:                                                    # doctest: +SKIP
    ...     trial = pool.submit(train_trial, config, priority="batch")
    ...     print(trial.result(), trial.device, trial.seconds)
    """

    def __init__(
        self, devices: str | Sequence[str | Device] | DeviceGroup = "host", *, placement: Placement = "auto"
    ) -> None:
        if isinstance(devices, str):
            if devices not in ("auto", "host"):
                raise InvalidArgument(f"Pool: devices is {devices!r}; it must be 'auto', 'host', or a list of devices.")
            group = DeviceGroup([one.name for one in all_devices() if devices == "auto" or one.kind == "host"])
        else:
            group = devices if isinstance(devices, DeviceGroup) else DeviceGroup(list(devices))
        gpus = [one.name for one in group.devices if one.kind != "host"]
        if gpus:
            raise InvalidArgument(f"Pool: {gpus[0]} is a GPU, on which pools do not run yet. Give devices='host', or host devices.")
        self.devices = group.devices
        self._threads = {one.name: max(1, len(one.cores)) for one in group.devices}
        self._engine = Engine(group, placement)
        self._lock = threading.Lock()
        self._served = 0

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

        Parameters
        ----------
        fn
            `device` is a ``torch.device``. PyTorch has as many threads as the device has cores.
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
            Labels that the device must have: its name, or ``"host"``.
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
            If the pool is closed.
        """
        if not callable(fn):
            raise InvalidArgument(f"submit: its first argument is a {type(fn).__name__}, not a function.")
        future: PoolFuture[_T] = PoolFuture()

        def call(devices: list[str]) -> _T:
            self.prepare(devices[0])
            places = [torch.device("cpu")] * len(devices)
            return fn(places if gang > 1 else places[0], *args, **kwargs)

        if kind is None:
            kind = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
        self.put(
            Work(future, call),
            kind=kind,
            priority=priority,
            deadline=deadline,
            not_before=not_before,
            gang=gang,
            after=after,
            needs=[needs] if isinstance(needs, str) else list(needs),
            wait=wait,
        )
        return future

    def serve(
        self, model: nn.Module | Callable[[Any], Any], *, max_batch: int = 64, max_delay: float = 0.0
    ) -> Batcher:
        """Answer requests in batches of what waits.

        Parameters
        ----------
        model
            A module, which the devices share and call in inference mode, or any function of a batch. It is called again with half of a batch
            that has failed, so that only the request fails that is the reason.
        max_batch
            Requests of a batch at most. Sizes are 1, 2, 4, ... up to it.
        max_delay
            Seconds that a batch may wait to become larger, from its first request on.

        Raises
        ------
        InvalidArgument
            For a module in training mode, and for numbers that cannot be used.
        """
        if isinstance(model, nn.Module) and model.training:
            raise InvalidArgument("serve: the module is in training mode, in which an answer may depend on other requests. Call eval() before.")
        if not callable(model):
            raise InvalidArgument(f"serve: its first argument is a {type(model).__name__}, not a module or a function.")
        if not (isinstance(max_batch, int) and max_batch >= 1 and 0 <= max_delay < math.inf):
            raise InvalidArgument(f"serve: max_batch={max_batch!r} must be at least 1, and max_delay={max_delay!r} finite and not negative.")
        with self._lock:
            self._served += 1
            name = f"{getattr(model, '__qualname__', type(model).__qualname__)} {self._served}"
        return Batcher(self, model, max_batch, max_delay, name)

    def retire(self, device: str) -> None:
        """Let a device start nothing until `restore`. What runs there goes on."""
        self._engine.retire(device)

    def restore(self, device: str) -> None:
        """Let a device start jobs again."""
        self._engine.restore(device)

    def close(self, *, cancel: bool = False) -> None:
        """Wait until every job has ended. With `cancel`, jobs that have not started are cancelled. A second call does nothing."""
        self._engine.close(cancel)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return self._engine.waiting

    @property
    def running(self) -> int:
        """How many jobs or batches run."""
        return self._engine.running

    def explain(self) -> str:
        """Text: what each device has run, and why it leaves jobs waiting."""
        return self._engine.explain()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)

    # What batchers use.

    def add_batches(
        self, kind: str, max_batch: int, max_delay: float, run: Callable[[list[str], Sequence[Any]], int]
    ) -> None:
        """Let works of this kind run together."""
        self._engine.add_batches(kind, max_batch, max_delay, run)

    def prepare(self, device: str) -> None:
        """Prepare the calling worker."""
        prepare_worker(self._threads[device], None)

    def put(
        self,
        work: Work,
        *,
        kind: str,
        priority: str,
        deadline: float | None,
        wait: bool,
        not_before: float = 0.0,
        gang: int = 1,
        after: Sequence[PoolFuture[Any]] = (),
        needs: Sequence[str] = (),
        batched: bool = False,
    ) -> None:
        """Give the engine a piece of work, and its future a way to cancel it."""
        if priority not in _PRIORITIES:
            raise InvalidArgument(f"submit: priority is {priority!r}; it must be one of {', '.join(_PRIORITIES)}.")
        if not all(isinstance(one, PoolFuture) and one._pool is self for one in after):
            raise InvalidArgument("submit: after= has something else than futures of this pool.")
        job = self._engine.submit(
            work,
            kind=kind,
            priority=_PRIORITIES.index(priority),
            deadline=math.inf if deadline is None else deadline,
            not_before=not_before,
            gang=gang,
            after=[one._job for one in after],
            needs=list(needs),
            wait=wait,
            batched=batched,
        )
        work.future.submitted(self, job, lambda: self._engine.cancel(job))
