"""The installed package: what importing it does and does not do, and the wheel's contents."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
TORCH = "paceline.torch"
# Each sub-package of paceline.torch may import those before it.
TORCH_LAYERS = ["_batch", "_devices", "_replicas", "_run", "_features", "_check", "_save", "_trainer", "_pipeline"]


def run_fresh(program: str) -> str:
    """Run `program` in a new interpreter, because this one has already imported everything."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("heavy", ["torch", "numpy"])
def test_import_leaves_heavy_packages_alone(heavy: str) -> None:
    assert run_fresh(f"import sys, paceline; print({heavy!r} in sys.modules)") == "False"


def test_import_loads_no_other_module_than_its_own() -> None:
    """Python's typing, enum and re would take longer to load than the package."""
    # Without site-packages, because another package's .pth file may import anything.
    root = str(PACKAGE.parent)
    program = f"""if True:
        import sys
        before = set(sys.modules)
        sys.path.append({root!r})
        import paceline
        print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] != "paceline"))
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout in ("[]\n", "['atexit']\n"), done.stderr


def test_names_that_are_imported_on_first_use_are_listed() -> None:
    assert set(paceline.__all__) <= set(run_fresh("import paceline; print(*dir(paceline))").split())


def test_import_starts_no_thread() -> None:
    count = "len(list(pathlib.Path('/proc/self/task').iterdir()))"
    assert run_fresh(f"import pathlib; a = {count}; import paceline; print({count} - a)") == "0"


def test_import_prints_nothing() -> None:
    assert run_fresh("import paceline") == ""


def test_import_configures_no_logging() -> None:
    program = (
        "import logging; import paceline; print(logging.getLogger().handlers, sorted(logging.root.manager.loggerDict))"
    )
    assert run_fresh(program) == "[] []"


def test_everything_in_all_can_be_imported() -> None:
    assert len(paceline.__all__) == len(set(paceline.__all__))
    missing = [name for name in paceline.__all__ if not hasattr(paceline, name)]
    assert missing == []


def test_version_is_the_one_of_the_metadata() -> None:
    assert paceline.__version__ == metadata.version("paceline")


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core" / "__init__.pyi").is_file()


def test_wheel_holds_one_library() -> None:
    files = metadata.files("paceline")
    assert files is not None
    libraries = [str(file) for file in files if "libpaceline" in file.name]
    assert libraries == ["paceline/libpaceline.so"]
    binaries = [file.name for file in files if ".so" in file.suffixes and file.name != "libpaceline.so"]
    assert len(binaries) == 1
    assert binaries[0].startswith("_core.")


def test_wheel_keeps_headers_and_sources_out() -> None:
    files = metadata.files("paceline")
    assert files is not None
    assert [str(file) for file in files if file.suffix in {".hpp", ".cpp", ".cmake", ".a"}] == []


def test_binding_finds_the_library_beside_it() -> None:
    maps = run_fresh("import paceline, pathlib; print(pathlib.Path('/proc/self/maps').read_text())")
    loaded = {line.split()[-1] for line in maps.splitlines() if "libpaceline" in line}
    assert loaded == {str(PACKAGE.resolve() / "libpaceline.so")}


def test_command_line_program_is_installed() -> None:
    scripts = metadata.entry_points(group="console_scripts", name="paceline")
    assert [script.value for script in scripts] == ["paceline._cli:main"]


def torch_imports() -> dict[str, set[str]]:
    """The modules in the sub-packages of paceline.torch, and what each imports of paceline.torch, wherever in the file."""
    folder = PACKAGE / "torch"
    paths = {f"{TORCH}.{path.parent.name}.{path.stem}": path for path in folder.glob("*/*.py")}
    imports: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = imports[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has a relative import, which this test does not follow"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name if name in paths else str(node.module) for name in names)
        found -= {name for name in found if name != TORCH and not name.startswith(f"{TORCH}.")}
    return imports


def test_sub_packages_of_torch_import_one_way_only() -> None:
    imports = torch_imports()
    assert {module.split(".")[2] for module in imports} == set(TORCH_LAYERS)
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names
        if name == TORCH or TORCH_LAYERS.index(name.split(".")[2]) > TORCH_LAYERS.index(module.split(".")[2])
    ]
    assert wrong == []


def test_modules_of_torch_import_each_other_in_no_circle() -> None:
    imports = torch_imports()
    while free := [module for module, names in imports.items() if not names & imports.keys()]:
        for module in free:
            del imports[module]
    assert sorted(imports) == []
