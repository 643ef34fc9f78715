"""Error bars for a fine-tuned language model: MiniLM with LoRA on SST-2, in the way of Yang et al. 2024.

The encoder is frozen in float32, bfloat16 or float16. Adapters of rank 8 on queries and values, and the head, are
float32. Every method has the same labels. Fine-tuning learns from four fifths of them. The last fifth chooses the
learning rate (on the first draw, in the first precision), the number of epochs, the temperature, and one of the two
priors of `Laplace`. The linear head and `TangentClassifier` at the linear head learn from all labels and hold out none.
The draws of labels do not depend on the precision. `--precisions`, `--seed` and `--seeds` measure some and keep the
others.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics as numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.data import sst2, word_pieces
from experiments.common.networks import minilm
from experiments.common.statistics import average, interval, show_error, show_interval
from experiments.common.training import (
    Labeled,
    Search,
    cross_entropy,
    find_temperature,
    in_parts,
    in_turn,
    loss_of,
    probabilities,
    steps,
)
from linnet import metrics
from linnet.heads import head_of

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANK, ADAPTED = 8, ["query", "value"]
LINEAR, TANGENT = "linear head", "TangentClassifier, linear head"
TUNED, COOLED, ADAPTED_AGAIN = "LoRA fine-tuning", "fine-tuning, temperature", "TangentClassifier, fine-tuned"
LAPLACE, VALIDATED = "Laplace, kron", "Laplace, kron, held-out labels"
METHODS = {
    LINEAR: "logistic regression on the mean of the tokens' outputs, penalty by cross-validation, all labels",
    TANGENT: "linearized at the linear head, where the second factors of the adapters (zero) and the head may move; "
    "mean zero, best Gaussian, all labels",
    TUNED: "Adam on adapters and head from the linear head, epochs by the held-out fifth",
    COOLED: "the same network, its logits over one number, likeliest on the held-out fifth",
    LAPLACE: "error bars for the same network, prior by the evidence",
    VALIDATED: "the same, size of the prior by the held-out fifth",
    ADAPTED_AGAIN: "linearized at the same network, which learns from the held-out fifth; best Gaussian",
}
SCORES, TIMES = ("accuracy", "nll", "ece"), ("seconds", "predicting")
BINS = 20
"""Bins of the reliability curves: ten between the confidences 1/2 and 1."""

SCALE = 2.0**10
"""Factor of the training loss. Float16 has no gradients below 6e-8; Adam's steps do not depend on the factor."""

DEFAULTS = {
    "quick": {"labels": 20, "test": 40, "seeds": 1},
    "cpu": {"labels": 200, "test": 400, "seeds": 1},
    "cuda": {"labels": 1000, "test": 872, "seeds": 3},
}
SEARCH = {
    "quick": Search((1e-3,), 1),
    "cpu": Search((1e-3, 3e-4), 4, patience=1, batch=50),
    "cuda": Search((3e-3, 1e-3, 3e-4), 10, patience=2, batch=50),
}
ARGUMENTS = {
    "--labels": "labels of a draw (default: 200; cuda: 1000)",
    "--seeds": "draws of labels, --seed the first (default: 1; cuda: 3)",
    "--test": "sentences of the development set that are predicted (default: 400; cuda: all)",
    "--precisions": common.several(tuple(PRECISIONS), "of the frozen encoder (default: all)"),
}


# The network.


