"""The rounds in which all ranks meet: every rank sends equally many rows, whatever happens on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, InvalidArgument
from paceline.torch._devices.meeting import Meeting, MeetingOffError
from paceline.torch._run.rank_rounds import APART, DONE, ENDED, FAILED, GOES_ON, IN_A_ROUND, OFF, Rounds, judged

SECONDS = 20  # after which a test has failed


class Modules:
    """The part of replicas that rounds look at."""

    generation, modes = 0, 0

    def __init__(self, channels: Sequence[int] = (2, 3), *, trains: bool = True) -> None:
        self.norms = [(str(index), nn.BatchNorm1d(count).train(trains)) for index, count in enumerate(channels)]


class Exchange:
    """Gathers the rows of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self.breaks: Callable[[int, int], None] = lambda rank, number: None
        self._condition = threading.Condition()

    def send_of(self, rank: int) -> Any:
        def send(row: torch.Tensor) -> Any:
            with self._condition:
                number = len(self.sent[rank])
                self.sent[rank].append(row)
                self._condition.notify_all()
            found = [torch.empty_like(row) for _ in self.sent]
            return _Work(self, rank, number, found), found

        return send

    def complete(self, number: int) -> bool:
        return all(len(rows) > number for rows in self.sent)


class _Work:
    def __init__(self, exchange: Exchange, rank: int, number: int, found: list[torch.Tensor]) -> None:
        self._exchange, self._rank, self._number, self._found = exchange, rank, number, found

    def is_completed(self) -> bool:
        return self._exchange.complete(self._number)

    def wait(self, limit: Any = None) -> None:
        with self._exchange._condition:
            seconds = SECONDS if limit is None else limit.total_seconds()
            if not self._exchange._condition.wait_for(self.is_completed, seconds):
                raise RuntimeError("Operation timed out!")
        self._exchange.breaks(self._rank, self._number)
        for row, rows in zip(self._found, self._exchange.sent, strict=True):
            row.copy_(rows[self._number])


def rounds_of(ranks: int, channels: Sequence[int] = (2, 3)) -> tuple[Exchange, list[Rounds]]:
    exchange = Exchange(ranks)
    found = [Rounds(exchange.send_of(rank), range(ranks)) for rank in range(ranks)]
    for one in found:
        assert one.mark(Modules(channels)) > 0  # type: ignore[arg-type]
        one.begin()
    return exchange, found


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return or raise, each on a thread of its own."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize(
    "first", [(IN_A_ROUND, 0, 5), (IN_A_ROUND, 1, 5), (IN_A_ROUND, 0, 7), (ENDED, 0, 0), (FAILED, 0, 0)]
)
@pytest.mark.parametrize("second", [(IN_A_ROUND, 0, 5), (ENDED, 0, 0), (FAILED, 0, 0)])
def test_all_ranks_judge_rows_in_the_same_way(first: Any, second: Any) -> None:
    if FAILED in (first[0], second[0]):
        wanted = OFF
    elif first != second:
        wanted = APART
    else:
        wanted = DONE if first[0] == ENDED else GOES_ON
    assert judged([first, second]) == judged([second, first]) == judged([first, second, first]) == wanted


