"""The linearized network as a classifier, against dense float64 references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import linnet
from linnet import TangentClassifier
from linnet.probability import Bernoulli, Categorical
from tests.support.drawn import double, normal


def net(outputs: int, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), seed)


N = 24
X, NEW = normal(N, 3), normal(6, 3, seed=5)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def dense(model: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
    J = linnet.linearize(model).jacobian(data)
    return J.dense(), J.outputs()


def reference(model: nn.Module, y: Tensor, likelihood: Any, *, variance: float, network: bool = True) -> Tensor:
    """The mode by a generic optimizer."""
    J, f0 = dense(model, X)
    f0 = f0 if network else torch.zeros_like(f0)

    def psi(u: np.ndarray) -> tuple[float, np.ndarray]:
        d = torch.tensor(u)
        f = f0 + (J @ d).view_as(f0)
        g = -J.T @ likelihood.residual(f, y).flatten() + d / variance
        return float(-likelihood.log_prob(f, y).sum() + d @ d / (2 * variance)), g.numpy()

    found = minimize(
        psi, np.zeros(J.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-10}
    )
    return torch.tensor(found.x)


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
@pytest.mark.parametrize("mean", ["network", "zero"])
def test_the_mode_is_the_optimum_whatever_the_solver(solver: str, mean: Any) -> None:
    model = net(3)
    clf = TangentClassifier(model, inference="map", prior=0.7, solver=solver, mean=mean, tolerance=1e-8).fit(X, LABELS)
    delta = reference(model, LABELS, Categorical(), variance=0.7, network=mean == "network")
    J, f0 = dense(model, NEW)
    f = (f0 if mean == "network" else 0) + (J @ delta).view_as(f0)
    torch.testing.assert_close(clf.decision_function(NEW), f, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(clf.predict_proba(NEW), f.softmax(1), rtol=2e-5, atol=2e-5)
    assert clf.mode_.gradient <= 1e-6


def laplace(model: nn.Module, y: Tensor, likelihood: Any, *, variance: float) -> tuple[Tensor, Tensor, float]:
    """Mean and covariance of new logits, and the log evidence, in weight space."""
    delta = reference(model, y, likelihood, variance=variance)
    J, f0 = dense(model, X)
    f = f0 + (J @ delta).view_as(f0)
    B = likelihood.curvature(f)
    B = torch.diag_embed(B) if B.ndim == 2 else B
    H = torch.eye(J.shape[1]).double() / variance + J.T @ torch.block_diag(*B) @ J
    Js, fs = dense(model, NEW)
    C = Js @ torch.linalg.solve(H, Js.T)
    value = float(likelihood.log_prob(f, y).sum() - delta @ delta / (2 * variance))
    value -= 0.5 * float(torch.logdet(H) + J.shape[1] * np.log(variance))
    return fs + (Js @ delta).view_as(fs), C, value


@pytest.mark.parametrize("solver", ["function", "weight"])
@pytest.mark.parametrize("kind", ["classes", "one logit", "labels"])
def test_laplace_equals_the_dense_formulas(solver: str, kind: str) -> None:
    model = net({"classes": 3, "one logit": 1, "labels": 2}[kind])
    many = torch.stack([X[:, 0] > 0, X[:, 1] > 0], 1).double()
    y = {"classes": LABELS, "one logit": many[:, 0].long(), "labels": many}[kind]
    likelihood = Categorical() if kind == "classes" else Bernoulli()
    clf = TangentClassifier(model, prior=0.7, inference="laplace", solver=solver).fit(X, y)
    mean, C, value = laplace(model, y if kind != "one logit" else many[:, :1], likelihood, variance=0.7)
    f, blocks = clf.predict_logits(NEW)
    torch.testing.assert_close(f, mean, rtol=1e-4, atol=1e-5)
    c = f.shape[1]
    exact = torch.stack([C[i * c : (i + 1) * c, i * c : (i + 1) * c] for i in range(len(NEW))])
    torch.testing.assert_close(blocks, exact, rtol=1e-4, atol=1e-6)
    assert clf.log_evidence_ == pytest.approx(value, abs=1e-5)
    for inference in ("map", "vi"):
        other = TangentClassifier(model, prior=0.7, inference=inference, solver=solver).fit(X, y)
        assert other.log_evidence_ == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight", "adam"])
def test_the_displacement_is_in_the_units_of_the_weights(solver: str) -> None:
    """The outputs at the mode are those of the linear model at the posterior's mean, whatever the prior."""
    more = {"epochs": 3} if solver == "adam" else {}
    clf = TangentClassifier(net(3), inference="map", prior=0.25, solver=solver, **more).fit(X, LABELS)
    J = clf.lin_.jacobian(X)
    assert clf.mode_ is not None
    f = J.outputs() + (J @ clf.posterior_.delta).view(J.n, J.c)
    torch.testing.assert_close(clf.mode_.f, f, rtol=1e-9, atol=1e-9)


