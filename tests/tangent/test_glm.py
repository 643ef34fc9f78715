"""Counts, times, ordered classes and likelihoods of users in the tangent estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import linnet
from linnet import TangentClassifier, TangentGLM, TangentRegressor
from linnet.likelihoods import Categorical, Gaussian, Likelihood, NegativeBinomial, Ordinal, Poisson, Weibull
from tests.support.drawn import double, normal
from tests.support.observed import OBSERVED, Robust, Together, draw_targets

N = 20
X, NEW = normal(N, 3), normal(5, 3, seed=7)
LEVELS = (X[:, 0] > -0.3).long() + (X[:, 0] > 0.5).long()
NAMES = ["poisson", "negative-binomial", "weibull", "own"]


def net(outputs: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))


def problem(name: str) -> tuple[Likelihood, int, Tensor]:
    likelihood, c = OBSERVED[name]
    return likelihood, c, draw_targets(likelihood, net(c)(X).detach() + 0.7 * normal(N, c, seed=9))


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(1.0, float(b.abs().max())))


def dense_mode(model: nn.Module, likelihood: Likelihood, y: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """Displacement and Hessian of the mode, by a general minimizer."""
    J = linnet.linearize(model).jacobian(X)
    f0, rows = J.outputs(), J.dense()

    def psi(u: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(u).requires_grad_()
        f = f0 + variance**0.5 * (rows @ x).view_as(f0)
        value = 0.5 * x @ x - likelihood.log_prob(f, y).sum()
        value.backward()
        return float(value.detach()), x.grad.numpy()  # type: ignore[union-attr]

    found = scipy.optimize.minimize(psi, np.zeros(rows.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-11})
    delta = variance**0.5 * torch.from_numpy(found.x)
    f = f0 + (rows @ delta).view_as(f0)
    H = torch.autograd.functional.hessian(
        lambda d: -likelihood.log_prob(f0 + (rows @ d).view_as(f0), y).sum() + 0.5 * d @ d / variance, delta
    )
    assert f.shape == f0.shape
    return delta, H


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
def test_the_mode_and_its_covariance_in_dense_algebra(name: str, solver: str) -> None:
    likelihood, c, y = problem(name)
    model = net(c)
    glm = TangentGLM(model, likelihood, inference="laplace", prior=0.5, solver=solver, samples=4000).fit(X, y)
    delta, H = dense_mode(model, likelihood, y, 0.5)
    close(glm.posterior_.delta, delta, rtol=1e-5)
    J = linnet.linearize(model).jacobian(NEW)
    f, std = glm.predict_outputs(NEW, return_std=True)
    close(f, J.outputs() + (J.dense() @ delta).view(5, c), rtol=1e-5)
    wanted = (J.dense() @ torch.linalg.inv(H) @ J.dense().T).diagonal().sqrt().view(5, c)
    close(std, wanted, rtol=0.1 if solver == "cg-weight" else 1e-5)
    J0 = linnet.linearize(model).jacobian(X)
    at = J0.outputs() + (J0.dense() @ delta).view(N, c)
    evidence = likelihood.log_prob(at, y).sum() - 0.5 * delta @ delta / 0.5 - 0.5 * torch.logdet(0.5 * H)
    assert glm.log_evidence_ == pytest.approx(float(evidence), rel=1e-6, abs=6 * glm.log_evidence_error_)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
@pytest.mark.parametrize("solver", ["function", "weight"])
def test_files_of_every_likelihood(name: str, inference: Any, solver: str, tmp_path: Any) -> None:
    likelihood, c, y = problem(name)
    glm = TangentGLM(net(c), likelihood, inference=inference, solver=solver, prior=0.5).fit(X, y)
    glm.save(tmp_path / "glm")
    if name == "own":
        with pytest.raises(ValueError, match=r"fitted with Robust, a likelihood of your own.*likelihood=Robust"):
            linnet.load(tmp_path / "glm", net(c))
        with pytest.raises(ValueError, match="was fitted with the likelihood Robust; got likelihood="):
            linnet.load(tmp_path / "glm", net(c), likelihood=Together)
    own = Robust if name == "own" else None
    loaded = linnet.load(tmp_path / "glm", net(c), likelihood=own)
    close(loaded.predict(NEW), glm.predict(NEW))
    assert loaded.likelihood_.settings() == glm.likelihood_.settings()
    if inference != "map":
        close(loaded.predict(NEW, return_std=True)[1], glm.predict(NEW, return_std=True)[1])
    close(loaded.refit(X[:4], y[:4]).predict(NEW), glm.refit(X[:4], y[:4]).predict(NEW))


@pytest.mark.parametrize(("name", "law"), [("negative-binomial", NegativeBinomial(0.6)), ("weibull", Weibull(1.7))])
def test_open_parameters(name: str, law: Likelihood, tmp_path: Any) -> None:
    y = draw_targets(law, net(1)(X).detach())
    glm = TangentGLM(net(1), name, prior=0.5).fit(X, y)
    (found,) = glm.likelihood_.settings().values()
    (wanted,) = type(law)().fitted(net(1)(X).detach(), y).settings().values()
    assert found == pytest.approx(wanted, rel=1e-6)
    assert glm.refit(X[:5], y[:5]).likelihood_ is glm.likelihood_
    glm.save(tmp_path / "glm")
    loaded = linnet.load(tmp_path / "glm", net(1))
    assert loaded.likelihood == name and loaded.likelihood_.settings() == glm.likelihood_.settings()


def test_vi_of_counts_is_close_to_the_exact_posterior() -> None:
    """One weight, so that the posterior is an integral over one number."""
    model = double(nn.Linear(1, 1, bias=False))
    x, z = normal(12, 1), torch.linspace(-3, 3, 20_001, dtype=torch.float64)
    y = torch.poisson((0.8 * x).exp(), generator=torch.Generator().manual_seed(0))
    glm = TangentGLM(model, "poisson", prior=1.0).fit(x, y)
    f = (float(model.weight.detach()) + z)[:, None, None] * x
    log = Poisson().log_prob(f, y.expand(len(z), 12, 1)).sum(1) - 0.5 * z.square()
    p = torch.softmax(log, 0)
    mean = float((p * z).sum())
    assert float(glm.posterior_.delta) == pytest.approx(mean, abs=0.01)
    exact = ((p * f[:, :, 0].T.exp()).sum(1)).squeeze()
    torch.testing.assert_close(glm.predict(x)[:, 0], exact, rtol=0.01, atol=0.0)
    assert glm.elbo_ is not None and glm.log_evidence_ is not None
    grid = float(torch.logsumexp(log, 0)) + np.log(float(z[1] - z[0])) - 0.5 * np.log(2 * np.pi)
    assert glm.elbo_ <= grid + 1e-9 and glm.elbo_ == pytest.approx(grid, abs=0.01)


def test_predictions_samples_and_scores_of_counts() -> None:
    likelihood, c, y = problem("poisson")
    glm = TangentGLM(net(c), likelihood, prior=0.5).fit(X, y)
    mean, std = glm.predict(NEW, return_std=True)
    f, spread = glm.predict_outputs(NEW, return_std=True)
    close(mean, (f + 0.5 * spread.square()).exp())
    noisy = glm.predict(NEW, return_std=True, noise=True)[1]
    close(noisy.square(), std.square() + mean)
    draws = glm.sample(NEW, 20_000)
    assert draws.shape == (20_000, 5, 2)
    assert bool(((draws.mean(0) - mean).abs() <= 6 * std / 20_000**0.5 + 0.02 * mean).all())
    counts = glm.sample(NEW, 20_000, noise=True)
    assert bool((counts == counts.round()).all())
    torch.testing.assert_close(counts.std(0), noisy, rtol=0.1, atol=0.0)
    with pytest.raises(NotImplementedError, match="is known for one output"):
        glm.score(X, y)
    one = TangentGLM(net(1), "poisson", prior=0.5).fit(X, y[:, 0])
    assert one.predict(NEW).shape == (5,) and one.sample(NEW, 2, noise=True).shape == (2, 5)
    assert np.isfinite(one.score(X, y[:, 0]))
    assert one.score(X, y[:, 0], sample_weight=np.r_[np.ones(10), np.zeros(10)]) == pytest.approx(
        one.score(X[:10], y[:10, 0])
    )
    mode = TangentGLM(net(1), "poisson", prior=0.5, inference="map").fit(X, y[:, 0])
    close(mode.predict(NEW), mode.predict_outputs(NEW)[:, 0].exp())
    assert mode.score(X, y[:, 0]) > -10
    with pytest.raises(ValueError, match="inference='map' finds the mode alone"):
        mode.predict(NEW, return_std=True)


def test_times_in_fields_and_in_columns() -> None:
    _, _, y = problem("weibull")
    fields = np.array([(bool(flag), time) for time, flag in y.tolist()], dtype=[("event", bool), ("time", float)])
    a, b = (TangentGLM(net(1), "weibull", prior=0.5).fit(X, targets) for targets in (y, fields))
    close(a.predict(NEW), b.predict(NEW))
    assert a.predict(NEW).shape == (5,)
    assert a.sample(NEW, 3, noise=True).shape == (3, 5, 2)
    assert np.isfinite(a.score(X, y))


def test_censored_times_lift_the_mean() -> None:
    """A time that was cut short says that the event came later."""
    time = torch.ones(N, dtype=torch.float64)
    seen, cut = (torch.stack([time, flags.double()], 1) for flags in (torch.ones(N), torch.arange(N) % 2))
    a, b = (TangentGLM(net(1), Weibull(1.0), prior=0.5).fit(X, y) for y in (seen, cut))
    assert bool((b.predict(X) > a.predict(X)).all())


@pytest.mark.parametrize("kind", ["dataset", "frames"])
def test_streams_and_arrays(kind: str) -> None:
    _, c, y = problem("poisson")
    a = TangentGLM(net(c), "poisson", prior=0.5, inference="laplace").fit(X, y)
    given: Any = (TensorDataset(X, y),) if kind == "dataset" else (X.numpy(), y.numpy())
    b = TangentGLM(net(c), "poisson", prior=0.5, inference="laplace", solver="weight", batch_size=3).fit(*given)
    close(b.predict(NEW), a.predict(NEW), rtol=1e-5)
    assert isinstance(a.to_module()(NEW), Tensor)


# Classes.


def test_ordered_classes_of_any_name(tmp_path: Any) -> None:
    names = np.array(["low", "middle", "high"])
    clf = TangentClassifier(net(1), likelihood="ordinal", classes=names).fit(X, names[LEVELS])
    p = clf.predict_proba(NEW)
    assert p.shape == (5, 3) and clf.classes_.tolist() == names.tolist()
    close(p.sum(1), torch.ones(5))
    assert set(clf.predict(NEW)) <= set(names)
    numbers = TangentClassifier(net(1), likelihood="ordinal").fit(X, 10 * (LEVELS + 1))
    close(numbers.predict_proba(NEW), p)
    assert numbers.classes_.tolist() == [10, 20, 30]
    assert float((clf.predict(X) == names[LEVELS]).mean()) > 0.6
    assert clf.decision_function(NEW).shape == (5,)
    clf.save(tmp_path / "clf")
    loaded = linnet.load(tmp_path / "clf", net(1))
    close(loaded.predict_proba(NEW), p)
    assert loaded.likelihood == "ordinal"
    few = clf.refit(X[:4], names[LEVELS[:4]])
    assert few.likelihood_ is clf.likelihood_ and few.predict_proba(NEW).shape == (5, 3)
    known = TangentClassifier(net(1), likelihood=Ordinal([-1.0, 1.0])).fit(X[:6], torch.zeros(6).long())
    assert known.predict_proba(NEW).shape == (5, 3)
    alone = TangentClassifier(likelihood="ordinal").fit(X.numpy(), LEVELS.numpy())
    assert alone.predict_proba(NEW.numpy()).shape == (5, 3)


def test_a_likelihood_of_classes_of_the_users_own(tmp_path: Any) -> None:
    own = TangentClassifier(net(3), likelihood=Together(), inference="laplace", prior=0.5, link="mc").fit(X, LEVELS)
    same = TangentClassifier(net(3), likelihood=Categorical(), inference="laplace", prior=0.5, link="mc").fit(X, LEVELS)
    close(own.predict_proba(NEW), same.predict_proba(NEW), rtol=1e-6)
    close(own.log_evidence_, same.log_evidence_, rtol=1e-7)
    own.save(tmp_path / "own")
    with pytest.raises(ValueError, match="a likelihood of your own"):
        linnet.load(tmp_path / "own", net(3))
    close(linnet.load(tmp_path / "own", net(3), likelihood=Together()).predict_proba(NEW), own.predict_proba(NEW))
    same.save(tmp_path / "same")
    with pytest.raises(ValueError, match="linnet's own Categorical; load it without likelihood="):
        linnet.load(tmp_path / "same", net(3), likelihood=Together)
    reg = TangentRegressor(net(1), noise=0.1).fit(X, X[:, 0])
    reg.save(tmp_path / "reg")
    with pytest.raises(ValueError, match="was fitted without likelihood=; load it so"):
        linnet.load(tmp_path / "reg", net(1), likelihood=Together)


# Bad input.


def test_bad_settings_and_targets() -> None:
    counts = torch.ones(N, 1)
    for given, match in (
        ("regression", r"use linnet\.TangentRegressor"),
        ("classification", r"use linnet\.TangentClassifier"),
        ("gamma", "likelihood must be one of"),
        ("heteroscedastic", "not log-concave"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            TangentGLM(net(2), given).fit(X, counts.expand(N, 1 if given == "heteroscedastic" else 2))
    for y, match in ((-counts, "not negative"), (0.5 * counts, "whole numbers"), (counts[:3], r"\(20, 1\)")):
        with pytest.raises(ValueError, match=match):
            TangentGLM(net(1), "poisson").fit(X, y)
    with pytest.raises(ValueError, match=r"flags 1 .* or 0"):
        TangentGLM(net(1), "weibull").fit(X, torch.full((N, 2), 3.0))
    for likelihood in ("poisson", Gaussian(1.0)):
        with pytest.raises(ValueError, match=r"For counts and times use linnet\.TangentGLM"):
            TangentClassifier(net(1), likelihood=likelihood).fit(X, LEVELS)
    with pytest.raises(ValueError, match="do not say which class is lower"):
        TangentClassifier(net(1), likelihood="ordinal").fit(X, np.array(["a", "b", "c"])[LEVELS])
    with pytest.raises(ValueError, match="a network with one output"):
        TangentClassifier(net(3), likelihood="ordinal").fit(X, LEVELS)
    with pytest.raises(ValueError, match="one label for each example"):
        TangentClassifier(net(1), likelihood="ordinal").fit(X, torch.ones(N, 2).long())
    with pytest.raises(ValueError, match="k is a number of samples"):
        TangentGLM(net(1)).fit(X, counts[:, 0]).sample(NEW, 0)
