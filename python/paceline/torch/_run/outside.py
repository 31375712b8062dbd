"""Gradients of tensors outside of the trainer's module: a head, a regulariser or weights that ``loss_fn`` refers to by itself.

Each device adds the gradient of its part of the batch to the ``.grad`` of such a tensor, one device at a time (PyTorch locks it). Together that
is the gradient of the batch, as on one device. Devices add in the order in which they finish, so the last bits may differ from run to run if
there are more than two parts. The code here puts ``.grad`` back if a step fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from paceline.torch._replicas.copies import check_hooks
from paceline.torch._replicas.reach import unwrapped
from paceline.torch._replicas.replicas import Replicas

_SIGNED = 12  # nodes from the root of a graph that are compared to see whether the graph is a new one
_MOST_SIGNS = 64  # graphs of one function that are remembered
_LOOKS = 2  # steps of one function in which its graphs are searched, at a microsecond per node
_MOST_FUNCTIONS = 64  # remembered


class RestingHooks:
    """Hooks of tensors that are not called until `restore`. Their tables are emptied: PyTorch goes on to call late hooks whose table is taken away."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Let the hooks of this tensor rest."""
        for table in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            if table:
                self._kept.append((table, dict(table)))
                table.clear()

    def restore(self) -> None:
        """Let them be called again."""
        while self._kept:
            table, hooks = self._kept[-1]
            table.update(hooks)
            self._kept.pop()


class OutsideGradients:
    """The outside gradients of one trainer. The first steps of a function show which tensors it reaches."""

    def __init__(self) -> None:
        self._known: dict[Any, list[TensorWeakRef]] = {}
        self._steps: dict[Any, int] = {}
        self._signs: dict[Any, set[Any]] = {}  # by function, the signs of the graphs that were searched
        self._new: set[Any] = set()  # signs of graphs in this step, which its other workers still have to search
        self._lock = threading.Lock()
        self._function: Any = None
        self._replicas: Replicas | None = None  # of the step that runs
        self._own: set[int] | None = None  # the identities of the module's and the replicas' parameters
        self._looks = self._shared = self._carries = False
        self._hooks = RestingHooks()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None, int]] = {}

    def begin(self, function: Any, replicas: Replicas, *, carries: bool = False, refused: bool = False) -> None:
        """Prepare for a step.

        With `carries` the gradients are handed out later, by `taken`. Then every graph is searched, since a tensor that is missed would keep
        its gradient, and hooks of tensors rest until then. Every graph is searched, too, if outside tensors are to be `refused`: what is
        missed would train wrongly.
        """
        self._carries = carries
        if self._new:
            self._signs.setdefault(self._function, set()).update(self._new)
            self._new = set()
        function = code_of(function)
        if len(self._steps) >= _MOST_FUNCTIONS and function not in self._steps:
            self._steps.clear()
            self._known.clear()
            self._signs.clear()
        self._function, self._shared = function, replicas.shared
        steps = self._steps[function] = self._steps.get(function, 0) + 1
        # The graphs are searched again once in a while, since a loss may get another term.
        self._looks = carries or refused or steps <= _LOOKS or steps & (steps - 1) == 0
        self._replicas, self._own = replicas, None
        self._before = {}
        if known := self._known.get(function):
            alive = [(reference, reference()) for reference in known]
            self._known[function] = [reference for reference, tensor in alive if tensor is not None]
            for _, tensor in alive:
                if tensor is not None:
                    self._set_aside(tensor)

    def look(self, root: torch.Tensor) -> None:
        """Set aside the gradients of all outside tensors that a backward from `root` will add to. Called on a worker."""
        sign, signs = _sign_of(root), self._signs.get(self._function, ())
        if not self._looks and (sign in signs or len(signs) >= _MOST_SIGNS):
            return
        with self._lock:
            if self._own is None and (replicas := self._replicas) is not None:
                every = [replicas.parameters, *[replica.parameters for replica in replicas.list]]
                self._own = {id(one) for ones in every for one in ones}
            own = self._own or ()
        self._new.add(sign)
        self.hold(leaf for leaf in leaves_of(root) if id(leaf) not in own)

    def hold(self, leaves: Iterable[torch.Tensor]) -> None:
        """Set aside the gradients of these tensors. Called on a worker."""
        for leaf in leaves:
            with self._lock:
                if leaf.requires_grad and id(leaf) not in self._before:
                    self._set_aside(leaf)
                    self._known.setdefault(self._function, []).append(TensorWeakRef(leaf))

    def commit(self) -> None:
        """Add the gradients of the step to those from before. An interrupted call may be repeated."""
        while self._before:
            leaf, before, version = next(iter(self._before.values()))
            if before is not None:
                if leaf.grad is not None and before._version == version:
                    before += leaf.grad
                leaf.grad = before
            del self._before[id(leaf)]
        self._replicas = self._own = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those whose gradients are set aside for the step that runs."""
        with self._lock:
            return [leaf for leaf, _, _ in self._before.values()]

    @property
    def set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The same with the gradients that they had before."""
        with self._lock:
            return [(leaf, before) for leaf, before, _ in self._before.values()]

    @property
    def reached(self) -> torch.Size | None:
        """The shape of a tensor that got a gradient in the step, or None if there is none."""
        return next((leaf.shape for leaf, _, _ in self._before.values() if leaf.grad is not None), None)

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that got a gradient in the step, each with that gradient. Their ``.grad`` is as before the step."""
        found = [(leaf, leaf.grad) for leaf, _, _ in self._before.values() if leaf.grad is not None]
        self.restore()
        return found

    def restore(self) -> None:
        """Put the gradients back as they were before the step."""
        for leaf, before, _ in self._before.values():
            leaf.grad = before
        self._hooks.restore()
        self._before = {}
        self._replicas = self._own = None

    def _set_aside(self, leaf: torch.Tensor) -> None:
        if self._carries:
            self._hooks.add(leaf)
        elif self._shared and isinstance(leaf, nn.Parameter):
            check_hooks(f"of shape {tuple(leaf.shape)} outside of the module", leaf)
        before = leaf.grad
        self._before[id(leaf)] = leaf, before, 0 if before is None else before._version
        leaf.grad = None


def _sign_of(root: torch.Tensor) -> Any:
    """The types of the nodes near the root of the graph, where another term or another head would show."""
    nodes: list[Any] = [root.grad_fn]
    for node in nodes:  # the list grows during the loop
        if len(nodes) >= _SIGNED:
            break
        if node is not None:
            for following, _ in node.next_functions:
                nodes.append(following)
    return tuple(map(type, nodes))


def leaves_of(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that a backward from `root` adds gradients to."""
    if root.grad_fn is None:
        yield root
    for node in leaf_nodes(root):
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable


def leaf_nodes(root: torch.Tensor) -> Iterator[Any]:
    """The nodes at which the graph of `root` ends."""
    waiting: list[Any] = [] if root.grad_fn is None else [root.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        edges = node.next_functions
        if not edges:
            yield node
        for following, _ in edges:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def code_of(function: Any) -> Any:
    """The code of the function, which is the same for each lambda that one place in the program makes."""
    function = unwrapped(function)
    return getattr(function, "__code__", None) or type(function)
