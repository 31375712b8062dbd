"""Where DistributedDataParallel and FSDP wait for other ranks within the forward and the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline import InvalidArgument
from paceline.torch._ranks.clock import Clock

# The methods of FSDP2's groups of parameters in which a rank waits for others. Each has little work of its own, and none that depends on items.
_WAITING = ("unshard", "wait_for_unshard", "post_backward")
# In how many steps to look for modules. With plain DDP there may be none to find.
_STEPS = 3


class Waiting:
    """A method during which the clock stands."""

    def __init__(self, clock: Clock | None, method: Callable[..., Any]) -> None:
        self._clock, self._method = clock, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        was = self._clock is not None and self._clock.pause()
        try:
            return self._method(*args, **kwargs)
        finally:
            if was and self._clock is not None:
                self._clock.resume()

    def __reduce__(self) -> Any:
        return Waiting, (None, self._method)  # a copy of a module is not watched


class Waits:
    """Finds the modules that wait for other ranks, and lets the clock stand while they do.

    At the end of a backward DDP waits for its sums. `BalancedRanks` stops the clock before, whatever the module. What is left are the buffers
    that DDP sends before a forward, and the collectives of FSDP2 in forward and backward. These modules are found when one of the first steps
    calls them, by a hook for all modules that is there only until then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps = 0  # that have looked
        self._hook: Any = None

    def begin(self) -> None:
        """Look for modules in the step that begins, if it is one of the first."""
        if self._steps < _STEPS:
            self._steps += 1
            self._hook = register_module_forward_pre_hook(self._found)

    def end(self) -> None:
        """The end of the step."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def watch(self, module: nn.Module) -> bool:
        """Watch the modules in this one that wait. Returns whether there are any."""
        found = False
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # loaded if there are such modules; loading it takes long
        for part in module.modules():
            if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
                raise InvalidArgument(
                    "BalancedRanks: the module is a FullyShardedDataParallel. It waits for other ranks in places that cannot be told from its own work. "
                    "Use torch.distributed.fsdp.fully_shard."
                )
            if isinstance(part, nn.parallel.DistributedDataParallel):
                found = True
                part._sync_buffers = Waiting(self._clock, part._sync_buffers)  # type: ignore[method-assign]
            if fsdp is not None and isinstance(part, fsdp.FSDPModule):
                found = True
                state: Any = part._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                    for name in _WAITING if group is not None else ():
                        setattr(group, name, Waiting(self._clock, getattr(group, name)))
        return found

    def _found(self, module: nn.Module, _: Any) -> None:
        if self._hook is not None and not torch.compiler.is_compiling() and self.watch(module):
            self.end()
            self._steps = _STEPS
