"""One call that tries several ways to adapt a network, and fits the one that predicts best what is held out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import messages, show_progress
from linnet._estimator import check_inputs, name_classes, take_examples
from linnet.adaptation.fine_tuning import RATES, ROUNDS, Tuned, Tuning, fine_tune, measure_losses
from linnet.adaptation.network import describe, divide_outputs, evaluate, find_temperature
from linnet.data import Source, as_source
from linnet.heads import attach_head, check_targets
from linnet.inference import LOG_2PI
from linnet.jacobian import linearize
from linnet.network import check_module, check_whole, top_blocks
from linnet.probability import Likelihood, likelihood_for
from linnet.tangent import TangentClassifier, TangentRegressor

NETWORK, HEAD, TANGENT, TUNED = "network", "last layer", "tangent", "fine-tuning"

FEWEST = 15
"""Number of held-out examples below which the tangent is fitted to all examples. A choice by fewer examples is often
chance; a choice that would have been right is lost. With 10, the scoreboard has worse answers to 50 labels; with 25,
answers to 100 labels are better in some cells and worse in others."""

BEYOND = 1.0
"""Standard errors by which a way must be better than the tangent: gains that are missed against gains by chance."""

KNOWN = 0.9
"""Share of the loss of class frequencies above which a network is said to know nothing of the classes."""

NOTHING = 1e-10
"""Prior variance of a network that stays as it stands."""

PROBED = 500
"""Rows of the Jacobian with which the seconds of the tangent are measured, before a fit to more than three times as
many."""

GROWTH = 2.5
"""The seconds of the tangent grow with about this power of the rows: kernels with the second, solves with the third."""

Estimator = TangentRegressor | TangentClassifier


@dataclass(frozen=True)
class Trial:
    """One way to adapt, and how well it predicted the examples that were held out.

    Attributes:
        name: "network" (as it stands, with a temperature or a noise), "last layer", "tangent" (all parameters, by the
            linearized network) or "fine-tuning".
        score: Mean negative log probability of a held-out target; less is better. None where the way was left out.
        error: Standard error of the score, over examples.
        seconds: What the trial took.
        chosen: Whether the returned estimator was made this way.
        note: Settings that were found, or why the way was left out.
    """

    name: str
    score: float | None
    error: float | None
    seconds: float
    chosen: bool = False
    note: str = ""


def adapt(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    seconds: float | None = None,
    task: str = "auto",
    classes: Sequence[Any] | None = None,
    held_out: float = 0.2,
    rates: Sequence[float] = RATES,
    seed: int = 0,
    progress: bool | None = None,
) -> Estimator:
    """Adapt a trained network to new data in the way that predicts held-out examples best.

    A fifth of the examples is held out; where that is fewer than 15 examples, the tangent is fitted to all. Ways to
    adapt are fitted to the others and judged by the log probability of the held-out targets: the network as it stands
    (with a fitted temperature, or noise); fine-tuning by Adam with several learning rates and early stopping; all
    parameters, by the linearized network (the tangent); and, where the tangent would take too long, the last layer.
    Linear ways of classifiers are judged by their modes, with a temperature, as fine-tuning is. Other ways must be
    better than the tangent beyond the standard error, and where the tangent was left out, better than the network.

    The winner is fitted to all examples. A classifier keeps the prior of its trial. Fine-tuned weights are those of the
    four fifths. The last layer of the fine-tuned network is then conditioned on the fifth that was held out: these
    examples are new to the fine-tuned network, so that the error bars hold, and nothing is trained twice.

    The given network is untouched. A network whose outputs do not fit the labels, or say nothing about them, gets a
    new head (`linnet.attach_head`), which then is the way "last layer".

    The file of the estimator (``save``) holds the weights wherever they are not those of the given network:
    ``linnet.load(path, model)`` takes the given network, or any network of its architecture where the file holds all
    weights. ``est.model`` is the adapted network, an ordinary module.

    Args:
        model: The trained network.
        X: Inputs that the network was **not** trained on: tensors, arrays, dicts of them or a map-style Dataset.
        y: Labels (n,) of any kind, (n, c) of zeros and ones for several labels at once, or numbers, (n,) or (n, c);
            None where the data carries them.
        seconds: About how long the trials may take. Fine-tuning gets two thirds, and the tangent is left out where it
            would take more than what remains. The fit of the winner comes on top. None gives the tangent as long as
            fine-tuning has taken.
        task: "classification", "multilabel", "regression", or "auto": fractions are numbers, all else are labels.
        classes: The label of each output, in order, where labels are not numbers 0 to c - 1.
        held_out: Share of the examples that is held out.
        rates: Learning rates of fine-tuning; () for none.
        seed: Seed of the split and of all else that is drawn.
        progress: False for no progress bars.

    Returns:
        A fitted `TangentRegressor` or `TangentClassifier`. Its ``selection_`` has a `Trial` for each way.

    Example:
        >>> X = torch.linspace(-2, 2, 90)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        >>> reg = adapt(model, X, torch.sin(2 * X[:, 0]), rates=(1e-2,))
        >>> [trial.name for trial in reg.selection_], sum(trial.chosen for trial in reg.selection_)
        (['network', 'fine-tuning', 'tangent', 'last layer'], 1)
        >>> mean, std = reg.predict(X, return_std=True)
        >>> mean.shape, bool((std > 0).all())
        (torch.Size([90]), True)
    """
    model = check_module(model)
    check_whole(model, "adapt")
    messages.check_seed(seed)
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be positive, or None for no limit; got {seconds!r}.")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is a share of the examples, between 0 and 1; got {held_out!r}.")
    if not all(rate > 0 for rate in rates):
        raise ValueError(f"Learning rates must be positive; got rates={tuple(rates)}.")
    given = read_examples(model, X, y, task=task, classes=classes, share=held_out, seed=seed, progress=progress)
    return Trials(given, seconds, tuple(rates)).run()


@dataclass(frozen=True)
class Examples:
    """All that the ways to adapt are given.

    Attributes:
        model: The user's network.
        X: Inputs.
        y: Targets as users write them, (n,) or (n, c).
        codes: Targets as the likelihood takes them.
        task: "classification", "multilabel" or "regression".
        classes: The label of each class; None for numbers, and for several labels at once.
        likelihood: Of the targets.
        new_head: Whether the network needs a new head.
        part: Positions of the examples that the ways are fitted to.
        held: Positions of the examples that judge.
        seed: Seed of all that is drawn.
        progress: False for no progress bars.
    """

    model: nn.Module
    X: Any
    y: np.ndarray
    codes: Tensor
    task: Any
    classes: np.ndarray | None
    likelihood: Likelihood
    new_head: bool
    part: Tensor
    held: Tensor
    seed: int
    progress: bool | None

    @property
    def source(self) -> Source:
        return as_source(self.X, self.model.forward)

    @property
    def outputs(self) -> int:
        """Number of outputs of an example."""
        return self.codes.shape[1] if self.classes is None else len(self.classes)

    @property
    def constant_loss(self) -> float:
        """The mean loss of the frequencies of the classes, for the examples that are held out, or for all."""
        codes = self.codes.long().flatten()
        counts = torch.bincount(codes[self.part], minlength=int(codes.max()) + 1).double() + 1
        judged = codes[self.held] if len(self.held) else codes
        return -float((counts / counts.sum()).log()[judged].mean())

    def find_loss(self, base: nn.Module) -> float:
        """The mean loss of a network for all examples."""
        f = evaluate(base, self.source).cpu()
        return -float(self.likelihood.log_prob(f, self.codes).mean())

    def with_new_head(self) -> Examples:
        """The same for a network that gets a new head, for the classes that there are."""
        assert self.task == "classification"
        return replace(self, new_head=True, **encode(self.y, np.unique(self.y), None))

    def take(self, index: Tensor | None) -> tuple[Any, np.ndarray]:
        """Inputs and targets of some examples; None for all."""
        if index is None:
            return self.X, self.y
        return take_examples(self.X, index, "are held out"), self.y[index.numpy()]

    # Networks and estimators.

    def base(self, index: Tensor | None) -> nn.Module:
        """The network to adapt: with the temperature that is best for some examples, or with a new head for them."""
        X, y = self.take(index)
        if self.new_head:
            classes = None if self.classes is None else self.classes.tolist()
            how: dict[str, Any] = {"classes": classes, "ignore_index": None, "seed": self.seed}
            return attach_head(self.model, X, y, task=self.task, progress=self.progress, **how)
        if self.task == "regression":
            return self.model
        f = evaluate(self.model, as_source(X, self.model.forward))
        codes = self.codes if index is None else self.codes[index]
        return divide_outputs(self.model, find_temperature(self.likelihood, f, codes.to(f.device)))

    def estimator(self, network: nn.Module, **settings: Any) -> Estimator:
        """An estimator of the task's kind."""
        how: dict[str, Any] = {"mean": "network", "seed": self.seed, "progress": self.progress} | settings
        if self.task == "regression":
            return TangentRegressor(network, **how)
        classes = None if self.classes is None else self.classes.tolist()
        return TangentClassifier(network, classes=classes, ignore_index=None, **how)

    def fit(self, base: nn.Module, index: Tensor | None, **settings: Any) -> Estimator:
        """Adapt the network linearly; a new head starts from zero, as it has seen the same labels."""
        return self.condition(base, index, mean="zero" if self.new_head else "auto", **settings)

    def try_out(self, base: nn.Module, index: Tensor, **settings: Any) -> Estimator:
        """Fit to some examples for a trial, which needs no more than the mode of a classifier."""
        return self.fit(base, index, **settings, **({} if self.task == "regression" else {"inference": "map"}))

    def complete(self, tried: Estimator) -> Estimator:
        """The estimator of a trial, fitted to all examples; a classifier keeps network and prior."""
        if isinstance(tried, TangentRegressor):
            return tried.fit(*self.take(None))
        try:
            return tried.set_params(inference="vi").refit(*self.take(None))
        except ArithmeticError:
            return tried.set_params(inference="laplace").refit(*self.take(None))

    def condition(self, network: nn.Module, index: Tensor | None, **settings: Any) -> Estimator:
        """Fit an estimator; where variational inference does not settle, the Gaussian at the mode takes its place."""
        try:
            return self.estimator(network, **settings).fit(*self.take(index))
        except ArithmeticError:
            if self.task == "regression":
                raise
            return self.estimator(network, inference="laplace", **settings).fit(*self.take(index))

    def last_layer(self, network: nn.Module) -> dict[str, Any]:
        """The last layer of a network, as estimators take parameters."""
        first = next(network.parameters())
        batch = next(iter(as_source(self.take(torch.arange(2))[0], network.forward).batches(2))).to(first.device)
        batch = batch.with_inputs(lambda t: t.to(first.dtype) if t.is_floating_point() else t)
        return {"params": top_blocks(network, 0, example=batch.kwargs or batch.args)}

    # Scores.

    def score(self, estimator: Estimator) -> Tensor:
        """Negative log probabilities (m,) of the targets that are held out; those of a mode at its best temperature."""
        X, _ = self.take(self.held)
        codes = self.codes[self.held]
        if isinstance(estimator, TangentRegressor):
            mean, std = (torch.as_tensor(t).cpu().double() for t in estimator.predict(X, return_std=True, noise=True))
            mean, std = mean.view_as(codes), std.view_as(codes)
            return (0.5 * (((codes - mean) / std).square() + LOG_2PI) + std.log()).sum(1)
        f = torch.as_tensor(estimator.decision_function(X)).cpu().double()
        return measure_losses(self.likelihood, f.view(len(codes), -1), codes)

    def score_network(self, base: nn.Module) -> Tensor:
        """The same for a network as it stands; a regression takes its noise from the other examples."""
        f, y = evaluate(base, self.source.subset(self.held)).cpu(), self.codes[self.held]
        if self.task != "regression":
            return -self.likelihood.log_prob(f, y)
        r = evaluate(base, self.source.subset(self.part)).cpu() - self.codes[self.part]
        noise = r.square().mean().clamp_min(torch.finfo(r.dtype).tiny)
        return (0.5 * ((y - f).square() / noise + LOG_2PI + noise.log())).sum(1)


