"""An error after which CUDA asks for a new process: named, not retried, and the program still ends. Run last."""

from __future__ import annotations

import pytest

from gpu_support import Box
from torch_support import run_script

pytestmark = pytest.mark.needs_cuda

PROGRAM = """
module = nn.Linear(4, 2).to(home)
batch = torch.ones(8, 4, device=home)
trainer = DataParallel(module, devices)
trainer.step(mean_of_squares, batch)
calls = 0

def breaks(m, b):
    global calls
    calls += 1
    if b.is_cuda:
        m.weight[torch.full((1,), 1 << 30, device=b.device)]  # a device-side assertion
    return mean_of_squares(m, b)

try:
    trainer.step(breaks, batch)
    torch.cuda.synchronize()
    trainer.step(mean_of_squares, batch)
except Exception as error:
    print(type(error).__name__, "cuda" in str(error).lower(), calls)
try:
    trainer.step(mean_of_squares, batch)
    print("went on")
except Exception as error:
    print(type(error).__name__)
trainer.close()
print("end")
"""


def test_a_broken_gpu_is_named_and_the_program_ends(box: Box) -> None:
    done = run_script(box.program + PROGRAM, timeout=60, fork=False)
    lines = done.stdout.splitlines()
    # Its status is not ours to promise: PyTorch may abort when it takes down what lies on a broken GPU.
    assert lines, done.stderr
    assert lines[-1] == "end", done.stderr
    assert "Timeout" not in done.stderr
    assert lines[0].split()[1] == "True", lines
    assert int(lines[0].split()[2]) <= len(box), "a broken step was run again"
    assert "went on" not in lines
