"""Load an example that trains a transformer, so that the races train the documented network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[3] / "examples" / "python"
TEXT = _FOLDER / "alice.txt"


def load(name: str = "text") -> Any:
    """Import examples/python/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
