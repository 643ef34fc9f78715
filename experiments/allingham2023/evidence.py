"""What the evidence of a network with batch norm picks, before and after its scale is taken out (slides on Laplace).

A network with 2 hidden layers and 2,593 parameters is trained once on a curve with a gap; its error bars are drawn for
prior precisions lambda from 100 to 0.1. Batch norm leaves the network as it is when a layer before it is scaled, and
the evidence at the network's own weights is not left as it is: with one prior for all weights the choice moves with k.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.statistics import average, scores, show_error

WIDTH = 48
NOISE = 0.1**2
SHOWN = (100.0, 10.0, 5.0, 1.0, 0.1)
SCALES = (0.1, 1.0, 10.0)
CHOICES: dict[str, tuple[str, Literal["network", "linear_mode"]]] = {
    "shared, at the network": ("shared", "network"),
    "layerwise, at the network": ("layerwise", "network"),
    "shared, at the linear mode": ("shared", "linear_mode"),
    "layerwise, at the linear mode": ("layerwise", "linear_mode"),
}


def curve(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def observe(n: int, *, gap: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (n, 1) and targets (n,): on both sides of a gap, or everywhere."""
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    side = torch.where(torch.rand(n, generator=generator, dtype=torch.float64) < 0.5, -1.0, 1.0)
    x = side * (0.5 + u) if gap else 4 * u - 2
    return x[:, None], curve(x) + NOISE**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)


def network(width: int, seed: int) -> nn.Sequential:
    """Biases before a norm layer would do nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(1, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 1),
    ).double()


def train_network(X: Tensor, y: Tensor, *, width: int, steps: int, seed: int) -> nn.Sequential:
    """Adam on all data at once; the running statistics are then those of the data."""
    model = network(width, seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X)[:, 0] - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def rescale(model: nn.Sequential, k: float) -> nn.Sequential:
    """The same function: the second layer's weights times k, and what its norm layer expects with them."""
    linear, norm = model[3], model[4]
    assert isinstance(linear, nn.Linear) and isinstance(norm, nn.BatchNorm1d)
    width = linear.in_features
    other = network(width, 0)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other[3].weight.mul_(k)  # type: ignore[operator]
        other[4].running_mean.mul_(k)  # type: ignore[operator]
        other[4].running_var.mul_(k * k)  # type: ignore[operator]
    other[4].eps = norm.eps * k * k  # type: ignore[assignment]
    return other.eval()


def fit(model: nn.Module, X: Tensor, y: Tensor, prior: Any) -> linnet.Laplace:
    with common.expect(common.FAR):  # how far a network is from a mode is not asked here
        return linnet.Laplace(model, "regression", prior=prior, noise=NOISE).fit(X, y)


def log_likelihood(la: linnet.Laplace, X: Tensor, y: Tensor) -> float:
    """Mean log density of single targets."""
    mean, std = la.predict(X, return_std=True, noise=True)
    return -scores(mean, std.square(), y)["nll"]


def along(model: nn.Module, data: tuple[Tensor, ...], lambdas: Sequence[float]) -> dict[str, list[float]]:
    """Both evidences and the test log likelihood for each precision."""
    X, y, X_test, y_test = data
    out: dict[str, list[float]] = {"network": [], "linear mode": [], "test": []}
    for value in lambdas:
        la = fit(model, X, y, 1 / value)
        out["network"].append(la.log_evidence())
        out["linear mode"].append(la.log_evidence("linear_mode"))
        out["test"].append(log_likelihood(la, X_test, y_test))
    return out


def choose(model: nn.Sequential, data: tuple[Tensor, ...]) -> dict[str, dict[str, Any]]:
    """What each evidence picks for the network and its rescaled twins, and what that is worth on test data."""
    X, y, X_test, y_test = data
    out: dict[str, dict[str, Any]] = {name: {} for name in CHOICES}
    for k in SCALES:
        twin = rescale(model, k)
        for name, (prior, at) in CHOICES.items():
            la = fit(twin, X, y, 1.0).tune(prior, at=at, noise=False)
            out[name][f"{k:g}"] = {
                "lambda": {key: 1 / value for key, value in la.scales_.items()},
                "log evidence": la.tune_path_[-1].log_evidence,
                "test": log_likelihood(la, X_test, y_test),
            }
    return out


