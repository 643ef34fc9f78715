"""The numbers behind the figures and verdicts of a report: intervals, bands, standard errors, where answers change."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from linnet.report import Classes, Numbers, add_guess, score_outcome, verdicts
from linnet.report.build import group_by_confidence
from linnet.report.content import Eigenvalues, Evidence
from linnet.report.html import figures
from linnet.report.html.figures import (
    compute_wilson,
    draw_coverage,
    draw_eigenvalues,
    draw_error_by_std,
    draw_evidence,
    draw_intervals,
    draw_linear,
    draw_rejection,
    draw_reliability,
)
from linnet.report.html.svg import Plot
from tests.support import report_cases as cases

Z = norm.ppf(0.975)


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn, in the units of the data: a list of (what, arguments)."""
    seen = []

    class Seen(Plot):
        def line(self, xs, ys, kind):
            assert self.y.low <= np.min(ys) and np.max(ys) <= self.y.high
            seen.append(("line", kind, np.array(xs, float), np.array(ys, float)))
            super().line(xs, ys, kind)

        def area(self, xs, low, high, kind):
            seen.append(("area", kind, np.array(xs, float), np.array(low, float), np.array(high, float)))
            super().area(xs, low, high, kind)

        def whisker(self, x, low, high, kind):
            seen.append(("whisker", kind, x, low, high))
            super().whisker(x, low, high, kind)

        def dot(self, x, y, kind, **more):
            seen.append(("dot", kind, x, y, more))
            super().dot(x, y, kind, **more)

    monkeypatch.setattr(figures, "Plot", Seen)

    def of(what, kind):
        return [entry[2:] for entry in seen if entry[:2] == (what, kind)]

    return of


# Figures.


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (draw_reliability, cases.classes()),
        (draw_coverage, cases.numbers()),
        (lambda told: draw_intervals(told, 0), cases.numbers()),
        (draw_linear, cases.linear()),
    ],
)
def test_what_should_be_equal_has_a_diagonal(drawn, draw, told):
    draw(told)
    ((x, y),) = drawn("line", "guide")
    assert x.tolist() == y.tolist() and x[0] < x[1]


def test_wilson_intervals():
    for p, n in ((0.3, 20), (0.5, 4), (0.95, 7)):
        low, high = compute_wilson(p, n)
        for end in (low, high):  # where a true share of that size would put p at the end of its own 95 % interval
            assert abs(end - p) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), rel=1e-9)
        assert low < p < high
    assert compute_wilson(0.0, 5)[0] == 0 and compute_wilson(1.0, 5)[1] == 1
    assert compute_wilson(0.0, 5)[1] == pytest.approx(Z**2 / (5 + Z**2))


def test_reliability(drawn):
    sure = np.array([0.95] * 8 + [0.65] * 4)
    labels = np.array([0] * 7 + [1] + [0, 0, 1, 1])
    told = Classes(np.stack([sure, 1 - sure], 1), labels, ["a", "b"], np.full((12, 2), 0.5))
    draw_reliability(told)
    points = drawn("dot", "after")
    assert [(x, y) for x, y, _ in points] == [(pytest.approx(0.65), 0.5), (pytest.approx(0.95), 0.875)]
    assert [more["title"] for *_, more in points] == ["4 examples: 50 % right", "8 examples: 87.5 % right"]
    assert [more["radius"] for *_, more in points] == [2.5 + 7 * math.sqrt(k / 12) for k in (4, 8)]
    for (x, low, high), (y, k) in zip(drawn("whisker", "after"), ((0.5, 4), (0.875, 8)), strict=True):
        assert (low, high) == compute_wilson(y, k) and x in (pytest.approx(0.65), pytest.approx(0.95))
    ((x, y, more),) = drawn("dot", "before")
    assert (x, more["title"]) == (0.5, "12 examples: 75 % right") and y == 0.75
    assert more["radius"] == 9.5


