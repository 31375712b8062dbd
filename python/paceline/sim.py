"""Simulated devices with a virtual clock and the library's own balancer: try settings without the hardware."""

from paceline._core.sim import (
    Event,
    Scenario,
    ScenarioResult,
    SimulationResult,
    launch_rate,
    run_suite,
    scenarios,
    simulate,
    simulate_data_path,
    simulate_day,
    simulate_pipeline,
    simulate_pool,
)
from paceline._replay_pool import PoolLedgerMismatch, PoolReplayResult, PoolTimes, replay_pool, what_if_pool
from paceline._worth_pool import PoolChoice, PoolWorth, worth_pool

__all__ = [
    "Event",
    "PoolChoice",
    "PoolLedgerMismatch",
    "PoolReplayResult",
    "PoolTimes",
    "PoolWorth",
    "Scenario",
    "ScenarioResult",
    "SimulationResult",
    "launch_rate",
    "replay_pool",
    "run_suite",
    "scenarios",
    "simulate",
    "simulate_data_path",
    "simulate_day",
    "simulate_pipeline",
    "simulate_pool",
    "what_if_pool",
    "worth_pool",
]
