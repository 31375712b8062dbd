"""Devices with a virtual clock, and the product's own balancer on them: try settings without the hardware."""

from paceline._core.sim import Event, SimulationResult, simulate

__all__ = ["Event", "SimulationResult", "simulate"]
