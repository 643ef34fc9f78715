"""Reports made of drawn numbers, for the tests of the page: no network is fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from linnet.jacobian import Plan
from linnet.jacobian.plan import PlanLine
from linnet.report import Classes, Eigenvalues, Group, Inputs, Missing, Numbers, Points, Report
from linnet.report.build import group_by_confidence
from linnet.report.content import Evidence, Linear

RECORD = {
    "command": "linnet adapt --model nets.py:cnn --train train --out 'my run'",
    "time": "2030-01-02T03:04:05+00:00",
    "seed": 3,
    "device": "cpu",
    "versions": {"linnet": "9.9.9", "torch": "2.13.0", "numpy": "2.0.0", "python": "3.12.1"},
}
PLAN = Plan(
    (
        PlanLine("features.0", "Conv", 160, 64, "rows", "rows", 19500.0),
        PlanLine(
            "a.very.long.name.of.a.layer.that.does.not.fit.a.phone", "Linear", 8224, 1, "bilinear", "ghost", 526000.0
        ),
        PlanLine("scale", "autodiff", 3, 1, "autodiff", "rows", None),
    ),
    (1200, 8387),
    120,
    10,
    120,
    98700,
    2**30,
    "tensors",
    "float64 on cpu",
)


def classes(n: int = 60, *, names: tuple[str, ...] = ("cat", "dog", "bird"), seed: int = 0) -> Classes:
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(names), n)
    logits = random.normal(size=(n, len(names))) + 2 * np.eye(len(names))[labels]
    p, q = (np.exp(scale * logits) / np.exp(scale * logits).sum(1, keepdims=True) for scale in (1.0, 3.0))
    return Classes(p, labels, names, q[::-1].copy())


def numbers(n: int = 60, *, names: tuple[str, ...] = ("price",), seed: int = 0) -> Numbers:
    random = np.random.default_rng(seed)
    mean = 3 * random.normal(size=(n, len(names)))
    std = random.uniform(0.5, 2.0, mean.shape)
    return Numbers(mean, std, mean + std * random.normal(size=mean.shape), names, mean + 2.0)


def pictures(n: int = 60, *, seed: int = 0) -> Inputs:
    pytest.importorskip("PIL.Image", reason="needs the extra images")
    return Inputs(
        [f"folder/{i}.png" for i in range(n)], pictures=np.random.default_rng(seed).uniform(size=(n, 3, 9, 7))
    )


def rows(n: int = 60, *, seed: int = 0) -> Inputs:
    cells = np.random.default_rng(seed).normal(size=(n, 12))
    return Inputs(cells=cells, columns=[f"column_{j}" for j in range(12)])


def texts(n: int = 60) -> Inputs:
    return Inputs(texts=[f"Text {i}: a sentence that goes on. " * (1 + i % 12) for i in range(n)])


def linear(error: float = 0.2, **more: object) -> Linear:
    random = np.random.default_rng(1)
    step = random.normal(size=200)
    return replace(Linear(step, step + error * random.normal(size=200), error, 50), **more)


def report(kind: str = "pictures") -> Report:
    """A report with all its parts: of "pictures", "texts" or "rows"; or of an "embedding"."""
    if kind == "embedding":
        return _embedding()
    told = numbers() if kind == "rows" else classes()
    inputs = {"pictures": pictures, "texts": texts, "rows": rows}[kind]()
    groups = group_by_confidence(told, inputs)
    scores = (
        {"network as it was": {"rmse": 2.1}, "adapted": {"rmse": 1.3, "nll": 1.7, "coverage": 0.93}}
        if kind == "rows"
        else {
            "network as it was": {"accuracy": 0.4, "nll": 2.0, "brier": 0.8, "ece": 0.3},
            "adapted": {"accuracy": 0.8, "nll": 0.6, "brier": 0.3, "ece": 0.05},
        }
    )
    return Report(
        "linnet adapt",
        "A network adapted to something",
        "linnet adapted all 8,387 parameters of nets.py:cnn to the 120 images in train.",
        scores,
        told,
        linear(
            agreement=None if kind == "rows" else 0.9,
            scores={"this model": {"rmse": 1.0}, "real network": {"rmse": 1.1}},
        ),
        groups,
        Group("Most influential training examples", "What predictions rest on.", groups[0].items),
        Eigenvalues(np.geomspace(100, 1e-8, 90), 90),
        {f"layer{i}.conv.weight": share for i, share in enumerate(np.random.default_rng(0).dirichlet(np.ones(30)))},
        Evidence([-110.0, -104.0, -101.5, -101.2], -101.2, {1: -120.0, 2: -101.2, 3: -105.0}, 2, {"all": 0.7}),
        PLAN,
        {"training examples": "120", "parameters": "8,387", "prior": "balanced"},
        RECORD,
        ["adapter.safetensors", "metrics.json"],
    )


def _embedding() -> Report:
    random = np.random.default_rng(0)
    values = np.geomspace(100, 1, 20)
    return Report(
        "linnet embed",
        "What the network sees",
        "Twenty numbers of each.",
        outcome=Points(random.normal(size=(80, 2)), [str(i % 3) for i in range(80)]),
        spectrum=Eigenvalues(values, 80, False, np.cumsum(values) / 500),
        plan=PLAN,
        facts={"components": "20", "effective rank": "7"},
        record=RECORD,
    )


def empty() -> Report:
    """A report whose parts are all left out."""
    gone = {
        name: Missing(f"no {name} here")
        for name in (
            "scores",
            "outcome",
            "linear",
            "examples",
            "influence",
            "spectrum",
            "relevance",
            "evidence",
            "plan",
        )
    }
    return Report("TangentRegressor", "Nothing", "There was nothing to say.", **gone)
