"""The objective along a step against autograd, and the lengths that a step may have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linnet.inference.mode import LineSearch
from linnet.probability import Bernoulli, Categorical, Gaussian, Likelihood
from tests.support.drawn import normal

N, C, P = 6, 3, 5
PHI, U, D = normal(N * C, P), normal(P, seed=1), normal(P, seed=2)


def problem(likelihood: Likelihood, factor: float = 1.0) -> tuple[LineSearch, Tensor]:
    """The search from u along a multiple of d, and the targets."""
    y = likelihood.sample(normal(N, C, seed=3), torch.Generator().manual_seed(0))
    f, d = (PHI @ U).view(N, C), factor * D

    def terms(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return likelihood.log_prob(f, y), likelihood.residual(f, y), likelihood.curvature(f)

    products = float(U @ U), float(U @ d), float(d @ d)
    return LineSearch(terms, f, df=(PHI @ d).view(N, C), products=products), y


LIKELIHOODS = [Gaussian(0.3), Bernoulli(), Categorical()]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
@pytest.mark.parametrize("t", [0.0, 0.7])
def test_the_objective_and_its_derivatives(likelihood: Likelihood, t: float) -> None:
    line, y = problem(likelihood)
    length = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    u = U + length * D
    psi = 0.5 * u @ u - likelihood.log_prob((PHI @ u).view(N, C), y).sum()
    (slope,) = torch.autograd.grad(psi, length, create_graph=True)
    (bend,) = torch.autograd.grad(slope, length)
    exact = tuple(part.item() for part in (psi.detach(), slope.detach(), bend.detach()))
    assert line.evaluate(t) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
@pytest.mark.parametrize("factor", [1e-3, 1.0, 50.0])
def test_the_length_takes_nine_tenths_of_the_slope(likelihood: Likelihood, factor: float) -> None:
    for sign in (1, -1):
        line, _ = problem(likelihood, sign * factor)
        t = line.find_length()
        if line.slope >= 0:
            assert t == 0
            continue
        value, slope, _ = line.evaluate(t)
        assert t > 0 and value < line.value and abs(slope) <= -0.1 * line.slope
        finer = line.polish(t)
        assert abs(line.evaluate(finer)[1]) <= abs(slope)


def test_a_quadratic_is_solved_in_one_step() -> None:
    line, _ = problem(Gaussian(0.3), 1.0 if problem(Gaussian(0.3))[0].slope < 0 else -1.0)
    _, slope, bend = line.evaluate(0.0)
    best = -slope / bend
    assert line.polish(1.2 * best) == pytest.approx(best, rel=1e-9)
    assert line.polish(3 * best) == 3 * best  # too far for one step
