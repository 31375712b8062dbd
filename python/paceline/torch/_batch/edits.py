"""Detects that a function which runs twice over the same items edits the batch in place."""

from __future__ import annotations

import torch

from paceline import InvalidArgument
from paceline.torch._batch.batch import Batch


class Edits:
    """Checks that a second run over the same items leaves the caller's tensors as the first run left them.

    Slices have the memory of these tensors, so a second run begins with what the first has written. Setting the labels of padding to -100 twice
    changes nothing. Dividing pixels by 255 twice gives the gradient of another batch.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self.end()

    def end(self) -> None:
        """Forget the batch at the end of a call."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.count_edits(of_all=True)
        self._versions: list[int] = []
        self._left: list[torch.Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Note the state of the batch when a run begins."""
        self._batch = batch
        self._versions = list(map(_version, batch.leaves))

    def run_again(self, *, complete: bool) -> None:
        """Prepare for another run, after one that does not count. `complete` says whether all items ran in that one.

        Raises
        ------
        InvalidArgument
            If some items are changed already, and others may not be.
        """
        if self._batch is None:
            return
        self._batch.count_edits(of_all=True)
        pairs = zip(self._batch.tensors(), self._versions, strict=True)
        edited = [path for (path, tensor), version in pairs if _version(tensor) != version]
        if edited and not complete:
            raise _refusal(edited[0])
        self._left = [tensor.clone() for tensor in self._batch.leaves] if edited else []

    def check(self) -> None:
        """Raise if the run that counts left the tensors in another state than an earlier run."""
        if not self._left or self._batch is None:  # one run was enough
            return
        for left, (path, tensor) in zip(self._left, self._batch.tensors(), strict=True):
            if not torch.allclose(left, tensor, rtol=0.0, atol=0.0, equal_nan=True):
                raise _refusal(path)


def _refusal(path: str) -> InvalidArgument:
    return InvalidArgument(
        f"paceline: {path} is changed in place by the function that runs on the devices, and its items have to run a second time: "
        "memory ran out, or random numbers were drawn, buffers written or a single item refused for the first time. They would be changed "
        f"twice. Change a copy of the slice (x = x.clone()). Nothing was committed, but {path} is changed."
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
