"""The page of a run on GPUs, whose reductions are not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_cases import BOXES, module_and_batch
from paceline._cli import main
from paceline.torch import DataParallel
from page_support import Reader, charts_in
from torch_support import classify


@pytest.mark.parametrize("box", ["two", "mixed"])
def test_pages_of_trainers_and_of_their_ledgers(fake: Any, tmp_path: Path, box: str) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES[box], balance="even") as trainer:
        trainer.write_ledger(tmp_path / "run.jsonl")
        for _ in range(6):
            trainer.step(classify, batch)
        trainer.page(tmp_path / "run.html")
    assert main(["page", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "ledger.html")]) == 0
    for name in ("run", "ledger"):
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert [row[0] for row in Reader(page).tables["Devices"][1:]] == list(BOXES[box])
        assert len(charts_in(page)[2]["x"]) == 6
    words = Reader((tmp_path / "run.html").read_text(encoding="utf-8")).words
    assert "On GPUs reductions are not timed." in words
    assert "reduction together took" not in words
    assert "Input and the rest of the loop" not in words
