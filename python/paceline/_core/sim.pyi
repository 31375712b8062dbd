from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = ["Event", "Scenario", "ScenarioResult", "SimulationResult", "run_suite", "scenarios", "simulate"]

class Scenario:
    """
    A way in which training machines misbehave, and what is asked of the balancer there.
    """
    def __repr__(self) -> str: ...
    @property
    def about(self) -> str:
        """
        What happens, and where such a thing was observed or published.
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
        0: not asked.
        """
    @property
    def name(self) -> str:
        """
        How results name it.
        """
    @property
    def steps(self) -> int:
        """
        Steps simulated.
        """

class ScenarioResult:
    """
    What came out of one scenario, over its seeds.
    """
    def __repr__(self) -> str: ...
    @property
    def even_loss(self) -> float:
        """
        Of the even split.
        """
    @property
    def loss(self) -> float:
        """
        `SimulationResult.loss_to_ideal`, mean over the seeds.
        """
    @property
    def missed(self) -> list[str]:
        """
        Bounds that were not kept, in words.
        """
    @property
    def moves_per_100_steps(self) -> float:
        """
        Changes of shares, mean over the seeds.
        """
    @property
    def name(self) -> str:
        """
        Of the scenario.
        """
    @property
    def optimum_loss(self) -> float:
        """
        The least that a rule without a crystal ball can lose.
        """
    @property
    def optimum_source(self) -> str:
        """
        Where that is from.
        """
    @property
    def regret(self) -> float:
        """
        Loss beyond the optimum's.
        """
    @property
    def steps_to_recover(self) -> int | None:
        """
        Of the event that took longest, the median over the seeds; None without events, or if never.
        """
    @property
    def worst_loss(self) -> float:
        """
        Of one seed.
        """

class Event:
    """
    A change of the box that the split should follow.
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
        "throttle", "release" or "failure".
        """
    @property
    def step(self) -> int:
        """
        The first step that it concerns.
        """

class SimulationResult:
    """
    How a policy did on a simulated box.
    """
    def __repr__(self) -> str: ...
    @property
    def elapsed_seconds(self) -> float:
        """
        On the virtual clock.
        """
    @property
    def events(self) -> list[Event]:
        """
        In order of steps.
        """
    @property
    def explanation(self) -> str:
        """
        `Balancer.explain()` at the end.
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
        JSON lines, empty unless asked for.
        """
    @property
    def loss_to_ideal(self) -> float:
        """
        Mean over steps of the noise-free makespan of the shares used over the oracle's, minus 1.
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
        Per event, steps until within 5 % of the new ideal; None if not before the next event.
        """
    @property
    def time_over_ideal(self) -> float:
        """
        All the time that passed, noise and lost steps included, over the oracle's noise-free time.
        """

def run_suite(
    names: collections.abc.Sequence[str] = [], *, seeds: typing.SupportsInt | typing.SupportsIndex = 5
) -> list[ScenarioResult]:
    """
    Run the balancer through scenarios and hold each outcome against its bounds.

    Parameters
    ----------
    names
        Of the scenarios to run; none: all.
    seeds
        Each scenario meets the noise of the seeds 1 to `seeds`.

    Returns
    -------
    list of ScenarioResult

    Raises
    ------
    InvalidArgument
        For a name that no scenario has, or less than one seed.
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
) -> SimulationResult:
    """
    Run the balancer on simulated devices with a virtual clock.

    A device takes `(fixed_seconds + per_item_seconds * n) / speed` for n > 0 items, times throttles and noise. The balancer sees
    only the times. Deterministic: equal arguments give equal results, and policies meet the same noise.

    Parameters
    ----------
    speeds
        One per device.
    batch_size, steps
        Items per step; steps that must succeed.
    policy
        "auto", "even" or "weighted" (by `speeds`).
    noise
        Times are multiplied by exp(noise * Z), Z standard normal.
    throttles
        (device, factor, from, to): that device takes `factor` times as long in steps [from, to).
    failures
        (device, step): the device stops in that step, which is lost and repeated by the others.
    spike_probability, spike_factor
        So often a device's step takes `spike_factor` times as long.
    seed
        Of the noise.
    fixed_seconds, per_item_seconds
        The cost of a device of speed 1.
    device_classes
        One name per device; default: all of one class.
    ledger
        Keep the balancer's calls, for `paceline.balance.replay`.
    drifts
        (device, first, last, from, to): that device takes `first` times as long up to step `from`, `last` times from step `to` on, and
        what lies between in between.
    pauses
        (device, seconds, first, every): that device stands still so long in step `first` and every `every` steps after it (0: once).
        No split avoids it, so it is not in the ideal.
    reduction_seconds
        Seconds that each step ends later when k devices have work, at index k from 0; default: none.
    first_run_seconds
        Added when a device runs a size for the first time; such times are marked as no evidence.
    lasting_noise
        (deviation, steps, common): more noise on log times, whose correlation n steps apart is exp(-n / steps); common: all devices
        meet the same one, otherwise each has its own.

    Returns
    -------
    SimulationResult

    Raises
    ------
    InvalidArgument
        For arguments that make no sense, naming the device or event.
    """
