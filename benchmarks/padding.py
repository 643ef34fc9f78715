"""Passes over padded sentences: products that leave out what has no gradient beside those that do not, on a CPU.

    python -m benchmarks.padding

A transformer's last layer and head adapt; sentences have 4 to 64 tokens, 23 on average (as those of SST-2), and are
padded to 64. Prints the milliseconds of ``J^T J v`` as it reads the data and with the layers' factors kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import linnet
from benchmarks.timing import machine, milliseconds
from linnet.jacobian.blocks import outer_product

WIDTH, TOKENS, MEAN = 384, 64, 23


class Sentences(nn.Module):
    """A transformer layer, the mean over the tokens of a sentence, and one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """(n, 1) from activations (n, T, d) and a mask (n, T) of ones and zeros."""
        h = self.layer(h, src_key_padding_mask=mask == 0) * mask[..., None]
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))


def measured(n: int, rounds: int) -> dict[str, object]:
    """Milliseconds of a pass, and how many times as long it takes with all tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = (4 + (MEAN - 4) * torch.empty(n).exponential_(generator=generator)).long().clamp(4, TOKENS)
    mask = (torch.arange(TOKENS) < lengths[:, None]).float()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Sentences().eval()
    X = torch.randn(n, TOKENS, WIDTH, generator=generator), mask
    J = linnet.linearize(net).jacobian(X, progress=False)
    v = torch.randn(J.shape[1], generator=generator)

    def product(J: linnet.Jacobian, padded: float) -> Tensor:
        with mock.patch.object(outer_product, "PADDED", padded):
            return J.normal(v)

    contenders: dict[str, Callable[[], object]] = {}
    for name, form in (("as read", J), ("factors kept", J.cached())):
        contenders |= {
            name: partial(product, form, outer_product.PADDED),
            f"{name}, all tokens": partial(product, form, 2.0),
        }
    times = milliseconds(contenders, "cpu", rounds=rounds)
    ratios = {name: times[f"{name}, all tokens"] / times[name] for name in ("as read", "factors kept")}
    return {"n": n, "share of tokens": float(mask.mean()), "ms": times, "times as long with all tokens": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=256, help="sentences (256)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "padding-cpu.json")
    options = parser.parse_args()
    found = {"machine": machine("cpu"), **measured(options.n, options.rounds)}
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