def test_matrix_free_laplace_agrees_with_the_dense_one() -> None:
    model = net(3)
    a = TangentClassifier(model, inference="laplace", prior=0.7, solver="function").fit(X, LABELS)
    b = TangentClassifier(model, inference="laplace", prior=0.7, solver="cg-weight", samples=2000).fit(X, LABELS)
    assert a.log_evidence_error_ == 0 < b.log_evidence_error_
    assert b.log_evidence_ == pytest.approx(a.log_evidence_, abs=max(1e-4, 4 * b.log_evidence_error_))
    ratio = b.predict_logits(NEW)[1].diagonal(dim1=1, dim2=2) / a.predict_logits(NEW)[1].diagonal(dim1=1, dim2=2)
    assert float((ratio - 1).abs().max()) < 5 * (2 / 2000) ** 0.5  # five standard errors of a variance
    with pytest.raises(ValueError, match="cg-function"):
        TangentClassifier(model, solver="cg-function").fit(X, LABELS)


def test_the_scale_has_the_largest_evidence() -> None:
    model = net(3)
    clf = TangentClassifier(model).fit(X, LABELS)
    best = clf.log_evidence_
    for factor in (0.5, 0.9, 1.1, 2.0):
        other = TangentClassifier(model, prior=factor * clf.scales_["all"]).fit(X, LABELS)
        assert other.log_evidence_ <= best + 1e-4
    layers = TangentClassifier(model, prior="layerwise").fit(X, LABELS)
    assert layers.log_evidence_ >= best - 1e-6
    assert set(layers.scales_) == {"0", "2"}


@pytest.mark.parametrize("family", ["lowrank", "meanfield"])
def test_the_elbo_rises_and_bounds_the_evidence(family: str) -> None:
    model = net(1)
    y = (X[:, 0] > 0).long()
    clf = TangentClassifier(model, prior=0.5, inference="vi", family=family).fit(X, y)
    path = np.array(clf.elbo_path_)
    assert (np.diff(path) >= -1e-9).all()
    assert path[-1] > path[0]
    # The evidence by importance sampling from the Laplace approximation, with its standard error.
    value, error = importance(model, y[:, None].double(), variance=0.5)
    assert clf.elbo_ < value + 4 * error
    assert clf.predict_proba(NEW).sum(1).tolist() == pytest.approx([1.0] * len(NEW))


def importance(model: nn.Module, y: Tensor, *, variance: float, draws: int = 20_000) -> tuple[float, float]:
    delta = reference(model, y, Bernoulli(), variance=variance)
    J, f0 = dense(model, X)
    f = f0 + (J @ delta).view_as(f0)
    H = torch.eye(J.shape[1]).double() / variance + J.T @ torch.diag(Bernoulli().curvature(f).flatten()) @ J
    q = torch.distributions.MultivariateNormal(delta, precision_matrix=H)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        d = q.sample((draws,))
    p = torch.distributions.Normal(0.0, variance**0.5)
    fs = f0.T + d @ J.T
    log_w = p.log_prob(d).sum(1) + (y.T * fs - nn.functional.softplus(fs)).sum(1) - q.log_prob(d)
    w = (log_w - log_w.max()).exp()
    return float(log_w.max() + w.mean().log()), float(w.std() / w.mean() / draws**0.5)


