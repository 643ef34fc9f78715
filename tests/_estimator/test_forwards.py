"""How often the user's network runs: by the examples that it sees, in units of all new examples.

A first pass over new data also proves its numbers: a sixteenth of the examples run once more in another batch, twice,
and a few first examples show what the layers are. Full forwards are the whole part of the count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import linnet
from tests.support.counted import Counting
from tests.support.drawn import double, normal

N = 4000
X, NEW = normal(40, 4), normal(N, 4, seed=1)
NUMBERS, LABELS = X[:, :2].sin(), (X[:, 0] > 0).long()


def forwards(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]) -> float:
    monkeypatch.setattr(Counting, "seen", 0)
    ask()
    return Counting.seen / N


def net(outputs: int = 2) -> Counting:
    model = double(Counting(outputs, 16))
    assert isinstance(model, Counting)
    return model


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
@pytest.mark.parametrize("return_std", [False, True])
@pytest.mark.parametrize("mean", ["network", "zero"])
def test_regressor(solver: str, return_std: bool, mean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reg = linnet.TangentRegressor(net(), mean=mean, solver=solver, noise=0.1, prior=1.0).fit(X, NUMBERS)
    assert 1 <= forwards(monkeypatch, lambda: reg.predict(NEW, return_std=return_std)) < 1.2


@pytest.mark.parametrize("estimator", [linnet.TangentRegressor, linnet.TangentClassifier, linnet.Laplace])
def test_calls_of_first_predictions(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for the size of an example, one for the pass, and four proofs: two halves, and two examples alone."""
    targets = NUMBERS if estimator is linnet.TangentRegressor else LABELS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        fitted = estimator(net(), prior=1.0).fit(X, targets)
    monkeypatch.setattr(Counting, "calls", 0)
    if estimator is linnet.TangentRegressor:
        fitted.predict(NEW[:20], return_std=True)
    else:
        fitted.predict_proba(NEW[:20])
    assert Counting.calls == 6


CLASSIFIERS = [
    {"inference": "map"},
    {"inference": "laplace"},
    {"inference": "laplace", "solver": "weight"},
    {"inference": "vi"},
    {"inference": "vi", "family": "lowrank"},
    {"inference": "vi", "family": "meanfield"},
    {"inference": "vi", "link": "mc"},
]


@pytest.mark.parametrize("options", CLASSIFIERS, ids=str)
def test_classifier(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clf = linnet.TangentClassifier(net(), prior=1.0, **options).fit(X, LABELS)
    for ask in (clf.predict_proba, clf.predict, clf.decision_function, clf.predict_logits):
        assert 1 <= forwards(monkeypatch, lambda ask=ask: ask(NEW)) < 1.2  # type: ignore[misc]


def test_many_classes_take_one_forward_with_the_tangents_and_one_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    clf = linnet.TangentClassifier(net(8), inference="map", prior=1.0, classes=list(range(8))).fit(X, LABELS)
    assert 1 <= forwards(monkeypatch, lambda: clf.predict_proba(NEW)) < 2.3


STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_laplace(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        la = linnet.Laplace(net(), structure=structure, rank=4, size=10, prior=1.0).fit(X, LABELS)
    asked: list[Callable[[], Any]] = [
        lambda: la.predict(NEW),
        lambda: la.predict(NEW, return_std=True),
        lambda: la.predict_proba(NEW),
        lambda: la.predict_proba(NEW, "mc"),
        lambda: la.sample(NEW, 2),
    ]
    for ask in asked:
        assert 1 <= forwards(monkeypatch, ask) < 1.2


@pytest.mark.parametrize(("structure", "passes"), [("kron", 1), ("diag", 1), ("ekfac", 2)])
@pytest.mark.parametrize("prior", [1.0, "shared"])
def test_laplace_fits_from_one_pass(structure: Any, passes: int, prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, curvature and gradient together; EKFAC reads the data again, in the coordinates of the factors."""
    la = linnet.Laplace(net(), structure=structure, prior=prior)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        count = forwards(monkeypatch, lambda: la.fit(NEW, (NEW[:, 0] > 0).long()))
    # A prior by the evidence also looks at the error bars of 200 training examples.
    assert passes <= count < passes + (0.2 if prior == 1.0 else 0.4)


def test_joint_covariances_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    reg = linnet.TangentRegressor(net(), noise=0.1, prior=1.0).fit(X, NUMBERS)
    some = NEW[: N // 40]
    for ask in (lambda: reg.predict(some, return_cov=True), lambda: reg.sample(some, 3), lambda: reg.path(some, 1.0)):
        assert 1 <= 40 * forwards(monkeypatch, ask) < 3  # small chunks run all examples again, twice, for the proof


@pytest.mark.parametrize("options", [{}, {"kernel": "ntk"}, {"n_components": 12}], ids=str)
def test_embedding(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emb = linnet.FisherEmbedding(net(3), **{"n_components": 4, **options})
    assert 1 <= forwards(monkeypatch, lambda: emb.fit_transform(NEW)) < 1.2
    assert emb.passes_ > 1
    assert 1 <= forwards(monkeypatch, lambda: emb.transform(NEW)) < 1.2


def test_embedding_that_does_not_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over the data for the statistics, and one for each step."""

    def refuse(self: Any, memory: Any = "auto") -> Any:
        raise MemoryError

    emb, kept = (linnet.FisherEmbedding(net(3), 4) for _ in range(2))
    kept.fit(NEW)
    monkeypatch.setattr(linnet.Jacobian, "cached", refuse)
    count = forwards(monkeypatch, lambda: emb.fit_transform(NEW))
    assert 1 + emb.passes_ <= count < 2 + emb.passes_
    torch.testing.assert_close(emb.eigenvalues_, kept.eigenvalues_, rtol=1e-9, atol=0)
