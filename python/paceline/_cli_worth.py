"""The command `paceline worth`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "worth",
        help="what the devices of a run are worth: seconds and cost with each subset of them",
        description="Reads a ledger, as trainer.write_ledger() or pool.write_ledger() writes it, and predicts seconds and cost of 1,000 items with each useful "
        "subset of the devices, with the error that the measured noise leaves. Of a pool: how long its requests would have taken, and what 1,000 of them cost.",
    )
    parser.add_argument("file", type=Path, metavar="LEDGER", help="the ledger")
    parser.add_argument(
        "--prices",
        type=_prices,
        metavar="DEVICE=PRICE,...",
        help="what an hour of each device costs, by name or for each one of a kind, such as cuda:0=2.1,host=0.05",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="items of a step without costs (default: as most of these had)"
    )
    parser.add_argument(
        "--latency",
        type=float,
        metavar="SECONDS",
        help="of a pool: 99 of 100 requests are to end so soon after their submit",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    """Ask and print. Bad files and prices exit with 2."""
    from paceline import InvalidArgument
    from paceline._cli_replay_pool import is_pool, ledger_lines
    from paceline._worth_pool import worth_pool
    from paceline.balance import worth

    lines = ledger_lines(args.parser, args.file)
    pool = is_pool(lines)
    if pool and args.batch_size is not None:
        args.parser.error("--batch-size is for the ledgers of trainers")
    if not pool and args.latency is not None:
        args.parser.error("--latency is for the ledgers of pools")
    try:
        found: list[Any]
        if pool:
            found = [worth_pool(lines, args.prices, latency=args.latency)]
        else:
            found = list(worth(lines, args.prices, batch_size=args.batch_size))
    except InvalidArgument as error:
        args.parser.error(f"{args.file}: {error}")
    if args.json:
        told = [
            asdict(one) | {"fastest": asdict(one.fastest), "cheapest": one.cheapest and asdict(one.cheapest)}
            for one in found
        ]
        print(json.dumps({"file": str(args.file), "kinds": told}, indent=2))
    else:
        print("\n\n".join(map(str, found)))


def _prices(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, price = part.rpartition("=")
        try:
            found[name.strip()] = float(price)
        except ValueError:
            name = ""
        if not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is no device with its price, such as cuda:0=2.1")
    return found
