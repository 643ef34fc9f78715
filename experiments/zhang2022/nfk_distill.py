"""A small WRN taught by the Fisher embedding of a large one (Zhang et al. 2022, table 3 and appendix D.2).

Teacher WRN-40-2, student WRN-16-1, on CIFAR-10: alone, with the teacher's logits (KD, Hinton et al. 2015), with its
attention maps (AT, Zagoruyko and Komodakis 2017), with the first components of its Fisher embedding (NFKD). All see the
same shifted and mirrored versions of the training images, of which the teacher has told what it has to tell.

Runs of some methods or seeds are kept beside those that are there: `--methods KD --seeds 0 1`. `--tune` tries the
settings of each method, with fewer epochs, on held-out training images; a run takes the best that was found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from benchmarks.models import WideResNet
from experiments import common
from experiments.common import plots
from experiments.common.data import augment, cifar10
from experiments.common.networks import wide_resnet
from experiments.common.statistics import interval, show_interval
from experiments.common.training import accuracy, in_parts
from linnet.fisher import WithEmbedding, distill

ALONE, KD, AT, NFKD = "student", "KD", "AT", "NFKD"
PAPER = {ALONE: 90.72, KD: 91.27, AT: 91.60, NFKD: 92.42}
COMPONENTS = 20
VIEWS = 10  # shifted and mirrored versions of each image
BATCH, RATE = 256, 0.2
HELD = 2000  # training images that choose the settings
# What is tried for each method; the first is taken where nothing was tried.
SETTINGS: dict[str, tuple[dict[str, float], ...]] = {
    ALONE: ({},),
    KD: ({"alpha": 0.1, "temperature": 4.0}, {"alpha": 0.5, "temperature": 4.0}),
    AT: ({"strength": 1000.0}, {"strength": 100.0}),
    NFKD: ({"alpha": 0.5}, {"alpha": 0.1}),
}
COLORS = {ALONE: plots.GRAY, KD: plots.ORANGE, AT: plots.GREEN, NFKD: plots.BLUE}


class Attention(WithEmbedding):
    """A WRN with its attention maps: mean squares over channels after each group, of length one each.

    >>> Attention(WideResNet(10, 1))(torch.zeros(2, 3, 32, 32))[1].shape
    torch.Size([2, 1344])
    """

    def __init__(self, student: WideResNet) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        net: Any = self.student
        maps, h = [], net.conv1(x)
        for group in net.groups:
            h = group(h)
            maps.append(F.normalize(h.float().square().mean(1).flatten(1)))
        return net.fc(F.relu(net.bn(h)).mean((2, 3))), torch.cat(maps, 1)


def attention_distance(strength: float, sizes: Sequence[int] = (1024, 256, 64)) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of AT: mean squared differences of the maps (n, 1344), added up over the groups."""

    def distance(a: Tensor, b: Tensor) -> Tensor:
        pairs = zip(a.split(list(sizes), 1), b.split(list(sizes), 1), strict=True)
        return strength * torch.stack([F.mse_loss(x, y) for x, y in pairs]).sum()

    return distance


# What the teacher tells.


@dataclass(frozen=True)
class Lesson:
    """Versions of the training images, one after the other, and what the teacher says of each."""

    X: Tensor  # images (versions * n, 3, 32, 32)
    y: Tensor  # labels
    known: Mapping[str, Tensor]  # by method, what the student is to match, (versions * n, ...)
    versions: int  # how many

    def but_last(self, held: int) -> Lesson:
        """Without the last images of each version."""
        n = len(self.y) // self.versions
        kept = torch.arange(len(self.y), device=self.y.device) % n < n - held
        return Lesson(self.X[kept], self.y[kept], {name: t[kept] for name, t in self.known.items()}, self.versions)


