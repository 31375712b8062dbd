"""What the devices ran, step by step, read from a ledger so that it can be run again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline import InvalidArgument
from paceline._words import plural
from paceline.torch._memory import MemoryCaps, Sized
from paceline.torch._places import Places

Span = tuple[int, int]


class StepClaims:
    """Of one step: the micro-batches of each device in the order they ran, and the pieces that each was worked off in.

    `number` is its place among the steps of the ledger: what an entry calls its step is the number of a decision, and steps with costs and
    steps without are decided apart.
    """

    def __init__(self, entry: dict[str, Any], devices: int, number: int) -> None:
        self.batch_size = int(entry["batch_size"])
        self.order: list[int] | None = entry.get("order")  # of the items, where they were dealt out by cost
        if self.order is not None and sorted(self.order) != list(range(self.batch_size)):
            raise ValueError(f"the order of step {number} does not have every item once")
        self.lanes: list[list[Span]] = [[] for _ in range(devices)]
        for device, begin, end, *_ in entry["ran"]:
            self.lanes[device].append((begin, end))
        self.pieces: list[list[Span]] = [[] for _ in range(devices)]
        for device, begin, end in entry.get("pieces", []):
            self.pieces[device].append((begin, end))
        if "pieces" in entry and not all(map(_same_items, self.lanes, self.pieces)):
            raise ValueError(f"the pieces of step {number} are not what its devices ran")


def _same_items(ran: list[Span], pieces: list[Span]) -> bool:
    """Whether the pieces lie one after the other, and end where each of those that ran ends."""
    left = list(pieces)
    for begin, end in ran:
        while begin < end and left and left[0][0] == begin < left[0][1] <= end:
            begin = left.pop(0)[1]
        if begin != end:
            return False
    return not left


class ReplayedCaps(MemoryCaps):
    """The pieces of a step that ran once; nothing is measured, and what does not fit fails."""

    def __init__(self, places: Places, claims: StepClaims) -> None:
        super().__init__(places)
        self._claims = claims

    def pieces(self, device: int, begin: int, end: int, batch: Sized, least: int = 1) -> Iterable[Span]:
        """Those that ran, or all at once."""
        within = [piece for piece in self._claims.pieces[device] if begin <= piece[0] and piece[1] <= end]
        return within or [(begin, end)]

    def shrink(self, device: int, begin: int, end: int, batch: Sized, error: BaseException, least: int = 1) -> bool:
        """Smaller pieces would be another run."""
        return False


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
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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
        """Of the next step; it stays the next one until `advance`, so that a step that fails can be repeated."""
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
        """The step was committed."""
        self._next += 1
