"""PyTorch's other allocators: memory that grows in place (``expandable_segments``) and CUDA's own pool (``cudaMallocAsync``)."""

from __future__ import annotations

import pytest

from gpu_support import Box
from torch_support import run_script

pytestmark = pytest.mark.needs_cuda

ALLOCATORS = {
    "expandable_segments:True": "any(segment['is_expandable'] for segment in torch.cuda.memory_snapshot())",
    "backend:cudaMallocAsync": "torch.cuda.get_allocator_backend() == 'cudaMallocAsync'",
}
PROGRAM = """
import copy
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 8)).to(home)
reference = copy.deepcopy(module)
trainer = DataParallel(module, devices, balance="even")
for items in (64, 8192, 512, 16384, 64):
    batch = torch.randn(items, 256, device=home)
    for one in (module, reference):
        one.zero_grad()
    trainer.step(mean_of_squares, batch)
    mean_of_squares(reference, batch).backward()
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    del batch
    torch.cuda.empty_cache()
print("in use:", {in_use})
buffers = [torch.full((1 << 20,), 1.0, device=home) for _ in trainer.shares]
with paceline.DeviceGroup(devices) as group:
    paceline.Communicator(group).all_reduce(buffers)
    print("sums:", all(bool((each == len(buffers)).all()) for each in buffers))
trainer.close()
print("end")
"""


@pytest.mark.boxes("one_gpu", "two_unequal_parts")
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_training_and_collectives_work_on_its_memory(allocator: str, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):  # the name of PyTorch 2.9 and newer, and the one before
        monkeypatch.setenv(name, allocator)
    done = run_script(box.program + PROGRAM.replace("{in_use}", ALLOCATORS[allocator]), timeout=60, fork=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["in use: True", "sums: True", "end"]