def lesson(teacher: WideResNet, x: Tensor, y: Tensor, methods: Sequence[str], options: argparse.Namespace) -> Lesson:
    """What the teacher says of all versions, for the methods that ask."""
    generator = torch.Generator(x.device).manual_seed(options.seed)
    views = min(VIEWS, options.epochs)
    X = torch.cat([augment(x, generator) for _ in range(views)])
    known: dict[str, Tensor] = {}
    with torch.no_grad():
        if {ALONE, KD} & set(methods):
            told = in_parts(teacher, (X,), 1000)
            known |= {ALONE: told, KD: told}
        if AT in methods:
            maps = Attention(teacher).eval()
            known[AT] = in_parts(lambda x: maps(x)[1], (X,), 1000)
    if NFKD in methods:
        start = time.perf_counter()
        fast = "high" if x.is_cuda else "highest"
        embedding = linnet.FisherEmbedding(teacher, options.components, precision=fast, progress=False).fit(x)
        assert embedding.statistics_ is not None
        # `transform` in the precision of training: targets need no more digits.
        J = embedding.lin_.jacobian(X, precision=fast, progress=False)
        known[NFKD] = embedding.statistics_.vectors(J) @ embedding.right_vectors_
        share = float(embedding.explained_variance_ratio_.sum())
        print(f"{options.components} components explain {share:.3f}; {time.perf_counter() - start:.1f} s", flush=True)
    return Lesson(X, y.repeat(views), known, views)


# Students.


def teach(
    method: str, given: Lesson, settings: Mapping[str, float], *, passes: int, seed: int, shape: tuple[int, int]
) -> nn.Module:
    """A trained student; passes go over all versions."""
    device = given.X.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = WideResNet(*shape).to(device, memory_format=torch.channels_last)
    how: dict[str, Any] = {"epochs": passes, "batch_size": BATCH, "lr": RATE, "seed": seed}
    known = given.known[method]
    # Backward passes take the precision of the forward ones. Without its cache, which would keep the first weights.
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
        if method == AT:
            how |= {"distance": attention_distance(settings["strength"]), "standardize": False}
            distill(Attention(net), given.X, given.y, target=known, alpha=0.5, **how)
        elif method == NFKD:
            distill(net, given.X, given.y, target=known, **settings, **how)
        else:
            distill(net, given.X, given.y, teacher=known, **{"alpha": 1.0, **settings}, **how)
    return net.eval()


