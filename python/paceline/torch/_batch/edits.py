"""Edits of a batch in place, by a function that runs twice over the same items."""

from __future__ import annotations

import torch

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch


class Edits:
    """Whether what the function writes to its slices, which are views of the caller's tensors, is written once, or the same again.

    A step that has to run again begins with what its first run has left there. Setting the labels of padding to -100 twice changes nothing;
    dividing pixels by 255 twice gives the gradient of another batch.
    """

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """A call is over: no batch is kept alive."""
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._left: list[torch.Tensor] = []

    def begin(self, batch: Batch) -> None:
        """A run begins."""
        self._tensors = batch.tensors()
        self._versions = [_version(tensor) for _, tensor in self._tensors]

    def run_again(self, *, complete: bool) -> None:
        """After a run that does not count; `complete`: all items have run in it.

        Raises
        ------
        InvalidArgument
            If some items are changed already, and some may not be.
        """
        pairs = zip(self._tensors, self._versions, strict=True)
        edited = [path for (path, tensor), version in pairs if _version(tensor) != version]
        if edited and not complete:
            raise _refusal(edited[0])
        self._left = [tensor.clone() for _, tensor in self._tensors] if edited else []

    def check(self) -> None:
        """After the run that counts: raise if it has not left what an earlier one had left."""
        for left, (path, tensor) in zip(
            self._left, self._tensors, strict=False
        ):  # nothing is left where one run was enough
            if not torch.allclose(left, tensor, rtol=0.0, atol=0.0, equal_nan=True):
                raise _refusal(path)


def _refusal(path: str) -> InvalidArgument:
    return InvalidArgument(
        f"DataParallel: {path} is changed in place by the function that runs on the devices, and its items have to run a second time: "
        "memory ran out, or random numbers were drawn, buffers written or a single item refused for the first time. They would be changed "
        f"twice. Change a copy of the slice (x = x.clone()). Nothing was committed, but {path} is changed."
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
