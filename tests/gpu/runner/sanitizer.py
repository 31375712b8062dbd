"""compute-sanitizer on a few tests, and how to tell that it could not do its work from what it found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from runner.stage import Stage

_FOUND = 9  # its exit status for findings; any other that is not 0 is the program's or its own
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY:", re.MULTILINE)
# Complaints about itself: no permission to attach, a GPU or driver that it does not know, no memory left for its records. That the
# program ended badly is said in the same form, and is a failure.
_COMPLAINT = re.compile(
    r"^=+ ((?:Internal Sanitizer )?Error: (?!process didn't terminate successfully)[^\n]*|Unable to [^\n]*)",
    re.MULTILINE,
)


def stages(folder: Path, *, gpu: bool) -> list[Stage]:
    """Each after the same tests without it, so that what still fails under it is its doing, or its finding.

    No racecheck: it watches shared memory, which no kernel here uses.
    """
    tool = shutil.which("compute-sanitizer")
    why_not = "no GPU" if not gpu else "" if tool else "compute-sanitizer is not installed"
    found = []
    for check, test, what in (
        ("memcheck", "reduction", "*AlignedDifferently*"),
        ("initcheck", "reduction", "*TakesAsManyInputs*"),
        ("memcheck", "trainer", "*AFailedStep*TwoUnequal*:*CallersOwnStream*OneGpu*"),
    ):
        program = folder / "tests" / "gpu" / f"test_gpu_{test}"
        command = [tool or "compute-sanitizer", "--tool", check, "--error-exitcode", str(_FOUND)]
        command += [str(program), f"--gtest_filter={what}"]
        found.append(
            Stage(f"{check}_{test}", command, 3, (f"cpp_{test}",), why_not, says_why_it_cannot=why_it_could_not)
        )
    return found


def why_it_could_not(exit_status: int, output: str) -> str:
    """The tool's own words where it has judged nothing; empty where it has, whatever it found."""
    if exit_status == _FOUND:
        return ""
    if complaint := _COMPLAINT.search(output):
        return f"compute-sanitizer cannot run here: {complaint[1]}"
    if _SUMMARY.search(output):
        return ""
    last = output.strip().splitlines()[-1:] or ["it said nothing"]
    return f"compute-sanitizer ended with status {exit_status} and no summary: {last[0]}"