ARGUMENTS = {
    "--methods": common.several(PAPER, nargs="*"),
    "--seeds": {"type": int, "nargs": "*", "default": [0, 1, 2]},
    "--epochs": {"type": int, "default": 60, "help": "over the training images (default: 60)"},
    "--components": {"type": int, "default": COMPONENTS, "help": "of the embedding (default: 20)"},
    "--tune": {"action": "store_true", "help": "try the settings of the methods, and train no student"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Ask the teacher, train students, compare what is there."""
    shape, count = (16, 1), None
    if options.quick:
        shape, count, options.epochs, options.components = (10, 1), 24, 2, 4
        options.seeds = options.seeds[:1]
    parts = common.kept_parts(options)
    if options.methods and (options.seeds or options.tune):
        teacher = (WideResNet(10, 1).eval() if options.quick else wide_resnet()).to(options.device)
        test = tuple(t.to(options.device) for t in cifar10(options.data, "test", count=count))
        x, y = test if options.quick else (t.to(options.device) for t in cifar10(options.data, "train"))
        given = lesson(teacher, x, y, options.methods, options)
        held = 4 if options.quick else HELD
        if options.tune:
            parts = tune(given, (x[-held:], y[-held:]), shape, options)
        else:
            parts = train_students(given, (test[0], test[1]), teacher, shape, options)
    return outcome(parts, options)


def tune(given: Lesson, held: tuple[Tensor, Tensor], shape: tuple[int, int], options: argparse.Namespace) -> Any:
    """The accuracy of each setting on held-out training images, after a third of the epochs."""
    rest = given.but_last(len(held[1]))
    passes = max(1, round(options.epochs / given.versions / 3))
    parts: Any = common.kept_parts(options)
    for method in options.methods:
        for i, settings in enumerate(SETTINGS[method] if len(SETTINGS[method]) > 1 else ()):
            net = teach(method, rest, settings, passes=passes, seed=100, shape=shape)
            row = {**settings, "held-out accuracy": accuracy(net, *held)}
            print(f"{method}: {row}", flush=True)
            parts = common.keep(options, {"tuning": {method: {str(i): row}}})
    return parts


def choose(parts: Mapping[str, Any], method: str) -> dict[str, float]:
    """The settings with the best held-out accuracy, or the first ones."""
    tried = parts.get("tuning", {}).get(method, {})
    best = max(tried, key=lambda i: tried[i]["held-out accuracy"], default="0")
    return dict(SETTINGS[method][int(best)])


def train_students(
    given: Lesson, test: tuple[Tensor, Tensor], teacher: nn.Module, shape: tuple[int, int], options: argparse.Namespace
) -> Any:
    """Students by method and seed."""
    parts = common.keep(options, {"teacher": {"test accuracy": accuracy(teacher, *test)}})
    passes = options.epochs // given.versions
    for seed in options.seeds:
        for method in options.methods:
            start, settings = time.perf_counter(), choose(parts, method)
            net = teach(method, given, settings, passes=passes, seed=seed, shape=shape)
            row = {
                "test accuracy": accuracy(net, *test),
                "settings": settings,
                "epochs": passes * given.versions,
                "seconds": time.perf_counter() - start,
                "machine": common.machine(options.device),
            }
            print(f"{method}, seed {seed}: {100 * row['test accuracy']:.2f} %, {row['seconds']:.0f} s", flush=True)
            parts = common.keep(options, {"students": {method: {str(seed): row}}})
    return parts


# What comes of it.


def outcome(parts: Mapping[str, Any], options: argparse.Namespace) -> common.Outcome:
    students = {name: parts.get("students", {}).get(name, {}) for name in PAPER}
    table = {name: interval([100 * one["test accuracy"] for one in of.values()]) for name, of in students.items() if of}
    paired = {}
    for name, of in students.items():
        seeds = [seed for seed in of if seed in students[ALONE]]
        if name != ALONE and seeds:
            less = [100 * (of[seed]["test accuracy"] - students[ALONE][seed]["test accuracy"]) for seed in seeds]
            paired[name] = interval(less)
    found = {
        "settings": {
            "teacher": "WRN-40-2, results/wrn",
            "student": "WRN-16-1",
            "components": options.components,
            "versions of an image": VIEWS,
            "batch": BATCH,
            "first rate": RATE,
            "settings tried": {name: list(tried) for name, tried in SETTINGS.items()},
        },
        "test accuracy, %": table,
        "less the student alone, points": paired,
        "parts": dict(parts),
    }
    level = parts.get("teacher", {}).get("test accuracy")
    rows = []
    for name in table:
        own = next(iter(students[name].values()))
        differs = (
            f"20,000 of the 50,000 training images, {own['epochs']} epochs instead of 250, teacher "
            f"{100 * level:.2f} % instead of 94.26 %; settings {own['settings'] or 'none'}; 95 % interval over "
            f"{table[name]['count']} seeds; a student took {own['seconds']:.0f} s on {own['machine']}"
        )
        less = f"; less the student alone {show_interval(paired[name], digits=2)}" if name in paired else ""
        ours = f"{show_interval(table[name], digits=2).lstrip('+')}{less}".replace("(+", "(").replace("to +", "to ")
        rows.append(common.Row(f"test accuracy of {name}, %", f"{PAPER[name]:.2f}", ours, differs))
    command = "python -m experiments nfk_distill --device cuda"
    spent = common.duration(sum(one["seconds"] for of in students.values() for one in of.values()))
    return common.Outcome(found, figure(students, level), rows, command, spent)


def figure(students: Mapping[str, Mapping[str, Any]], teacher: float | None) -> Figure:
    """Accuracies of each method: seeds, their mean with its interval, and what the paper has above its student."""
    result = Figure(figsize=(7, 3.4))
    left, right = result.subplots(1, 2)
    for i, (name, of) in enumerate(students.items()):
        values = [100 * one["test accuracy"] for one in of.values()]
        if values:
            mean = sum(values) / len(values)
            left.plot([i] * len(values), values, "o", color=COLORS[name], alpha=0.6)
            left.plot([i - 0.25, i + 0.25], [mean, mean], color=COLORS[name], lw=2.5)
        right.plot([i - 0.25, i + 0.25], [PAPER[name]] * 2, color=COLORS[name], lw=2.5)
    for ax, title, level in ((left, "here, 20,000 images", teacher and 100 * teacher), (right, "the paper", 94.26)):
        ax.set_xticks(range(len(students)), list(students))
        ax.set_title(title)
        if level:
            ax.axhline(level, color="black", lw=1, ls="--")
            ax.annotate("teacher", (-0.4, level), va="bottom", fontsize=8)
    left.set_ylabel("test accuracy, %")
    return result