def test_rejection(drawn):
    sure = np.linspace(0.99, 0.51, 40)
    wrong = np.isin(np.arange(40), (10, 39))
    told = Classes(np.stack([sure, 1 - sure], 1), wrong.astype(int), ["a", "b"])
    text = str(draw_rejection(told))
    ((x, y),) = drawn("line", "after")
    kept = np.arange(1, 41)
    np.testing.assert_allclose(x, kept[1:] / 40)  # the first twentieth is not drawn
    np.testing.assert_allclose(y, (np.cumsum(wrong) / kept)[1:], atol=1e-15)
    assert "5 % are wrong; of all examples, 5 % are wrong" in text  # 1 of 20, 2 of 40


def test_intervals_of_predictions(drawn):
    target = np.array([[0.0], [1.0], [2.0], [3.0]])
    std = np.array([[0.5], [1.0], [0.25], [2.0]])
    off = np.array([[1.01], [0.99], [-1.01], [-0.99]]) * Z * std  # two of the intervals miss
    told = Numbers(target + off, std, target, [""])
    text = str(draw_intervals(told, 0))
    found = {x: (low, high, kind) for kind in ("after", "bad") for x, low, high in drawn("whisker", kind)}
    for i in range(4):
        mean, reach = target[i, 0] + off[i, 0], Z * std[i, 0]
        low, high, kind = found[float(i)]
        assert (low, high) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
        assert kind == ("bad" if i % 2 == 0 else "after")
    assert [(x, y) for x, y, _ in drawn("dot", "bad")] == [(i, pytest.approx(i + off[i, 0])) for i in (0, 2)]
    assert "2 of the 4 intervals miss the true value" in text and "All 4 test examples." in text


def test_many_predictions_are_drawn_evenly(drawn):
    told = cases.numbers(1000, names=("a", "b"))
    text = str(draw_intervals(told, 1))
    at = sorted(x for kind in ("after", "bad") for x, *_ in drawn("whisker", kind))
    np.testing.assert_array_equal(at, np.sort(told.target[:, 1])[np.linspace(0, 999, 100).astype(int)])
    assert "100 of 1,000 test examples, evenly over the true values." in text


def test_the_band_of_coverage(drawn):
    told = cases.numbers(25)
    draw_coverage(told)
    levels = np.arange(1, 20) / 20
    ((x, low, high),) = drawn("area", "band")
    reach = Z * np.sqrt(levels * (1 - levels) / 25)
    np.testing.assert_allclose(x, [0, *levels, 1])
    np.testing.assert_allclose(low, [0, *np.maximum(0, levels - reach), 1], rtol=1e-12)
    np.testing.assert_allclose(high, [0, *np.minimum(1, levels + reach), 1], rtol=1e-12)
    off = np.abs(told.mean - told.target)
    seen = [(off <= norm.ppf(0.5 + level / 2) * told.std).mean() for level in levels]
    ((x, y),) = drawn("line", "after")
    np.testing.assert_allclose(x, [0, *levels])
    np.testing.assert_allclose(y, [0, *seen])
    assert [more["title"] for *_, more in drawn("dot", "after")][9] == (
        f"50 % intervals hold {figures.percent(seen[9])}"
    )


def test_errors_by_standard_deviation(drawn):
    random = np.random.default_rng(3)
    std = random.uniform(0.5, 2.0, (50, 1))
    error = std * random.normal(size=std.shape)
    draw_error_by_std(Numbers(error, std, 0 * error, [""]))
    parts = np.array_split(np.argsort(std[:, 0]), 6)  # of at least eight
    said = [np.sqrt((std[i] ** 2).mean()) for i in parts]
    seen = [np.sqrt((error[i] ** 2).mean()) for i in parts]
    half = [Z * e / math.sqrt(2 * len(i)) for e, i in zip(seen, parts, strict=True)]
    whiskers = drawn("whisker", "after")
    for found, s, e, r in zip(whiskers, said, seen, half, strict=True):
        np.testing.assert_allclose(found, (s, max(0.0, e - r), e + r), rtol=1e-12)
    assert [(x, y) for x, y, _ in drawn("dot", "after")] == [
        pytest.approx(pair) for pair in zip(said, seen, strict=True)
    ]
    assert draw_error_by_std(Numbers(error[:23], std[:23], 0 * error[:23], [""])) is None  # two groups say nothing
    assert draw_error_by_std(Numbers(error[:24], std[:24], 0 * error[:24], [""])) is not None
    nearly = np.linspace(1, 1.019, 50)[:, None]
    assert draw_error_by_std(Numbers(error, nearly, 0 * error, [""])) is None
    assert draw_error_by_std(Numbers(error, np.linspace(1, 1.021, 50)[:, None], 0 * error, [""])) is not None


