"""Reads from a ledger what the devices ran, step by step, so that it can run again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import InvalidArgument
from paceline._replay import is_cut_off
from paceline._words import plural

Span = tuple[int, int]


class StepClaims:
    """The claims of one step: each device's micro-batches in the order in which they ran, and the pieces that each was run in.

    `number` is the step's place in the ledger. The ``step`` of an entry is the number of a decision instead. Steps with
    costs and steps without count their decisions apart.
    """

    def __init__(self, entry: dict[str, Any], devices: int, number: int) -> None:
        self.batch_size = int(entry["batch_size"])
        self.order: list[int] | None = entry.get("order")  # the order of the items, if they were dealt out by cost
        if self.order is not None and sorted(self.order) != list(range(self.batch_size)):
            raise ValueError(f"the order of step {number} does not have every item once")
        self.micro_batches: list[list[Span]] = [[] for _ in range(devices)]
        for device, begin, end, *_ in entry["ran"]:
            self.micro_batches[device].append((begin, end))
        self.pieces = self.micro_batches
        if "pieces" in entry:
            self.pieces = [[] for _ in range(devices)]
            for device, begin, end in entry["pieces"]:
                self.pieces[device].append((begin, end))
            if not all(map(_same_items, self.micro_batches, self.pieces)):
                raise ValueError(f"the pieces of step {number} are not what its devices ran")


def _same_items(ran: list[Span], pieces: list[Span]) -> bool:
    """Whether the pieces follow one another, and one ends wherever a micro-batch ends."""
    left = list(pieces)
    for begin, end in ran:
        while begin < end and left and left[0][0] == begin < left[0][1] <= end:
            begin = left.pop(0)[1]
        if begin != end:
            return False
    return not left


class ClaimScript:
    """The steps of a ledger, one after the other.

    Raises
    ------
    InvalidArgument
        If it is no ledger, holds no claims, or is of other devices.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str], run: str | None = None) -> None:
        self._call = "step" if run is None else f"run {run}"
        self._end = "replay_claims(None)" if run is None else f"replay_claims(None, run={run!r})"
        self._path = os.fspath(path)
        self._steps: list[StepClaims] = []
        self._next = 0
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        if lines[1:] and is_cut_off(lines[-1]):
            del lines[-1]
        try:
            entries = [json.loads(line) for line in lines]
            devices = [device["name"] for device in entries[0]["options"]["devices"]]
            if len(devices) == len(names):
                claims = [entry["claims"] for entry in entries if "claims" in entry]
                self._steps = [StepClaims(entry, len(names), number) for number, entry in enumerate(claims)]
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidArgument(
                f"replay_claims: {self._path} is no ledger that write_ledger wrote: {error}."
            ) from error
        if len(devices) != len(names):
            raise InvalidArgument(
                f"replay_claims: {self._path} is of {plural(len(devices), 'device')} ({', '.join(devices)}); this trainer has {len(names)}."
            )
        if not self._steps:
            raise InvalidArgument(f"replay_claims: {self._path} holds no step that ran to its end.")

    def __len__(self) -> int:
        return len(self._steps)

    def peek(self, batch_size: int, *, by_cost: bool) -> StepClaims:
        """The claims of the next step. It stays the next one until `advance`, so that a step that fails can be repeated."""
        if self._next == len(self._steps):
            raise InvalidArgument(
                f"{self._call}: {self._path} has run again to its end, {plural(len(self._steps), 'step')}. End the replay with {self._end}."
            )
        claims = self._steps[self._next]
        if claims.batch_size != batch_size:
            raise InvalidArgument(
                f"{self._call}: a batch of {plural(batch_size, 'item')} where step {self._next} of {self._path} had {claims.batch_size}. Replay with the "
                "same batches in the same order."
            )
        if by_cost and claims.order is None:
            raise InvalidArgument(
                f"{self._call}: cost= while claims are replayed of a step that ran without. Leave it out, or end the replay first: {self._end}."
            )
        return claims

    def advance(self) -> None:
        """Go to the next step, after this one was committed."""
        self._next += 1
