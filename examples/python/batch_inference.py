"""Compute embeddings of passages of a text on every GPU of this machine, or on every host device if there is no GPU, and compare the speed with that of each device alone.

    python batch_inference.py                              every GPU, or every host device if there is none; about ten seconds on two cores
    python batch_inference.py --devices host:0,host:1 --passages 500

The text, alice.txt, is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the public domain. The encoder
is a small transformer over bytes. It is not trained, so that nothing has to be fetched: its embeddings compare passages by their spelling. Put your
own model in its place.

The pool cuts the passages into batches. It learns how long each device takes, and plans the sizes so that all devices end together.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.torch import Batcher, Pool

TEXT = Path(__file__).with_name("alice.txt")
LENGTH = 128  # bytes of a passage


class Encoder(nn.Module):
    """Bytes (n, LENGTH) to embeddings (n, width) of length one."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.layers(self.tokens(tokens)).mean(1), dim=1)


def passages(count: int) -> torch.Tensor:
    """`count` passages of the text, at equal distances: bytes of shape (count, LENGTH)."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    begins = torch.linspace(0, len(text) - LENGTH, count).long()
    return text[begins[:, None] + torch.arange(LENGTH)]


def speed(pool: Pool, ranker: Batcher, items: Sequence[torch.Tensor], seconds: float) -> float:
    """Items a second, over so many seconds, once every size of batch has run."""

    def done() -> int:
        return sum(one["jobs"] for one in pool.report()["devices"].values())

    begin, before = time.perf_counter() + seconds, 0
    answers: Iterator[torch.Tensor] = ranker.map(itertools.cycle(items))
    for _ in answers:
        now = time.perf_counter()
        if not before and now >= begin:
            begin, before = now, done()
        elif before and now >= begin + seconds:
            break
    return (done() - before) / (time.perf_counter() - begin)


def main() -> int:
    args = arguments()
    torch.manual_seed(0)
    model = Encoder().eval()
    items = list(passages(args.passages))
    with Pool(args.devices.split(",") if args.devices else "auto") as pool:
        names = [one.name for one in pool.devices]
    alone = {}
    for name in names:
        with Pool([name]) as pool:
            alone[name] = speed(pool, pool.serve(model, max_batch=args.batch), items, args.seconds)
        print(f"{name} alone: {alone[name]:.0f} passages/s")

    with Pool(names) as pool:
        embed = pool.serve(model, max_batch=args.batch)
        together = speed(pool, embed, items, args.seconds)
        embeddings = torch.stack(list(embed.map(items, progress=True)))
        print(pool.explain(), end="")
    whole = sum(alone.values())
    print(
        f"sum of the devices alone: {whole:.0f} passages/s (batches of up to {args.batch}; each device while the others were idle; "
        f"passages counted for {args.seconds:g} s, after {args.seconds:g} s that do not count)"
    )
    print(
        f"all devices: {together:.0f} passages/s, {together / whole:.2f} of the sum of the devices' speeds, "
        f"{together / alone[names[0]]:.2f} times {names[0]} alone"
    )

    with torch.no_grad():
        difference = float((embeddings[:64] - model(torch.stack(items[:64]))).abs().max())
    print(f"largest difference from the model itself: {difference:.1e}")
    # The passage that is most like the first one, among those that do not overlap with it.
    far = (embeddings @ embeddings[0]).masked_fill(torch.arange(len(items)) < len(items) * LENGTH // 15_000, -1.0)
    for index in (0, int(far.argmax())):
        print(repr(bytes(items[index].tolist()).decode(errors="replace")))
    return 0 if difference < 1e-4 else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", help="names with commas between them (default: every GPU, or every host device if there is no GPU)"
    )
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="passages of a batch at most (default: 32)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
