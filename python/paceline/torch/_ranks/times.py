"""The times of all ranks, from which rank 0 decides on their shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from paceline import InvalidArgument
from paceline.balance import Balancer
from paceline.torch._batch.global_sampler import GlobalBatchSampler, Stamp
from paceline.torch._ranks.clock import Reading
from paceline.torch._ranks.meeting import Meeting, Row
from paceline.torch._run.rank_shares import RankShares

# The host may be some steps ahead of a GPU. What is not there after so many steps is given up.
_MOST_WAITING = 8


class _Timed(NamedTuple):
    """What the clock has read for the batches of an optimizer's step."""

    batch: Stamp  # one that stands for all of them
    readings: list[Reading]
    between: float  # seconds of own work before the step; negative if unknown


class Times:
    """Brings the times of steps to rank 0, and its decisions to all ranks."""

    def __init__(self, sampler: GlobalBatchSampler, meeting: Meeting, balancer: Balancer | None) -> None:
        self.last: list[dict[str, float]] = []  # items and seconds of each rank, in the last step that all know
        self.balancer = balancer
        self._sampler = sampler
        self._meeting = meeting
        self.dealt = RankShares(sampler, balancer)
        self._part: list[tuple[Stamp, Reading]] = []  # since the optimizer's last step
        self._between = -1.0  # seconds of own work before the batch that was added last
        self._timed: deque[_Timed] = deque()  # what not all ranks know yet
        # What all ranks tell of the first of these, on its way.
        self._told: Callable[[], list[list[float]]] | None = None
        with sampler.lock:
            self._follow(0)

    def add(self, stamp: Stamp, reading: Reading, between: float) -> None:
        """After a batch."""
        if self._part and self._part[-1][0].serial != stamp.serial - 1:
            self._part.clear()  # the loop has begun anew in between
        self._part.append((stamp, reading))
        self._between = between

    def exchange(self) -> None:
        """After the last batch of an optimizer's step: look at what all ranks have told a step ago, and tell what there is to tell now.

        A step hides how long that takes. So times are known, and a rank at another batch is found out, one step later.
        """
        dealt, sampler, rank = self.dealt, self._sampler, self._meeting.rank
        stamp = self._part[-1][0]
        between = self._between if len(self._part) == 1 else -1.0
        self._timed.append(_Timed(_average([each for each, _ in self._part]), [one for _, one in self._part], between))
        self._part.clear()
        # No batch is drawn meanwhile: new shares hold after those that each rank has drawn by now.
        with sampler.lock:
            told, self._told = self._told, None
            if told is not None:
                self._take([Row(*numbers) for numbers in told()])
            dealt.decide()
            batch, readings, between = self._timed[0]
            ready = all(reading.ready() for reading in readings)
            seconds = sum(reading.seconds() for reading in readings) / len(readings) if ready else -1.0
            mine = Row(sampler.mark(stamp), batch.shares[rank], seconds, between, dealt.plan)
            self._told = self._meeting.gather(mine)

    def _take(self, rows: list[Row]) -> None:
        for other, row in enumerate(rows):
            if row.batch != rows[0].batch:
                self.forget()
                raise InvalidArgument(
                    f"step: rank {other} is at another global batch than rank 0, or was dealt it in another way. All ranks take all batches of "
                    "batches(loader) in the same order, and load the same states."
                )
        if all(row.seconds >= 0 for row in rows):
            self.last = [{"items": row.items, "seconds": row.seconds} for row in rows]
            self.dealt.measured(rows, self._timed.popleft().batch)
        elif len(self._timed) > _MOST_WAITING:
            self._timed.popleft()
        if rows[0].plan != self.dealt.followed:
            self._follow(int(max(drawn for (drawn,) in self._meeting.gather([self._sampler.drawn])())))

    def forget(self) -> None:
        """Leave out what was measured and not told: ranks go on somewhere else. What is on its way comes on all of them."""
        self._part.clear()
        self._timed.clear()

    def _follow(self, first: int) -> None:
        """Bring the shares that rank 0 has decided on to all ranks, for global batches from `first` on."""
        plan, *shares = self._meeting.from_first([self.dealt.plan, *self.dealt.shares])
        self.dealt.follow(first, plan, shares)


def _average(stamps: list[Stamp]) -> Stamp:
    """The batch that stands for several in the record."""
    last = stamps[-1]
    if any(stamp.plan != last.plan or stamp.size != last.size for stamp in stamps):
        return last._replace(plan=-1)  # it is evidence for no plan
    work = zip(*(stamp.work for stamp in stamps), strict=True)
    return last._replace(work=tuple(sum(of_rank) // len(stamps) for of_rank in work))
