"""Can it be trusted? Questions that the test data answer, each with the evidence for the answer."""

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
"""Standard errors beyond which a difference is not put down to chance."""

LINEAR = (0.1, 0.5)
"""Relative distance of the linear model and the network up to which they agree, and up to which they resemble each
other."""

LARGE = 0.1
"""A gap between what is promised and what is seen that is more than a blemish."""


@dataclass(frozen=True)
class Check:
    """A question and its answer.

    Attributes:
        question: Of the reader.
        state: "good", "fair", "bad", or "open" where nothing tells.
        answer: In a few words.
        why: The evidence.
    """

    question: str
    state: State
    answer: str
    why: str


def checks(report: Report) -> list[Check]:
    """The questions that a report can answer, or says why it cannot."""
    found = []
    if report.scores is not None:
        found += [_better(report), _calibrated(report)]
    if report.linear is not None:
        found.append(_linear(report.linear))
    found += [Check("Did the fit warn of anything?", "fair", "Yes", note) for note in report.notes]
    return [check for check in found if check is not None]


def _better(report: Report) -> Check | None:
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
                question, "open", "The same predictions", "They are the network's own; its error bars are new."
            )
        before, after = (number(math.sqrt(x.mean() / told.mean.shape[1])) for x in (old, new))
        what = f"The typical error goes from {before} to {after}"
    else:
        rows = np.arange(len(told.labels))
        old, new = (-np.log(np.maximum(p[rows, told.labels], 1e-300)) for p in (told.before, told.probabilities))
        before, after = number(float(old.mean())), number(float(new.mean()))
        right = [float((p.argmax(1) == told.labels).mean()) for p in (told.before, told.probabilities)]
        what = (
            f"The log loss goes from {before} to {after}, and accuracy from {percent(right[0])} to {percent(right[1])}"
        )
    gain = old - new
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    clear = abs(float(gain.mean())) > CLEAR * error
    n = count(len(gain), told.what)
    if not clear:
        return Check(question, "fair", "Not clearly", f"{what}; {n} are too few to tell that from chance.")
    if gain.mean() > 0:
        return Check(question, "good", "Yes", f"{what} on {n}: more than chance would do.")
    return Check(question, "bad", "No, worse", f"{what} on {n}: more than chance would do.")


def _calibrated(report: Report) -> Check | None:
    question, told = "Does its confidence mean what it says?", report.outcome
    if isinstance(told, Classes):
        best = told.probabilities.max(1)
        said, seen, n = float(best.mean()), float(told.right.mean()), len(best)
        error = math.sqrt(float((best * (1 - best)).sum())) / n
        words = f"It is {percent(said)} sure on average, and right in {percent(seen)} of {count(n, told.what)}"
        names = ("It claims too much", "It claims too little", "it is right more often than it says")
    elif isinstance(told, Numbers):
        inside = np.abs(told.mean - told.target) <= Z95 * told.std
        said, seen, n = 0.95, float(inside.mean()), inside.size
        error = math.sqrt(0.95 * 0.05 / n)
        words = f"Of {count(n, 'true value')}, {percent(seen)} lie in their 95 % intervals"
        names = ("Error bars are too narrow", "Error bars are too wide", "predictions are closer than it says")
    else:
        return None
    gap = said - seen
    if abs(gap) <= CLEAR * error + 0.5 / n:
        return Check(question, "good", "Yes", f"{words}: no more apart than chance would have it.")
    state: State = "fair" if abs(gap) < LARGE else "bad"
    if gap > 0:
        return Check(question, state, names[0], f"{words}.")
    return Check(question, "fair", names[1], f"{words}: {names[2]}.")


def _linear(found: Linear | Missing) -> Check:
    question = "Is the network linear where it is used?"
    if isinstance(found, Missing):
        return Check(question, "open", "Not known", found.why)
    apart = f"{distance(found.error)} that the linear model makes"
    if found.drawn:
        what = f"Networks with weights drawn from the posterior ({found.drawn}) are off the linear model by {apart}"
        told = (
            "so that its error bars are those of the network too.",
            "so that networks with such weights would have somewhat other error bars.",
            "so that its error bars are those of the linear model alone: trust them as far as tests bear them out, and "
            "do not sample networks from this posterior.",
        )
    elif not found.whole:
        what = f"With the adapted weights the network itself moves otherwise than the linear model by {apart}"
        told = (
            "so that this is what the network would learn.",
            "so that this resembles what the network would learn.",
            "so that this is a model on the network's gradients rather than the network: use it as it was tested.",
        )
    else:
        what = f"With the adapted weights the network itself is off the linear model by {apart}"
        told = (
            "so that apply() can write the adapted weights into the network.",
            "so that apply() gives a network that resembles this model; test it before you use it.",
            "so that the adapted weights do not belong into the network: use this model as it is, as it was tested.",
        )
    i = 0 if found.error < LINEAR[0] else 1 if found.error < LINEAR[1] else 2
    states: tuple[State, ...] = ("good", "fair", "bad")
    return Check(question, states[i], ("Yes", "Roughly", "No")[i], f"{what}, {told[i]}")
