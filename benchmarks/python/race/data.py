"""The training data. The parent writes it once, because loading scikit-learn in each process would take a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from race import example
from race.job import Network

_PIECES = 8192
# Tokens per piece. With this length a transformer of the example's size computes about as much per item as the convolutional network.
_PIECE_LENGTH = 12


def save(folder: Path, network: Network = "convolution") -> None:
    """Write inputs.npy and labels.npy: scikit-learn's digits, or pieces of the example's text, of equal length, with their next bytes."""
    inputs, labels = _digits() if network == "convolution" else _text()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images / 16).astype(np.float32)[:, None], digits.target.astype(np.int64)


def _text() -> tuple[np.ndarray, np.ndarray]:
    text = np.frombuffer(example.TEXT.read_bytes(), dtype=np.uint8).astype(np.int64)
    begins = np.random.default_rng(0).integers(0, len(text) - _PIECE_LENGTH, size=_PIECES)
    tokens = text[begins[:, None] + np.arange(_PIECE_LENGTH + 1)]
    return tokens[:, :-1], tokens[:, 1:]
