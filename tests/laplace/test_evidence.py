"""Modes of the linear model that the evidence of `Laplace` is taken at, and what a structure needs of a prior."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from linnet import linearize
from linnet.inference import SolverSettings
from linnet.laplace.evidence import LinearModel
from linnet.laplace.structures import KroneckerCurvature
from linnet.probability import Bernoulli
from tests.support.drawn import double, normal


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
def test_the_mode_is_found_in_the_space_that_was_chosen(solver) -> None:
    J = linearize(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))).jacobian(normal(15, 3))
    y, mean = (normal(15, 1, seed=1) > 0).double(), normal(15, 1, seed=2)
    variance = torch.linspace(0.2, 2, J.shape[1], dtype=torch.float64)
    settings = SolverSettings(solver=solver, progress=False)
    found, theta = LinearModel(J, y, mean, settings, 15.0).mode(Bernoulli(), variance)
    assert (found.u is None) == (solver == "function")
    A = J.dense()
    slope = A.T @ (y - torch.sigmoid(mean + (A @ theta)[:, None]))[:, 0]
    torch.testing.assert_close(theta, variance * slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_kronecker_posterior_needs_one_prior_variance_for_a_parameter(corrected: bool) -> None:
    J = linearize(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))).jacobian(normal(15, 3))
    structure = KroneckerCurvature(J, torch.ones(15, 1, dtype=torch.float64), corrected=corrected)
    variance = torch.ones(J.shape[1], dtype=torch.float64)
    assert structure.posterior(variance, 1.0).variance(J).shape == (15, 1)
    variance[0] = 2.0
    with pytest.raises(ValueError, match=r"needs one prior variance for all of .*'0.weight'.*; got 1 to 2"):
        structure.posterior(variance, 1.0)
