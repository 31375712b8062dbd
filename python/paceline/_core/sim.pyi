from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex, SupportsInt

_Int = SupportsInt | SupportsIndex
_Float = SupportsFloat | SupportsIndex

class Scenario:
    """A way in which training machines misbehave, with bounds for the balancer."""
    def __repr__(self) -> str: ...
    @property
    def about(self) -> str:
        """What happens, and where it was observed or published."""
    @property
    def most_moves_per_100_steps(self) -> float:
        """The bound on `ScenarioResult.moves_per_100_steps`."""
    @property
    def most_regret(self) -> float:
        """The bound on `ScenarioResult.regret`."""
    @property
    def most_steps_to_recover(self) -> int:
        """The bound on `ScenarioResult.steps_to_recover`; 0: no bound."""
    @property
    def name(self) -> str:
        """The name that results use."""
    @property
    def steps(self) -> int:
        """The number of simulated steps."""

class ScenarioResult:
    """The results of one scenario over its seeds."""
    def __repr__(self) -> str: ...
    @property
    def even_loss(self) -> float:
        """The loss of the even split."""
    @property
    def loss(self) -> float:
        """`SimulationResult.loss_to_ideal`, mean over the seeds."""
    @property
    def missed(self) -> list[str]:
        """The bounds that were missed, as sentences."""
    @property
    def moves_per_100_steps(self) -> float:
        """Changes of shares, mean over the seeds."""
    @property
    def name(self) -> str:
        """The name of the scenario."""
    @property
    def optimum_loss(self) -> float:
        """The smallest loss of a rule that cannot see the future."""
    @property
    def optimum_source(self) -> str:
        """The source of `optimum_loss`."""
    @property
    def regret(self) -> float:
        """The loss minus `optimum_loss`."""
    @property
    def steps_to_recover(self) -> int | None:
        """For the slowest event, the median over the seeds; None without events, or if it never recovered."""
    @property
    def worst_loss(self) -> float:
        """The largest loss of one seed."""

class Event:
    """A change of the simulated machine that the split should follow."""
    def __repr__(self) -> str: ...
    @property
    def device(self) -> int:
        """Index of the device."""
    @property
    def kind(self) -> str:
        """ "throttle", "release", "late start", "on time" or "failure"."""
    @property
    def step(self) -> int:
        """The first step with the change."""

class SimulationResult:
    """How a policy performed on a simulated machine."""
    def __repr__(self) -> str: ...
    @property
    def elapsed_seconds(self) -> float:
        """The time that passed on the virtual clock."""
    @property
    def events(self) -> list[Event]:
        """The events, in order of steps."""
    @property
    def explanation(self) -> str:
        """The text of `Balancer.explain()` after the last step."""
    @property
    def final_shares(self) -> list[int]:
        """Items per device in the last step."""
    @property
    def ideal_seconds(self) -> float:
        """The oracle's time for all steps."""
    @property
    def ledger(self) -> str:
        """The ledger as JSON lines; empty unless requested."""
    @property
    def loss_to_ideal(self) -> float:
        """Mean over steps of (noise-free makespan of the shares used / that of the oracle's shares) - 1."""
    @property
    def lost_steps(self) -> int:
        """Steps repeated because a device failed."""
    @property
    def moves(self) -> int:
        """Changes of shares."""
    @property
    def moves_per_100_steps(self) -> float:
        """Changes of shares, per 100 steps."""
    @property
    def steps_to_recover(self) -> list[int | None]:
        """Per event, steps until within 5 % of the new ideal; None if the next event came first."""
    @property
    def time_over_ideal(self) -> float:
        """The total time, noise and lost steps included, divided by the oracle's noise-free time."""

def batch_sizes(most: _Int) -> list[int]:
    """The sizes of a pool's batches of at most so many."""

def launch_rate(threads: _Int) -> float:
    """How many operators of forward and backward a second so many threads of one process start together, as measured on one host."""

