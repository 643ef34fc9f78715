"""Tasks of the scoreboard: trained networks, the examples that they are adapted with, and the examples of the test.

Every family of tasks is a function that makes the task of a cell and a seed. Networks and activations that take long to
make are kept in a folder, under a name made from all that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import linnet
from experiments import common
from experiments.allingham2023 import laplace_digits
from experiments.common import ensembles
from experiments.common.data import as_cifar10, cifar10, grayscale, word_pieces
from experiments.common.networks import lenet, minilm, resnet
from experiments.common.training import Labeled, in_turn
from experiments.common.training import train as train_network
from experiments.maddox2021 import malaria, sinusoids, uci
from experiments.mu2020 import sst2
from experiments.mu2020.contest import Top
from experiments.mu2020.transfer import below
from linnet._common import atomic_write

MEMBERS = 5
DEVELOPMENT, HELD = "development", "held"
CACHE = common.ROOT / "build" / "scoreboard"


@dataclass(frozen=True)
class Task:
    """Networks that were trained alike, and one draw of examples."""

    networks: Sequence[nn.Module]  # methods that take a single network take the first
    train: Labeled  # examples to adapt with
    test: Labeled  # examples to predict
    classes: int = 0  # number of classes; 0 for regression with one output
    unit: float = 1.0  # original units per unit of the targets
    seed: int = 0  # seed of everything that a method draws
    own: bool = False  # the examples are those that the networks were trained on
    # from a member and examples to the network that fine-tuning starts from; None for the network itself
    start: Callable[[int, Labeled], nn.Module] | None = None
    bare: nn.Module | None = None  # the first network without the head that has seen the labels
    held: Labeled | None = None  # examples for a temperature alone, where the others are the networks' own


@dataclass(frozen=True)
class Cell:
    """A row of the scoreboard: a task with a number of labels, over several seeds."""

    family: str  # kind of task: who made the networks
    name: str  # data that the networks meet
    size: int  # number of labels
    half: str  # DEVELOPMENT or HELD
    seeds: Sequence[int]  # splits, draws or tasks
    make: Callable[[int], Task]  # from a seed to the task

    @property
    def key(self) -> str:
        """Name of the row, such as `boston, 50 labels`."""
        return f"{self.name}, {self.size} labels"


@dataclass(frozen=True)
class Setting:
    """The folders of data and of kept networks, and the size of the run."""

    data: Path  # folder of data sets
    cache: Path | None  # folder of kept networks; None keeps none
    quick: bool = False  # a small version, to see that everything runs

    def steps(self, usual: int) -> int:
        return 20 if self.quick else usual

    def keep(self, key: Mapping[str, Any], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors that were kept under a key, or made now and kept.

        The key names everything that the tensors depend on: the same key in a later run reads the file.
        """
        if self.cache is None:
            return make()
        text = json.dumps(key, sort_keys=True)
        path = self.cache / f"{key['what']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            found = {name: t.contiguous() for name, t in make().items()}
            with atomic_write(path) as temporary:
                save_file(found, temporary, metadata={"key": text})
        return load_file(path)


# Regression: tanh networks with one output, all members and all seeds of a half trained at once.


def flatten(model: nn.Module) -> Tensor:
    """Parameters (p,) of a network of linear layers, in the order of `ensembles.module`."""
    return parameters_to_vector(model.parameters()).detach()


