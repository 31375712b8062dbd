"""Shared by the scripts that race on this machine's cores: options, a look at the machine, rounds, and the end of the JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paceline
from race import script


class Command:
    """One run of a script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.devices = paceline.devices()[: args.cores]
        self._load = os.getloadavg()[0]
        self._begin = time.monotonic()
        if len(self.devices) < 2 or not all(device.cores for device in self.devices):
            raise RuntimeError("the race needs two cores or more that processes can be pinned to")
        if self._load > 0.2:
            print(
                f"note: the load average is {self._load:.1f} before the race: somebody else computes here, or did a minute ago",
                file=sys.stderr,
            )

    def rounds(self, run: Callable[[int], None], *, reserved_seconds: float = 0.0) -> None:
        """Count rounds up to the wanted number, as far as the time limit allows, minus the reserved time. At least one round."""
        longest = 0.0
        for number in range(self.args.rounds):
            left = self.args.time_limit - reserved_seconds - (time.monotonic() - self._begin)
            if number > 0 and longest > left:
                print(f"time is up after {number} rounds of {self.args.rounds}", file=sys.stderr)
                break
            start = time.monotonic()
            run(number)
            longest = max(longest, time.monotonic() - start)
            print(f"round {number + 1} of {self.args.rounds}: {time.monotonic() - start:.0f} s", file=sys.stderr)

    def place(self) -> str:
        """Describe the devices and other programs on the machine."""
        names = ", ".join(device.name for device in self.devices)
        return f"{names}, {f'a busy loop on {self.devices[-1].name}' if self.args.busy else 'quiet'}"

    def record(self, versions: Mapping[str, str]) -> dict[str, Any]:
        """The facts about the run that every result contains."""
        return {
            "busy": self.args.busy,
            "steps": self.args.steps,
            "load_before": round(self._load, 2),
            "seconds": round(time.monotonic() - self._begin, 1),
            **script.facts(self.devices, **versions),
        }


def in_turn(rivals: Sequence[Callable[[], None]], number: int) -> None:
    """All rivals, in an order that begins with another rival in each round."""
    first = number % len(rivals)
    for rival in (*rivals[first:], *rivals[:first]):
        rival()


def parser(description: str | None, *, steps: tuple[int, str], time_limit: float) -> argparse.ArgumentParser:
    """A parser with the common options. `steps` is that option's default and help text."""
    made = script.parser(description)
    made.add_argument(
        "--busy", action="store_true", help="hold a busy loop on the last core while anything is measured"
    )
    made.add_argument("--steps", type=int, default=steps[0], help=f"{steps[1]} (default: {steps[0]})")
    made.add_argument("--rounds", type=int, default=5, help="of every rival, in fresh processes (default: 5)")
    made.add_argument("--cores", type=int, default=2, help="how many devices to race on (default: 2)")
    made.add_argument(
        "--time-limit",
        type=float,
        default=time_limit,
        help=f"seconds after which no further round starts (default: {time_limit:.0f})",
    )
    return made


def finish(name: str, main: Callable[[], int]) -> None:
    """Run a script. An error in a race prints one line instead of a traceback."""
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"{name}: {error}")
