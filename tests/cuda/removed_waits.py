"""Removes each wait of the engine's asynchronous steps and of the collectives in turn, and says which test notices.

    python tests/cuda/removed_waits.py BUILD [PART_OF_A_FILE_NAME]       ten minutes on two cores, an hour after many changes
    python tests/cuda/removed_waits.py BUILD --sample 5 [--seed 7]       some minutes: five waits, others with every seed
    python tests/cuda/removed_waits.py --check                           at once: builds nothing, compares the table with the sources

BUILD is a CMake build with PACELINE_CUDA=ON and PACELINE_TESTS=ON, up to date. Nothing in the checkout changes: each mutant is compiled
beside it and linked in front of the library's own object. The tests that cuda/README.md names for a statement run first: what they
notice is soon known. Exits 1 if a wait can be removed without a test that fails.

--check only says which rows the table in cuda/README.md lacks, and which of its rows belong to no wait. It exits 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ROOMS = PROJECT / "cpp" / "src"
OF_STEPS = ["cuda_queues", "cuda_training"]
OF_COLLECTIVES = ["cuda_collectives"]
OF_PIPELINES = ["cuda_pipeline"]
# Each source, and the test programs that run it.
SOURCES = {
    ROOMS / "engine" / "hang.cpp": OF_STEPS + OF_PIPELINES,
    ROOMS / "engine" / "queues" / "bucket_sums.cpp": OF_STEPS,
    ROOMS / "engine" / "queues" / "device_queues.cpp": OF_STEPS,
    ROOMS / "engine" / "queues" / "parameter_copies.cpp": OF_STEPS,
    ROOMS / "engine" / "queues" / "relayed_copies.cpp": OF_STEPS,
    ROOMS / "engine" / "queues" / "step_times.cpp": OF_STEPS,
    ROOMS / "engine" / "data_parallel" / "async_memory.cpp": OF_STEPS,
    ROOMS / "engine" / "pipeline" / "pipeline_core.cpp": OF_PIPELINES,
    ROOMS / "engine" / "pipeline" / "pipeline_run.cpp": OF_PIPELINES,
    ROOMS / "engine" / "pipeline" / "stage_devices.cpp": OF_PIPELINES,
    ROOMS / "engine" / "pipeline" / "pipeline_memory.cpp": OF_PIPELINES,
    ROOMS / "comm" / "async_collectives.cpp": OF_COLLECTIVES,
    ROOMS / "comm" / "copy_link.cpp": OF_COLLECTIVES,
    ROOMS / "comm" / "memory_spaces.cpp": OF_COLLECTIVES,
    PROJECT / "cuda" / "host_path.cpp": ["cuda"],
    PROJECT / "cuda" / "push_path.cpp": ["cuda"],
}
# A statement that waits: a stream for an event, the host for an event, the host for all of a stream; or that calls those.
WAIT = re.compile(
    r"^(?P<indent>\s*(?:if \(.*?\) |for \(.*?\) )?)"
    r"(?P<wait>[\w.\->\[\]*()]*?\b"
    r"(?:wait|wait_for|await|drain|finish_on_host|await_devices|barrier|memory_\.(?:enter|leave))\(.*\));(?:  //.*)?$"
)


# The beginning of a function: what stands further to the left than its body, and calls nothing.
FUNCTION = re.compile(
    r"^(?!\s*(?:if|for|while|switch|catch|try|else|do|return|class|struct|namespace)\b).*?(?P<name>[\w:~]+)\("
)


def function_of(lines: list[str], number: int) -> str:
    """The function that a line is in. Its name outlives edits, which no line number does."""
    name, indent = "", len(lines[number])
    for line in reversed(lines[: number + 1]):
        depth = len(line) - len(line.lstrip())
        if not line.strip() or depth >= indent or line.lstrip().startswith(("//", "}", "#", ":")):
            continue
        indent = depth
        if found := FUNCTION.match(line):
            name = found["name"]
    return name.rpartition("::")[2]


def waits(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if WAIT.match(line)]


def compiled_unit(build: Path, source: Path) -> tuple[list[str], str]:
    """How the build compiles this source, and what it compiles: a line that includes it, perhaps with others of its room."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = Path(entry["file"])
        unit = file.read_text() if "Unity" in file.parts and file.exists() else f'#include "{file.resolve()}"'
        if f'#include "{source}"' in unit:
            command = shlex.split(entry["command"])
            return command[1:] if Path(command[0]).name == "ccache" else command, unit
    raise SystemExit(f"removed_waits: {build} does not compile {source.name}; configure it with PACELINE_CUDA=ON")


