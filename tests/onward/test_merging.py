"""Merged posteriors against one fit of all data and against dense algebra; files without data; errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor
from linnet.probability import DiagonalPrecision, precision_of
from tests.support.drawn import check_close, double, normal
from tests.support.laplace_cases import CLASSES, NEW, NUMBERS, X

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

PARTS = [slice(0, 7), slice(7, 16), slice(16, 24)]
STRUCTURES = ["full", "diag", "lowrank", "kron", "ekfac"]


def net(outputs: int, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, outputs)), seed)


def regressor(model: nn.Module, part: slice = slice(None), **options: Any) -> TangentRegressor:
    how: dict[str, Any] = {"prior": 0.4, "noise": 0.2, "mean": "network", **options}
    return TangentRegressor(model, **how).fit(X[part], NUMBERS[part])


def classifier(model: nn.Module, part: slice = slice(None), **options: Any) -> TangentClassifier:
    how: dict[str, Any] = {"prior": 0.4, "mean": "network", "inference": "laplace", **options}
    return TangentClassifier(model, **how).fit(X[part], CLASSES[part])


def laplace_of_words(classes: list[str]) -> Laplace:
    return Laplace(net(3, 1), structure="diag", prior=0.4, classes=classes).fit(X, np.array(classes)[CLASSES])


def laplace(model: nn.Module, structure: Any, part: slice = slice(None), **options: Any) -> Laplace:
    return Laplace(model, structure=structure, rank=100, **{"prior": 0.4, **options}).fit(X[part], CLASSES[part])


@pytest.mark.parametrize("solver", ["weight", "function"])
@pytest.mark.parametrize("from_files", [False, True])
def test_merged_regressors_are_the_regressor_of_all_data(solver: str, from_files: bool, tmp_path: Path) -> None:
    model = net(2)
    parts = [regressor(model, part, solver=solver) for part in PARTS]
    if from_files:
        for i, part in enumerate(parts):
            linnet.merge([part]).save(tmp_path / str(i))
        parts = [linnet.load(tmp_path / str(i), model) for i in range(len(parts))]
    merged, whole = linnet.merge(parts), regressor(model, solver=solver)
    for a, b in zip(merged.predict(NEW, return_cov=True), whole.predict(NEW, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(merged.log_evidence_, whole.log_evidence_, rtol=1e-9, atol=0.0)
    check_close(merged.predict(NEW, return_std=True, noise=True)[1], whole.predict(NEW, return_std=True, noise=True)[1])
    check_close(torch.cat([t.flatten() for t in merged.delta_.values()]), whole.posterior_.delta)
    # Files, and what goes on.
    merged.save(tmp_path / "merged")
    loaded = linnet.load(tmp_path / "merged", model)
    more = [one.condition(NEW, normal(6, 2)) for one in (merged, loaded, whole)]
    for one in more[:2]:
        torch.testing.assert_close(one.predict(X), more[2].predict(X), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(one.log_evidence_, more[2].log_evidence_, rtol=1e-9, atol=0.0)
    more[0].save(tmp_path / "more")
    check_close(
        linnet.load(tmp_path / "more", model).condition(NEW, NEW[:, :2]).predict(X),
        more[0].condition(NEW, NEW[:, :2]).predict(X),
    )
    for ask, what in [
        (lambda: loaded.loo_, "loo_"),
        (lambda: loaded.influence(X), "influence"),
        (lambda: loaded.path(X, 1.0), "path"),
    ]:
        with pytest.raises(ValueError, match=f"{what} needs the training data, and an estimator of linnet.merge holds"):
            ask()
    check_close(merged.refit(X, NUMBERS).predict(NEW), whole.predict(NEW))
    assert merged.refit(X, NUMBERS).loo_.mean.shape == (24, 2)


@pytest.mark.parametrize("inference", ["laplace", "vi"])
def test_merged_classifiers_add_the_precisions_of_their_parts(inference: str, tmp_path: Path) -> None:
    model = net(3)
    parts = [classifier(model, part, inference=inference) for part in PARTS]
    merged = linnet.merge(parts)
    precisions = [precision_of(one.posterior_).dense() for one in parts]
    eye = torch.eye(len(precisions[0])).double() / 0.4
    P = sum(precisions) - 2 * eye
    mean = torch.linalg.solve(P, sum(H @ one.posterior_.delta for H, one in zip(precisions, parts, strict=True)))
    torch.testing.assert_close(merged.posterior_.delta, mean, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(precision_of(merged.posterior_).dense(), P, rtol=1e-9, atol=1e-9)
    assert torch.equal(merged.predict(NEW), torch.as_tensor(merged.predict_proba(NEW)).argmax(1))
    merged.save(tmp_path / "file")
    loaded = linnet.load(tmp_path / "file", model)
    check_close(loaded.predict_proba(NEW), merged.predict_proba(NEW))
    assert loaded.merged_ and torch.equal(loaded.predict(NEW), merged.predict(NEW))


def test_counts_and_a_part_of_the_parameters() -> None:
    model, y = net(1), torch.arange(24) % 4
    how: dict[str, Any] = {"likelihood": "poisson", "prior": 0.4, "params": "3.*", "inference": "laplace"}
    parts = [TangentGLM(model, **how).fit(X[part], y[part]) for part in PARTS[:2]]
    merged = linnet.merge(parts)
    P = sum(precision_of(one.posterior_).dense() for one in parts) - torch.eye(5).double() / 0.4
    torch.testing.assert_close(precision_of(merged.posterior_).dense(), P, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_merged_approximations_are_around_the_weighted_average_of_the_weights(structure: str, tmp_path: Path) -> None:
    parts = [laplace(net(3, seed), structure, part) for seed, part in enumerate(PARTS)]
    merged = linnet.merge(parts)
    precisions = [precision_of(one.posterior_).dense() for one in parts]
    eye = torch.eye(len(precisions[0])).double() / 0.4
    exact = sum(precisions) - 2 * eye
    theta = torch.linalg.solve(exact, sum(H @ one.theta_ for H, one in zip(precisions, parts, strict=True)))
    torch.testing.assert_close(merged.theta_, theta, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(merged.lin_.flat_theta, theta, rtol=1e-8, atol=1e-9)
    P = precision_of(merged.posterior_).dense()
    if structure in ("kron", "ekfac"):
        torch.testing.assert_close(P.trace(), exact.trace(), rtol=1e-9, atol=0.0)
    else:
        torch.testing.assert_close(P, exact, rtol=1e-9, atol=1e-9)
        log_dets = (
            sum(float(torch.logdet(H)) for H in precisions) - 2 * float(torch.logdet(eye)) - float(torch.logdet(P))
        )
        inner = sum(float(one.theta_ @ H @ one.theta_) for H, one in zip(precisions, parts, strict=True)) - float(
            theta @ P @ theta
        )
        expected = sum(one.log_evidence() for one in parts) + 0.5 * (log_dets - inner)
        torch.testing.assert_close(merged.log_evidence(), expected, rtol=1e-9, atol=0.0)
    check_close(merged.effective_dimension_, len(P) - float(torch.linalg.inv(P).trace()) / 0.4)
    merged.save(tmp_path / "file")
    loaded = linnet.load(tmp_path / "file", merged.model)
    check_close(loaded.predict_proba(NEW), merged.predict_proba(NEW))
    assert np.isnan(loaded.gradient_norm_) and loaded.log_evidence() == merged.log_evidence()
    with pytest.raises(ValueError, match="tune needs the training data"):
        merged.tune()
    # The user's networks are untouched, and the result can be carried on.
    assert all(torch.equal(one.theta_, one.lin_.flat_theta) for one in parts)
    assert np.isfinite(laplace(merged.model, structure, PARTS[0], prior=merged).log_evidence())


def test_the_evidence_of_merged_approximations_of_one_linear_network_is_that_of_all_data() -> None:
    model, y = double(nn.Linear(3, 1), 0), normal(24, seed=3)

    def fit(part: slice) -> Laplace:
        mode = copy.deepcopy(model)  # the mode of its own data and the prior
        Z = torch.cat([X[part], torch.ones(len(X[part]), 1).double()], 1)
        w = torch.linalg.solve(Z.T @ Z / 0.3 + torch.eye(4).double() / 0.4, Z.T @ y[part] / 0.3)
        with torch.no_grad():
            mode.weight.copy_(w[None, :3])
            mode.bias.copy_(w[3:])
        return Laplace(mode, "regression", "full", 0.4, noise=0.3).fit(X[part], y[part])

    merged, whole = linnet.merge([fit(part) for part in PARTS]), fit(slice(None))
    torch.testing.assert_close(merged.theta_, whole.theta_, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(merged.log_evidence(), whole.log_evidence(), rtol=1e-9, atol=0.0)
    check_close(merged.predict(NEW, return_std=True, noise=True)[1], whole.predict(NEW, return_std=True, noise=True)[1])


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])
def test_a_shared_earlier_posterior_is_divided_out(structure: str, tmp_path: Path) -> None:
    earlier = laplace(net(3, 0), structure, PARTS[0])
    parts = [laplace(net(3, seed), structure, PARTS[seed], prior=earlier) for seed in (1, 2)]
    merged = linnet.merge(parts)
    A, H = precision_of(earlier.posterior_).dense(), [precision_of(one.posterior_).dense() for one in parts]
    P = sum(H) - A
    rhs = sum(M @ one.theta_ for M, one in zip(H, parts, strict=True)) - A @ earlier.theta_
    torch.testing.assert_close(precision_of(merged.posterior_).dense(), P, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.theta_, torch.linalg.solve(P, rhs), rtol=1e-8, atol=1e-9)
    for i, part in enumerate(parts):
        part.save(tmp_path / str(i))
    again = linnet.merge([linnet.load(tmp_path / str(i), part.model) for i, part in enumerate(parts)])
    torch.testing.assert_close(again.theta_, merged.theta_, rtol=1e-9, atol=1e-11)
    other = laplace(net(3, 0), structure, PARTS[1])
    with pytest.raises(ValueError, match="0 and 1 have other priors: both need the same earlier posterior"):
        linnet.merge([parts[0], laplace(net(3, 2), structure, PARTS[2], prior=other)])
    with pytest.raises(ValueError, match="0 and 1 have other priors: both need the same earlier posterior"):
        linnet.merge([parts[0], earlier])


def test_equal_precisions_give_the_average_of_the_weights() -> None:
    fits = [laplace(net(3, 0), "diag"), laplace(net(3, 1), "diag")]
    variances = fits[0].posterior_.D
    fits[1].posterior_ = linnet.probability.DiagonalPosterior(torch.zeros_like(fits[1].theta_), variances)
    # Without a prior there is nothing to divide out: here it is next to nothing.
    for one in fits:
        one.prior_variance_ = torch.full_like(one.theta_, 1e14)
    merged = linnet.merge(fits)
    torch.testing.assert_close(merged.theta_, (fits[0].theta_ + fits[1].theta_) / 2, rtol=1e-9, atol=1e-9)


def test_a_merged_file_holds_no_data(tmp_path: Path) -> None:
    model, classes = net(2), net(3)
    for i, one in enumerate(
        [regressor(model, PARTS[0], solver="weight"), classifier(classes, PARTS[0]), laplace(classes, "kron", PARTS[0])]
    ):
        linnet.merge([one]).save(tmp_path / str(i))
        with safe_open(tmp_path / str(i), "pt") as file:
            names = set(file.keys())
            text = json.dumps(file.metadata())
            for name in names:
                found: Tensor = file.get_tensor(name)
                assert found.numel() == 0 or name.startswith(
                    ("posterior.", "rotation.", "prior_variance", "own.level")
                ), name
        for setting in ("n_features_in", '\\"inputs\\": null', '\\"inputs\\": []', '\\"inputs\\": \\"auto\\"'):
            text = text.replace(setting, "")
        assert "inputs" not in text


def test_networks_in_single_precision() -> None:
    model = net(2).float()
    parts = [regressor(model, part, dtype="float32") for part in PARTS[:2]]
    whole = regressor(model, slice(0, 16), dtype="float32")
    torch.testing.assert_close(linnet.merge(parts).predict(NEW), whole.predict(NEW), rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    model = net(2)
    one = regressor(model, PARTS[0])
    classes = classifier(net(3), PARTS[0])

    def refused(match: str, *others: Any, first: Any = one, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=match):
            linnet.merge([first, *others])

    with pytest.raises(ValueError, match="takes a list of fitted estimators; got a TangentRegressor"):
        linnet.merge(one)
    with pytest.raises(ValueError, match="takes a list of fitted estimators"):
        linnet.merge([])
    refused("estimators of one class: .*; got TangentClassifier, TangentRegressor", classes, kind=TypeError)
    refused("got FisherEmbedding", first=linnet.FisherEmbedding(model, 1).fit(X), kind=TypeError)
    refused("0 and 1 are around other weights: their networks have the checksums", regressor(net(2, 1), PARTS[1]))
    refused(
        "0 and 1 have other priors: their smallest prior variances are 0.4 and 0.5",
        regressor(model, PARTS[1], prior=0.5),
    )
    refused(
        "posteriors over other parameters: they differ in 0.bias, 0.weight", regressor(model, PARTS[1], params="3.*")
    )
    refused("0 and 1 have other likelihoods: noise=0.2 and noise=0.3", regressor(model, PARTS[1], noise=0.3))
    refused("have the mean functions 'network' and 'zero'", regressor(model, PARTS[1], mean="zero"))
    refused("does not know its precision", regressor(model, PARTS[1], solver="cg-weight"), kind=NotImplementedError)
    average = regressor(model, PARTS[1], prior="shared", noise="evidence")
    refused("is an average over prior scales and noises.*average=False", average, first=average)
    source = TangentRegressor(model, prior=0.4, noise=0.2).fit(X[:5], NUMBERS[:5], source=(X[5:], NUMBERS[5:]))
    refused("1 has seen source data", source, first=regressor(model, PARTS[0], mean="zero"), kind=NotImplementedError)
    ensemble = TangentRegressor([model, net(2, 1)], prior=0.4, noise=0.2, mean="network").fit(X, NUMBERS)
    refused("is an ensemble.* Merge its members_", ensemble, kind=NotImplementedError)
    refused(
        "around other weights: their networks have the checksums None",
        first=TangentRegressor(prior=0.4, noise=0.2).fit(X, NUMBERS),
    )
    la, other = (laplace(net(3, seed), "diag") for seed in (0, 1))
    refused("other labels for the same outputs: .*'a', 'b', 'c'", laplace_of_words(["a", "b", "c"]), first=la)
    refused("other labels for the same", laplace_of_words(["b", "a", "c"]), first=laplace_of_words(["a", "b", "c"]))
    refused("0 and 1 have other priors: their smallest", laplace(net(3, 1), "diag", prior=1.0), first=la)
    refused("likelihoods", Laplace(net(3, 1), "regression", "diag", 0.4, noise=1.0).fit(X, normal(24, 3)), first=la)
    head, moved = (laplace(net(3, seed), "diag", params="3.*") for seed in (0, 1))
    refused("0 and 1 have other weights outside the parameters of the posterior: 0.bias, 0.weight", moved, first=head)
    refused("posteriors over other parameters", head, first=other)
    refused("does not know its precision", laplace(net(3, 1), "samples"), first=la, kind=NotImplementedError)


def test_a_quotient_that_is_no_gaussian_is_refused() -> None:
    from linnet.onward.merging import multiply

    zeros, one = torch.zeros(3).double(), DiagonalPrecision(torch.ones(3).double())
    with pytest.raises(ArithmeticError, match="not positive definite: its smallest eigenvalue is -1"):
        multiply([zeros, zeros], [one, one], (zeros, DiagonalPrecision(3 * torch.ones(3).double())))