def test_links() -> None:
    model = net(3)
    point = TangentClassifier(model, inference="map", prior=0.7).fit(X, LABELS).predict_proba(NEW)
    probit = TangentClassifier(model, inference="laplace", prior=0.7).fit(X, LABELS)
    f, blocks = probit.predict_logits(NEW)
    scaled = f / (1 + np.pi / 8 * blocks.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(probit.predict_proba(NEW), scaled.softmax(1))
    drawn = TangentClassifier(model, inference="laplace", prior=0.7, link="mc", samples=20_000).fit(X, LABELS)
    drawn = drawn.predict_proba(NEW)
    exact = probit.sample(NEW, 20_000, seed=3).softmax(2).mean(0)
    assert float((drawn - exact).abs().max()) < 5 * 0.5 * (2 / 20_000) ** 0.5
    assert float(drawn.max()) < float(point.max())


def test_binary_with_one_logit_or_two() -> None:
    one = net(1)
    # Two logits of opposite sign from the same function, so that their difference is the one logit.
    two = nn.Sequential(one, Split())
    y = (X[:, 0] > 0).long()
    a = TangentClassifier(one, prior=0.7, inference="map").fit(X, y).predict_proba(NEW)
    b = TangentClassifier(two, prior=0.7, inference="map").fit(X, y).predict_proba(NEW)
    assert a.shape == b.shape == (len(NEW), 2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Split(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-x / 2, x / 2], 1)


def test_labels_of_every_kind() -> None:
    model = net(3)
    names = np.array(["cat", "dog", "owl"])[LABELS.numpy()]
    numbers = TangentClassifier(model, inference="map", prior=1.0).fit(X.numpy(), LABELS.numpy())
    strings = TangentClassifier(model, inference="map", prior=1.0).fit(X.numpy(), names)
    assert strings.classes_.tolist() == ["cat", "dog", "owl"]
    np.testing.assert_allclose(strings.predict_proba(NEW.numpy()), numbers.predict_proba(NEW.numpy()))
    assert isinstance(strings.predict(NEW.numpy()), np.ndarray)
    assert strings.predict(NEW.numpy()).tolist() == [("cat", "dog", "owl")[i] for i in numbers.predict(NEW.numpy())]
    # Few labels of a network's classes are the outputs they name.
    few = TangentClassifier(model, inference="map", prior=1.0).fit(X, torch.where(LABELS > 1, 0, LABELS))
    assert few.classes_.tolist() == [0, 1, 2]
    assert few.predict(NEW).dtype == torch.int64
    ordered = TangentClassifier(model, inference="map", prior=1.0, classes=["owl", "cat", "dog"])
    assert ordered.fit(X.numpy(), names).classes_.tolist() == ["owl", "cat", "dog"]


def test_multi_label() -> None:
    model = net(2)
    y = torch.stack([X[:, 0] > 0, X[:, 1] > 0], 1).long()
    clf = TangentClassifier(model).fit(X, y)
    p = clf.predict_proba(X)
    assert p.shape == (N, 2)
    assert clf.predict(X).shape == (N, 2)
    assert float((clf.predict(X) == y).double().mean()) > 0.9


def test_data_may_carry_its_labels() -> None:
    model = net(3)
    data = torch.utils.data.TensorDataset(X, LABELS)
    a = TangentClassifier(model, inference="map", prior=1.0).fit(data)
    b = TangentClassifier(model, inference="map", prior=1.0).fit(X, LABELS)
    torch.testing.assert_close(a.predict_proba(NEW), b.predict_proba(NEW))


def test_the_network_is_untouched_and_can_take_the_new_weights() -> None:
    model = net(3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    clf = TangentClassifier(model, inference="map").fit(X, LABELS)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    with pytest.warns(UserWarning, match="worse than the network that was given"):
        changed = clf.apply()
    for name, p in changed.named_parameters():
        torch.testing.assert_close(p, before[name] + clf.delta_[name])
    found = clf.linearity(NEW)
    torch.testing.assert_close(found.network, changed(NEW))
    torch.testing.assert_close(found.linear, clf.decision_function(NEW))
    assert 0 <= found.agreement <= 1
    torch.testing.assert_close(clf.to_module()(NEW), clf.decision_function(NEW))


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (np.arange(N) % 5, "attach_head"),
        (np.array(["a", "b"])[np.arange(N) % 2], "which output is which"),
        (np.arange(N - 1) % 3, "need labels of shape"),
        (np.where(np.arange(N) == 4, np.nan, 1.0), "example 4"),
        (np.linspace(0, 1, N), "[Uu]nknown label type"),
        (np.full((N, 3), 2), "0 and 1|zeros and ones|\\{0, 1\\}"),
    ],
)
def test_bad_labels(y: np.ndarray, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TangentClassifier(net(3)).fit(X, y)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"inference": "mcmc"}, "'map', 'laplace' or 'vi'"),
        ({"link": "logit"}, "'probit' or 'mc'"),
        ({"family": "diagonal"}, "'auto', 'full', 'lowrank' or 'meanfield'"),
        ({"prior": "wide"}, "prior must be one of"),
        ({"solver": "lu"}, "solver must be one of"),
        ({"mean": "one"}, "'network', 'zero'"),
        ({"dtype": "half"}, "'float32' or 'float64'"),
        ({"classes": [1, 2]}, "as many different labels"),
        ({"classes": [5, 6, 7]}, "not among classes"),
    ],
)
def test_bad_settings(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TangentClassifier(net(3), **settings).fit(X, LABELS)


def test_one_example_and_one_class() -> None:
    clf = TangentClassifier(net(3), prior=1.0).fit(X[:1], LABELS[:1])
    assert clf.predict_proba(NEW).shape == (len(NEW), 3)
    with pytest.raises(ValueError, match="one class"):
        TangentClassifier().fit(X.numpy(), np.zeros(N))


def test_function_space_without_room_for_the_factors(monkeypatch):
    """Then every answer is a pass over the data, and the same one."""
    X, y = normal(20, 4), torch.arange(20) % 3
    model = double(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    how = {"inference": "laplace", "solver": "function", "progress": False}
    kept = linnet.TangentClassifier(model, **how).fit(X, y).predict_proba(X)

    def refused(self, **how):
        raise MemoryError("no room")

    monkeypatch.setattr(linnet.Jacobian, "cached", refused)
    read = linnet.TangentClassifier(model, **how).fit(X, y).predict_proba(X)
    torch.testing.assert_close(read, kept, rtol=1e-9, atol=1e-12)


def test_a_prior_that_the_evidence_shrinks_to_nothing_is_told():
    model, y = net(3), torch.arange(N)[torch.randperm(N, generator=torch.Generator().manual_seed(3))] % 3
    with pytest.warns(UserWarning, match=r"these 24 labels is largest for a prior scale of next to nothing"):
        clf = TangentClassifier(model, mean="zero", inference="map", prior="layerwise").fit(X, y)
    assert (clf.predict_proba(NEW) - 1 / 3).abs().max() < 0.01
    # One scale has a hyperprior. A variance that is given is no choice of the evidence; the network's mean is not zero.
    found = TangentClassifier(model, mean="zero", inference="map").fit(X, y)
    assert (found.predict_proba(NEW) - 1 / 3).abs().max() > 0.01
    TangentClassifier(model, mean="zero", inference="map", prior=1e-9).fit(X, y)
    TangentClassifier(model, mean="network", inference="map").fit(X, y)
    TangentClassifier(model, mean="zero", inference="map").fit(X, LABELS)
