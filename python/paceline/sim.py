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
    simulate_pipeline,
    simulate_pool,
)
from paceline._replay_pool import PoolLedgerMismatch, PoolReplayResult, PoolTimes, replay_pool, what_if_pool

__all__ = [
    "Event",
    "PoolLedgerMismatch",
    "PoolReplayResult",
    "PoolTimes",
    "Scenario",
    "ScenarioResult",
    "SimulationResult",
    "launch_rate",
    "replay_pool",
    "run_suite",
    "scenarios",
    "simulate",
    "simulate_data_path",
    "simulate_pipeline",
    "simulate_pool",
    "what_if_pool",
]
