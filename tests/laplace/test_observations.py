"""Laplace approximations of weighted examples, known noise, counts, ordered classes, times and users' likelihoods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import Laplace, train_with_evidence
from linnet.likelihoods import Likelihood, NegativeBinomial, Ordinal, Poisson, Weibull
from linnet.probability import Weighted
from tests.support.drawn import normal
from tests.support.laplace_cases import CASES, CLASSES, NEW, NUMBERS, N, X, net
from tests.support.observed import OBSERVED, Robust, draw_targets

W = torch.arange(N) % 4
HALVES = 0.25 + (torch.arange(N) % 5).double() / 3
STRUCTURES = ["full", "function", "kron", "ekfac", "diag", "lowrank", "subnetwork"]
pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(W, 0)


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(1.0, float(b.abs().max())))


def problem(name: str) -> tuple[int, Any, Tensor]:
    """Outputs, likelihood and targets."""
    if name in CASES:
        outputs, spec, _, y = CASES[name]
        return outputs, spec, y
    likelihood, c = OBSERVED[name]
    return c, likelihood, draw_targets(likelihood, net(c)(X).detach())


# Weights.


@pytest.mark.parametrize("name", [*CASES, *OBSERVED])
@pytest.mark.parametrize("structure", ["full", "function", "diag", "subnetwork"])
def test_weights_count_as_repetitions(name: str, structure: Any) -> None:
    outputs, spec, y = problem(name)
    options: dict[str, Any] = {"structure": structure, "prior": 0.7, "rank": 8, "size": 10}
    if spec == "regression":
        options["noise"] = 0.3
    a = Laplace(net(outputs), spec, **options).fit(X, y, sample_weight=W)
    b = Laplace(net(outputs), spec, **options).fit(repeated(X), repeated(y))
    close(a.log_evidence(), b.log_evidence())
    close(a.effective_dimension_, b.effective_dimension_)
    close(a.gradient_norm_, b.gradient_norm_)
    for p, q in zip(a.predict(NEW, return_std=True), b.predict(NEW, return_std=True), strict=True):
        close(p, q)


@pytest.mark.parametrize("name", ["softmax", "numbers", "poisson", "ordinal"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "lowrank", "samples"])
def test_every_structure_takes_weights(name: str, structure: Any) -> None:
    """Kronecker factors of repeated examples are other ones, and so are draws."""
    outputs, spec, y = problem(name)
    options: dict[str, Any] = {"structure": structure, "prior": 0.7, "rank": 8}
    if spec == "regression":
        options["noise"] = 0.3
    a = Laplace(net(outputs), spec, **options).fit(X, y, sample_weight=W)
    b = Laplace(net(outputs), spec, **options).fit(repeated(X), repeated(y))
    rtol = {"lowrank": 1e-6, "samples": 0.5}.get(structure, 0.2)
    close(a.predict(NEW, return_std=True)[1], b.predict(NEW, return_std=True)[1], rtol=rtol)


@pytest.mark.parametrize("structure", ["full", "function", "diag"])
@pytest.mark.parametrize("noise", [None, "per-output"])
def test_the_evidence_chooses_noise_and_prior_by_weights(structure: Any, noise: Any) -> None:
    options: dict[str, Any] = {"structure": structure, "noise": noise}
    a = Laplace(net(2), "regression", **options).fit(X, NUMBERS, sample_weight=W)
    b = Laplace(net(2), "regression", **options).fit(repeated(X), repeated(NUMBERS))
    close(a.log_evidence(), b.log_evidence(), rtol=1e-7)
    close(a.noise_, b.noise_, rtol=1e-4)
    close(list(a.scales_.values()), list(b.scales_.values()), rtol=1e-4)
    for at in ("network", "linear_mode"):
        close(a.log_evidence(at, prior=0.5), b.log_evidence(at, prior=0.5), rtol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "one logit", "poisson", "ordinal"])
def test_scales_and_narrowing_by_weights(name: str) -> None:
    outputs, spec, y = problem(name)
    a = Laplace(net(outputs), spec, "full").fit(X, y, sample_weight=W)
    b = Laplace(net(outputs), spec, "full").fit(repeated(X), repeated(y))
    close(a.narrowed_, b.narrowed_, rtol=1e-3)
    close(a.scales_["all"], b.scales_["all"], rtol=1e-3)
    close(a.log_evidence("linear_mode", prior=0.4), b.log_evidence("linear_mode", prior=0.4), rtol=1e-7)
    a.tune("balanced", narrow=False)
    b.tune("balanced", narrow=False)
    close(a.log_evidence(), b.log_evidence(), rtol=1e-7)


def test_weights_of_halves_in_dense_algebra() -> None:
    outputs, spec, y = problem("softmax")
    la = Laplace(net(outputs), spec, "full", 0.7).fit(X, y, sample_weight=HALVES)
    lin = linnet.linearize(net(outputs))
    J = lin.jacobian(X)
    f, rows = J.outputs(), J.dense().view(N, outputs, -1)
    pi = torch.softmax(f, 1)
    B = HALVES[:, None, None] * (torch.diag_embed(pi) - pi[:, :, None] * pi[:, None, :])
    H = torch.einsum("nap,nab,nbq->pq", rows, B, rows) + torch.eye(lin.p).double() / 0.7
    new = lin.jacobian(NEW).dense()
    close(la.predict(NEW, return_cov=True)[1], new @ torch.linalg.inv(H) @ new.T)
    theta = lin.flat_theta
    value = (HALVES * torch.log_softmax(f, 1)[torch.arange(N), y]).sum() - 0.5 * theta @ theta / 0.7
    close(la.log_evidence(), value - 0.5 * lin.p * np.log(0.7) - 0.5 * torch.logdet(H))


def test_streams_ignored_labels_and_draws_with_weights() -> None:
    labels = CLASSES.clone()
    labels[3] = -100
    a = Laplace(net(3), "classification", "full", 0.7).fit(X, labels, sample_weight=HALVES)
    kept = labels >= 0
    b = Laplace(net(3), "classification", "full", 0.7).fit(X[kept], labels[kept], sample_weight=HALVES[kept])
    close(a.log_evidence(), b.log_evidence())
    stream = DataLoader(TensorDataset(X, CLASSES), batch_size=5)
    c = Laplace(net(3), "classification", "diag", 0.7).fit(stream, sample_weight=HALVES)
    d = Laplace(net(3), "classification", "diag", 0.7).fit(X, CLASSES, sample_weight=HALVES)
    close(c.log_evidence(), d.log_evidence())
    drawn = Laplace(net(3), "classification", "full", 0.7, draws=1000).fit(X, CLASSES, sample_weight=HALVES)
    exact = Laplace(net(3), "classification", "full", 0.7).fit(X, CLASSES, sample_weight=HALVES)
    close(drawn.predict(NEW, return_std=True)[1], exact.predict(NEW, return_std=True)[1], rtol=0.1)
    with pytest.raises(NotImplementedError, match="draws times that are seen to their end"):
        Laplace(net(1), Weibull(1.0), draws=2).fit(X, problem("weibull")[2])


@pytest.mark.parametrize("w", [-torch.ones(N), torch.zeros(N), torch.ones(N + 1)])
def test_weights_that_are_none(w: Tensor) -> None:
    with pytest.raises(ValueError, match="sample_weight"):
        Laplace(net(3)).fit(X, CLASSES, sample_weight=w)


# Noise of each observation.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_noise_of_each_observation(structure: Any, tmp_path: Any) -> None:
    v = 0.1 + normal(N, 2, seed=3).square()
    options: dict[str, Any] = {"prior": 0.7, "rank": 40, "size": 32}
    la = Laplace(net(2), "regression", structure, noise=v, **options).fit(X, NUMBERS)
    lin = linnet.linearize(net(2))
    J = lin.jacobian(X)
    H = J.dense().T @ (J.dense() / v.flatten()[:, None]) + torch.eye(lin.p).double() / 0.7
    if structure in ("full", "function", "lowrank", "subnetwork"):
        new = lin.jacobian(NEW).dense()
        close(la.predict(NEW, return_cov=True)[1], new @ torch.linalg.inv(H) @ new.T, rtol=1e-7)
        theta = lin.flat_theta
        fit = torch.distributions.Normal(J.outputs(), v.sqrt()).log_prob(NUMBERS).sum()
        value = fit - 0.5 * theta @ theta / 0.7 - 0.5 * lin.p * np.log(0.7) - 0.5 * torch.logdet(H)
        close(la.log_evidence(), value, rtol=1e-7)
    close(la.noise_, v)
    std = la.predict(NEW, return_std=True)[1]
    new_noise = torch.linspace(0.1, 0.6, 6).double()
    close(la.predict(NEW, return_std=True, noise=new_noise)[1], (std.square() + new_noise[:, None]).sqrt())
    close(la.predict(NEW, return_std=True, noise=0.2)[1], (std.square() + 0.2).sqrt())
    assert la.sample(NEW, 2, noise=0.2).shape == (2, 6, 2)
    with pytest.raises(ValueError, match="does not know that of new ones"):
        la.predict(NEW, return_std=True, noise=True)
    la.save(tmp_path / "la")
    loaded = linnet.load(tmp_path / "la", net(2))
    close(loaded.predict(NEW, return_std=True, noise=0.2)[1], la.predict(NEW, return_std=True, noise=0.2)[1])
    close(loaded.noise_, v)


def test_noise_with_weights_and_noise_that_is_none() -> None:
    v = 0.1 + normal(N, seed=3).square()
    a = Laplace(net(2), "regression", prior=0.7, noise=v).fit(X, NUMBERS, sample_weight=W)
    b = Laplace(net(2), "regression", prior=0.7, noise=repeated(v)).fit(repeated(X), repeated(NUMBERS))
    close(a.log_evidence(), b.log_evidence())
    for noise, match in (
        (torch.ones(N - 1), rf"noise for each of {N} observations needs shape \({N},\) or \({N}, 2\)"),
        (torch.zeros(N), "must be positive and finite; observation 0"),
    ):
        with pytest.raises(ValueError, match=match):
            Laplace(net(2), "regression", noise=noise).fit(X, NUMBERS)


# Likelihoods.


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_takes_every_likelihood(name: str, structure: Any, tmp_path: Any) -> None:
    likelihood, c = OBSERVED[name]
    y = draw_targets(likelihood, net(c)(X).detach())
    la = Laplace(net(c), likelihood, structure, 0.7, rank=40, size=40).fit(X, y)
    lin = linnet.linearize(net(c))
    J = lin.jacobian(X)
    f, rows = J.outputs(), J.dense().view(N, c, -1)
    B = torch.stack(
        [
            torch.autograd.functional.hessian(
                lambda g, i=i: -likelihood.log_prob(g[None], y[i : i + 1]).sum(), f[i].clone()
            )
            for i in range(N)
        ]
    )
    H = torch.einsum("nap,nab,nbq->pq", rows, B, rows) + torch.eye(lin.p).double() / 0.7
    if structure == "diag":
        H = torch.diag(H.diagonal())
    if structure not in ("kron", "ekfac"):
        new = lin.jacobian(NEW).dense()
        close(la.predict(NEW, return_cov=True)[1], new @ torch.linalg.inv(H) @ new.T, rtol=1e-6)
    la.save(tmp_path / "la")
    own = type(likelihood) if name.startswith("own") else None
    loaded = linnet.load(tmp_path / "la", net(c), likelihood=own)
    close(loaded.predict(NEW, return_std=True)[1], la.predict(NEW, return_std=True)[1])
    if own is not None:
        with pytest.raises(ValueError, match="a likelihood of your own, and a file does not hold its code"):
            linnet.load(tmp_path / "la", net(c))


@pytest.mark.parametrize(
    ("name", "law"),
    [("ordinal", OBSERVED["ordinal"][0]), ("negative-binomial", NegativeBinomial(0.6)), ("weibull", Weibull(1.7))],
)
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_open_parameters_are_found_at_the_network(name: str, law: Likelihood, structure: Any, tmp_path: Any) -> None:
    model = net(1)
    y = draw_targets(law, model(X).detach())
    la = Laplace(model, name, structure, 0.7).fit(X, y)
    wanted = type(law)().fitted(model(X).detach(), y)
    np.testing.assert_allclose(*(next(iter(x.settings().values())) for x in (la.likelihood_, wanted)), rtol=1e-6)
    la.save(tmp_path / "la")
    loaded = linnet.load(tmp_path / "la", model)
    assert loaded.likelihood_.settings() == la.likelihood_.settings()
    if name != "ordinal":
        mean, std = la.predict_mean(NEW, return_std=True)
        close(loaded.predict_mean(NEW), mean)
        assert len(mean) == 6 and bool((la.predict_mean(NEW, return_std=True, noise=True)[1] > std).all())


def test_predictions_of_counts_and_ordered_classes() -> None:
    la = Laplace(net(2), "poisson", prior=0.7).fit(X, problem("poisson")[2])
    f, std = la.predict(NEW, return_std=True)
    mean, spread = la.predict_mean(NEW, return_std=True)
    close(mean, (f + 0.5 * std.square()).exp())
    close(spread, mean * torch.expm1(std.square()).sqrt())
    with pytest.raises(ValueError, match="For counts and times use predict_mean"):
        la.predict(NEW, return_std=True, noise=True)
    with pytest.raises(ValueError, match="predict_proba is for classes"):
        la.predict_proba(NEW)
    ordered = Laplace(net(1), Ordinal([-0.5, 0.5]), prior=0.7).fit(X, CLASSES)
    p = ordered.predict_proba(NEW)
    assert p.shape == (6, 3)
    close(p.sum(1), torch.ones(6))
    with pytest.raises(ValueError, match="predict_mean is for counts, times and numbers"):
        ordered.predict_mean(NEW)
    tuned = (
        Laplace(net(1), Ordinal([-0.5, 0.5])).fit(X, CLASSES).tune(validation=(NEW, torch.tensor([0, 1, 2, 0, 1, 2])))
    )
    assert tuned.scales_["all"] > 0
    fields = np.array([(bool(i % 3), 1.0 + i) for i in range(N)], dtype=[("event", bool), ("time", float)])
    times = Laplace(net(1), "weibull", prior=0.7).fit(X, fields)
    assert times.predict(NEW).shape == (6,)


def test_bad_targets_come_before_long_work() -> None:
    for spec, y, match in (
        ("poisson", -torch.ones(N, 1), "counts, whole numbers that are not negative"),
        ("poisson", torch.full((N, 1), 0.5), "counts, whole numbers that are not negative"),
        ("ordinal", torch.full((N,), -3), "Label -3 of example 0 is outside"),
        (Ordinal([0.0]), torch.full((N,), 2), r"outside 0 \.\. 1"),
        ("weibull", torch.full((N, 2), 2.0), "flags 1 .* or 0"),
    ):
        with pytest.raises(ValueError, match=match):
            Laplace(net(1), spec).fit(X, y)


def test_training_with_counts() -> None:
    y = problem("poisson")[2]
    found = train_with_evidence(net(2), (X, y), Poisson(), epochs=4, burn_in=2)
    assert len(found.path) == 2
    found = train_with_evidence(net(2), (X, y), Robust(), epochs=4, burn_in=2)
    assert np.isfinite(found.log_evidence)


def test_weighted_likelihood_is_not_what_predictions_see() -> None:
    la = Laplace(net(3), prior=0.7).fit(X, CLASSES, sample_weight=HALVES)
    assert not isinstance(la.likelihood_, Weighted)
    assert la.predict_proba(NEW).shape == (6, 3)
