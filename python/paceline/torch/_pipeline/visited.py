"""Which modules are called on devices where their own parameters and buffers may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from paceline import InvalidArgument
from paceline.torch._pipeline.blocks import Block
from paceline.torch._replicas.compiled import compiles


class Visited(NamedTuple):
    """A module whose calls are followed, with the modules, by name, whose tensors are brought to it."""

    module: nn.Module
    parts: list[tuple[str, nn.Module]]
    compiled: bool


def visited_in(
    modules: Sequence[tuple[str, nn.Module]], blocks: Sequence[Block]
) -> tuple[list[Visited], dict[int, list[nn.Module]]]:
    """The modules that are visited, and the compiled blocks, by number, with the modules in them whose tensors are brought.

    Compiled code shows no calls of what is inside of it, so its tensors are brought when it is called. Refuses code that was compiled for CUDA
    graphs, and modules that are compiled as a part of another one and are used beside it.
    """
    outermost: dict[int, tuple[str, nn.Module]] = {}  # what is compiled, by the modules in it
    for name, part in modules:
        if compiles(part):
            _check_graphs(name, part)
            for inner in part.modules():
                outermost.setdefault(id(inner), (name, part))
    _check_alone(modules, outermost)
    numbers = {id(block.module): number for number, block in enumerate(blocks)}
    compiled: dict[int, list[nn.Module]] = {
        number: [] for number, block in enumerate(blocks) if id(block.module) in outermost
    }
    visited: dict[int, Visited] = {}
    for name, part in _outside_of(modules, blocks):
        _, whole = outermost.get(id(part), (name, part))
        if numbers.get(id(whole)) in compiled:
            compiled[numbers[id(whole)]].append(part)
        else:
            one = visited.setdefault(id(whole), Visited(whole, [], id(part) in outermost))
            one.parts.append((name, part))
    return list(visited.values()), compiled


def _check_alone(modules: Sequence[tuple[str, nn.Module]], outermost: dict[int, tuple[str, nn.Module]]) -> None:
    for name, part in modules:
        around = outermost.get(id(part))
        for own_name, inner in part.named_children():
            whole_name, whole = outermost.get(id(inner), ("", inner))
            if whole is not inner and (around is None or around[1] is not whole):
                path = f"{name}.{own_name}" if name else own_name
                raise InvalidArgument(
                    f"Pipeline: {path} is also a part of {whole_name}, which is compiled as a whole. Calls in compiled code are not seen, so the "
                    "tensors of such a module cannot be brought to where it is called. Leave out the compile() of one of them, or compile "
                    f"{path} by itself."
                )


def _check_graphs(name: str, part: nn.Module) -> None:
    code = part if hasattr(part, "get_compiler_config") else getattr(part, "_compiled_call_impl", None)
    config = getattr(code, "get_compiler_config", lambda: None)()
    if isinstance(config, dict) and config.get("triton.cudagraphs"):
        raise InvalidArgument(
            f"Pipeline: {name} is compiled for CUDA graphs, whose results are overwritten by the next run, and several micro-batches are under "
            "way at once. Compile it without mode='reduce-overhead' or 'max-autotune'; 'max-autotune-no-cudagraphs' is allowed."
        )


def _outside_of(modules: Sequence[tuple[str, nn.Module]], blocks: Sequence[Block]) -> list[tuple[str, nn.Module]]:
    """The modules with tensors of their own that may be called on another device than theirs: all but those that are in one block only."""
    block_of: dict[int, int] = {}  # by identity of modules and tensors; -1: of several
    for index, block in enumerate(blocks):
        parts = list(block.module.modules())
        for one in (*parts, *block.module.parameters(), *block.module.buffers()):
            block_of[id(one)] = index if block_of.get(id(one), index) == index else -1
    for _, part in modules:
        if id(part) not in block_of:
            for one in _own(part):
                block_of[id(one)] = -1
    return [
        (name, part)
        for name, part in modules
        if _own(part) and (block_of.get(id(part), -1) < 0 or any(block_of[id(one)] < 0 for one in _own(part)))
    ]


def _own(part: nn.Module) -> list[Any]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]
