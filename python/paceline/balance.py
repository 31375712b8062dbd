"""The closed loop that decides how a batch is split: timings in, plans out, every decision reproducible.

`Balancer` is what trainers use inside; alone it serves whoever runs the work themselves. `replay` verifies a ledger.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from paceline._core.balance import Balancer, LedgerMismatch, ReplayResult, StepPlan, WhatIfAnswer, replay_text

__all__ = ["Balancer", "LedgerMismatch", "ReplayResult", "StepPlan", "WhatIfAnswer", "replay"]


def replay(ledger: str | os.PathLike[str] | Iterable[str]) -> ReplayResult:
    """Run a fresh balancer through the calls of a ledger and compare every plan with the one written.

    Parameters
    ----------
    ledger
        The path of a file of JSON lines as `Balancer.ledger` gives them, or the lines themselves.

    Returns
    -------
    ReplayResult
        `mismatches` is empty if every decision was reproduced.

    Raises
    ------
    InvalidArgument
        Naming the line that is not what a ledger holds, or holds a call that a balancer refuses.
    OSError
        If the file cannot be read.
    """
    if isinstance(ledger, (str, os.PathLike)):
        return replay_text(Path(ledger).read_text(encoding="utf-8"))
    return replay_text("".join(line if line.endswith("\n") else line + "\n" for line in ledger))
