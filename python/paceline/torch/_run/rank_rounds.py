"""Where the devices of all ranks put statistics together, in the middle of their micro-batches."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline import Error, InvalidArgument
from paceline.torch._devices.meeting import MeetingOffError, Merge
from paceline.torch._replicas.batch_norm import using_batch_statistics
from paceline.torch._replicas.replicas import Replicas

# What a rank says in a row.
IN_A_ROUND, ENDED, FAILED = range(3)
# What follows from the rows of all ranks.
GOES_ON, DONE, OFF, APART = range(4)

_HEAD = 3  # numbers of a row before its values: what the rank says, the topic, how many values
_LOOK = timedelta(seconds=0.2)  # between two looks of a waiting thread, as in `Meeting`

Row = tuple[int, int, int]  # the head of a row
# Starts to gather a row from all ranks. Returns what has ``is_completed()`` and ``wait()``, and the rows, in the order of the ranks.
Send = Callable[[torch.Tensor], tuple[Any, Sequence[torch.Tensor]]]


def judged(rows: Sequence[Row]) -> int:
    """What follows from the rows of all ranks, the same on every rank. Unless they go on, no rank sends another row in this attempt."""
    if any(row[0] == FAILED for row in rows):
        return OFF
    if len(set(rows)) > 1:
        return APART
    return DONE if rows[0][0] == ENDED else GOES_ON


def without_items(call: str, ranks: Sequence[int]) -> InvalidArgument:
    """What to raise, on all ranks, if some have no items to meet with."""
    return InvalidArgument(
        f"{call}: rank {', '.join(map(str, ranks))} has no items, and with batch_norm='synchronised' all ranks meet in each normalisation. Give each rank an "
        "item of every batch at least, put the normalisations into evaluation mode, or use batch_norm='apart'."
    )


class Rounds:
    """The rounds of an attempt in which all ranks take part.

    In each round every rank sends one row, and gets the rows of all. A rank sends its last row when its devices have ended, or have failed. So
    all ranks send equally many rows in an attempt, whatever happens on one of them, and none is left for the next attempt.

    Requires: all ranks `begin` an attempt, agree on it before their first row, and call `end`.

    Threads: `meet` is called by one worker at a time, and `end` on the caller's thread, where workers may be left behind.

    Parameters
    ----------
    send
        Starts to gather the rows of all ranks.
    numbers
        What errors call the ranks.
    """

    def __init__(self, send: Send, numbers: Sequence[int]) -> None:
        self._send, self._numbers = send, numbers
        self._lock = threading.Lock()
        self._topics: list[str] = []
        self._width = 0  # the numbers of a row
        self._mark = 0
        self._key: Any = None  # what these three were made for
        self._sending = False  # stays True if an interrupt comes while a row is sent
        self._flight: Any = None  # a row that was sent, whose answer nobody has taken yet
        self._rows: list[Row] = []  # the heads of the last round
        self._verdict = DONE
        self._error: Exception | None = None  # of an exchange that has failed
        self.waited = 0.0  # seconds of this attempt in which all devices of this rank waited for others

    def mark(self, replicas: Replicas) -> int:
        """A checksum of the modules in which ranks meet, equal on all ranks. 0 if there are none."""
        key = replicas.generation, replicas.modes
        if key != self._key:
            norms: list[tuple[str, Any]] = list(replicas.norms)
            meeting = [(name, part.num_features) for name, part in using_batch_statistics(norms)]
            self._mark = zlib.crc32(repr(meeting).encode()) or 1 if meeting else 0
            names = dict.fromkeys(name or "the module" for name, _ in norms)
            self._topics = [f"the {way} of {name}" for name in names for way in ("forward", "backward")]
            self._width = _HEAD + 1 + 2 * max((part.num_features for _, part in norms), default=0)
            self._key = key
        return self._mark

    def begin(self) -> None:
        """All ranks begin an attempt. The last `mark` says in which modules they meet."""
        self._verdict, self._rows, self._sending, self._flight, self._error = GOES_ON, [], False, None, None
        self.waited = 0.0

    @property
    def is_open(self) -> bool:
        """Whether ranks meet in the present attempt."""
        return self._verdict == GOES_ON and self._error is None

    @property
    def is_off(self) -> bool:
        """Whether another rank has left the present attempt, or cannot be reached."""
        return self._verdict == OFF or self._error is not None

    def meet(self, topic: str, mine: torch.Tensor, merge: Merge) -> torch.Tensor:
        """What `merge` makes of what all ranks bring, in the order of the ranks. Called on a worker, for all devices of this rank.

        Raises
        ------
        MeetingOffError
            If another rank has failed, cannot be reached, or makes another attempt.
        InvalidArgument
            On all ranks, if they have come for different topics, or if one has ended.
        """
        values = mine.reshape(-1)
        row = self._row(IN_A_ROUND, self._topics.index(topic), values)
        with self._lock:
            if not self.is_open:
                raise MeetingOffError
            since = time.perf_counter()
            try:
                found = self._exchange(row)
            except Error:  # an interrupt
                raise
            except Exception as error:  # raised on the caller's thread, which knows what to say of the ranks
                self._error = error
                raise MeetingOffError from error
            finally:
                self.waited += time.perf_counter() - since
            if self._verdict == APART:
                raise self._apart()
            if self._verdict == OFF:
                raise MeetingOffError
        return merge([one[_HEAD : _HEAD + len(values)].view_as(mine) for one in found])

    def end(self, *, failed: bool) -> InvalidArgument | None:
        """Send the last row of this rank in the attempt, unless nobody sends any more. Called on the caller's thread.

        Returns
        -------
        InvalidArgument or None
            What is wrong if ranks have not run the same.

        Raises
        ------
        Exception
            What the exchange has raised, here or on a worker.
        """
        with self._lock:
            error, self._error = self._error, None
            if error is None and self._sending:
                error = RuntimeError("interrupted while statistics were sent")
            if error is not None:
                self._verdict, self._sending, self._flight = OFF, False, None
                raise error
            if self._flight is not None:  # of a worker that was interrupted
                self._landed()
            if self._verdict == GOES_ON:
                self._exchange(self._row(FAILED if failed else ENDED))
            return self._apart() if self._verdict == APART else None

    def _row(self, state: int, topic: int = 0, values: torch.Tensor | None = None) -> torch.Tensor:
        row = torch.zeros(self._width, dtype=torch.float64, device="cpu")
        count = 0 if values is None else len(values)
        if count > self._width - _HEAD:
            raise InvalidArgument(
                f"batch_norm='synchronised': {self._topics[topic]} has more channels than num_features of any normalisation of the module, "
                f"{(self._width - _HEAD) // 2}, which is what ranks have room for. Make the normalisation with its own number of channels."
            )
        row[0], row[1], row[2] = state, topic, count
        if values is not None:
            row[_HEAD : _HEAD + count] = values
        return row

    def _exchange(self, row: torch.Tensor) -> Sequence[torch.Tensor]:
        self._sending = True
        self._flight = self._send(row)
        self._sending = False
        return self._landed()

    def _landed(self) -> Sequence[torch.Tensor]:
        """Wait for the rows of all ranks. If that is interrupted, it may be called again."""
        work, found = self._flight
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except Error:  # an interrupt
                raise
            except RuntimeError:  # the time is over; wait() below raises all else
                pass
        work.wait()
        self._rows = [
            (int(state), int(topic), int(count)) for state, topic, count in (one[:_HEAD].tolist() for one in found)
        ]
        self._verdict = judged(self._rows)
        self._flight = None
        rows: Sequence[torch.Tensor] = found
        return rows

    def _apart(self) -> InvalidArgument:
        """What to raise if ranks have not run the same: the same text on all of them."""
        first = self._rows[0]
        other = next(rank for rank, row in enumerate(self._rows) if row != first)
        theirs = self._rows[other]
        does = [f"rank {self._numbers[rank]} {self._does(row)}" for rank, row in ((0, first), (other, theirs))]
        more = " with another number of channels" if first[:2] == theirs[:2] else ""
        return InvalidArgument(
            f"batch_norm='synchronised': {does[0]}, and {does[1]}{more}. All parts of a batch have to run the same normalisations in the same order, "
            "forward and backward. Let loss_fn take no branch that depends on its slice, or use batch_norm='apart'."
        )

    def _does(self, row: Row) -> str:
        return "has ended its part" if row[0] == ENDED else f"runs {self._topics[row[1]]}"


_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of host memory, by the caller's group


def rounds_of(group: Any, place: torch.device) -> Rounds:
    """Rounds of all ranks of a process group, on a group of their own that takes host memory. All ranks call this.

    So rounds do not depend on the order of the gradients, which are sent meanwhile. All trainers with `group` have the same second group,
    because their steps do not overlap.

    Parameters
    ----------
    place
        A device whose memory `group` takes.
    """
    beside = _groups.get(group)
    if beside is None:
        # Only the members make a group of some ranks. Its name is then that of its ranks, which a counter in each process is not.
        ranks = dist.get_process_group_ranks(group)
        options: dict[str, Any] = {}
        if len(ranks) < dist.get_world_size():
            options = {"ranks": ranks, "use_local_synchronization": True}
        beside = dist.new_group(backend="gloo", timeout=_time_limit_of(group, place), **options)
        _groups[group] = beside
    size = dist.get_world_size(beside)

    def send(row: torch.Tensor) -> tuple[Any, Sequence[torch.Tensor]]:
        found = [torch.empty_like(row) for _ in range(size)]
        return dist.all_gather(found, row, group=beside, async_op=True), found

    return Rounds(send, dist.get_process_group_ranks(beside))


def _time_limit_of(group: Any, place: torch.device) -> timedelta | None:
    """The group's own time limit. None if its backend does not tell, for that of gloo."""
    options = getattr(group._get_backend(place), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit
