"""The workers of a trainer between its calls, for work that is not a step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, MutableSequence, Sequence

from paceline._core.engine import StepLoop
from paceline.torch._devices.failures import Failure, note_others
from paceline.torch._run.executor import DONE, FAILED
from paceline.torch._trainer.lifetime import Lifetime

_PARTS_PER_DEVICE = 2  # so that other devices can take parts of a late device


class HostWorkers:
    """Runs tasks on the workers of a trainer whose devices are all host devices. Does not keep the trainer alive.

    `times` gets the begin and the end of each step of an optimizer.
    """

    def __init__(self, lifetime: Lifetime, times: MutableSequence[tuple[float, float]]) -> None:
        self._lifetime = weakref.ref(lifetime)
        lifetime.entered = True  # an optimizer would not follow a trainer that is made anew
        self._times = times
        self._step_loop: StepLoop | None = None
        self._without: set[int] = set()  # devices that it gives no work

    def part_count(self) -> int:
        """How many parts to make of the work: several for each device, or one if there is one device, or a GPU."""
        lifetime = self._lifetime()
        if lifetime is None or any(lifetime.places.on_gpu) or len(lifetime.group) == 1:
            return 1
        return _PARTS_PER_DEVICE * len(lifetime.group)

    def stepped(self, began: float) -> None:
        """Note that a step of an optimizer began then and ends now."""
        self._times.append((began, time.perf_counter()))

    def run_parts(self, tasks: Sequence[Callable[[], None]]) -> bool:
        """Run each task once, on whichever device is free. False: nothing was run, since the trainer is gone or in another call.

        Ctrl-C, or `close` in another thread, leaves no task out, because half an update would be neither the old state nor the new one.
        Only an error of a task ends the run early, and the error is raised.
        """
        lifetime = self._lifetime()
        if lifetime is None:
            return False
        with lifetime.if_idle() as idle:
            if idle:
                self._run(lifetime, tasks)
            return idle

    def _run(self, lifetime: Lifetime, tasks: Sequence[Callable[[], None]]) -> None:
        if self._step_loop is None:
            self._step_loop = StepLoop(lifetime.group, micro_batch=1)  # no times are recorded, so shares stay even
        retired = lifetime.works.retired
        for index in retired - self._without:
            self._step_loop.retire(index)
        for index in self._without - retired:
            self._step_loop.restore(index)
        self._without = set(retired)
        places = lifetime.places
        left = dict(enumerate(tasks))
        errors: list[Failure] = []

        def body(device: int, begin: int, end: int, flags: int) -> int:
            try:
                places.prepare_worker(device)
                for index in range(begin, end):
                    task = left.pop(index, None)
                    if task is not None:  # None: a second Ctrl-C ended the wait, and the caller has run it
                        task()
            except BaseException as error:
                errors.append(Failure(places.names[device], "", error))
                return FAILED
            return DONE

        try:
            cause = self._step_loop.run(self._step_loop.plan(len(tasks)), body, _nothing).take_cause()
            if cause is not None:
                errors.append(Failure("a worker", "", cause))
            del cause  # its traceback refers to this frame
        finally:
            _finish(left, errors)
        if errors:
            try:
                note_others(errors[0].error, errors[1:])
                raise errors[0].error
            finally:
                errors.clear()  # they refer to this frame


def _finish(left: dict[int, Callable[[], None]], errors: Sequence[object]) -> None:
    """Run on the calling thread what no worker has begun. Ctrl-C ends the task that it hits, as in plain PyTorch; the other tasks still run."""
    interrupted: KeyboardInterrupt | None = None
    while left and not errors:
        try:
            task = left.popitem()[1]
        except KeyError:  # a worker was faster
            break
        try:
            task()
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _nothing(device: int) -> list[None]:
    return []
