"""The file that a watchdog writes when a call takes too long."""

from __future__ import annotations

import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    loss_of_words,
    on_worker,
    output_of,
    plain,
    words,
)

Warned = threading.Semaphore


def waiting_for_a_file(warned: Warned, device: str) -> Any:
    """`classify`, which on one device waits until the watchdog has written, and has told so."""

    def a_place_to_be_found(part: Any) -> None:
        assert warned.acquire(timeout=30)

    def loss_fn(module: Any, part: Any) -> Any:
        if on_worker(device):
            a_place_to_be_found(part)
        return classify(module, part)

    return loss_fn


def test_the_file_says_who_is_inside_of_what_and_the_step_goes_on(tmp_path: Path, warned: Warned) -> None:
    module, batch = classifier(16)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance=[1, 3], watchdog=2, watchdog_path=tmp_path) as trainer:
        with pytest.warns(UserWarning, match="watchdog") as caught:
            trainer.step(waiting_for_a_file(warned, "host:1"), batch)
        assert_same_gradients(module, wanted)
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    messages = [str(one.message) for one in caught if "watchdog" in str(one.message)]
    assert len(messages) == 1
    assert str(path) in messages[0]
    assert "py-spy dump --native --pid" in messages[0]
    assert "Plan: of 16 items 4 on host:0, 12 on host:1" in text
    assert "host:0: outside of user code" in text
    assert "its last work: items 0 to 3 of the batch; 1 micro-batch ended" in text
    line = re.search(
        r"^host:1: inside of user code for [\d.]+ s: items 4 to 15 of the batch \(thread (0x\w+)\); 0 ", text, re.M
    )
    assert line is not None
    # The stack of that very thread is there, and it is inside of the loss function.
    stack = text.partition(f"Thread {line.group(1)}")[2].partition("\n\n")[0]
    assert "a_place_to_be_found" in stack


def test_one_file_for_each_step_that_is_late_and_none_for_others(tmp_path: Path, warned: Warned) -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO, balance="even", watchdog=2, watchdog_path=tmp_path) as trainer:
        for count in (1, 2):
            trainer.step(classify, batch)
            with pytest.warns(UserWarning, match=rf"call {2 * count} of this trainer"):
                trainer.step(waiting_for_a_file(warned, "host:0"), batch)
        assert len(list(tmp_path.iterdir())) == 2


def test_an_error_that_ends_a_late_step_names_the_file(tmp_path: Path, warned: Warned) -> None:
    module, batch = classifier(16)
    wait = waiting_for_a_file(warned, "host:1")

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = wait(replica, part)
        if on_worker("host:1"):
            raise ZeroDivisionError
        return loss

    with DataParallel(module, TWO, balance="even", watchdog=0.1, watchdog_path=tmp_path) as trainer:
        with pytest.warns(UserWarning, match="watchdog"), pytest.raises(ZeroDivisionError) as caught:
            trainer.step(loss_fn, batch)
    (path,) = tmp_path.iterdir()
    if hasattr(caught.value, "__notes__"):
        assert any(str(path) in note for note in caught.value.__notes__)


def test_warnings_as_errors_do_not_end_the_watchdog(tmp_path: Path, warned: Warned) -> None:
    module, batch = classifier(16)
    with (
        DataParallel(module, TWO, balance="even", watchdog=0.2, watchdog_path=tmp_path) as trainer,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for _ in range(2):
            trainer.step(waiting_for_a_file(warned, "host:0"), batch)
    assert len(list(tmp_path.iterdir())) == 2


def test_predictions_and_steps_by_cost_are_watched_too(tmp_path: Path, warned: Warned) -> None:
    module, batch = words(16, seed=0)
    waits = threading.Lock()

    def once(replica: Any, part: Any) -> None:
        if waits.acquire(blocking=False):
            assert warned.acquire(timeout=30)

    def loss_fn(replica: Any, part: Any) -> Any:
        once(replica, part)
        return loss_of_words(replica, part)

    def outputs(replica: Any, part: Any) -> Any:
        once(replica, part)
        return replica(part)

    with DataParallel(module, TWO, micro_batch=4, watchdog=2, watchdog_path=tmp_path) as trainer:
        with pytest.warns(UserWarning, match="call 1"):
            trainer.step(loss_fn, batch, cost=torch.ones(16))
        waits.release()
        with pytest.warns(UserWarning, match="call 2"):
            trainer.predict(outputs, batch)
    by_cost, plain_batch = sorted(
        (path.read_text(encoding="utf-8") for path in tmp_path.iterdir()), key=lambda text: "in predict" in text
    )
    assert re.search(r"inside of user code for [\d.]+ s: items [\d, ]+ of the batch \(\d of similar cost\)", by_cost)
    assert re.search(r"inside of user code for [\d.]+ s: items \d+ to \d+ of the batch", plain_batch)


def no_watcher_is_left() -> bool:
    """Whether the watchdogs' threads end within half a minute."""
    deadline = time.monotonic() + 30
    while any(thread.name == "paceline watchdog" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_it_has_a_thread_only_around_calls(tmp_path: Path) -> None:
    module, batch = classifier(16)
    assert no_watcher_is_left()
    with DataParallel(module, TWO, watchdog=2, watchdog_path=tmp_path) as trainer:
        for _ in range(2):  # it ends while no step runs, and comes back
            trainer.step(classify, batch)
            assert no_watcher_is_left()
    with DataParallel(module, TWO, watchdog=1000, watchdog_path=tmp_path) as trainer:
        trainer.step(classify, batch)
        assert "paceline watchdog" in {thread.name for thread in threading.enumerate()}
    assert no_watcher_is_left()
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_is_dropped_is_not_kept_by_its_watchdog(tmp_path: Path) -> None:
    program = f"""
import weakref
trainer = DataParallel(module, ["host:0", "host:1"], watchdog=1000, watchdog_path={str(tmp_path)!r})
trainer.step(mean_of_squares, batch)
gone = weakref.ref(trainer._execution)
del trainer
time.sleep(0.1)
gc.collect()
print(gone() is None)
"""
    assert output_of(program) == "True"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watchdog": 0}, "watchdog is 0; give the seconds"),
        ({"watchdog": True}, "watchdog is True"),
        ({"watchdog": float("inf")}, "watchdog is inf"),
        ({"watchdog_path": "."}, "without watchdog="),
        ({"watchdog": 1, "watchdog_path": "/nowhere/at/all"}, "no folder that this process can write to"),
    ],
)
def test_what_is_no_deadline_or_folder_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DataParallel(classifier(4)[0], TWO, **options)
