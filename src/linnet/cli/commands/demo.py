"""`linnet demo`: trained networks meet new tasks with few labels, turned digits and another curve, in one picture."""

from __future__ import annotations

import copy
import io
import json
import math
import secrets
import statistics
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, mse_loss

from linnet import TangentClassifier, TangentRegressor, __version__, metrics
from linnet._common import atomic_write, needs_extra
from linnet.cli.terminal import Printer
from linnet.inference import Inference

with needs_extra("demo", "linnet demo"):
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, PercentFormatter
    from threadpoolctl import threadpool_limits

PICTURE, METRICS = FILES = ("demo.png", "metrics.json")
NONE, LAST, TUNED = "no adaptation", "last layer only", "fine-tuning"
TANGENT: dict[str, Inference] = {"linnet, mode": "map", "linnet": "vi"}
MODE, LINNET = TANGENT
METHODS = (NONE, LAST, TUNED, *TANGENT)
SCORES = {"accuracy": ("accuracy", ".1%"), "nll": ("NLL", ".2f"), "ece": ("ECE", ".3f"), "seconds": ("seconds", ".1f")}
BLUE, RED, GRAY = "#1f4e79", "#b5473c", "#9aa0a6"
COLORS = {NONE: GRAY, LAST: RED, TUNED: RED, MODE: BLUE, LINNET: BLUE}
ANGLE = 30
"""Degrees by which the digits of the new task are turned, counterclockwise."""

POINTS = 16
"""Observations of the new curve."""

Labeled = tuple[Tensor, Tensor]
"""Images (n, 1, 8, 8) between 0 and 1, and labels (n,)."""


@dataclass(frozen=True)
class Split:
    """A random split of the digits, its network, and the results by method. No digit is in two sets."""

    seed: int  # seed of the split, the network and its training
    source: Labeled  # upright digits, on which the network is trained
    few: Labeled  # turned digits with labels, to adapt the network: the same number of each class
    test: Labeled  # turned digits, on which predictions are compared; ``upright`` has them before they were turned
    upright: Tensor  # see ``test``
    model: nn.Sequential  # the network
    # probabilities (m, 10) of the test digits, scores, and what the method chose; by method
    results: dict[str, tuple[Tensor, dict[str, float], dict[str, Any]]] = field(default_factory=dict)


