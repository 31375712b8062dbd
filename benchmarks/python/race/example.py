"""Load the example that trains a transformer on text, so that the races train the documented network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[3] / "examples" / "python"
TEXT = _FOLDER / "alice.txt"


def load() -> Any:
    """Import examples/python/text.py as a module."""
    spec = importlib.util.spec_from_file_location("text_example", _FOLDER / "text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