def widths_of(model: nn.Module) -> list[int]:
    """Widths of the layers, from the inputs to the outputs."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return [linear[0].in_features, *(layer.out_features for layer in linear)]


def train_networks(
    X: Tensor, y: Tensor, hidden: Sequence[int], *, rate: float, steps: int, batch: int, seed: int
) -> Tensor:
    """Parameters (s, members, p) of tanh networks for inputs (s, n, d) and targets (s, n): Adam with a falling rate."""
    s, _, d = X.shape
    widths, generator = (d, *hidden, 1), torch.Generator().manual_seed(seed)
    start = ensembles.initial(s * MEMBERS, widths, generator=generator, dtype=X.dtype)
    X, y = (ensembles.repeat(t, MEMBERS) for t in (X, y))
    how = {"rate": torch.full((len(y),), rate), "stop": torch.full((len(y),), steps), "batch": batch}
    return ensembles.train(start, X, y, widths, steps=steps, generator=generator, **how).theta.view(s, MEMBERS, -1)


def members(theta: Tensor, widths: Sequence[int]) -> list[nn.Module]:
    """Networks with parameters (members, p), in float64."""
    return [ensembles.module(one.double(), widths) for one in theta]


UCI_HIDDEN, UCI_SOURCE = (50, 50), 2000


@lru_cache(1)
def load_uci(setting: Setting, name: str, splits: tuple[int, ...]) -> tuple[uci.Split, Tensor]:
    """Splits of a set, and networks (s, members, p) that were trained on the first half of each training split."""
    largest = 100 if setting.quick else 2 * UCI_SOURCE
    every = uci.load(setting.data, name, max(splits) + 1, largest=largest)
    data = uci.Split(*(getattr(every, field)[list(splits)] for field in ("X", "y", "X_test", "y_test", "unit")))
    half, steps = data.X.shape[1] // 2, setting.steps(2000)
    key = {"what": f"uci-{name}", "splits": splits, "hidden": UCI_HIDDEN, "rows": half, "steps": steps}

    def make() -> dict[str, Tensor]:
        search = ensembles.Search(steps=steps, batch=128, rates=(3e-3, 1e-2))
        given = {"members": MEMBERS, "search": search, "generator": torch.Generator().manual_seed(splits[0])}
        X, y = data.X[:, :half].float(), data.y[:, :half].float()
        return {"theta": ensembles.fit_networks(X, y, (X.shape[2], *UCI_HIDDEN, 1), **given)[1].theta}

    return data, setting.keep(key, make)["theta"]


def uci_task(setting: Setting, name: str, size: int, splits: tuple[int, ...], seed: int) -> Task:
    """Rows of the second half of a training split, for networks of the first half."""
    data, theta = load_uci(setting, name, splits)
    i, half = splits.index(seed), data.X.shape[1] // 2
    rows = slice(half, half + size)
    train, test = Labeled((data.X[i, rows],), data.y[i, rows]), Labeled((data.X_test[i],), data.y_test[i])
    test = test[: 40 if setting.quick else 1000]
    networks = members(theta[i], (data.X.shape[2], *UCI_HIDDEN, 1))
    return Task(networks, train, test, unit=float(data.unit[i]), seed=seed)


@lru_cache(1)
def load_sinusoids(setting: Setting, seeds: tuple[int, ...]) -> Tensor:
    """Networks (s, members, p), each set trained on a sinusoid of its own seed."""
    steps = setting.steps(5000)

    def make() -> dict[str, Tensor]:
        drawn = [sinusoids.draw(1, 50, torch.Generator().manual_seed(seed)) for seed in seeds]
        X, y = torch.cat([one.X for one in drawn]), torch.cat([one.y for one in drawn])
        how = {"rate": 1e-2, "steps": steps, "batch": 50, "seed": seeds[0]}
        return {"theta": train_networks(X, y, sinusoids.WIDTHS[1:-1], **how)}

    return setting.keep({"what": "sinusoids", "seeds": seeds, "steps": steps}, make)["theta"]


def sinusoid_task(setting: Setting, size: int, seeds: tuple[int, ...], seed: int) -> Task:
    """A few points of another sinusoid than the one of the networks."""
    theta, generator = load_sinusoids(setting, seeds), torch.Generator().manual_seed(10_000 + seed)
    target = sinusoids.draw(1, max(sinusoids.SHOTS), generator)
    at = torch.linspace(-5, 5, 41 if setting.quick else 201, dtype=torch.float64)[:, None]
    X, y = target.few(size)
    test = Labeled((at,), target.at(at[None], generator)[0])
    return Task(members(theta[seeds.index(seed)], sinusoids.WIDTHS), Labeled((X[0],), y[0]), test, seed=seed)


MALARIA_SOURCE, MALARIA_HIDDEN, MALARIA_LABELS = "2012", (64, 64), (10, 30, 100, 300)


@lru_cache(1)
def load_malaria(setting: Setting) -> malaria.Maps:
    return malaria.load(setting.data, "nigeria")


def malaria_rows(maps: malaria.Maps, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels to train the networks on, to adapt with and to predict."""
    order = torch.randperm(len(maps.X), generator=torch.Generator().manual_seed(seed))
    source, train, rest = order.split([malaria.SOURCE, max(MALARIA_LABELS), len(order) - malaria.SOURCE - 300])
    return source, train, rest[:1000]


