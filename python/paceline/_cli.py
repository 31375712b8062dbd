"""The `paceline` command. Each subcommand imports what it needs only when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 for a wrong argument, 130 after Ctrl-C.

    Parameters
    ----------
    arguments
        The command line without the program's name. Default: that of this process.
    """
    from paceline import Error

    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        status = run(options) or 0
        sys.stdout.flush()
    except Error as error:
        print(f"paceline {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Redirect the buffered rest, which would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


class _Parser(argparse.ArgumentParser):
    """Says which form a value must have, where argparse would say which function has refused it. Its subcommands are of this class, too."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type in (int, float) or isinstance(error.__context__, argparse.ArgumentTypeError):
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r} is not of the form {action.metavar}") from None


def _parser() -> argparse.ArgumentParser:
    from paceline._core.runtime import build_facts

    parser = _Parser(prog="paceline", description="All the devices of one machine as one.")
    parser.add_argument("--version", action="version", version=f"paceline {build_facts()['version']}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    info = commands.add_parser(
        "info",
        help="what this machine offers and what this installation can use of it",
        description="Devices, cores and limits, how paceline was built, which optional libraries were found and where, "
        "what is missing and why it matters.",
    )
    info.add_argument("--json", action="store_true", help="one JSON object instead of text")
    info.add_argument("--links", action="store_true", help="also measure the links between GPUs, for at most a second")
    info.set_defaults(run=_info)
    for name in ("run", "simulate", "replay", "page", "top", "worth", "verify"):
        import_module(f"paceline._cli_{name}").add_parser(commands)
    return parser


def _info(options: argparse.Namespace) -> None:
    from paceline.info import collect, render

    facts = collect(links=options.links)
    print(json.dumps(facts, indent=2) if options.json else render(facts))
    if options.links and not options.json and not facts["gpu_links"]:
        print("\nLinks between GPUs\n  none to measure: there are no two GPUs here")


if __name__ == "__main__":
    sys.exit(main())
