"""The one search: known maxima, bounds, walls, estimates, and how many evaluations it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.inference import Slope, maximize
from linnet.inference.evidence.search import Evaluation


@dataclass(frozen=True)
class Point:
    value: float
    slopes: list[Slope]


def observations(variances: list[float], count: int = 10) -> Callable[[list[float]], Evaluation]:
    """The log density of ``count`` numbers with each of these mean squares, as a function of log variances."""

    def objective(x: list[float]) -> Evaluation:
        up = [count * v * math.exp(-t) for v, t in zip(variances, x, strict=True)]
        return Point(-0.5 * sum(a + count * t for a, t in zip(up, x, strict=True)), [Slope(a, count) for a in up])

    return objective


def coupled(A: np.ndarray, b: np.ndarray) -> Callable[[list[float]], Evaluation]:
    """A concave quadratic function, whose slopes are given with a size of one."""

    def objective(x: list[float]) -> Evaluation:
        g = b - A @ np.array(x)
        return Point(float(x @ (b - 0.5 * A @ x)), [Slope(1.0, 1.0, float(d)) for d in g])

    return objective


def test_the_first_step_is_mackays() -> None:
    found = maximize(observations([0.1, 7.0]), [[0.0, 0.0]], [(-9.0, 9.0)] * 2, steps=1)
    assert found.path[1][0] == pytest.approx([math.log(0.1), math.log(7.0)])
    assert not found.converged or found.x == pytest.approx(found.path[1][0])


@given(seed=st.integers(0, 10_000), n=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_a_quadratic_function_is_solved(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    Q = random.normal(size=(n, n))
    A, x = Q @ Q.T + 0.1 * np.eye(n), random.normal(size=n)
    found = maximize(coupled(A, A @ x), [[0.0] * n], [(-50.0, 50.0)] * n)
    assert found.converged
    assert found.x == pytest.approx(x, abs=1e-5)
    values = [value for _, value in found.path]
    assert found.value == max(values) and list(found.rising) == sorted(found.rising)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_bounds_hold_and_slopes_push_against_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    Q = random.normal(size=(4, 4))
    A, b = Q @ Q.T + 0.5 * np.eye(4), 3 * random.normal(size=4)
    bounds = [(-0.5, 0.5)] * 4
    found = maximize(coupled(A, b), [[2.0, -2.0, 0.0, 0.1]], bounds)
    x, g = np.array(found.x), b - A @ np.array(found.x)
    assert bool((np.abs(x) <= 0.5).all())
    pushed = ((x == 0.5) & (g >= 0)) | ((x == -0.5) & (g <= 0))
    assert float(np.abs(np.where(pushed, 0.0, g)).max()) < 1e-5


def test_the_best_start_is_taken_and_starts_without_a_value_are_passed_over() -> None:
    def two(x: list[float]) -> Evaluation:
        (t,) = x
        if t > 5:
            raise ArithmeticError("too far")
        a, b = math.exp(-((t + 2) ** 2)), 2 * math.exp(-((t - 2) ** 2))
        return Point(a + b, [Slope(1.0, 1.0, -2 * a * (t + 2) - 2 * b * (t - 2))])

    found = maximize(two, [[6.0], [-2.0], [1.5]], [(-9.0, 9.0)])
    assert found.x == pytest.approx([2.0], abs=1e-4)
    with pytest.raises(ArithmeticError, match="too far"):
        maximize(two, [[6.0], [7.0]], [(-9.0, 9.0)])


def test_a_wall_is_approached() -> None:
    def walled(x: list[float]) -> Evaluation:
        if x[0] > -1.0:
            raise ArithmeticError("too far")
        return observations([1.0])(x)

    found = maximize(walled, [[-4.0]], [(-9.0, 9.0)])
    assert -1.1 < found.x[0] <= -1.0


def test_slopes_alone_find_what_values_contradict() -> None:
    plain = observations([3.0, 0.2])

    def wrong(x: list[float]) -> Evaluation:
        return Point(sum(x), list(plain(x).slopes))

    found = maximize(wrong, [[0.0, 0.0]], [(-9.0, 9.0)] * 2, compare=False, gain=1e-12)
    assert found.x == pytest.approx([math.log(3.0), math.log(0.2)], abs=1e-5)


@given(seed=st.integers(0, 10_000))
def test_a_fixed_point_that_no_function_has_is_found(seed: int) -> None:
    """Slopes with a curl, as those of a bounded noise: a symmetric curvature would circle around their zero."""
    draws = np.random.default_rng(seed)
    goal, curl = draws.normal(size=2), draws.uniform(0.3, 0.9)
    A = np.array([[1.0, curl], [-curl, 1.0]])

    def objective(x: list[float]) -> Evaluation:
        g = A @ (goal - np.array(x)) + 0.1 * np.sin(goal - np.array(x))
        return Point(-1.0, [Slope(1.0, 1.0, float(d)) for d in g])

    found = maximize(objective, [[0.0, 0.0]], [(-9.0, 9.0)] * 2, compare=False, steps=100)
    assert found.converged
    assert found.x == pytest.approx(goal.tolist(), abs=1e-5)


def test_limits() -> None:
    short = maximize(observations([1e3]), [[0.0]], [(-9.0, 9.0)], longest=0.1, steps=5)
    assert [x[0] for x, _ in short.path] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert not short.converged
    none = maximize(lambda x: Point(1.0, []), [[]], [])
    assert none.converged and none.x == [] and none.value == 1.0


@pytest.mark.parametrize("times", [10.0, 1e3, 1e5])
def test_a_curvature_that_mackay_overrates_does_not_end_the_search(times: float) -> None:
    """The top is two e-folds away and half a nat higher, and MacKay's update promises next to nothing."""

    def flat(x: list[float]) -> Evaluation:
        return Point(-0.125 * (x[0] - 2) ** 2, [Slope(times, times, -0.25 * (x[0] - 2))])

    assert maximize(flat, [[0.0]], [(-9.0, 9.0)], gain=0.1).value >= -0.1


def test_few_evaluations_suffice() -> None:
    """One hyperparameter whose curvature MacKay's update does not know."""
    seen: list[float] = []

    def counted(x: list[float]) -> Evaluation:
        seen.append(x[0])
        up, down = 40 * math.exp(-x[0]), 40 / (1 + math.exp(-x[0]))
        return Point(-0.5 * up - 20 * math.log1p(math.exp(x[0])), [Slope(up, down)])

    found = maximize(counted, [[1.0]], [(-15.0, 15.0)], gain=1e-4)
    assert len(seen) <= 5
    assert 40 * math.exp(-found.x[0]) == pytest.approx(40 / (1 + math.exp(-found.x[0])), rel=1e-2)
