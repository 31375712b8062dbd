"""Train a small transformer on pieces of text of different lengths, on all devices of this machine.

    python text.py                              all devices; about half a minute on two cores
    python text.py --devices host:0,host:1 --steps 50

Bytes are the tokens. The text, alice.txt, is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the
public domain. The lengths of its pieces are lognormal, like those of sentences and documents: most are short, some are long. `cost=` tells
the trainer each length. So devices get equal work instead of equal numbers of pieces, and long pieces share micro-batches with other long
pieces. That saves padding, which costs time and adds nothing.

Lines that differ from a plain training script are marked with (*).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.torch import DataParallel

TEXT = Path(__file__).with_name("alice.txt")
LONGEST = 256  # tokens per piece, at most
Batch = dict[str, torch.Tensor]


class Transformer(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=x.dtype)
        return self.head(self.layers(x, mask=mask, is_causal=True))


def pieces(count: int, seed: int = 0) -> Batch:
    """`count` pieces of the text: ``tokens`` (count, LONGEST + 1), padded with zeros, and ``length``, which does not count the first
    byte."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(count).log_normal_(4.0, 0.7, generator=generator).long().clamp(4, LONGEST)
    begins = (torch.rand(count, generator=generator) * (len(text) - LONGEST - 1)).long()
    tokens = text[begins[:, None] + torch.arange(LONGEST + 1)]
    tokens[torch.arange(LONGEST + 1) > lengths[:, None]] = 0
    return {"tokens": tokens, "length": lengths}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the slice's tokens. Trims the slice to its longest piece."""
    length = batch["length"]
    longest = int(length.max())
    tokens = batch["tokens"][:, : longest + 1]
    inside = torch.arange(longest, device=length.device) < length[:, None]
    return nn.functional.cross_entropy(model(tokens[:, :-1])[inside], tokens[:, 1:][inside])


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    data = pieces(4096, args.seed)
    devices = "auto" if args.devices == "auto" else args.devices.split(",")
    with DataParallel(Transformer(), devices) as trainer:  # (*)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=2e-3)
        losses = []
        for step in range(args.steps):
            chosen = torch.randint(0, len(data["length"]), (args.batch,))
            batch = {name: tensor[chosen] for name, tensor in data.items()}
            start = time.perf_counter()
            length = batch["length"]
            # The mean is over tokens (weight), and a piece costs as much as it has tokens (cost).
            losses.append(float(trainer.step(loss_fn, batch, weight=length, cost=length)))  # (*)
            optimizer.step()
            optimizer.zero_grad()
            if step % max(1, args.steps // 10) == 0:
                shares = ", ".join(f"{name} {share}" for name, share in trainer.shares.items())
                seconds = time.perf_counter() - start
                print(f"step {step:4}  loss {losses[-1]:.3f}  {1e3 * seconds:6.1f} ms  pieces: {shares}")
        print()
        print(trainer.explain())
    print(f"loss per byte: {losses[0]:.2f} at first, {losses[-1]:.2f} in the end")
    if args.steps >= 20 and losses[-1] > 0.8 * losses[0]:
        print("it should have fallen by a fifth and more", file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="auto", help="names with commas between them (default: auto)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="pieces of a step (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