def test_ranks_get_what_merge_makes_of_the_rows_of_all_in_the_order_of_the_ranks() -> None:
    exchange, rounds = rounds_of(3)

    def run(rank: int) -> list[torch.Tensor]:
        vector, matrix = torch.full((5,), float(rank)).double(), torch.full((2, 3), 10.0**rank).double()
        found = [
            rounds[rank].meet("the forward of 0", vector, torch.stack),
            rounds[rank].meet("the backward of 1", matrix, total),
        ]
        assert rounds[rank].end(failed=False) is None
        return found

    for stacked, summed in together(*(lambda rank=rank: run(rank) for rank in range(3))):
        assert stacked[:, 0].tolist() == [0, 1, 2]
        assert summed.shape == (2, 3)
        assert bool((summed == 111).all())
    assert [len(rows) for rows in exchange.sent] == [3, 3, 3]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_ranks_do_all_send_equally_many_rows_and_the_next_attempt_works(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice([2, 3, 4])
    exchange, rounds = rounds_of(ranks)
    topics = ["the forward of 0", "the forward of 1", "the backward of 1", "the backward of 0"]

    def script() -> list[str]:
        """Mostly the same on all ranks. A rank may stop early, fail, or run something else."""
        does, end = list(topics), "ends"
        if random.random() < 0.4:
            does = does[: random.randrange(4)]
            end = random.choice(["ends", "fails"])
        elif random.random() < 0.3:
            does[random.randrange(4)] = random.choice(topics)
        return [*does, end]

    scripts = [script() for _ in range(ranks)]

    def run(rank: int, does: list[str]) -> str:
        failed = does[-1] == "fails"
        said = ""
        try:
            for topic in does[:-1]:
                rounds[rank].meet(topic, torch.ones(4).double(), total)
        except (MeetingOffError, InvalidArgument) as error:
            failed, said = True, str(error)
        apart = rounds[rank].end(failed=failed)
        return said or str(apart or "")

    before = [len(rows) for rows in exchange.sent]
    found = together(*(lambda rank=rank: run(rank, scripts[rank]) for rank in range(ranks)))
    assert not any(isinstance(one, BaseException) for one in found), found
    assert len({len(rows) for rows in exchange.sent}) == 1
    assert len(exchange.sent[0]) > before[0]
    if all(one == scripts[0] for one in scripts) and scripts[0][-1] == "ends":
        assert found == [""] * ranks
    if not any(one[-1] == "fails" for one in scripts) and len(set(map(tuple, scripts))) > 1:
        assert len(set(found)) == 1  # the same error on all ranks
        assert "rank" in found[0]
    for one in rounds:
        one.begin()
    found = together(*(lambda rank=rank: run(rank, [*topics, "ends"]) for rank in range(ranks)))
    assert found == [""] * ranks
    assert len({len(rows) for rows in exchange.sent}) == 1


def test_a_worker_that_is_interrupted_while_it_waits_leaves_its_answer_to_the_callers_thread() -> None:
    exchange, rounds = rounds_of(2)
    interrupts = [True]

    def breaks(rank: int, number: int) -> None:
        if rank == 0 and interrupts:
            interrupts.pop()
            raise Cancelled("on purpose")

    exchange.breaks = breaks

    def interrupted() -> Any:
        with pytest.raises(Cancelled):
            rounds[0].meet("the forward of 0", torch.ones(5).double(), total)
        rounds[0].end(failed=True)
        with pytest.raises(MeetingOffError):  # a worker that was left behind
            rounds[0].meet("the forward of 1", torch.ones(5).double(), total)

    def other() -> Any:
        rounds[1].meet("the forward of 0", torch.ones(5).double(), total)
        with pytest.raises(MeetingOffError):
            rounds[1].meet("the forward of 1", torch.ones(5).double(), total)
        assert rounds[1].is_off
        rounds[1].end(failed=True)

    assert together(interrupted, other) == [None, None]
    assert [len(rows) for rows in exchange.sent] == [2, 2]


def test_an_exchange_that_fails_on_a_worker_is_raised_on_the_callers_thread() -> None:
    exchange, rounds = rounds_of(1)

    def breaks(rank: int, number: int) -> None:
        raise ConnectionError("closed")

    exchange.breaks = breaks
    with pytest.raises(MeetingOffError):
        rounds[0].meet("the forward of 0", torch.ones(5).double(), total)
    assert rounds[0].is_off
    with pytest.raises(ConnectionError):
        rounds[0].end(failed=True)
    rounds[0].end(failed=True)
    assert len(exchange.sent[0]) == 1


def test_the_mark_names_the_norms_that_use_the_batch() -> None:
    rounds = Rounds(lambda row: (None, []), [0])

    def mark(*given: Any, generation: int, **options: Any) -> int:
        modules: Any = Modules(*given, **options)
        modules.generation = generation
        return rounds.mark(modules)

    assert mark((2, 3), generation=0) == mark((2, 3), generation=1) != mark((2, 4), generation=2)
    assert mark((2, 3), generation=3, trains=False) == 0
    assert mark((), generation=4) == 0


# Two devices on each of two ranks


@pytest.mark.parametrize(("rank", "device", "when"), list(product([0, 1], [0, 1], ["first", "between"])))
def test_devices_that_wait_for_another_rank_are_woken(rank: int, device: int, when: str) -> None:
    """One device fails. All four end, on both ranks, in whatever order they come."""
    _, rounds = rounds_of(2)
    meetings = [Meeting(["host:0", "host:1"], [0, 1], one.meet) for one in rounds]

    def worker(mine: int, own: int) -> str:
        meeting = meetings[mine]
        meeting.begin(own)
        try:
            for topic in ("the forward of 0", "the forward of 1"):
                if (mine, own) == (rank, device) and (when == "first" or topic.endswith("1")):
                    raise ArithmeticError
                meeting.meet(topic, torch.ones(5).double(), total)
        except MeetingOffError:
            return "off"
        except ArithmeticError:
            meeting.call_off()
            rounds[mine].end(failed=True)  # on the caller's thread
            return "failed"
        finally:
            meeting.end(own)
        return "done"

    found = together(*(lambda one=one: worker(*one) for one in product([0, 1], [0, 1])))
    assert sorted(found) == ["failed", "off", "off", "off"]