class LoRA(nn.Module):
    """A frozen linear layer plus the product of two small float32 matrices, of which the second starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(y.dtype)


def adapt(net: nn.Module, seed: int) -> nn.Module:
    """A frozen copy of a network with float32 adapters at its queries and values: of PEFT, where PEFT is installed."""
    torch.manual_seed(seed)
    net = copy.deepcopy(net).requires_grad_(False)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        for module in list(net.modules()):
            for name in ADAPTED:
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, LoRA(getattr(module, name), RANK))
        return net
    return get_peft_model(net, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ADAPTED))


class SentenceClassifier(nn.Module):
    """An encoder, the mean over tokens in float32, and a float32 head."""

    def __init__(self, encoder: Any, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        weight = attention_mask.to(h.dtype)[..., None]
        return self.head((h * weight).sum(1) / weight.sum(1))


def fit_head(model: nn.Module, data: Labeled, **given: Any) -> nn.Module:
    """The network with a head for two classes, one logit, fitted to its features."""
    return linnet.attach_head(model, data.X, data.y.cpu(), classes=[0, 1], progress=False, **given)


# The methods.


@dataclass(frozen=True)
class Tuned:
    """A network after fine-tuning, its loss on the held-out labels, and how it came to be."""

    model: nn.Module
    loss: float
    rate: float
    epochs: int
    seconds: float


def tune(start: nn.Module, data: Labeled, held: Labeled, rate: float, search: Search, *, seed: int) -> Tuned:
    """Adam with one learning rate; the network of the epoch with the least loss on the held-out labels."""
    clock = common.Clock(data.y.device.type)
    with clock("seconds"):
        model = copy.deepcopy(start)
        best = (loss_of(model, held), 0, copy.deepcopy(model))
        how: dict[str, Any] = {"train_mode": False, "loss": lambda f, y: SCALE * cross_entropy(f, y), "seed": seed}
        for epoch in steps(model, data, rate, search, **how):
            now = loss_of(model, held)
            if now < best[0]:
                best = (now, epoch, copy.deepcopy(model))
            elif epoch - best[1] >= search.patience or not math.isfinite(now):
                break
    return Tuned(best[2], best[0], rate, best[1], clock.seconds["seconds"])


@dataclass(frozen=True)
class Draw:
    """One draw of labels, and the sentences to predict."""

    every: Labeled  # all labels, classes in turn
    test: Labeled
    device: str
    seed: int

    def score(self, p: Tensor, clock: common.Clock, **extra: Any) -> dict[str, Any]:
        p, y = p.double().cpu(), self.test.y.cpu()
        found = metrics.reliability(p, y, bins=BINS)
        curve = {key: getattr(found, key).tolist() for key in ("confidence", "accuracy", "count")}
        return {**metrics.classification(p, y), **clock.seconds, **extra, "reliability": curve}

    def predict(self, clock: common.Clock, estimator: Any, **extra: Any) -> dict[str, Any]:
        """Scores of an estimator that is fitted."""
        with clock("predicting"):
            p = torch.as_tensor(estimator.predict_proba(self.test.X))
        return self.score(p, clock, **extra)

    def contest(self, base: nn.Module, width: int, search: Search) -> dict[str, dict[str, Any]]:
        """Scores of all methods."""
        bare = SentenceClassifier(adapt(base, self.seed), width).to(self.device).eval()
        cut = len(self.every) - len(self.every) // 5
        near, held = self.every[:cut], self.every[cut:]
        quiet: dict[str, Any] = {"progress": False, "seed": self.seed}

        clock = common.Clock(self.device)
        with clock("seconds"):
            headed = fit_head(bare, self.every)
        with clock("predicting"):
            p = probabilities(headed, self.test.X)
        penalty = float(head_of(headed).penalty_)
        out = {LINEAR: self.score(p, clock, penalty=penalty)}

        clock = common.Clock(self.device)
        with clock("seconds"):
            params = ["*lora_B*", "*head*"]
            clf = linnet.TangentClassifier(headed, params, mean="zero", **quiet).fit(self.every.X, self.every.y.cpu())
        out[TANGENT] = self.predict(clock, clf)

        start = fit_head(bare, near, penalty=penalty)
        tuned = min((tune(start, near, held, r, search, seed=self.seed) for r in search.rates), key=lambda t: t.loss)
        clock = common.Clock(self.device, {"seconds": tuned.seconds})
        with clock("predicting"):
            p = probabilities(tuned.model, self.test.X)
        out[TUNED] = self.score(p, clock, rate=tuned.rate, epochs=tuned.epochs)

        clock = common.Clock(self.device)
        with clock("seconds"):
            t = find_temperature(in_parts(tuned.model, held.X).double(), held.y)
        with clock("predicting"):
            p = (in_parts(tuned.model, self.test.X).double() / t).sigmoid()
        out[COOLED] = self.score(torch.cat([1 - p, p], 1), clock, temperature=t)

        with common.expect(common.FAR, common.WIDE):
            clock = common.Clock(self.device)
            with clock("seconds"):
                la = linnet.Laplace(tuned.model, structure="kron", **quiet).fit(near.X, near.y)
            fitted = clock.seconds["seconds"]
            out[LAPLACE] = self.predict(clock, la)
            clock = common.Clock(self.device, {"seconds": fitted})
            with clock("seconds"):
                la.tune(validation=(held.X, held.y))
            out[VALIDATED] = self.predict(clock, la)

        clock = common.Clock(self.device)
        with clock("seconds"):
            clf = linnet.TangentClassifier(tuned.model, **quiet).fit(held.X, held.y.cpu())
        out[ADAPTED_AGAIN] = self.predict(clock, clf)
        return {name: out[name] for name in METHODS}


# The run.


def run(options: argparse.Namespace) -> common.Outcome:
    """Draw labels, adapt in each precision, score."""
    kind = common.fill(options, DEFAULTS)
    search, where = SEARCH[kind], f"{options.labels:,} labels, {options.test:,} test sentences"
    train, dev = (sst2(options.data, part) for part in ("train", "dev"))
    if not 10 <= options.labels <= len(train[1]):
        raise ValueError(f"SST-2 has {len(train[1]):,} labels, and 10 are needed; got --labels {options.labels}.")
    if not 1 <= options.test <= len(dev[1]):
        raise ValueError(f"SST-2 has {len(dev[1]):,} development sentences; got --test {options.test}.")
    net, parts = minilm(options.data / "weights"), common.kept_parts(options)
    for seed in range(options.seed, options.seed + options.seeds):
        index = in_turn(train[1], options.labels, 2, torch.Generator().manual_seed(seed))
        texts = [train[0][i] for i in index.tolist()] + dev[0][: options.test]
        X = tuple(t.to(options.device) for t in word_pieces(options.data / "weights", texts))
        both = Labeled(X, torch.cat([train[1][index], dev[1][: options.test]]).to(options.device))
        draw = Draw(both[: options.labels], both[options.labels :], options.device, seed)
        for name in options.precisions:
            base = copy.deepcopy(net).to(options.device, PRECISIONS[name])
            found = draw.contest(base, net.config.hidden_size, search)
            search = replace(search, rates=(found[TUNED]["rate"],))  # the first has chosen
            said = {method: f"{100 * one['accuracy']:.1f} %, NLL {one['nll']:.3f}" for method, one in found.items()}
            print(f"{name}, draw {seed}: {said}", flush=True)
            adapters = "PEFT" if "peft" in sys.modules else "the experiment's own"
            one = {"methods": found, "adapters": adapters, "machine": common.machine(options.device)}
            parts = common.keep(options, {where: {name: {f"draw {seed}": one}}})
    return outcome(parts, where)


def outcome(parts: Mapping[str, Any], where: str) -> common.Outcome:
    """Tables, figure and rows of one setting."""
    if where not in parts:
        raise ValueError(f"No runs are kept of {where!r}, so there is nothing to show; there are {sorted(parts)}.")
    runs = {name: list(parts[where][name].values()) for name in PRECISIONS if name in parts[where]}
    each = {name: [run["methods"] for run in those] for name, those in runs.items()}
    results = {name: summarize(those) for name, those in each.items()}
    gains = {name: {method: compare(those, method) for method in METHODS} for name, those in each.items()}
    count = max(len(those) for those in runs.values())
    machine = ", ".join(sorted({run["machine"] for those in runs.values() for run in those}))
    record = {
        "settings": {
            "network": "MiniLM-L6",
            "rank": RANK,
            "adapted": ADAPTED,
            "draws": count,
            "held out": "a fifth of the labels",
            "now": where,
            "machine": machine,
        },
        "seconds of methods": "medians over draws; without the fine-tuning or the head that came before",
        "errors": "standard errors over draws; less fine-tuning: paired, 95 % intervals over draws",
        "methods": METHODS,
        "results": results,
        "less fine-tuning": gains,
        "parts": parts,
    }
    differs = f"MiniLM-L6 on SST-2, {where}; ± over draws ({count}); {machine}"
    spent = sum(one[key] for those in each.values() for run in those for one in run.values() for key in TIMES)
    command = "python -m experiments lora --device cuda"
    return common.Outcome(record, figure(each, results), rows(results, gains, differs), command, common.duration(spent))


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By method: means of the scores with standard errors over draws, and medians of the times."""
    return {
        method: {key: average([run[method][key] for run in runs]) for key in SCORES}
        | {key: numbers.median(run[method][key] for run in runs) for key in TIMES}
        for method in METHODS
    }


