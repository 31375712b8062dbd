"""Questions to a trainer about other devices, or fewer of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from paceline import InvalidArgument
from paceline._page.run import Run, milliseconds
from paceline._worth import Worth, waiting, worth_of
from paceline.balance import WhatIfAnswer
from paceline.torch._run.alone import Measured
from paceline.torch._trainer.pages import Pages
from paceline.torch._trainer.step_gaps import StepGaps

_RECENT = 50  # rows of the history, which are steps in a short run


class Asked(TypedDict, total=False):
    """The arguments of `Asks.what_if` beside `prices`, on which the type of its answer depends."""

    speeds: Mapping[str, float] | None
    add: Sequence[tuple[str, float]]
    remove: Sequence[str]
    batch_size: int | None
    of: Literal["devices", "ranks"]


class Asks(Pages):
    """What would be if devices were other ones. Changes nothing."""

    _gaps: StepGaps

    def what_if(
        self,
        *,
        speeds: Mapping[str, float] | None = None,
        add: Sequence[tuple[str, float]] = (),
        remove: Sequence[str] = (),
        batch_size: int | None = None,
        of: Literal["devices", "ranks"] = "devices",
        prices: Mapping[str, float] | None = None,
    ) -> WhatIfAnswer | Worth:
        """What the best split of `step` and the time of a step would be if devices had other speeds, came or left. Changes nothing.

        Devices that work side by side hinder each other. So if some are removed, the others get faster. By how much is known from small
        steps that one device ran alone (see `balance`); all seconds then include the trainer's own part of a step. Before such steps, and
        for longer ones, the others are assumed to be as fast as now. ``text`` says which of the two applies.

        Parameters
        ----------
        speeds
            Device names and factors on their present speed: ``{"host:1": 2.0}`` is twice as fast.
        add
            ``(like, speed)`` for each: one more device like the named one, so many times as fast.
        remove
            The names of devices that would get no work.
        batch_size
            Default: the size of the last step. After a step with `cost`, and for ranks with lengths, batches and shares are work, as in `explain`.
        of
            ``"ranks"``, on rank 0 after `batch_sampler`: how global batches would be dealt out to the ranks, whose names are ``"rank 0"``, ``"rank 1"``, ...
        prices
            What an hour of each device costs, in any currency, by name or for each one of a kind: ``{"cuda:0": 2.1, "host": 0.05}``. Then the answer is a
            `paceline.balance.Worth`: seconds and cost of 1,000 items with each useful subset of the devices, the fastest and the cheapest one. On host devices the time
            between steps counts, too. A device that is idle for more than 30 % of the steps is named, with the cure.

        Raises
        ------
        InvalidArgument
            Before the first timing, for wrong arguments, a name that is not there, or a speed that is not above zero. For ranks where none are dealt out to.
        """
        given: dict[str, Any] = {"speeds": speeds, "add": add, "remove": remove, "batch_size": batch_size}
        # what_if is called twice, so iterators have to be kept.
        asked: dict[str, Any] = {
            name: tuple(value) if isinstance(value, Iterator) else value for name, value in given.items()
        }
        if of == "ranks":
            if prices is not None:
                raise InvalidArgument("what_if: prices= is for devices, not for of='ranks'.")
            reports: Any = self
            if reports._dealt is None:
                raise InvalidArgument("what_if: of='ranks' is for rank 0 of several, after batch_sampler.")
            dealt: WhatIfAnswer = reports._dealt.what_if(**{name: value or None for name, value in asked.items()})
            return dealt
        if prices is not None:
            return self._worth(asked, prices)
        return self._answer(asked)

    def _answer(self, asked: dict[str, Any], **outside: Any) -> WhatIfAnswer:
        """`outside`: the time of a step beside what the devices do, for trainers that have not measured a device alone."""
        answer = self._works.steps.step_loop.what_if(**asked)
        measured = None if self._works.steps.alone is None else self._works.steps.alone.measured
        # After steps with costs the estimates may be of work instead of items.
        if measured is None or self._works.steps.step_loop.items is not None:
            return self._works.steps.step_loop.what_if(**asked, **outside) if outside else answer
        working = [device for device, share in enumerate(answer.shares) if share > 0]
        return self._works.steps.step_loop.what_if(**asked, **self._relief(measured, working))

    def _worth(self, asked: dict[str, Any], prices: Mapping[str, float]) -> Worth:
        """What `paceline.balance.worth` says of a ledger, with the time of the loop where it is known."""
        present, run = self._answer(asked), self._runs()[0]
        between, outside, note = self._loop_times(run)
        overhead = {"overhead_seconds": outside} if outside else {}

        def ask(**subset: Any) -> WhatIfAnswer:
            return self._answer({"speeds": asked["speeds"], **subset}, **overhead)

        batch_size = asked["batch_size"] or sum(present.shares)
        together = waiting(run, present.present_seconds, batch_size)
        run.unit = "items" if " items would take" in present.text else "work"  # steps of both kinds may have run
        found = worth_of(ask, run, prices, asked["add"], asked["remove"], batch_size, between, together)
        found.notes.append(note)
        return found

    def _loop_times(self, run: Run) -> tuple[float, float, str]:
        """Seconds between two steps, and of a step beside what the devices do; and a note on these."""
        medians = None if self._on_gpus else self._gaps.medians()
        if medians is None or not run.rows:
            return 0.0, 0.0, "The time between steps does not count: it is not known."
        between, _, inside = medians
        steps = statistics.median(row.seconds / row.steps for row in run.rows[-_RECENT:])
        return between, max(0.0, inside - steps), f"Between two steps {milliseconds(between)} pass, which count."

    def _relief(self, measured: Measured, working: list[int]) -> dict[str, Any]:
        """What cannot be estimated from devices side by side: how much faster a device is alone, and the trainer's own part of a step."""
        factors: dict[int, float] = {}
        overhead = 0.0
        for device, alone in measured.alone.items():
            others = [name for index, name in enumerate(self._works.names) if index != device]
            estimated = self._works.steps.step_loop.what_if(remove=others, batch_size=measured.size)
            overhead = max(0.0, measured.together - estimated.present_seconds)
            factors[device] = max(0.05 * alone.step, alone.step - overhead) / estimated.seconds
        known = [factors[device] for device in working if device in factors] if len(working) == 1 else []
        return {"alone": statistics.fmean(known or factors.values()), "overhead_seconds": overhead}
