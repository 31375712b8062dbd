"""The command `paceline replay`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import _cli_replay_pool
from paceline._ledger import Decision, Ledger, read
from paceline._words import plural

if TYPE_CHECKING:
    from paceline.balance import ReplayResult

_MOST_SHARES = 16  # in one line
_MOST_MISMATCHES = 10
_BY_COST = "Items are dealt by cost: batch and shares below are units of work, of which the first plan has 1000000."


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="whether the decisions in a ledger are reproduced, and what they were",
        description="Runs a fresh balancer through a ledger, as trainer.write_ledger() writes it, and compares every decision "
        "with the one in the file. Prints the decisions: a line for each split, with the steps that ran by it, what it promised, what they "
        "took in the mean, and why. Of a pool's ledger: how long jobs waited. Exits with 1 if a decision comes out differently.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the ledger")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--what-if", action="store_true", help="of a pool: how long jobs would have waited with each placement"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Replay and print. Returns the exit status: 0, or 1 if a decision was not reproduced; bad files exit with 2."""
    lines = _cli_replay_pool.ledger_lines(args.parser, args.file)
    if _cli_replay_pool.is_pool(lines):
        return _cli_replay_pool.run(args, lines)
    if args.what_if:
        args.parser.error("--what-if is for the ledgers of pools")
    from paceline import InvalidArgument
    from paceline.balance import replay

    try:
        result = replay(lines)
    except InvalidArgument as error:
        args.parser.error(f"{args.file} is no ledger that can be replayed: {error}")
    ledgers = read(lines[:-1] if result.cut_off else lines)
    if args.json:
        print(json.dumps(_summary(args.file, result, ledgers), indent=2))
    else:
        print(_text(args.file, result, ledgers))
    return 1 if result.mismatches else 0


def _summary(file: Path, result: ReplayResult, ledgers: list[Ledger]) -> dict[str, Any]:
    return {
        "file": str(file),
        "policy": ledgers[0].policy,
        "devices": ledgers[0].devices,
        "reproduced": not result.mismatches,
        **vars(result),
        "mismatches": [vars(entry) for entry in result.mismatches],
        "decisions": [
            {
                **{name: value for name, value in vars(stretch.first).items() if name != "record"},
                "unit": "work" if ledger.by_cost else "items",
                "last_step": stretch.last_step,
                "steps": stretch.steps,
                "promised_seconds": stretch.first.predicted_seconds,
                "predicted_seconds": stretch.predicted_seconds,
                "measured_seconds": stretch.measured_seconds,
            }
            for ledger in ledgers
            for stretch in stretches(ledger)
        ],
    }


def _text(file: Path, result: ReplayResult, ledgers: list[Ledger]) -> str:
    ledger = ledgers[0]
    verdict = "All of them came out the same."
    if result.mismatches:
        differing = len({entry.line for entry in result.mismatches})
        verdict = f"{differing} of them came out DIFFERENTLY: another version wrote the ledger, or it was changed."
    if result.cut_off:
        verdict += " The last line was written in part only, and is left out."
    names = ", ".join(ledger.devices) if len(ledger.devices) <= _MOST_SHARES else f"{len(ledger.devices)} devices"
    lines = [
        f"{file}: balance {ledger.policy} on {names}",
        f"{plural(result.plans, 'decision')}, {plural(result.records, 'recorded step')}, {plural(result.moves, 'move')}. {verdict}",
        *(f"  line {entry.line}, step {entry.step}: {entry.what}" for entry in result.mismatches[:_MOST_MISMATCHES]),
    ]
    if len(result.mismatches) > _MOST_MISMATCHES:
        lines.append(f"  and {len(result.mismatches) - _MOST_MISMATCHES} more, which --json tells")
    for ledger in ledgers:
        lines += _table(ledger)
    return "\n".join(lines)


def _table(ledger: Ledger) -> list[str]:
    rows = [_row(stretch) for stretch in stretches(ledger)]
    unit = "work" if ledger.by_cost else "shares"
    rows.insert(0, ("step", "steps", "batch", unit, "promised", "measured", "why"))
    width = max(len(row[3]) for row in rows)
    lines = [_BY_COST, ""] if ledger.by_cost else [""]
    for step, steps, batch, share, promised, measured, why in rows:
        line = f"{step:>7} {steps:>6} {batch:>7}  {share:<{width}} {promised:>10} {measured:>10}  {why}"
        lines.append(line.rstrip())
    return lines


def _row(stretch: Stretch) -> tuple[str, ...]:
    first = stretch.first
    shares = " ".join(str(share) for share in first.shares)
    if len(first.shares) > _MOST_SHARES:
        shares = f"{min(first.shares)} to {max(first.shares)}"
    why = first.reason
    for devices, what in (first.restored, "came back"), (first.retired, "left"):
        why = f"{', '.join(devices)} {what}; {why}" if devices else why
    return (
        str(first.step),
        str(stretch.steps),
        str(first.batch_size),
        shares,
        f"{1e3 * first.predicted_seconds:.2f} ms" if first.predicted_seconds > 0 else "-",
        "-" if stretch.measured_seconds is None else f"{1e3 * stretch.measured_seconds:.2f} ms",
        why,
    )


class Stretch:
    """The consecutive steps with one split of one batch size."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self.first = decisions[0]
        self.last_step = decisions[-1].step
        self.steps = len(decisions)
        self.predicted_seconds = decisions[-1].predicted_seconds  # by the models of its last step
        times = [one.measured_seconds for one in decisions if one.measured_seconds is not None]
        self.measured_seconds = sum(times) / len(times) if times else None


def stretches(ledger: Ledger) -> list[Stretch]:
    """Join equal consecutive decisions, in the order of their first steps."""
    found: list[list[Decision]] = []
    latest: dict[int, list[Decision]] = {}  # by batch size, because the last batch of an epoch often has its own
    for decision in ledger.decisions:
        known = latest.get(decision.batch_size)
        changed = decision.moved or decision.retired or decision.restored
        if known is None or changed or known[0].shares != decision.shares:
            known = latest[decision.batch_size] = []
            found.append(known)
        known.append(decision)
    return [Stretch(decisions) for decisions in found]
