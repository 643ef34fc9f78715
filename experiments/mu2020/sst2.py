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
from experiments.common.data import sst2, word_pieces
from experiments.common.networks import minilm
from experiments.common.training import Labeled, Search, in_parts, in_turn
from experiments.mu2020 import gains
from experiments.mu2020.contest import EVERYTHING, GRADIENTS, SAME, run_contests

NETWORK = "MiniLM-L6"
CLASSES = 2
LABELS = 6920  # of the training sentences
DEFAULTS = {
    "quick": {"sizes": [20], "test": 40, "seeds": 1},
    "cpu": {"sizes": [50, 200, 1000], "test": 400, "seeds": 3},
    "cuda": {"sizes": [50, 200, 1000, 3000, 6920], "test": 1821, "seeds": 3},
}
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


def below(net: Any, layers: int, ids: Tensor, mask: Tensor) -> Tensor:
    """What the layers below the last ones make of sentences (n, T): (n, T, d)."""
    return in_parts(lambda x, m: through(net.encoder.layer[:-layers], net.embeddings(input_ids=x), m), (ids, mask))


def with_head(net: Any, head: nn.Module) -> nn.Module:
    """The whole network, copied, with a head."""
    return Classifier(copy.deepcopy(net), copy.deepcopy(head))


ARGUMENTS = {
    "--sizes": {"type": int, "nargs": "*", "help": "labels (default: 50 200 1000; cuda: all)"},
    "--seeds": "draws of labels, --seed the first (default: 3)",
    "--test": "test sentences (default: 400; cuda: all)",
    "--layers": {"type": int, "default": 1, "help": "layers that adapt (default: 1)"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Draw labels, adapt, score."""
    kind = common.fill(options, DEFAULTS)
    net = minilm(options.data / "weights")
    if not 1 <= options.layers <= len(net.encoder.layer):
        raise ValueError(f"MiniLM has {len(net.encoder.layer)} layers; got --layers {options.layers}.")
    data = [sst2(options.data, part) for part in ("train", "test")]
    if not 1 <= options.test <= len(data[1][1]):
        raise ValueError(f"SST-2 has {len(data[1][1]):,} test sentences; got --test {options.test}.")
    where, parts = setting(options), common.kept_parts(options)
    how = {"network": NETWORK, "layers that adapt": options.layers, "test sentences of a draw": options.test}
    for seed in range(options.seed, options.seed + options.seeds) if options.sizes else ():
        for one in draw(net.to(options.device), data[0], data[1], seed=seed, kind=kind, options=options):
            own = {"fine-tuning": {**vars(SEARCH[kind])}, "machine": common.machine(options.device)}
            parts = gains.keep(options, where, how, {"set": "SST-2", "seed": seed, **one, **own})
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
    """All contenders on one draw of labels and test sentences."""
    generator, device = torch.Generator().manual_seed(seed), options.device
    index = in_turn(train[1], max(options.sizes), CLASSES, generator)
    at = torch.randperm(len(test[1]), generator=generator)[: options.test]
    texts = [train[0][i] for i in index.tolist()] + [test[0][i] for i in at.tolist()]
    ids, mask = (t.to(device) for t in word_pieces(options.data / "weights", texts))
    every, m = Labeled((ids, mask), torch.cat([train[1][index], test[1][at]]).to(device)), len(index)
    head = nn.Linear(net.config.hidden_size, CLASSES, device=device)
    top = Top(copy.deepcopy(net.encoder.layer[-options.layers :]), head).eval()
    parts = top, lambda ids, mask: (below(net, options.layers, ids, mask), mask), partial(with_head, net)
    how = {"limits": LIMITS[kind], "classes": CLASSES, "search": SEARCH[kind], "seed": seed}
    dtype = "auto" if device.startswith("cuda") else "float32"
    for one in run_contests(parts, every[:m], every[m:], options, dtype=lambda n: dtype, **how):
        yield {**one, "every label": one["labels"] == len(train[1])}
