"""Prior and noise of one task carried to another: against dense references, after files, for both estimators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import TangentClassifier, TangentRegressor, linearize
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal
from tests.support.reference import dense_posterior

SOLVERS = ["function", "weight", "cg-function", "cg-weight"]


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def task(model: nn.Module, n: int, seed: int) -> tuple[Tensor, Tensor]:
    X = normal(n, 3, seed=seed)
    J = linearize(model).jacobian(X)
    f = model(X).detach() + (J @ normal(J.shape[1], seed=seed + 1)).view(n, -1)
    return X, f + 0.3 * normal(*f.shape, seed=seed + 2)


# Regression.


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("prior", "noise"), [("balanced", "evidence"), ("layerwise", "per-output"), (0.5, [0.2, 0.4]), ("shared", 0.1)]
)
def test_hyperparameters_are_kept(prior: Any, noise: Any, solver: str) -> None:
    model = mlp(2)
    first = TangentRegressor(model, prior=prior, noise=noise).fit(*task(model, 30, 0))
    (X, y), Z = task(model, 12, 10), normal(4, 3, seed=20)
    # The iterative solvers cannot choose several hyperparameters, and need not here.
    new = first.set_params(solver=solver, tolerance=1e-8).refit(X, y)
    assert new is not first and new.solver_ == solver
    assert new.scales_ == first.scales_ and np.all(new.noise_ == np.asarray(first.noise_))
    rows = torch.as_tensor(np.asarray(first.noise_)).expand(2).repeat(12)
    r = (y - model(X).detach()).flatten()
    ref = dense_posterior(
        dense_jacobian(model, X), r, variance=first.prior_variance_, noise=rows, new=dense_jacobian(model, Z)
    )
    exact = solver in ("function", "weight")
    close = {"rtol": 1e-8, "atol": 1e-9} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(new.predict(Z), model(Z).detach() + ref.shift.view(4, 2), **close)
    assert new.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-8 if exact else 1e-4)


def test_the_first_fit_stays_as_it_is() -> None:
    model = mlp()
    X, y = task(model, 20, 0)
    first = TangentRegressor(model, average=False).fit(X, y)
    before, evidence = first.predict(X), first.log_evidence_
    new = first.refit(*task(model, 5, 10))
    torch.testing.assert_close(first.predict(X), before, rtol=0, atol=0)
    assert first.log_evidence_ == evidence and new.log_evidence_ != evidence
    again = new.refit(X, y)
    torch.testing.assert_close(again.predict(X), before, rtol=1e-9, atol=1e-9)
    assert again.log_evidence_ == pytest.approx(evidence, rel=1e-9)
    assert new.condition(X, y).loo_.mean.shape == (25, 1)


def test_scales_of_many_tasks_serve_one_more() -> None:
    model = mlp()
    first = TangentRegressor(model, noise_floor=1e-2).fit_tasks([task(model, 6, seed) for seed in (0, 10, 20)])
    X, y = task(model, 1, 30)
    new = first.refit(X, y[:, 0])  # one observation is enough where nothing is chosen
    assert new.noise_ == first.noise_ and new.noise_floored_ == first.noise_floored_
    assert not hasattr(new, "tasks_") and len(first.tasks_) == 3
    assert new.predict(X).shape == (1,)


def test_known_variances_are_those_of_the_new_inputs() -> None:
    model = mlp(2)
    X, Z = normal(15, 3), normal(6, 3, seed=1)
    out, new_out = model(X).detach(), model(Z).detach()
    first = TangentRegressor(model, noise="heteroscedastic", prior="shared", inputs=False).fit(
        X, out[:, :1] + normal(15, 1, seed=2)
    )
    y = new_out[:, :1] + normal(6, 1, seed=3)
    J = dense_jacobian(model, Z, output=lambda raw: raw[:, :1], names=dict(model.named_parameters()))
    rows = first.noise_ * new_out[:, 1].exp()
    ref = dense_posterior(J, (y - new_out[:, :1]).flatten(), variance=first.scales_["all"], noise=rows, new=J)
    new = first.refit(Z, y)
    torch.testing.assert_close(new.predict(Z), new_out[:, :1] + ref.shift[:, None], rtol=1e-8, atol=1e-9)
    assert new.noise_ == first.noise_


def test_without_a_network_of_ones_own() -> None:
    X, y = normal(20, 2).numpy(), normal(20, seed=1).numpy() + 5
    first = TangentRegressor(average=False).fit(X, y)
    again = first.refit(X, y)
    np.testing.assert_allclose(again.predict(X), first.predict(X), rtol=1e-8)
    with pytest.raises(ValueError, match="features"):
        first.refit(normal(4, 3).numpy(), normal(4).numpy())


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_after_a_file(solver: str, tmp_path: Path) -> None:
    model = mlp(2)
    first = TangentRegressor(model, noise="per-output", solver=solver).fit(*task(model, 20, 0))
    first.save(tmp_path / "scales.safetensors")
    X, y = task(model, 7, 10)
    wanted, found = first.refit(X, y), linnet.load(tmp_path / "scales.safetensors", model).refit(X, y)
    torch.testing.assert_close(found.predict(X), wanted.predict(X), rtol=1e-9, atol=1e-10)
    assert found.log_evidence_ == pytest.approx(wanted.log_evidence_, rel=1e-9)
    assert found.scales_ == first.scales_ and found.noise_.tolist() == first.noise_.tolist()
    assert found.condition(X, y).scales_ == first.scales_
    found.save(tmp_path / "again.safetensors")
    torch.testing.assert_close(
        linnet.load(tmp_path / "again.safetensors", model).predict(X), wanted.predict(X), rtol=1e-9, atol=1e-10
    )


def test_an_estimator_for_other_data_has_all_attributes() -> None:
    model = mlp(2)
    (X, y), new = task(model, 20, 0), task(model, 7, 10)
    first = TangentRegressor(model).fit(X.numpy(), y.numpy())
    classifier = TangentClassifier(model, inference="map").fit(X.numpy(), (y[:, 0] > y[:, 1]).long().numpy())
    assert set(vars(first)) == set(vars(first.refit(*new))) == set(vars(first.condition(*new)))
    assert set(vars(classifier)) == set(vars(classifier.refit(new[0], torch.arange(7) % 2)))
    several = TangentRegressor(model).fit_tasks([(X, y), new])
    assert not hasattr(several.refit(*new), "tasks_") and not hasattr(several.condition(*new), "tasks_")


def test_what_does_not_fit_is_refused() -> None:
    model = mlp(2)
    with pytest.raises(Exception, match="not fitted"):
        TangentRegressor(model).refit(*task(model, 5, 0))
    first = TangentRegressor(model).fit(*task(model, 20, 0))
    with pytest.raises(ValueError, match=r"2 outputs, so 5 examples need targets of shape \(5, 2\)"):
        first.refit(normal(5, 3), normal(5))
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(Exception, match="changed"):
        first.refit(normal(5, 3), normal(5, 2))


# Classification.


@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
def test_a_classifier_keeps_scales_and_classes(solver: str, inference: Any, tmp_path: Path) -> None:
    if solver == "cg-weight" and inference == "vi":
        pytest.skip("as for the dense solvers, and slow")
    model = mlp(3)
    X, Z = normal(30, 3), normal(9, 3, seed=5)
    names = np.array(["cat", "dog", "owl"])
    first = TangentClassifier(model, inference=inference).fit(X, names[(X[:, 0] > 0).int() + (X[:, 1] > 0).int()])
    y = names[(Z[:, 0] > 0).int()]  # two of the three
    given = TangentClassifier(
        model, inference=inference, prior=prior_of(first), solver=solver, classes=names, tolerance=1e-8
    ).fit(Z, y)
    new = first.set_params(solver=solver, tolerance=1e-8).refit(Z, y)
    torch.testing.assert_close(new.predict_proba(X), given.predict_proba(X), rtol=1e-5, atol=1e-6)
    assert new.scales_ == first.scales_ and new.classes_.tolist() == names.tolist()
    if new.log_evidence_ is None:
        assert solver == "cg-weight" and inference != "laplace" and given.log_evidence_ is None
    else:
        assert new.log_evidence_ == pytest.approx(given.log_evidence_, rel=1e-6)
    first.save(tmp_path / "first.safetensors")
    loaded = linnet.load(tmp_path / "first.safetensors", model).refit(Z, y)
    torch.testing.assert_close(loaded.predict_proba(X), new.predict_proba(X), rtol=1e-5, atol=1e-6)
    assert loaded.scales_ == first.scales_


def prior_of(fitted: TangentClassifier) -> dict[str, float]:
    """The prior variances, which are equal within each layer."""
    layout, variance = fitted.lin_.layout, fitted.prior_variance_
    return {name: float(variance[layout.slices[name]][0]) for name in layout.shapes}


def test_labels_must_be_known_and_of_the_same_kind() -> None:
    model = mlp(3)
    X = normal(20, 3)
    first = TangentClassifier(model).fit(X, torch.arange(20) % 3)
    assert first.refit(X[:4], torch.zeros(4, dtype=torch.long)).predict(X[:4]).shape == (4,)
    with pytest.raises(ValueError, match=r"Labels \[7\] are not among classes=\[0, 1, 2\]"):
        first.refit(X, torch.full((20,), 7))
    with pytest.raises(ValueError, match=r"labels as fit has seen them, \(20,\); got shape \(20, 3\)"):
        first.refit(X, torch.ones(20, 3))
    labels = (normal(20, 3, seed=4) > 0).long()
    several = TangentClassifier(model).fit(X, labels)
    assert several.refit(X[:5], labels[:5]).predict(X).shape == (20, 3)
    with pytest.raises(ValueError, match=r"labels as fit has seen them, \(20, 3\) of zeros and ones; got"):
        several.refit(X, labels[:, 0])