def test_eigenvalues_in_units_of_the_noise(drawn):
    values = np.array([8.0, 2.0, 0.5, 1e-4])
    text = str(draw_eigenvalues(Eigenvalues(values, 20)))
    assert [(x, y) for x, y, _ in drawn("dot", "after")] == [(1, 8.0), (2, 2.0), (3, 0.5)]  # not below 1/1000
    known = figures.number(float((values / (1 + values)).sum()))
    assert "On 20 training examples, 2 of 4 directions have more signal than noise." in text
    assert f"Together the data determine {known} parameters; the prior determines the rest." in text
    assert "signal over noise" in text and ">eigenvalue<" not in text and "as much noise as signal" in text


def test_eigenvalues_without_a_noise(drawn):
    found = Eigenvalues(np.array([3.0, 1.0, 1e-10]), 20, noise=False, explained=np.array([0.75, 0.97, 0.97]))
    text = str(draw_eigenvalues(found))
    assert [(x, y) for x, y, _ in drawn("dot", "after")] == [(1, 3.0), (2, 1.0)]  # 1e-9 of the first, at least
    assert "On 20 examples, the spread is that of 1.6 equal directions. 3 directions explain 97 %." in " ".join(
        text.replace("\u202f", " ").replace("\xa0", " ").split()
    )
    assert ">eigenvalue<" in text and "signal over noise" not in text and "as much noise as signal" not in text


def test_the_evidence_by_step(drawn):
    text = str(draw_evidence(Evidence([-9.0, -4.0, -3.5], -3.5)))
    ((x, y),) = drawn("line", "after")
    assert (list(x), list(y)) == ([1, 2, 3], [-9.0, -4.0, -3.5])
    assert [(x, y) for x, y, _ in drawn("dot", "after")] == [(1, -9.0), (2, -4.0), (3, -3.5)]
    assert "step of the search" in text and "log evidence" in text


# Verdicts.


def answer(told, question):
    report = replace(cases.report("rows"), outcome=told, linear=None)
    return next(check for check in verdicts.check_report(report) if check.question.startswith(question))


def gains(ratio, n):
    """Numbers with this mean, in standard errors."""
    x = np.random.default_rng(0).normal(size=n)
    x -= x.mean()
    return x + ratio * x.std(ddof=1) / math.sqrt(n)


@pytest.mark.parametrize(("ratio", "state"), [(1.99, "fair"), (2.01, "good"), (-1.99, "fair"), (-2.01, "bad")])
@pytest.mark.parametrize("n", [5, 40])
def test_better_by_more_than_two_standard_errors(ratio, state, n):
    gain = gains(ratio, n)
    old, new = 20 + gain, np.full(n, 20.0)  # squared errors, over two numbers
    zero = np.zeros((n, 2))
    before, mean = (np.stack([np.sqrt(0.25 * e), np.sqrt(0.75 * e)], 1) for e in (old, new))
    found = answer(Numbers(mean, zero + 1, zero, ["a", "b"], before), "Is it better")
    assert found.state == state
    said = (figures.number(math.sqrt(e.mean() / 2)) for e in (old, new))
    assert "The typical error changes from {} to {}".format(*said) in found.why and f"{n} test examples" in found.why
    # Classes: the log loss of each, within what probabilities can have.
    gain = gain / (4 * np.abs(gain).max())
    p, q = np.exp(-(0.5 + gain)), np.full(n, np.exp(-0.5))
    labels = np.arange(n) % 2
    told = [np.where(labels[:, None] == [0, 1], x[:, None], 1 - x[:, None]) for x in (p, q)]
    found = answer(Classes(told[1], labels, ["a", "b"], told[0]), "Is it better")
    assert found.state == state
    said = (figures.number(0.5 + gain.mean()), figures.number(0.5))
    assert "The log loss changes from {} to {}".format(*said) in found.why
    assert f"accuracy from {figures.percent((p > 0.5).mean())} to 100 %" in found.why


