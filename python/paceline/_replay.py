"""Replay ledgers: this module checks their lines, and the C++ balancer repeats the decisions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline import InvalidArgument
from paceline._core.balance import LEDGER_VERSION, Balancer

_T = TypeVar("_T")


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
    """

    plans: int = 0
    records: int = 0
    moves: int = 0
    mismatches: list[LedgerMismatch] = field(default_factory=list)


def replay(ledger: str | os.PathLike[str] | Iterable[str]) -> ReplayResult:
    """Run fresh balancers through the calls of a ledger and compare every plan with the one written.

    A ledger with both steps with costs and steps without comes from two balancers.

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
    if isinstance(ledger, (str, os.PathLike)):
        with Path(ledger).open(encoding="utf-8") as lines:
            return replay(lines)
    result = ReplayResult()
    replays: list[_Replay] = []  # one per balancer that wrote this ledger
    for number, line in enumerate(ledger, start=1):
        try:
            entry = _DECODER.decode(line.rstrip("\r\n"))
            balancer = _as(int, entry.pop("balancer", 0)) if isinstance(entry, dict) else 0
            if balancer == len(replays) and (not replays or "paceline_ledger" in entry):
                replays.append(_Replay(entry, result))
            elif 0 <= balancer < len(replays):
                replays[balancer].call(number, entry)
            else:
                raise InvalidArgument(f"balancer {balancer} has written no header")
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"line {number} of the ledger: column {error.colno}: {error.msg}") from None
        # TypeError and OverflowError: numbers too large for their type. RecursionError: endlessly nested arrays.
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"line {number} of the ledger: {error}") from error
    if not replays:
        raise InvalidArgument("line 1 of the ledger: there is no header, the ledger is empty")
    result.moves = sum(replayed.balancer.move_count for replayed in replays)
    return result


class _Replay:
    """The replay of one balancer, from its header on."""

    def __init__(self, header: Any, result: ReplayResult) -> None:
        version = _as(int, _get(header, "paceline_ledger"))
        if version != LEDGER_VERSION:
            raise InvalidArgument(f"the ledger has version {version}, this library reads version {LEDGER_VERSION}")
        self.balancer = _balancer(_get(header, "options"))
        self.result = result
        self._step = -1

    def call(self, line: int, entry: Any) -> None:
        match entry:
            case {"plan": plan}:
                self._plan(line, plan)
            case {"record": record}:
                self._record(record)
            case {"retire": retire}:
                self.balancer.retire(_as(int, _get(retire, "device")))
            case {"restore": restore}:
                self.balancer.restore(_as(int, _get(restore, "device")))
            case {"least_items": items}:
                self.balancer.set_least_items(_as(int, items))
            case {"hint": models}:
                self.balancer.hint([None if model is None else _pair(model) for model in _as(list, models)])
            case {"claims": _}:  # the micro-batches that ran; no decision to compare
                pass
            case _:
                raise InvalidArgument(
                    'neither "plan" nor "record", "retire", "restore", "hint" or "least_items" is there'
                )

    def _plan(self, line: int, written: Any) -> None:
        made = self.balancer.next_plan(_as(int, _get(written, "batch_size")))
        self.result.plans += 1
        self._step = made.step
        step = _as(int, _get(written, "step"))
        compared = {
            "step": (step, made.step),
            "shares": (_all(int, _get(written, "shares")), made.shares),
            "moved": (_as(bool, _get(written, "moved")), made.moved),
            "predicted_seconds": (_as(float, _get(written, "predicted_seconds")), made.predicted_seconds),
        }
        for name, (said, found) in compared.items():
            if said != found:
                what = f"{name}: the ledger says {json.dumps(said)}, replayed {json.dumps(found)}"
                self.result.mismatches.append(LedgerMismatch(line, step, what))

    def _record(self, written: Any) -> None:
        step = _as(int, _get(written, "step"))
        if step != self._step:
            raise InvalidArgument(f"a record of step {step} after the plan of step {self._step}")
        self.balancer.record(
            [[_micro_batch(run) for run in _as(list, device)] for device in _as(list, _get(written, "devices"))],
            _as(float, _get(written, "step_seconds")),
            reduction_seconds=_as(float, written.get("reduction_seconds", 0.0)),
            startup_seconds=[_unless_null(float, entry) for entry in _as(list, written.get("startup_seconds", []))],
        )
        self.result.records += 1


def _balancer(options: Any) -> Balancer:
    devices = _as(list, _get(options, "devices"))

    def each(name: str, kind: type[_T]) -> list[_T]:
        return [_as(kind, _get(device, name)) for device in devices]

    return Balancer(
        each("name", str),
        _as(str, _get(options, "policy")),
        device_classes=each("device_class", str),
        weights=_all(float, _get(options, "weights")),
        granularity=_as(int, _get(options, "granularity")),
        minimum=each("minimum", int),
        maximum=[_unless_null(int, _get(device, "maximum")) for device in devices],
        may_be_zero=each("may_be_zero", bool),
        startup_seconds=each("startup_seconds", float),
        reduction_seconds=_all(float, _get(options, "reduction_seconds")),
        calibrate=_as(bool, _get(options, "calibrate")),
        proportional=_as(bool, _get(options, "proportional")),
    )


def _micro_batch(run: Any) -> tuple[int, float, bool]:
    if not isinstance(run, list) or len(run) not in (2, 3):
        raise InvalidArgument("a micro-batch is [items, seconds] or [items, seconds, excluded]")
    return _as(int, run[0]), _as(float, run[1]), _as(bool, run[2] if len(run) == 3 else False)


def _pair(model: Any) -> tuple[float, float]:
    if not isinstance(model, list) or len(model) != 2:
        raise InvalidArgument("a model is [fixed_seconds, per_item_seconds] or null")
    return _as(float, model[0]), _as(float, model[1])


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise InvalidArgument(f'"{max(names, key=names.count)}" stands there twice')
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_members)
_KINDS: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
_KINDS |= {str: "a string", list: "an array", dict: "an object"}


def _as(kind: type[_T], value: Any) -> _T:
    """Return `value` if it has this type. A whole number counts as a float; a boolean does not count as a number."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is float and (kind is int or not math.isfinite(value)):
        raise InvalidArgument(f"{value} is not a {'whole' if kind is int else 'finite'} number")
    if type(value) is not kind:
        raise InvalidArgument(f"{_KINDS[kind]} expected, {_KINDS[type(value)]} is there")
    return value


def _all(kind: type[_T], values: Any) -> list[_T]:
    return [_as(kind, value) for value in _as(list, values)]


def _unless_null(kind: type[_T], value: Any) -> _T | None:
    return None if value is None else _as(kind, value)


def _get(entry: Any, name: str) -> Any:
    """Return the member of a JSON object. Raises InvalidArgument if there is none."""
    if name not in _as(dict, entry):
        raise InvalidArgument(f'"{name}" is missing')
    return entry[name]
