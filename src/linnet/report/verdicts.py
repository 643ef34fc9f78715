"""Can the model be trusted? Questions that the test data answer, each with the evidence for the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.stats

from linnet.metrics import Z95, reliability
from linnet.report.content import Classes, Linear, Missing, Numbers, Report
from linnet.report.formatting import count, distance, number, percent

State = Literal["good", "fair", "bad", "open"]

CLEAR = 2.0
"""Number of standard errors above which a difference is not chance."""

CHANCE = 0.01
"""Probability below which a deviation over all levels of confidence is not chance."""

FAR = 0.1
"""Difference of a share from what was said about the share, from which on the answer is "bad"."""

REMEDY_OF_NUMBERS = "linnet.conformal scales intervals to a coverage, by examples that the fit has not seen."
REMEDY_OF_CLASSES = "linnet.conformal gives sets of classes with a coverage, by examples that the fit has not seen."

LINEAR = (0.1, 0.5)
"""Relative distances between the linear model and the network up to which they agree, and up to which they agree
roughly."""


@dataclass(frozen=True)
class Check:
    """A question and its answer."""

    question: str  # the question of the reader
    state: State  # "good", "fair", "bad", or "open" if the answer is not known
    answer: str  # the answer, in a few words
    why: str  # the evidence for the answer


def check_report(report: Report) -> list[Check]:
    """The questions about a report, with answers."""
    found = []
    if report.scores is not None:
        found += [_compare_to_guess(report), _compare_to_network(report), _check_calibration(report)]
    if report.linear is not None:
        found.append(_check_linearity(report.linear))
    found += [Check("Did linnet warn of anything?", "fair", "Yes", note) for note in report.notes]
    return [check for check in found if check is not None]


def _lose(told: Classes | Numbers, predicted: np.ndarray) -> np.ndarray:
    """The loss of each example (n,): its squared error, or minus the log probability of its class."""
    if isinstance(told, Numbers):
        lost: np.ndarray = np.square(predicted - told.target).sum(1)
        return lost
    return np.asarray(-np.log(np.maximum(predicted[np.arange(len(told.labels)), told.labels], 1e-300)))


def _is_clear(gain: np.ndarray) -> bool:
    """Whether a mean of gains (n,) differs from zero by more than chance."""
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return abs(float(gain.mean())) > CLEAR * error


def is_clearly_worse(told: Classes | Numbers) -> bool:
    """Whether the model loses more than the network alone, by more than chance."""
    if told.before is None:
        return False
    old, new = (_lose(told, x) for x in (told.before, told.mean if isinstance(told, Numbers) else told.probabilities))
    return bool(new.mean() > old.mean()) and _is_clear(new - old)


def _compare_to_guess(report: Report) -> Check | None:
    """Whether the model knows more than the training targets: their mean, or the shares of their classes."""
    question, told = "Is it better than a guess that knows no inputs?", report.outcome
    if not isinstance(told, Classes | Numbers) or told.guess is None:
        return None
    numbers = isinstance(told, Numbers)
    shape = told.target.shape if isinstance(told, Numbers) else told.probabilities.shape
    guess = _lose(told, np.broadcast_to(told.guess[0] if numbers else told.guess, shape))
    new = _lose(told, told.mean if isinstance(told, Numbers) else told.probabilities)

    def shown(lost: np.ndarray) -> str:
        return number(math.sqrt(lost.mean() / shape[1]) if numbers else float(lost.mean()))

    name = "the mean of the training targets" if numbers else "the shares of the classes in the training data"
    what = "The typical error" if numbers else "The log loss"
    why = f"{what} is {shown(new)}, and that of {name} is {shown(guess)}."
    if told.before is not None:
        old = _lose(told, told.before)
        if old.mean() > guess.mean() and _is_clear(old - guess):
            why += f" The network alone is worse than that guess, with {shown(old)}: check its weights and its scales."
    better = guess.mean() > new.mean()
    if not _is_clear(guess - new):
        why += f" With {count(len(new), told.what)}, this can be chance."
        return Check(question, "fair" if better else "bad", "Not clearly", why)
    return Check(question, "good", "Yes", why) if better else Check(question, "bad", "No", why)


def _compare_to_network(report: Report) -> Check | None:
    question, told = "Is it better than the network alone?", report.outcome
    if isinstance(told, Missing) or told is None:
        why = told.why if told is not None else "There are no test predictions."
        return Check(question, "open", "Not tested", why)
    if not isinstance(told, Classes | Numbers) or told.before is None:
        return None
    if isinstance(told, Numbers):
        old, new = (_lose(told, m) for m in (told.before, told.mean))
        if np.allclose(told.before, told.mean, rtol=1e-4, atol=1e-6 * float(np.abs(told.mean).max())):
            return Check(
                question,
                "open",
                "The same predictions",
                "The predictions are those of the network. The error bars are new.",
            )
        before, after = (number(math.sqrt(x.mean() / told.mean.shape[1])) for x in (old, new))
        what = f"The typical error changes from {before} to {after}"
    else:
        old, new = (_lose(told, p) for p in (told.before, told.probabilities))
        before, after = number(float(old.mean())), number(float(new.mean()))
        right = [float((p.argmax(1) == told.labels).mean()) for p in (told.before, told.probabilities)]
        what = f"The log loss changes from {before} to {after}"
        what += f", and the accuracy from {percent(right[0])} to {percent(right[1])}"
    gain = old - new
    n = count(len(gain), told.what)
    if not _is_clear(gain):
        return Check(question, "fair", "Not clearly", f"{what}. With {n}, this can be chance.")
    if gain.mean() > 0:
        return Check(question, "good", "Yes", f"{what} on {n}. This is more than chance.")
    return Check(question, "bad", "No, worse", f"{what} on {n}. This is more than chance.")


def _check_calibration(report: Report) -> Check | None:
    """Whether shares of true values agree with what was said about them, at 95 % and over all levels."""
    question, told = "Is its confidence correct?", report.outcome
    if isinstance(told, Classes):
        return _check_confidence(question, told)
    return _check_intervals(question, told) if isinstance(told, Numbers) else None


def _check_confidence(question: str, told: Classes) -> Check:
    best, n = told.probabilities.max(1), len(told.labels)
    said, seen = float(best.mean()), float(told.right.mean())
    error = math.sqrt(float((best * (1 - best)).sum())) / n
    words = f"Its average confidence is {percent(said)}, and it is right for {percent(seen)} of {count(n, told.what)}"
    gap = said - seen
    if abs(gap) > CLEAR * error + 0.5 / n:
        state: State = "bad" if abs(gap) >= FAR else "fair"
        answer = "Its confidence is too high" if gap > 0 else "Its confidence is too low"
        return Check(question, state, answer, f"{words}. {REMEDY_OF_CLASSES}")
    # The mean may be right while high confidence is too high and low confidence is too low: Hosmer and Lemeshow's test,
    # over the bins of the figure that have enough expected mistakes.
    bins = reliability(told.probabilities, told.labels)
    spread = np.sqrt(bins.count * bins.confidence * (1 - bins.confidence))
    known = np.flatnonzero(spread >= 1)
    off = bins.count[known] * (bins.accuracy - bins.confidence)[known] / spread[known]
    if len(known) and float(scipy.stats.chi2.sf(float(off @ off), len(known))) < CHANCE:
        worst = known[int(np.abs(off).argmax())]
        there = f"of confidence about {percent(float(bins.confidence[worst]))}, {percent(float(bins.accuracy[worst]))}"
        answer = "Its confidence is too high for some, too low for others"
        return Check(question, "fair", answer, f"{words}. But of examples {there} are right. {REMEDY_OF_CLASSES}")
    return Check(question, "good", "Yes", f"{words}. The difference can be chance.")


def _check_intervals(question: str, told: Numbers) -> Check:
    inside = np.abs(told.mean - told.target) <= Z95 * told.std
    seen, n = float(inside.mean()), inside.size
    words = f"Of {count(n, 'true value')}, {percent(seen)} lie in their 95 % intervals"
    # The level at which an interval just holds its true value is uniform where error bars are right.
    levels = np.sort(2 * scipy.stats.norm.cdf(np.abs(told.mean - told.target) / told.std) - 1, axis=None)
    shares = np.arange(1, n + 1) / n
    gaps = {"wide": shares - levels, "narrow": levels - shares + 1 / n}
    found = {
        side: float(gap.max())
        for side, gap in gaps.items()
        if float(scipy.stats.ksone.sf(float(gap.max()), n)) < CHANCE / 2
    }
    at95 = 0.95 - seen
    if abs(at95) > CLEAR * math.sqrt(0.95 * 0.05 / n) + 0.5 / n:
        side = "narrow" if at95 > 0 else "wide"
        found[side] = max(found.get(side, 0.0), abs(at95))
    if not found:
        return Check(question, "good", "Yes", f"{words}. Here and at all other levels the difference can be chance.")
    worst = max(found, key=lambda side: found[side])
    level = float(np.clip(levels[int(gaps[worst].argmax())], 0.05, 0.95).round(2))
    there = float((levels <= level).mean())
    words += "" if level == 0.95 else f", and {percent(there)} in their {percent(level, 0)} intervals"
    answer = (
        "Error bars are too narrow for some, too wide for others" if len(found) == 2 else f"Error bars are too {worst}"
    )
    return Check(question, "bad" if found[worst] >= FAR else "fair", answer, f"{words}. {REMEDY_OF_NUMBERS}")


def _check_linearity(found: Linear | Missing) -> Check:
    question = "Is the network linear where it is used?"
    if isinstance(found, Missing):
        return Check(question, "open", "Not known", found.why)
    apart = distance(found.error)
    if found.drawn:
        what = (
            f"Networks with weights drawn from the posterior ({found.drawn}) differ from the linear model by {apart}."
        )
        told = (
            "The error bars hold for the network too.",
            "Networks with such weights have somewhat different error bars.",
            "The error bars hold for the linear model alone. Trust them as far as tests confirm them, and do not "
            "sample networks from this posterior.",
        )
    elif not found.whole:
        what = f"The change of the network with the adapted weights differs from the linear model by {apart}."
        told = (
            "The network would learn the same.",
            "The network would learn something similar.",
            "This is a model on the gradients of the network, not the network. Use this model, as it was tested.",
        )
    else:
        what = f"The network with the adapted weights differs from the linear model by {apart}."
        told = (
            "apply() can write the adapted weights into the network.",
            "apply() gives a network that is similar to this model. Test that network before you use it.",
            "Do not write the adapted weights into the network. Use this model, as it was tested.",
        )
    i = 0 if found.error < LINEAR[0] else 1 if found.error < LINEAR[1] else 2
    states: tuple[State, ...] = ("good", "fair", "bad")
    return Check(question, states[i], ("Yes", "Roughly", "No")[i], f"{what} {told[i]}")
