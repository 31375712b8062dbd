"""`paceline run`: starts a script once for each GPU of this machine, or for each core."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from paceline._core.runtime import devices


def add_parser(commands: Any) -> None:
    """Add `run` to the subcommands."""
    run = commands.add_parser(
        "run",
        help="start a training script once for each GPU of this machine, or for each core",
        description="Starts SCRIPT several times, as torchrun --standalone --nproc-per-node N does. The processes are the ranks that train one module: "
        "DataParallel takes the process's own part of the devices, and joins the others. The same script runs without this command as one "
        "process. One process fails: all end.",
    )
    run.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="how many (default: one for each GPU; without GPUs one for each core)",
    )
    run.add_argument("script", metavar="SCRIPT", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the script")
    run.set_defaults(run=_run)


def command(script: str, arguments: list[str], processes: int | None) -> list[str]:
    """The command that starts the processes.

    Raises
    ------
    InvalidArgument
        If there are less than one.
    """
    from paceline import InvalidArgument

    if processes is None:
        found = devices()
        processes = sum(device.kind == "cuda" for device in found) or len(found)
    if processes < 1:
        raise InvalidArgument(f"--processes {processes}; at least 1 is needed.")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, script, *arguments]


def _run(options: argparse.Namespace) -> None:
    from paceline import InvalidArgument

    if not Path(options.script).is_file():
        raise InvalidArgument(f"there is no file {options.script}.")
    words = command(options.script, options.arguments, options.processes)
    sys.stdout.flush()
    os.execv(words[0], words)