def read_examples(
    model: nn.Module,
    X: Any,
    y: Any,
    *,
    task: str,
    classes: Sequence[Any] | None,
    share: float,
    seed: int,
    progress: bool | None,
) -> Examples:
    """Check the data, and split it; the arguments are those of `adapt`."""
    X = check_inputs(TangentRegressor(), X, reset=True)
    source = as_source(X, model.forward)
    if not source.by_position:
        raise TypeError(
            f"adapt holds examples out, so that it needs data that can be read by position; got {source.kind}. Give "
            "tensors, arrays or a map-style Dataset."
        )
    y = linearize(model).jacobian(source, progress=False).targets() if y is None else y
    labels, kind = check_targets(y, source.n, task)  # type: ignore[arg-type]
    c = evaluate(model, source.subset(torch.arange(2))).shape[1]
    if kind == "classification":
        names, new_head = fit_classes(labels, c, classes)
        encoded = encode(labels, names, None if new_head else c)
        part, held = split(encoded["codes"].flatten(), source.n, share, seed)
    else:
        if classes is not None:
            raise ValueError("classes= is for one label for each example. Leave it out, or say task='classification'.")
        codes = torch.as_tensor(labels.astype(np.float64)).view(source.n, -1)
        name = "regression" if kind == "regression" else "classification"
        likelihood = likelihood_for(name, codes, (codes.shape[1],))
        new_head, encoded = codes.shape[1] != c, {"codes": codes, "likelihood": likelihood, "classes": None}
        part, held = split(None, source.n, share, seed)
    shared: dict[str, Any] = {"seed": seed, "progress": progress, "part": part, "held": held}
    return Examples(model=model, X=X, y=labels, task=kind, new_head=new_head, **encoded, **shared)


