"""The contenders of figure 2 compute the same numbers; a small version runs; no timing."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributions import MultivariateNormal

import linnet
from experiments import common
from experiments.__main__ import main
from experiments.maddox2021 import contenders, figure2
from linnet.fisher import fisher_vector_product
from linnet.probability import Categorical
from linnet.testing import dense_jacobian
from tests.support.drawn import normal
from tests.support.quick_runs import run_quick


@pytest.fixture(scope="module")
def given():
    return contenders.problem(4, 40, "cpu")


@pytest.fixture(scope="module")
def log_evidence(given):
    model, _, X, r = given.precise()
    J = dense_jacobian(model.double(), X)
    model.float()
    K = J @ J.T + given.noise * torch.eye(40, dtype=torch.float64)
    return float(MultivariateNormal(torch.zeros(40, dtype=torch.float64), K).log_prob(r))


def test_exact_and_dense_log_evidences(given, log_evidence):
    assert contenders.by_linnet(given, "function")["log evidence"] == pytest.approx(log_evidence, rel=1e-9)
    assert contenders.by_dense(given)["log evidence"] == pytest.approx(log_evidence, rel=1e-9)


@pytest.mark.parametrize("solver", ["cg-function", "cg-weight"])
def test_iterative_log_evidences(given, log_evidence, solver):
    found = contenders.by_linnet(given, solver)
    assert found["log evidence"] == pytest.approx(log_evidence, abs=0.5 + 4 * found["standard error"])
    assert found["iterations"] >= 1


def test_published_log_evidence(given, log_evidence):
    found = contenders.by_published(given, seconds=60, probes=300, steps=40)
    assert found["log evidence"] == pytest.approx(log_evidence, rel=0.05)
    assert found["iterations"] >= 10
    with pytest.raises(contenders.TooSlow, match="stopped after 1 products in 0 s"):
        contenders.by_published(given, seconds=0)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(MemoryError, match="needs 1000000 GB"):
        contenders.check_fits(1e15, torch.device("cpu"))


@pytest.mark.parametrize("k", [1, 3])
def test_double_backward_is_the_fisher_product(k):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    x, lin = normal(6, 3), linnet.linearize(model)
    V = normal(lin.p, k, seed=1)
    found = contenders.double_backward(model, x, V)
    exact = fisher_vector_product(lin, x, V, likelihood=Categorical())
    assert contenders.relative_error(found, exact) <= 1e-12


def test_classifiers_keep_their_activations_in_scale():
    model, x = contenders.classifier("PreResNet-20", 8, "cpu")
    assert not model.training
    assert 0.01 < float(model(x).detach().std()) < 10


def test_measuring_goes_on_after_failures():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def late():
        raise contenders.TooSlow("stopped after 3 products in 1 s")

    found = figure2.measure({"a": fail, "b": lambda: 7, "c": late}, "cpu", rounds=2)
    assert found["a"] == {"seconds": None, "reason": "out of memory"}
    assert found["b"]["runs"] == 2 and found["b"]["value"] == 7 and found["b"]["seconds"] >= 0
    assert found["c"] == {"seconds": None, "reason": "stopped after 3 products in 1 s"}
    assert figure2.measure({"b": lambda: 7}, "cpu", patience=-1)["b"]["runs"] == 1


def test_contenders_that_grow_too_slow_are_left_out(monkeypatch):
    times = {figure2.EXACT: 5.0, "other": 1.0}
    seen = []

    def measured(tried, device, **_):
        seen.append(list(tried))
        seconds = {name: times[name] * 2 ** len(seen) for name in tried}
        return {name: {"seconds": seconds[name], "runs": 1, "value": {"log evidence": 1.0}} for name in tried}

    monkeypatch.setattr(figure2, "measure", measured)
    chosen = figure2.Sizes((1, 2, 20), (), {}, limit=10.0)
    made = lambda n: (n, dict.fromkeys(times))  # noqa: E731
    rows = figure2.over_sizes(chosen.n, made, "cpu", chosen, "n")
    assert seen == [[figure2.EXACT, "other"], [figure2.EXACT, "other"], [figure2.EXACT]]
    assert rows[-1]["reason"] == "would take more than 10 s" and rows[-1]["seconds"] is None
    assert rows[0]["error per example"] == 0


@pytest.mark.slow
def test_figure2_runs_and_keeps_the_other_device(tmp_path, monkeypatch, capsys):
    small = figure2.Sizes((12, 24), (2, 3), {"PreResNet-20": 2}, 12, (1, 2), width=3)
    monkeypatch.setattr(figure2, "QUICK", small)
    record = run_quick(tmp_path, "figure2")
    found = record["devices"]["cpu"]
    assert {row["contender"] for row in found["data"]} == set(list(figure2.COLORS)[:5])
    exact = [row for row in found["products"] if row["contender"] == figure2.EXACT_PRODUCT]
    assert [row["k"] for row in exact] == [1, 2] and all(row["relative error"] < 1e-4 for row in exact)
    assert "x of double backward" in capsys.readouterr().out
    # Now with numbers of a GPU beside, and one panel measured again.
    record["devices"] = {"cuda": {**found, "machine": "a GPU, torch"}, "cpu": found}
    (tmp_path / "figure2" / "metrics.json").write_text(json.dumps(record))
    again = run_quick(tmp_path, "figure2", "--panels", "products")["devices"]
    assert list(again) == ["cpu", "cuda"]
    assert again["cpu"]["data"] == found["data"] and again["cpu"]["products"] != found["products"]
    table = (tmp_path / "README.md").read_text()
    assert table.count("| figure2: log evidence against n |") == 2 and "`--device cuda`, a GPU" in table


def test_slopes_and_times_in_words():
    assert figure2.exponent([(10, 2), (100, 20), (1000, 200)]) == pytest.approx(1)
    assert math.isnan(figure2.exponent([(10, 2)]))
    assert [figure2.seconds_of(x) for x in (0.01234, 3.21, 123.4)] == ["0.012 s", "3.2 s", "123 s"]
    with pytest.raises(ValueError, match="--device cpu and cuda; got 'meta'"):
        main(["figure2", "--quick", "--device", "meta"])
    assert common.machine("cpu").startswith(("x86", "a", "i"))