def run(given: Mapping[str, Any]) -> None:
    """Train, adapt, compare; write a picture and ``metrics.json``. Other files in the folder stay.

    Args:
        given: "out", the folder; "seed", the seed of the splits and the networks; "quick", for one split instead of
            three, and fewer labels, digits and epochs.

    Raises:
        OSError: If the folder cannot be written to. No work has been done then.
    """
    folder, threads = Path(given["out"]), torch.get_num_threads()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(4)}.tmp"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"linnet demo needs a folder it can write to, but it cannot write to {str(folder)!r} ({error.strerror}). "
            "Choose another folder with --out."
        ) from error
    torch.set_num_threads(1)  # such small networks are slower on several threads
    try:
        with threadpool_limits(1):  # the threads of numpy and scikit-learn
            _run(folder, seed=given["seed"], quick=given["quick"])
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, *, seed: int, quick: bool) -> None:
    printer = Printer()
    say, seeds = printer.console.print, range(1000 * seed, 1000 * seed + (1 if quick else 3))
    each, test, epochs, longest = (4, 200, 6, 10) if quick else (5, None, 15, 30)
    bars: Any = {"console": printer.console, "transient": True, "disable": not printer.console.is_terminal}
    with printer.step("1/3 Train a small CNN on upright digits: scikit-learn's, 8 x 8 pixels"):
        splits = [split_digits(each, test, seed=s) for s in seeds]
        for split in track(splits, "networks", **bars):
            train(split.model, split.source, epochs=epochs, seed=split.seed)
        first = splits[0]
        sizes = {"source": len(first.source[0]), "labels": len(first.few[0]), "test": len(first.test[0])}
        upright = [metrics.accuracy(predict_classes(s.model, s.upright), s.test[1]) for s in splits]
        parameters = sum(p.numel() for p in first.model.parameters())
        say(f"random splits: {len(seeds)}; {parameters:,} parameters, trained on {sizes['source']:,} digits each")
        say(f"accuracy on {sizes['test']} other upright digits: [bold]{_average(upright, '.1%')}[/bold]")

    with printer.step(f"2/3 New task: digits turned by {ANGLE} degrees, {sizes['labels']} labels; adapt"):
        for split, method in track([(s, m) for s in splits for m in METHODS], "adaptations", **bars):
            split.results[method] = adapt(method, split, longest=longest)
        rows = [[m, *(_average(_collect(splits, m, k), form) for k, (_, form) in SCORES.items())] for m in METHODS]
        printer.print_table(["method", *(title for title, _ in SCORES.values())], rows)
        spread = f", ± standard deviation over {len(seeds)} splits" if len(seeds) > 1 else ""
        say(f"[dim]{sizes['test']} test digits{spread}; NLL in nats. The seconds include all tuning:[/dim]")
        say("[dim]cross-validation for the methods above linnet, the evidence for linnet[/dim]")

    with printer.step(f"3/3 New task: another curve, {POINTS} points; adapt with error bars, and draw"):
        curves = [adapt_curve(seeds[0] + i) for i in track(range(2 if quick else 10), "curves", **bars)]
        claims = describe_results(splits, curves)
        write(folder / PICTURE, draw_picture(splits, curves, claims))
    for one in claims:
        say(f"[bold]{one}[/bold]")

    found: dict[str, Any] = {
        "linnet": __version__,
        "torch": str(torch.__version__),
        "threads": 1,
        "seed": seed,
        "quick": quick,
    }
    found |= {"seconds": time.perf_counter() - printer.began, "parameters": parameters, "digits": sizes}
    found |= {"upright_accuracy": upright, "methods": {}}
    for method in METHODS:
        found["methods"][method] = {name: _collect(splits, method, name) for name in first.results[method][1]}
        found["methods"][method]["details"] = [split.results[method][2] for split in splits]
    found["curves"] = [curve.scores for curve in curves]
    found["claims"] = claims
    write(folder / METRICS, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())
    printer.print_written(folder, FILES)


def write(path: Path, content: bytes) -> None:
    """Write a complete file or no file at all."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def _collect(splits: Sequence[Split], method: str, name: str) -> list[float]:
    return [split.results[method][1][name] for split in splits]


def _average(values: Sequence[float], form: str) -> str:
    """A mean over splits, with the standard deviation where there are several splits.

    >>> _average([0.5], ".2f"), _average([1.0, 2.0, 3.0], ".1f")
    ('0.50', '2.0 ± 1.0')
    """
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    spread = format(statistics.stdev(values), form).removesuffix("%")
    return f"{mean.removesuffix('%')} ± {spread}{'%' if form.endswith('%') else ''}"


# The digits, the network, and five ways to adapt the network.


def split_digits(each: int, test: int | None = None, *, seed: int) -> Split:
    """Split scikit-learn's digits into ``each`` labels of a class, ``test`` or all other digits, and a source."""
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    source, pool, rest = order[:1000], order[1000:1300], order[1300:][:test]
    few = torch.cat([pool[y[pool] == label][:each] for label in range(10)])
    if len(few) < 10 * each:
        raise ValueError(f"{len(pool)} digits do not hold {each} of every class.")
    turned = turn(x, ANGLE)
    sets = (x[source], y[source]), (turned[few], y[few]), (turned[rest], y[rest])
    return Split(seed, *sets, x[rest], build_network(seed))


def turn(x: Tensor, degrees: float) -> Tensor:
    """Turn images (n, 1, h, h) counterclockwise: bilinear interpolation, with zeros from outside.

    >>> x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(turn(x, 90), x.rot90(1, (2, 3)), atol=1e-5)
    True
    """
    a = math.radians(degrees)
    back = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]], dtype=x.dtype)
    grid = affine_grid(back.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, align_corners=False)


