"""What each rule of the balancer is worth: turn one off at a time and run the simulations again.

    python ablation.py --markdown results.md        all rules, in half an hour on two cores
    python ablation.py --only newsvendor,probes     the rules whose names contain one of these
    python ablation.py --real                       on real cores instead; run it alone on the machine, in an hour and a half

A rule is turned off by an edit of the sources (ablation_rules.py), in a copy of the checkout in build/ablation. The copy is built, and runs
the scenario suite, the random boxes and the tests of the balancer. These run on a virtual clock: equal sources give equal figures.
The scenario suite runs twice, with N and with 2 N seeds: how far the two halves of the seeds differ tells what is chance.
--real runs busy_core.py and quiet.py instead, and runs them after every tenth rule with all rules on: how far these rows differ tells what
is chance.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ablation_rules import RULES, Rule

PYTHON = Path(__file__).resolve().parent
ROOT = PYTHON.parents[1]
SOURCES = "cpp/src/balance"
NONE = Rule("none: all rules are on", 0, ())
AGAIN = 10  # --real: rules between two runs of NONE


class Workshop:
    """A copy of the checkout that is edited and built."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.build = folder / "tree", folder / "build"
        self._originals: dict[Path, str] = {}
        self._copy()
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DPACELINE_TESTS=ON", "-DPACELINE_PYTHON=ON", "-DPACELINE_CUDA=OFF"]
        options += [f"-DPython_EXECUTABLE={sys.executable}", *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        call(["cmake", "-G", "Ninja", "-S", str(self.tree), "-B", str(self.build), *options], 600)

    def _copy(self) -> None:
        """Copies the files that git knows. An unchanged file keeps its time, so that it is not compiled again."""
        listed = call(["git", "-C", str(ROOT), "ls-files", "-z"], 60).split("\0")
        for name in filter(None, listed):
            source, target = ROOT / name, self.tree / name
            if not source.is_file():
                target.unlink(missing_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                shutil.copy(source, target)

    def turn_off(self, rule: Rule, *targets: str) -> None:
        """Undoes the last rule's edits, makes this one's, and builds."""
        for path, text in self._originals.items():
            path.write_text(text)
        self._originals = {}
        for file, old, new in rule.edits:
            path = self.tree / SOURCES / file
            text = path.read_text()
            self._originals.setdefault(path, text)
            path.write_text(text.replace(old, new))
        call(["cmake", "--build", str(self.build), "--parallel", str(os.cpu_count() or 1), "--target", *targets], 1800)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.build / "python_package"), str(PYTHON)])}

    def suite(self, seeds: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "paceline", "simulate", "--suite", "--seeds", str(seeds), "--json"]
        return last_json(call(command, 900, environment=self.environment(), good=(0, 1)))

    def boxes(self, count: int) -> dict[str, float]:
        report = self.build / "boxes.json"
        environment = {**self.environment(), "PACELINE_RANDOM_BOXES": str(count)}
        options = ["--gtest_filter=*RandomBoxes*", f"--gtest_output=json:{report}"]
        call([str(self._program("sim")), *options], 900, environment=environment, good=(0, 1))
        ((test,),) = (group["testsuite"] for group in json.loads(report.read_text())["testsuites"])
        return {key: float(value) for key, value in test.items() if re.fullmatch(r"[\d.e+-]+", str(value))}

    def failing_tests(self) -> list[str]:
        """The tests of the rooms balance and sim that fail or crash, without the scenarios and the boxes."""
        failed: list[str] = []
        for room, left_out in (("balance", []), ("sim", ["*RandomBoxes*", "AllScenarios*"])):
            while True:
                command = [str(self._program(room)), f"--gtest_filter=-{':'.join(left_out)}"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=900)
                found = re.findall(r"^\[  FAILED  \] (\S+) \(", done.stdout, re.M)
                if done.returncode in (0, 1):
                    failed += found
                    break
                crashed = re.findall(r"^\[ RUN      \] (\S+)", done.stdout, re.M)[-1]
                failed.append(crashed)
                left_out.append(crashed)
        return failed

    def _program(self, room: str) -> Path:
        return self.build / "tests" / "cpp" / room / f"test_{room}"

    def real(self, seconds: float) -> dict[str, Any]:
        """busy_core.py and quiet.py, one after the other."""
        runs = {}
        for name, options in (("busy_core", []), ("quiet", ["--seconds", str(seconds)])):
            command = [sys.executable, str(PYTHON / f"{name}.py"), *options, "--json"]
            runs[name] = last_json(call(command, 900, environment=self.environment()))
        return runs


