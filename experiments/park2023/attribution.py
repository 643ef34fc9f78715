"""Compare linnet.attribution with TRAK and kronfluence by networks that are trained again.

The linear datamodeling score (Park et al. 2023): networks are trained on random halves of the data. A method predicts
the margin of each test example, the log odds of its label, under each half by the sum of its scores of the examples in
the half. The score is the rank correlation of predicted and true margins over the halves, averaged over test examples.
All methods see the same networks, which are trained on all data, one of them or several. The peers are traker and
kronfluence; TRAK has several dimensions of its projection, and kronfluence its two ways of damping.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.func import functional_call, vmap

import linnet
from experiments import common
from experiments.common import data, networks, plots
from experiments.common.statistics import show_interval, show_value
from experiments.park2023 import peers
from experiments.park2023.peers import Data, margin

OURS = ("ekfac", "ekfac, weight decay", "kron", "diag", "lowrank")
"""By the prior of largest evidence, and by the prior that the weight decay of the training stands for."""
PEERS = ("TRAK", "kronfluence", "kronfluence, heuristic")
METHODS = (*(f"linnet, {name}" for name in OURS), "gradient product", *PEERS, "linnet, samples")
BEST = "TRAK"
DRAWS = 300
"""Draws of the halves for intervals."""

# Examples; test examples; halves and networks for each; networks for attribution; epochs; networks trained at once.
QUICK = {
    "mnist": Sizes(n=60, tests=6, halves=6, repeats=1, nets=2, epochs=3, batch=20, at_once=6, ranks=(16,)),
    "cifar10": Sizes(n=40, tests=4, halves=4, repeats=1, nets=1, epochs=1, batch=20, at_once=2, ranks=(16,)),
}
FULL = {
    "mnist": Sizes(
        n=2000,
        tests=100,
        halves=100,
        repeats=2,
        nets=3,
        epochs=20,
        batch=100,
        at_once=25,
        ranks=(64, 128, 256, 512, 1024),
    ),
    "cifar10": Sizes(
        n=5000,
        tests=200,
        halves=100,
        repeats=1,
        nets=3,
        epochs=20,
        batch=125,
        at_once=10,
        ranks=(128, 256, 512, 1024, 2048),
    ),
}
RATE = {"mnist": 0.1, "cifar10": 0.1}
DECAY = 1e-3


class ResNet9(nn.Module):
    """ResNet-9 for 32 x 32 images, with group norm: outputs of an example depend on no other example.

    >>> sum(p.numel() for p in ResNet9().parameters())
    414074
    """

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        w = [width, 2 * width, 4 * width, 8 * width]
        pairs = [
            (3, w[0]),
            (w[0], w[1]),
            (w[1], w[1]),
            (w[1], w[1]),
            (w[1], w[2]),
            (w[2], w[3]),
            (w[3], w[3]),
            (w[3], w[3]),
        ]
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs])
        self.norms = nn.ModuleList([nn.GroupNorm(8, b) for _, b in pairs])
        self.linear = nn.Linear(w[3], classes)

    def layer(self, i: int, x: Tensor) -> Tensor:
        return F.relu(self.norms[i](self.convs[i](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.layer(1, self.layer(0, x)), 2)
        x = x + self.layer(3, self.layer(2, x))
        x = F.max_pool2d(self.layer(4, x), 2)
        x = F.max_pool2d(self.layer(5, x), 2)
        x = x + self.layer(7, self.layer(6, x))
        return self.linear(x.amax((2, 3)))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "mnist": lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "cifar10": ResNet9,
}


def load(options: argparse.Namespace, name: str, sizes: Sizes) -> tuple[Data, Data]:
    """Training and test data, as the networks expect them."""
    generator = torch.Generator().manual_seed(options.seed)
    found = []
    for train, count in ((True, sizes.n), (False, sizes.tests)):
        if name == "mnist":
            x, y = data.grayscale(options.data, "mnist", train)
            x = (x.flatten(1).float() / 255 - 0.13) / 0.31
        else:
            x, y = data.cifar10(options.data, "train_1" if train else "test")
        chosen = torch.randperm(len(x), generator=generator)[:count]
        found.append((x[chosen].to(options.device), y[chosen].to(options.device)))
    return found[0], found[1]


# Networks that are trained side by side.


def train(name: str, sizes: Sizes, given: Data, subsets: Tensor, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights of a network for each subset (k, s) of the examples, stacked, (k, ...): SGD, all networks at once."""
    X, y = given
    nets = [networks.draw_network(MAKE[name], seed) for seed in seeds]
    theta = {key: torch.stack([net.state_dict()[key] for net in nets]).to(X.device) for key in nets[0].state_dict()}
    theta = {key: t.requires_grad_() for key, t in theta.items()}
    s = subsets.shape[1]
    steps = s // sizes.batch
    total = steps * sizes.epochs
    optimizer = torch.optim.SGD(theta.values(), lr=RATE[name], momentum=0.9, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / (0.2 * total)) * (1 - i / total)
    )
    generators = [torch.Generator().manual_seed(10_000 + seed) for seed in seeds]
    base = nets[0].to(X.device)

    def loss(one: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(base, one, (x,)), target)

    for _ in range(sizes.epochs):
        order = torch.stack([torch.randperm(s, generator=g)[: steps * sizes.batch] for g in generators]).to(X.device)
        for part in subsets.gather(1, order).split(sizes.batch, 1):
            optimizer.zero_grad()
            # Networks do not meet: the gradient of the sum is that of each.
            vmap(loss)(theta, X[part], y[part]).sum().backward()
            optimizer.step()
            schedule.step()
    return {key: t.detach() for key, t in theta.items()}


