"""The compiled part of paceline."""

from __future__ import annotations

from . import balance, comm, engine, plan, runtime, sim

__all__: list[str] = [
    "Cancelled",
    "DeviceLost",
    "Error",
    "Expired",
    "InvalidArgument",
    "OutOfMemory",
    "Rejected",
    "Timeout",
    "Unavailable",
    "balance",
    "comm",
    "engine",
    "plan",
    "runtime",
    "sim",
]

class Error(Exception):
    """Base of the errors that paceline raises; `device` names the device or is None."""

    device: str | None

class Cancelled(Error, RuntimeError):
    """Given up because something else failed or the group is closing."""

class DeviceLost(Error, RuntimeError):
    """A device that only a new process can use again: save what you need and start anew."""

class Expired(Error, TimeoutError):
    """A job that waited until it could no longer end by its deadline."""

class InvalidArgument(Error, ValueError):
    """An argument cannot be used; nothing was changed."""

class OutOfMemory(Error, MemoryError):
    """No memory left for what was asked."""

class Rejected(Error, RuntimeError):
    """A job that a pool did not take."""

class Timeout(Error, TimeoutError):
    """A deadline passed."""

class Unavailable(Error, RuntimeError):
    """This machine or build does not have it."""
