"""Forward-mode differentiation, whose dual level belongs to the process."""

from __future__ import annotations

from typing import Any

from paceline.torch._devices import forward_ad
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Bound, Context, Feature
from paceline.torch._run.recipe import Retry


class ForwardAD(Feature):
    """Holds the dual level while several devices run. They use it together from the first error on that says that one of them needs it."""

    def bind(self, call: Call) -> Bound | None:
        return self if len(call.all_places) > 1 else None

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        if len(run.call.all_places) < 2 or forward_ad.wanted(error) is None:
            return None
        if not run.seen.forward_ad:
            run.seen.forward_ad = True
            return Retry("a dual level is entered")
        return forward_ad.refused(error)

    def run(self, run: Executor) -> Context:
        return forward_ad.Held(run.seen.forward_ad)