def run_suite(names: Sequence[str] = [], *, seeds: _Int = 5) -> list[ScenarioResult]:
    """Run the balancer through scenarios and check each result against its bounds.

    Parameters
    ----------
    names
        The scenarios to run; an empty list means all.
    seeds
        Each scenario runs once for each seed from 1 to `seeds`.

    Returns
    -------
    list of ScenarioResult

    Raises
    ------
    InvalidArgument
        For an unknown scenario, or fewer than one seed.
    """

def scenarios() -> list[Scenario]:
    """All scenarios of the suite."""

def simulate(
    speeds: Sequence[_Float],
    *,
    batch_size: _Int = 512,
    steps: _Int = 400,
    policy: str = "auto",
    noise: _Float = 0.0,
    throttles: Sequence[tuple[_Int, _Float, _Int, _Int]] = [],
    failures: Sequence[tuple[_Int, _Int]] = [],
    spike_probability: _Float = 0.0,
    spike_factor: _Float = 1.0,
    seed: _Int = 0,
    fixed_seconds: _Float = 0.004,
    per_item_seconds: _Float = 0.0001,
    device_classes: Sequence[str] | None = None,
    ledger: bool = False,
    drifts: Sequence[tuple[_Int, _Float, _Float, _Int, _Int]] = [],
    pauses: Sequence[tuple[_Int, _Float, _Int, _Int]] = [],
    reduction_seconds: Sequence[_Float] = [],
    first_run_seconds: _Float = 0.0,
    lasting_noise: Sequence[tuple[_Float, _Float, bool]] = [],
    late_starts: Sequence[tuple[_Int, _Float, _Int, _Int]] = [],
) -> SimulationResult:
    """Run the balancer on simulated devices with a virtual clock.

    A device takes `(fixed_seconds + per_item_seconds * n) / speed` for n > 0 items, times throttles and noise. The balancer sees
    only the times. Deterministic: equal arguments give equal results, and policies meet the same noise.

    Parameters
    ----------
    speeds
        One speed per device.
    batch_size, steps
        Items per step; the number of steps that must succeed.
    policy
        "auto", "even" or "weighted" (by `speeds`).
    noise
        Times are multiplied by exp(noise * Z), Z standard normal.
    throttles
        (device, factor, from, to): the device takes `factor` times as long in steps [from, to).
    failures
        (device, step): the device stops in that step. The step is lost, and the other devices repeat it.
    spike_probability, spike_factor
        With this probability a device's step takes `spike_factor` times as long.
    seed
        The seed of the noise.
    fixed_seconds, per_item_seconds
        The cost on a device of speed 1.
    device_classes
        One class per device. Default: one class for all.
    ledger
        Keep a ledger of the balancer's calls, for `paceline.balance.replay`.
    drifts
        (device, first, last, from, to): the device takes `first` times as long up to step `from` and `last` times as long from step `to`
        on. In between, the factor changes gradually.
    pauses
        (device, seconds, first, every): the device pauses for `seconds` in step `first` and every `every` steps after it (0: once).
        No split can avoid pauses, so the ideal does not contain them.
    reduction_seconds
        At index k, the seconds that each step takes longer when k devices have work; k from 0. Default: none.
    first_run_seconds
        Added when a device runs a size for the first time. Such times do not count as evidence.
    lasting_noise
        (deviation, steps, common): additional noise on the logarithms of times. Its correlation over n steps is exp(-n / steps). If
        `common`, all devices have the same noise; otherwise each device has its own.
    late_starts
        (device, seconds, from, to): the device begins steps [from, to) `seconds` later than the others.

    Returns
    -------
    SimulationResult

    Raises
    ------
    InvalidArgument
        For invalid arguments. The message names the device or event.
    """

