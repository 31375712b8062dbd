"""The state of a training run, and saves of it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline import InvalidArgument
from paceline._words import require
from paceline.torch._devices.caller_state import bytes_of
from paceline.torch._devices.failures import noted
from paceline.torch._save.background import PendingSave
from paceline.torch._save.folder import commit, newest
from paceline.torch._save.nest import Packed
from paceline.torch._save.tensor_file import Staging
from paceline.torch._trainer.arguments import is_whole
from paceline.torch._trainer.data import Data
from paceline.torch._trainer.parts import Core, Part
from paceline.torch._trainer.speeds import read, written

_VERSION = 1


class Stateful(Protocol):
    """An optimizer, or what else has a state."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from a state."""


class Saving(Part):
    """Saves training runs and goes on with them, on any devices."""

    def __init__(self, core: Core, data: Data) -> None:
        super().__init__(core)
        self._module, self._places, self._data = core.execution.module, core.execution.places, data
        self._staging = Staging()

    def training_state(self) -> dict[str, Any]:
        """The state of the training run, beside the module's and the optimizer's. It does not depend on the number of devices.

        Returns
        -------
        dict
            ``version``; ``steps``: how many steps (and runs of `batch`) were done, in all processes; ``random``: the states of the random
            generators, for the caller's host generator under ``"host"`` and for GPUs under their UUIDs. Host devices draw what the caller's
            generator decides. ``speeds``: a JSON text with what was measured, by kind of work and class of devices (model of the GPU or of the
            processor): a hint for the first plans of another run. ``sampler``, after `batch_sampler`: the ``state_dict()`` of the sampler. Only
            numbers, strings, dictionaries and host tensors, so ``torch.load(..., weights_only=True)`` reads it. The states of Python's and
            NumPy's generators, which a trainer does not use, are not in it.

            Reading the speeds waits for GPUs.

        Raises
        ------
        Unavailable
            After `close`, or in the middle of another call.

        Examples
        --------
        >>> torch.save({"model": model.state_dict(), "trainer": trainer.training_state()}, path)  # doctest: +SKIP
        """
        with self._lifetime.between_steps("training_state"):
            return self._state()

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of `training_state`, of a trainer with any other devices.

        With the same parameters, optimizer, batches and shares, a run on host devices then draws the same random numbers and computes the same
        bits as the one that was saved. ``balance="even"`` and fixed ratios give the same shares on as many devices. GPUs that the state does not
        know get seeds that follow from it, another one for each.

        With ``balance="auto"`` the first steps have shares that fit the speeds in the state, in place of even ones. The k-th device of a class
        takes the k-th speed of that class; a device without a speed counts as fast as the fastest of its class, or else of all. The first
        timings take the place of these speeds, so wrong ones are soon corrected. Kinds of work that have run already keep their own.

        Parameters
        ----------
        state
            What `training_state` returned.

        Raises
        ------
        InvalidArgument
            If it is no such state. Nothing is changed then.
        Unavailable
            After `close`, or in the middle of another call.
        """
        with self._lifetime.between_steps("load_training_state"):
            _check_state("load_training_state", state)
            self._data.check(state)
            self._load_state(state)

    def save_async(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: Stateful | Mapping[str, Stateful] | None = None,
        extra: Any = None,
        keep: int = 3,
    ) -> PendingSave:
        """Save the run between two steps: copy it in the call, and write the copy to the disk while training goes on.

        A save is there when it is complete and on the disk; a program that is killed leaves the save before. One save is written at a time,
        and the next call waits for it. If it fails, the next call raises the error, or ``wait()`` of what this one returned, or `close`.

        Parameters
        ----------
        path
            A folder, which is made if needed. Each save is a folder in it, with a number: ``save-00000012``. It has
            ``model.safetensors``, ``optimizer.safetensors`` and other files of tensors, and JSON for the rest. Of one folder, only one
            process may be the writer.
        optimizer
            The optimizer, or a dictionary of several by name.
        extra
            Anything else to get back from `load`: a nest of dictionaries, lists, tuples, tensors, numbers, strings and None. The place for
            the epoch, the position in the data, and the ``state_dict()`` of schedulers and scalers.
        keep
            How many saves stay. When a new one is complete, older ones are removed.

        Returns
        -------
        PendingSave
            ``wait()`` returns the folder of the save when it is complete.

        Raises
        ------
        InvalidArgument
            If something cannot be saved; the message says where it is.
        OSError
            If the folder cannot be made, or if the save before could not be written. Then this one was not begun.
        Unavailable
            After `close`, or in the middle of another call.

        Notes
        -----
        Beside the module and the optimizer, memory of their size is kept for the copy.

        Examples
        --------
        >>> for step, batch in enumerate(loader):                                   # doctest: +SKIP
        ...     trainer.step(loss_fn, batch)
        ...     optimizer.step(); optimizer.zero_grad()
        ...     if step % 100 == 99:
        ...         trainer.save_async("saves", optimizer=optimizer, extra={"step": step})
        """
        require(is_whole(keep) and keep >= 1, "save_async", "keep", keep, "it must be an integer of at least 1")
        root = Path(path).absolute()  # the working directory may change while the thread writes
        with self._lifetime.between_steps("save_async"):
            self._lifetime.saver.finish()
            root.mkdir(parents=True, exist_ok=True)
            states = (
                None if optimizer is None else {name: one.state_dict() for name, one in _named(optimizer, "save_async")}
            )
            self._execution.source.fill()
            model = self._module.state_dict()
            parts = {
                "model": model,
                "versions": getattr(model, "_metadata", None),  # of the modules' own formats
                "optimizer": states,
                "trainer": self._state(),
                "extra": extra,
            }
            packed = {name: Packed(part, "save_async", name) for name, part in parts.items()}
            with_tensors = {name: part for name, part in packed.items() if part.tensors}
            images = self._staging.copied(
                {name: part.tensors for name, part in with_tensors.items()},
                {name: part.aliases for name, part in with_tensors.items()},
            )
            state = json.dumps({name: part.json for name, part in packed.items()}, allow_nan=False).encode()
            return self._lifetime.saver.start(functools.partial(commit, root, images, state, int(keep)))

    def load(self, path: str | os.PathLike[str], *, optimizer: Stateful | Mapping[str, Stateful] | None = None) -> Any:
        """Go on from the newest complete save of `save_async`, of a trainer with any other devices.

        Parameters
        ----------
        path
            The folder that `save_async` got.
        optimizer
            As for `save_async`. None: leave it out.

        Returns
        -------
        Any
            The `extra` of the save, with its tensors in the host's memory.

        Raises
        ------
        FileNotFoundError
            If there is no save, as at the first start.
        Error
            If there are saves, but none is complete. If only the newer ones are not, as after a failure of the disk, a warning says so.
        InvalidArgument
            If the save has no state of such an optimizer. Nothing is changed then.
        RuntimeError, ValueError
            From ``load_state_dict`` of the module or an optimizer, if the save does not fit it.
        Unavailable
            After `close`, or in the middle of another call.

        Examples
        --------
        >>> try:                                                                    # doctest: +SKIP
        ...     first = 1 + trainer.load("saves", optimizer=optimizer)["step"]
        ... except FileNotFoundError:
        ...     first = 0
        """
        root = Path(path)
        with self._lifetime.between_steps("load"):
            self._lifetime.saver.finish()
            folder, parts = newest(root)
            wanted = [] if optimizer is None else list(_named(optimizer, "load"))
            saved = parts["optimizer"] or {}
            if wanted and {name for name, _ in wanted} != saved.keys():
                has = f"with the optimizers {', '.join(saved)}" if saved else "without optimizer"
                has = "with one optimizer" if "" in saved else has
                raise InvalidArgument(
                    f"load: {folder} was saved {has}, which does not fit optimizer={optimizer!r}. Give what save_async got: an optimizer, a "
                    "dictionary with the same names, or None to leave them out."
                )
            _check_state("load", parts["trainer"])
            self._data.check(parts["trainer"])
            try:
                self._execution.source.fill()
                model: Any = OrderedDict(parts["model"])
                model._metadata = parts["versions"]
                self._module.load_state_dict(model)
                for name, one in wanted:
                    one.load_state_dict(saved[name])
            except Exception as error:
                noted(error, f"load: while loading {folder}")
                raise
            self._load_state(parts["trainer"])
            return parts["extra"]

    def _state(self) -> dict[str, Any]:
        generators = self._places.named_generators()
        random = {name: generator.get_state() for name, generator in generators.items()}
        return {
            "version": _VERSION,
            "steps": self._execution.steps,
            "random": random,
            "speeds": written(self._works.speeds()),
            **self._data.state(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self._data.load(state)
        ranks = self._execution.ranks
        restore_random(self._places.named_generators(), state["random"], 0 if ranks is None else ranks.rank)
        self._execution.steps = state["steps"]
        self._execution.resumed = self._execution.steps > 0
        self._works.hint(read(state.get("speeds", "{}")))  # earlier versions had none


def restore_random(
    generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor], rank: int = 0
) -> None:
    """Set generators to states by name. Others get different seeds that follow from the state of ``"host"``.

    The states are those of rank 0. Another rank must not draw the same numbers for its items, so all of its generators get seeds.
    """
    host = bytes_of(states["host"].cpu())
    known = {} if rank else states
    for name, generator in generators.items():
        if name in known:
            generator.set_state(known[name].cpu())
    for index, name in enumerate(name for name in generators if name not in known):
        number = rank.to_bytes(8, "little") + index.to_bytes(8, "little")
        seed = hashlib.blake2b(host + number, digest_size=8).digest()
        generators[name].manual_seed(int.from_bytes(seed, "little"))


def _named(optimizer: Stateful | Mapping[str, Stateful], call: str) -> Iterator[tuple[str, Stateful]]:
    """The optimizers by name. A single one has an empty name."""
    named = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    for name, one in named.items():
        if not isinstance(name, str) or not all(
            callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")
        ):
            raise InvalidArgument(
                f"{call}: optimizer{f'[{name!r}]' if named is optimizer else ''} is a {type(one).__name__}, and no optimizer. Give an optimizer, or a dictionary of "
                "optimizers by name: objects with state_dict() and load_state_dict(). Their states are saved for you."
            )
        yield name, one


def _check_state(call: str, state: Any) -> None:
    """Raise if `state` is not what `Saving.training_state` returns."""
    fields: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
    version, random = fields.get("version"), fields.get("random", {})
    if is_whole(version) and version != _VERSION:
        raise InvalidArgument(
            f"{call}: the state has version {version}, and this paceline reads version {_VERSION}. Use the paceline that saved it."
        )
    good = is_whole(version) and is_whole(fields.get("steps")) and isinstance(random, Mapping) and "host" in random
    try:
        read(fields.get("speeds", "{}"))
    except (ValueError, TypeError, AttributeError):
        good = False
    if not good or not all(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in random.values()):
        raise InvalidArgument(
            f"{call}: this is not a state of a trainer. Give what training_state() of a trainer returned."
        )
