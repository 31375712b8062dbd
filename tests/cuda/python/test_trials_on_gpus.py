"""Searches over GPUs: the tests of examples/run trials that say nothing of host devices."""

from __future__ import annotations

from typing import Any

import pytest

import test_trials_example
from gpu_cases import GPUS, ON_A_GPU
from paceline.torch import Pool
from test_trials_example import (  # noqa: F401
    alone,
    experiment,
    search,
    test_a_sampler_that_learns_is_asked_for_a_few_trials_at_a_time,
    test_a_trial_that_fails_harms_no_other,
    test_a_trial_that_ran_out_of_memory_keeps_none,
    test_a_trial_whose_device_is_lost_goes_on_elsewhere,
    test_an_interrupt_leaves_no_trial_open,
    test_trials_are_pruned_by_the_study_and_by_themselves,
    train,
    trials,
)


@pytest.fixture(autouse=True)
def pools_of_gpus(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they make pools with. The values that they are compared with are those of a host device."""
    if ON_A_GPU:
        pytest.skip("a real GPU rounds in another way than the host")
    monkeypatch.setattr(test_trials_example, "pool_of", lambda count=2, **options: Pool(GPUS[:count], **options))
