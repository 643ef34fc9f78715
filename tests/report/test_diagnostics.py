"""What a fit rests on: influence, spectrum, and how linear the network is, against dense matrices and refitting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import linnet
from linnet.report import build, diagnostics
from tests.support.drawn import double, normal

N, M, C = 14, 5, 3
X, Z = normal(N, 4, seed=1), normal(M, 4, seed=2)
LABELS = torch.arange(N) % C


def network(outputs: int = C) -> nn.Module:
    return double(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)))


def classifier(**more) -> linnet.TangentClassifier:
    return linnet.TangentClassifier(network(), inference="laplace", prior=0.3, **more).fit(X, LABELS)


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_influence_is_the_derivative_of_the_mode(solver):
    clf = classifier(solver=solver)
    J, new = (clf.lin_.jacobian(x) for x in (X, Z))
    f0, D, D_new = J.outputs(), J.dense(), new.dense()

    def shift(weights: torch.Tensor) -> torch.Tensor:
        """J_* delta at the mode of the objective with weighted examples, by Newton's method in dense weight space."""
        delta = torch.zeros(D.shape[1], dtype=torch.float64)
        eye = torch.eye(C, dtype=torch.float64)
        for _ in range(50):
            p = (f0 + (D @ delta).view(N, C)).softmax(1)
            gradient = D.T @ (weights[:, None] * (eye[LABELS] - p)).flatten() - delta / 0.3
            B = weights[:, None, None] * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
            H = D.T @ torch.block_diag(*B) @ D + torch.eye(len(delta), dtype=torch.float64) / 0.3
            delta = delta + torch.linalg.solve(H, gradient)
        return D_new @ delta

    found = diagnostics.compute_influence(build.gather_fit(clf, X, LABELS), new)
    assert found.shape == (M, C, N)
    # The fit stops at a relative gradient of 1e-6.
    wanted = new.outputs().flatten() + shift(torch.ones(N))
    torch.testing.assert_close(clf.predict_logits(Z)[0].flatten(), wanted, rtol=1e-5, atol=1e-6)
    for i in (0, 5, 13):
        step = torch.zeros(N, dtype=torch.float64)
        step[i] = 1e-4
        slope = (shift(1 + step) - shift(1 - step)) / 2e-4
        torch.testing.assert_close(found[:, :, i].flatten(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_influence_of_numbers_is_the_beginning_of_leaving_out(solver):
    y = X[:, 0].sin()
    reg = linnet.TangentRegressor(network(1), prior=0.5, noise=0.1, solver=solver).fit(X, y)
    J = reg.lin_.jacobian(Z)
    found = diagnostics.compute_influence(build.gather_fit(reg, X, y), J)[:, 0]
    K = reg.lin_.jacobian(X).gram(scale=reg.prior_variance_)
    P = torch.linalg.inv(K + 0.1 * torch.eye(N, dtype=torch.float64))
    # Leaving out divides the residual by 1 - leverage, which is noise times the diagonal of P.
    torch.testing.assert_close(found, reg.influence(Z) * (0.1 * P.diagonal()), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["full", "function", "kron", "ekfac", "diag", "lowrank", "subnetwork", "samples"])
def test_cross_covariances_are_those_of_the_joint_one(structure):
    options = {"rank": 4} if structure == "lowrank" else {"size": 7} if structure == "subnetwork" else {}
    la = linnet.Laplace(network(), structure=structure, prior=0.05, **options).fit(X, LABELS)
    both = la.posterior_.covariance(la.lin_.jacobian(torch.cat([Z, X])))
    cross = la.posterior_.cross(la.lin_.jacobian(Z), la.lin_.jacobian(X))
    torch.testing.assert_close(cross, both[: M * C, M * C :], rtol=1e-8, atol=1e-10)
    fit = build.gather_fit(la, X, LABELS)
    found = diagnostics.compute_influence(fit, la.lin_.jacobian(Z))
    residual = F.one_hot(LABELS, C) - la.lin_(X).softmax(1)
    wanted = (cross.view(M, C, N, C) * residual).sum(3)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_spectrum():
    clf = classifier()
    values, n = diagnostics.compute_spectrum(build.gather_fit(clf, X, LABELS))
    D = clf.lin_.jacobian(X).dense()
    p = clf.predict_logits(X)[0].softmax(1)
    B = torch.block_diag(*(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]))
    # L^T K L and Phi^T B Phi have the same eigenvalues but for zeros.
    wanted = torch.linalg.eigvalsh(0.3 * D.T @ B @ D).flip(0)
    assert n == N and len(values) == N * C
    k = min(len(values), len(wanted))
    np.testing.assert_allclose(values[:k], wanted[:k].clamp_min(0), rtol=1e-9, atol=1e-10)
    few, n = diagnostics.compute_spectrum(build.gather_fit(clf, X, LABELS), rows=8 * C)
    assert n == 8 and len(few) == 8 * C and few[0] <= values[0] * (1 + 1e-12)
    with pytest.raises(
        ValueError, match="With 3 outputs, the kernel of only 5 examples can be decomposed, but at least 8"
    ):
        diagnostics.compute_spectrum(build.gather_fit(clf, X, LABELS), rows=5 * C)


@pytest.mark.parametrize("kind", [linnet.TangentClassifier, linnet.Laplace])
def test_curvatures_are_made_of_the_examples_that_are_decomposed(kind, monkeypatch):
    given = {"structure": "diag"} if kind is linnet.Laplace else {"inference": "laplace"}
    fitted = kind(network(), prior=0.3, **given).fit(X, LABELS)
    made, root = [], linnet.likelihoods.Categorical.root
    fit = build.gather_fit(fitted, X, LABELS)
    monkeypatch.setattr(linnet.likelihoods.Categorical, "root", lambda self, f: made.append(len(f)) or root(self, f))
    diagnostics.compute_influence(fit, fitted.lin_.jacobian(Z))
    diagnostics.compute_spectrum(fit, rows=8 * C)
    assert made == [8]


def test_weights_belong_to_the_data_of_the_fit():
    weights = torch.linspace(0.5, 2, N, dtype=torch.float64)
    clf = linnet.TangentClassifier(network(), inference="laplace", prior=0.3).fit(X, LABELS, sample_weight=weights)
    whole = build.gather_fit(clf, X, LABELS)
    residual = F.one_hot(LABELS, C) - clf.predict_logits(X)[0].softmax(1)
    torch.testing.assert_close(whole.residual, weights[:, None] * residual, rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match=r"fitted to 14 examples with weights .* of their own, and there are 5 inputs"):
        build.gather_fit(clf, X[:5], LABELS[:5])


@pytest.mark.parametrize("noise", [0.1, torch.linspace(0.1, 0.4, N, dtype=torch.float64)])
@pytest.mark.parametrize("weighted", [False, True])
def test_residuals_of_numbers_are_in_the_units_of_their_own_noise(noise, weighted):
    y = X[:, 0].sin()
    weights = torch.linspace(0.5, 2, N, dtype=torch.float64) if weighted else torch.ones(N, dtype=torch.float64)
    reg = linnet.TangentRegressor(network(1), prior=0.5, noise=noise).fit(X, y, weights if weighted else None)
    fit, precision = build.gather_fit(reg, X, y), weights / noise
    torch.testing.assert_close(fit.residual[:, 0], precision * (y - reg.predict(X)), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fit.root(torch.tensor([3, 1])), precision[[3, 1]].sqrt(), rtol=1e-9, atol=0)


def test_examples_are_evenly_spaced():
    assert build._space(1000, 5).tolist() == [0, 249, 499, 749, 999]
    assert build._space(3, 5).tolist() == [0, 1, 2]


def test_spectrum_in_units_of_the_noise():
    y = X[:, :2]
    reg = linnet.TangentRegressor(network(2), prior=0.5, noise=[0.1, 0.4]).fit(X, y)
    values, _ = diagnostics.compute_spectrum(build.gather_fit(reg, X, y))
    root = torch.tensor([0.1, 0.4], dtype=torch.float64).rsqrt().repeat(N)
    K = reg.lin_.jacobian(X).gram(scale=reg.prior_variance_)
    wanted = torch.linalg.eigvalsh(root[:, None] * K * root).flip(0)
    np.testing.assert_allclose(values, wanted.clamp_min(0), rtol=1e-9, atol=1e-9)


def test_what_is_no_estimator():
    with pytest.raises(TypeError, match="A fitted TangentRegressor, TangentClassifier or Laplace is needed"):
        build.gather_fit(network(), X, LABELS)


def test_linearity_of_weights_drawn_from_a_posterior():
    model = network()
    la = linnet.Laplace(model, structure="full", prior=0.05).fit(X, LABELS)
    found = la.linearity(Z, 3, seed=4)
    draws = la.posterior_.draw(3, generator=torch.Generator().manual_seed(4))
    J = la.lin_.jacobian(Z)
    for one, z in zip(found, draws.T, strict=True):
        torch.testing.assert_close(one.before, model(Z), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(one.linear, model(Z) + (J @ z).view(M, C), rtol=1e-9, atol=1e-12)
        moved = {k: t + la.lin_.layout.unflatten(z)[k] for k, t in model.named_parameters()}
        torch.testing.assert_close(one.network, functional_call(model, moved, (Z,)), rtol=1e-9, atol=1e-12)
        assert one.relative_error > 0
    last = linnet.Laplace(model, structure="full", prior=0.05, params="2.*").fit(X, LABELS)
    assert all(one.relative_error < 1e-12 for one in last.linearity(Z, 2))
    with pytest.raises(ValueError, match="k is a number of samples and must be positive; got 0"):
        la.linearity(Z, 0)


def test_the_classifier_keeps_the_path_of_its_evidence():
    clf = linnet.TangentClassifier(network(), inference="laplace", prior="shared").fit(X, LABELS)
    path = clf.evidence_path_
    assert len(path) >= 1 and list(path) == sorted(path) and path[-1] <= clf.log_evidence_ + 1e-6
    assert classifier().evidence_path_ == ()
