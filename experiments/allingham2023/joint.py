"""Joint log likelihoods, turned and unknown images, with a small network for MNIST (slides on linearized networks).

The slides say that ensembles predict labels well one by one and poorly together, for a ResNet-18 on CIFAR-100. Here a
CNN with 1,610 parameters sees 500 digits of 20 x 20 pixels. Its learning rate and epochs come from a search on a fifth
of them; the other members of the ensemble are trained in the same way from other weights. 200 more digits are held out
for the one that needs them, a temperature. Turned digits and Fashion-MNIST are what none has seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace as Sizes
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.allingham2023.laplace_cifar import KAPPAS, areas, joint
from experiments.allingham2023.laplace_digits import average_links, tune_alone
from experiments.common import plots
from experiments.common.data import grayscale, turn
from experiments.common.networks import lenet
from experiments.common.statistics import show_interval, show_value, subtract, summarize
from experiments.common.training import Labeled, Search, find_temperature, fine_tune, in_parts, in_turn, train
from linnet import metrics

SIZE, MEMBERS = 20, 5
MAP, TEMPERATURE, ENSEMBLE = "MAP", "temperature by held-out digits", "ensemble of 5"
DEFAULT, ALONE, LAST = "linnet", "linnet, the evidence alone", "linnet, last layer"
METHODS = {
    MAP: "the network",
    TEMPERATURE: "its logits over one number, likeliest on the held-out digits",
    ENSEMBLE: "the average of five networks",
    DEFAULT: "Laplace(model, structure='full').fit(X, y)",
    ALONE: "tune(narrow=False): the largest evidence, whatever averaging costs",
    LAST: "Laplace(model, params='9.*').fit(X, y)",
}
PALETTE = (plots.GRAY, plots.ORANGE, plots.GREEN, plots.BLUE, plots.PURPLE, plots.SKY)
COLORS = dict(zip(METHODS, PALETTE, strict=True))
UNKNOWN, TURNED = "Fashion-MNIST", 45
TRIED = (
    "sizes are the third tried: with 300 digits and 300 draws the evidence alone was behind the ensemble, upright at 5"
)
JOINT = {"joint log likelihood": "upright", f"joint log likelihood, turned by {TURNED}": f"turned by {TURNED}°"}


# Seeds, digits for training, held out, for the test; epochs at most; joint samples; angles; channels.
QUICK = Sizes(seeds=2, train=30, held=20, test=20, epochs=3, draws=10, angles=(0, TURNED), channels=(2, 2))
CPU = Sizes(
    seeds=5, train=500, held=200, test=200, epochs=60, draws=2000, angles=(0, 15, 30, TURNED, 60, 90), channels=(4, 8)
)
CUDA = Sizes(**vars(CPU) | {"seeds": 10, "test": 1000, "angles": (0, 15, 30, TURNED, 60, 75, 90)})


class Found(NamedTuple):
    """Of a method at some inputs: probabilities (n, c), variances (n, c), and how joint samples (k, n, c) are drawn."""

    p: Tensor
    variance: Tensor | None
    samples: Callable[[], Tensor]


Method = Callable[[Tensor], Found]


def images(x: Tensor) -> Tensor:
    """Stored images (n, 28, 28) as the network takes them, (n, 1, 20, 20) in [0, 1]."""
    return F.interpolate(x.unsqueeze(1).float() / 255, (SIZE, SIZE), mode="bilinear", antialias=True)


class Data(NamedTuple):
    """Training, held-out and test digits, and images of another kind."""

    train: Labeled
    held: Labeled
    test: Labeled
    unknown: Tensor


Stored = Mapping[str, tuple[Tensor, Tensor]]


def read_images(options: argparse.Namespace) -> Stored:
    """Read once: it takes longer than a network."""
    names = {"train": ("mnist", True), "test": ("mnist", False), UNKNOWN: ("fashion_mnist", False)}
    return {key: grayscale(options.data, *name) for key, name in names.items()}


def draw_data(source: Stored, sizes: Sizes, seed: int, device: str) -> Data:
    """Digits of a seed: classes in turn for training, at random for the rest."""
    random = torch.Generator().manual_seed(seed)

    def labeled(key: str, index: Tensor) -> Labeled:
        x, y = source[key]
        return Labeled((images(x[index]).to(device),), y[index].to(device))

    first = in_turn(source["train"][1], sizes.train + sizes.held, 10, random)
    some = {key: torch.randperm(len(source[key][1]), generator=random)[: sizes.test] for key in ("test", UNKNOWN)}
    known, held = (labeled("train", part) for part in (first[: sizes.train], first[sizes.train :]))
    return Data(known, held, labeled("test", some["test"]), labeled(UNKNOWN, some[UNKNOWN]).X[0])


# Methods.


def network(sizes: Sizes, seed: int, device: str) -> nn.Module:
    return lenet(SIZE, 10, channels=sizes.channels, hidden=2 * sizes.channels[1], seed=seed).to(device)


def train_members(data: Labeled, sizes: Sizes, seed: int, device: str) -> tuple[list[nn.Module], dict[str, float]]:
    """The network after a search, and members that are trained likewise from other weights; float64."""
    search = Search((3e-3, 1e-2), sizes.epochs, patience=15)
    first = fine_tune(lambda _: network(sizes, 100 * seed, device), data, search, seed=seed)
    how = {"epochs": first.epochs, "rate": first.rate, "batch": search.batch}
    seeds = [100 * seed + i for i in range(1, MEMBERS)]
    others = [train(network(sizes, one, device), data, seed=one, **how) for one in seeds]
    return [one.double().eval() for one in (first.model, *others)], {"rate": first.rate, "epochs": first.epochs}


def of_samples(f: Tensor) -> Found:
    """From logits (k, n, c) of several networks, or of one."""
    return Found(f.softmax(-1).mean(0), f.var(0, unbiased=False) if len(f) > 1 else None, lambda: f)


def of_posterior(la: linnet.Laplace, draws: int) -> Method:
    def at(X: Tensor) -> Found:
        p, variance = average_links(la, X, ("probit",))
        return Found(p["probit"], variance, lambda: la.sample(X, draws))

    return at


def methods(nets: Sequence[nn.Module], data: Data, sizes: Sizes) -> dict[str, Callable[[], Method]]:
    """Each fitted when it is called for: a posterior that is tuned again is no longer the one that it was."""
    net, X, y = nets[0], data.train.X[0].double(), data.train.y
    held = data.held.X[0].double(), data.held.y
    t = find_temperature(in_parts(net, (held[0],)), held[1])
    exact = linnet.Laplace(net, structure="full", progress=False)

    def fitted(la: linnet.Laplace) -> linnet.Laplace:
        with common.expect(common.FAR):  # a network stopped by held-out digits is not at a mode
            return la.fit(X, y)

    last = linnet.Laplace(net, params=f"{len(net) - 1}.*", progress=False)  # type: ignore[arg-type]
    return {
        MAP: lambda: lambda x: of_samples(in_parts(net, (x,))[None]),
        TEMPERATURE: lambda: lambda x: of_samples(in_parts(net, (x,))[None] / t),
        ENSEMBLE: lambda: lambda x: of_samples(torch.stack([in_parts(one, (x,)) for one in nets])),
        DEFAULT: lambda: of_posterior(fitted(exact), sizes.draws),
        ALONE: lambda: of_posterior(tune_alone(exact), sizes.draws),
        LAST: lambda: of_posterior(fitted(last), sizes.draws),
    }


def score(method: Method, data: Data, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Scores by angle, joint log likelihoods upright and turned, and how well other images are told from digits."""
    X, y = data.test.X[0].double(), data.test.y
    out: dict[str, Any] = {"angles": {}, "AUROC": {}}
    upright = method(X)
    for angle in sizes.angles:
        found = upright if angle == 0 else method(turn(X, torch.full((len(X),), float(angle)).to(X)))
        out["angles"][str(angle)] = metrics.classification(found.p, y)
        if angle in (0, TURNED):
            name = "joint log likelihood" + (f", turned by {angle}" if angle else "")
            out[name] = joint(found.samples(), y, argparse.Namespace(seed=seed))["joint log likelihood"]
        if angle:
            out["AUROC"][f"turned by {angle}"] = areas((upright.p, upright.variance), (found.p, found.variance))
    other = method(data.unknown.double())
    out["AUROC"][UNKNOWN] = areas((upright.p, upright.variance), (other.p, other.variance))
    return out


