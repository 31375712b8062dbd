"""`Pool`: independent jobs and requests on many devices, placed, batched and ordered by measured time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument, Rejected, find_device
from paceline.torch._pool.autoscale import Autoscale, Scale, Scaled
from paceline.torch._pool.batcher import Batcher
from paceline.torch._pool.figures import Collector
from paceline.torch._pool.future import PoolFuture
from paceline.torch._pool.groups import group_of, work_beside
from paceline.torch._pool.job import Job
from paceline.torch._pool.jobs import Jobs, Placement, Priority, name_of
from paceline.torch._pool.ledger import WritesLedger
from paceline.torch._pool.look import Shown
from paceline.torch._pool.needs import Needs
from paceline.torch._pool.page import Paged
from paceline.torch._pool.serving import batcher_of, bytes_of
from paceline.torch._pool.tenants import Tenant, add_tenants, by_name, charge_of, report_of
from paceline.torch._pool.tenants import name_of as tenant_of
from paceline.torch._pool.tracing import Scalars, Traced
from paceline.torch._replicas.copies import Replicate

_T = TypeVar("_T")


class Pool(Paged, Scaled, Shown, Traced, WritesLedger):
    """Runs many independent pieces of work on the devices of this machine.

    A job starts where it ends soonest by what was measured: a slow device leaves to faster ones what these end sooner. Until three jobs of a
    kind have run on a class of devices, every device takes what comes. Jobs start in the order of their deadlines; without one, of submit
    time and the patience of their priority: 0.1 s, 1 s, 60 s. Steps of trainers on the same devices come first, after each job, but for `budget`.

    Jobs are threads of one process. They share Python's lock, which PyTorch's operators run without, and PyTorch's default generator of each kind of
    device: give a job a ``torch.Generator`` of its own if its random numbers are to be the same each time.

    On a GPU a job works on a stream of the pool. It has ended when the GPU has done its work, for which no thread waits. One job or batch is on a GPU at a time.

    A pool that is not closed ends its jobs when the program ends, as executors of `concurrent.futures` do. If an error has ended the program, it
    cancels what waits. Jobs keep their pool until they have ended.

    Parameters
    ----------
    devices
        ``"auto"``: every GPU, or every host device if there is no GPU. ``"cuda"``: every GPU. ``"host"``: every host device, one for each core. A device
        or its name, or a list of them, in which these two may be, too. A `DeviceGroup`, whose end is that of the pool. A trainer: its devices, on whose workers
        jobs run between the trainer's steps.
    placement
        ``"auto"``, or for comparison: ``"any"``, ``"weighted"`` (in the ratio of measured speeds), ``"round_robin"``, ``"least_outstanding"``,
        ``"earliest_finish"``. Or a function, which is asked where the job that is next of its kind shall start: it is given a `paceline.plan.PoolQuestion`
        and returns the name of an idle device, or None to let the job wait. It runs on any thread, one question at a time, without a lock of the pool.
        If it raises, or answers anything else, the fastest idle device takes the job, a warning says so once, and `explain` and `report` count it.
    budget
        The part of a device's time, from 0 to 1, that jobs may take from steps of trainers on the same device. Then a job of priority ``"interactive"``,
        or with a deadline of less than a second, waits for one micro-batch, and not for the device's part of the step. All jobs run where a step has no work for the device,
        whatever the budget. On a GPU, where jobs compute beside the step, it holds for all of them.
    memory
        Bytes that jobs may use of a device, by its name: ``{"cuda:0": 60e9}``. Others have no limit. What jobs use is what their ``memory=`` says.
    tenants
        Who shares the pool, by name: a weight, or a `Tenant` with quotas. Jobs with ``tenant=`` of another name have weight 1. Tenants whose jobs of a priority
        wait for the same devices are served in the ratio of their weights, in units of cost.
    hang_seconds
        A job or a batch that runs for longer is given up: its future has `Timeout`, a warning names the job, the device and the line, and another thread
        takes the jobs of the device. The thread that hangs goes on, and so does a GPU, beside later jobs. Likewise a load by `Batcher.publish`, or of a device that comes back. More than any job takes, with compiling and loading.
    autoscale
        Whether to release devices that are not needed, with the memory of models there, and to load and take them back, so that jobs wait for 0.1 s in the mean. `Autoscale` has other figures.
    observe
        ``"socket"``: ``paceline top`` shows the pool until `close`, as for `DataParallel`.

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
        devices: str | Device | Sequence[str | Device] | DeviceGroup | Any = "auto",
        *,
        placement: Placement = "auto",
        budget: float = 0.1,
        memory: Mapping[str, float] | None = None,
        tenants: Mapping[str, float | Tenant] | None = None,
        hang_seconds: float | None = None,
        autoscale: bool | Autoscale = False,
        observe: Literal["socket"] | None = None,
    ) -> None:
        caps = {name: bytes_of("Pool", f"memory[{name!r}]", value) for name, value in by_name("memory", memory)}
        self._jobs = Jobs(group_of(devices), placement, budget, caps, hang_seconds, observe)
        add_tenants(self._jobs, tenants)
        if budget > 0:
            work_beside(devices, self._jobs)
        self._scale = self._jobs.scale = Scale(self._jobs, autoscale)
        self._scalars = Scalars()

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
        after: PoolFuture[Any] | Iterable[PoolFuture[Any]] = (),
        needs: Needs = (),
        memory: float = 0.0,
        tenant: str | None = None,
        cost: float | None = None,
        kind: str | None = None,
        idempotent: bool = False,
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
            In seconds from now. A job that cannot end in time by what was measured, or makes one late that was taken, is not run.
        not_before
            In seconds from now: the job starts no earlier.
        gang
            On how many devices it runs. `fn` runs on the worker of the first one, and the others run no job meanwhile.
        after
            A job of this pool that must complete first, or several. If one does not, this job is cancelled.
        needs
            What the device must have: a label, which is its name, ``"host"`` or ``"cuda"``; a function of its facts (``name``, ``kind``, ``device_class``, ``cores``,
            ``memory`` in bytes) that returns whether it will do, ``lambda facts: facts.memory > 4e9``; or a list of these, all of which must hold. A
            function is called once for each device that the pool then has, by `submit`. A device that is added later takes no earlier jobs with a function.
        memory
            Bytes that the job needs on each of its devices while it runs. It waits until they are there, and is `Rejected` where no device has as much. This
            is about the pool's ``memory=``: a device that has none there takes any job, whatever memory the machine has.
        tenant
            For whom it runs. Jobs with a deadline are ordered by it, and count for their tenant like others.
        cost
            What its tenant is charged, in any unit: epochs, items, expected seconds; the same on each device, so nobody pays for a slow one. None: 1 a device of a gang.
        kind
            Jobs of one kind take about the same time. None: the name of `fn`. Those that need other `memory` are measured apart.
        idempotent
            Whether `fn` may be called again: on another device, if its own is lost. Such jobs are measured apart, too.
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
        future: PoolFuture[_T] = PoolFuture()
        owner, charge = tenant_of("submit", tenant), 0.0 if cost is None else charge_of("submit", cost)
        kind, memory = name_of(fn) if kind is None else kind, bytes_of("submit", "memory", memory)
        if idempotent:
            kind, memory = self._jobs.kind_that_may_run_again(kind, memory), 0.0
        self._jobs.put(
            Job(future, self._jobs, fn, args, kwargs, gang, idempotent=idempotent),
            kind=kind,
            priority=priority,
            deadline=deadline,
            not_before=not_before,
            gang=gang,
            after=after,
            place=self._jobs.place_of(needs),
            memory=memory,
            tenant=owner,
            charge=charge,
            wait=wait,
            batched=idempotent,
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
        pad: Any = None,
        cost: Callable[[Any], float] | None = None,
        length_dim: int = 0,
        memory: float = 0.0,
        resident: float = 0.0,
        needs: Needs = (),
        autocast: torch.dtype | None = None,
        compile: bool | Mapping[str, Any] = False,
        graphs: bool = False,
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
            Makes the state of a device on its worker, before its first batch, or on another thread before a released device comes back. The function is then ``fn(state, batch)``. A device on which it raises
            is retired, unless it is the last one, whose requests get the error. Where memory runs out when it is made anew only the batch fails.
        max_batch
            Requests of a batch at most. Few sizes run: four between a power of two and the next one.
        max_delay
            Seconds that a batch may wait to become larger, from its first request on.
        idempotent
            Whether a batch that fails may run again in halves, so that only the request fails that is the reason. Otherwise all get its error. None: for modules.
        replicate
            ``replicate(module)`` returns a new module of the same structure, for modules that ``copy.deepcopy`` cannot copy.
        pad
            Let requests of different lengths share batches. Tensors are filled up at their end with this number, to the longest of the batch; or a nest of
            numbers, with the structure of a request. The model must leave padding out of the answers of others, by a mask. Answers come back
            without the padding where their dimensions are lengths of the request. Which ones are is learned: the first time that requests are padded, the
            shortest one also runs alone. If its answer differs, the batch fails.
        cost
            Of a request, a number above 0: batches hold requests of like costs, and take as long as their number times the largest cost. None: the length.
        length_dim
            The dimension of a request's tensors that is padded. Others must be equal in a batch, and tensors without it.
        memory
            Bytes that a request of a batch needs while it runs, with `pad` the longest one. Batches are no larger than fits into the pool's ``memory=``.
        resident
            Bytes of a device's state that `initializer` makes. Where the memory is needed for others it is dropped, that first which is made anew in the least
            time for its bytes. It is made anew when it is needed.
        needs
            Which devices answer, as in `submit`. A function is asked again for a device that is added, for later requests.
        autocast
            ``torch.bfloat16`` or ``torch.float16``: answer under ``torch.autocast``.
        compile
            Compile each device's copy: True, or options of ``torch.compile``. What is compiled may be served, too. The first batches of each size compile
            alone, which counts for no device's speed. On GPUs without CUDA graphs of its own, which ``mode="reduce-overhead"`` has.
        graphs
            Of a module on GPUs: once a size of batches has run twice on a GPU the third one is captured as a CUDA graph, which later ones replay. Launching
            then costs next to nothing. Graphs are captured anew when parameters or buffers have other memory. A forward that cannot be captured
            runs as it is, and a warning says why. So do batches with `pad`.

        Raises
        ------
        InvalidArgument
            For a module in training mode or with a batch norm that keeps no statistics, for `graphs` on the host, and for arguments that cannot be used.
        """
        return batcher_of(
            self._jobs,
            model,
            name_of(model).rpartition(".")[2],
            initializer=initializer,
            replicate=replicate,
            compile=compile,
            graphs=graphs,
            resident=resident,
            max_batch=max_batch,
            max_delay=max_delay,
            idempotent=idempotent,
            cost=cost,
            pad=pad,
            length_dim=length_dim,
            memory=memory,
            needs=needs,
            autocast=autocast,
        )

    def add(self, device: str | Device, *, memory: float | None = None) -> None:
        """Let one more device join, with its worker and a copy of every served module. It takes work at once.

        Parameters
        ----------
        device
            Or its name.
        memory
            Bytes of its memory that jobs may use. None: no limit.

        Raises
        ------
        InvalidArgument
            If there is no such device, if the pool has it already, if what is served cannot be there, or for another `memory`.
        Unavailable
            If the pool is closed.
        """
        cap = None if memory is None else bytes_of("add", "memory", memory)
        self._jobs.add(find_device(device) if isinstance(device, str) else device, cap)

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
        """Text: what each device has run, why jobs wait, how many did not complete, and what tenants have had. Its figures are those of `report`."""
        return self._jobs.explain(self._jobs.devices_now())

    def report(self) -> dict[str, Any]:
        """The figures of `explain` and `prometheus`.

        Returns
        -------
        dict
            ``devices``: by name ``jobs`` that completed, their ``runs`` alone or in batches, ``busy_seconds`` of all runs, also of those
            that failed or have not ended, whether it takes no work, ``retired`` by you, released or lost, and whether `Autoscale` has ``released`` it. ``waiting`` and ``running``. ``backlog_seconds``: until what waits would be served, by measured
            times; jobs of priority ``"background"`` count as nothing there. Copies of requests for versions in the shadow, and what warms a version, count in ``busy_seconds``, ``waiting``, ``running`` and ``tenants`` only.
            ``desired_devices``: how many devices a mean wait of 0.1 s takes, or that of `Autoscale`, for what has come lately.
            ``placement``: its ``name``, the number of its ``failures``, and the ``last_failure``. ``tenants``: by name their ``weight``, the costs of what was ``served``, jobs ``waiting``, ``devices`` and bytes of ``memory`` in use; ``""``: jobs without a name; ``"paceline"``: such copies, and what warms.
            ``hangs``: the last runs that were given up, each with ``device``, ``kind``, ``jobs``, ``where`` and ``time``. ``outcomes``: how many jobs ended how. ``wait_counts``: how many jobs waited at most so many seconds, of which the last is infinity, which strict JSON does not know, and ``wait_seconds_sum``, for how many seconds all of them together. ``waits``: both by priority.
            ``versions``: by the name of a batcher that has several versions those of `Batcher.versions`.
        """
        return {
            "devices": self._jobs.devices_now(),
            "waiting": self.waiting,
            "running": self.running,
            "backlog_seconds": self._jobs.engine.backlog_seconds,
            "desired_devices": self._scale.desired(),
            "tenants": report_of(self._jobs.engine),
            **self._jobs.report(),
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
            For labels that the samples have already: ``device``, ``endpoint``, ``version``, ``outcome``, ``priority``, ``tenant``, ``le``.
        """
        return Collector(self.report, labels)

    def __repr__(self) -> str:
        state = "closed" if self._jobs.closed else f"{self.waiting} jobs wait, {self.running} run"
        return f"<paceline.torch.Pool [{', '.join(one.name for one in self.devices)}], {state}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)
