"""Read the runs that a page shows from a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline import _ledger as ledger
from paceline._core.balance import Balancer
from paceline._page.run import Move, Row, Run, Table, because, ideal_seconds, milliseconds
from paceline._replay import is_cut_off, replayed
from paceline._words import plural

_LACKS = "A ledger has no time between steps, so it does not tell whether the loop waits for its input; and no memory. The page of a trainer has both."
_SLOWED = 1.05  # times as slow as before is worth a word
_REGAIN = 0.02  # of a step's time is worth a word
_MOST_SHARES = 16  # in the words of a move


def runs_of(name: str, lines: Sequence[str]) -> list[Run]:
    """Read the lines of a ledger: one run for each balancer that wrote it. Raises what `read` does."""
    return read(name, lines)[0]


def read(name: str, lines: Sequence[str]) -> tuple[list[Run], list[Balancer]]:
    """Read the lines of a ledger: one run for each balancer that wrote it, and what these knew after the last line.

    Raises
    ------
    InvalidArgument
        As `paceline.balance.replay`.
    """
    lines = lines[:-1] if lines and is_cut_off(lines[-1]) else lines
    result, balancers = replayed(lines)
    found = ledger.read(lines)
    runs = [_run(one, balancer.report()) for one, balancer in zip(found, balancers, strict=True)]
    for number, (run, one) in enumerate(zip(runs, found, strict=True)):
        kind = "" if len(runs) == 1 else f" ({'steps with costs' if one.by_cost else 'steps without costs'})"
        run.title = f"{name}{kind}: balance {one.policy}"
        run.words = balancers[number].explain()
    if result.mismatches:
        differing = len({one.line for one in result.mismatches})
        runs[0].lacks.append(
            f"A replay decided {plural(differing, 'plan')} differently: another version wrote the ledger, or it was changed."
        )
    return runs, balancers


def _run(of: ledger.Ledger, report: dict[str, Any]) -> Run:
    rows, moves = [], []
    ran: dict[int, list[int]] = {}  # the shares that ran last, by the size of the batch
    for decision in of.decisions:
        notes = [f"{name} left" for name in decision.retired] + [f"{name} came back" for name in decision.restored]
        if decision.moved or notes:
            before = ran.get(decision.batch_size)
            was = "" if before is None else f"{_shares(before)} to "
            moves.append(Move(decision.step, f"{was}{_shares(decision.shares)}", because(notes, decision.reason)))
        if decision.record is not None:
            rows.append(_row(decision, decision.record, proportional=of.proportional))
            ran[decision.batch_size] = decision.shares
    # A step without a reduction, or with one device, does not have its line.
    if any(row.reduction is not None for row in rows):
        rows = [replace(row, reduction=row.reduction or 0.0) for row in rows]
    if any(row.launching is not None for row in rows):
        rows = [replace(row, launching=row.launching or 0.0) for row in rows]
    run = Run(
        "",
        of.devices,
        rows,
        moves,
        unit="work" if of.by_cost else "items",
        even=of.policy != "auto",
        advice=_advice(report) if of.policy == "auto" else "",
        usual=[device["share"] for device in report["devices"]],
        lacks=[_LACKS],
    )
    if rows and rows[-1].reduction is None:
        run.lacks.append("This ledger has no times of the reduction, as those of GPUs have none.")
    run.tables.append(known(report))
    return run


def _row(decision: ledger.Decision, record: Mapping[str, Any], *, proportional: bool) -> Row:
    amounts = [sum(run[0] for run in device) for device in record["devices"]]
    busy = [sum(run[1] for run in device) for device in record["devices"]]
    step_seconds = record["step_seconds"]
    if proportional:
        # It is that of the planned work, the times are of what ran.
        step_seconds *= sum(amounts) / decision.batch_size
    computing = max([step_seconds, *busy])
    reduction = record.get("reduction_seconds")
    ideal = ideal_seconds(amounts, busy)
    launching = None
    if starts := record.get("startup_seconds"):
        speeds = [n / s if s > 0 else 0.0 for n, s in zip(amounts, busy, strict=True)]
        lost = [min(start or 0.0, computing - s) for start, s in zip(starts, busy, strict=True)]
        launching = sum(v * s for v, s in zip(speeds, lost, strict=True)) / (sum(speeds) or 1.0)
    seconds = computing + (reduction or 0.0)
    return Row(
        record["step"], 1, amounts, busy, seconds, ideal, seconds, seconds, decision.shares, reduction, launching
    )


def _shares(shares: Sequence[int]) -> str:
    return str(shares) if len(shares) <= _MOST_SHARES else f"{min(shares)} to {max(shares)} on each of {len(shares)}"


def known(report: Mapping[str, Any]) -> Table:
    """What the balancer knew in the end."""
    head = ("device", "fixed", "per item", "noise of a step", "time to that before", "since step", "changes of speed")
    rows = []
    for device in report["devices"]:
        known = device["measured"]
        rows.append(
            (
                device["name"],
                milliseconds(device["fixed_seconds"]) if known else "–",
                f"{1e6 * device['per_item_seconds']:.3g} µs" if known else "–",
                f"{device['noise']:.1%}" if known else "–",
                f"{device['slowdown']:.2f} times" if device["slowdown"] else "–",
                str(device["since_step"]) if known else "–",
                str(device["change_points"] + device["drifts"]),
            )
        )
    return Table("What the balancer knew in the end", head, rows)


def _advice(report: dict[str, Any]) -> str:
    """What to change, by what the balancer knew in the end."""
    slowed = [one for one in report["devices"] if one["slowdown"] > _SLOWED and one["regain"] > _REGAIN]
    if slowed:
        worst = max(slowed, key=lambda one: one["regain"])
        return (
            f"Look for what slows {worst['name']}: since step {worst['since_step']} it takes {worst['slowdown']:.2f} times as long as before, "
            f"and steps would be {worst['regain']:.0%} shorter without that. explain() of the trainer names causes."
        )
    if report["possible_gain"] > max(_REGAIN, report["required_gain"]):
        return f"Train on: the best split for the measured speeds would make steps {report['possible_gain']:.0%} shorter, and the balancer will move."
    return ""