def build_network(seed: int) -> nn.Sequential:
    """Three convolutions and a linear layer: images (n, 1, 8, 8) to logits (n, 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential()
        for i, (a, b, stride) in enumerate([(1, 16, 1), (16, 32, 2), (32, 64, 2)], start=1):
            model.add_module(f"conv{i}", nn.Conv2d(a, b, 3, stride, padding=1))
            model.add_module(f"gelu{i}", nn.GELU())
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(256, 10))
    return model.eval()


def train(model: nn.Module, data: Labeled, *, epochs: int, seed: int) -> None:
    """Train with Adam. The learning rate first rises and then falls."""
    optimizer, steps = torch.optim.Adam(model.parameters()), -(-len(data[0]) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs=epochs, steps_per_epoch=steps)
    for _ in _train_epochs(model, data, optimizer, epochs, 50, seed, schedule):
        pass


def _train_epochs(
    model: nn.Module, data: Labeled, optimizer: Any, epochs: int, size: int, seed: int, schedule: Any = None
) -> Iterator[nn.Module]:
    """Train in batches of ``size``, and yield the model after each epoch."""
    (x, y), order = data, torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=order).split(size):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        yield model


def predict_classes(model: nn.Module, x: Tensor) -> Tensor:
    """Class probabilities (n, c) in float64: small probabilities underflow in float32."""
    with torch.no_grad():
        return model(x).double().softmax(1)


def fit_last_layer(split: Split, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (m, c) at x of logistic regression on the frozen features, with the best penalty by 4 folds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    with torch.no_grad():
        features, new = (split.model[:-1](images).double().numpy() for images in (split.few[0], x))
    folds, penalties = StratifiedKFold(4, shuffle=True, random_state=split.seed), {"C": [1e-3, 1e-2, 1e-1, 1.0, 10.0]}
    model = LogisticRegression(max_iter=5000)
    search = GridSearchCV(model, penalties, scoring="neg_log_loss", cv=folds, error_score="raise")
    search.fit(features, split.few[1].numpy())
    return torch.from_numpy(search.predict_proba(new)), dict(search.best_params_)


def fine_tune(split: Split, x: Tensor, *, longest: int) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (m, c) at x of the network trained further, with the best rate and epochs by 4 folds."""
    from sklearn.model_selection import StratifiedKFold

    def tune(images: Tensor, labels: Tensor, rate: float, epochs: int) -> Iterator[nn.Module]:
        model = copy.deepcopy(split.model)
        optimizer = torch.optim.Adam(model.parameters(), rate)
        return _train_epochs(model, (images, labels), optimizer, epochs, 25, split.seed)

    images, labels = split.few
    folds = StratifiedKFold(4, shuffle=True, random_state=split.seed)
    parts = [tuple(map(torch.from_numpy, part)) for part in folds.split(labels, labels)]
    choices = []
    for rate in (1e-3, 3e-3, 1e-2, 3e-2):
        losses = torch.zeros(longest, dtype=torch.float64)
        for kept, left in parts:
            for epoch, model in enumerate(tune(images[kept], labels[kept], rate, longest)):
                with torch.no_grad():
                    losses[epoch] += cross_entropy(model(images[left]), labels[left], reduction="sum").item()
        choices.append((losses.min().item(), rate, int(losses.argmin()) + 1))
    _, rate, epochs = min(choices)
    *_, model = tune(images, labels, rate, epochs)
    return predict_classes(model, x), {"rate": rate, "epochs": epochs}


def adapt(method: str, split: Split, *, longest: int) -> tuple[Tensor, dict[str, float], dict[str, Any]]:
    """Probabilities of the test digits by one of `METHODS`, their scores, and what the method chose.

    The network of the split stays as it is. Fine-tuning takes at most ``longest`` epochs.
    """
    (x, y), start = split.test, time.perf_counter()
    classifier, details = None, dict[str, Any]()
    if method == NONE:
        p = predict_classes(split.model, x)
    elif method == LAST:
        p, details = fit_last_layer(split, x)
    elif method == TUNED:
        p, details = fine_tune(split, x, longest=longest)
    else:
        classifier = TangentClassifier(split.model, inference=TANGENT[method], link="mc", seed=split.seed)
        p = classifier.fit(*split.few).predict_proba(x)
    seconds = time.perf_counter() - start
    if classifier is not None:
        details = {"prior_variance": classifier.scales_["all"], "log_evidence": classifier.log_evidence_}
        details |= {"elbo": classifier.elbo_, "layers": classifier.layer_relevance_}
    return p, {**metrics.classification(p, y), "seconds": seconds}, details


# The curve.


