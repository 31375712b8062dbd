"""The closed loop that decides how to split a batch: timings in, plans out, every decision reproducible.

Trainers use `Balancer`; you can also use it alone if you run the work yourself. `replay` verifies a ledger,
and `worth` says what the devices in it are worth.
"""

from paceline._core.balance import Balancer, StepPlan, WhatIfAnswer
from paceline._replay import LedgerMismatch, ReplayResult, replay
from paceline._worth import Choice, Worth, worth

__all__ = [
    "Balancer",
    "Choice",
    "LedgerMismatch",
    "ReplayResult",
    "StepPlan",
    "WhatIfAnswer",
    "Worth",
    "replay",
    "worth",
]
