"""How unsure classifiers are of inputs, against formulas from dense covariances; ensembles, saved files, errors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import Laplace, TangentClassifier
from linnet.likelihoods import Bernoulli
from linnet.probability import UncertaintyScore
from tests.support import laplace_cases
from tests.support.drawn import double, normal

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

AT = normal(9, 3, seed=3)
X, CLASSES = laplace_cases.X, laplace_cases.CLASSES
SCORES = get_args(UncertaintyScore)


def net(outputs: int, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), seed)


@cache
def find(name: str) -> Any:
    if name.startswith("softmax"):
        structure = name.removeprefix("softmax, ")
        options = {"samples": {"tolerance": 1e-8}, "lowrank": {"rank": 12}, "subnetwork": {"size": 9}}
        return laplace_cases.fitted("softmax", structure, **options.get(structure, {}))[0]
    labels = torch.stack([CLASSES > 0, CLASSES > 1], 1).double()
    made = {
        "vi": lambda: TangentClassifier(net(3), prior=0.5).fit(X, CLASSES),
        "laplace": lambda: TangentClassifier(net(3), inference="laplace", prior=0.5).fit(X, CLASSES),
        "variance from samples": lambda: TangentClassifier(
            net(3), inference="laplace", prior=0.5, variance="samples"
        ).fit(X, CLASSES),
        "one logit": lambda: TangentClassifier(net(1), inference="laplace", prior=0.5).fit(X, CLASSES > 0),
        "labels": lambda: TangentClassifier(net(2), inference="laplace", prior=0.5).fit(X, labels),
    }
    return made[name]()


def moments(estimator: Any) -> tuple[Tensor, Tensor]:
    """Means of the outputs at AT, and their covariances (n, c, c), from the joint covariance."""
    J = estimator.lin_.jacobian(AT)
    mean = J.outputs() + (J @ estimator.posterior_.delta).view(J.n, J.c)
    C = estimator._error_bars.covariance(J).view(J.n, J.c, J.n, J.c)
    return mean, torch.stack([C[i, :, i] for i in range(J.n)])


def average(estimator: Any, f: Tensor, C: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Averaged probabilities and the average entropy: on a fine grid, or with the estimator's draws."""
    if isinstance(estimator.likelihood_, Bernoulli):
        z = torch.linspace(-9, 9, 20001, dtype=torch.float64)[:, None, None]
        w = torch.exp(-0.5 * z**2)
        p = torch.sigmoid(f + z * C.diagonal(dim1=1, dim2=2).sqrt())
        w = w / w.sum()
        entropies = torch.special.entr(p) + torch.special.entr(1 - p)
        return (w * p).sum(0), (w * entropies).sum((0, 2))
    generator = torch.Generator().manual_seed(estimator.seed)
    if estimator.variance_ == "samples":  # draws go along the columns of the factor
        T = estimator._error_bars.predict(estimator.lin_.jacobian(AT), "factor").spread.T
    else:
        U, s, _ = torch.linalg.svd(C)
        T = U @ torch.diag_embed(s.sqrt()) @ U.mT
    half = torch.randn(draws // 2, T.shape[-1], dtype=torch.float64, generator=generator)
    p = torch.stack([f + T @ eps for eps in torch.cat([half, -half])]).softmax(-1)
    return p.mean(0), -(p * p.log()).sum(-1).mean(0)


def expected(estimator: Any, score: str, draws: int) -> Tensor:
    f, C = moments(estimator)
    p, inner = average(estimator, f, C, draws)
    labels = isinstance(estimator.likelihood_, Bernoulli)
    outer = -(p * p.log()).sum(1) - (((1 - p) * (1 - p).log()).sum(1) if labels else 0)
    found = {"entropy": outer, "expected_entropy": inner, "mutual_information": outer - inner}
    found["energy"] = -f.exp().sum(1).log()
    found["max_probability"] = 1 - (torch.maximum(p, 1 - p).prod(1) if labels else p.max(1).values)
    c = f.shape[1]
    center = torch.eye(c, dtype=f.dtype) - (0 if labels else 1 / c)
    g, v = f @ center, (center @ C @ center).diagonal(dim1=1, dim2=2)
    found["moderated_energy"] = -(g / (1 + torch.pi / 8 * v).sqrt()).exp().sum(1).log()
    if labels:  # of the classes on and off of each label, whose logits add up to zero
        both = torch.stack([f / 2, -f / 2]) / (1 + torch.pi / 8 * v / 4).sqrt()
        found["moderated_energy"] = -both.exp().sum(0).log().sum(1)
    share = v / (v + g**2)
    found["relative_variance"] = share.mean(1) if labels else share[torch.arange(len(f)), f.argmax(1)]
    return found[score]


STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]
NAMES = [*(f"softmax, {s}" for s in STRUCTURES), "vi", "laplace", "variance from samples", "one logit", "labels"]


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_dense_covariances(name: str) -> None:
    estimator = find(name)
    scores = [s for s in SCORES if s != "energy" or not isinstance(estimator.likelihood_, Bernoulli)]
    together = estimator.uncertainty(AT, scores, draws=64)
    assert torch.equal(together[scores[0]], estimator.uncertainty(AT, scores[0], draws=64))
    for score in scores:
        found = together[score]
        torch.testing.assert_close(found, expected(estimator, score, 64), rtol=1e-9, atol=1e-11, msg=score)