def test_one_example_tells_nothing():
    one = np.ones((1, 1))
    assert answer(Numbers(one, one, one, [""], 9 * one), "Is it better").state == "fair"
    sure = np.array([[0.9, 0.1]])
    assert answer(Classes(sure, np.array([0]), ["a", "b"], 1 - sure), "Is it better").state == "fair"


def test_coverage_within_two_standard_errors():
    """Of n = 400, 95 % are 380; two standard errors are 8.7, and half an example is rounding."""
    states = {}
    for inside in (339, 341, 360, 370, 371, 372, 389, 390, 400):
        # Errors at the quantiles of a normal distribution, but for the number of large ones.
        levels = np.concatenate([np.linspace(0, 0.949, inside), np.linspace(0.951, 1, 402 - inside)[1:-1]])
        off = norm.ppf((1 + levels[:400]) / 2)[:, None]
        found = answer(Numbers(off, 0 * off + 1, 0 * off, [""]), "Is its")
        assert f"Of 400 true values, {figures.percent(inside / 400)} lie in" in found.why
        states[inside] = (found.state, found.answer)
    narrow, wide, right = "Error bars are too narrow", "Error bars are too wide", ("good", "Yes")
    assert states == {
        339: ("bad", narrow),
        341: ("fair", narrow),
        360: ("fair", narrow),
        370: ("fair", narrow),
        371: right,
        372: right,
        389: right,
        390: ("fair", wide),
        400: ("fair", wide),
    }


def test_confidence_within_two_standard_errors():
    """Of n = 100, half at 90 % and half at 70 %, 80 are right, give or take 2 sqrt(50 (0.09 + 0.21)) + 0.5 = 8.2."""
    sure = np.repeat([0.9, 0.7], 50)
    p = np.stack([sure, 1 - sure], 1)
    states = {}
    for right in (69, 71, 72, 80, 88, 89, 95):
        of_sure = min(50, round(right * 0.9 / 1.6))  # both halves are off alike
        labels = np.concatenate([np.arange(50) >= of_sure, np.arange(50) >= right - of_sure]).astype(int)
        found = answer(Classes(p, labels, ["a", "b"]), "Is its")
        assert f"Its average confidence is 80 %, and it is right for {right} % of 100 test examples" in found.why
        states[right] = (found.state, found.answer)
    assert states == {
        69: ("bad", "Its confidence is too high"),
        71: ("fair", "Its confidence is too high"),
        72: ("good", "Yes"),
        80: ("good", "Yes"),
        88: ("good", "Yes"),
        89: ("fair", "Its confidence is too low"),
        95: ("bad", "Its confidence is too low"),
    }


# Examples that are shown.


def test_surest_and_least_sure_numbers():
    told = cases.numbers(40, names=("a", "b"))
    surest, least, surprises = group_by_confidence(told, cases.rows(40))
    order = np.argsort(np.sqrt((told.std**2).mean(1)))
    off = np.abs((told.mean - told.target) / told.std).max(1)
    for group, index in ((surest, order[:6]), (least, order[::-1][:6]), (surprises, np.argsort(-off)[:6])):
        assert [item.shown.name for item in group.items] == [f"no. {i + 1}" for i in index]
        for item, i in zip(group.items, index, strict=True):
            said = dict(item.said)
            assert said["off by"] == f"{off[i]:.1f} sd" and item.wrong == (off[i] > Z)
            mean, std, y = (figures.number(float(x[i, 1])) for x in (told.mean, told.std, told.target))
            assert (said["predicted b"], said["true b"]) == (f"{mean} ± {std}", y)


