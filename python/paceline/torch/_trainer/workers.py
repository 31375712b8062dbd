"""A trainer's workers between its calls, for work that is not a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from paceline._core.engine import Stepper
from paceline.torch._run.run import DONE, FAILED
from paceline.torch._trainer.lifetime import Lifetime

_PARTS_PER_DEVICE = 2  # so that a device which comes late is not waited for: others take its parts


class HostWorkers:
    """Runs tasks on the workers of a trainer whose devices are all the host's; holds on to no trainer."""

    def __init__(self, trainer: Lifetime) -> None:
        self._trainer = weakref.ref(trainer)
        self._stepper: Stepper | None = None
        self._without: set[int] = set()  # devices that it gives no work

    def part_count(self) -> int:
        """Some for each device, if there are several and all are the host's."""
        trainer = self._trainer()
        if trainer is None or trainer._places.queues is not None or len(trainer.group) == 1:
            return 1
        return _PARTS_PER_DEVICE * len(trainer.group)

    def run_parts(self, tasks: Sequence[Callable[[], None]]) -> bool:
        """Run each task once, on whichever device is free. False: nothing was run, since there is no trainer, or it is in another call.

        Whatever else ends it early, Ctrl-C or `close` in another thread, no task is left out: half an update would be neither the state
        before nor the one after. Only an error of a task itself ends it there, and is raised.
        """
        trainer = self._trainer()
        if trainer is None:
            return False
        with trainer._if_idle() as idle:
            if idle:
                self._run(trainer, tasks)
            return idle

    def _run(self, trainer: Lifetime, tasks: Sequence[Callable[[], None]]) -> None:
        if self._stepper is None:
            self._stepper = Stepper(trainer.group, micro_batch=1)  # nothing is recorded, so shares stay even
        for index in trainer._retired - self._without:
            self._stepper.retire(index)
        for index in self._without - trainer._retired:
            self._stepper.restore(index)
        self._without = set(trainer._retired)
        places = trainer._places
        left = dict(enumerate(tasks))
        errors: list[BaseException] = []

        def body(device: int, begin: int, end: int, last: bool) -> int:
            try:
                places.prepare_worker(device)
                for index in range(begin, end):
                    task = left.pop(index, None)
                    if task is not None:  # else the caller, interrupted twice, did not wait and has taken it
                        task()
            except BaseException as error:
                errors.append(error)
                return FAILED
            return DONE

        try:
            self._stepper.run(len(tasks), body, _nothing)
        finally:
            _finish(left, errors)
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # they refer to this frame


def _finish(left: dict[int, Callable[[], None]], errors: list[BaseException]) -> None:
    """What the workers have not begun, on the calling thread. Ctrl-C ends the task it comes in, as in plain PyTorch; the others are done."""
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
