"""The closed loop that decides how to split a batch: timings in, plans out, every decision reproducible.

Trainers use `Balancer`; you can also use it alone if you run the work yourself. `replay` verifies a ledger.
"""

from paceline._core.balance import Balancer, StepPlan, WhatIfAnswer
from paceline._replay import LedgerMismatch, ReplayResult, replay

__all__ = ["Balancer", "LedgerMismatch", "ReplayResult", "StepPlan", "WhatIfAnswer", "replay"]