# The experiment.


ARGUMENTS = {
    "--seeds": "draws of digits and networks (default: 5; cuda: 10)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All seeds."""
    sizes = {"quick": QUICK, "cpu": CPU, "cuda": CUDA}[common.kind_of(options)]
    seeds = common.seeds_of(options, sizes.seeds)
    source, parts = read_images(options), {}
    where = f"{sizes.train} digits, {sizes.test} for the test, {sizes.draws} draws"
    for seed in seeds:
        clock = common.Clock(options.device)
        with clock("seconds"):
            data = draw_data(source, sizes, seed, options.device)
            nets, chosen = train_members(data.train, sizes, seed, options.device)
            fitted = methods(nets, data, sizes)
            found = {name: score(make(), data, sizes, seed) for name, make in fitted.items()}
        one = {"chosen": chosen, **clock.seconds, "methods": {name: found[name] for name in METHODS}}
        parts = common.keep(options, {where: {f"seed {seed}": one}})
        print(f"seed {seed}:", {name: round(one["angles"]["0"]["nll"], 3) for name, one in found.items()}, flush=True)
    # Seeds that other runs of the same size have kept count too: they may run side by side.
    each = list(parts[where].values())
    table = summarize_seeds([one["methods"] for one in each])
    record = {
        "settings": {"now": where, "seeds": len(each), "held out": sizes.held, "kappas": KAPPAS},
        "errors": "95 % intervals by Student's t over seeds (digits and networks); differences are paired",
        "methods": METHODS,
        "summary": table,
        "parts": parts,
    }
    command = f"python -m experiments {options.name}" + (" --quick" if options.quick else "")
    if options.device != "cpu":
        command += f" --device {options.device}"
    spent = common.duration(sum(one["seconds"] for one in each)) + (" of CPU" if options.device == "cpu" else "")
    return common.Outcome(record, figure(table, sizes), rows(table, sizes, len(each)), command=command, time=spent)


def summarize_seeds(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores, and the same less those of MAP and of the ensemble."""
    return {
        name: {
            "scores": summarize([one[name] for one in each]),
            "less MAP": summarize([subtract(one[name], one[MAP]) for one in each]),
            "less ensemble": summarize([subtract(one[name], one[ENSEMBLE]) for one in each]),
        }
        for name in METHODS
    }


def rows(table: Mapping[str, Any], sizes: Sizes, seeds: int) -> Iterator[common.Row]:
    differs = f"CNN with 1,610 parameters, {sizes.train} digits of MNIST, {sizes.test} for the test; {seeds} seeds"
    differs += f"; {TRIED}"
    paper = {
        MAP: "ResNet-18, CIFAR-100: -1.40, -13.97, -27.89, -41.83, -55.89",
        ENSEMBLE: "ResNet-18, CIFAR-100: -0.90, -6.86, -14.17, -22.29, -31.07",
    }
    laplace = "linearized Laplace's column is not in the slides' text"
    for name, one in table.items():
        told_joint = []
        for key in JOINT:
            values = ", ".join(f"{value['mean']:.2f}" for value in one["scores"][key].values())
            gap = show_interval(one["less ensemble"][key]["5"], digits=2)
            told_joint.append(f"{JOINT[key]} {values}; less the ensemble's at 5: {gap}")
        said = paper.get(name, "not on the slides" if name == TEMPERATURE else laplace)
        yield common.Row(f"{name}: joint log likelihood for kappa = 1 .. 5", said, "; ".join(told_joint), differs)
        nll = ", ".join(f"{angle}°: {show_value(value['nll'])}" for angle, value in one["scores"]["angles"].items())
        yield common.Row(f"{name}: NLL by angle", "not on the slides", nll, differs)
        area = one["scores"]["AUROC"][UNKNOWN]
        auroc = ", ".join(f"{key} {show_value(value, 3)}" for key, value in area.items())
        yield common.Row(f"{name}: AUROC of {UNKNOWN}", "not on the slides", auroc, differs)


def figure(table: Mapping[str, Any], sizes: Sizes) -> Figure:
    """Joint log likelihoods less the ensemble's, NLL against the angle, areas under the ROC curve."""
    picture, axes = plt.subplots(2, 2, figsize=(11.5, 8.4))
    angle, area = axes[1]
    for i, (name, one) in enumerate(table.items()):
        for ax, key in zip(axes[0], JOINT, strict=True):
            x = [kappa + 0.05 * (i - 3) for kappa in KAPPAS]
            plots.draw_means(ax, x, list(one["less ensemble"][key].values()), color=COLORS[name], label=name)
        x = [value + 0.8 * (i - 3) for value in sizes.angles]
        losses = [one["scores"]["angles"][str(value)]["nll"] for value in sizes.angles]
        plots.draw_means(angle, x, losses, color=COLORS[name])
        for j, value in enumerate(one["scores"]["AUROC"][UNKNOWN].values()):
            how = {"fmt": "o^D"[j], "ms": 5, "lw": 1, "color": COLORS[name]}
            plots.draw_means(area, [i + 0.2 * (j - 1)], [value], across=True, **how)
    for ax, title in zip(axes[0], JOINT.values(), strict=True):
        ax.set(xlabel="kappa (inputs in a group)", ylabel="joint log likelihood less the ensemble's")
        ax.set_title(f"digits, {title}")
        ax.set_yscale("symlog", linthresh=1.0)
    angle.set(xlabel="digits turned by, degrees", ylabel="test NLL")
    plots.name_rows(area, [name.replace(" by held-out digits", "") for name in table])
    area.set_xlabel(f"AUROC of {UNKNOWN}: o largest probability,\n^ entropy, D variance of the logits")
    plots.legend_below(picture, axes[0, 0], 4)
    return picture
