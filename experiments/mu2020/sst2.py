"""MiniLM on SST-2 with few labels: gradient features of a transformer, which Mu et al. (2020) do not have.

Contenders as in `experiments.transfer`: logistic regression on the mean of the tokens' outputs; with the gradients of
the last layer (equation 2); fine-tuning of the same layer; fine-tuning of everything. `--sizes`, `--seed` and `--seeds`
measure some and keep the others: runs may go side by side, and `--sizes` without a number shows what is kept.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments import common
from experiments.common import gains
from experiments.common.adaptation import EVERYTHING, GRADIENTS, SAME, Clock, Contest, Labeled, Search, Whole, in_turn
from experiments.common.pretrained import minilm, sst2, word_pieces

NETWORK = "MiniLM-L6"
CLASSES = 2
LABELS = 6920  # of the training sentences
SIZES = {"quick": [20], "cpu": [50, 200, 1000], "cuda": [50, 200, 1000, 3000, 6920]}
TEST = {"quick": 40, "cpu": 400, "cuda": 1821}
SEARCH = {
    "quick": Search((1e-4,), 1),
    "cpu": Search((3e-4, 1e-4, 3e-5), 6, patience=2),
    "cuda": Search((3e-4, 1e-4, 3e-5, 1e-5), 20, patience=5),
}
OTHERS = (f"{GRADIENTS}, vi", f"{GRADIENTS}, laplace", f"{GRADIENTS}, ntk", f"{GRADIENTS}, network's mean")
# Up to how many labels a contender takes part; those not named always do.
LIMITS: dict[str, dict[str, int]] = {
    "quick": {},
    "cpu": {**dict.fromkeys((*OTHERS, SAME), 200), EVERYTHING: 50},
    "cuda": dict.fromkeys(OTHERS, 3000),
}
NOT_THERE = "not in the paper"
SAID = dict.fromkeys((GRADIENTS, f"{GRADIENTS}, vi", f"{GRADIENTS}, ntk", SAME, EVERYTHING), NOT_THERE)


def through(layers: Iterable[nn.Module], h: Tensor, mask: Tensor) -> Tensor:
    """Tokens' activations (n, T, d) after some layers; those with mask 0 are not attended to."""
    closed = torch.zeros_like(mask, dtype=h.dtype).masked_fill(mask == 0, -1e9)
    for layer in layers:
        h = layer(h, closed[:, None, None, :])
    return h


