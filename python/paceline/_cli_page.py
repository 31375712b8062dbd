"""The command `paceline page`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "page",
        help="one page of HTML that shows a run, from its ledger; several ledgers side by side",
        description="Reads ledgers, as trainer.write_ledger() or pool.write_ledger() writes them, and writes one page of HTML that needs no network: how good the split was, what "
        "cost most and what to change; shares, speeds and the time of a step, with each move and its reason; tables. Runs of several ledgers stand side by side.",
    )
    parser.add_argument("ledgers", type=Path, nargs="+", metavar="LEDGER", help="a ledger")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the page, such as run.html; an existing file is replaced",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    """Read, write, and say how large the page is. Bad files exit with 2."""
    from paceline import InvalidArgument
    from paceline._cli_replay_pool import is_pool, ledger_lines
    from paceline._page.document import page, page_of_runs, write
    from paceline._page.ledger import runs_of
    from paceline._page.pool_ledger import section

    runs, pools = [], []
    for path in args.ledgers:
        lines = ledger_lines(args.parser, path)
        try:
            if is_pool(lines):
                pools.append(section(path.name, lines))
            else:
                runs += runs_of(path.name, lines)
        except InvalidArgument as error:
            args.parser.error(f"{path} is no ledger that can be replayed: {error}")
    if args.output.is_file() and any(path.samefile(args.output) for path in args.ledgers):
        args.parser.error(
            f"{args.output} is one of the ledgers, which the page would replace. Name another file after -o."
        )
    if runs and pools:
        args.parser.error("some ledgers are of trainers and some of pools; these have pages of their own")
    if pools:
        made = page(pools[0].title if len(pools) == 1 else f"{len(pools)} pools", pools)
    else:
        made = page_of_runs(runs[0].title if len(runs) == 1 else f"{len(runs)} runs, compared", runs)
    try:
        write(args.output, made)
    except OSError as error:
        args.parser.error(f"{args.output} cannot be written: {error.strerror}")
    if args.output.is_file():  # and not /dev/stdout
        print(f"{args.output}: {args.output.stat().st_size / 1000:.0f} kB")
