"""Hands pytest what gpu_plugin has. Type checkers take it for the other conftest, so that nothing else is here."""

from gpu_plugin import (
    box,
    full_precision,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_generate_tests,
)

__all__ = ["box", "full_precision", "pytest_addoption", "pytest_collection_modifyitems", "pytest_generate_tests"]
