"""Questions to a trainer about other devices, or fewer of them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict

from paceline import InvalidArgument
from paceline._page.run import milliseconds
from paceline._worth import Worth, worth_of
from paceline.balance import WhatIfAnswer
from paceline.torch._run.alone import Measured
from paceline.torch._trainer.pages import Pages
from paceline.torch._trainer.step_gaps import StepGaps

_RECENT = 50  # steps, as many as the gaps between steps are known of


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

        All seconds are from one step to the next, with `prices` and without: the work of the device that ends last, the reduction, what recent steps of several devices
        took beyond that, the trainer's own part of a call, and on host devices the time between two steps, with input and optimizer. The last two count once at
        least 8 steps have followed each other with no other call of the trainer in between.

        Devices that work side by side hinder each other. So if some are removed, the others get faster. By how much is known from small
        steps that one device ran alone (see `balance`). Before such steps, and for longer ones, the others are assumed to be as fast as now.
        ``text`` says which of the two applies.

        Parameters
        ----------
        speeds
            Device names and factors on their present speed: ``{"host:1": 2.0}`` is twice as fast.
        add
            ``(like, speed)`` for each: one more device like the named one, so many times as fast.
        remove
            The names of devices that would get no work.
        batch_size
            Default: the size that most of the last 50 steps had. After a step with `cost`, and for ranks with lengths, batches and shares are work, as in `explain`.
        of
            ``"ranks"``, on rank 0 after `batch_sampler`: how global batches would be dealt out to the ranks, whose names are ``"rank 0"``, ``"rank 1"``, ...
        prices
            What an hour of each device costs, in any currency, by name or for each one of a kind: ``{"cuda:0": 2.1, "host": 0.05}``. Then the answer is a
            `paceline.balance.Worth`: seconds and cost of 1,000 items with each useful subset of the devices, the fastest and the cheapest one. A device that is idle
            for more than 30 % of the steps is named, with the cure.

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
            dealt = self._dealt
            if dealt is None:
                raise InvalidArgument("what_if: of='ranks' is for rank 0 of several, after batch_sampler.")
            return dealt.what_if(**{name: value or None for name, value in asked.items()})
        if prices is not None:
            return self._worth(asked, prices)
        return self._asking()[0](**asked)

    def _asking(self) -> tuple[Callable[..., WhatIfAnswer], str]:
        """What predicts a step of any devices, and a note on what its seconds are without."""
        loop, trials = self._works.steps.step_loop, self._works.steps.alone
        if not (self._works.unused or self._works.steps.proved or loop.metrics["steps"]):
            raise InvalidArgument(
                "what_if: it predicts what `step` takes, and no step has run. It does not predict calls of the module, predictions or runs with a name, "
                "whose times report() has. Run a few steps first."
            )
        measured = None if trials is None else trials.measured
        overhead, note = self._overhead(measured)
        # After steps with costs the estimates may be of work instead of items.
        factors = {} if measured is None or loop.items is not None else self._relief(measured)

        def ask(**asked: Any) -> WhatIfAnswer:
            answer = loop.what_if(**asked, overhead_seconds=overhead)
            if not factors:
                return answer
            working = [device for device, share in enumerate(answer.shares) if share > 0]
            known = [factors[device] for device in working if device in factors] if len(working) == 1 else []
            return loop.what_if(**asked, overhead_seconds=overhead, alone=statistics.fmean(known or factors.values()))

        return ask, note

    def _worth(self, asked: dict[str, Any], prices: Mapping[str, float]) -> Worth:
        """What `paceline.balance.worth` says of a ledger, with the time of the loop where it is known."""
        ask, note = self._asking()
        present, run = ask(**asked), self._runs()[0]
        run.unit = "items" if " items would take" in present.text else "work"  # steps of both kinds may have run
        batch_size = asked["batch_size"] or sum(present.shares)
        found = worth_of(partial(ask, speeds=asked["speeds"]), run, prices, asked["add"], asked["remove"], batch_size)
        found.notes.append(note)
        return found

    def _recent(self) -> list[Any]:
        rows = self._works.steps.step_loop.history
        return rows[-max(1, _RECENT // rows[0]["steps"]) :] if rows else []

    def _overhead(self, measured: Measured | None = None) -> tuple[float, str]:
        """Seconds from one step to the next beside what the devices do, and a note on them."""
        medians = None if self._on_gpus else self._gaps.medians()
        inside = medians[2] if medians is not None else 0.0 if measured is None else measured.together
        last = self._recent()
        devices = statistics.median([row["step_seconds"] / row["steps"] for row in last]) if last else inside
        own = max(0.0, inside - devices)
        if medians is None:
            return own, "The time between steps does not count: it is not known."
        between = medians[0]
        said = f"Between two steps {milliseconds(between)} pass, and {milliseconds(own)} in the call of step beside the devices' work."
        return between + own, f"{said} Both count."

    def _relief(self, measured: Measured) -> dict[int, float]:
        """What cannot be estimated from devices side by side: by device, its time alone over that beside the others."""
        factors: dict[int, float] = {}
        for device, alone in measured.alone.items():
            others = [name for index, name in enumerate(self._works.names) if index != device]
            with contextlib.suppress(InvalidArgument):  # another thread may just have retired the device
                estimated = self._works.steps.step_loop.what_if(remove=others, batch_size=measured.size)
                own = max(0.0, measured.together - estimated.present_seconds)
                factors[device] = max(0.05 * alone.step, alone.step - own) / estimated.seconds
        return factors