def call(
    command: Sequence[str], limit: float, *, environment: dict[str, str] | None = None, good: Iterable[int] = (0,)
) -> str:
    """What a program prints. Ends this one with its last lines if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    if done.returncode not in good:
        sys.exit(f"ablation: {shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def last_json(output: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def check(rules: Iterable[Rule]) -> None:
    """Every text to replace must be there exactly once: otherwise a row would be of another rule, or of none."""
    wrong = []
    for rule in rules:
        for file, old, _ in rule.edits:
            count = (ROOT / SOURCES / file).read_text().count(old)
            if count != 1:
                wrong.append(f"{rule.name}: {count} times in {SOURCES}/{file}: {old.strip()}")
    if wrong:
        sys.exit("\n".join(["ablation: each of these texts must be there exactly once:", *wrong]))


def simulated(workshop: Workshop, rule: Rule, args: argparse.Namespace) -> dict[str, Any]:
    workshop.turn_off(rule, "test_sim", "test_balance", "_core")
    with ThreadPoolExecutor() as pool:
        boxes = pool.submit(workshop.boxes, args.boxes)
        both, first = workshop.suite(2 * args.seeds), workshop.suite(args.seeds)
        failed = workshop.failing_tests()
        row = {"rule": rule.name, "lines": rule.lines, "blind": rule.blind, "failed": failed, "boxes": boxes.result()}
    losses = {}
    for whole, half in zip(both["scenarios"], first["scenarios"], strict=True):
        losses[whole["name"]] = {
            "mean": whole["loss"],
            "first": half["loss"],
            "second": 2 * whole["loss"] - half["loss"],
        }
    scenarios = both["scenarios"]
    recoveries = [one["steps_to_recover"] for one in scenarios if one["bounds"]["steps_to_recover"] is not None]
    row["suite"] = {
        "losses": losses,
        "mean": mean(one["loss"] for one in scenarios),
        "worst": max(one["worst_loss"] for one in scenarios),
        "moves": mean(one["moves_per_100_steps"] for one in scenarios),
        "recover": None if None in recoveries else mean(recoveries),
        "missed": [one["name"] for one in scenarios if one["missed"]],
    }
    return row


def real(workshop: Workshop, rule: Rule, args: argparse.Namespace) -> dict[str, Any]:
    workshop.turn_off(rule, "_core")
    return {"rule": rule.name, "lines": rule.lines, **workshop.real(args.seconds)}


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


HEAD = [
    "rule that is off",
    "lines",
    "suite: mean loss",
    "chance",
    "worst loss",
    "largest rise",
    "largest fall",
    "moves / 100",
    "recovery",
    "bounds missed",
    "boxes: mean loss",
    "worst",
    "> 1 %",
    "> 5 %",
    "probes",
    "moves",
    "tests that fail",
]
REAL_HEAD = [
    "rule that is off",
    "lines",
    "busy core: alone / auto",
    "even / auto",
    "left out",
    "back after",
    "quiet: even / auto",
    "moves / 100",
]


def cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    suite, boxes = row["suite"], row["boxes"]
    here, there = suite["losses"], base["suite"]["losses"]
    rises = {name: here[name]["mean"] - there[name]["mean"] for name in here}
    # Half of the difference between what both halves of the seeds say.
    halves = [mean(here[name][half] - there[name][half] for name in here) for half in ("first", "second")]
    most, least = max(rises, key=lambda name: rises[name]), min(rises, key=lambda name: rises[name])
    change = suite["mean"] - base["suite"]["mean"]
    return [
        row["rule"] + (" (*)" if row["blind"] else ""),
        str(row["lines"] or ""),
        f"{suite['mean']:.3%}" + (f" ({100 * change:+.3f})" if row is not base else ""),
        f"{abs(halves[0] - halves[1]) / 2 * 100:.3f}",
        f"{suite['worst']:.2%}",
        f"{100 * rises[most]:+.3f} {most}" if rises[most] > 5e-6 else "",
        f"{100 * rises[least]:+.3f} {least}" if rises[least] < -5e-6 else "",
        f"{suite['moves']:.2f}",
        f"{suite['recover']:.2f}" if suite["recover"] is not None else "never",
        str(len(suite["missed"]) or ""),
        f"{boxes['mean_loss']:.3%}",
        f"{boxes['worst_loss']:.1%}",
        f"{boxes['lose_more_than_1_percent']:.0f}",
        f"{boxes['lose_more_than_5_percent']:.0f}",
        f"{boxes['probes']:.2%}",
        f"{boxes['moves']:.3f}",
        str(len(row["failed"]) or ""),
    ]


def real_cells(row: dict[str, Any]) -> list[str]:
    busy, quiet = row["busy_core"], row["quiet"]
    return [
        row["rule"],
        str(row["lines"] or ""),
        str(busy["alone_over_auto"]),
        str(busy["even_over_auto"]),
        f"{busy['left_out']:.0%}",
        "never" if busy["steps_until_back"] is None else str(busy["steps_until_back"]),
        f"{quiet['even_over_auto']['median']:.3f}, {quiet['even_over_auto']['interval']}",
        str(quiet["moves_per_100_steps"]),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def markdown(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    if args.real:
        return "\n".join(table(REAL_HEAD, map(real_cells, rows))) + "\n"
    lines = table(HEAD, [cells(row, rows[0]) for row in rows])
    lines += ["", "Tests and scenario bounds that a rule keeps:", ""]
    lines += [
        f"- {row['rule']}: {', '.join([*row['suite']['missed'], *row['failed']])}"
        for row in rows
        if row["failed"] or row["suite"]["missed"]
    ]
    return "\n".join(lines) + "\n"


def provenance() -> str:
    """Hardware, versions, revision, command and date."""
    compiler = call([os.environ.get("CXX", "c++"), "--version"], 60).splitlines()[0]
    revision = call(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], 60).strip()
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    processor = models[0] if models else platform.processor()
    return (
        f"{datetime.date.today()}, revision {revision}, python {platform.python_version()}, {compiler}. {processor}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.release()}.\n\n```sh\npython {shlex.join(sys.argv)}\n```\n"
    )


def main() -> int:
    args = arguments()
    check(RULES)
    wanted = [part for part in args.only.split(",") if part]
    rules = [rule for rule in RULES if not wanted or any(part in rule.name for part in wanted)]
    if not rules:
        sys.exit(
            f"ablation: no rule has {args.only} in its name; the rules are: {', '.join(rule.name for rule in RULES)}"
        )
    head = provenance()
    workshop = Workshop(args.folder.resolve())
    order = [NONE, *rules]
    if args.real:
        order = [each for i, rule in enumerate(rules) for each in ([NONE, rule] if i % AGAIN == 0 else [rule])] + [NONE]
    rows: list[dict[str, Any]] = []
    for rule in order:
        rows.append((real if args.real else simulated)(workshop, rule, args))
        printed = real_cells(rows[-1]) if args.real else cells(rows[-1], rows[0])
        print(" | ".join(printed), file=sys.stderr, flush=True)
        args.folder.joinpath("real.json" if args.real else "rows.json").write_text(json.dumps(rows, indent=1))
    text = f"{head}\n{markdown(rows, args)}"
    if args.markdown:
        args.markdown.write_text(text)
    print(text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="A,B", help="rules whose names contain one of these (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="half of the seeds of each scenario (default: 20)")
    parser.add_argument("--boxes", type=int, default=10000, help="random boxes (default: 10000)")
    parser.add_argument("--real", action="store_true", help="busy_core.py and quiet.py, on real cores")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each quiet.py (default: 40)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "ablation", help="of the copy (default: build/ablation)"
    )
    parser.add_argument("--markdown", type=Path, help="write the result to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
