"""Everything public has a docstring, C++ bindings included. Links between documents lead somewhere, and the README's program runs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from program_server import SERVER

ROOT = Path(__file__).resolve().parents[2]
# The checkout's documents, without those that environments bring into the build folder.
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for room in ("python", "cpp", "cuda", "benchmarks", "examples") for path in (ROOT / room).rglob("*.md")),
]

MODULES = ["paceline", *(f"paceline.{name}" for name in ("balance", "comm", "info", "plan", "sim"))]
if find_spec("torch") is not None:
    MODULES += ["paceline.testing.faults", "paceline.torch"]


def text_of(what: object) -> str:
    """The docstring without the signature that pybind11 puts in front."""
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
            fields = getattr(public, "__dataclass_fields__", ())  # the class's docstring has them
            yield from (
                f"{name}.{key}"
                for key, value in vars(public).items()
                if key[0] != "_" and key not in fields and not text_of(value)
            )


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented(module: str) -> None:
    assert list(undocumented(module)) == []


def prose_of(text: str) -> str:
    """The document without its programs, whose brackets are no links."""
    return re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """The anchors of the document's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(document.read_text())):
        if re.match(r"\w+://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    assert list(broken_links(document)) == []


def removed_waits() -> Any:
    """The program in tests/cuda, as a module."""
    spec = spec_from_file_location("removed_waits", ROOT / "tests" / "cuda" / "removed_waits.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_waits_names_every_wait_in_the_code() -> None:
    assert removed_waits().differences() == []


def test_a_row_that_the_table_of_waits_lacks_or_has_too_many_is_noticed() -> None:
    rows = (ROOT / "cuda" / "README.md").read_text()
    row = "| step_times.cpp | wait | `hung_.await(*over_, timeout_);` |"
    assert row in rows
    assert removed_waits().differences(rows.replace(row, row.replace("over_", "gone_"))) == [
        f"the table lacks the row {row}",
        f"no wait belongs to the row {row.replace('over_', 'gone_')}",
    ]


@pytest.mark.parametrize("name", ["README.md", "python/README.md"])
def test_the_first_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().split()) <= 1500


def test_the_start_page_leads_to_every_page_of_the_guide() -> None:
    text = (ROOT / "python" / "README.md").read_text()
    assert [page.name for page in (ROOT / "python" / "guide").glob("*.md") if f"(guide/{page.name})" not in text] == []


def test_the_program_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "sklearn"):
        pytest.importorskip(package, reason=f"the program needs {package}")
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    monkeypatch.chdir(ROOT / "tests")
    done = SERVER.run(program[1], timeout=240, imports=["sklearn.datasets"])
    assert done.returncode == 0, done.stderr
    assert re.match(r"loss 0\.\d{3}\nauto balance, 100 steps measured", done.stdout), done.stdout


# The guides below examples/: they work as they say.


CONVERT = Path(__file__).resolve().parents[2] / "examples" / "python" / "convert"


def test_the_diff_in_the_guide_is_the_one_between_the_scripts() -> None:
    before, after = ((CONVERT / name).read_text().splitlines() for name in ("before.py", "after.py"))
    shown = re.search(r"```diff\n(.*?)\n```", (CONVERT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    real = difflib.unified_diff(before, after, "before.py", "after.py", lineterm="")
    assert shown[1].splitlines() == list(real)


def numbers(script: Path) -> list[float]:
    done = SERVER.run_file(script, imports=["sklearn.datasets"])
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]


def test_the_converted_script_prints_the_same_losses() -> None:
    for package in ("torch", "sklearn"):
        pytest.importorskip(package, reason=f"the guide needs {package}")
    before, after = numbers(CONVERT / "before.py"), numbers(CONVERT / "after.py")
    assert len(before) == 5  # the losses of four epochs, and the accuracy
    assert before[3] < before[0] / 2
    # The sums of a gradient have another order, and training amplifies the difference.
    assert after[:4] == pytest.approx(before[:4], rel=0.02)
    assert after[4] == pytest.approx(before[4], abs=2.0)
