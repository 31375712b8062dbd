from __future__ import annotations

import collections.abc
import typing

import paceline._core.runtime

__all__: list[str] = ["StepOutcome", "Stepper"]

class StepOutcome:
    """
    How one step ended.
    """
    @property
    def claims(self) -> list[tuple[int, int, int, float, float, bool, bool]]:
        """
        What ran: (device index, begin, end, start seconds, finish seconds, excluded, correction) each.
        """
    @property
    def failed_at(self) -> tuple[int, int, int] | None:
        """
        (device index, begin, end) of the micro-batch that failed, or None.
        """

class Stepper:
    """
    One balanced step after another on one group: plan, run, commit.
    """
    def __init__(
        self,
        group: paceline._core.runtime.DeviceGroup,
        *,
        balance: str = "auto",
        weights: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] = [],
        micro_batch: typing.SupportsInt | typing.SupportsIndex = 0,
        granularity: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> None: ...
    def cancel(self) -> None:
        """
        End the step that runs, if any, once every worker has left its micro-batch.
        """
    def commit(self, outcome: StepOutcome) -> None:
        """
        Tell the balancer and the metrics about a step that succeeded.
        """
    def explain(self) -> str: ...
    def run(
        self, batch_size: typing.SupportsInt | typing.SupportsIndex, body: typing.Any, finish: typing.Any
    ) -> StepOutcome:
        """
        Run one step: body(device, begin, end, last) -> int per micro-batch, finish(device) -> gradients. See python_program.hpp.
        """
    def write_ledger(self, path: str) -> None:
        """
        Write every call of the balancer to a file of JSON lines, from before the first step on.
        """
    @property
    def events(self) -> list[typing.Any]:
        """
        The last events, oldest first.
        """
    @property
    def metrics(self) -> dict[str, typing.Any]:
        """
        One snapshot: per device share, items, busy and idle seconds, rate; totals.
        """
    @property
    def planned_shares(self) -> list[int]: ...
    @property
    def reason(self) -> str: ...