def simulate_data_path(
    *,
    gpus: _Int,
    parameters: _Float,
    bytes_each: _Float = 2.0,
    forward_seconds: _Float,
    backward_seconds: _Float,
    update_seconds: _Float = 0.0,
    link: str = "nvlink4",
    bandwidth: _Float | None = None,
    latency_seconds: _Float | None = None,
    bucket_bytes: _Float = 26214400.0,
    operators: _Float = 0.0,
) -> dict[str, Any]:
    """A data parallel step on equal GPUs, on a virtual clock: what gradients and parameters cost beyond the computing.

    Deterministic. A model with assumed links (`paceline/sim/data_path.hpp`), not a measurement.

    Parameters
    ----------
    gpus
        Their number, 2 to 64.
    parameters, bytes_each
        The number of parameters, and the bytes of each and of its gradient.
    forward_seconds, backward_seconds
        Of a step on each GPU. They come to the buckets at an even pace.
    update_seconds
        The optimizer over all parameters, on one GPU.
    link
        ``"nvlink4"``, ``"nvlink5"``, ``"pcie4"``, ``"pcie5"``, or ``"host"``: PCIe 4 without peer access.
    bandwidth, latency_seconds
        Bytes per second of a pair and of a port, in one direction, and the start of a copy. Default: those of `link`.
    bucket_bytes
        The size of a bucket.
    operators
        How many a step starts on each GPU. A step takes at least as long as that: a thread of one process for each GPU, and a process for each GPU
        with ``ring``. 0: starting them takes no time, as with CUDA graphs.

    Returns
    -------
    dict
        For each way, ``serial``, ``buckets``, ``ranges``, ``sharded`` and ``ring``, a dict with `step_seconds`, and `exposed_seconds`: what a step
        takes beyond forward, backward and update.

    Raises
    ------
    InvalidArgument
        For invalid arguments.
    """

def simulate_day(
    speeds: Sequence[_Float],
    *,
    wait_seconds: _Float = 0.1,
    activation_seconds: _Float = 5.0,
    job_seconds: _Float = 0.05,
    variation: _Float = 0.3,
    hours: _Float = 24.0,
    low: _Float = 0.1,
    high: _Float = 0.6,
    bursts: _Int = 24,
    burst: _Float = 0.3,
    burst_seconds: _Float = 240.0,
    ramp_seconds: _Float = 60.0,
    seed: _Int = 1,
    deadline_seconds: _Float | None = None,
) -> dict[str, Any]:
    """A pool whose devices come and go over a day of requests, on a virtual clock, with the decisions of ``Pool(autoscale=...)``.

    Deterministic. Requests come at random: few by night, many by day, and more in bursts.

    Parameters
    ----------
    speeds
        One positive number for each device.
    wait_seconds
        The mean wait that is aimed at.
    activation_seconds
        From when a device is wanted until it takes work, such as the load of its weights.
    job_seconds, variation
        The mean of a request at speed 1, and its coefficient of variation (log-normal).
    hours
        The length of the day.
    low, high
        Arriving work by night and by day, over what all devices do.
    bursts, burst, burst_seconds, ramp_seconds
        How many bursts there are, at random times; what each adds, over what all devices do; how long it lasts; in what time it comes, and goes.
    seed
        Of all random numbers.
    deadline_seconds
        The mean deadline; each request's is between half of it and one and a half. None: no deadlines.

    Returns
    -------
    dict
        `minutes`, and in how many of them the target was `met` by the mean wait of the requests that came then and started; `all_met`, in how many it is with all devices active all day; `device_hours`, from when a device was
        wanted until it was not; `best_device_hours` of a plan in hindsight, and `all_device_hours` of all devices all day; `mean_wait_seconds`; how many
        `activations` there were. The parts of all requests that ended `in_time`, `late`, `rejected` and `expired`, and `all_in_time` with all devices active all day.

    Raises
    ------
    InvalidArgument
        For invalid arguments.

    Notes
    -----
    Devices that deadlines need are wanted at once. For other requests the pool looks once a second: not at once when what waits begins to take longer than the target, as `Pool` does.

    The plan in hindsight knows each request and what it takes, chooses devices anew each minute, begins each without a queue, pays for activations
    before the minute, keeps its devices within the minute, and is the best sequence by dynamic programming. It knows no deadlines: it serves all requests.
    """