@lru_cache(1)
def train_malaria(setting: Setting, seeds: tuple[int, ...]) -> Tensor:
    """Networks (s, members, p) of the map of 2012."""
    steps = setting.steps(2000)

    def make() -> dict[str, Tensor]:
        maps = load_malaria(setting)
        rows = torch.stack([malaria_rows(maps, seed)[0] for seed in seeds])
        X, y = maps.X[rows], maps.rates[MALARIA_SOURCE][rows]
        y = (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)
        return {"theta": train_networks(X, y, MALARIA_HIDDEN, rate=1e-2, steps=steps, batch=256, seed=seeds[0])}

    return setting.keep({"what": "malaria", "seeds": seeds, "steps": steps, "hidden": MALARIA_HIDDEN}, make)["theta"]


def malaria_task(setting: Setting, year: str, size: int, seeds: tuple[int, ...], seed: int) -> Task:
    """A few pixels of another year than the one of the networks."""
    maps, theta = load_malaria(setting), train_malaria(setting, seeds)[seeds.index(seed)]
    source, train, test = malaria_rows(maps, seed)
    level, unit = maps.rates[MALARIA_SOURCE][source].mean(), maps.rates[MALARIA_SOURCE][source].std()

    def points(index: Tensor) -> Labeled:
        return Labeled((maps.X[index].double(),), ((maps.rates[year][index] - level) / unit).double())

    networks = members(theta, (2, *MALARIA_HIDDEN, 1))
    return Task(networks, points(train[:size]), points(test), unit=float(unit), seed=seed)


# Classification.

IMAGE = 20
"""Images of 28 x 28 or 64 x 64 pixels are made so large."""
CHANNELS, UNITS = (4, 8), 16
"""The widths of a small LeNet, which has 1,610 parameters with ten outputs."""
LABELS = 10


def shrink(x: Tensor) -> Tensor:
    """Images (n, h, w) in uint8 as the small LeNet takes them, (n, 1, 20, 20) in [0, 1]."""
    small = F.interpolate(x.unsqueeze(1).float() / 255, (IMAGE, IMAGE), mode="bilinear", antialias=True)
    return small.clamp(0, 1)


def train_lenets(setting: Setting, what: str, data: Callable[[], Labeled], outputs: int) -> list[nn.Module]:
    """Five small LeNets, trained by Adam or read from the cache."""
    nets = [lenet(IMAGE, outputs, channels=CHANNELS, hidden=UNITS, seed=i) for i in range(MEMBERS)]
    epochs = 1 if setting.quick else 8

    def make() -> dict[str, Tensor]:
        given = data()
        trained = [train_network(net, given, epochs=epochs, rate=3e-3, seed=i) for i, net in enumerate(nets)]
        return {f"{i}.{name}": t for i, net in enumerate(trained) for name, t in net.state_dict().items()}

    kept = setting.keep({"what": what, "epochs": epochs, "size": IMAGE, "units": UNITS, "rows": 6000}, make)
    for i, net in enumerate(nets):
        net.load_state_dict({name: kept[f"{i}.{name}"] for name in net.state_dict()})
    return nets


