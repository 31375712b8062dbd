"""The kinds of work that a trainer has: its steps, its predictions, and the runs of `batch` by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paceline import Device, DeviceGroup, InvalidArgument
from paceline._core.engine import StepLoop
from paceline.torch._devices.places import Places
from paceline.torch._run.alone import AloneTrials
from paceline.torch._run.beside import Beside
from paceline.torch._run.workload import Workload
from paceline.torch._trainer.speeds import Speeds, give_hints, speeds_of

_RUN = "run "


def kind_of(run: str | None) -> str:
    """The kind of work of a run of `batch` that has this name. Without a name: the kind of `step`."""
    return "step" if run is None else _RUN + run


class Works:
    """A `Workload` for each kind of work, which has its own times and shares. `options` are those of every StepLoop.

    `free`: whether micro-batches may have any size. Then steps search for a fast one, and pools `beside` them have all be short.
    """

    def __init__(
        self,
        group: DeviceGroup,
        places: Places,
        limits: list[int | None],
        options: dict[str, Any],
        *,
        free: bool = False,
    ) -> None:
        self.names = [device.name for device in group.devices]
        self.options = options
        self.retired: set[int] = set()  # devices that get no work
        self._group = group
        self._places = places
        self.limits = limits  # of memory, per device
        self._hints: Speeds = {}  # of an earlier run
        self._temporary: list[Workload] = []  # of a call that leaves no trace
        self.beside = Beside()
        self._free = free
        self.steps = self._new(options | {"searches": free, "free": free})
        self._by_kind = {kind_of(None): self.steps}

    def of(self, kind: str, *, whole: bool = False) -> Workload:
        """The work of this kind, which is made when it is first needed. `whole`: each device runs its share as one micro-batch, however large."""
        if kind not in self._by_kind:
            changes = {"corrections": False, "micro_batch": 0} if whole else {"free": self._free}
            self._by_kind[kind] = self._new(self.options | changes, limited=not whole)
            give_hints(self._hints, kind, self._by_kind[kind], self._group)
        return self._by_kind[kind]

    def speeds(self) -> Speeds:
        """The measured speeds, by kind of work. What an earlier run measured stays for kinds that have not run yet."""
        return {**self._hints, **speeds_of(self._by_kind, self._group)}

    def hint(self, speeds: Speeds) -> None:
        """Begin with the speeds of an earlier run. Kinds of work that were measured keep their own."""
        self._hints = speeds
        for kind, work in self._by_kind.items():
            give_hints(speeds, kind, work, self._group)

    def runs(self) -> dict[str, Workload]:
        """The work of each run of `batch`, by name."""
        kinds = list(self._by_kind.items())  # another thread may add one
        return {kind.removeprefix(_RUN): work for kind, work in kinds if kind.startswith(_RUN)}

    @property
    def predictions(self) -> Workload | None:
        """The work of `predict`, once it was called."""
        return self._by_kind.get("predict")

    @property
    def calls(self) -> Workload | None:
        """The forward of the trainer's calls as a module, once there was one."""
        return self._by_kind.get("forward")

    @property
    def unused(self) -> bool:
        """Whether nothing has run."""
        return not any(work.proved or work.step_loop.metrics["steps"] for work in self._by_kind.values())

    def all(self) -> list[Workload]:
        """All work that may run or be pending."""
        return [*self._by_kind.values(), *self._temporary]

    def temporary(self, **options: Any) -> Workload:
        """Work of other options, inside of `no_trace`. If another thread closes the trainer, this work ends, too."""
        work = self._new(options)
        self._temporary.append(work)
        return work

    @contextlib.contextmanager
    def no_trace(self) -> Iterator[None]:
        """Forget temporary work at the end."""
        try:
            yield
        finally:
            self._temporary.clear()

    def retire(self, device: str | Device) -> None:
        """Give a device no work from now on."""
        self._change(device, "retire", self.retired.add)

    def restore(self, device: str | Device) -> None:
        """Give a device work again."""
        self._change(device, "restore", self.retired.discard)

    def _new(self, options: dict[str, Any], *, limited: bool = True) -> Workload:
        limits: list[int | None] = self.limits if limited else [None] * len(self.names)
        searches, on_gpu = options.pop("searches", False), self._places.on_gpu
        beside = self.beside if options.pop("free", False) else None
        loop = StepLoop(self._group, memory_limits=[limit or 0 for limit in limits], search_sizes=searches, **options)
        fixed = options.get("balance") != "auto"
        corrects = len(limits) > 1 and not any(on_gpu) and not fixed
        corrects &= not options.get("micro_batch") and options.get("corrections") is None
        work = Workload(loop, limits, on_gpu, searches=searches, fixed=fixed, corrects=corrects, beside=beside)
        for index in self.retired:
            work.step_loop.retire(index)
        return work

    def _change(self, device: str | Device, change: str, note: Callable[[int], None]) -> None:
        name = device if isinstance(device, str) else device.name
        if name not in self.names:
            raise InvalidArgument(
                f"paceline: there is no device {name} in this trainer; it has {', '.join(self.names)}."
            )
        index = self.names.index(name)
        for work in self.all():
            getattr(work.step_loop, change)(index)
        note(index)
        for work in self.all():
            if work.alone is not None:
                work.alone = AloneTrials(self.retired)
