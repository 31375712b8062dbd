"""Whether the binding says that it needs no lock of Python's is what CONTRIBUTING.md says of it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_binding_declares_what_the_audit_of_its_shared_state_supports() -> None:
    declares = any("mod_gil_not_used" in source.read_text() for source in (ROOT / "python" / "src").glob("*.cpp"))
    audit = (ROOT / "CONTRIBUTING.md").read_text().partition("**Python without its lock.**")[2].partition("\n\n**")[0]
    assert audit, "CONTRIBUTING.md has the audit"
    assert declares == ("does not declare" not in audit)
    assert declares == ("Not ready" not in audit), "what is not ready supports no declaration"
    for name in ("tensor_memory.cpp", "module_contents.cpp", "balance_py.cpp", "error_py.cpp"):
        assert name in audit
        assert (ROOT / "python" / "src" / name).exists(), "the audit names sources that are there"