def failed_test(build: Path, original: Path, lines: list[str], folder: Path, suspects: set[str]) -> str | None:
    """The first test that fails with these lines as its source, "hangs" if one does not end, or None. Suspects run first."""
    source = folder / original.name
    source.write_text("\n".join(lines) + "\n")
    command, text = compiled_unit(build, original)
    unit = folder / "mutant.cpp"
    unit.write_text(text.replace(f'#include "{original}"', f'#include "{source}"'))
    command[command.index("-o") + 1] = str(folder / "mutant.o")
    command[command.index("-c") + 1] = str(unit)
    # What the removal leaves unused is no error here. A unit is a whole room, so optimising it would take a minute.
    command = [word for word in command if not re.fullmatch("-O[1-3s]", word)]
    subprocess.run([*command, "-O0", "-w", f"-I{ROOMS}"], cwd=build, check=True)
    tests = build / "tests" / "cuda"
    libraries = [str(tests / "libfake_cudart.a"), str(build / "cpp" / "libpaceline_fmt.a")]
    libraries += ["-lgtest", "-lgtest_main", "-lpthread"]
    sanitizers = [flag for flag in command if flag.startswith("-fsanitize")]
    found = []
    for name in SOURCES[original]:
        folders = (tests / "CMakeFiles" / f"{target}.dir" for target in (f"test_{name}", "nccl_host"))
        test_objects = [each for objects in folders for each in objects.rglob("*.o")]
        program = folder / f"mutant_{name}"
        subprocess.run(
            [command[0], *sanitizers, "-o", program, *test_objects, folder / "mutant.o", *libraries], check=True
        )
        found += [(program, test) for test in tests_of(program)]
    found.sort(key=lambda one: not any(suspect in one[1] for suspect in suspects))
    # Each in a process of its own, as ctest runs them: what a hang leaves behind is nothing to the next.
    for program, test in found:
        try:
            done = subprocess.run(
                [str(program), f"--gtest_filter={test}"], capture_output=True, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{test} (hangs)"
        if done.returncode != 0:
            return test
    return None


def published(readme: str | None = None) -> list[list[str]]:
    """The cells of each row of the table in cuda/README.md."""
    text = (PROJECT / "cuda" / "README.md").read_text() if readme is None else readme
    return [
        row[0].strip("| ").split(" | ")
        for row in re.finditer(r"^\| \w+\.cpp \| .+? \| `.+` \| .+ \|$", text, re.MULTILINE)
    ]


def noticed_before(statement: str) -> set[str]:
    """The tests that the last published table names for a statement, wherever it was."""
    cell = in_table(statement)
    return {row[-1].split(" (hangs)")[0] for row in published() if cell in row} - {"**nothing**"}


def differences(readme: str | None = None) -> list[str]:
    """What the table lacks, and what no longer belongs in it."""
    rows: Counter[tuple[str, ...]] = Counter(tuple(row[:3]) for row in published(readme))
    code: Counter[tuple[str, ...]] = Counter(beginning_of_row(source, number) for source, number in every_wait(""))
    lacks = [f"the table lacks the row | {' | '.join(row)} |" for row in (code - rows).elements()]
    return lacks + [f"no wait belongs to the row | {' | '.join(row)} |" for row in (rows - code).elements()]


def beginning_of_row(source: Path, number: int) -> tuple[str, str, str]:
    """The cells of a wait's row, without the test that notices."""
    lines = read(source)
    return source.name, function_of(lines, number), in_table(lines[number].strip())


def in_table(statement: str) -> str:
    """As a cell of a table in Markdown."""
    return "`" + statement.replace("|", "\\|") + "`"


def tests_of(program: Path) -> list[str]:
    """By their full names."""
    listed = subprocess.run([str(program), "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    names, suite = [], ""
    for line in listed.splitlines():
        word = line.split("#")[0].strip()
        if line.startswith("  "):
            names.append(suite + word)
        elif word.endswith("."):
            suite = word
    return names


def every_wait(part_of_name: str) -> list[tuple[Path, int]]:
    return [(source, k) for source in SOURCES if part_of_name in source.name for k in waits(read(source))]


def read(source: Path) -> list[str]:
    return source.read_text().splitlines()


def chosen(among: list[tuple[Path, int]], count: int, seed: int) -> list[tuple[Path, int]]:
    """`count` of them, in their order; all if there are no more."""
    kept = random.Random(seed).sample(range(len(among)), min(count, len(among)))
    return [among[index] for index in sorted(kept)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", metavar="BUILD", type=Path, nargs="?")
    parser.add_argument("file", metavar="PART_OF_A_FILE_NAME", nargs="?", default="")
    parser.add_argument("--sample", metavar="N", type=int, help="only so many, chosen by --seed")
    parser.add_argument("--seed", metavar="S", type=int, help="which ones (default: by chance; it is printed)")
    parser.add_argument(
        "--check", action="store_true", help="only compare the table in cuda/README.md with the sources"
    )
    given = parser.parse_args()
    if (given.build is None) != given.check:
        parser.error("give either BUILD or --check")
    if given.sample is not None and given.sample < 1:
        parser.error("--sample is the number of waits to remove: at least 1")
    if given.seed is not None and given.sample is None:
        parser.error("--seed chooses a sample: say its size with --sample")
    return given


def main() -> int:
    given = arguments()
    if given.check:
        for difference in (found := differences()):
            print(difference)
        return 1 if found else 0
    everything = every_wait(given.file)
    if not everything:
        raise SystemExit(f"removed_waits: there is no wait in a file whose name has '{given.file}' in it")
    numbers = everything
    if given.sample is not None:
        seed = random.randrange(10**6) if given.seed is None else given.seed
        numbers = chosen(everything, given.sample, seed)
        print(f"{len(numbers)} of {len(everything)} waits, --seed {seed}\n", flush=True)
    unnoticed = 0
    print("| file | in | removed | noticed by |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for source, number in numbers:
            lines = read(source)
            match = WAIT.match(lines[number])
            assert match is not None
            mutant = [*lines[:number], match["indent"] + "{}", *lines[number + 1 :]]
            removed = lines[number].strip()
            noticed = failed_test(given.build.resolve(), source, mutant, Path(name), noticed_before(removed))
            unnoticed += noticed is None
            print(f"| {' | '.join(beginning_of_row(source, number))} | {noticed or '**nothing**'} |", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
