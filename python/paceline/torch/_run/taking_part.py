"""A step of a rank whose part of the batch is empty."""

from __future__ import annotations

import torch

from paceline.torch._batch.objective import Objective
from paceline.torch._devices.caller_state import NoGrad
from paceline.torch._run.execution import Execution
from paceline.torch._run.journal import Done, Gradients, Journal
from paceline.torch._run.participants import of_part


def take_part(execution: Execution, objective: Objective, *, carries: bool) -> tuple[torch.Tensor, Gradients]:
    """What `Execution.train` gives on a rank without items: the objective of all ranks, and its gradients."""
    ranks, replicas = execution.ranks, execution.replicas
    assert ranks is not None
    replicas.refresh(hooks=carries)
    journal = Journal(of_part(execution))
    journal.prepare(None)
    execution.calls += 1
    execution.failed_on = None
    none: Gradients = [None] * len(replicas.parameters)
    with NoGrad(), execution.features.around_call(execution.calls, lambda: execution.running):
        try:
            loss, totals = ranks.sum(replicas, objective, None, none, steps=execution.steps)
            journal.commit(Done(None, None, loss, totals, carries=carries))
        except BaseException:
            if ranks.agreed is None:
                journal.rollback()
            else:  # interrupted in the middle of writing
                journal.commit(Done(None, None, *ranks.agreed, carries=carries))
            raise
    return loss, totals