ARGUMENTS = {
    "--networks": "networks trained (default: 5)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Networks of several seeds; the first is drawn."""
    count = options.networks or (2 if options.quick else 5)
    width, steps, n = (8, 100, 30) if options.quick else (WIDTH, 1500, 100)
    lambdas = SHOWN if options.quick else tuple(float(v) for v in np.logspace(-2, 3, 21))
    each: list[dict[str, Any]] = []
    for i in range(count):
        random = torch.Generator().manual_seed(1000 * options.seed + i)
        X, y = observe(n, gap=True, generator=random)
        data = (X, y, *observe(5 * n, gap=False, generator=random))
        model = train_network(X, y, width=width, steps=steps, seed=options.seed + i)
        each.append(
            {"axis": along(model, data, lambdas), "choices": choose(model, data), "shown": along(model, data, SHOWN)}
        )
        if i == 0:
            first, p = (model, X, y), sum(q.numel() for q in model.parameters())
    summary = summarize_networks(each, lambdas)
    for name, one in summary["choices"].items():
        print(f"{name:32s}", {k: {a: show_error(b, 3) for a, b in v.items()} for k, v in one.items()}, flush=True)
    metrics = {
        "settings": {"networks": count, "parameters": p, "train": n, "steps": steps, "noise": NOISE, "k": SCALES},
        "lambdas": lambdas,
        "shown": SHOWN,
        "summary": summary,
        "networks": each,
    }
    return common.Outcome(metrics, figure(first, each, lambdas), rows(summary, p, count))


def summarize_networks(each: Sequence[Mapping[str, Any]], lambdas: Sequence[float]) -> dict[str, Any]:
    """Over networks: of every choice the log10 of lambda and the test log likelihood; what a grid picks."""

    def pick(one: Mapping[str, Any], key: str) -> int:
        return int(np.argmax(one["axis"][key]))

    grid = {
        key: {
            "log10 lambda": average([float(np.log10(lambdas[pick(one, key)])) for one in each]),
            "test": average([one["axis"]["test"][pick(one, key)] for one in each]),
        }
        for key in ("network", "linear mode", "test")
    }
    choices: dict[str, Any] = {}
    for name in CHOICES:
        choices[name] = {}
        for k in each[0]["choices"][name]:
            found = [one["choices"][name][k] for one in each]
            size = [float(np.mean(np.log10(list(one["lambda"].values())))) for one in found]
            choices[name][k] = {
                "log10 lambda": average(size),
                "test": average([one["test"] for one in found]),
            }
    return {"grid": grid, "choices": choices}


def rows(summary: Mapping[str, Any], p: int, count: int) -> Iterator[common.Row]:
    differs = (
        f"the slide gives no data: a curve with a gap, {p:,} parameters; mean ± standard error of {count} networks"
    )
    grid = summary["grid"]
    best = grid["test"]
    yield common.Row(
        "one lambda for all weights, test log likelihood where each is largest",
        "the largest evidence does not have the best error bars",
        f"network's evidence {show_error(grid['network']['test'], 3)}, linear mode's "
        f"{show_error(grid['linear mode']['test'], 3)}, best {show_error(best['test'], 3)}; log10 lambda "
        f"{show_error(grid['network']['log10 lambda'])}, {show_error(grid['linear mode']['log10 lambda'])}, "
        f"{show_error(best['log10 lambda'])}",
        differs,
    )
    for name, one in summary["choices"].items():
        values = ", ".join(f"k = {k}: {show_error(found['test'], 3)}" for k, found in one.items())
        text = f"{name}: test log likelihood when a normalized layer is scaled by k"
        yield common.Row(text, "the likelihood is invariant, the norm of the weights is not", values, differs)


def figure(
    first: tuple[nn.Module, Tensor, Tensor], each: Sequence[Mapping[str, Any]], lambdas: Sequence[float]
) -> Figure:
    """Error bars of one network for each lambda; below, evidences and test log likelihood along lambda."""
    model, X, y = first
    x = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]
    picture = plt.figure(figsize=(12, 6.4))
    top, bottom = picture.subfigures(2, 1, height_ratios=(1, 1.15))
    panels = top.subplots(1, len(SHOWN), sharey=True)
    largest = SHOWN[int(np.argmax(each[0]["shown"]["network"]))]
    for ax, value in zip(panels, SHOWN, strict=True):
        mean, std = fit(model, X, y, 1 / value).predict(x, return_std=True)
        plots.draw_posterior(ax, x[:, 0], mean, std, color=plots.BLUE)
        ax.plot(x[:, 0], curve(x[:, 0]), color="black", lw=0.8, ls=":")
        ax.plot(X[:, 0], y, ".", color="black", ms=2.5)
        ax.set_ylim(-4, 4)
        mark = "\nlargest evidence" if value == largest else "\n"
        ax.set_title(rf"$\lambda$ = {value:g}{mark}")
    panels[0].set_ylabel("f ± 2 standard deviations")
    left, right = bottom.subplots(1, 2)
    draw(left, each, lambdas, {"network": plots.VERMILION, "linear mode": plots.GREEN})
    left.set_ylabel("log evidence less its largest")
    left.set_ylim(-60, 3)
    draw(right, each, lambdas, {"test": plots.BLUE}, relative=False)
    right.set_ylabel("test log likelihood")
    colors = dict(zip(CHOICES, (plots.VERMILION, plots.ORANGE, plots.GREEN, plots.PURPLE), strict=True))
    for name in ("shared, at the network", "shared, at the linear mode"):
        for k, style in zip(("0.1", "1", "10"), ("--", "-", ":"), strict=True):
            found = each[0]["choices"][name][k]
            (value,) = found["lambda"].values()
            right.plot(value, found["test"], {"--": "<", "-": "o", ":": ">"}[style], color=colors[name], ms=7)
    for name in ("layerwise, at the network", "layerwise, at the linear mode"):
        right.axhline(each[0]["choices"][name]["1"]["test"], color=colors[name], lw=1, ls="--", label=name)
    for name in ("shared, at the network", "shared, at the linear mode"):
        right.plot([], [], "o", color=colors[name], label=f"{name} (k = 0.1 <, 1 o, 10 >)")
    right.legend(fontsize=8)
    left.legend(fontsize=8)
    return picture


def draw(
    ax: Any,
    each: Sequence[Mapping[str, Any]],
    lambdas: Sequence[float],
    colors: Mapping[str, str],
    *,
    relative: bool = True,
) -> None:
    """Every network thin, the first thick."""
    for key, color in colors.items():
        for i, one in enumerate(each):
            values = np.array(one["axis"][key])
            values = values - values.max() if relative else values
            style = {"lw": 2, "label": f"at the {key}" if relative else None} if i == 0 else {"lw": 0.6, "alpha": 0.6}
            ax.plot(lambdas, values, color=color, **style)
    ax.set_xscale("log")
    ax.set_xlabel(r"prior precision $\lambda$")