def compare(runs: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """Scores of a method less those of fine-tuning on the same draw."""
    return {key: interval([run[method][key] - run[TUNED][key] for run in runs]) for key in SCORES}


def rows(results: Mapping[str, Any], gains: Mapping[str, Any], differs: str) -> list[common.Row]:
    said = {LAPLACE: "for other networks only"}
    out = []
    for name, table in results.items():
        for method, one in table.items():
            ours = f"{show_error(one['nll'], 3)}, {show_error(one['ece'], 3)}, {100 * one['accuracy']['mean']:.1f} %"
            ours += f", NLL less fine-tuning {show_interval(gains[name][method]['nll'], digits=3)}"
            ours = ours if method != TUNED else ours.partition(", NLL less")[0]
            what = f"{name}, {method}: NLL, ECE, accuracy"
            out.append(common.Row(what, said.get(method, "not in the paper"), ours, differs))
    return out


# The figure.


def pool_curves(curves: Sequence[Mapping[str, Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and accuracy by bin, over several draws.

    >>> one = {"confidence": [0.51, 0.99], "accuracy": [0.5, 1.0], "count": [2, 1]}
    >>> [np.round(x, 3).tolist() for x in pool_curves([one, {**one, "accuracy": [0.25, 1.0]}])]
    [[0.51, 0.99], [0.375, 1.0]]
    """
    sums = np.zeros((BINS, 3))
    for curve in curves:
        for confidence, accuracy, count in zip(curve["confidence"], curve["accuracy"], curve["count"], strict=True):
            sums[min(BINS - 1, int(confidence * BINS))] += np.array([confidence, accuracy, 1.0]) * count
    sums = sums[sums[:, 2] > 0]
    return sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2]


COLORS = dict(
    zip(
        METHODS,
        (plots.GRAY, plots.SKY, plots.VERMILION, plots.ORANGE, plots.BLUE, plots.GREEN, plots.PURPLE),
        strict=True,
    )
)
SHOWN = (LINEAR, TUNED, COOLED, LAPLACE)


def figure(each: Mapping[str, Sequence[Mapping[str, Any]]], results: Mapping[str, Any]) -> Figure:
    """Reliability in one half precision; NLL and ECE of every method by precision."""
    picture = Figure(figsize=(11, 4.2))
    curve, *panels = picture.subplots(1, 3)
    shown = "bfloat16" if "bfloat16" in each else next(iter(each))
    for method in SHOWN:
        x, y = pool_curves([run[method]["reliability"] for run in each[shown]])
        curve.plot(x, y, "o-", color=COLORS[method], lw=1.5, ms=4, label=method)
    curve.plot([0.5, 1], [0.5, 1], color="black", lw=1, ls=":")
    curve.set(xlabel="confidence", ylabel="accuracy", title=f"reliability, {shown}")
    curve.legend(fontsize=8, loc="lower right")
    for ax, key in zip(panels, ("nll", "ece"), strict=True):
        for i, (name, marker) in enumerate(zip(each, "osD", strict=False)):
            values = [results[name][method][key] for method in METHODS]
            at = plots.place_rows(len(METHODS), i, len(each), 0.6)
            color = (plots.BLUE, plots.ORANGE, plots.GREEN)[i]
            plots.draw_means(ax, at, values, across=True, fmt=marker, color=color, capsize=2, label=name)
        plots.name_rows(ax, list(METHODS) if key == "nll" else [""] * len(METHODS), lines=True)
        ax.set(xlabel=f"test {key.upper()} (left is better)")
        ax.grid(axis="y", visible=False)
    plots.legend_below(picture, panels[1], len(each), fontsize=9)
    return picture