def with_heads(networks: Sequence[nn.Module], train: Labeled, test: Labeled, classes: int, seed: int) -> Task:
    """A task with labels that the networks do not know: each network gets a head for them (`linnet.attach_head`)."""
    few = len(train) < 2 * classes

    def attach(net: nn.Module, data: Labeled, penalty: Any) -> nn.Module:
        X = data.X[0] if len(data.X) == 1 else data.X
        given = {"classes": list(range(classes)), "penalty": penalty, "seed": seed, "progress": False}
        return linnet.attach_head(net, X, data.y, **given)

    headed = [attach(net, train, "evidence" if few else "cv") for net in networks]
    penalties = [float(linnet.heads.head_of(net).penalty_) for net in headed]

    def start(member: int, data: Labeled) -> nn.Module:
        return attach(networks[member], data, penalties[member])

    return Task(headed, train, test, classes, seed=seed, start=start, bare=networks[0])


def rotate(networks: Sequence[nn.Module], seed: int) -> list[nn.Module]:
    """The networks with another first one for every seed."""
    first = seed % len(networks)
    return [*networks[first:], *networks[:first]]


@lru_cache(2)
def read_images(setting: Setting, name: str, train: bool) -> tuple[Tensor, Tensor]:
    x, y = grayscale(setting.data, name, train)
    return (x[:20_000], y[:20_000]) if train else (x, y)


def image_task(setting: Setting, source: str, target: str, size: int, seed: int) -> Task:
    """Small LeNets of one set of images, and labels of the other set."""

    def data() -> Labeled:
        x, y = (t[: 200 if setting.quick else 6000] for t in read_images(setting, source, True))
        return Labeled((shrink(x),), y)

    networks = train_lenets(setting, f"lenet-{source}", data, LABELS)
    train, test = draw(setting, read_images(setting, target, True), read_images(setting, target, False), size, seed)
    parts = (Labeled((shrink(one.X[0]),), one.y) for one in (train, test))
    return with_heads(rotate(networks, seed), *parts, LABELS, seed)


def draw(
    setting: Setting, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], size: int, seed: int, most: int = 1000
) -> tuple[Labeled, Labeled]:
    """Examples with classes in turn, and examples for the test."""
    generator = torch.Generator().manual_seed(seed)
    index = in_turn(train[1], size, int(train[1].max()) + 1, generator)
    at = torch.randperm(len(test[1]), generator=generator)[: 40 if setting.quick else most]
    return Labeled((train[0][index],), train[1][index]), Labeled((test[0][at],), test[1][at])


def resnet_task(setting: Setting, depth: int, target: str, size: int, seed: int) -> Task:
    """The last block of a ResNet for CIFAR-10, on gray images with new labels or on noisy images of CIFAR-10."""
    net = resnet(setting.data / "weights", depth)
    top = linnet.fold_batchnorm(Top(list(net.layer3)[-1:], net.linear).eval())
    noisy = target == "cifar10"

    def make() -> dict[str, Tensor]:
        if noisy:  # test images alone: the network has been trained on all others
            x, y = cifar10(setting.data, "test")
            random = torch.Generator().manual_seed(0)
            x = x + torch.randn(x.shape, generator=random) * CIFAR_NOISE
            train, test = draw(setting, (x[:5000], y[:5000]), (x[5000:], y[5000:]), size, seed, most=250)
        else:
            images = [grayscale(setting.data, target, which) for which in (True, False)]
            train, test = draw(setting, images[0], images[1], size, seed, most=250)
            train, test = (Labeled((as_cifar10(one.X[0]),), one.y) for one in (train, test))
        found = {name: below(net, 1, one.X[0]) for name, one in (("train", train), ("test", test))}
        return {**found, "y_train": train.y, "y_test": test.y}

    key = {"what": f"resnet{depth}-{target}", "size": size, "seed": seed, "noise": CIFAR_NOISE, "test": 250}
    kept = setting.keep(key, make)
    train, test = (Labeled((kept[part],), kept[f"y_{part}"]) for part in ("train", "test"))
    return Task([top], train, test, LABELS, seed=seed) if noisy else with_heads([top], train, test, LABELS, seed)