@dataclass(frozen=True)
class Curve:
    """A network of one curve, a few points of another, and what the adapted network says of new inputs."""

    X: Tensor  # inputs (n, 1) of the points
    y: Tensor  # observed values of the points
    at: Tensor  # inputs (m, 1) in order
    truth: Tensor  # the new curve there
    before: Tensor  # the network there
    mean: Tensor  # the adapted network there
    std: Tensor  # standard deviation of a new observation there
    scores: dict[str, float]  # errors before and after, coverage of 95 % intervals, and seconds


def adapt_curve(seed: int) -> Curve:
    """Train a network on one curve, and adapt the network to `POINTS` observations of another."""
    generator = torch.Generator().manual_seed(seed)

    def observe(n: int, new: bool) -> Labeled:
        X = 6 * torch.rand(n, 1, generator=generator) - 3
        return X, bend(X[:, 0], new=new) + 0.1 * torch.randn(n, generator=generator)

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    X, y = observe(300, False)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(600):
        optimizer.zero_grad()
        mse_loss(model(X)[:, 0], y).backward()
        optimizer.step()
    (X, y), (new, target) = observe(POINTS, True), observe(500, True)
    start = time.perf_counter()
    reg = TangentRegressor(model, seed=seed).fit(X, y)
    mean, std = reg.predict(new, return_std=True, noise=True)
    seconds = time.perf_counter() - start
    at = torch.linspace(-3, 3, 200)[:, None]
    with torch.no_grad():
        before, old = model(at)[:, 0], model(new)[:, 0]
    scores = {"before": metrics.rmse(old, target), "rmse": metrics.rmse(mean, target)}
    scores |= {"coverage": metrics.coverage(mean, std, target), "seconds": seconds}
    mean, std = reg.predict(at, return_std=True, noise=True)
    return Curve(X, y, at, bend(at[:, 0], new=True), before, mean, std, scores)


def bend(x: Tensor, *, new: bool) -> Tensor:
    """The curve on which the network is trained, or the new one."""
    return 1.4 * torch.sin(2 * x + 0.8) + 0.5 if new else torch.sin(2 * x)


