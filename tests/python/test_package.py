"""The installed package: what importing it does and does not do, the wheel's contents, and what the binding says of Python's lock."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import _cli, info

PACKAGE = Path(paceline.__file__).parent
TORCH = "paceline.torch"
# Each sub-package of paceline.torch may import those before it.
TORCH_LAYERS = [
    "_batch",
    "_devices",
    "_replicas",
    "_pool",
    "_run",
    "_features",
    "_check",
    "_save",
    "_trainer",
    "_ranks",
    "_pipeline",
]


def run_fresh(program: str) -> str:
    """Run `program` in a new interpreter, because this one has already imported everything."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


def test_import_starts_no_thread_prints_nothing_and_loads_neither_torch_nor_numpy() -> None:
    program = """if True:
        import logging, pathlib, sys
        threads = lambda: len(list(pathlib.Path('/proc/self/task').iterdir()))
        before = threads()
        import paceline
        assert threads() == before
        assert not logging.getLogger().handlers
        assert not logging.root.manager.loggerDict
        assert not {"torch", "numpy"} & set(sys.modules)
    """
    assert run_fresh(program) == ""


def test_a_program_may_end_while_threads_are_in_the_library() -> None:
    program = """if True:
        import threading
        from paceline.sim import simulate
        begun = threading.Semaphore(0)
        def loop():
            while True:
                simulate([1.0, 1.0], steps=20)
                begun.release()
        for _ in range(3):
            threading.Thread(target=loop, daemon=True).start()
            begun.acquire()
        print("end", flush=True)
    """
    assert run_fresh(program) == "end"


def test_names_that_are_imported_on_first_use_are_listed() -> None:
    assert set(paceline.__all__) <= set(run_fresh("import paceline; print(*dir(paceline))").split())


def test_everything_in_all_can_be_imported() -> None:
    assert len(paceline.__all__) == len(set(paceline.__all__))
    missing = [name for name in paceline.__all__ if not hasattr(paceline, name)]
    assert missing == []


def test_wheel_holds_one_library_types_and_no_sources() -> None:
    files = metadata.files("paceline")
    assert files is not None
    libraries = [str(file) for file in files if "libpaceline" in file.name]
    assert libraries == ["paceline/libpaceline.so"]
    binaries = [file.name for file in files if ".so" in file.suffixes and file.name != "libpaceline.so"]
    assert len(binaries) == 1
    assert binaries[0].startswith("_core.")
    assert [str(file) for file in files if file.suffix in {".hpp", ".cpp", ".cmake", ".a"}] == []
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core" / "__init__.pyi").is_file()
    assert paceline.__version__ == metadata.version("paceline")


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


# The command `paceline`: its output and its exit status.


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline._cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_info_prints_text_for_people_with_aligned_columns() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = lines.index("Devices") + 1
    rows = lines[start : start + len(paceline.devices())]
    assert [row.split()[0] for row in rows] == [device.name for device in paceline.devices()]
    columns = {row.index("pinned") for row in rows if "pinned" in row}
    assert len(columns) == 1
    assert "cuda" in done.stdout
    assert info.collect()["backends"]["cuda"]["detail"] in done.stdout


def test_info_prints_one_json_object() -> None:
    done = run("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["devices"]
    assert facts["libraries"]
    assert facts["missing"]


def test_version_is_printed() -> None:
    for module in ("paceline", "paceline._cli"):
        command = [sys.executable, "-m", module, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == f"paceline {info.collect()['version']}"


def test_without_a_command_it_says_which_there_are() -> None:
    done = run()
    assert done.returncode == 2
    assert "info" in done.stderr + done.stdout or "command" in done.stderr


def test_a_mistake_is_one_line_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*, links: bool) -> None:
        raise paceline.InvalidArgument("host:7 does not exist")

    monkeypatch.setattr(info, "collect", refuse)
    assert _cli.main(["info"]) == 2
    assert capsys.readouterr().err == "paceline info: error: host:7 does not exist\n"


def test_an_interrupt_ends_it_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*, links: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "collect", interrupt)
    assert _cli.main(["info"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m paceline._cli info --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_submodules_are_there_without_a_further_import() -> None:
    program = (
        "import sys, paceline; paceline.balance.replay, paceline.plan.split_batch, paceline.sim\n"
        "assert 'torch' not in sys.modules\n"
        "try: paceline.DataParallel\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "DataParallel is in paceline.torch: from paceline.torch import DataParallel"


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
