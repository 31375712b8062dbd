"""What a step makes of buffers that the devices' forwards have written: sums and means of their changes, in place of one device's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from paceline import InvalidArgument
from paceline._words import require_one_of
from paceline.torch._replicas.buffers import Slots, copy_all
from paceline.torch._replicas.replicas import Replicas

BufferRule = Literal["sum", "mean", "home"]
_RULES = ("sum", "mean", "home")


class BufferRules:
    """How to join the devices' buffers, by name."""

    def __init__(self, rules: Mapping[str, BufferRule], module: nn.Module) -> None:
        """Take the names of ``named_buffers()``.

        Raises
        ------
        InvalidArgument
            For a name that the module does not have, another rule, and means of whole numbers.
        """
        known = dict(module.named_buffers(remove_duplicate=False))
        for name, rule in rules.items():
            require_one_of("DataParallel", f"buffers[{name!r}]", rule, *_RULES)
            if name not in known:
                raise InvalidArgument(
                    f"DataParallel: buffers names {name!r}, and the module has no such buffer. It has {', '.join(map(repr, list(known)[:8])) or 'none'}."
                )
            if rule == "mean" and not known[name].is_floating_point():
                raise InvalidArgument(
                    f"DataParallel: buffers[{name!r}] is 'mean', and that buffer holds {known[name].dtype}. Use 'sum'."
                )
        self._rules = dict(rules)

    def joined(
        self, replicas: Replicas, items: Sequence[int], home: int, to_home: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[tuple[Slots, str, torch.Tensor]]:
        """The new values, and where they belong. Requires: the user's buffers are as before the step.

        `items`: how many each device has run. Each change counts by these in a mean.
        """
        parts = dict(replicas.named_modules)
        ran = [device for device, count in enumerate(items) if count]
        found: list[tuple[Slots, str, torch.Tensor]] = []
        for path, rule in self._rules.items():
            owner, _, name = path.rpartition(".")
            part = parts.get(owner)
            before = None if part is None else part._buffers.get(name)
            if part is None or before is None:
                continue
            theirs: list[Any] = [replicas.list[d].counterparts[id(part)]._buffers[name] for d in ran]
            if rule == "home":
                value = to_home(theirs[ran.index(home) if home in ran else 0]).clone()
            else:
                value = before.clone()
                for device, one in zip(ran, theirs, strict=True):
                    change = to_home(one) - before
                    value += change if rule == "sum" else change * (items[device] / sum(items))
            found.append((part._buffers, name, value))
        return found


def put(joined: Sequence[tuple[Slots, str, torch.Tensor]]) -> None:
    """Write the values to the user's buffers."""
    copy_all([slots[name] for slots, name, _ in joined], [value for *_, value in joined])
