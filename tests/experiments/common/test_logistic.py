"""Logistic regression on tensors against scikit-learn's, and probes on a kernel as a probe on its features."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import linnet
from experiments.common import logistic
from experiments.common.logistic import fit_logistic
from linnet.fisher import kernel_features
from tests.support.drawn import normal


def problem(n=60, d=5, classes=3):
    y = torch.arange(n) % classes
    return normal(n, d) + 2 * normal(classes, d, seed=1)[y], y


@pytest.mark.parametrize("standardize", [True, False])
def test_it_is_scikit_learns(standardize):
    E, y = problem()
    found = fit_logistic(E, y, penalty=0.3, standardize=standardize)
    Z = (E - E.mean(0)) / (E.std(0, correction=0) if standardize else (E - E.mean(0)).square().mean().sqrt())
    assert found.penalty == pytest.approx(0.3 * float(Z.square().sum(1).mean()))
    other = LogisticRegression(C=1 / found.penalty, tol=1e-10, max_iter=5000).fit(Z.numpy(), y.numpy())
    # Both have weights that add up to zero over the classes; biases are free to move together.
    bias = found.bias - found.bias.mean()
    torch.testing.assert_close(found.weight, torch.as_tensor(other.coef_), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(bias, torch.as_tensor(other.intercept_ - other.intercept_.mean()), rtol=1e-2, atol=1e-3)
    assert bool((found.predict(E) == torch.as_tensor(other.predict(Z.numpy()))).all())
    assert float(found.right(E, y).double().mean()) == pytest.approx(other.score(Z.numpy(), y.numpy()))


def test_the_penalty_is_chosen_by_held_out_examples():
    E, y = problem(200, 3, 2)
    noise = normal(200, 150, seed=5)  # says nothing, and a weak penalty believes it
    E = torch.cat([0.3 * E, noise], 1)
    found = fit_logistic(E, y, penalty=(1e-6, 1.0))
    assert found.penalty > 1 and 0.5 < found.held_out <= 1
    again = fit_logistic(E, y, penalty=(1.0, 1e-6))
    torch.testing.assert_close(found.weight, again.weight)


def test_constant_features_count_for_nothing():
    E, y = problem()
    with_constant = torch.cat([E, torch.ones(len(E), 1)], 1)
    a, b = fit_logistic(E, y, penalty=1.0), fit_logistic(with_constant, y, penalty=1.0)
    torch.testing.assert_close(a.logits(E), b.logits(with_constant), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("E", "y", "match"),
    [
        (normal(4, 2), [0, 1, 0], r"got \(4, 2\) and \(3,\)"),
        (normal(4, 2), [0.0, 1.0, 0.0, 1.0], "numbers from 0"),
        (normal(4, 2), [0, 0, 0, 0], "one only"),
        (torch.ones(4, 2), [0, 1, 0, 1], "all the same"),
    ],
)
def test_what_cannot_be_fitted(E, y, match):
    with pytest.raises(ValueError, match=match):
        fit_logistic(E, y)


def test_what_does_not_converge_raises(monkeypatch):
    monkeypatch.setattr(logistic, "ITERATIONS", 2)
    with pytest.raises(RuntimeError, match="did not converge in 2 iterations"):
        fit_logistic(*problem(), penalty=1e-3)


# The kernel as features.


def test_a_probe_on_the_kernel_is_one_on_all_fisher_scores():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, new = normal(30, 3), normal(7, 3, seed=2)
    emb = linnet.FisherEmbedding(model, 5, progress=False).fit(X)
    V, W = (emb.statistics_.vectors(emb.lin_.jacobian(x, progress=False)).dense() for x in (X, new))
    torch.testing.assert_close(emb.gram(X), V @ V.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(emb.gram(new, X), W @ V.T, rtol=1e-9, atol=1e-9)
    assert emb.gram(new.numpy(), X.numpy()).shape == (7, 30)
    E, F = kernel_features(emb.gram(X), emb.gram(new, X))
    torch.testing.assert_close(E @ E.T, V @ V.T, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(F @ E.T, W @ V.T, rtol=1e-8, atol=1e-8)
    # The embedding is the first of its columns, up to sign.
    torch.testing.assert_close(E[:, :5].abs(), emb.transform(X).abs(), rtol=1e-6, atol=1e-6)
    y = torch.arange(30) % 2
    a = fit_logistic(E, y, penalty=0.1, standardize=False)
    b = fit_logistic(V, y, penalty=0.1, standardize=False)
    torch.testing.assert_close(a.logits(F), b.logits(W), rtol=1e-2, atol=1e-3)


def test_kernels_of_other_shapes():
    K = torch.eye(3)
    assert kernel_features(torch.zeros(3, 3) + 1.0)[0].shape == (3, 1)
    with pytest.raises(ValueError, match=r"others \(m, n\); got \[\(3, 3\), \(2, 4\)\]"):
        kernel_features(K, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"kernel \(n, n\)"):
        kernel_features(torch.zeros(3, 2))
