"""Chosen examples and their scores against dense covariances, for every posterior; the pool, files, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor
from linnet.likelihoods import Bernoulli, Categorical, Ordinal
from linnet.onward import selection
from tests.support import laplace_cases
from tests.support.drawn import double, normal

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

POOL, TARGETS = normal(15, 3, seed=7), normal(4, 3, seed=8)
METHODS = ["variance", "bald", "batchbald", "bait", "epig"]
JOINT = [method for method in METHODS if method != "bald"]
STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]


def net(outputs: int) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)), 0)


X, CLASSES, NUMBERS = laplace_cases.X, laplace_cases.CLASSES, laplace_cases.NUMBERS
TANGENT: dict[str, Callable[[], Any]] = {
    "regressor": lambda: TangentRegressor(net(1), noise=0.3, prior=0.5).fit(X, NUMBERS[:, 0]),
    "regressor, weights": lambda: TangentRegressor(net(2), noise=[0.3, 0.1], prior=0.5, solver="weight").fit(
        X, NUMBERS
    ),
    "regressor without a network": lambda: TangentRegressor(noise=0.1, prior=0.01).fit(X, NUMBERS[:, 0]),
    "classifier": lambda: TangentClassifier(net(3), prior=0.5).fit(X, CLASSES),
    "classifier, laplace": lambda: TangentClassifier(net(3), inference="laplace", prior=0.5).fit(X, CLASSES),
    "one logit": lambda: TangentClassifier(net(1), inference="laplace", prior=0.5).fit(X, CLASSES > 0),
    "ordered": lambda: TangentClassifier(net(1), inference="laplace", likelihood="ordinal", prior=0.5).fit(X, CLASSES),
    "counts": lambda: TangentGLM(net(1), "poisson", prior=0.5).fit(X, CLASSES),
}


ESTIMATORS = [*TANGENT, *(f"softmax, {s}" for s in STRUCTURES), "numbers, kron", "labels, full", "log variances"]


@cache
def find(name: str) -> Any:
    case, _, structure = name.partition(", ")
    if name == "log variances":
        return laplace_cases.fitted(name, "full")[0]
    if case in ("softmax", "numbers", "labels"):
        options = {"samples": {"tolerance": 1e-8}, "lowrank": {"rank": 12}, "subnetwork": {"size": 9}}
        return laplace_cases.fitted(case, structure, **options.get(structure, {}))[0]
    return TANGENT[name]()


class Dense:
    """The same choice from the covariance of pool and targets together, without updates."""

    def __init__(self, estimator: Any, targets: Tensor) -> None:
        both = torch.cat([POOL, targets])
        J = estimator.lin_.jacobian(both)
        self.C = estimator._error_bars.covariance(J)
        self.n, self.m, self.c = len(POOL), len(both), J.c
        if isinstance(estimator, TangentRegressor):
            noise = torch.as_tensor(estimator.noise_, dtype=torch.float64).expand(self.m, self.c)
            self.f, self.likelihood, self.B = J.outputs(), None, torch.diag_embed(1 / noise)
        else:
            mean = J.outputs() + (J @ estimator.posterior_.delta).view(-1, J.c)
            self.f, self.likelihood = mean, estimator.likelihood_
            B = self.likelihood.curvature(mean)
            self.B = torch.diag_embed(B) if B.ndim == 2 else B

    def rows(self, examples: list[int]) -> Tensor:
        return torch.tensor([row for i in examples for row in range(i * self.c, (i + 1) * self.c)])

    def covariance(self, of: list[int], known: list[int]) -> Tensor:
        """Given the labels of known examples: C - C K (B^-1 + K)^-1 K C with C of the known, by inverses of sums."""
        at = self.rows(of)
        C = self.C[at][:, at]
        if not known:
            return C
        given = self.rows(known)
        B = torch.block_diag(*self.B[known])
        K, cross = self.C[given][:, given], self.C[at][:, given]
        return C - cross @ torch.linalg.solve(torch.eye(len(B), dtype=B.dtype) + B @ K, B) @ cross.T

    def log_det(self, of: list[int], known: list[int]) -> Tensor:
        C, B = self.covariance(of, known), torch.block_diag(*self.B[of])
        return 0.5 * torch.logdet(torch.eye(len(C), dtype=C.dtype) + C @ B)

    def score(self, method: str, i: int, known: list[int]) -> float:
        others = list(range(self.n, self.m))
        if method == "variance":
            return float(self.covariance([i], known).trace())
        if method in ("bald", "batchbald"):
            return self.information(i, [] if method == "bald" else known)
        if method == "bait":
            lowered = [
                torch.trace(self.B[t] @ (self.covariance([t], known) - self.covariance([t], [*known, i])))
                for t in others
            ]
            return float(torch.stack(lowered).mean())
        pairs = [self.log_det([i], known) + self.log_det([t], known) - self.log_det([i, t], known) for t in others]
        return float(torch.stack(pairs).mean())

    def information(self, i: int, known: list[int]) -> float:
        C = self.covariance([i], known)
        if not isinstance(self.likelihood, Bernoulli | Categorical | Ordinal):
            return float(self.log_det([i], known))
        if self.likelihood.diagonal:  # one output at a time, on a grid
            z = torch.linspace(-9, 9, 4001, dtype=torch.float64)[:, None]
            w = torch.exp(-0.5 * z[:, 0] ** 2)
            eps = z * C.diagonal().sqrt()
        else:  # the same draws, with the root by another decomposition
            half = torch.randn(64, 1, self.c, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            U, s, _ = torch.linalg.svd(C)
            z, w = torch.cat([half, -half])[:, 0], torch.ones(128, dtype=torch.float64)
            eps = z @ (U * s.sqrt()) @ U.T
        p = self.likelihood.mean(self.f[i] + eps)
        w = w / w.sum()
        if isinstance(self.likelihood, Bernoulli):
            p = torch.stack([p, 1 - p], -1)  # (s, labels, 2)
        each, average = torch.special.entr(p).sum(-1), torch.special.entr((w @ p.flatten(1)).view(p.shape[1:])).sum(-1)
        return float(average.sum() - (w @ each.flatten(1) if each.ndim > 1 else w @ each).sum())


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("method", METHODS)
def test_choice_is_that_of_dense_covariances(name: str, method: Any) -> None:
    estimator = find(name)
    drawn = method in ("bait", "epig")
    found = linnet.select(estimator, POOL, 4, method, targets=TARGETS if drawn else None)
    dense = Dense(estimator, TARGETS)
    exact = 1e-7 if "bald" in method and name in ("one logit", "labels, full", "ordered") else 1e-9  # by quadrature
    for k, (i, score) in enumerate(zip(found.indices.tolist(), found.scores.tolist(), strict=True)):
        known = found.indices[:k].tolist()
        scores = {j: dense.score(method, j, known) for j in range(len(POOL)) if j not in known}
        assert score == pytest.approx(scores[i], rel=exact, abs=exact)
        assert max(scores.values()) <= scores[i] + exact * (1 + abs(scores[i]))


@pytest.mark.parametrize("method", JOINT)
def test_equal_examples_are_not_chosen_together(method: Any) -> None:
    y = NUMBERS[:, 0]
    reg = TangentRegressor(net(1), noise=1e-6, prior=0.5).fit(X, y)
    twice = POOL.repeat(2, 1)
    chosen = linnet.select(reg, twice, 5, method).indices % len(POOL)
    assert len(set(chosen.tolist())) == 5
    assert len(set((linnet.select(reg, twice, 4, "bald").indices % len(POOL)).tolist())) == 2


def test_labels_of_chosen_examples_lower_the_variance_as_foretold() -> None:
    # The scores of "variance" are those of the regressor that has seen the examples, whatever their targets are.
    y = NUMBERS[:, 0]
    reg = TangentRegressor(net(1), noise=0.3, prior=0.5).fit(X, y)
    indices, scores = linnet.select(reg, POOL, 4, "variance")
    for k in range(1, 4):
        after = reg.condition(POOL[indices[:k]], torch.randn(k, dtype=torch.float64))
        _, std = after.predict(POOL[indices[k : k + 1]], return_std=True)
        assert float(std[0] ** 2) == pytest.approx(float(scores[k]), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_seed_kinds_of_data_and_files(method: Any, tmp_path: Any) -> None:
    model = net(3)
    clf = TangentClassifier(model, inference="laplace", prior=0.5).fit(X, CLASSES)
    first = linnet.select(clf, POOL, 3, method, seed=3)
    again = linnet.select(clf, POOL, 3, method, seed=3)
    assert torch.equal(first.indices, again.indices) and torch.equal(first.scores, again.scores)
    array = linnet.select(clf, POOL.numpy(), 3, method, seed=3)
    assert isinstance(array.indices, np.ndarray) and isinstance(array.scores, np.ndarray)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(POOL), batch_size=4)
    streamed = linnet.select(clf, loader, 3, method, seed=3)
    clf.save(tmp_path / "file")
    loaded = linnet.select(linnet.load(tmp_path / "file", model), POOL, 3, method, seed=3)
    for other in (torch.as_tensor(array.indices), streamed.indices, loaded.indices):
        assert torch.equal(first.indices, other)


def test_training_examples_in_the_pool() -> None:
    reg = TangentRegressor(net(1), noise=0.3).fit(X, NUMBERS[:, 0])
    pool = torch.cat([POOL, X[3:5]])
    with pytest.raises(ValueError, match=r"2 of the 17 examples .* the first of them example 15.*overlap='exclude'"):
        linnet.select(reg, pool, 3)
    with pytest.raises(ValueError, match="2 of the 17"):
        linnet.select(reg, pool.float(), 3)
    left = linnet.select(reg, pool, 15, overlap="exclude").indices
    assert sorted(left.tolist()) == list(range(15))
    assert len(linnet.select(reg, pool, 17, overlap="allow").indices) == 17
    more = reg.condition(POOL[:2], torch.zeros(2))
    with pytest.raises(ValueError, match="2 of the 15"):
        linnet.select(more, POOL, 3)
    la = Laplace(net(1), "regression", noise=0.3, prior=1.0).fit(X, NUMBERS[:, 0])
    with pytest.raises(ValueError, match="24 of the 24"):
        linnet.select(la, X, 3)


def test_errors() -> None:
    y = NUMBERS[:, 0]
    reg = TangentRegressor(net(1), noise=0.3)
    with pytest.raises(ValueError, match="not fitted"):
        linnet.select(reg, POOL, 3)
    with pytest.raises(TypeError, match="select takes a fitted TangentRegressor"):
        linnet.select(nn.Linear(1, 1), POOL, 3)
    reg.fit(X, y)
    for n in (0, 1.5, True):
        with pytest.raises(ValueError, match="must be positive"):
            linnet.select(reg, POOL, n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the pool has 15 to choose from"):
        linnet.select(reg, POOL, 16)
    with pytest.raises(ValueError, match="method must be one of 'variance', 'bald'"):
        linnet.select(reg, POOL, 3, "entropy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap must be one of"):
        linnet.select(reg, POOL, 3, overlap="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be"):
        linnet.select(reg, POOL, 3, seed=None)  # type: ignore[arg-type]
    point = TangentClassifier(net(3), inference="map", prior=0.5).fit(X, CLASSES)
    with pytest.raises(ValueError, match="has a mode alone"):
        linnet.select(point, POOL, 3)
    each = TangentRegressor(net(1), noise=[0.1] * len(X)).fit(X, y)
    with pytest.raises(ValueError, match="noise for each observation"):
        linnet.select(each, POOL, 3)
    each_la = Laplace(net(1), "regression", noise=[0.1] * len(X), prior=1.0).fit(X, y)
    with pytest.raises(ValueError, match="noise for each observation"):
        linnet.select(each_la, POOL, 3)
    small = TangentRegressor(net(1), noise=0.3, memory=2000).fit(X[:4], y[:4])
    with pytest.raises(MemoryError, match=r"covariance of 15 examples.*method='bald'"):
        linnet.select(small, POOL, 10)


def test_more_outputs_than_samples() -> None:
    la = find("softmax, samples")
    with pytest.warns(UserWarning, match="15 examples with 3 outputs .* posterior of 8 samples"):
        linnet.select(Laplace(**la.get_params() | {"samples": 8}).fit(X, CLASSES), POOL, 15)
    full = linnet.select(Laplace(**la.get_params() | {"samples": 9}).fit(X, CLASSES), POOL, 3)  # as many, no warning
    assert len(full.indices) == 3


def test_many_targets_are_drawn_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TARGETS", 6)
    reg = TangentRegressor(net(1), noise=0.3).fit(X, NUMBERS[:, 0])
    found = {tuple(linnet.select(reg, POOL, 3, "bait", seed=seed).scores.tolist()) for seed in (0, 0, 1)}
    assert len(found) == 2
