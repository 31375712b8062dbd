"""A program may end in any state: in time, with its own status, and without a word."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpu_support import Box
from torch_support import output_of, run_script

PREPARE = """
module = nn.Linear(4, 2).double().to(home)
batch = torch.ones(8, 4, dtype=torch.double, device=home)
"""
STATES = {
    "open": "trainer = DataParallel(module, devices); trainer.step(mean_of_squares, batch)",
    "closed": "trainer = DataParallel(module, devices); trainer.step(mean_of_squares, batch); trainer.close()",
    "dropped": "DataParallel(module, devices).step(mean_of_squares, batch)",
    "never_stepped": "trainer = DataParallel(module, devices)",
    "after_a_failure": """
trainer = DataParallel(module, devices)
try:
    trainer.step(lambda m, b: 1 / 0, batch)
except ZeroDivisionError:
    pass
""",
    "in_the_middle_of_a_step": """
trainer = DataParallel(module, devices)
inside = threading.Event()
def slow(m, b):
    inside.set()
    for _ in range(1000):
        time.sleep(0.01)
    return mean_of_squares(m, b)
def step():
    try:
        trainer.step(slow, batch)
    except paceline.Cancelled:
        pass
threading.Thread(target=step, daemon=True).start()
inside.wait(20)
""",
    "with_work_in_the_queue": """
trainer = DataParallel(module, devices)
for _ in range(50):
    trainer.step(mean_of_squares, batch)
if home != "cpu":
    torch.cuda._sleep(2_000_000_000)
    trainer.step(mean_of_squares, batch)
""",
    "two_trainers": """
first, second = (DataParallel(module, devices) for _ in range(2))
first.step(mean_of_squares, batch); second.step(mean_of_squares, batch)
""",
}


@pytest.mark.boxes("one_gpu", "two_unequal_parts", "gpu_and_host")
@pytest.mark.parametrize("state", STATES)
def test_a_program_ends_in_every_state(state: str, box: Box) -> None:
    program = box.program + PREPARE + STATES[state] + "\nprint('end')\n"
    assert output_of(program, timeout=60, fork=False).splitlines()[-1] == "end"


@pytest.mark.boxes("two_unequal_parts")
def test_the_status_is_the_programs_own(box: Box) -> None:
    program = (
        box.program
        + PREPARE
        + """
trainer = DataParallel(module, devices)
trainer.step(mean_of_squares, batch)
sys.exit(7)
"""
    )
    done = run_script(program, fork=False)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.needs_cuda
@pytest.mark.boxes("two_unequal_parts", "gpu_and_host")
def test_blocking_launches_are_refused_with_several_devices(box: Box) -> None:
    program = "import torch\nfrom torch import nn\nfrom paceline.torch import DataParallel\n" + box.program
    program += "DataParallel(nn.Linear(4, 2).to(home), devices)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "CUDA_LAUNCH_BLOCKING" in done.stderr
