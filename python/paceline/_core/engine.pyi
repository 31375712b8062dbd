from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex, SupportsInt, overload

import paceline._core.balance
import paceline._core.plan
import paceline._core.runtime

_Int = SupportsInt | SupportsIndex
_Float = SupportsFloat | SupportsIndex

class StepOutcome:
    """How one step ended."""
    def take_cause(self) -> Any:
        """What the failed call of body or finish itself raised, or None if it returned. The second call returns None."""
    @property
    def claims(self) -> list[tuple[int, int, int, float, float, bool, bool]]:
        """What ran: (device index, begin, end, start seconds, finish seconds, excluded, correction) each."""
    @property
    def divided(self) -> bool:
        """Whether a device ran several, not counting those that memory asked for."""
    @property
    def failed(self) -> bool:
        """Whether a worker, or the reduction, raised."""
    @property
    def failed_device(self) -> int | None:
        """The index of the device that failed, or None if no single one is to blame."""
    @property
    def items(self) -> list[int]:
        """Items that each device ran."""
    @property
    def micro_batches(self) -> int:
        """How many micro-batches ran."""
    @property
    def move(self) -> str | None:
        """Why the shares differ from those of the step before, in a sentence; None if they do not."""
    @property
    def reduce_seconds(self) -> float:
        """From the end of the last micro-batch to the end of the reduction; 0 (not timed) with GPUs."""
    @property
    def settled(self) -> bool:
        """Whether the devices have done all that the step enqueued."""
    @property
    def started(self) -> float:
        """When the step was handed to the workers, in seconds of time.perf_counter. Its own clock starts here."""

class DeviceQueues:
    """The queues of a group's devices during steps, and the waits between them."""
    def __init__(
        self,
        group: paceline._core.runtime.DeviceGroup,
        *,
        stream: _Int | None = None,
        run_ahead: _Int = 1,
        timeout: _Float = 600.0,
        transport: str = "auto",
        reduce_dtype: str | None = None,
    ) -> None: ...
    def begin_update(self, devices: Sequence[_Int], copies: Sequence[tuple[_Int, _Int, _Int, _Int]]) -> None:
        """Let the devices wait for the caller's work so far and pull (device, to, from, bytes) from home's memory."""
    def drain(self) -> None:
        """Return when all enqueued work is done."""
    def end_update(self, devices: Sequence[_Int], copies: Sequence[tuple[_Int, _Int, _Int, _Int]]) -> None:
        """Let the home stream wait for the devices and pull (device, to, from, bytes) into home's memory."""
    def need(self, device: _Int, bucket: _Int) -> None:
        """Let the device's queue wait for this bucket of the parameters."""
    def release_memory(self) -> None:
        """Give back what the pools of the GPUs hold without use."""
    def restart_run(self, device: _Int) -> None:
        """Restart the timing of the current run: the device has only waited so far."""
    def seal(self, device: _Int, k: _Int, address: _Int, count: _Int, dtype: _Int, written: _Int = 0) -> None:
        """The device's k-th bucket is final: its sum may begin after this event, 0: after the stream's work so far."""
    def set_copies(
        self,
        parameters: Sequence[tuple[_Int, _Int, _Int, _Int, _Int]],
        buffers: Sequence[tuple[_Int, _Int, _Int, _Int, _Int]] = [],
    ) -> None:
        """Set the copies to other memory spaces at the start of each step: (space, to, from, bytes, bucket), by bucket; buffers all with the first one. Parameters may be relayed from space to space. With several buckets the body has to call need()."""
    def set_stream(self, stream: _Int | None) -> None:
        """From now on, order steps on this stream of the caller."""
    @property
    def home_space(self) -> int: ...
    @property
    def home_stream(self) -> int | None: ...
    @property
    def links(self) -> list[Any]:
        """The links between GPUs, as `measure_links` returns them. Empty if not measured."""
    @property
    def pool_peaks(self) -> list[int | None]:
        """Per device, the most bytes that its GPU's pool has given out at once; None on the host."""
    @property
    def sources(self) -> list[int | None]:
        """Per device, the stream of the home GPU that reads for it; None for devices of the home GPU."""
    @property
    def spaces(self) -> list[int]:
        """Per device, the number of its memory space."""
    @property
    def streams(self) -> list[int | None]:
        """Per device, the stream that it computes on; None on the host."""
    @property
    def transport(self) -> str:
        """How data gets from one GPU to another, with the reason; empty with one GPU."""

