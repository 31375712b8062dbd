"""The tests of `Pool` that say nothing of host devices, on GPUs: those of tests/python, whose pools are made of GPUs here."""

from __future__ import annotations

from typing import Any

import pytest

import pool_support
import test_torch_pool
import test_torch_pool_exchanges
import test_torch_pool_failures
import test_torch_pool_life
import test_torch_pool_modules
import test_torch_pool_padding
import test_torch_pool_requests
import test_torch_pool_tenants
import test_torch_pool_version_failures
import test_torch_pool_version_interrupts
import test_torch_pool_versions
import versions_support
from gpu_cases import GPUS, ON_A_GPU
from paceline.torch import Pool

_MODULES = (
    test_torch_pool,
    test_torch_pool_exchanges,
    test_torch_pool_failures,
    test_torch_pool_life,
    test_torch_pool_modules,
    test_torch_pool_padding,
    test_torch_pool_requests,
    test_torch_pool_tenants,
    test_torch_pool_version_failures,
    test_torch_pool_version_interrupts,
    test_torch_pool_versions,
)
# These name host devices, undo what the fakes replace, or count batches, whose sizes follow from times: the fake GPUs have a clock of their own.
# What a worker that is left behind keeps would outlive the machine of its test.
_ABOUT_HOSTS = {
    "test_a_run_that_was_given_up_does_not_hold_up_an_exchange",
    "test_a_batch_that_fails_after_its_deadline_has_its_error_its_device_and_its_seconds",
    "test_a_device_that_a_job_has_lost_is_retired_in_the_figures",
    "test_answers_keep_the_strides_that_the_model_gives_them",  # from a GPU they come contiguous
    "test_a_device_whose_initializer_fails_is_retired_and_others_answer",
    "test_a_small_effect_of_padding_is_noticed_when_there_is_more_padding",
    "test_a_pool_in_a_cycle_with_its_module_is_collected",
    "test_an_interrupt_of_map_cancels_the_request_that_is_waited_for",
    "test_arguments_are_checked",
    "test_dependencies_needs_gangs_and_times",
    "test_figures_count_what_ran_and_how_it_ended",
    "test_map_shows_its_progress",
    "test_retired_devices_start_nothing",
    "test_without_a_gpu_a_pool_has_the_host_devices_by_default",
}


def _applies(name: str, test: Any) -> bool:
    # In a program of its own nothing is replaced by fakes.
    return name.startswith("test_") and name not in _ABOUT_HOSTS and "program" not in test.__code__.co_names


for one in _MODULES:
    globals().update({name: value for name, value in vars(one).items() if _applies(name, value)})


@pytest.fixture(autouse=True)
def pools_of_gpus(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these modules make pools with."""
    if ON_A_GPU:
        pytest.skip("their modules and tensors are on the host, and a real GPU rounds in another way")
    for module in (*_MODULES, pool_support, versions_support):
        for name, value in (
            ("pool_of", lambda count=2, **options: Pool(GPUS[:count], **options)),
            ("hosts", lambda count: GPUS[:count]),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def test_there_are_such_tests() -> None:
    assert sum(name.startswith("test_") for name in globals()) > 40