def simulate_pipeline(
    speeds: Sequence[_Float],
    *,
    blocks: _Int = 24,
    batch_size: _Int = 512,
    micro_batches: _Int | None = None,
    steps: _Int = 0,
    fixed_seconds: _Float = 0.004,
    per_item_seconds: _Float = 0.0001,
    memory_bytes: Sequence[_Int] | None = None,
    parameter_bytes: _Int = 0,
    saved_bytes_per_item: _Int = 0,
    boundary_bytes_per_item: _Int = 0,
    link_bytes_per_second: _Float = 0.0,
    first_run_seconds: _Float = 0.0,
    noise: _Float = 0.0,
    throttles: Sequence[tuple[_Int, _Float, _Int, _Int]] = [],
    seed: _Int = 0,
) -> dict[str, Any]:
    """Plan a pipeline for simulated devices, and run it with its balancer on a virtual clock.

    Deterministic: equal arguments give equal results.

    Parameters
    ----------
    speeds
        One speed per device.
    blocks
        The number of equal blocks between which the model may be cut.
    batch_size
        Items per step.
    micro_batches
        Their number. Default: planned.
    steps
        The number of simulated steps. 0: only plan.
    fixed_seconds, per_item_seconds
        What a micro-batch takes in the whole model on a device of speed 1: fixed + per item. A third of it is forward.
    memory_bytes
        One limit per device. Default: none.
    parameter_bytes
        Of the whole model: parameters, gradients and optimizer state.
    saved_bytes_per_item
        What the whole model keeps of an item from forward to backward.
    boundary_bytes_per_item, link_bytes_per_second
        What is sent of an item from a stage to the next, and how fast. 0 bytes per second: all devices share one memory, so that
        sends and moves of blocks take no time.
    first_run_seconds
        What the first step after a move of blocks between memories takes longer.
    noise
        The relative standard deviation of the time of an action.
    throttles
        (device, factor, from, to): the device takes `factor` times as long in steps [from, to).
    seed
        The seed of the noise.

    Returns
    -------
    dict
        `planned`, and `one_f_one_b` and `gpipe` on the even cut: each a dict with `seconds` of a step, `ideal_seconds`,
        `bound_seconds`, `bubble` (a fraction of the step), `sizes` of micro-batches, `schedule`, `stages`, and `does_not_fit`: None, or
        a str that says which stage of the even cut needs more memory than it has; the figures are then those with enough memory. The
        even cut is None if there are fewer blocks than devices. A stage has `device`, `first_block`, `in_flight`, `bytes` and `actions`:
        (kind, micro-batch, start, finish) in seconds. `run` is None, or a dict of the simulated steps: `elapsed_seconds`; `unmoved_seconds` with the
        first plan throughout; `oracle_seconds` with the best plan at each step; `step_seconds`, `moves` and `explanation`.

    Raises
    ------
    InvalidArgument
        For invalid arguments. The message names the device or throttle.
    OutOfMemory
        If no plan fits.
    """

