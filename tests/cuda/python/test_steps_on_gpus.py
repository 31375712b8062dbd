"""Streams, shares, figures and the end of a trainer on GPUs."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_cases import BOXES, module_and_batch, queues_of
from paceline import DeviceGroup
from paceline.torch import DataParallel
from paceline.torch._devices.places import Places
from paceline.torch._run import executor
from torch_support import cancelled_by_close, classify


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_each_worker_is_on_its_own_stream(fake: Any) -> None:
    module, batch = module_and_batch()
    seen: dict[str, set[Any]] = {}

    def looking(one: Any, part: Any) -> Any:
        seen.setdefault(str(len(fake.streams)), set()).add(tuple(fake.streams))
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4) as trainer:
        trainer.step(looking, batch)
        trainer.step(looking, batch)
        streams = queues_of(trainer).streams
        sources = queues_of(trainer).sources
    assert seen == {"1": {((0, streams[0]),)}, "2": {((0, sources[1]), (1, streams[1]))}}
    assert fake.streams == []


def test_figures_wait_for_the_steps_they_tell_of(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        for _ in range(5):
            trainer.step(classify, batch)
        report = trainer.report()
        assert report["steps"] == 5
        assert [report["devices"][name]["items"] for name in BOXES["two"]] == [60, 60]
        assert all(report["devices"][name]["busy_seconds"] > 0 for name in BOXES["two"])


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_the_report_has_the_peak_of_each_gpus_own_pool(fake: Any) -> None:
    _, batch = module_and_batch()
    # Larger than what the check of direct copies takes.
    module = torch.nn.Sequential(torch.nn.Linear(6, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 3)).double()
    gradients = 8 * sum(parameter.numel() for parameter in module.parameters())
    with DataParallel(module, BOXES["mixed"], balance="even", transport="copies") as trainer:
        before = trainer.report()["memory"]
        trainer.step(classify, batch)
        after = trainer.report()["memory"]
        trainer.step(classify, batch)
        assert trainer.report()["memory"] == after, "the second step needed more"
    assert set(after) == {"cuda:0", "cuda:1"}, "the host has no pool"
    # What cuda:0 and the hosts deliver is summed at home, on the group's first GPU; what lands there is theirs.
    assert after["cuda:1"]["pool_peak_bytes"] >= before["cuda:1"]["pool_peak_bytes"] + gradients
    assert after["cuda:0"]["pool_peak_bytes"] == before["cuda:0"]["pool_peak_bytes"], "so small a bucket is not cut"
    assert trainer.report()["memory"] == after, "as it was when the trainer was closed"


def test_peaks_stand_beside_the_limits_of_devices(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["one"], memory={"cuda:0": 1 << 30}) as trainer:
        trainer.step(classify, batch)
        assert {"limit_bytes", "pool_peak_bytes"} <= set(trainer.report()["memory"]["cuda:0"])


def test_auto_takes_the_gpus_and_says_that_it_has_brought_the_module_there(fake: Any) -> None:
    with torch.device("cpu"):
        module, batch = module_and_batch()
    with pytest.warns(UserWarning, match="the module was in host memory, and is on cuda:0 now"):
        trainer = DataParallel(module)
    with trainer:
        assert {device.kind for device in trainer.group.devices} == {"cuda"}
        trainer.step(classify, batch)
    with DataParallel(module.cpu(), "host") as trainer:
        assert {device.kind for device in trainer.group.devices} == {"host"}


def test_a_group_that_was_passed_in_stays_open(fake: Any) -> None:
    module, batch = module_and_batch()
    with DeviceGroup(BOXES["two"]) as group:
        for _ in range(2):
            with DataParallel(module, group, balance="even") as trainer:
                trainer.step(classify, batch)
        assert fake.leftovers == 0


def test_closing_from_another_thread_gives_everything_back(fake: Any) -> None:
    module, batch = module_and_batch()
    trainer = DataParallel(module, BOXES["two"], balance="even", micro_batch=1)
    assert cancelled_by_close(trainer, classify, batch) < len(batch[0])
    assert fake.leftovers == 0


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_moving_shares_bring_no_new_sizes(fake: Any) -> None:
    module, batch = module_and_batch()
    sizes = set()

    def loss_fn(one: Any, part: Any) -> Any:
        sizes.add(len(part[0]))
        time.sleep(0.002 * (1 + fake.streams[-1][0]))  # the second GPU is slower, so shares move
        return classify(one, part)

    with DataParallel(module, BOXES["two"], micro_batch=4) as trainer:
        for _ in range(6):
            trainer.step(loss_fn, batch)
    assert sizes == {4}


@pytest.mark.parametrize("granularity", [None, 1])
def test_shares_that_move_have_few_sizes(fake: Any, granularity: int | None) -> None:
    module, _ = module_and_batch()
    batch = torch.randn(512, 6, dtype=torch.float64), torch.randint(0, 3, (512,))
    with DataParallel(module, BOXES["two"], granularity=granularity) as trainer:
        trainer.step(classify, batch)
        multiples = "in multiples of 8" in trainer.explain()
        shares = [trainer.shares[name] for name in BOXES["two"]]  # the first are off the even split
        report = trainer.report()
    assert multiples == (granularity is None)
    assert sum(shares) == 512
    if granularity is None:
        assert [share % 8 for share in shares] == [0, 0]
        assert all(int(size) % 8 == 0 for sizes in report["sizes"].values() for size in sizes)


def test_costs_and_fixed_ratios_go_without_a_granularity(fake: Any) -> None:
    module, _ = module_and_batch()
    batch = torch.randn(514, 6, dtype=torch.float64), torch.randint(0, 3, (514,))
    with DataParallel(module, BOXES["two"]) as trainer:
        trainer.step(classify, batch, cost=torch.rand(514))
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        assert list(trainer.shares.values()) == [257, 257]


def test_corrections_have_to_be_asked_for(fake: Any) -> None:
    module, batch = module_and_batch()
    plain = copy.deepcopy(module)
    classify(plain, batch).backward()
    ran: dict[bool, bool] = {}  # whether there was more than one piece for each device
    for corrections in (False, True):
        pieces: list[int] = []

        def loss_fn(one: Any, part: Any, pieces: list[int] = pieces) -> Any:
            pieces.append(len(part[0]))
            # Noise that is worth a correction, and micro-batches that cost nothing to begin.
            time.sleep(0.002 * len(part[0]) * random.uniform(0.6, 1.4))
            return classify(one, part)

        with DataParallel(module, BOXES["two"], hold_back=corrections or None, granularity=2) as trainer:
            for steps in range(100 if corrections else 15):
                trainer.step(loss_fn, [tensor[:12] for tensor in batch])  # what a micro-batch costs beside its items
                module.zero_grad()
                trainer.step(loss_fn, batch)
                if len(pieces) > 4 * (steps + 1):
                    break
            for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            sizes = {size for device in trainer.report()["sizes"].values() for size in device}
        assert all(size % 2 == 0 for size in sizes), "no more sizes than the granularity lets be"
        ran[corrections] = len(pieces) > 4 * (steps + 1)
    assert ran == {False: False, True: True}


def test_a_run_that_python_holds_up_is_told_so(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=1) as trainer:
        for _ in range(50):  # here a micro-batch takes as long as its launch, if nothing comes between
            trainer.step(classify, batch)
            text = trainer.explain()
            if "Launch-bound" in text:
                break
    assert "Launch-bound: a micro-batch takes a GPU" in text
    assert "2 devices share Python's lock" in text


def test_bringing_a_batch_is_no_launch(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()
    late = defaultdict[int, float](float)  # by thread, what its clock is ahead of the others'

    def slow(tensor: torch.Tensor) -> torch.Tensor:
        late[threading.get_ident()] += 1000.0
        return tensor

    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)  # on a real GPU the first launches take long: libraries load
    monkeypatch.setattr(Places, "mover", lambda places, device: slow)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[threading.get_ident()])
    monkeypatch.setattr(executor, "time", clock)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        launches = [launch for recent in trainer._works.steps.launches._recent for launch in recent]
    assert len(launches) == 2
    assert sum(late.values()) >= 2000.0
    assert all(0 < launch.seconds < 1000.0 for launch in launches), launches


def test_steps_that_are_enqueued_behind_others_say_nothing_of_launches(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=6) as trainer:
        trainer.step(classify, batch)
        trainer.report()  # waits
        trainer.step(classify, batch)
        trainer._execution._enqueued = SimpleNamespace(settled=False)
        trainer.step(classify, batch)
        rooms = [[launch.room for launch in recent] for recent in trainer._works.steps.launches._recent]
        assert trainer._works.steps.launches._count == 12
    assert rooms == [[True, True, False]] * 2


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_step_that_fails_leaves_no_launches(fake: Any) -> None:
    module, batch = module_and_batch()

    def fails(one: Any, part: Any) -> Any:
        if fake.streams[-1][0] == 1:
            raise RuntimeError("no")
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        with pytest.raises(RuntimeError, match="no"):
            trainer.step(fails, batch)
        assert trainer._works.steps.launches._count == 0
        trainer.step(classify, batch)
        trainer.predict(batch[0])
        assert trainer._works.steps.launches._count == 2


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_shares_follow_speeds_though_nobody_waits(fake: Any) -> None:
    module, batch = module_and_batch()

    def loss_fn(one: Any, part: Any) -> Any:
        time.sleep(0.001 * len(part[0]) * (1 + 3 * fake.streams[-1][0]))  # the second GPU takes four times as long
        return classify(one, part)

    with DataParallel(module, BOXES["two"]) as trainer:
        # Of most runs launching takes all the time, and these count only where no better ones are at hand: it takes some steps more.
        for _ in range(30):
            trainer.step(loss_fn, batch)  # no report() in between, which would wait
        assert trainer.shares["cuda:0"] >= 15  # 12 would be even, and 19 right


def test_a_trace_has_the_times_of_the_gpus_in_the_order_of_steps_after_close_too(fake: Any, tmp_path: Path) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4) as trainer:
        for _ in range(3):
            trainer.step(classify, batch)
        recent = trainer._recent.steps
        events = trainer.events()
    assert all(step.outcome is None and step.times is not None for step in recent), "events of closed queues are held"
    trainer.trace(tmp_path / "step.json")
    spans = [event for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for row, name in enumerate(BOXES["two"], start=1):
        own = [span for span in spans if span["tid"] == row]
        ran = [(span["args"]["begin"], span["args"]["end"]) for span in own if span["cat"] == "micro_batch"]
        assert ran == [(event["begin"], event["end"]) for event in events if event["device"] == name]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1.0 for one, other in pairwise(own))
        seconds = [span["dur"] / 1e6 for span in own if span["cat"] == "micro_batch"]
        timed = [event["duration_seconds"] for event in events if event["device"] == name]
        assert seconds == pytest.approx(timed, abs=2e-9)
