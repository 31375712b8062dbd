"""What `paceline replay` prints of a pool's ledger."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import InvalidArgument
from paceline._cli_simulate_pool import PLACEMENTS
from paceline._words import plural

if TYPE_CHECKING:
    from paceline.sim import PoolReplayResult, PoolTimes

_MOST_DEVICES = 16  # in one line
_OUTCOMES = ("rejected", "expired", "cancelled", "failed")


def ledger_lines(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """The lines of a ledger. A file that cannot be read ends the command."""
    try:
        # Not by splitlines(), which also splits at separators that a device's name may contain.
        with path.open(encoding="utf-8") as file:
            return list(file)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}")


def is_pool(lines: list[str]) -> bool:
    """Whether a pool has written these lines."""
    return bool(lines) and '"paceline_pool_ledger"' in lines[0]


def run(args: argparse.Namespace, lines: list[str]) -> int:
    """Replay and print. Returns the exit status: 0, or 1 if a decision was not reproduced; bad files exit with 2."""
    from paceline.sim import replay_pool, what_if_pool

    try:
        result = replay_pool(lines)
        asked = PLACEMENTS if args.what_if and result.mismatch is None else ()
        others = {placement: what_if_pool(lines, placement) for placement in asked}
    except InvalidArgument as error:
        args.parser.error(f"{args.file} is no ledger that can be replayed: {error}")
    if args.json:
        found = {name: asdict(times) for name, times in others.items()}
        told = {"file": str(args.file), "reproduced": result.mismatch is None, **asdict(result), "what_if": found}
        print(json.dumps(told, indent=2))
    else:
        print(_text(args, result, others))
    return 0 if result.mismatch is None else 1


def _text(args: argparse.Namespace, result: PoolReplayResult, others: dict[str, PoolTimes]) -> str:
    names = ", ".join(result.devices) if len(result.devices) <= _MOST_DEVICES else f"{len(result.devices)} devices"
    verdict = "All decisions came out the same."
    if result.mismatch is not None:
        verdict = "A decision came out DIFFERENTLY: another version wrote the ledger, or it was changed."
    if result.cut_off:
        verdict += " The last line was written in part only, and is left out."
    counts = (plural(result.events, "event"), plural(result.jobs, "job"), plural(result.runs, "run"))
    placement = "by a function, whose answers the ledger has" if result.placement == "custom" else result.placement
    lines = [f"{args.file}: a pool on {names}, placement {placement}", f"{', '.join(counts)}. {verdict}"]
    if result.mismatch is not None:
        one = result.mismatch
        return "\n".join([*lines, f"  line {one.line}, {one.event}: {one.what}", "  What follows was not replayed."])
    assert result.times is not None
    columns = "".join(f"{name:>10}" for name in ("mean", "p50", "p99"))
    lines += ["", f"{'ms':<20}{'wait:':>7}{columns}{'to the end:':>13}{columns}  not completed"]
    lines += [_row("as it was", result.times), *(_row(f"if {name}", times) for name, times in others.items())]
    return "\n".join(lines)


def _row(name: str, times: PoolTimes) -> str:
    waits = (times.mean_wait_seconds, times.p50_wait_seconds, times.p99_wait_seconds)
    ends = (times.mean_seconds, times.p50_seconds, times.p99_seconds)
    texts = ["".join(f"{1e3 * value:>10.2f}" for value in values) for values in (waits, ends)]
    ended = ", ".join(f"{times.outcomes[one]} {one}" for one in _OUTCOMES if times.outcomes.get(one))
    return f"{name:<27}{texts[0]}{'':13}{texts[1]}  {ended or '-'}"
