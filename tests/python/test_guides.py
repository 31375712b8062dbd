"""The guides below examples/: they work as they say."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from program_server import SERVER

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
