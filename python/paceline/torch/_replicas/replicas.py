"""Replicas: a module for every device, with the user's parameters inside."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline._core.engine import ModuleContents
from paceline.torch._devices.caller_state import NoGrad
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._replicas.attributes import Attributes, carry, is_of_a_forward
from paceline.torch._replicas.buffers import sparse_slots
from paceline.torch._replicas.common import Common
from paceline.torch._replicas.copies import (
    Copied,
    Replicate,
    alias_of,
    check_hooks,
    check_trainable,
    copied,
    made_by,
)
from paceline.torch._replicas.flat_buffers import FlatBuffers
from paceline.torch._replicas.hooks import hooks_watched
from paceline.torch._replicas.parameter_copies import ParameterCopies
from paceline.torch._replicas.reach import SIMPLE, Reach
from paceline.torch._replicas.replica import Replica
from paceline.torch._replicas.written import Written

# Before every step these are read from every parameter and module, by map(), which runs no line of Python for each.
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_stride: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
_requires_grad = operator.attrgetter("requires_grad")
_hooks = operator.attrgetter("_backward_hooks")
_late_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
_training = operator.attrgetter("training")
_contents = operator.attrgetter("_parameters", "_buffers", "_modules")


class Replicas:
    """The replicas of one trainer, and whether they still fit the user's module."""

    # Why a replica's loss may have reached the user's module, and what to do.
    blame = (
        "loss_fn (or a function, an object or a reference that is not copied with the module) uses the original module instead of the one it is given. "
        "Use the module argument of loss_fn(module, batch). In the module itself, keep such functions in attributes; or give replicate=, a callable that builds the "
        "module anew, functions included."
    )

    def __init__(
        self, module: nn.Module, places: Places, replicate: Replicate | None, *, common: Common | None = None
    ) -> None:
        """`common` keeps data that no forward writes. Without it each replica has a copy."""
        self._module = module
        self._places = places
        self.common = common
        self.shared = len(places) > 1  # False: the user's module itself runs
        self._replicate = replicate
        self.list: list[Replica] = []
        # Forwards whose graphs are alive, and keep the buffers they have read.
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.generation = 0  # how often the replicas were made
        self.changes = 0  # how often they followed changed attributes
        # How often modules had changed between training and evaluation, or got or lost running statistics.
        self.modes = 0
        self._modes: list[Any] = []
        self._counted: tuple[object, list[tuple[Written, tuple[int, str], int]]] | None = None  # of the last step
        self._resets = False  # whether containers of replicas are put back after each step
        self._flat: FlatBuffers | None = None
        self._sent = ParameterCopies(places)
        self._registered = ModuleContents(["_parameters", "_modules"], objects=True)
        self._buffer_names = ModuleContents(["_buffers"], objects=False)
        with torch.inference_mode(False):
            self._build()

    @property
    def _spaces(self) -> list[int]:
        """The memory space of each replica."""
        return self._places.spaces

    def _build(self) -> None:
        reach = Reach(self._module)
        check_trainable(self._module, reach, self.shared)
        named: dict[str, torch.Tensor] = {**dict(self._module.named_parameters()), **reach.unregistered}
        parameters, modules = list(named.values()), [part for _, part in reach.modules]
        if self.common is not None:
            self.common.forget()
        # What can fail comes first, so that a failure does not leave replicas that seem to fit.
        if self.shared:
            copies = self._sent.memory_for(named)
            random = RandomStates(self._places)
            try:
                made = [self._make(device, copies, reach, parameters) for device in range(len(self._spaces))]
            finally:  # a new module draws initial weights, although the user's parameters replace them
                random.restore()
            self._flat = FlatBuffers(self._places)
            for device, replica in enumerate(made) if self._places.queues is not None else ():
                if self._places.spaces[device] != self._places.home_space:
                    replica.buffers = self._flat.add(device, replica.buffer_pairs)
            self._sent.begin(copies, parameters, made)
        else:
            itself = {id(one): one for one in (*parameters, *modules)}
            made = [Replica(Copied(self._module, itself), reach, parameters, shared=False)]
        self.list = made
        self.generation += 1
        self.parameters, self.names = parameters, list(named)
        self._seen = made[0].seen or []
        self._attributes = _watched(reach, made[0].counterparts) if self.shared else None
        self._watch_forwards()
        self.named_modules, self.modules = reach.modules, modules  # also those in plain lists
        self.any_buffers = any(owner._buffers for owner in modules)
        self.sparse = sparse_slots(modules)
        self.norms = [entry for entry in reach.modules if isinstance(entry[1], nn.modules.batchnorm._BatchNorm)]
        for contents in (self._registered, self._buffer_names):
            contents.note(self.modules)
        # They compare addresses, so that what they have noted has to stay. A buffer may be replaced in each step.
        dicts = [contents for module in modules for contents in _contents(module)]
        self._held = [
            dicts,
            list(map(list, dicts)),
            [[*part._parameters.values(), *part._modules.values()] for part in modules],
        ]
        self._storages = self._present_storages()

    def _make(
        self, device: int, copies: dict[int, dict[int, torch.Tensor]], reach: Reach, parameters: list[torch.Tensor]
    ) -> Replica:
        storages = copies.get(self._spaces[device], {})

        def alias(parameter: torch.Tensor) -> torch.Tensor:
            return self._alias(parameter, storages.get(id(parameter)), device)

        replicate = self._replicate
        if replicate:
            made = made_by(replicate, self._module, reach, alias)
        else:
            common = self._in_common(reach, device)
            made = copied(self._module, reach, alias, common, detaches=self.common is not None)
        for _, ours in reach.modules if storages else ():
            buffers = made.counterparts[id(ours)]._buffers
            buffers |= {name: one.to(self._places.devices[device]) for name, one in buffers.items() if one is not None}
        self._share(made, reach, device)
        return Replica(made, reach, parameters, shared=True)

    def _in_common(self, reach: Reach, device: int) -> dict[int, Any]:
        """What stands in this device's module for data that is not copied."""
        if self.common is None:
            return {}
        places = self._places
        at_home = places.spaces[device] == places.home_space
        holders = [*reach.modules, *reach.objects.items()]
        return self.common.memo(holders, places.home if at_home else None)

    def hold_apart(self, paths: Iterable[str]) -> None:
        """Make replicas with data of their own under these paths, which a forward has written."""
        if self.common is not None:
            self.common.part(paths)
            self._places.drain()
            self.renew()

    def hold_all_apart(self) -> None:
        """Make replicas that have nothing in common, where nothing finds out what forwards write."""
        if self.common is not None and self.common.held:
            self.hold_apart(list(self.common.held))

    def _alias(self, parameter: torch.Tensor, storage: torch.Tensor | None, device: int) -> torch.Tensor:
        """What a device's module has in the place of a parameter."""
        return alias_of(parameter, storage)

    def _share(self, made: Copied, reach: Reach, device: int) -> None:
        """Called for each device's module when its parameters and buffers are in place."""

    def copies_of(self, parameter: torch.Tensor) -> dict[int, torch.Tensor]:
        """The copies that other memory spaces have of a parameter, by space."""
        return self._sent.of(parameter)

    @property
    def all_modules(self) -> list[nn.Module]:
        """The user's modules, and those of the devices."""
        return [*self.modules, *(part for replica in self.list for part in replica.modules)]

    @property
    def plain_objects(self) -> list[Any]:
        """The objects in attributes that are followed, of the user's module and of the devices'."""
        found = [] if self._attributes is None else self._attributes.holders[len(self.modules) :]
        copies = [replica.counterparts.get(id(one), one) for one in found for replica in self.list]
        return [*found, *(copy for copy in copies if all(copy is not one for one in found))]

    def hooks_watched(self, function: Any) -> contextlib.AbstractContextManager[None]:
        """Around a run of one thread: hooks raise if they keep a tensor that `function` reads, but not in its module."""
        if not self.shared:
            return contextlib.nullcontext()
        named = [*self.named_modules]
        for replica in self.list:
            named += [
                (name, one)
                for (name, ours), one in zip(self.named_modules, replica.modules, strict=True)
                if one is not ours
            ]
        return hooks_watched([self._module, *(replica.module for replica in self.list)], named, function)

    def release(self) -> None:
        """Release the modules of the devices. The user's module stays."""
        self.list = [] if self.shared else self.list
        self._seen = []
        self._sent.release()
        self._flat = None

    def clear_gradients(self) -> None:
        """Drop the gradients of the copies. The user's own stay."""
        for replica in self.list if self.shared else ():
            replica.clear_gradients()

    def share(self) -> None:
        """From now on a single device has a copy of the module, too. The copy's parameters have no hooks, and a ``.grad`` of their own."""
        if not self.shared:
            self.shared = True
            try:
                with torch.inference_mode(False):
                    self._build()
            except BaseException:
                self.shared = False
                raise

    def renew(self) -> None:
        """Make them anew, since parameters and buffers have got other memory."""
        with torch.inference_mode(False):
            self._build()

    def refresh(self, *, hooks: bool = False) -> None:
        """Follow what the user changed on the module, before a step. Costs a pass over cached lists.

        Refuses parameters with gradient hooks, unless they may have `hooks`.

        This leaves inference mode, which the caller may be in for `predict`: a later step could not use tensors that are made in it.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.refresh(hooks=hooks)
        with NoGrad():
            self._refresh(hooks)

    def _refresh(self, hooks: bool) -> None:
        if not self._fits():
            self._places.drain()  # devices may still use what is about to be released
            self._build()
        if self._attributes is None:
            self._training_modes()
            return
        if not self._attributes.same:
            self._follow(self._attributes)
        if not hooks and (any(map(_hooks, self.parameters)) or any(map(_late_hooks, self.parameters))):
            for name, parameter in zip(self.names, self.parameters, strict=True):
                check_hooks(name, parameter)
        requires_grad, training = list(map(_requires_grad, self.parameters)), self._training_modes()
        anew = bool(self.graphs)
        if self._flat is not None and self._places.queues is not None and self._flat.pull(anew=anew):
            self._places.queues.set_copies(self._sent.entries, self._flat.copies)
        for replica in self.list:
            replica.follow(requires_grad, training, anew=anew)

    def _training_modes(self) -> list[bool]:
        """The modes of the user's modules. Counts their changes."""
        training = list(map(_training, self.modules))
        modes = [*training, *[part._buffers.get("running_mean") is None for _, part in self.norms]]
        if modes != self._modes:
            self.modes, self._modes = self.modes + 1, modes
        return training

    def _follow(self, attributes: Attributes) -> None:
        """Follow attributes and hooks that the user has changed. What a replica's forward has set stays, unless the user has changed it."""
        # A forward of the user may have left values on the module. They are left out, since the replicas' forwards set their own.
        changes = [change for change in attributes.changes() if not is_of_a_forward(change.value)]
        hooked = not attributes.same_hooks
        if self.common is not None:
            for change in changes:
                self.common.drop(attributes.path_of(change))
        self.changes += bool(changes or hooked)  # else only modes have changed, which are followed elsewhere
        if hooked or attributes.need_new_replicas(changes):
            self._places.drain()
            return self._build()
        if any(type(change.value) not in SIMPLE for change in changes):
            self._places.drain()  # devices may still use tensors that are about to be released
            reach = Reach(self._module)
            if self.common is not None:
                self.common.forget()
            memos = [
                replica.carry(changes, attributes.holders, self._in_common(reach, device))
                for device, replica in enumerate(self.list)
            ]
            # New objects may change later, so they have to be watched.
            attributes = self._attributes = _watched(reach, memos[0])
            # The others may change, and a new object may get the identity of an object that is gone.
            wanted = set(map(id, (*self.parameters, *attributes.holders)))
            for replica, memo in zip(self.list, memos, strict=True):
                replica.counterparts = {key: theirs for key, theirs in memo.items() if key in wanted}
            return self._watch_forwards()
        for replica in self.list:
            carry(changes, attributes.holders, replica.counterparts)
            if replica.written is not None:
                replica.written.note()
        return attributes.note()

    def _watch_forwards(self) -> None:
        for replica in self.list:
            replica.written = None
            if self._attributes is not None:
                replica.written = Written(self._attributes, replica.counterparts, self._resets)

    def reset_containers(self) -> None:
        """From now on put lists and dictionaries of the replicas back after each step. A forward that fills them leaves nothing for the next one."""
        if not self._resets:
            self._resets = True
            self._watch_forwards()

    def followed(self) -> Callable[[], None]:
        """A function that brings back what the replicas have followed up to now, after their attributes and the user's were put back."""
        attributes, generation = self._attributes, self.generation
        noted = None if attributes is None else attributes.noted()

        def restore() -> None:
            if self.generation != generation or self._attributes is not attributes:
                return self.renew()
            if attributes is not None and noted is not None:
                vars(attributes).update(noted, _saved=list(noted["_saved"]))
            for replica in self.list:
                if replica.written is not None:
                    replica.written.note()
            return None

        return restore

    def push_written(self, device: int, micro_batches: list[int], step: object) -> None:
        """Give the user's module, after a step, what the forwards of this device have written to attributes.

        A number that each of the `micro_batches` has raised by the same counts forwards. It is raised once, and on all replicas. A second call for
        one `step` finishes what an interrupted one has begun.
        """
        written = self.list[device].written
        for replica in self.list if self._resets else ():
            if replica.written is not None:
                replica.written.reset()
        if written is None or not written.changed:
            return
        if self._counted is None or self._counted[0] is not step:
            self._counted = step, [] if set(micro_batches) == {1} else self._counts(written, micro_batches)
        for one, place, value in self._counted[1]:
            one.put(place, value)
        written.push(self._places.home)
        for replica in self.list:
            if replica.written is not None and replica.written is not written:
                replica.written.note()

    def _counts(self, written: Written, micro_batches: list[int]) -> list[tuple[Written, tuple[int, str], int]]:
        """The numbers that count forwards: where they are, and what they are after one more."""
        counts = []
        all_written = [replica.written for replica in self.list if replica.written is not None]
        ran = [(one.raised(), times) for one, times in zip(all_written, micro_batches, strict=False) if times]
        for place, (then, _) in written.raised().items():
            steps = {divmod(found[place][1] if place in found else 0, times) for found, times in ran}
            if len(steps) == 1 and not (step := steps.pop())[1]:
                counts += [(one, place, then + step[0]) for one in all_written]
        return counts

    def _present_storages(self) -> list[Any]:
        """Where the parameters lie that replicas share, and in which order of their elements."""
        return [*map(_data_ptr, self.parameters), *map(_stride, self.parameters)] if self.shared else []

    def _fits(self) -> bool:
        """Whether structure, identity and storage of the parameters are still those that the replicas were made from."""
        return (
            self._registered.same(self.modules)
            and self._buffer_names.same(self.modules)
            and self._present_storages() == self._storages
            and (self._attributes is None or self._attributes.same_types)
            and all(seen.same for seen in self._seen)
        )


def _watched(reach: Reach, counterparts: dict[int, Any]) -> Attributes:
    """The attributes whose changes are followed. Objects that were not copied, such as loggers, are left out, since replicas share them."""
    reach.objects = {path: one for path, one in reach.objects.items() if counterparts.get(id(one), one) is not one}
    return Attributes(reach)