def simulate_pool(
    speeds: Sequence[_Float],
    *,
    placement: str | Callable[..., Any] = "auto",
    believed: Sequence[_Float] | None = None,
    decline: _Float = 0.5,
    fixed_seconds: _Float = 0.0,
    per_item_seconds: _Float = 0.01,
    sizes: Sequence[_Int] = [1],
    max_delay_seconds: _Float = 0.0,
    length_variation: _Float = 0.0,
    load: _Float = 0.7,
    burst: _Float = 1.0,
    variation: _Float = 0.3,
    exponential: bool = False,
    deadline_seconds: _Float | None = None,
    requests: _Int = 20000,
    seed: _Int = 1,
    tenants: Sequence[tuple[_Float, _Float]] = [],
    gangs: tuple[_Float, _Int] | None = None,
    stages: _Int = 1,
) -> dict[str, Any]:
    """Requests on a pool of unequal devices, on a virtual clock, with the decisions of the library's own pool.

    Deterministic: the n-th request arrives at the same time whatever the placement, and without batches it is the same work.

    Parameters
    ----------
    speeds
        One positive number for each device. n requests at once take (fixed_seconds + per_item_seconds * n) / speed in the mean.
    placement
        ``"auto"``, ``"any"``, ``"round_robin"``, ``"least_outstanding"``, ``"weighted"`` or ``"earliest_finish"``. Or a function, as ``Pool`` has it:
        of a `paceline.plan.PoolQuestion`, which answers the name of a device or None. Devices are ``"sim:0"`` and so on. It is asked after each event.
    believed
        What the pool takes the speeds to be. Default: the truth.
    decline
        With ``"auto"``: how many times the gain of faster devices the waiting requests must outnumber, before a slower device takes one.
    fixed_seconds, per_item_seconds
        Of a batch at speed 1.
    sizes
        The sizes of batches that may run, ascending from 1. ``[1]``: no batches.
    max_delay_seconds
        How long a batch may wait to become larger.
    length_variation
        The coefficient of variation of the requests' lengths, log-normal with mean 1. The pool is told them, and a batch takes as long as one of
        its number times its longest. 0: all equal.
    load
        Arriving work over what all devices can do in full batches without padding. A gang counts as one job alone on each of its devices.
    burst
        The mean number of requests that arrive at once. 1: each by itself (Poisson).
    variation, exponential
        The coefficient of variation of a batch's time, log-normal, or normal with batches; or exponential times.
    deadline_seconds
        The mean deadline; each request's is between half of it and one and a half. None: no deadlines.
    requests, seed
        Their number, and the seed of arrivals and times.
    tenants
        A weight and a share of the requests for each tenant, as (weight, share). Empty: nobody has a name. A request costs its tenant 1, or its length; a
        gang costs that for each device.
    gangs
        A part of the jobs and a number of devices, as (part, devices): so many jobs are gangs of so many devices. A gang takes as long as on its slowest device.
    stages
        The jobs of a request, each with ``after=`` the one before. All are submitted when the request arrives, and each has its deadline. If one is rejected,
        those before it are cancelled. Each job has a batch's time of its own, and they have the request's length.

    Returns
    -------
    dict
        `p50_seconds`, `p99_seconds` and `mean_seconds` from submit to result, without the first tenth of the requests; `mean_batch`; the parts of all
        requests that ended `in_time`, `late`, `rejected` and `expired`; `elapsed_seconds`; and for each device the part of the time in which it
        is `busy`, and its number of `batches`. ``tenants``: for each one `mean_wait_seconds`, `p50_wait_seconds` and `p99_wait_seconds` from submit to start,
        without the first tenth of the requests; its part of the cost that was `served`, and `served_while_all_wait`, of what started while requests of every
        tenant waited; and its `largest_charge`, of one request. `unfairness`: how far two tenants who both wait get apart at most, ``|W1 / w1 - W2 / w2|`` with W
        the cost of what each was served meanwhile, over the bound l1 / w1 + l2 / w2 with l the largest charges: at most 1. None where the bound says nothing:
        with deadlines, with lengths, since batches are of like ones, with gangs, which wait while others start, with a placement that binds requests to devices when they come, or where no two tenants waited. ``gangs``: `waits` and `other_waits`, of gangs and of jobs
        on one device, from when a job could run to its start; the part of all devices' time in which they are `idle` while a gang waits, and in which they are
        `reserved`: a device leaves another job waiting that would hold up the gang; and the part of the jobs on one device that were `backfilled`, started while
        a gang waited that is before them. None without gangs. With several stages a request has one outcome, and is in time if its last job is.

    Raises
    ------
    InvalidArgument
        For invalid arguments, and for a function that leaves requests waiting for ever, or answers what is no device. What it raises is raised.

    Notes
    -----
    Tenants take turns by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), whose bound that is. Requests are independent. Launching, the GIL and transfers take no time. The pool knows the mean of each time, not the time itself.
    """
