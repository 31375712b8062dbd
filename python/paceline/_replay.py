"""Replay ledgers: the C++ balancer repeats their decisions."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import InvalidArgument
from paceline._core.balance import LEDGER_VERSION, Balancer


@dataclass(frozen=True)
class LedgerMismatch:
    """A decision that came out differently in a replay.

    Attributes
    ----------
    line
        The line in the ledger, from 1.
    step
        The step of the plan.
    what
        The decision in the ledger and the replayed one.
    """

    line: int
    step: int
    what: str


@dataclass
class ReplayResult:
    """The result of a replay.

    Attributes
    ----------
    plans, records
        The numbers of replayed plans and records.
    moves
        Changes of shares in the replay.
    mismatches
        Decisions that came out differently. Empty if all were reproduced.
    cut_off
        Whether the last line was written in part only, as by a process that was killed or on a full disk. It is left out.
    """

    plans: int = 0
    records: int = 0
    moves: int = 0
    mismatches: list[LedgerMismatch] = field(default_factory=list)
    cut_off: bool = False


def replay(ledger: str | os.PathLike[str] | Iterable[str]) -> ReplayResult:
    """Run fresh balancers through the calls of a ledger and compare every plan with the one written.

    A ledger with both steps with costs and steps without comes from two balancers. A last line that was written in part only is left out.

    Parameters
    ----------
    ledger
        The path of a file with the JSON lines of `Balancer.ledger`, or the lines themselves.

    Returns
    -------
    ReplayResult
        `mismatches` is empty if every decision was reproduced.

    Raises
    ------
    InvalidArgument
        If a line is malformed, or holds a call that a balancer refuses. The message names the line.
    OSError
        If the file cannot be read.
    """
    return replayed(lines_of(ledger))[0]


def lines_of(ledger: str | os.PathLike[str] | Iterable[str]) -> Iterator[str]:
    """The lines of a ledger, which is the path of its file or these lines."""
    if isinstance(ledger, (str, os.PathLike)):
        with Path(ledger).open(encoding="utf-8") as lines:
            yield from lines
    else:
        yield from ledger


def replayed(ledger: Iterable[str]) -> tuple[ReplayResult, list[Balancer]]:
    """Do what `replay` does with the lines of a ledger, and return the balancers, too: what they knew after the last line."""
    result = ReplayResult()
    replays: list[_Replay] = []  # one per balancer that wrote this ledger
    for number, line in numbered(ledger, result):
        with at_line(number):
            entry = json.loads(line)
            balancer = entry.pop("balancer", 0) if isinstance(entry, dict) else 0
            if balancer == len(replays) and (not replays or "paceline_ledger" in entry):
                replays.append(_Replay(entry, result))
            elif 0 <= balancer < len(replays):
                replays[balancer].call(number, entry)
            else:
                raise InvalidArgument(f"balancer {balancer} has written no header")
    if not replays:
        raise InvalidArgument("line 1 of the ledger: there is no header, the ledger is empty")
    balancers = [one.balancer for one in replays]
    result.moves = sum(balancer.move_count for balancer in balancers)
    return result, balancers


def numbered(ledger: Iterable[str], result: Any) -> Iterator[tuple[int, str]]:
    """The lines from 1 on. If the last one was written in part only, it is left out, and `result` notes it."""
    ends = False  # whether lines come with their ends, as those of a file do
    for number, line in enumerate(ledger, start=1):
        if ends and is_cut_off(line):
            result.cut_off = True
            return
        ends = line.endswith("\n")
        yield number, line


@contextlib.contextmanager
def at_line(number: int) -> Iterator[None]:
    """Let the error of what a line holds name the line."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"line {number} of the ledger: column {error.colno}: {error.msg}") from None
    except KeyError as error:
        raise InvalidArgument(f'line {number} of the ledger: "{error.args[0]}" is missing') from None
    # TypeError and OverflowError: what is no value of its type. RecursionError: endlessly nested arrays.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"line {number} of the ledger: {error}") from error


def is_cut_off(line: str) -> bool:
    """Whether the last line of a file was written in part only."""
    if line.endswith("\n"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


class _Replay:
    """The replay of one balancer, from its header on."""

    def __init__(self, header: Any, result: ReplayResult) -> None:
        version, self.result, self._step = header["paceline_ledger"], result, -1
        if version != LEDGER_VERSION:
            raise InvalidArgument(f"the ledger has version {version}, this library reads version {LEDGER_VERSION}")
        options = header["options"]
        for name in ("device_class", "minimum", "maximum", "may_be_zero", "startup_seconds", "name"):
            options[name] = [device[name] for device in options["devices"]]
        self.balancer = Balancer(
            options["name"],
            options["policy"],
            device_classes=options["device_class"],
            **{name: options[name] for name in _OPTIONS},
            unit=options.get("unit", "items"),
        )

    def call(self, line: int, entry: Any) -> None:
        match entry:
            case {"plan": plan}:
                self._plan(line, plan)
            case {"record": record}:
                self._record(record)
            case {"retire": retire}:
                self.balancer.retire(retire["device"])
            case {"restore": restore}:
                self.balancer.restore(restore["device"])
            case {"least_items": items}:
                self.balancer.set_least_items(items)
            case {"hint": models}:
                self.balancer.hint(models)
            case {"claims": _}:  # the micro-batches that ran; no decision to compare
                pass
            case _:
                raise InvalidArgument(
                    'neither "plan" nor "record", "retire", "restore", "hint" or "least_items" is there'
                )

    def _plan(self, line: int, written: Any) -> None:
        made = self.balancer.next_plan(written["batch_size"])
        self.result.plans += 1
        self._step = made.step
        for name in ("step", "shares", "moved", "predicted_seconds"):
            said, found = written[name], getattr(made, name)
            if said != found:
                what = f"{name}: the ledger says {json.dumps(said)}, replayed {json.dumps(found)}"
                self.result.mismatches.append(LedgerMismatch(line, written["step"], what))

    def _record(self, written: Any) -> None:
        if written["step"] != self._step:
            raise InvalidArgument(f"a record of step {written['step']} after the plan of step {self._step}")
        self.balancer.record(
            written["devices"],
            written["step_seconds"],
            reduction_seconds=written.get("reduction_seconds", 0.0),
            startup_seconds=written.get("startup_seconds", []),
            lent_parts=written.get("lent_parts", []),
        )
        self.result.records += 1


_OPTIONS = (
    *("weights", "granularity", "minimum", "maximum", "may_be_zero"),
    *("startup_seconds", "reduction_seconds", "calibrate", "proportional"),
)
