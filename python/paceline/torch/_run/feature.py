"""What a feature is: a file that adds something to calls that need it, and costs the others nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from paceline.torch._devices.caller_state import NOTHING
from paceline.torch._replicas.replicas import Replicas
from paceline.torch._run.call import Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.recipe import Constraints, Recipe, Retry, overriding
from paceline.torch._run.workload import Workload

Context = contextlib.AbstractContextManager[Any]
# Whether each step makes its recipe anew, and compares: for tests.
_CHECKS = os.environ.get("PACELINE_CHECK_RECIPES") == "1"


class Bound:
    """A feature in all attempts of one recipe. A method that a class does not override is never called. What is of one attempt is set in `begin` or `run`."""

    def begin(self, run: Executor) -> None:
        """An attempt begins. Its plan is made."""
        raise TypeError("Bound.begin is for subclasses")

    def run(self, run: Executor) -> Context:
        """A context around all devices, on the caller's thread."""
        raise TypeError("Bound.run is for subclasses")

    def micro_batch(self, run: Executor, device: int, begin: int, end: int) -> Context:
        """A context around one micro-batch, on its worker."""
        raise TypeError("Bound.micro_batch is for subclasses")

    def failed(self, device: int) -> None:
        """A micro-batch of this device has raised. On its worker."""
        raise TypeError("Bound.failed is for subclasses")

    def ended(self, device: int) -> None:
        """Called on a worker: its device runs nothing more, or was cancelled before it ran anything."""
        raise TypeError("Bound.ended is for subclasses")

    def retry(self, run: Executor, outcome: Any, *, failed: bool) -> Retry | None:
        """Why the run does not count, after the devices have ended. `failed`: it has failed anyway."""
        raise TypeError("Bound.retry is for subclasses")

    def check(self, run: Executor, outcome: Any) -> None:
        """Raise for what would be silently wrong, before anything is committed."""
        raise TypeError("Bound.check is for subclasses")


class Feature(Bound):
    """Adds something to the calls of one trainer. It may bind itself, since one call runs at a time."""

    def key(self, call: Call) -> Hashable:
        """What `bind` looks at, beside what is in the key of every recipe (`Features.recipe_of`)."""
        raise TypeError("Feature.key is for subclasses")

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        """What a plan may do with the module as it is now, as far as the module and this kind of work say."""
        return Constraints()

    def call(self, number: int, running: Callable[[], Executor | None]) -> Context | None:
        """A context around a whole call, with all its attempts. `running`: what runs now. None: nothing."""
        return None

    def close(self) -> None:
        """The trainer ends."""

    def bind(self, call: Call) -> Bound | None:
        """What it does in attempts like this one. None: nothing."""
        return None

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        """What follows from an error of the user's code: another attempt, or a better error. None: nothing."""
        return None

    def explain(self) -> str:
        """Lines for people; empty if there is nothing to say."""
        return ""


class Features:
    """All features of one trainer, in the order in which they act."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._all = list(features)
        self._changes = 0
        self._sort()

    def _sort(self) -> None:
        self._constraints = overriding(Feature, self._all, "constraints")
        self._calls = overriding(Feature, self._all, "call")
        self._bind = overriding(Feature, self._all, "bind")
        self._keys = overriding(Feature, self._all, "key")
        self.kinds = set(map(type, self._all))
        self._changes += 1

    def add(self, feature: Feature) -> None:
        """Take part from the next call on."""
        self._all.append(feature)
        self._sort()

    def remove(self, feature: Feature) -> None:
        """Take part no more."""
        self._all = [one for one in self._all if one is not feature]
        self._sort()

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        """What holds with all of them."""
        found = Constraints()
        for constraints in self._constraints:
            found = found.both(constraints(replicas, work))
        return found

    def recipe_of(self, call: Call) -> Recipe:
        """The recipe of an attempt: the last one of this kind of work, as long as nothing has changed that it was made from."""
        asked, replicas, work, seen = call.asked, call.all_replicas, call.work, call.seen
        key = (
            self._changes,
            replicas.generation,
            replicas.modes,
            call.keep,
            asked.costs is not None,
            asked.like,
            seen.compiled,
            seen.compiler_captures,
            seen.waits,
            seen.drawing.draws,
            work.normalises,
            work.writes_buffers,
            *[key(call) for key in self._keys],
        )
        known: Recipe | None = work.recipe
        if known is not None and known.key == key:
            if _CHECKS:
                anew = self._made(call, key)
                assert (anew.constraints, anew.names) == (known.constraints, known.names), (anew.names, known.names)
            call.recipe = known
            return known
        made = work.recipe = self._made(call, key)
        return made

    def _made(self, call: Call, key: Hashable) -> Recipe:
        """A new recipe. Its constraints are those of the forward that it follows, if it follows one."""
        like = call.asked.like
        constraints = self.constraints(call.all_replicas, call.work) if like is None else like
        call.recipe = Recipe(constraints)
        call.recipe = Recipe(constraints, Bound, [one for bind in self._bind if (one := bind(call)) is not None], key)
        return call.recipe

    def around_call(self, number: int, running: Callable[[], Executor | None]) -> Context:
        """A context around the whole call of this number."""
        contexts = [one for call in self._calls if (one := call(number, running)) is not None] if self._calls else []
        if len(contexts) < 2:
            return contexts[0] if contexts else NOTHING
        with contextlib.ExitStack() as stack:
            for one in contexts:
                stack.enter_context(one)
            return stack.pop_all()

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException:
        """What follows from an error of the user's code: another attempt, or the error, which may be a better one."""
        for feature in self._all:
            mended = feature.mend(run, error, outcome)
            if isinstance(mended, Retry):
                return mended
            error = error if mended is None else mended
        return error

    def explain(self) -> str:
        """Lines for people."""
        return "".join(feature.explain() for feature in self._all)

    def close(self) -> None:
        """The trainer ends."""
        for feature in self._all:
            feature.close()