def test_a_mixture_averages_probabilities_entropies_and_second_moments() -> None:
    weights = [0.25, 0.75]
    clf = TangentClassifier([net(3, 0), net(3, 1)], inference="laplace", prior=0.5, weights=weights).fit(X, CLASSES)
    parts = [(*moments(one), one) for one in clf.members_]
    averages = [average(one, f, C, 1000) for f, C, one in parts]
    p = sum(w * q for w, (q, _) in zip(weights, averages, strict=True))
    inner = sum(w * e for w, (_, e) in zip(weights, averages, strict=True))
    outer = -(p * p.log()).sum(1)
    torch.testing.assert_close(clf.uncertainty(AT, "mutual_information"), outer - inner, rtol=1e-9, atol=1e-11)
    mean = sum(w * f for w, (f, _, _) in zip(weights, parts, strict=True))
    second = sum(w * (C + f[:, :, None] * f[:, None]) for w, (f, C, _) in zip(weights, parts, strict=True))
    total = second - mean[:, :, None] * mean[:, None]
    center = torch.eye(3, dtype=mean.dtype) - 1 / 3
    i, k = torch.arange(len(AT)), mean.argmax(1)
    v, g = (center @ total @ center)[i, k, k], (mean @ center)[i, k]
    found = clf.uncertainty(AT, ["relative_variance", "energy", "moderated_energy"])
    torch.testing.assert_close(found["relative_variance"], v / (v + g**2), rtol=1e-9, atol=1e-11)
    moderated = mean @ center / (1 + torch.pi / 8 * (center @ total @ center).diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(found["moderated_energy"], -moderated.logsumexp(1), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found["energy"], -mean.logsumexp(1), rtol=1e-9, atol=1e-11)


def test_one_implementation_serves_bald() -> None:
    la = find("softmax, full")
    chosen = linnet.select(la, AT, len(AT), "bald", seed=la.seed)
    found = la.uncertainty(AT, "mutual_information", draws=128)
    torch.testing.assert_close(chosen.scores, found[chosen.indices], rtol=1e-9, atol=1e-12)


def test_scores_survive_a_file_and_come_as_the_inputs_do(tmp_path: Path) -> None:
    clf = find("laplace")
    clf.save(tmp_path / "one")
    for score in SCORES:
        torch.testing.assert_close(
            linnet.load(tmp_path / "one", net(3)).uncertainty(AT, score), clf.uncertainty(AT, score)
        )
    assert isinstance(clf.uncertainty(AT.numpy()), np.ndarray)


def test_ordered_classes_have_the_scores_of_probabilities() -> None:
    clf = TangentClassifier(net(1), inference="laplace", likelihood="ordinal", prior=0.5).fit(X, CLASSES)
    p = clf.predict_proba(AT)
    torch.testing.assert_close(clf.uncertainty(AT, "max_probability"), 1 - p.amax(1), rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="is for classes with a logit each"):
        clf.uncertainty(AT, "relative_variance")


def test_errors() -> None:
    clf, y = TangentClassifier(net(3), inference="map", prior=0.5).fit(X, CLASSES), laplace_cases.NUMBERS[:, 0]
    with pytest.raises(ValueError, match="needs error bars, and this estimator has a mode alone"):
        clf.uncertainty(AT)
    torch.testing.assert_close(clf.uncertainty(AT, "max_probability"), 1 - clf.predict_proba(AT).amax(1))
    with pytest.raises(ValueError, match=r"score must be one of 'max_probability', .*; got 'variance'"):
        clf.uncertainty(AT, "variance")
    with pytest.raises(ValueError, match="draws must be a positive number; got 0"):
        clf.uncertainty(AT, "entropy", draws=0)
    la = Laplace(net(1), "regression", prior=0.5, noise=0.1).fit(X, y)
    with pytest.raises(ValueError, match="uncertainty is for classes"):
        la.uncertainty(AT)
    sites = double(nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))), 0)
    labels = torch.stack([CLASSES > 0, CLASSES > 1], 1).long()
    with pytest.raises(NotImplementedError, match="a label for each site"):
        Laplace(sites, prior=0.5).fit(X, labels).uncertainty(AT)
