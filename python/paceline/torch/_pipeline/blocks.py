"""Where a module may be cut: its blocks, which its forward calls one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from paceline import InvalidArgument
from paceline.torch._replicas.compiled import compiles

Blocks = str | Sequence[nn.Module]
_ENOUGH = 4  # blocks; with fewer, smaller ones are looked for inside of them
_MOST_OF = 0.9  # of the parameters that lie in blocks have to lie in smaller ones, too
# Of the parameters of these blocks: other blocks with as many, such as those of an encoder, are blocks, too.
_WORTH = 0.25


class Block(NamedTuple):
    """A block with its name in the module."""

    name: str
    module: nn.Module


def blocks_of(module: nn.Module, blocks: Blocks | None) -> list[Block]:
    """The blocks of a module, in the order of its forward.

    None: those parts of one class in lists and sequences (`nn.ModuleList`, `nn.Sequential`) that have most of the parameters, and parts of other
    classes beside them that have many. In a transformer these are its layers, those of encoder and decoder, in a ResNet the blocks of all its
    layers. They are in the order in which they are registered, which need not be that of the forward.
    """
    names = {id(part): name for name, part in module.named_modules()}
    if isinstance(blocks, str):
        found = _children(module, blocks)
    elif blocks is None:
        found = _found(module)
    elif isinstance(blocks, Iterable):
        found = list(blocks)
    else:
        raise InvalidArgument(
            f"Pipeline: blocks is a {type(blocks).__name__}; give the name of a list of modules, or the modules in the order of the forward."
        )
    if not found:
        raise InvalidArgument(
            "Pipeline: the module has no list or sequence of two or more parts of one class, so it is not known where to cut it. Name its blocks: "
            "blocks='transformer.h', or a list of modules in the order in which the forward calls them."
        )
    for index, part in enumerate(found):
        if not isinstance(part, nn.Module) or id(part) not in names:
            raise InvalidArgument(
                f"Pipeline: blocks[{index}] is {type(part).__name__}, and no part of the module. Give modules that are in it."
            )
        if not _has_forward(part):
            raise InvalidArgument(
                f"Pipeline: blocks[{index}], {names[id(part)]}, is a {type(part).__name__}, which has no forward, so nothing calls it. Give the "
                "modules in it that the forward calls, in this order."
            )
    if len({id(part) for part in found}) < len(found):
        raise InvalidArgument("Pipeline: blocks has a module twice. A block runs once in a forward.")
    named = [Block(names[id(part)], part) for part in found]
    _check_compiled(module, named)
    return named


def _children(module: nn.Module, path: str) -> list[nn.Module]:
    try:
        part = module.get_submodule(path)
    except AttributeError as error:
        raise InvalidArgument(
            f"Pipeline: blocks={path!r}, and the module has no part of this name: {error}."
        ) from error
    return list(part.children())


def _found(module: nn.Module) -> list[nn.Module]:
    by_class: dict[type, list[nn.Module]] = {}
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            for child in _called_parts(part):
                ones = by_class.setdefault(type(child), [])
                if not any(child is one for one in ones):
                    ones.append(child)
    weights = {kind: sum(map(_elements, ones)) for kind, ones in by_class.items() if len(ones) > 1}
    if not weights or not max(weights.values()):
        return list(module.children()) if isinstance(module, nn.Sequential) else []
    most = max(weights.values())
    # Outer blocks come first: named_modules() goes from the outside to the inside.
    candidates = [
        _with_others(module, kind, by_class, weights) for kind, weight in weights.items() if weight >= _MOST_OF * most
    ]
    return next((ones for ones in candidates if len(ones) >= _ENOUGH), max(candidates, key=len))


def _with_others(
    module: nn.Module, kind: type, by_class: dict[type, list[nn.Module]], weights: dict[type, int]
) -> list[nn.Module]:
    """The blocks of one class with those of others that lie beside them and are worth it."""
    chosen = list(by_class[kind])
    for other, weight in weights.items():
        inside = {id(part) for one in chosen for part in one.modules()}
        around = {id(one) for one in chosen}
        beside = not any(
            id(one) in inside or any(id(part) in around for part in one.modules()) for one in by_class[other]
        )
        if beside and weight >= _WORTH * weights[kind]:
            chosen += by_class[other]
    wanted = {id(one) for one in chosen}
    return [part for part in module.modules() if id(part) in wanted]


def _has_forward(module: nn.Module) -> bool:
    """Whether it may be called, as a list of modules may not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a list, and in the place of parts that are lists themselves their parts."""
    for child in module.children():
        if _has_forward(child):
            yield child
        else:
            yield from _called_parts(child)


class OtherOrderError(Exception):
    """The forward calls the blocks in another order than thought."""

    def __init__(self, calls: Sequence[int]) -> None:
        super().__init__()
        self.calls = calls  # of blocks, by number


def in_order_of(calls: Sequence[int], blocks: list[Block]) -> None:
    """Put the blocks into the order in which they were called. Those that were not called come last."""
    rest = [index for index in range(len(blocks)) if index not in calls]
    blocks[:] = [blocks[index] for index in (*calls, *rest)]


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_compiled(module: nn.Module, blocks: list[Block]) -> None:
    """Raise if something that is compiled as a whole has several blocks in it: a compiled graph has no calls of blocks."""
    ours = {id(block.module) for block in blocks}
    for name, part in module.named_modules():
        inside = sum(id(one) in ours for one in part.modules())
        if inside > 1 and compiles(part):
            raise InvalidArgument(
                f"Pipeline: {name or 'the module'} is compiled as a whole, so there are no calls of blocks to cut it at. Compile the blocks "
                "instead: for block in blocks: block.compile()."
            )
