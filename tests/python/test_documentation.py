"""Whoever asks help() of anything public gets an answer; also of what is written in C++, which no linter reads."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

MODULES = ["paceline", *(f"paceline.{name}" for name in ("balance", "comm", "info", "plan", "sim"))]
if find_spec("torch") is not None:
    MODULES.append("paceline.torch")


def text_of(what: object) -> str:
    """Its docstring without the signature that pybind11 puts first."""
    return re.sub(r"^\w+\(.*\)( -> .*)?\n*", "", inspect.getdoc(what) or "").strip()


def undocumented(module: str) -> Iterator[str]:
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        public = getattr(loaded, name)
        if not (inspect.isclass(public) or inspect.isroutine(public)):
            continue
        if not text_of(public):
            yield name
        if inspect.isclass(public) and not issubclass(public, BaseException):
            yield from (f"{name}.{key}" for key, value in vars(public).items() if key[0] != "_" and not text_of(value))


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented(module: str) -> None:
    assert list(undocumented(module)) == []


def test_a_missing_docstring_is_noticed() -> None:
    def documented() -> None:
        """Text."""

    documented.__doc__ = "documented() -> None\n\nText."
    assert text_of(documented) == "Text."
    documented.__doc__ = "documented(count: int = 3) -> list[int]\n"
    assert text_of(documented) == ""
