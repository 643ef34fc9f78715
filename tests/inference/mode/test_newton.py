"""Modes and Laplace evidence against scikit-learn, scipy, closed forms and hand-written references."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from linnet import linearize
from linnet.inference.mode import spaces
from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.newton import FORMULA, function_space, pass_space, weight_space
from linnet.inference.mode.spaces import Solve
from linnet.linalg import LowRankPreconditioner, Matrix
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from tests.support.counted import Counted
from tests.support.drawn import double, normal

N, C, P = 12, 3, 20


def problem(likelihood: Likelihood, *, c: int = C, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N c, P) that couple all outputs, a mean (N, c), and targets drawn from the model."""
    Phi, mean = normal(N * c, P, seed=seed), spread * normal(N, c, seed=seed + 1)
    f = mean + (Phi @ normal(P, seed=seed + 2)).view(N, c)
    return Phi, mean, likelihood.sample(f, torch.Generator().manual_seed(seed))


CASES = [
    pytest.param(Bernoulli(), 1, id="binary"),
    pytest.param(Bernoulli(), 3, id="multilabel"),
    pytest.param(Categorical(), 3, id="categorical"),
    pytest.param(Categorical(), FORMULA + 1, id="many classes"),
    pytest.param(Gaussian(torch.tensor([0.3, 1.0, 0.1], dtype=torch.float64)), 3, id="gaussian"),
]


