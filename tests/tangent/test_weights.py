"""Examples that count more or less than once, and a noise for each observation, in the tangent estimators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import TangentClassifier, TangentGLM, TangentRegressor
from tests.support.drawn import double, normal
from tests.support.observed import OBSERVED, draw_targets

N = 14
X, NEW = normal(N, 3), normal(5, 3, seed=7)
W = torch.tensor([0, 1, 2, 3, 1, 0, 2, 1, 1, 2, 1, 3, 0, 1])
HALVES = torch.tensor([0.5, 2.5, 1.0, 0.1, 3.0, 1.5, 1.0, 1.0, 0.7, 2.0, 1.2, 0.4, 1.0, 1.0]).double()
NUMBERS = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], 1) + 0.3 * normal(N, 2, seed=4)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.3).long()
SOLVERS = ["function", "weight", "cg-function", "cg-weight"]


def net(outputs: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))


def repeated(x: Tensor, w: Tensor = W) -> Tensor:
    return x.repeat_interleave(w, 0)


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(1.0, float(b.abs().max())))


# Gaussian noise.


def find_attainable(noise: Any, prior: Any) -> float:
    """The residual that rounding leaves: eps sqrt(m) ||K + noise|| ||x||, relative to ||b|| >= noise ||x||.

    The noise that the evidence chooses here with the balanced prior is 4e-8 of the kernel's largest eigenvalue.
    """
    dense = TangentRegressor(net(2), noise=noise, prior=prior, solver="function").fit(repeated(X), repeated(NUMBERS))
    K = dense.lin_.jacobian(repeated(X)).gram(scale=dense.prior_variance_)
    condition = 1 + float(torch.linalg.matrix_norm(K, 2)) / float(np.min(dense.noise_))
    return 2 * torch.finfo(K.dtype).eps * math.sqrt(len(K)) * condition


@pytest.mark.parametrize("prior", ["balanced", 0.3, "layerwise"])
@pytest.mark.parametrize("noise", [0.1, [0.1, 0.4], "evidence", "per-output"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_weight_counts_as_repetitions(solver: str, noise: Any, prior: Any) -> None:
    iterative = solver.startswith("cg")
    if iterative and (prior == "layerwise" or noise == "per-output"):
        pytest.skip("several hyperparameters need a dense solver")
    known = not isinstance(noise, str) and prior == 0.3
    tolerance = max(1e-9, find_attainable(noise, prior)) if iterative and not known else 1e-9
    options = {"noise": noise, "prior": prior, "solver": solver, "tolerance": tolerance, "preconditioner": "none"}
    a = TangentRegressor(net(2), **options).fit(X, NUMBERS, sample_weight=W)
    b = TangentRegressor(net(2), **options).fit(repeated(X), repeated(NUMBERS))
    if iterative:
        # Scale and noise come from random probes of rows, of which there are fewer.
        close(a.predict(NEW), b.predict(NEW), rtol=1e-8 if known else 0.2)
        assert a.log_evidence_ == pytest.approx(
            b.log_evidence_, abs=6 * (a.log_evidence_error_ + b.log_evidence_error_)
        )
        return
    close(a.log_evidence_, b.log_evidence_, rtol=1e-9 if known else 1e-8)
    rtol = 1e-9 if known else 1e-5  # the search ends where the evidence is flat
    close(a.prior_variance_, b.prior_variance_, rtol=0.1 if prior == "layerwise" else rtol)
    close(a.noise_, b.noise_, rtol=rtol)
    for x, y in zip(
        a.predict(NEW, return_std=True, noise=True), b.predict(NEW, return_std=True, noise=True), strict=True
    ):
        close(x, y, rtol=1e-9 if known else 1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_evidence_of_weights_is_the_integral_of_the_weighted_density(solver: str) -> None:
    """log of the integral of prod p(y | f)^w over the prior, in dense algebra, for weights that are not whole."""
    model, noise, s = net(2), 0.2, 0.4
    reg = TangentRegressor(model, mean="network", noise=noise, prior=s, solver=solver, tolerance=1e-11).fit(
        X, NUMBERS, HALVES
    )
    J = linnet.linearize(model).jacobian(X)
    Phi, r, w = s**0.5 * J.dense(), (NUMBERS - J.outputs()).flatten(), HALVES.repeat_interleave(2)
    H = torch.eye(Phi.shape[1]).double() + Phi.T @ (w[:, None] / noise * Phi)
    u = torch.linalg.solve(H, Phi.T @ (w / noise * r))
    log_density = -0.5 * (w * ((r - Phi @ u).square() / noise + np.log(2 * np.pi * noise))).sum()
    value = float(log_density - 0.5 * u @ u - 0.5 * torch.logdet(H))
    assert reg.log_evidence_ == pytest.approx(value, rel=1e-9, abs=6 * reg.log_evidence_error_)
    close(reg.posterior_.delta, s**0.5 * u, rtol=1e-8)


def test_weights_of_ones_change_nothing_and_none_means_one() -> None:
    a, b = (TangentRegressor(net(2)).fit(X, NUMBERS, sample_weight=w) for w in (None, np.ones(N)))
    close(a.predict(NEW), b.predict(NEW), rtol=1e-14)
    assert a.log_evidence_ == b.log_evidence_


def test_leave_one_out_influence_and_path_with_weights() -> None:
    given: dict[str, Any] = {"noise": 0.1, "prior": 0.5}
    whole = TangentRegressor(net(2), **given).fit(X, NUMBERS, sample_weight=HALVES)
    influence = whole.influence(NEW)
    for i in (0, 3):
        rest = torch.arange(N) != i
        left = TangentRegressor(net(2), **given).fit(X[rest], NUMBERS[rest], sample_weight=HALVES[rest])
        mean, std = left.predict(X[i : i + 1], return_std=True, noise=True)
        close(whole.loo_.mean[i], mean[0], rtol=1e-8)
        close(whole.loo_.std[i], std[0], rtol=1e-8)
        _, cov = left.predict(X[i : i + 1], return_cov=True, noise=True)
        density = torch.distributions.MultivariateNormal(mean[0], cov).log_prob(NUMBERS[i])
        close(whole.loo_.log_score[i], density, rtol=1e-8)
        close(influence[..., i], whole.predict(NEW) - left.predict(NEW), rtol=1e-7)
    twice = TangentRegressor(net(2), **given).fit(X, NUMBERS, sample_weight=W)
    other = TangentRegressor(net(2), **given).fit(repeated(X), repeated(NUMBERS))
    for t in (0.1, 5.0):
        close(twice.path(NEW, t), other.path(NEW, t), rtol=1e-8)


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_condition_and_refit_take_weights(solver: str) -> None:
    given: dict[str, Any] = {"mean": "network", "noise": 0.1, "prior": 0.5, "solver": solver}
    whole = TangentRegressor(net(2), **given).fit(X, NUMBERS, sample_weight=HALVES)
    first = TangentRegressor(net(2), **given).fit(X[:9], NUMBERS[:9], sample_weight=HALVES[:9])
    grown = first.condition(X[9:], NUMBERS[9:], sample_weight=HALVES[9:])
    close(grown.predict(NEW), whole.predict(NEW))
    close(grown.log_evidence_, whole.log_evidence_)
    plain = TangentRegressor(net(2), **given).fit(X[:9], NUMBERS[:9]).condition(X[9:], NUMBERS[9:], sample_weight=W[9:])
    mixed = torch.cat([torch.ones(9).long(), W[9:]])
    close(plain.log_evidence_, TangentRegressor(net(2), **given).fit(X, NUMBERS, sample_weight=mixed).log_evidence_)
    again = first.refit(X, NUMBERS, sample_weight=W)
    close(again.predict(NEW), TangentRegressor(net(2), **given).fit(repeated(X), repeated(NUMBERS)).predict(NEW))


def test_tasks_and_top_blocks_take_weights() -> None:
    a = TangentRegressor(net(2), mean="network").fit_tasks(
        [(X, NUMBERS), (X[:9], NUMBERS[:9])], sample_weight=[W, None]
    )
    b = TangentRegressor(net(2), mean="network").fit_tasks([(repeated(X), repeated(NUMBERS)), (X[:9], NUMBERS[:9])])
    for one, other in zip(a.tasks_, b.tasks_, strict=True):
        close(one.log_evidence_, other.log_evidence_, rtol=1e-8)
    with pytest.raises(ValueError, match="There are 1 tasks, so sample_weight needs the weights of as many; got 2"):
        TangentRegressor(net(2)).fit_tasks([(X, NUMBERS)], sample_weight=[W, W])
    tops = [
        TangentRegressor(net(2), top="evidence").fit(*data, sample_weight=w)
        for data, w in (((X, NUMBERS), W), ((repeated(X), repeated(NUMBERS)), None))
    ]
    assert tops[0].top_path_ == pytest.approx(tops[1].top_path_, rel=1e-8)
    levels = [
        TangentRegressor(seed=1).fit(np.asarray(x), np.asarray(y), sample_weight=w)._level
        for x, y, w in ((X, NUMBERS, W), (repeated(X), repeated(NUMBERS), None))
    ]
    close(levels[0], levels[1])


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_streams_take_weights(kind: str) -> None:
    data: Any = TensorDataset(X, NUMBERS)
    weights = HALVES if kind == "loader" else W
    data = DataLoader(data, batch_size=4) if kind == "loader" else data
    a = TangentRegressor(net(2), noise=0.1, prior=0.5, solver="weight", batch_size=3).fit(data, sample_weight=weights)
    b = TangentRegressor(net(2), noise=0.1, prior=0.5).fit(X, NUMBERS, sample_weight=weights)
    close(a.predict(NEW), b.predict(NEW))
    if kind == "loader":
        with pytest.raises(TypeError, match=r"they have the weight 0\. Examples can be left out of tensors"):
            TangentRegressor(net(2)).fit(data, sample_weight=W)


# A noise for each observation.


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", ["n", "n by c"])
def test_noise_of_each_observation(solver: str, shape: str) -> None:
    v = 0.05 + (normal(N, seed=3) if shape == "n" else normal(N, 2, seed=3)).square()
    model = net(2)
    reg = TangentRegressor(model, mean="network", noise=v, prior=0.5, solver=solver, tolerance=1e-11).fit(X, NUMBERS)
    J, S = linnet.linearize(model).jacobian(X), 0.5
    rows = (v if v.ndim == 2 else v[:, None].expand(N, 2)).flatten()
    K = S * J.dense() @ J.dense().T + torch.diag(rows)
    new = linnet.linearize(model).jacobian(NEW)
    mean = new.outputs() + S * (
        new.dense() @ J.dense().T @ torch.linalg.solve(K, (NUMBERS - J.outputs()).flatten())
    ).view(5, 2)
    close(reg.predict(NEW), mean, rtol=1e-8)
    r = (NUMBERS - J.outputs()).flatten()
    value = float(torch.distributions.MultivariateNormal(torch.zeros_like(r), K).log_prob(r))
    assert reg.log_evidence_ == pytest.approx(value, rel=1e-9, abs=6 * reg.log_evidence_error_)
    assert reg.noise_ is v


def test_weights_are_precisions_of_a_known_noise_in_all_but_the_evidence() -> None:
    a = TangentRegressor(net(2), noise=0.1, prior=0.5).fit(X, NUMBERS, sample_weight=HALVES)
    b = TangentRegressor(net(2), noise=0.1 / HALVES, prior=0.5).fit(X, NUMBERS)
    close(a.predict(NEW), b.predict(NEW))
    both = TangentRegressor(net(2), noise=0.1 / HALVES, prior=0.5).fit(X, NUMBERS, sample_weight=W)
    counted = W > 0
    w, v = W[counted], (0.1 / HALVES)[counted]
    repeats = TangentRegressor(net(2), noise=repeated(v, w), prior=0.5)
    repeats.fit(repeated(X[counted], w), repeated(NUMBERS[counted], w))
    close(both.log_evidence_, repeats.log_evidence_)
    close(both.predict(NEW), repeats.predict(NEW))


def test_which_noise_a_prediction_adds(tmp_path: Any) -> None:
    v = 0.05 + normal(N, seed=3).square()
    reg = TangentRegressor(net(1), noise=v, prior=0.5).fit(X, NUMBERS[:, 0])
    _, std = reg.predict(NEW, return_std=True)
    new = torch.linspace(0.1, 0.5, 5).double()
    close(reg.predict(NEW, return_std=True, noise=new)[1], (std.square() + new).sqrt())
    close(reg.predict(NEW, return_std=True, noise=0.3)[1], (std.square() + 0.3).sqrt())
    close(reg.predict(NEW, return_cov=True, noise=new)[1].diagonal(), std.square() + new)
    assert reg.sample(NEW, 3, noise=new).shape == (3, 5)
    for call in (lambda: reg.predict(NEW, return_std=True, noise=True), lambda: reg.sample(NEW, noise=True)):
        with pytest.raises(ValueError, match=r"does not know that of new ones: give their variances.*noise=variances"):
            call()
    with pytest.raises(ValueError, match=r"noise for each of 5 observations needs shape \(5,\); got \(4,\)"):
        reg.predict(NEW, return_std=True, noise=new[:4])
    with pytest.raises(ValueError, match=r"give that of the new ones as noise="):
        reg.condition(NEW, NEW[:, 0])
    more = reg.condition(NEW, NEW[:, 0], noise=new)
    whole = TangentRegressor(net(1), noise=torch.cat([v, new]), prior=0.5)
    whole.fit(torch.cat([X, NEW]), torch.cat([NUMBERS[:, 0], NEW[:, 0]]))
    close(more.predict(X), whole.predict(X))
    close(reg.refit(NEW, NEW[:, 0], noise=new).predict(X).shape[0], N)
    plain = TangentRegressor(net(1), noise=0.1).fit(X, NUMBERS[:, 0])
    close(
        plain.predict(NEW, return_std=True, noise=0.4)[1],
        (plain.predict(NEW, return_std=True)[1].square() + 0.4).sqrt(),
    )
    with pytest.raises(ValueError, match=r"this one has noise=0\.1 for all"):
        plain.condition(NEW, NEW[:, 0], noise=new)
    reg.save(tmp_path / "reg")
    loaded = linnet.load(tmp_path / "reg", net(1))
    close(loaded.predict(NEW, return_std=True, noise=new)[1], reg.predict(NEW, return_std=True, noise=new)[1])
    with pytest.raises(ValueError, match="does not know that of new ones"):
        loaded.predict(NEW, return_std=True, noise=True)


# Any likelihood.


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """An estimator with weights, and one with repetitions."""
    if name in ("classes", "ordinal"):
        classes = name == "classes"
        kind, model, y = TangentClassifier, net(3 if classes else 1), LABELS
        options["likelihood"] = "classification" if classes else "ordinal"
    else:
        likelihood, c = OBSERVED[name]
        model = net(c)
        kind, y = TangentGLM, draw_targets(likelihood, model(X).detach() + normal(N, c, seed=9))
        options["likelihood"] = likelihood
    a = kind(model, **options).fit(X, y, sample_weight=W)
    return a, kind(model, **options).fit(repeated(X), repeated(y))


NAMES = ["classes", "ordinal", "poisson", "negative-binomial", "weibull", "own"]


@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
@pytest.mark.parametrize("solver", ["function", "weight"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_any_likelihood_count_as_repetitions(name: str, solver: str, inference: str) -> None:
    a, b = pair(name, solver=solver, inference=inference, prior=0.5, samples=256)
    drawn = name == "classes" and inference == "vi"  # expectations come from draws for each example
    close(a.log_evidence_, b.log_evidence_, rtol=1e-7)
    cut = solver == "weight" and inference == "vi"  # the covariance is in some directions of the kernel
    rtol = 0.05 if drawn or cut else 1e-4 if inference == "vi" else 1e-5
    if isinstance(a, TangentClassifier):
        close(a.predict_proba(NEW), b.predict_proba(NEW), rtol=rtol)
    else:
        close(a.predict(NEW), b.predict(NEW), rtol=rtol)
        if inference != "map":
            close(a.predict(NEW, return_std=True)[1], b.predict(NEW, return_std=True)[1], rtol=rtol)


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_of_the_prior_with_weights(name: str) -> None:
    a, b = pair(name, inference="map", prior="balanced")
    close(a.log_evidence_, b.log_evidence_, rtol=1e-5)
    close(a.prior_variance_, b.prior_variance_, rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("solver", ["cg-weight", "adam"])
def test_the_mode_by_passes_and_by_minibatches_with_weights(name: str, solver: str) -> None:
    a, _ = pair(
        name,
        solver=solver,
        inference="map",
        prior=0.5,
        **({"epochs": 400, "minibatch": 14} if solver == "adam" else {}),
    )
    _, b = pair(name, solver="function", inference="map", prior=0.5)
    if isinstance(a, TangentClassifier):
        close(a.predict_proba(NEW), b.predict_proba(NEW), rtol=1e-4 if solver == "cg-weight" else 0.05)
    else:
        close(a.predict(NEW), b.predict(NEW), rtol=1e-4 if solver == "cg-weight" else 0.05)


@pytest.mark.parametrize("name", ["classes", "poisson"])
def test_layers_of_the_prior_refit_and_samples_with_weights(name: str) -> None:
    a, b = pair(name, inference="laplace", prior="layerwise")
    close(a.log_evidence_, b.log_evidence_, rtol=1e-4)
    y = LABELS if name == "classes" else draw_targets(OBSERVED[name][0], net(2)(X).detach())
    one = b.refit(X, y, sample_weight=W)
    other = b.refit(repeated(X), repeated(y))
    close(one.log_evidence_, other.log_evidence_, rtol=1e-8)
    sampled, _ = pair(name, inference="laplace", prior=0.5, solver="cg-weight")
    exact, _ = pair(name, inference="laplace", prior=0.5, solver="function")
    assert sampled.log_evidence_ == pytest.approx(exact.log_evidence_, abs=6 * sampled.log_evidence_error_ + 1e-3)


def test_ignored_labels_and_weights_together() -> None:
    labels = LABELS.clone()
    labels[3] = -100
    kept = labels >= 0
    a = TangentClassifier(net(3), inference="map", prior=0.5).fit(X, labels, sample_weight=HALVES)
    b = TangentClassifier(net(3), inference="map", prior=0.5).fit(X[kept], LABELS[kept], sample_weight=HALVES[kept])
    close(a.predict_proba(NEW), b.predict_proba(NEW))
    c = TangentClassifier(net(3), inference="map", prior=0.5).fit(TensorDataset(X, labels), sample_weight=HALVES)
    close(a.predict_proba(NEW), c.predict_proba(NEW))


# Bad input.


def fits(w: Any) -> list[Any]:
    return [
        lambda: TangentRegressor(net(2)).fit(X, NUMBERS, sample_weight=w),
        lambda: TangentClassifier(net(3)).fit(X, LABELS, sample_weight=w),
        lambda: TangentGLM(net(2)).fit(X, NUMBERS.abs().round(), sample_weight=w),
    ]


@pytest.mark.parametrize(
    ("w", "match"),
    [
        (torch.ones(N - 1), rf"one weight for each of the {N} examples, shape \({N},\); got \({N - 1},\)"),
        (-torch.ones(N), "not negative; example 0 has -1.0"),
        (torch.zeros(N), f"All {N} weights in sample_weight are zero"),
        (torch.full((N,), torch.nan), "finite and not negative; example 0 has nan"),
        (torch.ones(N, 1), r"got \(14, 1\)"),
    ],
)
def test_weights_that_are_none(w: Tensor, match: str) -> None:
    for fit in fits(w):
        with pytest.raises(ValueError, match=match):
            fit()


@pytest.mark.parametrize(
    ("noise", "match"),
    [
        (
            torch.ones(N - 1),
            rf"noise for each of {N} observations needs shape \({N},\) or \({N}, 2\); got \({N - 1},\)",
        ),
        (torch.ones(N, 3), r"got \(14, 3\)"),
        (torch.zeros(N), "noise is a variance and must be positive"),
        (-torch.ones(N, 2), "noise is a variance and must be positive"),
    ],
)
def test_noise_that_is_none(noise: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TangentRegressor(net(2), noise=noise).fit(X, NUMBERS)


def test_targets_and_noise_that_are_too_long_for_weights_of_zero() -> None:
    long = torch.cat([NUMBERS, NUMBERS[:1]])
    with pytest.raises(ValueError, match="There are 14 examples and 15 targets"):
        TangentRegressor(net(2)).fit(X, long, sample_weight=W)
    with pytest.raises(ValueError, match="There are 14 examples and 15 variances"):
        TangentRegressor(net(2), noise=long.square() + 1).fit(X, NUMBERS, sample_weight=W)


def test_noise_of_each_observation_belongs_to_one_task() -> None:
    with pytest.raises(ValueError, match="noise for each observation belongs to one task"):
        TangentRegressor(net(2), noise=torch.ones(N)).fit_tasks([(X, NUMBERS), (X, NUMBERS)])


def test_saved_weights(tmp_path: Any) -> None:
    reg = TangentRegressor(net(2), noise=0.1, prior=0.5).fit(X, NUMBERS, sample_weight=HALVES)
    reg.save(tmp_path / "reg")
    loaded = linnet.load(tmp_path / "reg", net(2))
    close(loaded.loo_.std, reg.loo_.std)
    close(loaded.condition(NEW, NEW[:, :2]).log_evidence_, reg.condition(NEW, NEW[:, :2]).log_evidence_)
