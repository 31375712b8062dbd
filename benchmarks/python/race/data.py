"""scikit-learn's digits, written once by the parent: each process is spared the second that scikit-learn takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def save(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.save(folder / "images.npy", (digits.images / 16).astype(np.float32)[:, None])
    np.save(folder / "labels.npy", digits.target.astype(np.int64))
