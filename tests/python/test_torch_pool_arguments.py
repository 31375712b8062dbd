"""Arguments of `Pool` and its calls: what may be given alone, and what is refused."""

from __future__ import annotations

import concurrent.futures
import re
from typing import Any

import pytest
import torch

from paceline import Cancelled, InvalidArgument, find_device
from paceline.torch import Pool
from pool_support import Held, pool_of
from torch_support import hosts


def test_one_device_or_one_job_needs_no_list() -> None:
    first, second = hosts(2)
    for given in (first, find_device(first), [find_device(first)]):
        with Pool(given) as pool:
            assert [one.name for one in pool.devices] == [first]
    with pool_of() as pool:
        failed = pool.submit(lambda _: 1 / 0)
        for after in (failed, [failed], (one for one in [failed])):
            assert isinstance(pool.submit(lambda _: 1, after=after).exception(), Cancelled)
        assert pool.submit(lambda _: 1).result() == 1  # so that work is known
        assert pool.what_if(remove=second)["devices"] == 1
        assert pool.what_if(add=0.5)["devices"] == pool.what_if(add=first)["devices"] == 3


def test_a_job_that_is_cancelled_has_the_error_of_what_it_comes_after_as_its_cause() -> None:
    with pool_of(1) as pool:
        with Held(pool):
            fails = pool.submit(lambda _: 1 / 0)
            second = pool.submit(print, after=[pool.submit(lambda _: 1), fails])
            third = pool.submit(print, after=second)
            taken_back = pool.submit(print)
            fourth = pool.submit(print, after=taken_back)
            taken_back.cancel()
        assert isinstance(fails.exception(), ZeroDivisionError)
        for job in (second, pool.submit(print, after=fails)):
            assert isinstance(error := job.exception(), Cancelled)
            assert error.__cause__ is fails.exception()
        for job, cause in ((third, second.exception()), (fourth, concurrent.futures.CancelledError())):
            assert isinstance(error := job.exception(), Cancelled)
            assert repr(error.__cause__) == repr(cause)


def test_what_is_no_device_no_job_and_no_dictionary_is_refused() -> None:
    for wrong in (2, None, [2], ["host:0", None]):
        with pytest.raises(InvalidArgument, match=re.escape(f"Pool: devices is {wrong!r}; give 'auto'")):
            Pool(wrong)
    for options in ({"tenants": ["a"]}, {"memory": 3}):
        with pytest.raises(InvalidArgument, match="must be a dictionary by name"):
            pool_of(1, **options)
    pool: Any
    with pool_of(1) as pool:
        with pytest.raises(InvalidArgument, match="after= is a int; give a future"):
            pool.submit(print, after=3)
        with pytest.raises(InvalidArgument, match=r"remove has 3\.0"):
            pool.what_if(remove=3.0)
        with pytest.raises(InvalidArgument, match="add is a NoneType; give a device"):
            pool.what_if(add=None)
        with pytest.raises(InvalidArgument, match="the deadline is -1 s; it must be positive"):
            pool.submit(print, deadline=-1)
        with pytest.raises(InvalidArgument, match="not_before is -2 s; it must be finite"):
            pool.submit(print, not_before=-2)
        for name, value in (("kind", 5), ("deadline", "soon"), ("not_before", None), ("gang", 1.5), ("wait", "no")):
            with pytest.raises(InvalidArgument, match=f"^submit: .*{name}={value!r}"):
                pool.submit(print, **{name: value})
        with pytest.raises(InvalidArgument, match=r"deadline='0\.5'"):  # as a header has it
            pool.serve(lambda x: x)(torch.zeros(1), deadline="0.5")
        with pytest.raises(InvalidArgument, match="needs= has a int"):
            pool.submit(print, needs=5)
