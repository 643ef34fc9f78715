"""Mistakes are told before any pass over the data: the network has then seen a few probe examples at most."""

import os

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

import linnet
from linnet import FisherEmbedding, Laplace, TangentClassifier, TangentGLM, TangentRegressor
from linnet.linalg import low_rank
from tests.support.counted import Counting

N = 200
PROBED = 40  # the examples on which a network is checked, several times over


ONE, THREE = Counting(1, 3).double(), Counting(3, 3).double()
X = torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
y, labels = X[:, 0], torch.arange(N) % 3
wrong = y.clone()
wrong[3] = float("nan")


def fits(**options):
    """One fit by each estimator."""
    return {
        "regressor": lambda: TangentRegressor(ONE, **options).fit(X, y),
        "classifier": lambda: TangentClassifier(THREE, **options).fit(X, labels),
        "laplace": lambda: Laplace(THREE, **options).fit(X, labels),
    }


def embed(**options):
    return FisherEmbedding(THREE, n_components=2, **options).fit(X)


CASES = {}
for given, text in (
    ({"memory": "1GB"}, "memory must be a number of bytes or 'auto'; got '1GB'. For a gigabyte write memory=1e9"),
    ({"memory": None}, "memory must be a number of bytes or 'auto'; got None"),
    ({"memory": True}, "memory must be a number of bytes or 'auto'; got True"),
    ({"memory": -1}, "memory must be a positive number of bytes; got -1"),
    ({"seed": None}, "seed must be a whole number.*got None. For other draws in every run take seed=torch.seed()"),
    ({"seed": 1.5}, "seed must be a whole number.*got 1.5"),
    ({"seed": "a"}, "seed must be a whole number.*got 'a'"),
    ({"seed": 2**64}, "seed must be a whole number.*got 18446744073709551616"),
    ({"prior": {"c": 1.0}}, "prior gives no variance for 'a.weight'"),
    ({"prior": {"*": 1.0, "b": 2.0}}, "prior names 'b'"),
    ({"tolerance": -1.0}, "tolerance must be positive"),
):
    for who, fit in fits(**given).items():
        CASES[f"{who} {given}"] = fit, ValueError, text
    if "prior" not in given and "tolerance" not in given:
        CASES[f"embedding {given}"] = (lambda given=given: embed(**given)), ValueError, text