def fit_classes(labels: np.ndarray, c: int, classes: Sequence[Any] | None) -> tuple[np.ndarray, bool]:
    """The label of each class, and whether the c outputs of the network do not fit the labels.

    >>> fit_classes(np.array([2, 0]), 3, None), fit_classes(np.array(["a", "b", "c"]), 2, None)
    ((array([0, 1, 2]), False), (array(['a', 'b', 'c'], dtype='<U1'), True))
    """
    if len(np.unique(labels)) < 2:
        raise ValueError("A classifier needs labels of at least two classes; got one class.")
    if classes is None or len(classes) == max(2, c):
        try:
            return name_classes(labels, max(2, c), classes), False
        except ValueError:
            if classes is not None:
                raise
    return np.unique(labels) if classes is None else np.asarray(classes), True


def encode(labels: np.ndarray, classes: np.ndarray, outputs: int | None) -> dict[str, Any]:
    """Targets, likelihood and classes of `Examples`; ``outputs`` None is for a new head, with one for two classes."""
    outputs = (1 if len(classes) == 2 else len(classes)) if outputs is None else outputs
    places = {label: i for i, label in enumerate(classes.tolist())}
    unknown = sorted({str(label) for label in labels.tolist() if label not in places})
    if unknown:
        raise ValueError(f"Labels {unknown[:6]} are not among classes={classes.tolist()[:6]}.")
    codes = torch.tensor([places[label] for label in labels.tolist()])
    likelihood = likelihood_for("classification", codes, (outputs,))
    return {"codes": codes if outputs > 1 else codes.double()[:, None], "likelihood": likelihood, "classes": classes}


