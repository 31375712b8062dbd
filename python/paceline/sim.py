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

__all__ = [
    "Event",
    "Scenario",
    "ScenarioResult",
    "SimulationResult",
    "launch_rate",
    "run_suite",
    "scenarios",
    "simulate",
    "simulate_data_path",
    "simulate_pipeline",
    "simulate_pool",
]
