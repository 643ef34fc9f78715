"""Laplace in weight space where its features are too many to search on: one Hessian, at a mode found by products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.inference import SolverSettings, any_likelihood, choose_likelihood_solver, problem
from linnet.inference.mode import newton
from linnet.inference.problem import searches_all_features
from tests.support.drawn import double, normal

CPU = torch.device("cpu")


def task(outputs: int, n: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    X = normal(n, 3)
    y = (X[:, 0] > 0).long() + (0 if outputs == 1 else (X[:, 1] > 0.5).long())
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))), X, y


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("prior", ["shared", "layerwise"])
def test_it_is_the_posterior_of_dense_features(outputs: int, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = task(outputs)
    with monkeypatch.context() as patch:
        patch.setattr(problem, "SEARCHED", 1e9)
        patch.setattr(any_likelihood, "SUBSET_ROWS", 60)
        patch.setattr(any_likelihood, "_goal", lambda settings: 1e-11)
        clf = linnet.TangentClassifier(model, inference="laplace", prior=prior).fit(X, y)
    assert (clf.solver_, clf.scale_examples_, clf.log_evidence_error_) == ("weight", 60 // outputs, 0.0)
    J = clf.lin_.jacobian(X)
    Phi = J.scaled(clf.prior_variance_.sqrt()).dense()
    exact = newton.weight_space(
        Phi, clf._encode(y.numpy(), J, None), mean=J.outputs(), likelihood=clf.likelihood_, tolerance=1e-11
    )
    assert clf.log_evidence_ == pytest.approx(exact.log_evidence, rel=1e-8)
    torch.testing.assert_close(clf.mode_.f, exact.f, rtol=1e-6, atol=1e-6)
    new = normal(10, 3, seed=5)
    features = clf.lin_.jacobian(new).scaled(clf.prior_variance_.sqrt()).dense()
    assert exact.factor is not None
    expected = features @ torch.cholesky_solve(features.T, exact.factor)
    _, covariance = clf.predict_logits(new)
    blocks = expected.view(10, outputs, 10, outputs)[torch.arange(10), :, torch.arange(10)]
    torch.testing.assert_close(covariance, blocks, rtol=1e-6, atol=1e-7)


def test_which_solver_serves() -> None:
    def chosen(rows: int, p: int, inference: str, **given: object) -> str:
        return choose_likelihood_solver(rows, p, SolverSettings(**given), device=CPU, kernels=2, inference=inference)  # type: ignore[arg-type]

    memory = {"memory": 16e9}
    assert chosen(1_000, 5_000, "laplace", **memory) == "function"
    assert chosen(30_000, 800, "vi", **memory) == "weight"
    assert chosen(30_000, 4_000, "laplace", **memory) == "weight"
    assert not searches_all_features(30_000, 4_000, CPU) and searches_all_features(30_000, 800, CPU)
    for inference in ("map", "vi"):  # these need no covariance of weights
        assert chosen(30_000, 4_000, inference, **memory) == "cg-weight"
    assert chosen(30_000, 100_000, "laplace", **memory) == "cg-weight"
    assert chosen(30_000, 4_000, "laplace", memory=1e6) == "cg-weight"
    assert chosen(30_000, 4_000, "laplace", solver="cg-weight") == "cg-weight"
    with pytest.raises(ValueError, match="got solver='cg-function'"):
        chosen(10, 10, "map", solver="cg-function")