def split(labels: Tensor | None, n: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions to fit to and positions to hold out; each class is split by itself, and keeps an example to fit to.

    >>> part, held = split(torch.tensor([0, 1] * 50), 100, 0.2, 0)
    >>> len(part), (held % 2).bincount()
    (80, tensor([10, 10]))
    """
    if round(share * n) < FEWEST:
        return torch.arange(n), torch.arange(0)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    place = torch.linspace(0, 1, n)[order.argsort()]
    kinds = 1
    for label in () if labels is None else labels.unique():
        own = order[(labels == label)[order]]
        place[own] = (torch.arange(len(own)) + 0.5) / len(own)  # the end of each class is at the end of all
        place[own[0]] = -1.0
        kinds += 1
    ranked = place.argsort(descending=True, stable=True)
    count = max(2, min(round(share * n), n - kinds))
    return ranked[count:].sort().values, ranked[:count].sort().values


class Trials:
    """The ways to adapt: they are tried on a part of the examples, and the winner is fitted to all.

    Args:
        given: The examples.
        seconds: How long the trials may take; None for as long as they take.
        rates: Learning rates of fine-tuning.
    """

    def __init__(self, given: Examples, seconds: float | None, rates: tuple[float, ...]) -> None:
        self.given, self.rates, self.limited = given, rates, seconds is not None
        self.deadline = math.inf if seconds is None else time.perf_counter() + seconds
        self.tuning_deadline = self.deadline if seconds is None else self.deadline - seconds / 3
        self.done: list[Trial] = []
        self.losses: dict[str, Tensor] = {}
        self.tried: dict[str, Estimator] = {}

    def run(self) -> Estimator:
        """Try all ways, and fit the best. Of few examples none are held out: the tangent is fitted to all of them."""
        if len(self.given.held) == 0:
            clock = time.perf_counter()
            given, base = self.given, self.given.base(None)
            known = given.task != "classification" or given.new_head
            if not known and given.find_loss(base) > KNOWN * given.constant_loss:
                base = self._renew_head(base)
            estimator = self._fit(TANGENT, base)
            why = f"the one way that was fitted: {len(self.given.y)} examples are too few to hold some of them out"
            estimator.selection_ = (Trial(TANGENT, None, None, time.perf_counter() - clock, True, why),)
            return estimator
        base = self.given.base(self.given.part)
        if not self.given.new_head:
            with self._trial(NETWORK) as note:
                note(self.given.score_network(base))
            if self.given.task == "classification" and self._score(NETWORK) > KNOWN * self.given.constant_loss:
                base = self._renew_head(base)
        if self.given.new_head:
            with self._trial(HEAD) as note:
                note(self._tuning.losses(base))
        tuned = self._fine_tune(base)
        self._try_tangent(base)
        if not self.given.new_head:
            self._try_last_layer(base)
        name = self._choose()
        estimator = self._fit(name, base if tuned is None or name == HEAD else tuned.network)
        own = next(trial for trial in self.done if trial.name == name)
        notes = dict.fromkeys(text for text in (own.note, tell_inference(estimator)) if text)
        chosen = replace(own, chosen=True, note="; ".join(notes))
        estimator.selection_ = tuple(chosen if trial is own else trial for trial in self.done)
        return estimator

    def _score(self, name: str) -> float:
        return float(self.losses[name].mean())

    def _choose(self) -> str:
        """The best way. To beat the tangent, or where it was left out the network, takes more than the error.

        With few labels the choice is by few examples, and the tangent is what does best there: the evidence keeps it
        near the network where the labels say little.
        """
        safe = next(name for name in (TANGENT, NETWORK, HEAD) if name in self.losses)
        best = min(self.losses, key=self._score)
        return best if best != safe and self._is_better(best, safe) else safe

    def _is_better(self, name: str, other: str) -> bool:
        """Whether a way is better than another one, beyond the error."""
        gain = self.losses[other] - self.losses[name]
        return float(gain.mean()) > BEYOND * float(gain.std()) / math.sqrt(len(gain))

    def _renew_head(self, base: nn.Module) -> nn.Module:
        """The network with a new head, where it has features to put the head on: the classes are new to the network."""
        renewed = self.given.with_new_head()
        try:
            found = quietly(lambda: renewed.base(renewed.part))
        except ValueError:
            return base
        self.given = renewed
        return found

    def _fine_tune(self, start: nn.Module) -> Tuned | None:
        if not self.rates or not any(p.requires_grad for p in start.parameters()):
            why = "no learning rate was given" if not self.rates else "no parameter is trainable"
            self.done.append(Trial(TUNED, None, None, 0.0, note=f"left out: {why}"))
            return None
        bar = show_progress(2 * len(self.rates) + ROUNDS, "fine-tuning", progress=self.given.progress, unit="rounds")
        with self._trial(TUNED) as note, bar as tick:
            found = fine_tune(start, self._tuning, rates=self.rates, deadline=self.tuning_deadline, tick=tick)
            if found is None:
                note(None, "no learning rate predicts better than the start")
            else:
                note(found.losses, f"rate {found.rate:g}, {found.rounds} rounds")
        return found

    @property
    def _tuning(self) -> Tuning:
        given = self.given
        return Tuning(given.source, given.codes, given.likelihood, given.part, given.held, given.seed)

    def _try_tangent(self, base: nn.Module) -> None:
        given = self.given
        with self._trial(TANGENT) as note:
            if time.perf_counter() > self.deadline:
                note(None, "left out: no time is left")
                return
            if len(given.part) * given.outputs > 3 * PROBED:
                expected = self._expect_seconds(base)
                spent = sum(trial.seconds for trial in self.done if trial.name == TUNED)
                left = self.deadline - time.perf_counter() if self.limited else spent
                if expected > left:
                    note(None, f"left out: it would take about {expected:.0f} seconds")
                    return
            note(self._try_out(TANGENT, base))

    def _try_last_layer(self, base: nn.Module) -> None:
        """The last layer of the network alone, where the tangent, which has the last layer too, was left out."""
        if TANGENT in self.tried:
            self.done.append(Trial(HEAD, None, None, 0.0, note="left out: the tangent was fitted"))
            return
        with self._trial(HEAD) as note:
            note(self._try_out(HEAD, base, **self.given.last_layer(base)))

    def _expect_seconds(self, base: nn.Module) -> float:
        """Seconds of the tangent, for the trial and for the fit to all examples, from a fit to few of them."""
        given = self.given
        count = max(FEWEST, PROBED // given.outputs)
        few = given.part[torch.linspace(0, len(given.part) - 1, count).long()]
        clock = time.perf_counter()
        quietly(lambda: given.fit(base, few))
        sizes = len(given.part), len(given.y)
        return (time.perf_counter() - clock) * sum((size / count) ** GROWTH for size in sizes)

    def _try_out(self, name: str, base: nn.Module, **settings: Any) -> Tensor:
        """Fit a linear way to the part; the losses (m,) of what is held out."""
        found = self.tried[name] = quietly(lambda: self.given.try_out(base, self.given.part, **settings))
        return self.given.score(found)

    def _fit(self, name: str, network: nn.Module) -> Estimator:
        """The winner. A network that was trained on the part is conditioned on the examples that are new to it."""
        given = self.given
        if name in self.tried:
            estimator = given.complete(self.tried[name])
            network = estimator.lin_.given
        elif name == NETWORK:
            self.given = given = replace(given, new_head=False)
            network = given.base(None)
            settings = {"mean": "network", "prior": NOTHING, **given.last_layer(network)}
            settings |= {} if given.task == "regression" else {"inference": "laplace"}
            estimator = quietly(lambda: given.condition(network, None, **settings))
        elif name == TANGENT:
            estimator = given.fit(network, None)
        else:
            calibrated = network = self._tuning.calibrate(network)
            estimator = quietly(lambda: given.condition(calibrated, given.held, **given.last_layer(calibrated)))
        if network is not given.model:
            estimator._made = describe(network, with_weights=name == TUNED or given.new_head)
        return estimator

    @contextmanager
    def _trial(self, name: str) -> Iterator[Callable[..., None]]:
        """Time a trial; the function takes the losses (m,), or None, and a note."""
        clock, said = time.perf_counter(), [""]

        def note(losses: Tensor | None, text: str = "") -> None:
            said[0] = text
            if losses is not None:
                self.losses[name] = losses.cpu()

        yield note
        losses = self.losses.get(name)
        score = None if losses is None else float(losses.mean())
        error = None if losses is None else float(losses.std() / math.sqrt(len(losses)))
        self.done.append(Trial(name, score, error, time.perf_counter() - clock, note=said[0]))


def tell_inference(estimator: Estimator) -> str:
    """That the Gaussian at the mode has taken the place of variational inference, where it has."""
    laplace = isinstance(estimator, TangentClassifier) and estimator.inference == "laplace"
    return "by Laplace's approximation: variational inference did not settle" if laplace else ""


def quietly(fit: Callable[[], Any]) -> Any:
    """A fit whose warnings are of a trial, or of a state that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit()