def test_surest_and_least_sure_classes():
    told = cases.classes(40)
    surest, least, mistakes = group_by_confidence(told, cases.rows(40))
    best = told.probabilities.max(1)
    order = np.argsort(-best, kind="stable")
    wrong = [i for i in order if told.probabilities[i].argmax() != told.labels[i]]
    assert 0 < len(wrong) < 40
    for group, index in ((surest, order[:6]), (least, order[::-1][:6]), (mistakes, wrong[:6])):
        assert [item.shown.name for item in group.items] == [f"no. {i + 1}" for i in index]
        for item, i in zip(group.items, index, strict=True):
            said = dict(item.said)
            assert said["sure"] == figures.percent(best[i]) and said["true"] == told.names[told.labels[i]]
            assert said["predicted"] == told.names[told.probabilities[i].argmax()] and item.wrong == (i in wrong)


# Verdicts of thirty simulated runs.


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("factor", "expected"), [(0.7, "too narrow"), (1.0, "Yes"), (1.5, "too wide")], ids=["narrow", "right", "wide"]
)
def test_verdicts_agree_with_the_figure(factor, expected, seed):
    """The verdict follows the curve of the figure: below the diagonal, inside its band, or above."""
    random = np.random.default_rng(seed)
    std = random.uniform(0.5, 2, (500, 1))
    told = Numbers(0 * std, factor * std, std * random.normal(size=(500, 1)), [""])
    found = answer(told, "Is its")
    assert expected in found.answer
    assert ("linnet.conformal" in found.why) == (factor != 1)


def test_every_level_is_judged():
    """Intervals of 95 % that hold 95 % of the values do not make error bars right: intervals of 20 % may hold 90 %."""
    off = np.where(np.arange(400) < 380, 0.01, 3.0)[:, None]
    found = answer(Numbers(off, 0 * off + 1, 0 * off, [""]), "Is its")
    assert (found.state, found.answer) == ("bad", "Error bars are too wide")
    assert "95 % lie in their 95 % intervals, and" in found.why


def test_confidence_that_is_right_on_average_alone():
    """Half of the examples are sure by 95 % and right by 80 %, half by 55 % and 70 %."""
    sure = np.repeat([0.95, 0.55], 200)
    right = np.concatenate([np.arange(200) < 160, np.arange(200) < 140])
    found = answer(Classes(np.stack([sure, 1 - sure], 1), (~right).astype(int), ["a", "b"]), "Is its")
    assert (found.state, found.answer) == ("fair", "Its confidence is too high for some, too low for others")
    assert "Its average confidence is 75 %, and it is right for 75 % of 400 test examples" in found.why


def test_guesses_that_know_no_inputs():
    random = np.random.default_rng(0)
    y = random.normal(3, 2, (100, 1))
    told = add_guess(Numbers(y + 0.1 * random.normal(size=y.shape), 0 * y + 0.1, y, [""], y + 10), y)
    assert np.allclose(told.guess[:, 0], [y.mean(), y.std(ddof=1)])
    found = answer(told, "Is it better than a guess")
    assert found.state == "good" and "The network alone is worse than that guess" in found.why
    assert answer(replace(told, mean=told.before), "Is it better than a guess").answer == "No"
    assert answer(replace(told, mean=0 * y + y.mean() + 1e-9), "Is it better than a guess").answer == "Not clearly"
    scores = score_outcome(told)
    assert list(scores) == ["predict the mean", "the network alone", "this model"]
    assert scores["predict the mean"]["rmse"] == pytest.approx(y.std())
    labels = np.array([0, 0, 0, 1])
    told = add_guess(Classes(np.full((4, 2), 0.5), labels, ["a", "b"]), labels)
    assert score_outcome(told)["predict the majority"]["accuracy"] == 0.75
    one = Numbers(y[:1], y[:1], y[:1], [""])
    assert add_guess(one, y[:1]) is one  # one target has no spread
