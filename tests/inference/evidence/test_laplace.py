"""Scales of the prior by the Laplace evidence, against fine grids, finite differences and a general maximizer."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from linnet.inference import Mode, scale_slopes
from linnet.inference.evidence import laplace
from linnet.inference.evidence.laplace import choose_layer_scales, choose_scale, unit_scale
from linnet.inference.mode import spaces
from linnet.inference.mode.newton import function_space, weight_space
from linnet.probability import Bernoulli, Categorical, Likelihood, Weighted
from tests.inference.mode.test_newton import CASES, C, N, problem
from tests.support.drawn import normal


@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_gradient_of_the_evidence_in_the_scales(likelihood: Likelihood, c: int) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    parts = [Phi[:, :8] @ Phi[:, :8].T, Phi[:, 8:] @ Phi[:, 8:].T]

    def mode(logs: list[float]) -> Mode:
        K = sum(math.exp(t) * K_l for t, K_l in zip(logs, parts, strict=True))
        assert isinstance(K, Tensor)
        return function_space(K, y, mean=mean, likelihood=likelihood, tolerance=1e-12).checked()

    at = [-1.0, 0.5]
    gradient = scale_slopes(parts, [math.exp(t) for t in at], y, mode=mode(at), likelihood=likelihood)
    h = 1e-4
    for i in range(2):
        up, down = ([t + sign * h * (i == j) for j, t in enumerate(at)] for sign in (1, -1))
        difference = (mode(up).log_evidence - mode(down).log_evidence) / (2 * h)
        assert gradient[i].value == pytest.approx(difference, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("space", ["function", "weight"])
@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_the_slope_in_one_scale_is_that_of_the_only_part(likelihood: Likelihood, c: int, space: str) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    A = Phi @ Phi.T if space == "function" else Phi
    evidence = laplace._ScaleEvidence(A, likelihood.targets(y, *mean.shape), mean, likelihood, space)
    whole = laplace._ScaleEvidence(Phi @ Phi.T, evidence.y, mean, likelihood, "function")
    for t in (-2.0, 1.0):
        (slope,) = evidence([t]).slopes
        mode = function_space(Phi @ Phi.T, y, mean=mean, likelihood=likelihood, scale=whole.scale(t), tolerance=1e-10)
        (wanted,) = scale_slopes([Phi @ Phi.T], [whole.scale(t)], evidence.y, mode=mode, likelihood=likelihood)
        assert slope == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_best_scale_beats_a_fine_grid(likelihood: Likelihood, c: int) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    Phi = 30.0 * Phi  # the search finds its own unit
    K, given = Phi @ Phi.T, {"mean": mean, "likelihood": likelihood}
    choice, _ = choose_scale(K, y, **given)
    grid = [function_space(K, y, scale=10.0**e, **given).log_evidence for e in np.linspace(-7, 1, 33)]
    assert choice.log_evidence >= max(grid) - 1e-3
    assert list(choice.path) == sorted(choice.path) and choice.path[-1] == choice.log_evidence
    (scale,) = choice.scales
    assert function_space(K, y, scale=scale, **given).log_evidence == pytest.approx(choice.log_evidence, abs=1e-4)
    other, _ = choose_scale(Phi, y, space="weight", **given)
    assert math.log(other.scales[0]) == pytest.approx(math.log(scale), abs=0.05)
    assert other.log_evidence == pytest.approx(choice.log_evidence, abs=1e-3)


@pytest.mark.parametrize("space", ["function", "weight"])
@pytest.mark.parametrize("size", [1, 10])
def test_the_hyperprior_counts_beside_the_evidence(space: str, size: int) -> None:
    # Six labels that five features tell apart, and sixty that they do not: the scale is nearer to the median.
    Phi, y = normal(6 * size, 5), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0] * size, dtype=torch.float64)
    given: dict[str, Any] = {"mean": torch.zeros(len(y), 1, dtype=torch.float64), "likelihood": Bernoulli()}
    A = Phi @ Phi.T if space == "function" else Phi
    solve = function_space if space == "function" else weight_space
    centered = Phi - Phi.mean(0)
    unit = -math.log(0.25 * float(centered.square().sum()) / (len(y) - 1))  # p (1 - p) is 0.25 at no logit

    def value(t: float) -> float:
        found = solve(A, y, scale=math.exp(unit + t), tolerance=1e-10, **given).checked()  # type: ignore[operator]
        return float(found.log_evidence) - t**2 / 2

    best = max(np.linspace(-12, 6, 37), key=value)
    want = minimize_scalar(lambda t: -value(t), bounds=(best - 1, best + 1), method="bounded", options={"xatol": 1e-6})
    choice, mode = choose_scale(A, y, space=space, hyperprior=True, **given)
    (scale,) = choice.scales
    t = math.log(scale) - unit
    assert value(t) == pytest.approx(-want.fun, abs=1e-4)
    assert choice.path[-1] == pytest.approx(value(t), abs=1e-6) and list(choice.path) == sorted(choice.path)
    assert choice.log_evidence == mode.log_evidence
    plain, _ = choose_scale(A, y, space=space, **given)
    assert plain.log_evidence >= choice.log_evidence - 1e-5
    assert abs(t) < abs(math.log(plain.scales[0]) - unit)


def test_where_the_mean_is_right_the_best_scale_is_next_to_nothing() -> None:
    y = torch.arange(N) % C
    mean = 3.0 * nn.functional.one_hot(y, C).double()  # surer than the labels need
    choice, _ = choose_scale(Phi_K := normal(N * C, N * C), y, mean=mean, likelihood=Categorical(), space="weight")
    log_p = float(Categorical().log_prob(mean, y).sum())
    assert float(Phi_K.square().mean()) * choice.scales[0] < 1e-3
    assert choice.log_evidence == pytest.approx(log_p, abs=0.05)


def test_best_scales_rise_and_leave_out_what_says_nothing() -> None:
    n = 40
    useful, noise = normal(n * C, 5), normal(n * C, 60, seed=1)
    f = 2.0 * (useful @ normal(5, seed=2)).view(n, C)
    y = Categorical().sample(f, torch.Generator().manual_seed(0))
    parts = {"useful": useful @ useful.T, "noise": noise @ noise.T}
    given = {"mean": torch.zeros(n, C).double(), "likelihood": Categorical()}
    choice = choose_layer_scales(parts, y, **given)
    path = choice.path
    assert len(path) > 2 and all(b >= a for a, b in pairwise(path))
    common, _ = choose_scale(parts["useful"] + parts["noise"], y, **given)
    assert choice.log_evidence > common.log_evidence + 1
    assert choice.scales[1] < 0.05 * choice.scales[0]
    K = choice.scales[0] * parts["useful"] + choice.scales[1] * parts["noise"]
    assert function_space(K, y, **given).log_evidence == pytest.approx(choice.log_evidence, abs=1e-5)
    again = choose_layer_scales(parts, y, start=choice.scales, **given)
    assert again.log_evidence >= choice.log_evidence - 1e-6


def test_a_part_in_small_units_gets_a_large_scale() -> None:
    """The kernel of the useful part is a million times smaller, so that its best scale is far above the common one."""
    n, unit = 40, 1e-6
    useful, noise = normal(n, 5), normal(n, 60, seed=1)
    y = Bernoulli().sample(2.0 * (useful @ normal(5, seed=2))[:, None], torch.Generator().manual_seed(0))
    given = {"mean": torch.zeros(n, 1).double(), "likelihood": Bernoulli()}
    K, other = useful @ useful.T, noise @ noise.T
    want = choose_layer_scales({"useful": K, "noise": other}, y, **given)
    found = choose_layer_scales({"useful": unit * K, "noise": other}, y, **given)
    assert found.log_evidence == pytest.approx(want.log_evidence, abs=1e-4)
    assert found.scales[0] * unit == pytest.approx(want.scales[0], rel=0.05)


# Many rows: a part of them first.


def many(likelihood: Likelihood, c: int, *, n: int = 150, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    Phi, mean = 3 * normal(n * c, 30, seed=seed), normal(n, c, seed=seed + 1)
    f = mean + 0.3 * (Phi @ normal(30, seed=seed + 2)).view(n, c)
    return Phi, mean, likelihood.sample(f, torch.Generator().manual_seed(seed))


def by_maximizer(Phi: Tensor, y: Tensor, **given: Any) -> tuple[float, float]:
    """The logarithm of the best scale, and its evidence, every mode from zero."""

    def negative(t: float) -> float:
        return -weight_space(Phi, y, scale=math.exp(t), tolerance=1e-10, **given).checked().log_evidence

    grid = np.linspace(-12, 6, 19)
    best = grid[np.argmin([negative(t) for t in grid])]
    found = minimize_scalar(negative, bounds=(best - 1, best + 1), method="bounded", options={"xatol": 1e-6})
    return float(found.x), -float(found.fun)


@pytest.mark.parametrize("space", ["function", "weight"])
@pytest.mark.parametrize(("likelihood", "c"), [(Bernoulli(), 1), (Bernoulli(), 2), (Categorical(), 3)])
@pytest.mark.parametrize("seed", [0, 10])
def test_a_part_first_finds_what_all_say(
    likelihood: Likelihood, c: int, space: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laplace, "PART", 16)
    Phi, mean, y = many(likelihood, c, seed=seed)
    given: dict[str, Any] = {"mean": mean, "likelihood": likelihood}
    t, value = by_maximizer(Phi, y, **given)
    made = []
    for kind in (spaces.FunctionSpace, spaces.WeightSpace):
        plain = kind.factor
        monkeypatch.setattr(kind, "factor", lambda self, r, plain=plain: made.append(r.shape[0]) or plain(self, r))
    choice, mode = choose_scale(Phi @ Phi.T if space == "function" else Phi, y, space=space, **given)
    assert value - 2e-3 <= choice.log_evidence <= value + 1e-4
    assert math.log(choice.scales[0]) == pytest.approx(t, abs=0.1)
    assert made.count(max(made)) <= 15  # on all rows; more than 50 without a part, with each mode from scratch
    exact = weight_space(Phi, y, scale=choice.scales[0], tolerance=1e-10, **given)
    torch.testing.assert_close(mode.f, exact.f, rtol=1e-4, atol=1e-4)
    assert mode.factor is None and choice.path[-1] == choice.log_evidence


@pytest.mark.parametrize("sure", [4.0, 30.0])
def test_a_peak_behind_a_dip_is_found_with_a_part(sure: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "PART", 16)
    n = 120
    Phi, y = normal(n * C, 6), torch.arange(n) % C
    # Sure, and wrong about one example in eight.
    said = torch.where(torch.arange(n) % 8 == 0, (y + 1) % C, y)
    mean = sure * nn.functional.one_hot(said, C).double()
    given: dict[str, Any] = {"mean": mean, "likelihood": Categorical()}
    choice, _ = choose_scale(Phi, y, space="weight", **given)
    grid = [weight_space(Phi, y, scale=10.0**e, **given).log_evidence for e in np.linspace(-6, 5, 45)]
    assert choice.log_evidence >= max(grid) - 0.01


def test_where_a_part_asks_for_no_scale_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "PART", 16)
    n = 100
    y = torch.arange(n) % C
    mean = 3.0 * nn.functional.one_hot(y, C).double()  # surer than the labels need
    choice, _ = choose_scale(normal(n * C, 20), y, mean=mean, likelihood=Categorical(), space="weight")
    assert choice.log_evidence == pytest.approx(float(Categorical().log_prob(mean, y).sum()), abs=0.05)


@pytest.mark.parametrize("space", ["function", "weight"])
def test_single_precision(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "PART", 16)
    Phi, mean, y = many(Categorical(), 3)
    A = Phi @ Phi.T if space == "function" else Phi
    exact, _ = choose_scale(A, y, mean=mean, likelihood=Categorical(), space=space)
    single, _ = choose_scale(A.float(), y, mean=mean.float(), likelihood=Categorical(), space=space)
    assert single.log_evidence == pytest.approx(exact.log_evidence, abs=0.02)
    assert math.log(single.scales[0]) == pytest.approx(math.log(exact.scales[0]), abs=0.2)


def test_scales_of_parts_in_single_precision() -> None:
    n = 40
    A, B = normal(n * C, 5), normal(n * C, 20, seed=1)
    f = 2.0 * (A @ normal(5, seed=2)).view(n, C)
    y = Categorical().sample(f, torch.Generator().manual_seed(0))
    parts, mean = {"a": A @ A.T, "b": B @ B.T}, torch.zeros(n, C).double()
    exact = choose_layer_scales(parts, y, mean=mean, likelihood=Categorical())
    few = {name: K.float() for name, K in parts.items()}
    single = choose_layer_scales(few, y, mean=mean.float(), likelihood=Categorical())
    assert single.log_evidence == pytest.approx(exact.log_evidence, abs=0.02)


def test_scales_whose_mode_rounding_hides_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    Phi, mean, y = many(Bernoulli(), 1, n=40)
    given: dict[str, Any] = {"mean": mean, "likelihood": Bernoulli()}
    K = Phi @ Phi.T
    (best,) = choose_scale(K, y, **given)[0].scales

    def hidden(A: Tensor, y: Tensor, *, scale: float, **given: Any) -> Mode:
        if scale > limit:
            raise ArithmeticError("no mode")
        return function_space(A, y, scale=scale, **given)

    monkeypatch.setattr(laplace, "function_space", hidden)
    for times in (3.0, 0.3):
        limit = times * best
        choice, _ = choose_scale(K, y, **given)
        assert choice.scales[0] <= limit
        below = limit if times < 1 else best
        at = function_space(K, y, scale=0.4 * below, **given).log_evidence
        assert choice.log_evidence >= at  # the best there is, to a factor or so
    limit = 0.0
    with pytest.raises(ArithmeticError, match="no mode"):
        choose_scale(K, y, **given)


def test_errors() -> None:
    Phi, mean, y = problem(Categorical())
    K, likelihood = Phi @ Phi.T, Categorical()
    with pytest.raises(ValueError, match="space must be 'function' or 'weight'; got 'both'"):
        choose_scale(K, y, mean=mean, likelihood=likelihood, space="both")
    with pytest.raises(ValueError, match="The kernel is zero on the training data"):
        choose_scale(0 * K, y, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match="There are 1 parts, so start needs as many scales; got 2"):
        choose_layer_scales({"all": K}, y, mean=mean, likelihood=likelihood, start=[1.0, 1.0])
    mode = weight_space(Phi, y, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match="needs a mode from function_space"):
        scale_slopes([K], [1.0], y, mode=mode, likelihood=likelihood)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_the_first_scale_makes_an_average_eigenvalue_one(likelihood: Likelihood) -> None:
    """Of L^T K L, with the larger curvature of f = 0 and of f = m, in either space."""
    n, c, p = 5, 3, 7
    Phi, mean = normal(n * c, p), 3 * normal(n, c, seed=1)
    K, traces, y = Phi @ Phi.T, [], torch.zeros(n).long()
    for f in (torch.zeros_like(mean), mean):
        B = likelihood.curvature(f)
        whole = torch.diag(B.flatten()) if B.ndim == 2 else torch.block_diag(*B)
        traces.append(float((whole * K).sum()))
    for A, space in ((K, "function"), (Phi, "weight")):
        assert unit_scale(A, y, mean, likelihood, space) * max(traces) / (n * c) == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_the_median_of_the_hyperprior_centers_the_kernel(likelihood: Likelihood) -> None:
    """Of L^T H K H L with H the projection that takes the mean over the examples away, as a dense matrix."""
    n, c, p = 5, 3, 7
    Phi, mean = normal(n * c, p) + 3.0, 3 * normal(n, c, seed=1)  # most of the kernel is what all examples share
    K, traces, y = Phi @ Phi.T, [], torch.zeros(n).long()
    H = torch.kron(torch.eye(n).double() - 1 / n, torch.eye(c).double())
    for f in (torch.zeros_like(mean), mean):
        B = likelihood.curvature(f)
        whole = torch.diag(B.flatten()) if B.ndim == 2 else torch.block_diag(*B)
        traces.append(float((whole * (H @ K @ H)).sum()) * n / (n - 1))
    for A, space in ((K, "function"), (Phi, "weight")):
        found = unit_scale(A, y, mean, likelihood, space, centered=True)
        assert found * max(traces) / (n * c) == pytest.approx(1, rel=1e-10)
    same = Phi[:c].repeat(n, 1)  # nothing is left
    assert unit_scale(same, y, mean, likelihood, "weight", centered=True) == unit_scale(
        same, y, mean, likelihood, "weight"
    )


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
@pytest.mark.parametrize("space", ["function", "weight"])
def test_an_example_of_weight_two_is_the_example_twice_for_the_unit_and_the_hyperprior(
    likelihood: Likelihood, space: str
) -> None:
    n, c, p = 8, 3, 7
    Phi, mean, w = normal(n * c, p), normal(n, c, seed=1), torch.tensor([1, 2, 1, 1, 3, 1, 1, 2])
    y = torch.arange(n) % c if isinstance(likelihood, Categorical) else (normal(n, c, seed=2) > 0).double()
    rows = (c * torch.arange(n).repeat_interleave(w)[:, None] + torch.arange(c)).flatten()
    found = []
    for Phi_, mean_, likelihood_, y_ in (
        (Phi, mean, *Weighted.pack(likelihood, y, w.double())),
        (Phi[rows], mean.repeat_interleave(w, 0), likelihood, y.repeat_interleave(w, 0)),
    ):
        A = Phi_ @ Phi_.T if space == "function" else Phi_
        unit = unit_scale(A, y_, mean_, likelihood_, space)
        given: dict[str, Any] = {"mean": mean_, "likelihood": likelihood_, "space": space}
        found.append((unit, choose_scale(A, y_, hyperprior=True, gain=1e-9, **given)[0]))
    (first, one), (second, two) = found
    assert first == pytest.approx(second, rel=1e-9)
    assert one.log_evidence == pytest.approx(two.log_evidence, rel=1e-6)
    assert math.log(one.scales[0]) == pytest.approx(math.log(two.scales[0]), abs=1e-3)