class Top(nn.Module):
    """The last layers of an encoder, the mean over tokens, and a head."""

    def __init__(self, layers: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, h: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (n, c) from the tokens' activations (n, T, d) and their mask (n, T)."""
        h = through(self.layers, h, attention_mask)
        weight = attention_mask.to(h.dtype)[..., None]
        return self.head((h * weight).sum(1) / weight.sum(1))


class Classifier(nn.Module):
    """Embeddings and all layers, as `Top` for the last ones."""

    def __init__(self, net: Any, head: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.top = net.embeddings, Top(net.encoder.layer, head)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.top(self.embeddings(input_ids=ids), attention_mask)


@torch.no_grad()
def below(net: Any, layers: int, ids: Tensor, mask: Tensor) -> Tensor:
    """What the layers below the last ones make of sentences (n, T): (n, T, d)."""
    parts = zip(ids.split(250), mask.split(250), strict=True)
    return torch.cat([through(net.encoder.layer[:-layers], net.embeddings(input_ids=one), m) for one, m in parts])


def with_head(net: Any, head: nn.Module) -> nn.Module:
    """The whole network, copied, with a head."""
    return Classifier(copy.deepcopy(net), copy.deepcopy(head))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="*", default=None, help="labels (default: 50 200 1000; cuda: all)")
    parser.add_argument("--seeds", type=int, default=None, help="draws of labels, --seed the first (default: 3)")
    parser.add_argument("--test", type=int, default=None, help="test sentences (default: 400; cuda: all)")
    parser.add_argument("--layers", type=int, default=1, help="layers that adapt (default: 1)")


def run(options: argparse.Namespace) -> common.Outcome:
    """Draw labels, adapt, score."""
    kind = "quick" if options.quick else options.device.partition(":")[0]
    options.sizes = SIZES[kind] if options.sizes is None else options.sizes
    options.test, options.seeds = options.test or TEST[kind], options.seeds or (1 if options.quick else 3)
    net = minilm(options.data / "weights")
    if not 1 <= options.layers <= len(net.encoder.layer):
        raise ValueError(f"MiniLM has {len(net.encoder.layer)} layers; got --layers {options.layers}.")
    data = [sst2(options.data, part) for part in ("train", "test")]
    if not 1 <= options.test <= len(data[1][1]):
        raise ValueError(f"SST-2 has {len(data[1][1]):,} test sentences; got --test {options.test}.")
    where, parts = setting(options), common.earlier(options, "sst2").get("parts", {})
    how = {"network": NETWORK, "layers that adapt": options.layers, "test sentences of a draw": options.test}
    for seed in range(options.seed, options.seed + options.seeds) if options.sizes else ():
        for one in draw(net.to(options.device), data[0], data[1], seed=seed, kind=kind, options=options):
            own = {"fine-tuning": {**vars(SEARCH[kind])}, "machine": common.machine(options.device)}
            parts = gains.keep(options, "sst2", where, how, {"set": "SST-2", "seed": seed, **one, **own})
    command = "python -m experiments sst2 --device cuda"
    return gains.of_parts(parts, where, said=SAID, differs=differs, command=command)


def setting(options: argparse.Namespace) -> str:
    return f"{NETWORK}, {gains.adapting(options.layers, 'layer')}, {options.test:,} test sentences"


def differs(how: Mapping[str, Any], runs: Sequence[gains.Run], gain: Mapping[str, float]) -> str:
    """How many draws were compared, where, what the interval is over, and whether they are draws of the same labels."""
    same = "; all labels there are, so that draws differ in their order alone" if runs[0]["labels"] == LABELS else ""
    over = " over the sentences" if "over test examples" in gain else ""
    return (
        f"paired over {gains.draws(runs)} draws with {how['test sentences of a draw']:,} test sentences, 95 % interval"
        f"{over}{same}; {gains.machines(how, runs)}"
    )


def draw(
    net: Any,
    train: tuple[list[str], Tensor],
    test: tuple[list[str], Tensor],
    *,
    seed: int,
    kind: str,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """All contenders on one draw of labels and test sentences, of which smaller numbers of labels are the first."""
    generator, clock, device = torch.Generator().manual_seed(seed), Clock(options.device), options.device
    index = in_turn(train[1], max(options.sizes), CLASSES, generator)
    at = torch.randperm(len(test[1]), generator=generator)[: options.test]
    texts = [train[0][i] for i in index.tolist()] + [test[0][i] for i in at.tolist()]
    ids, mask = (t.to(device) for t in word_pieces(options.data / "weights", texts))
    y, truth = train[1][index].to(device), test[1][at].to(device)
    with clock("bottom"):
        h = below(net, options.layers, ids, mask)
    top = Top(copy.deepcopy(net.encoder.layer[-options.layers :]), nn.Linear(h.shape[2], CLASSES, device=device)).eval()
    m = len(index)
    for n in options.sizes:
        contest = Contest(
            top,
            Labeled((h[:n], mask[:n]), y[:n]),
            Labeled((h[m:], mask[m:]), truth),
            CLASSES,
            device,
            SEARCH[kind],
            seed,
            dtype="auto" if device.startswith("cuda") else "float32",
        )
        whole = Whole(partial(with_head, net), Labeled((ids[:n], mask[:n]), y[:n]), (ids[m:], mask[m:]))
        seconds = clock.seconds["bottom"] * (n + len(at)) / len(ids)
        scores = contest.all(LIMITS[kind], whole)
        yield {"labels": n, "every label": n == len(train[1]), "bottom seconds": seconds, "contenders": scores}