class LaneThreads:
    """Threads that carry micro-batches through a pipeline."""
    def __init__(self) -> None: ...
    def close(self) -> None:
        """End the threads."""
    @property
    def size(self) -> int:
        """How many threads there are."""

class Lanes:
    """The lanes of one step: body(lane, micro_batch) -> int carries a micro-batch; negative: failed."""
    def __init__(self, threads: LaneThreads, schedule: str, body: Any) -> None: ...
    def advance(self, micro_batch: _Int) -> tuple[int, str, int] | None:
        """Give the turn back, and wait for that of the next action: (stage, 'F' or 'B', micro-batch). None: give up."""
    def cancel(self) -> None:
        """End the step that runs once every lane has left its action. Any thread."""
    def current(self, micro_batch: _Int) -> tuple[int, str, int] | None:
        """The action whose turn the micro-batch has."""
    @property
    def count(self) -> int:
        """How many lanes."""

class PipelineOutcome:
    """How one step of a pipeline ended."""
    def take_cause(self) -> Any:
        """What the failed call of the body itself raised, or None if it returned. The second call returns None."""
    @property
    def failed(self) -> bool:
        """Whether an action failed."""
    @property
    def failed_action(self) -> tuple[int, str, int] | None:
        """The action that failed first: (stage, 'F' or 'B', micro-batch), or None."""
    @property
    def record(self) -> list[list[tuple[str, int, float, float]]]:
        """Per stage what ran, in order: ('F' or 'B', micro-batch, start seconds, finish seconds) each."""
    @property
    def started(self) -> float:
        """When the workers got the step, in seconds of time.perf_counter()."""

class Job:
    """A job of a pool."""

