"""What is trained on, written once by the parent: each process is spared the second that scikit-learn takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from race import example
from race.job import Network

_PIECES = 8192
# Tokens of a piece: a transformer of the example's size then computes about as much for an item as the convolutional network.
_PIECE_LENGTH = 12


def save(folder: Path, network: Network = "convolution") -> None:
    """inputs.npy and labels.npy: scikit-learn's digits, or pieces of the example's text, all equally long, and their next bytes."""
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
