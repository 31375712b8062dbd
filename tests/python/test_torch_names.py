"""The private names of PyTorch that the package uses are those in torch_names.py, and the PyTorch that is installed has them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.utils import prune

import paceline
from torch_names import ATTRIBUTES, NAMES, NEED_CUDA, OTHERS

PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def sources() -> Iterator[ast.Module]:
    for path in sorted(Path(paceline.__file__).parent.rglob("*.py")):
        yield ast.parse(path.read_text())


def written_out(tree: ast.Module) -> Iterator[str]:
    """The names below ``torch`` in a file: what it imports, and what it reads of that."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    imported[each.asname or "torch"] = each.name if each.asname else "torch"
                    yield each.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                imported[each.asname or each.name] = f"{node.module}.{each.name}"
                yield f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in imported:
            yield ".".join([imported[inner.id], *reversed(parts)])


def is_private(name: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in name.split("."))


def test_the_list_has_every_private_name_that_is_written_out() -> None:
    used = {name for tree in sources() for name in written_out(tree) if is_private(name)}
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    unlisted = used - set(NAMES)
    # A name may be read of a module that was imported under another name, and then it is not seen here as written out.
    unused = {name for name in NAMES if name not in used and not any(each.startswith(f"{name}.") for each in used)}
    assert (unlisted, unused) == (set(), set()), "tests/python/torch_names.py and the package differ"


def test_the_list_has_every_private_attribute_that_the_package_reads_and_does_not_define() -> None:
    read: set[str] = set()
    defined = {path.stem for path in Path(paceline.__file__).parent.rglob("*.py")}  # its own modules
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                (read if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add(node.asname or node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.islower():
                read.add(node.value)
    listed = {name for names in ATTRIBUTES.values() for name in names} | OTHERS
    known = listed | {part for name in NAMES for part in name.split(".")}
    unlisted = {name for name in read - defined - known if PRIVATE.fullmatch(name)}
    assert (unlisted, listed - read - defined) == (set(), set()), "tests/python/torch_names.py and the package differ"


def resolve(name: str) -> Any:
    parts = name.split(".")
    found: Any = torch
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            # A function may hide the module of its name, and a module may have to be imported first.
            found = importlib.import_module(".".join(parts[: index - 1]))
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:index]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_has_the_private_name(name: str) -> None:
    if name in NEED_CUDA and torch.version.cuda is None:
        pytest.skip("this build of PyTorch has no CUDA")
    resolve(name)


def test_pytorch_has_every_public_name_that_is_written_out() -> None:
    names = {name for tree in sources() for name in written_out(tree) if not is_private(name)}
    assert len(names) > 100
    missing = []
    for name in sorted(names):
        try:
            resolve(name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert missing == [], f"PyTorch {torch.__version__} is older or newer than what the package is written for"


def objects() -> dict[str, Any]:
    pruned = prune.l1_unstructured(nn.Linear(2, 2), "weight", amount=1)
    return {
        "parameter": nn.Parameter(torch.ones(1)),
        "module": nn.Linear(1, 1),
        "storage": torch.ones(1).untyped_storage(),
        "operator": torch.ops.aten.add.Tensor,
        "tracing": torch.fx._symbolic_trace,
        "jagged": torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "pruning": next(iter(pruned._forward_pre_hooks.values())),
        "compiled": torch.compile(is_private, backend="eager"),
        "ddp": nn.parallel.DistributedDataParallel,
        "fsdp": FSDPModule,
        "fsdp state": FSDPState(),
        "fsdp group": FSDPParamGroup,
        "process group": torch.distributed.ProcessGroup,
        "backend options": torch._C._distributed_c10d.Backend.Options,
    }


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_pytorchs_objects_have_the_attributes(kind: str) -> None:
    one = objects()[kind]
    assert [name for name in ATTRIBUTES[kind] if not hasattr(one, name)] == []
