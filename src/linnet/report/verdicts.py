"""Can the model be trusted? Questions that the test data answer, each with the evidence for the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from linnet.metrics import Z95
from linnet.report.content import Classes, Linear, Missing, Numbers, Report
from linnet.report.formatting import count, distance, number, percent

State = Literal["good", "fair", "bad", "open"]

CLEAR = 2.0
"""Number of standard errors above which a difference is not chance."""

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
        found += [_compare_to_network(report), _check_calibration(report)]
    if report.linear is not None:
        found.append(_check_linearity(report.linear))
    found += [Check("Did the fit warn of anything?", "fair", "Yes", note) for note in report.notes]
    return [check for check in found if check is not None]


def _compare_to_network(report: Report) -> Check | None:
    question, told = "Is it better than the network alone?", report.outcome
    if isinstance(told, Missing) or told is None:
        why = told.why if told is not None else "There are no test predictions."
        return Check(question, "open", "Not tested", why)
    if not isinstance(told, Classes | Numbers) or told.before is None:
        return None
    if isinstance(told, Numbers):
        old, new = (np.square(m - told.target).sum(1) for m in (told.before, told.mean))
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
        rows = np.arange(len(told.labels))
        old, new = (-np.log(np.maximum(p[rows, told.labels], 1e-300)) for p in (told.before, told.probabilities))
        before, after = number(float(old.mean())), number(float(new.mean()))
        right = [float((p.argmax(1) == told.labels).mean()) for p in (told.before, told.probabilities)]
        what = f"The log loss changes from {before} to {after}"
        what += f", and the accuracy from {percent(right[0])} to {percent(right[1])}"
    gain = old - new
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    clear = abs(float(gain.mean())) > CLEAR * error
    n = count(len(gain), told.what)
    if not clear:
        return Check(question, "fair", "Not clearly", f"{what}. With {n}, this can be chance.")
    if gain.mean() > 0:
        return Check(question, "good", "Yes", f"{what} on {n}. This is more than chance.")
    return Check(question, "bad", "No, worse", f"{what} on {n}. This is more than chance.")


def _check_calibration(report: Report) -> Check | None:
    question, told = "Is its confidence correct?", report.outcome
    if isinstance(told, Classes):
        best = told.probabilities.max(1)
        said, seen, n = float(best.mean()), float(told.right.mean()), len(best)
        error = math.sqrt(float((best * (1 - best)).sum())) / n
        words = (
            f"Its average confidence is {percent(said)}, and it is right for {percent(seen)} of {count(n, told.what)}"
        )
        names = ("Its confidence is too high", "Its confidence is too low")
    elif isinstance(told, Numbers):
        inside = np.abs(told.mean - told.target) <= Z95 * told.std
        said, seen, n = 0.95, float(inside.mean()), inside.size
        error = math.sqrt(0.95 * 0.05 / n)
        words = f"Of {count(n, 'true value')}, {percent(seen)} lie in their 95 % intervals"
        names = ("Error bars are too narrow", "Error bars are too wide")
    else:
        return None
    gap = said - seen
    if abs(gap) <= CLEAR * error + 0.5 / n:
        return Check(question, "good", "Yes", f"{words}. The difference can be chance.")
    if gap > 0:
        return Check(question, "fair" if gap < 0.1 else "bad", names[0], f"{words}.")
    return Check(question, "fair", names[1], f"{words}.")


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
