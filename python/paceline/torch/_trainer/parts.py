"""The parts of a trainer, which carry out its public methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from paceline.balance import Balancer
from paceline.torch._run.execution import Execution
from paceline.torch._run.group_ranks import GroupRanks
from paceline.torch._trainer.lifetime import Lifetime
from paceline.torch._trainer.works import Works

_P = ParamSpec("_P")
_R = TypeVar("_R")


def carried_out_by(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A method of `DataParallel` that calls `method` of its attribute `part`. Name, signature and docstring are those of `method`."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._touched = True  # such as an alarm: what was asked of this trainer would not follow a new one
        return method(getattr(self, part), *args, **kwargs)

    call.__qualname__ = f"DataParallel.{method.__name__}"
    return call


class Core(NamedTuple):
    """What all parts of a trainer use."""

    works: Works
    execution: Execution
    lifetime: Lifetime


class Part:
    """One of several objects that carry out the calls of a trainer."""

    def __init__(self, core: Core) -> None:
        self._works, self._execution, self._lifetime = core

    @property
    def _dealt(self) -> Balancer | None:
        """What decides on the shares of ranks, in this process."""
        ranks = self._execution.ranks
        dealt = ranks.dealt if isinstance(ranks, GroupRanks) else None
        return None if dealt is None else dealt.balancer
