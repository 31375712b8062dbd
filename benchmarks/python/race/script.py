"""What scripts that measure on this machine have in common: options, cores, and the end of the JSON."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

import paceline
from race import host


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--json``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    return made


def cores(count: int, least: int = 2, *, pinned: bool = False) -> list[paceline.Device]:
    """The first devices of this machine. Ends the script if there are too few, or if they have to be, and are not, `pinned` to cores."""
    devices = paceline.devices()[:count]
    if len(devices) < least or (pinned and not all(device.cores for device in devices)):
        what = " that processes can be pinned to" if pinned else ""
        sys.exit(f"{Path(sys.argv[0]).stem}: {least} cores are needed{what}")
    return devices


def facts(devices: list[paceline.Device], **versions: str | None) -> dict[str, Any]:
    """The hardware and the versions, which every result contains."""
    known = {"paceline": paceline.__version__, **versions, "python": platform.python_version()}
    return {"hardware": host.hardware(devices), "versions": known}