def by_scipy(Phi: Tensor, mean: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
    """The mode's u, by a general minimizer with a gradient of its own."""

    def psi(u: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(u).requires_grad_()
        value = 0.5 * x @ x - likelihood.log_prob(mean + (Phi @ x).view(mean.shape), y).sum()
        return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()

    found = minimize(psi, np.zeros(Phi.shape[1]), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    return torch.from_numpy(found.x)


def dense_blocks(B: Tensor) -> Tensor:
    return torch.diag(B.flatten()) if B.ndim == 2 else torch.block_diag(*B)


# The mode.


@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_every_space_finds_what_a_general_minimizer_finds(likelihood: Likelihood, c: int) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    u = by_scipy(Phi, mean, y, likelihood)
    f = mean + (Phi @ u).view(mean.shape)
    given = {"mean": mean, "likelihood": likelihood, "tolerance": 1e-10}
    modes = [
        function_space(Phi @ Phi.T, y, **given),
        weight_space(Phi, y, **given),
        pass_space(Matrix(Phi), y, variance=torch.ones(P).double(), **given),
    ]
    psi = 0.5 * float(u @ u) - float(likelihood.log_prob(f, y).sum())
    for mode in modes:
        assert mode.checked() is mode and mode.gradient <= 1e-10
        torch.testing.assert_close(mode.f, f, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(Phi.T @ mode.alpha, u, rtol=1e-6, atol=1e-6)
        assert mode.objective == pytest.approx(psi, rel=1e-10)
        assert mode.objective == pytest.approx(mode.penalty - mode.log_likelihood)
        torch.testing.assert_close(mode.alpha, likelihood.residual(mode.f, y).flatten(), rtol=1e-6, atol=1e-8)
    assert modes[0].u is None
    for mode in modes[1:]:
        assert mode.u is not None
        torch.testing.assert_close(mode.u, u, rtol=1e-6, atol=1e-6)


def test_softmax_regression_of_scikit_learn() -> None:
    X, strength = normal(40, 5), 0.7
    y = (X @ normal(5, C, seed=1) + normal(40, C, seed=2)).argmax(1)
    reference = LogisticRegression(C=strength, fit_intercept=False, tol=1e-12, solver="newton-cg", max_iter=1000)
    coefficients = torch.from_numpy(reference.fit(X.numpy(), y.numpy()).coef_)  # (C, 5)
    J = linearize(double(nn.Linear(5, C, bias=False))).jacobian(X)
    variance = torch.full((5 * C,), strength, dtype=torch.float64)
    mode = pass_space(J, y, variance=variance, mean=torch.zeros(40, C).double(), likelihood=Categorical())
    assert mode.checked().u is not None
    torch.testing.assert_close((variance.sqrt() * mode.u).view(C, 5), coefficients, rtol=1e-6, atol=1e-6)
    K = J.gram(scale=variance)
    alpha = function_space(K, y, mean=torch.zeros(40, C).double(), likelihood=Categorical()).checked().alpha
    torch.testing.assert_close((variance * (J.T @ alpha)).view(C, 5), coefficients, rtol=1e-6, atol=1e-6)


def test_logistic_regression_of_scikit_learn() -> None:
    X = normal(40, 5)
    y = (X @ normal(5, seed=1) + normal(40, seed=2) > 0).double()
    reference = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-12, solver="newton-cholesky", max_iter=1000)
    coefficients = torch.from_numpy(reference.fit(X.numpy(), y.numpy()).coef_)[0]
    mode = weight_space(X, y, mean=torch.zeros(40, 1).double(), likelihood=Bernoulli(), scale=2.0).checked()
    assert mode.u is not None
    torch.testing.assert_close(math.sqrt(2) * mode.u, coefficients, rtol=1e-6, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    far=st.sampled_from([0.1, 10.0, 1000.0]),
    binary=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_one_mode_from_any_start(seed: int, far: float, binary: bool, scale: float) -> None:
    likelihood: Likelihood = Bernoulli() if binary else Categorical()
    Phi, mean, y = problem(likelihood, seed=seed)
    K, given = Phi @ Phi.T, {"mean": mean, "likelihood": likelihood, "scale": scale, "tolerance": 1e-9}
    best = weight_space(Phi, y, **given).checked()
    starts = {"function": normal(len(K), seed=seed + 3), "weight": normal(P, seed=seed + 4)}
    others = [
        function_space(K, y, start=far * starts["function"], **given).checked(),
        weight_space(Phi, y, start=far * starts["weight"], **given).checked(),
    ]
    del given["scale"]
    S = torch.full((P,), scale, dtype=torch.float64)
    others.append(pass_space(Matrix(Phi), y, variance=S, start=far * starts["weight"], **given).checked())
    for mode in others:
        torch.testing.assert_close(mode.f, best.f, rtol=1e-4, atol=1e-4)
        assert mode.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()], ids=repr)
def test_logits_that_are_large_and_wrong(likelihood: Likelihood) -> None:
    # Every example is on the wrong side, far out where the likelihood has no curvature.
    Phi, mean, y = problem(likelihood, spread=300.0)
    wrong = (y + 1) % C if isinstance(likelihood, Categorical) else 1 - y
    for scale in (1.0, 1e4):
        given = {"mean": mean, "likelihood": likelihood, "scale": scale}
        mode = weight_space(Phi, wrong, **given).checked()
        other = function_space(Phi @ Phi.T, wrong, **given).checked()
        assert mode.iterations < 60
        assert other.objective == pytest.approx(mode.objective, rel=1e-6)
        u = mode.u
        assert u is not None
        gradient = u - math.sqrt(scale) * (Phi.T @ likelihood.residual(mode.f, wrong).flatten())
        assert float(gradient.norm()) <= 1e-5 * math.sqrt(scale) * float(Phi.norm())


def test_values_whose_terms_cancel_are_rounded_as_the_terms_are() -> None:
    # A penalty of 1e4 and log densities of 1e4 in all: the value is zero, and its rounding is not.
    def terms(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 10 - 0.5 * (f - 1).square(), 1 - f, torch.ones_like(f)

    for seed in range(20):
        off = 1e-8 * normal(1000, 1, seed=seed)
        products = 2 * float(terms(1 - off)[0].sum()), 0.0, 0.0
        line = LineSearch(terms, 1 - off, df=off, products=products)
        assert abs(line.value) < 1e-9 and line.flat
        assert line.find_length() == pytest.approx(1.0)


def test_data_that_the_mean_fits_take_no_step() -> None:
    y = torch.arange(N) % C
    mean = 200.0 * nn.functional.one_hot(y, C).double()
    Phi = normal(N * C, P)
    mode = weight_space(Phi, y, mean=mean, likelihood=Categorical()).checked()
    assert (mode.iterations, mode.penalty, mode.log_evidence) == (0, 0.0, 0.0)
    nothing = function_space(torch.zeros(N * C, N * C).double(), y, mean=normal(N, C), likelihood=Categorical())
    assert nothing.checked().iterations == 0 and nothing.log_det == 0


def test_float32_reaches_what_float32_can() -> None:
    Phi, mean, y = problem(Categorical())
    exact = weight_space(Phi, y, mean=mean, likelihood=Categorical())
    single = weight_space(Phi.float(), y, mean=mean.float(), likelihood=Categorical(), tolerance=1e-4).checked()
    assert single.f.dtype == torch.float32
    torch.testing.assert_close(single.f.double(), exact.f, rtol=1e-3, atol=1e-3)
    beyond = weight_space(Phi.float(), y, mean=mean.float(), likelihood=Categorical(), tolerance=1e-12)
    assert not beyond.converged and beyond.iterations < 50
    with pytest.raises(ArithmeticError, match=r"stopped after \d+ steps with a relative gradient of .* float64"):
        beyond.checked()


@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_a_factor_nearby_saves_decompositions_and_changes_nothing(
    likelihood: Likelihood, c: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    K, given = Phi @ Phi.T, {"mean": mean, "likelihood": likelihood, "tolerance": 1e-9}
    made = []
    for space in (spaces.FunctionSpace, spaces.WeightSpace):
        plain = space.factor
        monkeypatch.setattr(space, "factor", lambda self, root, plain=plain: made.append(0) or plain(self, root))
    for solve, A in ((function_space, K), (weight_space, Phi)):
        exact, other = solve(A, y, **given), solve(A, y, scale=1.2, **given)
        made.clear()
        start = other.alpha if other.u is None else other.u
        found = solve(A, y, start=start, near=other, **given).checked()
        assert len(made) == 1  # at the mode
        torch.testing.assert_close(found.f, exact.f, rtol=1e-7, atol=1e-7)
        assert found.log_evidence == pytest.approx(exact.log_evidence, rel=1e-8)


def test_a_factor_of_something_else_does_no_harm() -> None:
    Phi, mean, y = problem(Categorical())
    given = {"mean": mean, "likelihood": Categorical(), "scale": 100.0, "tolerance": 1e-9}
    exact = weight_space(Phi, y, **given)
    far = torch.diag(torch.logspace(-3, 3, P, dtype=torch.float64))
    found = weight_space(Phi, y, near=replace(exact, factor=far), **given).checked()
    torch.testing.assert_close(found.f, exact.f, rtol=1e-4, atol=1e-5)


# Passes over the data.


def test_passes_are_counted_and_a_preconditioner_saves_some() -> None:
    Phi, mean, y = problem(Categorical())
    variance = torch.logspace(3, -2, P, dtype=torch.float64)
    plain, helped = Counted(Phi), Counted(Phi)
    given = {"variance": variance, "mean": mean, "likelihood": Categorical(), "tolerance": 1e-9}
    a = pass_space(plain, y, **given).checked()
    assert a.passes == plain.passes
    features = Phi * variance.sqrt()
    lam, U = torch.linalg.eigh(features.T @ dense_blocks(Categorical().curvature(a.f)) @ features)
    b = pass_space(helped, y, solve=LowRankPreconditioner(U, lam.clamp_min(0)).solve, **given).checked()
    assert b.passes == helped.passes < a.passes
    torch.testing.assert_close(a.f, b.f, rtol=1e-6, atol=1e-6)


def test_a_preconditioner_is_made_anew_where_steps_lag() -> None:
    Phi, mean, y = problem(Categorical())
    variance = torch.logspace(4, -1, P, dtype=torch.float64)
    given = {"variance": variance, "mean": mean, "likelihood": Categorical(), "tolerance": 1e-9}
    features, made = Phi * variance.sqrt(), []

    def make(root: Tensor) -> Solve:
        lam, U = torch.linalg.eigh(features.T @ dense_blocks(root @ root.mT) @ features)
        made.append(float(lam.sum()))
        return LowRankPreconditioner(U, lam.clamp_min(0)).solve

    first = make(Categorical().root(mean))
    kept, renewed = Counted(Phi), Counted(Phi)
    a = pass_space(kept, y, solve=first, **given).checked()
    b = pass_space(renewed, y, solve=first, make=make, **given).checked()
    assert len(set(made)) > 1  # at other curvatures
    assert b.passes == renewed.passes < a.passes == kept.passes
    torch.testing.assert_close(a.f, b.f, rtol=1e-6, atol=1e-6)
    tried = []
    c = pass_space(Counted(Phi), y, solve=first, make=lambda root: tried.append(root), **given).checked()
    assert tried and c.passes == a.passes  # None keeps the last


def test_a_network_by_passes_and_by_its_kernel() -> None:
    net = double(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)))
    lin = linearize(net)
    J = lin.jacobian(normal(N, 4), batch_size=5)
    y, variance = torch.arange(N) % C, 0.1 + normal(lin.p, seed=3).square()
    given = {"mean": J.outputs(), "likelihood": Categorical(), "tolerance": 1e-10}
    by_passes = pass_space(J, y, variance=variance, **given).checked()
    by_kernel = function_space(J.gram(scale=variance), y, **given).checked()
    by_features = weight_space(J.scaled(variance.sqrt()).dense(), y, **given).checked()
    torch.testing.assert_close(by_passes.f, by_kernel.f, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(by_features.f, by_kernel.f, rtol=1e-8, atol=1e-8)
    assert by_features.log_evidence == pytest.approx(by_kernel.log_evidence, rel=1e-9)
    with pytest.raises(ValueError, match="without a factor of its Hessian"):
        _ = by_passes.log_evidence


# The evidence.


def test_gaussian_noise_gives_the_exact_evidence() -> None:
    noise = torch.tensor([0.3, 1.0, 0.1], dtype=torch.float64)
    Phi, mean, y = problem(Gaussian(noise))
    covariance = 2.0 * Phi @ Phi.T + torch.diag(noise.repeat(N))
    reference = torch.distributions.MultivariateNormal(mean.flatten(), covariance)
    posterior = mean.flatten() + 2.0 * Phi @ Phi.T @ torch.linalg.solve(covariance, (y - mean).flatten())
    for mode in (
        function_space(Phi @ Phi.T, y, mean=mean, likelihood=Gaussian(noise), scale=2.0),
        weight_space(Phi, y, mean=mean, likelihood=Gaussian(noise), scale=2.0),
    ):
        assert mode.checked().iterations == 1
        assert mode.log_evidence == pytest.approx(float(reference.log_prob(y.flatten())), rel=1e-10)
        torch.testing.assert_close(mode.f.flatten(), posterior, rtol=1e-9, atol=1e-9)


def test_binary_laplace_as_gaussian_process_books_write_it() -> None:
    # f <- K a with a = b - W^1/2 (I + W^1/2 K W^1/2)^-1 W^1/2 K b, undamped, until it stands still.
    Phi, mean, y = problem(Bernoulli(), c=1)
    K, m, t = Phi @ Phi.T, mean[:, 0], 2 * y[:, 0] - 1
    f = m.clone()
    for _ in range(100):
        pi = torch.sigmoid(f)
        w = (pi * (1 - pi)).sqrt()
        L = torch.linalg.cholesky(torch.eye(N).double() + w[:, None] * K * w)
        b = w.square() * (f - m) + (t + 1) / 2 - pi
        a = b - w * torch.cholesky_solve((w * (K @ b))[:, None], L)[:, 0]
        f = m + K @ a
    log_q = -0.5 * a @ (f - m) + nn.functional.logsigmoid(t * f).sum() - L.diagonal().log().sum()
    mode = function_space(K, y, mean=mean, likelihood=Bernoulli(), tolerance=1e-12)
    torch.testing.assert_close(mode.f[:, 0], f, rtol=1e-9, atol=1e-9)
    assert mode.log_evidence == pytest.approx(float(log_q), rel=1e-9)


@pytest.mark.parametrize(("likelihood", "c"), CASES)
def test_evidence_factor_and_root_belong_together(likelihood: Likelihood, c: int) -> None:
    Phi, mean, y = problem(likelihood, c=c)
    K, eye = Phi @ Phi.T, torch.eye(N * c).double()
    a = function_space(K, y, mean=mean, likelihood=likelihood, tolerance=1e-10)
    b = weight_space(Phi, y, mean=mean, likelihood=likelihood, tolerance=1e-10)
    L, B = (dense_blocks(x if x.ndim == 3 else x.view(N, c)) for x in (a.root, likelihood.curvature(a.f)))
    torch.testing.assert_close(L @ L.T, B, rtol=1e-9, atol=1e-12)
    assert a.factor is not None and b.factor is not None and a.log_det is not None
    torch.testing.assert_close(a.factor @ a.factor.T, eye + L.T @ K @ L, rtol=1e-9, atol=1e-9)
    H = torch.eye(P).double() + Phi.T @ B @ Phi
    torch.testing.assert_close(b.factor @ b.factor.T, H, rtol=1e-9, atol=1e-9)
    assert a.log_det == pytest.approx(float(torch.linalg.slogdet(eye + K @ B).logabsdet), rel=1e-9)
    assert b.log_evidence == pytest.approx(a.log_evidence, rel=1e-9)
    assert function_space(K, y, mean=mean, likelihood=likelihood, factor=False).factor is None


# Errors.


def test_errors() -> None:
    Phi, mean, y = problem(Categorical())
    K, likelihood = Phi @ Phi.T, Categorical()
    one = torch.ones(P).double()
    with pytest.raises(ValueError, match=r"so K needs shape \(36, 36\); got \(35, 35\)"):
        function_space(K[1:, 1:], y, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"so Phi needs shape \(36, p\); got \(36,\)"):
        weight_space(Phi[:, 0], y, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"mean needs shape \(n, c\); got \(36,\)"):
        function_space(K, y, mean=mean.flatten(), likelihood=likelihood)
    with pytest.raises(TypeError, match=r"K is torch\.float32 on cpu and mean is torch\.float64"):
        function_space(K.float(), y, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"so J needs 36 rows; got shape \(33, 20\)"):
        pass_space(Matrix(Phi[3:]), y, variance=one, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"so variance needs shape \(20,\); got \(19,\)"):
        pass_space(Matrix(Phi), y, variance=one[1:], mean=mean, likelihood=likelihood)
    with pytest.raises(TypeError, match=r"variance is torch\.float32"):
        pass_space(Matrix(Phi), y, variance=one.float(), mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match="Prior variances must be finite and not negative"):
        pass_space(Matrix(Phi), y, variance=-one, mean=mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"mean must be finite; example 0 has \[nan, nan, nan\]"):
        function_space(K, y, mean=math.nan * mean, likelihood=likelihood)
    with pytest.raises(ValueError, match=r"start needs shape \(20,\); got \(36,\)"):
        weight_space(Phi, y, mean=mean, likelihood=likelihood, start=torch.zeros(36).double())
    with pytest.raises(ValueError, match="Categorical needs one label for each of the 12 examples"):
        weight_space(Phi, y[1:], mean=mean, likelihood=likelihood)
    with pytest.raises(TypeError, match="Heteroscedastic is not log-concave"):
        weight_space(Phi[:24], normal(N, 1), mean=normal(N, 2), likelihood=Heteroscedastic())
    with pytest.raises(ArithmeticError, match="stopped after 1 steps"):
        weight_space(Phi, y, mean=mean, likelihood=likelihood, iterations=1).checked()
