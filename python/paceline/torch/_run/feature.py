"""What a feature is: a file that adds something to calls that need it, and costs the others nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from paceline.torch._replicas.replicas import Replicas
    from paceline.torch._run.call import Call
    from paceline.torch._run.execution import Execution
    from paceline.torch._run.executor import Executor
    from paceline.torch._run.workload import Workload

Context = contextlib.AbstractContextManager[Any]


class Retry(NamedTuple):
    """Why a call runs once more, from the same state. Nothing was committed."""

    reason: str
    most: int = 1  # times in one call
    complete: bool = False  # whether all items have run
    out_of_memory: bool = False  # whether unused memory has to be given back first


class RetryError(Exception):
    """Leaves an attempt, for another one."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry.reason)
        self.retry = retry


class Constraints(NamedTuple):
    """What a plan may do. Those of several features hold together."""

    least: int = 1  # items of a micro-batch
    undivided: bool = False  # whether a device runs its share as one micro-batch
    all_items: bool = False  # whether items without weight run, too

    def both(self, other: Constraints) -> Constraints:
        """What holds under both."""
        return Constraints(
            max(self.least, other.least), self.undivided or other.undivided, self.all_items or other.all_items
        )


class Bound:
    """A feature in one attempt of a call. A method that a class does not override is never called."""

    def run(self, run: Executor) -> Context:
        """A context around all devices, on the caller's thread. The plan is made."""
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


class Feature:
    """Adds something to the calls of one trainer."""

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        """What a plan may do with the module as it is now, as far as the module and this kind of work say."""
        return Constraints()

    def call(self, execution: Execution) -> Context | None:
        """A context around a whole call, with all its attempts. None: nothing."""
        return None

    def close(self) -> None:
        """The trainer ends."""

    def bind(self, call: Call) -> Bound | None:
        """What it does in this attempt. None: nothing."""
        return None

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        """What follows from an error of the user's code: another attempt, or a better error. None: nothing."""
        return None

    def explain(self) -> str:
        """Lines for people; empty if there is nothing to say."""
        return ""


class Recipe:
    """The features that do something in an attempt, by what they do."""

    def __init__(self, constraints: Constraints, bound: Sequence[Bound] = ()) -> None:
        self.constraints = constraints
        self.run = _overriding(Bound, bound, "run")
        self.micro_batch = _overriding(Bound, bound, "micro_batch")
        self.failed = _overriding(Bound, bound, "failed")
        self.ended = _overriding(Bound, bound, "ended")
        self.retry = _overriding(Bound, bound, "retry")
        self.check = _overriding(Bound, bound, "check")


class Features:
    """All features of one trainer, in the order in which they act."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._all = list(features)
        self._sort()

    def _sort(self) -> None:
        self._constraints = _overriding(Feature, self._all, "constraints")
        self._calls = _overriding(Feature, self._all, "call")
        self._bind = _overriding(Feature, self._all, "bind")

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._all)

    def add(self, feature: Feature) -> None:
        """Take part from the next call on."""
        self._all.append(feature)
        self._sort()

    def remove(self, feature: Feature) -> None:
        """Take part no more."""
        self._all.remove(feature)
        self._sort()

    def constraints(self, replicas: Replicas, work: Workload | None) -> Constraints:
        """What holds with all of them."""
        found = Constraints()
        for constraints in self._constraints:
            found = found.both(constraints(replicas, work))
        return found

    def bind(self, call: Call) -> None:
        """Make the recipe of an attempt. Its constraints are those of the forward that it follows, if it follows one."""
        like = call.asked.like
        constraints = self.constraints(call.all_replicas, call.work) if like is None else like.constraints
        call.recipe = Recipe(constraints)
        bound = [one for bind in self._bind if (one := bind(call)) is not None]
        if bound:
            call.recipe = Recipe(constraints, bound)

    def around_call(self, execution: Execution) -> Context:
        """A context around a whole call."""
        contexts = [one for call in self._calls if (one := call(execution)) is not None]
        if len(contexts) < 2:
            return contexts[0] if contexts else contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for one in contexts:
            stack.enter_context(one)
        return stack

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


def _overriding(base: type, ones: Sequence[Any], method: str) -> list[Any]:
    inherited = getattr(base, method)
    return [getattr(one, method) for one in ones if getattr(type(one), method) is not inherited]
