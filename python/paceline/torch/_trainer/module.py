"""`Module`: forward over all devices of one machine, for code that computes its loss from the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import Device, DeviceGroup, InvalidArgument
from paceline.comm import Transport
from paceline.torch._replicas.copies import Replicate
from paceline.torch._trainer.arguments import Balance, BatchNorm
from paceline.torch._trainer.proofs import Prove
from paceline.torch._trainer.trainer import DataParallel

_T = TypeVar("_T", bound="Module")


class Module(nn.Module):
    """A module whose forward and backward run on all devices, in place of `torch.nn.DataParallel`.

    ``out = module(x)`` splits the tensors among its arguments along dimension 0, runs the forward on each device's copy and returns the
    outputs of the whole batch. The caller computes any loss from them. Its ``backward`` sends each device the gradients of its part, and gives
    parameters, and inputs that require it, the gradient of one device. So a loss may couple the items of the batch, as contrastive losses do.

    Shares follow the measured times of the forward. Each device runs its share as one micro-batch, since the graph of the whole batch stays
    alive until the backward, and all outputs come to the first device. `DataParallel.loss` needs neither, and is faster for large outputs.

    Parameters
    ----------
    module
        The module to run. It is `module` of this one. The keys of ``state_dict`` are those of `module`.
    devices, balance, replicate, timeout, transport, reduce_dtype, batch_norm, prove
        As for `DataParallel`. A call that is proved runs on the user's module, with its graph, and is compared with the outputs of the devices. With ``batch_norm="synchronised"`` the devices also meet in the backward.

    Notes
    -----
    Where no gradients are wanted, as under ``torch.no_grad()``, the call is `DataParallel.predict`. BatchNorm in training normalises over each
    device's share, unless ``batch_norm="synchronised"``. ``backward`` may run once for each forward. With ``create_graph=True`` it raises.

    Examples
    --------
    >>> module = Module(model)                                                      # doctest: +SKIP
    >>> loss = contrastive(module(images), module(texts))                           # doctest: +SKIP
    >>> loss.backward()                                                             # doctest: +SKIP
    """

    def __init__(
        self,
        module: nn.Module,
        devices: str | Sequence[str | Device] | DeviceGroup = "auto",
        *,
        balance: Balance = "auto",
        replicate: Replicate | None = None,
        timeout: float = 600.0,
        transport: Transport = "auto",
        reduce_dtype: torch.dtype | None = None,
        batch_norm: BatchNorm = "apart",
        prove: Prove | None = None,
    ) -> None:
        super().__init__()
        trainer = DataParallel(
            module,
            devices,
            balance=balance,
            replicate=replicate,
            timeout=timeout,
            transport=transport,
            reduce_dtype=reduce_dtype,
            corrections=False,  # one micro-batch per device
            batch_norm=batch_norm,
            prove=prove,
        )
        self.module = module
        self.trainer = trainer
        hooks: Any = self  # PyTorch does not type the method
        hooks.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """What ``module(*arguments, **options)`` returns, for the whole batch.

        Raises
        ------
        InvalidArgument
            If no argument has items to split, or if an output has no row per item. The message says which.
        Exception
            What the module raised on a worker, with a note that names the device.
        """
        if not torch.is_grad_enabled():
            return self.trainer.predict((arguments, options), _call)
        return self.trainer._passes.forward(_call, (arguments, options))

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The state of `module`, with its keys."""
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of `module`."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def __deepcopy__(self, memo: Any) -> Any:
        raise InvalidArgument(
            "Module: it has workers, which cannot be copied. Copy what it runs, copy.deepcopy(module.module), for an average of the weights, "
            "for example."
        )

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self.trainer.close()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.trainer.__exit__(kind, *exception)


def _call(module: nn.Module, part: Any) -> Any:
    arguments, options = part
    return module(*arguments, **options)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the keys of `module` the name that they have in a state that an outer module loads."""
    renamed = {f"{prefix}module.{key[len(prefix) :]}" if key.startswith(prefix) else key: state[key] for key in state}
    state.clear()
    state.update(renamed)