def outputs(name: str, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of stacked networks, (k, n, c)."""
    base = MAKE[name]().to(x.device)
    with torch.no_grad():
        found: Tensor = vmap(lambda one: functional_call(base, one, (x,)))(dict(theta))
    return found


def retrain(options: argparse.Namespace, name: str, sizes: Sizes, given: Data, test: Data) -> tuple[Tensor, Tensor]:
    """The examples of each half, (halves, n), and the margins (halves, m), averaged over networks."""
    generator = torch.Generator().manual_seed(1000 + options.seed)
    device = given[0].device
    halves = torch.stack([torch.randperm(sizes.n, generator=generator)[: sizes.n // 2] for _ in range(sizes.halves)])
    jobs = [(i, r) for r in range(sizes.repeats) for i in range(sizes.halves)]
    margins = torch.zeros(sizes.repeats, sizes.halves, sizes.tests, device=device)
    at_once = options.at_once or sizes.at_once
    for start in range(0, len(jobs), at_once):
        some = jobs[start : start + at_once]
        seeds = [100_000 + 1000 * r + i for i, r in some]
        theta = train(name, sizes, given, halves[[i for i, _ in some]].to(device), seeds)
        for (i, r), f in zip(some, outputs(name, theta, test[0]), strict=True):
            margins[r, i] = margin(f, test[1])
        print(f"{name}: {start + len(some)} of {len(jobs)} networks are trained again", flush=True)
    held = torch.zeros(sizes.halves, sizes.n, device=device).scatter_(1, halves.to(device), 1.0)
    return held, margins.mean(0)


# Methods: scores (m, n) of one network, and of all.


def score(
    method: str, nets: Sequence[nn.Module], given: Data, test: Data, sizes: Sizes, options: Any
) -> dict[str, Any]:
    """Scores by name, each of the first network and of all networks; larger where an example raises the margin."""
    device = options.device.partition(":")[0] if options.device == "cpu" else options.device
    if method == "TRAK":
        return {f"TRAK, {rank}": peers.trak(nets, given, test, rank=rank, device=device) for rank in sizes.ranks}
    if method.startswith("kronfluence"):
        damping = None if "heuristic" in method else 1e-8
        each = [peers.ekfac(net, given, test, damping=damping, device=device) for net in nets]
    elif method == "gradient product":
        each = [product(net, given, test) for net in nets]
    else:
        each = [ours(method.removeprefix("linnet, "), net, given, test) for net in nets]
    return {method: [each[0], torch.stack(each).mean(0)]}


def ours(name: str, net: nn.Module, given: Data, test: Data) -> Tensor:
    """By `linnet.attribution`, with the defaults of `Laplace`, or the prior variance of the weight decay."""
    structure, _, decayed = name.partition(", ")
    prior: Any = 1 / (DECAY * len(given[0])) if decayed else "shared"
    with common.expect(common.FAR, common.WIDE):
        la = linnet.Laplace(net, structure=structure, prior=prior, progress=False).fit(*given)  # type: ignore[arg-type]
        found: Tensor = linnet.attribution(la, test[0], test[1], of=margin, change="up-weight")
    return found


def product(net: nn.Module, given: Data, test: Data) -> Tensor:
    """Inner products of gradients: no curvature at all."""
    lin = linnet.linearize(net)
    J, Jt = (lin.jacobian(x, progress=False) for x, _ in (given, test))
    f = J.outputs()
    r = F.one_hot(given[1], f.shape[1]) - f.softmax(1)
    g = Jt.outputs().requires_grad_()
    (u,) = torch.autograd.grad(margin(g, test[1]).sum(), g)
    rows = [linnet.jacobian.combine_outputs(one, w[..., None].to(one.dtype)) for one, w in ((Jt, u), (J, r))]
    return rows[0].gram(rows[1])


# The score.


def correlate(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Rank correlations over the first axis, (m,), of (halves, m).

    >>> correlate(np.array([[0.0], [1.0], [2.0]]), np.array([[5.0], [6.0], [9.0]]))
    array([1.])
    """
    a, b = (rankdata(x, axis=0) for x in (predicted, true))
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0)).clip(1e-30)