CIFAR_NOISE = 0.25
"""Standard deviation of the noise in pixels of noisy images, which have standard deviation 1."""


def sentence_task(setting: Setting, rows: tuple[int, int], size: int, seed: int) -> Task:
    """The last layer of MiniLM, and sentences of a range of rows of SST-2."""
    net = minilm(setting.data / "weights")

    def make() -> dict[str, Tensor]:
        texts, y = sst2.sst2(setting.data, "train")
        later, y_later = sst2.sst2(setting.data, "test")
        numbers = torch.arange(len(y))[slice(*rows)], torch.arange(len(y_later))
        train, test = draw(setting, (numbers[0], y[numbers[0]]), (numbers[1], y_later), size, seed, most=250)
        chosen = [texts[i] for i in train.X[0]] + [later[i] for i in test.X[0]]
        ids, mask = word_pieces(setting.data / "weights", chosen, longest=40)
        h = sst2.below(net, 1, ids, mask)
        return {"h": h, "mask": mask, "y": torch.cat([train.y, test.y])}

    kept = setting.keep({"what": "sst2", "rows": rows, "size": size, "seed": seed, "test": 250, "longest": 40}, make)
    every = Labeled((kept["h"], kept["mask"]), kept["y"])
    top = sst2.Top(net.encoder.layer[-1:], nn.Linear(net.config.hidden_size, 2)).eval()
    return with_heads([top], every[:size], every[size:], 2, seed)


PEOPLE = 10
"""New people of the task of identities."""


def identity_task(setting: Setting, size: int, seed: int) -> Task:
    """LeNets that know 20 people, and few images of each of ten others."""
    with np.load(common.data_file(setting.data, "olivetti.npz"), allow_pickle=False) as stored:
        x, who = shrink(torch.from_numpy(stored["x"])), torch.from_numpy(stored["y"]).long()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    known, others = order[:20], order[20:]

    def data() -> Labeled:
        rows = torch.isin(who, known)
        numbers = torch.searchsorted(known.sort().values, who[rows])
        return Labeled((x[rows].repeat(30, 1, 1, 1),), numbers.repeat(30))

    networks = train_lenets(setting, "lenet-olivetti", data, 20)
    generator = torch.Generator().manual_seed(seed)
    chosen = others[torch.randperm(20, generator=generator)[:PEOPLE]].sort().values
    rows = torch.isin(who, chosen).nonzero()[:, 0]
    y = torch.searchsorted(chosen, who[rows])
    index = in_turn(y, len(y), PEOPLE, generator)
    every = Labeled((x[rows][index],), y[index])
    return with_heads(rotate(networks, seed), every[:size], every[50:], PEOPLE, seed)


