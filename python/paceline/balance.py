"""The closed loop that decides how a batch is split: timings in, plans out, every decision reproducible.

`Balancer` is what trainers use inside; alone it serves whoever runs the work themselves. `replay` verifies a ledger.
"""

from paceline._core.balance import Balancer, StepPlan, WhatIfAnswer
from paceline._replay import LedgerMismatch, ReplayResult, replay

__all__ = ["Balancer", "LedgerMismatch", "ReplayResult", "StepPlan", "WhatIfAnswer", "replay"]