def describe_results(splits: Sequence[Split], curves: Sequence[Curve]) -> list[str]:
    """What the results say, in two sentences with numbers; the words follow from the numbers."""

    def mean(method: str, name: str) -> float:
        return statistics.fmean(_collect(splits, method, name))

    gains = [a - b for a, b in zip(*(_collect(splits, m, "accuracy") for m in (LINNET, TUNED)), strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.03
    gain = statistics.fmean(gains)
    word = "as many as" if abs(gain) <= 2 * error else "more than" if gain > 0 else "fewer than"
    labels = len(splits[0].few[0])
    digits = (
        f"With {labels} labels linnet reads {mean(LINNET, 'accuracy'):.0%} of the turned digits, {word} fine-tuning "
        f"({mean(TUNED, 'accuracy'):.0%}); NLL {mean(LINNET, 'nll'):.2f} and {mean(TUNED, 'nll'):.2f}; "
        f"{mean(LINNET, 'seconds'):.1f} s with error bars, {mean(MODE, 'seconds'):.1f} s without, fine-tuning "
        f"{mean(TUNED, 'seconds'):.1f} s."
    )
    before, after, seconds = (
        statistics.median(curve.scores[name] for curve in curves) for name in ("before", "rmse", "seconds")
    )
    coverage = statistics.fmean(curve.scores["coverage"] for curve in curves)
    points = (
        f"With {POINTS} points of a new curve the error goes from {before:.2f} to {after:.2f} in {seconds:.1f} s, in "
        f"the median of {len(curves)} draws; 95% intervals hold {coverage:.0%} of new points."
    )
    return [digits, points]


# The picture.


@contextmanager
def _open_figure(height: float, title: str, note: str) -> Iterator[tuple[Any, io.BytesIO]]:
    """An empty figure, and the PNG that it becomes; the user's matplotlib settings are neither used nor changed."""
    style = {"font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "grid.color": "#e4e6e9"}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        fig, png = Figure(figsize=(12.5, height), layout="constrained"), io.BytesIO()
        fig.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
        fig.supxlabel(note, fontsize=10, color="#5f6368", x=0.01, ha="left")
        yield fig, png
        fig.savefig(png, dpi=150)


def draw_picture(splits: Sequence[Split], curves: Sequence[Curve], claims: Sequence[str]) -> bytes:
    """What was measured, a digit of each class with its readings, the curve, and the scores of every method: a PNG."""
    few, test, dots = len(splits[0].few[0]), len(splits[0].test[0]), ""
    if len(splits) > 1:
        dots = f"; small dots: {len(splits)} random splits, large dots: their means"
    note = f"digits turned by {ANGLE} degrees; {few} labels to adapt with, {test} digits to test on{dots}"
    title = "Trained networks meet new tasks"
    with _open_figure(7.9, title, note) as (fig, png):
        words, top, bottom = fig.subfigures(3, 1, height_ratios=[0.32, 1, 1.5])
        lines = [line for claim in claims for line in textwrap.wrap(claim, 165)]
        words.text(0.01, 0.98, "\n".join(lines), va="top", fontsize=11, linespacing=1.4)
        _draw_task(top.subplots(2, 10), splits[0])
        left, right = bottom.subfigures(1, 2, width_ratios=[1, 1.9])
        _draw_curve(left.subplots(), curves[0])
        axes = right.subplots(1, len(SCORES), sharey=True)
        for ax, (name, (title, form)) in zip(axes, SCORES.items(), strict=True):
            _draw_scores(ax, splits, name, form)
            ax.set(title=title, xlabel="higher is better" if name == "accuracy" else "lower is better")
        axes[0].set_yticks(range(len(METHODS)), METHODS)
        axes[0].set_ylim(len(METHODS) - 0.5, -0.7)
    return png.getvalue()


def _draw_curve(ax: Any, curve: Curve) -> None:
    x, low, high = curve.at[:, 0], curve.mean - 1.96 * curve.std, curve.mean + 1.96 * curve.std
    ax.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0, label="95 % of observations")
    ax.plot(x, curve.before, "--", color=GRAY, label="the network")
    ax.plot(x, curve.truth, ":", color="black", linewidth=1, label="the new curve")
    ax.plot(x, curve.mean, color=BLUE, label="linnet")
    ax.plot(curve.X[:, 0], curve.y, "o", color=RED, markersize=5, label=f"{POINTS} points")
    ax.set(title="A new curve", ylim=(min(float(low.min()), -2.6) - 0.1, max(float(high.max()), 2.2) + 0.1))
    ax.legend(frameon=False, loc="lower center", ncols=2, fontsize=9)
    ax.grid()


def _draw_task(axes: Any, split: Split) -> None:
    upright = predict_classes(split.model, split.upright)
    for row, at, p, text in (
        (0, 1.0, upright, "upright: the network reads"),
        (1, 1.0, split.results[NONE][0], "turned: the network reads"),
        (1, -0.34, split.results[LINNET][0], f"turned: {LINNET} reads"),
    ):
        images, under = (split.upright, split.test[0])[row], {"va": "bottom"}
        axes[row, 0].text(-0.3, at, text, transform=axes[row, 0].transAxes, ha="right", fontsize=10, **under)
        for label in range(10):
            i, ax = int((split.test[1] == label).nonzero()[0]), axes[row, label]
            read = int(p[i].argmax())
            color = BLUE if read == label else RED
            ax.text(0.5, at, str(read), transform=ax.transAxes, ha="center", color=color, **under)
            _draw_digit(ax, images[i, 0])


def _draw_digit(ax: Any, image: Tensor) -> None:
    ax.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color=GRAY, linewidth=0.5)


def _draw_scores(ax: Any, splits: Sequence[Split], name: str, form: str) -> None:
    for row, method in enumerate(METHODS):
        values, color = _collect(splits, method, name), COLORS[method]
        mean, box = statistics.fmean(values), {"facecolor": "white", "edgecolor": "none", "pad": 0.2}
        ax.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=5, markeredgewidth=0)
        ax.plot(mean, row, "o", color=color, markersize=8)
        text = {"textcoords": "offset points", "ha": "center", "color": color, "bbox": box}
        ax.annotate(format(mean, form), (mean, row), (0, 8), **text)
    ax.margins(x=0.18)
    if name == "accuracy":
        ax.set_xlim(-0.05, 1.1)
        ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    elif name != "seconds":
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)
