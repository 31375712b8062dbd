"""Thousands of steps: neither memory nor threads grow."""

from __future__ import annotations

import sys

import pytest

from torch_support import output_of

TOLERANCE_KIB = 450  # in each of three times 600 steps. A leak of a KiB a step would be more. Memory that is taken once is not in all of them.


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("balance", ["auto", "even"])
def test_thousands_of_steps_grow_neither_memory_nor_threads(balance: str) -> None:
    """With all that a step can meet: other sizes, weights, failures, predictions, buffers, changed modules."""
    program = f"""
    def resident():
        gc.collect()
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    rows = torch.randn(40, 4, dtype=torch.double)
    trainer = DataParallel(module, ["host:0", "host:1"], balance={balance!r}, micro_batch={None if balance == "auto" else 7})
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-4)
    seen, threads = [], []
    for step in range(2_501):
        batch = rows[: 8 + step % 33]
        trainer.step(mean_of_squares, batch, weight=torch.ones(len(batch)) if step % 3 == 0 else None)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            trainer.predict(batch)
            trainer.report(), trainer.explain()
            try:
                trainer.step(lambda m, b: 1 / 0, batch)
            except ZeroDivisionError:
                pass
        if step % 100 == 0:
            trainer.events()
            module.load_state_dict({{name: value.clone() for name, value in module.state_dict().items()}}, assign=True)
            optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-4)
        if step in (700, 1300, 1900, 2500):
            seen.append(resident())
            threads.append(thread_count(*threads[:1]))
    print(*(after - before for before, after in zip(seen, seen[1:])), threads[-1] - threads[0])
    """
    *grown, threads = map(int, output_of(program, timeout=280).split())
    assert threads == 0
    assert min(grown) < TOLERANCE_KIB