CASES |= {
    "a number missing": (lambda: TangentRegressor(ONE).fit(X, wrong), ValueError, "example 3 has NaN"),
    "a number missing in data": (lambda: TangentRegressor(ONE).fit((X, wrong)), ValueError, "example 3 has NaN"),
    "words for numbers": (lambda: TangentRegressor(ONE).fit(X, np.array(["a"] * N)), TypeError, "real numbers"),
    "two variances, one output": (
        lambda: TangentRegressor(ONE, noise=[1.0, 2.0]).fit(X, y),
        ValueError,
        "noise for each of 200 observations needs shape (200,); got (2,)",
    ),
    "too many classes": (
        lambda: TangentClassifier(THREE).fit(X, torch.arange(N) % 4),
        ValueError,
        "There are 4 labels",
    ),
    "numbers for labels": (lambda: TangentClassifier(THREE).fit(X, y), ValueError, "numbers with fractions"),
    "a label missing": (lambda: TangentClassifier(THREE).fit(X, wrong), ValueError, "example 3 is"),
    "a label too few": (lambda: TangentClassifier(THREE).fit(X, labels[1:]), ValueError, "200 examples need labels"),
    "unknown words": (
        lambda: TangentClassifier(THREE).fit(X, np.array(["a", "b"] * (N // 2))),
        ValueError,
        "which output is which",
    ),
    "no labels": (lambda: TangentClassifier(THREE).fit(X), ValueError, "fit requires y"),
    "wrong labels in data": (lambda: TangentClassifier(THREE).fit((X, labels * 0 + 7)), ValueError, "which output"),
    "labels of Laplace": (lambda: Laplace(THREE).fit(X, labels + 7), ValueError, "outside 0 .. 2"),
    "numbers for Laplace": (lambda: Laplace(THREE).fit(X, y), ValueError, "likelihood='regression'"),
    "nothing for Laplace": (lambda: Laplace(THREE).fit(X), ValueError, "fit requires y"),
    "a number missing, Laplace": (lambda: Laplace(ONE, "regression").fit(X, wrong), ValueError, "finite"),
    "noise of Laplace": (lambda: Laplace(ONE, "regression", noise=-1.0).fit(X, y), ValueError, "positive"),
    "a folder for a checkpoint": (
        lambda: embed(checkpoint="."),
        FileExistsError,
        "a folder of its own, and . holds",
    ),
    "no folder for a checkpoint": (lambda: embed(checkpoint="none/x.pt"), FileNotFoundError, "there is no folder none"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_before_any_pass(name, monkeypatch):
    fit, error, text = CASES[name]
    monkeypatch.setattr(Counting, "seen", 0)
    with pytest.raises(error, match=text.replace("(", r"\(").replace(")", r"\)")):
        fit()
    assert Counting.seen <= PROBED


def test_a_checkpoint_of_low_rank_is_looked_at_first(monkeypatch, tmp_path):
    J = linnet.linearize(THREE).jacobian(X)
    assert J.c == 3  # which takes the first examples
    monkeypatch.setattr(Counting, "seen", 0)
    (tmp_path / "file").touch()
    for checkpoint, error in (
        (tmp_path, FileExistsError),
        (tmp_path / "file", NotADirectoryError),
        (tmp_path / "no" / "folder", FileNotFoundError),
    ):
        with pytest.raises(error, match="checkpoint names"):
            low_rank(J, 2, checkpoint=checkpoint)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        low_rank(J, 2, seed=None)
    assert Counting.seen == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser writes anywhere")
def test_a_file_that_cannot_be_written_is_told_first(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot be written"):
        embed(checkpoint=tmp_path / "file")


# Before a fit.

ASKS = {
    "regressor": (
        lambda: TangentRegressor(ONE),
        {
            "predict": lambda e: e.predict(X),
            "score": lambda e: e.score(X, y),
            "sample": lambda e: e.sample(X),
            "path": lambda e: e.path(X, 1.0),
            "influence": lambda e: e.influence(X),
            "refit": lambda e: e.refit(X, y),
            "condition": lambda e: e.condition(X, y),
            "forget": lambda e: e.forget([0]),
            "linearity": lambda e: e.linearity(X),
            "to_module": lambda e: e.to_module(),
            "error bars of a module": lambda e: e.to_module(error_bars=True),
            "apply": lambda e: e.apply(),
            "loo_": lambda e: e.loo_,
            "delta_": lambda e: e.delta_,
            "std_error_": lambda e: e.std_error_,
            "certificate_": lambda e: e.certificate_,
            "layer_relevance_": lambda e: e.layer_relevance_,
        },
    ),
    "classifier": (
        lambda: TangentClassifier(THREE),
        {
            "predict": lambda e: e.predict(X),
            "predict_proba": lambda e: e.predict_proba(X),
            "predict_logits": lambda e: e.predict_logits(X),
            "decision_function": lambda e: e.decision_function(X),
            "uncertainty": lambda e: e.uncertainty(X),
            "refit": lambda e: e.refit(X, labels),
            "condition": lambda e: e.condition(X, labels),
            "forget": lambda e: e.forget([0]),
            "linearity": lambda e: e.linearity(X),
            "to_module": lambda e: e.to_module(),
            "apply": lambda e: e.apply(),
            "delta_": lambda e: e.delta_,
            "layer_relevance_": lambda e: e.layer_relevance_,
        },
    ),
    "glm": (
        lambda: TangentGLM(ONE, "poisson"),
        {
            "predict": lambda e: e.predict(X),
            "predict_outputs": lambda e: e.predict_outputs(X),
            "sample": lambda e: e.sample(X),
            "score": lambda e: e.score(X, y),
            "refit": lambda e: e.refit(X, labels),
            "condition": lambda e: e.condition(X, labels),
        },
    ),
    "laplace": (
        lambda: Laplace(THREE),
        {
            "predict": lambda e: e.predict(X),
            "predict_proba": lambda e: e.predict_proba(X),
            "predict_label": lambda e: e.predict_label(X),
            "uncertainty": lambda e: e.uncertainty(X),
            "sample": lambda e: e.sample(X),
            "linearity": lambda e: e.linearity(X),
            "log_evidence": lambda e: e.log_evidence(),
            "tune": lambda e: e.tune(),
            "condition": lambda e: e.condition(X, labels),
            "forget": lambda e: e.forget([0]),
            "to_module": lambda e: e.to_module(),
            "certificate_": lambda e: e.certificate_,
        },
    ),
    "embedding": (
        lambda: FisherEmbedding(THREE),
        {
            "transform": lambda e: e.transform(X),
            "kernel": lambda e: e.kernel(X),
            "gram": lambda e: e.gram(X),
        },
    ),
}
for make, asks in ASKS.values():
    asks["save"] = lambda e: e.save("unfitted.safetensors")
    if make is not ASKS["embedding"][0]:
        asks["attribution"] = lambda e: linnet.attribution(e, X)
        asks["select"] = lambda e: linnet.select(e, X, 2)
        asks["merge"] = lambda e: linnet.merge([e, e])


@pytest.mark.parametrize(("kind", "ask"), [(kind, ask) for kind, (_, asks) in ASKS.items() for ask in asks])
def test_an_estimator_that_was_not_fitted_says_so(kind, ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, asks = ASKS[kind]
    with pytest.raises(NotFittedError, match="is not fitted yet"):
        asks[ask](make())
    assert not list(tmp_path.iterdir())