class Pool:
    """Runs jobs on the devices of a group, as the pool decides."""
    @staticmethod
    def cancel(job: Job) -> bool:
        """Cancel a job that waits. False: it runs, or has ended."""
    @staticmethod
    def check_may_wait(job: Job) -> None:
        """Raise on a worker, and in a process that was forked from that of the pool."""
    def __init__(
        self,
        group: paceline._core.runtime.DeviceGroup,
        placement: str | Callable[..., Any] = "auto",
        budget: _Float = 0.1,
        memory: Mapping[str, _Float] = {},
    ) -> None: ...
    def add(self, device: paceline._core.runtime.Device, memory: _Float | None = None) -> None:
        """One more device, which takes work at once."""
    def add_batches(
        self,
        kind: str,
        *,
        max_batch: _Int,
        max_delay: _Float,
        padded: bool,
        memory: _Float,
        model: str,
        resident: _Float,
    ) -> None:
        """Let jobs of this kind run in batches: run_batch(devices, evicted, jobs) of the first one, which returns a code, the seconds that do not count, and those of loading the model or None."""
    def add_tenant(
        self, name: str, *, weight: _Float = 1.0, devices: _Int | None = None, memory: _Float | None = None
    ) -> None: ...
    def close(self, cancel: bool) -> None:
        """Wait until every job has ended."""
    def explain(self, counts: Mapping[str, tuple[_Int, _Int, _Float]] = {}) -> str:
        """Text. `counts`: by device jobs, runs and busy seconds."""
    def forget(self, kind: str) -> bool:
        """Let go of what is kept for a kind. False: some of it waits or runs, and is kept."""
    def give_up(self, run: _Int, message: str, device: str) -> bool:
        """End the jobs of a run that goes on, and replace its worker. False: it has ended."""
    def on_wants_devices(self, call: Any, wait_seconds: _Float) -> None:
        """Call this, on any thread, when deadlines need more released devices, or active ones begin to take longer."""
    def release(self) -> None:
        """Once closed: end the streams."""
    def restore(self, device: str) -> None: ...
    def retire(
        self, device: str, unless_last: bool = False, released: bool = False, activation_seconds: _Float = 0.0
    ) -> bool:
        """Returns whether it did: not with `unless_last` if no other device is active. `released`: only an active one; as many jobs may wait as before, and deadlines count on the device to come back in so many seconds."""
    def runs_over(self, seconds: _Float) -> list[Any]:
        """Of runs that have taken longer: number, device, kind, jobs."""
    def scale_tick(self, least_seconds: _Float, keep_seconds: _Float) -> Any:
        """Since the call before: seconds, work and jobs that came, work that waits, the runs of what came (how many, their work, the sum of its squares), seconds in which batches fill, whether all that waits is known, the speed of each device, which are lost, and sets of devices of which so many have to be active. None: it was less than `least_seconds` ago. Needs of the last `keep_seconds` count."""
    def stream(self, device: str) -> int | None:
        """CUDA's handle of a GPU's stream; None on the host."""
    def submit(
        self,
        job: Any,
        kind: str,
        priority: _Int,
        deadline: _Float,
        not_before: _Float,
        gang: _Int,
        after: Sequence[Job],
        needs: Sequence[str],
        devices: Sequence[str],
        cost: _Float,
        memory: _Float,
        tenant: str,
        charge: _Float,
        own: bool,
        wait: bool,
        batched: bool,
    ) -> Job:
        """Submit an object with run(devices, evicted) -> int and end(device, seconds, outcome, message)."""
    def tenants(self) -> list[Any]:
        """Of each: name, weight, served, waiting, devices and bytes in use. The first one has no name."""
    def unload(self, device: str, model: str) -> bool:
        """A device no longer keeps a model. False: it is not there, or a batch of it runs there."""
    def write_ledger(self, path: str) -> None:
        """Write every event and decision to this file from now on."""
    @property
    def active(self) -> list[str]:
        """The names of the devices that start jobs: neither retired nor lost."""
    @property
    def backlog_seconds(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...

class StagePlanner:
    """Says what a pipeline's next step runs. The first steps measure the blocks."""
    def __init__(
        self,
        blocks: Sequence[paceline._core.plan.BlockCost],
        devices: Sequence[paceline._core.plan.StageDevice],
        *,
        micro_batches: _Int | None = None,
        cuts: Sequence[_Int] = [],
        schedule: str = "auto",
        measure: bool = True,
    ) -> None: ...
    def explain(self) -> str:
        """Which stage sets the pace, bubble, bytes, what would help."""
    def know(self, blocks: Sequence[paceline._core.plan.BlockCost], speeds: Sequence[_Float]) -> None:
        """Plan all steps from now on with these costs and speeds."""
    def layouts(
        self,
        batch_size: _Int,
        *,
        micro_batches: _Int | None = None,
        overlap: _Float = 0.0,
        weight_bytes: Sequence[_Int] | None = None,
        gradient_bytes: Sequence[_Int] | None = None,
    ) -> list[Any]:
        """Rank all ways of laying out the model, by what is known of its blocks and devices.

        Parameters
        ----------
        batch_size
            Items of a step.
        micro_batches
            Of a step in pipelines. Default: planned.
        overlap
            The part of a reduction of gradients that is hidden behind computing, from 0 to 1.
        weight_bytes, gradient_bytes
            Per block, the parts of its parameter bytes that are not the optimizer's state. Default: a quarter each, as with Adam.

        Returns
        -------
        list of dict
            Those that fit first, the best first. `kind` is "data parallel", "pipeline" or "replicas of pipelines". `seconds` of a step,
            `reduction_seconds` of it that nothing hides, and `bubble`, the idle part of the computing time. `bytes` and `items` per
            device, `pipelines` with one plan each, and `reason`, a sentence with the numbers that decide.

        Raises
        ------
        InvalidArgument
            For invalid arguments. What does not fit is no error.
        """
    def measure_again(self) -> None:
        """Nothing that was measured of blocks holds any more."""
    def out_of_memory(self, stage: _Int) -> bool:
        """After a stage ran out of memory: whether there is another plan."""
    def out_of_memory_predicting(self, items: _Int) -> bool:
        """The same of a prediction with this largest micro-batch."""
    def plan(self, batch_size: _Int) -> paceline._core.plan.StagePlan:
        """What the next step runs."""
    def predict(self, items: _Int, least_items: _Int) -> paceline._core.plan.StagePlan:
        """What a prediction runs."""
    def record(self, stages: Sequence[Sequence[tuple[str, _Int, _Float, _Float]]], excluded: bool) -> None:
        """What ran of the last plan, as PipelineOutcome.record. excluded: it says nothing about the devices."""
    def record_samples(
        self,
        samples: Sequence[tuple[_Int, _Int, bool, _Int, _Float]],
        bytes: Sequence[tuple[_Int, _Int, _Int, _Int]],
        classes: Sequence[_Int],
    ) -> None:
        """A step that measured: (block, device, whether backward, items, seconds) each; set_bytes; and a number for each block, equal for those of one class."""
    def restore(self, device: _Int) -> None:
        """It may get one again."""
    def retire(self, device: _Int) -> None:
        """The device gets no stage from the next plan on."""
    def set_bytes(self, bytes: Sequence[tuple[_Int, _Int, _Int, _Int]]) -> None:
        """What blocks take of memory: of parameters, and per item what is saved, what comes in, and what they need while they run."""
    def set_least_items(self, items: _Int) -> None:
        """From the next plan on, every micro-batch has at least so many items, unless the batch has fewer."""
    def set_link(self, latency_seconds: _Float, bytes_per_second: _Float) -> None:
        """For what is planned after blocks were measured."""
    @property
    def known(self) -> tuple[list[paceline._core.plan.BlockCost], list[float]]:
        """What was measured at first: the costs of blocks on a device of speed 1, and the speeds."""
    @property
    def measures(self) -> bool:
        """Whether the next step measures blocks."""
    @property
    def moves(self) -> int:
        """Changes of cuts or devices so far."""
    @property
    def recent_moves(self) -> list[Any]:
        """The last 16 changes, oldest first."""
    @property
    def recorded(self) -> int:
        """How many steps that measure are known."""
    @property
    def speeds(self) -> list[float]:
        """Of each device, as measured by now."""

class StageLog:
    """Figures, events and history of a pipeline's steps."""
    def __init__(self, group: paceline._core.runtime.DeviceGroup) -> None: ...
    def add(
        self,
        stages: Sequence[tuple[_Int, _Int, _Int]],
        bounds: Sequence[tuple[_Int, _Int]],
        actions: Sequence[Sequence[tuple[str, _Int, _Float, _Float]]],
        started: _Float,
        moved: bool,
    ) -> None:
        """A step that was committed. stages: (device, blocks, items) each; bounds: (begin, end) of each micro-batch; actions: as PipelineOutcome.record, in seconds since `started` by time.perf_counter()."""
    @property
    def events(self) -> list[Any]:
        """The last events, oldest first."""
    @property
    def history(self) -> list[Any]:
        """The whole run, oldest first, in at most 1024 rows of equally many steps."""
    @property
    def metrics(self) -> dict[str, Any]:
        """One snapshot, as StepLoop.metrics."""

class BatchPlan:
    """Who runs which items of a batch. Order, bounds, first and work are empty where items have no costs."""
    @property
    def bounds(self) -> list[int]:
        """Micro-batch k is the positions bounds[k] to bounds[k + 1] - 1."""
    @property
    def first(self) -> list[int]:
        """Device d runs micro-batches first[d] to first[d + 1] - 1."""
    @property
    def order(self) -> list[int]:
        """The items, by position: each device's together, by descending cost."""
    @property
    def shares(self) -> list[int]:
        """Items of each device."""
    @property
    def targets(self) -> list[int]:
        """What the balancer wants each device to have, of the items, or of the work where items have costs."""
    @property
    def work(self) -> list[float]:
        """Of each device, in the balancer's units."""

class StepLoop:
    """One balanced step after another on one group: plan, run, commit."""
    def __init__(
        self,
        group: paceline._core.runtime.DeviceGroup,
        *,
        balance: str = "auto",
        weights: Sequence[_Float] = [],
        micro_batch: _Int = 0,
        granularity: _Int = 1,
        corrections: bool | None = None,
        memory_limits: Sequence[_Int] = [],
        search_sizes: bool = False,
    ) -> None: ...
    def cancel(self) -> None:
        """End the step that runs, if any, once every worker has left its micro-batch."""
    def commit(self, outcome: StepOutcome) -> None:
        """Tell the balancer and the metrics about a step that succeeded."""
    def explain(self) -> str: ...
    def hint(self, speeds: Sequence[tuple[_Float, _Float] | None], by_cost: bool = False) -> None:
        """Begin with shares that fit these speeds, until something is measured. As `speeds` returns them."""
    @overload
    def plan(self, batch_size: _Int, memory: _Int = 0, speed: _Int = 0, any_size: bool = True) -> BatchPlan:
        """Plan a batch of so many items. memory, speed: numbers of its kind. any_size: whether it may run in micro-batches of sizes that are searched."""
    @overload
    def plan(self, costs: Sequence[_Float]) -> BatchPlan:
        """Plan a batch with one cost per item."""
    def restore(self, device: _Int) -> None:
        """It gets work again."""
    def retire(self, device: _Int) -> None:
        """The device with this index gets no work from the next step on, and no step waits for it."""
    def run(
        self,
        plan: BatchPlan,
        body: Any,
        finish: Any,
        queues: DeviceQueues | None = None,
        outputs: Any = None,
        claims: Sequence[Sequence[tuple[_Int, _Int]]] | None = None,
        pieces: Sequence[Sequence[tuple[_Int, _Int]]] | None = None,
    ) -> StepOutcome:
        """Run the last plan: body(device, begin, end, flags) -> int per micro-batch, finish(device) -> gradients. With costs begin and end are positions in the plan's order. claims: for each device, (begin, end) of the micro-batches to run instead of the planned ones. pieces: for each device, (begin, end) of the pieces that its claims run in. See python_program.hpp."""
    def set_corrections(self, corrections: bool | None) -> None:
        """From the next plan on. None: on host devices."""
    def set_least_items(self, items: _Int) -> None:
        """Of a micro-batch from the next plan on, unless the batch has fewer."""
    def set_longest(self, seconds: _Float) -> None:
        """Of a micro-batch whose size is free, from the next step on. 0: any."""
    def settle(self) -> None:
        """Return when the times of all committed steps are known."""
    def shrink(self, outcome: StepOutcome, limited: bool) -> bool:
        """After a step whose body ran out of memory: at most half of that runs at once from now on, on all devices of the memory, or where its own limit was reached on this device. False if there is nothing smaller."""
    def speeds(self, by_cost: bool = False) -> list[tuple[float, float] | None]:
        """Per device, the measured (fixed seconds, seconds per item), by_cost per unit of work; None: not measured."""
    def what_if(
        self,
        *,
        speeds: Mapping[str, _Float] | None = None,
        add: Sequence[tuple[str, _Float]] | None = None,
        remove: Sequence[str] | None = None,
        batch_size: _Int | None = None,
        alone: _Float | None = None,
        overhead_seconds: _Float = 0.0,
    ) -> paceline._core.balance.WhatIfAnswer:
        """See `paceline.balance.Balancer.what_if`. alone: what a device's time is multiplied by when it works alone, if that was measured; overhead_seconds: of a step, outside of the devices' work."""
    def write_ledger(self, path: str) -> None:
        """Write every call of the balancer to a file of JSON lines, from before the first step on."""
    @property
    def committed(self) -> int:
        """How many steps `history` has, or will have once all times are known."""
    @property
    def events(self) -> list[Any]:
        """The last events, oldest first."""
    @property
    def history(self) -> list[Any]:
        """The whole run, oldest first, in at most 1024 rows of equally many steps."""
    @property
    def items(self) -> Any:
        """What items cost and what padding was saved; None before the first plan with costs."""
    @property
    def memory(self) -> dict[str, Any]:
        """By device with a limit: the limit, and what is known of memory."""
    @property
    def metrics(self) -> dict[str, Any]:
        """One snapshot: per device share, items, busy and idle seconds, rate; totals; the last moves."""

class ModuleContents:
    """What modules hold in the dictionaries of these names. It keeps nothing alive."""
    def __init__(self, names: Sequence[str], *, objects: bool) -> None: ...
    def note(self, modules: list[Any]) -> None:
        """Remember the present contents."""
    def same(self, modules: list[Any]) -> bool:
        """Whether dictionaries, keys and, with objects, the objects are those that were noted."""

class TensorMemory:
    """What a step asks of hundreds of small tensors of one type."""
    def __init__(self, type: type) -> None: ...
    def apart(self, parameters: list[Any]) -> bool:
        """Whether each parameter has a gradient, and these are dense and share no memory."""
    def copy(self, entries: list[Any]) -> tuple[Any, ...]:
        """Copy buffers, each given by (dictionary, other dictionary, name in both). Returns what was written and the entries that are left to PyTorch: what does not lie alike in plain memory of the host, or is large."""
    def without_gradients(self, parameters: list[Any]) -> bool:
        """Whether no parameter has a gradient."""

class Nothing:
    """A context manager that does nothing."""
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

def collect_garbage_if_due() -> None:
    """On a worker between two pieces of work: what Python's collector, which waits meanwhile, would have collected."""

def forward_only(arg0: _Int, arg1: _Int) -> str: ...
def in_flight(arg0: str, arg1: _Int) -> int: ...
def pipeline_actions(plan: paceline._core.plan.StagePlan) -> list[list[tuple[str, int, float, float]]]:
    """When the actions of a plan would run, as PipelineOutcome.record."""

def run_pipeline(
    group: paceline._core.runtime.DeviceGroup, lanes: Lanes, schedule: str, devices: Sequence[_Int]
) -> PipelineOutcome:
    """Run one step: the schedule as text (plan.to_text), with the device index of each stage."""