def interval_of(values: np.ndarray, draws: np.ndarray) -> dict[str, float]:
    """The mean over test examples, and its 95 % interval by the bootstrap over halves and test examples."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "count": len(values)}


def judge(
    predicted: Mapping[str, np.ndarray], true: np.ndarray, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The score of each method with its interval, and the draws of the scores, in which all methods are paired."""
    rng = np.random.default_rng(seed)
    halves, m = true.shape
    values = {name: correlate(p, true) for name, p in predicted.items()}
    drawn: dict[str, list[float]] = {name: [] for name in predicted}
    for _ in range(DRAWS):
        rows, columns = rng.integers(halves, size=halves), rng.integers(m, size=m)
        for name, p in predicted.items():
            drawn[name].append(correlate(p[rows][:, columns], true[rows][:, columns]).mean())
    draws = {name: np.array(one) for name, one in drawn.items()}
    return {name: interval_of(values[name], draws[name]) for name in predicted}, draws


# The experiment.

ARGUMENTS = {
    "--sets": {"nargs": "+", "choices": ("mnist", "cifar10"), "default": None, "help": "default: mnist; cuda: cifar10"},
    "--methods": {
        "nargs": "+",
        "choices": METHODS,
        "default": None,
        "help": "default: all; on the CPU all but linnet, samples, which takes long there",
    },
    "--kept": {"action": "store_true", "help": "no run: the figure and the table of what earlier runs have kept"},
    "--at-once": "networks that are trained at once",
    "--halves": "another number of halves",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All data sets and methods; each method is kept as soon as its scores are there."""
    parts: dict[str, Any] = common.kept_parts(options)
    sets = options.sets or (["mnist"] if options.device == "cpu" else ["cifar10"])
    for name in [] if options.kept else sets:
        parts = {**parts, name: measure(options, name, (QUICK if options.quick else FULL)[name])}
    return outcome(parts)


def measure(options: argparse.Namespace, name: str, sizes: Sizes) -> dict[str, Any]:
    """The scores of all methods on a data set."""
    sizes = Sizes(**(vars(sizes) | ({"halves": options.halves} if options.halves else {})))
    given, test = load(options, name, sizes)
    clock = common.Clock(options.device)
    with clock("retraining"):
        held, true = retrain(options, name, sizes, given, test)
    every = torch.arange(sizes.n, device=given[0].device).expand(sizes.nets, -1)
    with clock("training"):
        theta = train(name, sizes, given, every, range(options.seed, options.seed + sizes.nets))
    nets = []
    for i in range(sizes.nets):
        net = MAKE[name]().to(given[0].device).eval()
        net.load_state_dict({key: t[i] for key, t in theta.items()})
        nets.append(net)
    accuracies = [float((net(test[0]).argmax(1) == test[1]).double().mean()) for net in nets]
    found: dict[str, Any] = {
        "settings": {**vars(sizes), "parameters": sum(t.numel() for t in nets[0].parameters()), "decay": DECAY},
        "accuracy": accuracies,
        "seconds": clock.seconds,
        "machine": common.machine(options.device),
    }
    print(f"{name}: accuracy {accuracies}", flush=True)
    predicted: dict[str, np.ndarray] = {}
    for method in options.methods or (METHODS[:-1] if options.device == "cpu" and not options.quick else METHODS):
        try:
            with clock(method):
                scores = score(method, nets, given, test, sizes, options)
        except ImportError as error:
            found.setdefault("failed", {})[method] = f"not installed: {error}"
            print(f"{name}, {method}: {error}", flush=True)
            continue
        except Exception as error:  # a peer that fails does not end the experiment, and the results say how it failed
            if method not in PEERS:
                raise
            found.setdefault("failed", {})[method] = f"{type(error).__name__}: {error}"
            print(f"{name}, {method}: {type(error).__name__}: {error}", flush=True)
            continue
        for key, (one, all_nets) in scores.items():
            for count, tau in ((1, one), (sizes.nets, all_nets)):
                # The sum over the examples of each half, (halves, m).
                predicted[f"{key}, {count}"] = (held.double() @ tau.double().T).cpu().numpy()
        table, draws = judge(predicted, true.double().cpu().numpy(), options.seed)
        found |= {"scores": table, "less TRAK": compare(table, draws, sizes.nets)}
        new = {key: round(one["mean"], 4) for key, one in table.items() if key.rpartition(", ")[0] in scores}
        print(f"{name}: {new}, {clock.seconds[method]:.0f} s", flush=True)
        common.keep(options, {name: found})
    return found


def compare(table: Mapping[str, Any], draws: Mapping[str, np.ndarray], nets: int) -> dict[str, Any]:
    """Each method less the best TRAK with the same number of networks; intervals by the same draws."""
    out = {}
    for count in {1, nets}:
        peers_of = [key for key in table if key.startswith(BEST) and key.endswith(f", {count}")]
        if not peers_of:
            continue
        best = max(peers_of, key=lambda key: table[key]["mean"])
        for key in table:
            if key.endswith(f", {count}") and not key.startswith(BEST):
                low, high = np.quantile(draws[key] - draws[best], [0.025, 0.975])
                gap = table[key]["mean"] - table[best]["mean"]
                out[key] = {"mean": gap, "low": float(low), "high": float(high), "best": best}
    return out


def outcome(parts: dict[str, Any]) -> common.Outcome:
    commands = {
        "mnist": "python -m experiments attribution",
        "cifar10": "python -m experiments attribution --device cuda",
    }
    command = "; ".join(text for name, text in commands.items() if name in parts)
    record = {
        "command": command,
        "errors": f"95 % intervals by {DRAWS} bootstrap draws of halves and test examples; differences are paired",
        "parts": parts,
    }
    spent = ", ".join(f"{name} {common.duration(sum(part['seconds'].values()))}" for name, part in parts.items())
    return common.Outcome(record, figure(parts), rows(parts), command=command, time=spent, renewed=outcome)


def rows(parts: Mapping[str, Any]) -> list[common.Row]:
    found = []
    for name, part in parts.items():
        size = part["settings"]
        for key, value in part.get("scores", {}).items():
            less = part["less TRAK"].get(key)
            more = "" if less is None else f"; less the best TRAK {show_interval(less, digits=3)}"
            seconds = part["seconds"].get(key.rpartition(", ")[0]) or part["seconds"].get(key.partition(",")[0])
            method, _, count = key.rpartition(", ")
            found.append(
                common.Row(
                    f"{name}, {method}, {count} network{'' if count == '1' else 's'}: linear datamodeling score",
                    "TRAK is ahead of influence functions (figure)",
                    f"{show_value(value, 3)}{more}",
                    f"{size['n']:,} examples, {size['parameters']:,} parameters, {size['halves']} halves, "
                    f"{size['tests']} test examples; {seconds:.0f} s for all networks"
                    + (" and dimensions" if method.startswith(BEST) else ""),
                )
            )
    return found


def figure(parts: Mapping[str, Any]) -> Figure:
    """A panel for each data set."""
    picture, panels = plt.subplots(1, max(1, len(parts)), figsize=(5.5 * max(1, len(parts)), 4.2), squeeze=False)
    for ax, (name, part) in zip(panels[0], parts.items(), strict=False):
        table = part.get("scores", {})
        methods = list(dict.fromkeys(key.rpartition(", ")[0] for key in table))
        counts = sorted({int(key.rpartition(", ")[2]) for key in table})
        for j, (count, color) in enumerate(zip(counts, (plots.SKY, plots.BLUE), strict=False)):
            values = [table[f"{method}, {count}"] for method in methods]
            label = f"{count} network{'' if count == 1 else 's'}"
            places = plots.place_rows(len(methods), j, len(counts), 0.5)
            plots.draw_means(ax, places, values, across=True, color=color, label=label)
        plots.name_rows(ax, methods)
        ax.set(title=name, xlabel="linear datamodeling score")
        ax.legend(fontsize=8)
    return picture
