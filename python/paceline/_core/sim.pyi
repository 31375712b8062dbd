from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = ["Event", "Scenario", "ScenarioResult", "SimulationResult", "run_suite", "scenarios", "simulate"]

class Scenario:
    """
    A way in which training machines misbehave, with bounds for the balancer.
    """
    def __repr__(self) -> str: ...
    @property
    def about(self) -> str:
        """
        What happens, and where it was observed or published.
        """
    @property
    def most_moves_per_100_steps(self) -> float:
        """
        The bound on `ScenarioResult.moves_per_100_steps`.
        """
    @property
    def most_regret(self) -> float:
        """
        The bound on `ScenarioResult.regret`.
        """
    @property
    def most_steps_to_recover(self) -> int:
        """
        The bound on `ScenarioResult.steps_to_recover`; 0: no bound.
        """
    @property
    def name(self) -> str:
        """
        The name that results use.
        """
    @property
    def steps(self) -> int:
        """
        The number of simulated steps.
        """

class ScenarioResult:
    """
    The results of one scenario over its seeds.
    """
    def __repr__(self) -> str: ...
    @property
    def even_loss(self) -> float:
        """
        The loss of the even split.
        """
    @property
    def loss(self) -> float:
        """
        `SimulationResult.loss_to_ideal`, mean over the seeds.
        """
    @property
    def missed(self) -> list[str]:
        """
        The bounds that were missed, as sentences.
        """
    @property
    def moves_per_100_steps(self) -> float:
        """
        Changes of shares, mean over the seeds.
        """
    @property
    def name(self) -> str:
        """
        The name of the scenario.
        """
    @property
    def optimum_loss(self) -> float:
        """
        The smallest loss of a rule that cannot see the future.
        """
    @property
    def optimum_source(self) -> str:
        """
        The source of `optimum_loss`.
        """
    @property
    def regret(self) -> float:
        """
        The loss minus `optimum_loss`.
        """
    @property
    def steps_to_recover(self) -> int | None:
        """
        For the slowest event, the median over the seeds; None without events, or if it never recovered.
        """
    @property
    def worst_loss(self) -> float:
        """
        The largest loss of one seed.
        """

class Event:
    """
    A change of the simulated machine that the split should follow.
    """
    def __repr__(self) -> str: ...
    @property
    def device(self) -> int:
        """
        Index of the device.
        """
    @property
    def kind(self) -> str:
        """
        "throttle", "release", "late start", "on time" or "failure".
        """
    @property
    def step(self) -> int:
        """
        The first step with the change.
        """

class SimulationResult:
    """
    How a policy performed on a simulated machine.
    """
    def __repr__(self) -> str: ...
    @property
    def elapsed_seconds(self) -> float:
        """
        The time that passed on the virtual clock.
        """
    @property
    def events(self) -> list[Event]:
        """
        The events, in order of steps.
        """
    @property
    def explanation(self) -> str:
        """
        The text of `Balancer.explain()` after the last step.
        """
    @property
    def final_shares(self) -> list[int]:
        """
        Items per device in the last step.
        """
    @property
    def ideal_seconds(self) -> float:
        """
        The oracle's time for all steps.
        """
    @property
    def ledger(self) -> str:
        """
        The ledger as JSON lines; empty unless requested.
        """
    @property
    def loss_to_ideal(self) -> float:
        """
        Mean over steps of (noise-free makespan of the shares used / that of the oracle's shares) - 1.
        """
    @property
    def lost_steps(self) -> int:
        """
        Steps repeated because a device failed.
        """
    @property
    def moves(self) -> int:
        """
        Changes of shares.
        """
    @property
    def moves_per_100_steps(self) -> float:
        """
        Changes of shares, per 100 steps.
        """
    @property
    def steps_to_recover(self) -> list[int | None]:
        """
        Per event, steps until within 5 % of the new ideal; None if the next event came first.
        """
    @property
    def time_over_ideal(self) -> float:
        """
        The total time, noise and lost steps included, divided by the oracle's noise-free time.
        """

def run_suite(
    names: collections.abc.Sequence[str] = [], *, seeds: typing.SupportsInt | typing.SupportsIndex = 5
) -> list[ScenarioResult]:
    """
    Run the balancer through scenarios and check each result against its bounds.

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
    """
    All scenarios of the suite.
    """

def simulate(
    speeds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    *,
    batch_size: typing.SupportsInt | typing.SupportsIndex = 512,
    steps: typing.SupportsInt | typing.SupportsIndex = 400,
    policy: str = "auto",
    noise: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    throttles: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ] = [],
    failures: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
    ] = [],
    spike_probability: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    spike_factor: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    seed: typing.SupportsInt | typing.SupportsIndex = 0,
    fixed_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.004,
    per_item_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0001,
    device_classes: collections.abc.Sequence[str] | None = None,
    ledger: bool = False,
    drifts: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ] = [],
    pauses: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ] = [],
    reduction_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] = [],
    first_run_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    lasting_noise: collections.abc.Sequence[
        tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex, bool]
    ] = [],
    late_starts: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ] = [],
) -> SimulationResult:
    """
    Run the balancer on simulated devices with a virtual clock.

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