def digit_task(setting: Setting, decay: float, own: bool, seed: int) -> Task:
    """MLPs of 100 digits: on their own data, or with 100 more digits."""
    data = laplace_digits.digits(100, seed, test=100 if setting.quick else 500)
    epochs = 5 if setting.quick else 200
    key = {"what": "digits", "decay": decay, "seed": seed, "epochs": epochs}

    def make() -> dict[str, Tensor]:
        how = {"decay": decay, "epochs": epochs}
        nets = [laplace_digits.train_digits("MLP", data, seed=100 * seed + i, **how) for i in range(MEMBERS)]
        return {f"{i}.{name}": t for i, net in enumerate(nets) for name, t in net.state_dict().items()}

    kept, networks = setting.keep(key, make), [laplace_digits.network("MLP").double().eval() for _ in range(MEMBERS)]
    for i, net in enumerate(networks):
        net.load_state_dict({name: kept[f"{i}.{name}"] for name in net.state_dict()})
    train, held = Labeled((data.X,), data.y), Labeled((data.X_held,), data.y_held)
    test = Labeled((data.X_test,), data.y_test)
    if own:
        return Task(networks, train, test, LABELS, seed=seed, own=True, held=held)
    order = in_turn(held.y, len(held), LABELS, torch.Generator().manual_seed(seed))
    return Task(networks, held[order[: 20 if setting.quick else 100]], test, LABELS, seed=seed)


# The cells.

IMAGES = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
UCI_MOST = {"boston": 200, "energy": 300}  # labels of the larger cell; of the other sets 400
UCI_HALVES = {DEVELOPMENT: ("boston", "energy", "kin8nm", "wine"), HELD: ("concrete", "power", "protein")}


def number_cells(setting: Setting) -> Iterator[Cell]:
    """Cells of regression: new rows of UCI sets, other sinusoids, malaria of another year."""
    first, later = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
    for half, names in UCI_HALVES.items():
        for name in names:
            splits = first if half == DEVELOPMENT else (3, 4) if name == "protein" else later
            for size in (50, UCI_MOST.get(name, 400)):
                make = partial(uci_task, setting, name, size, splits)
                yield Cell("UCI", name, size, half, splits, make)
    for half, seeds in {DEVELOPMENT: tuple(range(8)), HELD: tuple(range(100, 108))}.items():
        for size in sinusoids.SHOTS:
            yield Cell("sinusoids", "sinusoids", size, half, seeds, partial(sinusoid_task, setting, size, seeds))
    for half, (year, draws) in {DEVELOPMENT: ("2000", first), HELD: ("2015", later)}.items():
        for size in MALARIA_LABELS:
            make = partial(malaria_task, setting, year, size, draws)
            yield Cell("malaria", f"malaria {year}", size, half, draws, make)


def class_cells(setting: Setting) -> Iterator[Cell]:
    """Cells of classification: digits, images, sentences."""
    three, others = (0, 1, 2), (3, 4, 5)
    for half, seeds in {DEVELOPMENT: three, HELD: others}.items():
        for decay in laplace_digits.DECAYS:
            for own in (True, False):
                name = f"{'own' if own else 'new'} digits, decay {decay:g}"
                yield Cell("digits", name, 100, half, seeds, partial(digit_task, setting, decay, own))
    for source, target in (("mnist", "fashion_mnist"), ("fashion_mnist", "mnist")):
        for size in (20, 100, 200):
            name = f"{IMAGES[target]}, LeNet"
            yield Cell("images", name, size, DEVELOPMENT, three, partial(image_task, setting, source, target, size))
    for target, name in IMAGES.items():
        make = partial(resnet_task, setting, 20, target, 100)
        yield Cell("images", f"{name}, ResNet-20", 100, DEVELOPMENT, three, make)
    for size in (30, 100):
        make = partial(resnet_task, setting, 32, "cifar10", size)
        yield Cell("images", "noisy CIFAR-10, ResNet-32", size, HELD, others, make)
    for size in (20, 50):
        yield Cell("images", "Olivetti identities", size, HELD, three, partial(identity_task, setting, size))
    for half, rows, seeds in ((DEVELOPMENT, (0, 3000), three), (HELD, (3000, 6920), others)):
        for size in (50, 100):
            yield Cell("text", "SST-2, MiniLM", size, half, seeds, partial(sentence_task, setting, rows, size))


QUICK = (
    "boston, 50 labels",
    "sinusoids, 5 labels",
    "own digits, decay 0, 100 labels",
    "new digits, decay 0, 100 labels",
)
"""Cells of a small version."""
