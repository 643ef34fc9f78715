"""The choice of the mean function, against two separate fits."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.inference.gaussian import closed_form
from linnet.tangent import MeanTrial
from linnet.tangent.input_features import LENGTHS


def network(outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def close_data(model, n=14, seed=1):
    """Targets near the network's outputs, so that it is a good mean function."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, generator=g, dtype=torch.float64)
    f = model(X).detach()
    return X, f + 0.05 * torch.randn(f.shape, generator=g, dtype=torch.float64)


def far_data(model, n=14, seed=1):
    """The same, around zero: the network's outputs are wrong by a level that it cannot easily change."""
    X, y = close_data(model, n, seed)
    return X, y - model(X).detach()


def shifted(model, by=30.0):
    """The network with outputs that say too much."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model[2].weight.mul_(by)
    return model


CASES = {
    "function": {"solver": "function"},
    "weight": {"solver": "weight"},
    "largest evidence": {"average": False},
    "largest evidence, weights": {"average": False, "solver": "weight"},
    "layerwise": {"prior": "layerwise"},
    "given": {"prior": 0.5, "noise": 0.1},
    "given noise": {"noise": 0.1},
}


@pytest.mark.parametrize("wanted", ["network", "zero"])
@pytest.mark.parametrize("name", CASES)
def test_choice_is_that_of_two_fits(name, wanted):
    model = network() if wanted == "network" else shifted(network())
    X, y = close_data(model) if wanted == "network" else far_data(network())
    check(model, X, y[:, 0], wanted, **CASES[name])


@pytest.mark.parametrize("settings", [{}, {"noise": "per-output"}, {"noise": "per-output", "solver": "weight"}])
def test_several_outputs(settings):
    model = network(3)
    check(model, *close_data(model), "network", **settings)
    check(shifted(model), *far_data(model), "zero", **settings)


def test_noise_of_the_network():
    model = network(2)
    X, y = far_data(model)
    check(shifted(model, 5.0), X, y[:, 0], None, noise="heteroscedastic")


def check(model, X, y, wanted, **settings):
    fits = {mean: linnet.TangentRegressor(model, mean=mean, **settings).fit(X, y) for mean in ("network", "zero")}
    scores = {mean: fit.log_evidence_ + fit.loo_.log_score.sum() for mean, fit in fits.items()}
    best = max(scores, key=scores.get)
    reg = linnet.TangentRegressor(model, inputs=False, **settings).fit(X, y)
    assert reg.mean_ == best and wanted in (None, best)
    assert [row.name for row in reg.selection_] == ["network", "zero"]
    for row in reg.selection_:
        fit = fits[row.name]
        np.testing.assert_allclose(row.log_evidence, fit.log_evidence_, rtol=1e-9)
        np.testing.assert_allclose(row.leave_one_out, fit.loo_.log_score.sum(), rtol=1e-9)
        assert row.chosen == (row.name == best) and row.score == row.log_evidence + row.leave_one_out
    new = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for a, b in zip(reg.predict(new, return_std=True), fits[best].predict(new, return_std=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=0)
    np.testing.assert_allclose(reg.loo_.mean, fits[best].loo_.mean, rtol=1e-9)
    assert fits["network"].mean_ == "network" and fits["zero"].mean_ == "zero" and fits["zero"].selection_ is None


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("solver", ["function", "weight"])
def test_weights_count_as_repeated_examples(solver, outputs):
    model = network(outputs)
    X, y = close_data(model)
    w, settings = torch.tensor([1, 2, 3, 1, 1, 2, 1] * 2), {"solver": solver, "prior": 0.5, "noise": 0.1}
    reg = linnet.TangentRegressor(model, **settings).fit(X, y, w)
    many = linnet.TangentRegressor(model, **settings).fit(X.repeat_interleave(w, 0), y.repeat_interleave(w, 0))
    for row, other in zip(reg.selection_, many.selection_, strict=True):
        np.testing.assert_allclose(row.log_evidence, other.log_evidence, rtol=1e-9)
        np.testing.assert_allclose(row.leave_one_out, other.leave_one_out, rtol=1e-9)
    half = torch.full((14,), 0.5)
    for row in linnet.TangentRegressor(model, **settings).fit(X, y, half).selection_:
        fit = linnet.TangentRegressor(model, mean=row.name, **settings).fit(X, y, half)
        np.testing.assert_allclose(row.leave_one_out, 0.5 * fit.loo_.log_score.sum(), rtol=1e-9)


def test_kernels_and_eigenvectors_are_made_once(monkeypatch):
    made, decomposed = [], []
    make, decompose = closed_form.make_kernels, closed_form.gaussian.decompose
    monkeypatch.setattr(closed_form, "make_kernels", lambda *given: made.append(1) or make(*given))
    monkeypatch.setattr(closed_form.gaussian, "decompose", lambda *given: decomposed.append(1) or decompose(*given))
    model = network()
    X, y = close_data(model)
    linnet.TangentRegressor(model, solver="function").fit(X, y)
    assert len(made) == 1 and len(decomposed) == 1 + len(LENGTHS)
    linnet.TangentRegressor(model, solver="function", inputs=False).fit(X, y)
    assert len(made) == 2 and len(decomposed) == 2 + len(LENGTHS)


def test_tasks_share_the_choice():
    model = network()
    wrong, tasks = shifted(model), [far_data(model, seed=seed) for seed in (1, 2, 3)]
    reg = linnet.TangentRegressor(wrong).fit_tasks(tasks)
    fits = {mean: linnet.TangentRegressor(wrong, mean=mean).fit_tasks(tasks) for mean in ("network", "zero")}
    for row in reg.selection_:
        parts = fits[row.name].tasks_
        np.testing.assert_allclose(row.log_evidence, sum(part.log_evidence_ for part in parts), rtol=1e-9)
        np.testing.assert_allclose(row.leave_one_out, sum(part.loo_.log_score.sum() for part in parts), rtol=1e-9)
    assert [task.mean_ for task in reg.tasks_] == ["zero"] * 3
    for (X, _), a, b in zip(tasks, reg.tasks_, fits["zero"].tasks_, strict=True):
        torch.testing.assert_close(a.predict(X), b.predict(X), rtol=1e-9, atol=1e-12)


def test_later_data_keep_the_mean_function():
    model = network()
    wrong, (X, y) = shifted(model), far_data(model)
    reg, zero = (linnet.TangentRegressor(wrong, mean=mean).fit(X, y) for mean in ("auto", "zero"))
    more, other = close_data(wrong, 4, seed=5)  # which alone would choose the network
    for name in ("refit", "condition"):
        a, b = (getattr(one, name)(more, other) for one in (reg, zero))
        assert a.mean_ == "zero" and a.selection_ == reg.selection_
        torch.testing.assert_close(a.predict(X), b.predict(X), rtol=1e-9, atol=1e-12)
    assert reg.fit(*close_data(model)).mean_ in ("network", "zero")  # chosen anew
    assert linnet.TangentRegressor(wrong).fit(X, y).set_params(mean="network").fit(X, y).selection_ is None


@pytest.mark.parametrize("wanted", ["network", "zero"])
def test_files(tmp_path, wanted):
    model = network()
    X, y = close_data(model) if wanted == "network" else far_data(model)
    model = model if wanted == "network" else shifted(model)
    reg = linnet.TangentRegressor(model).fit(X, y)
    reg.save(tmp_path / "reg.safetensors")
    again = linnet.load(tmp_path / "reg.safetensors", model)
    assert again.mean == "auto" and again.mean_ == reg.mean_ == wanted
    assert again.selection_ == reg.selection_ and isinstance(again.selection_[0], MeanTrial)
    torch.testing.assert_close(again.predict(X), reg.predict(X), rtol=1e-12, atol=0)


def test_where_nothing_can_be_compared():
    model = network()
    X, y = close_data(model)
    for settings in ({"solver": "cg-function"}, {"solver": "cg-weight"}):
        reg = linnet.TangentRegressor(model, **settings).fit(X, y)
        assert reg.mean_ == "network" and reg.selection_ is None
    assert linnet.TangentRegressor(model).fit(X[:2], y[:2]).selection_ is None
    nothing = linnet.TangentRegressor(model).fit(X, torch.zeros(14))  # which a mean of zero explains without noise
    assert nothing.mean_ == "network" and nothing.selection_ is None
    assert linnet.TangentRegressor().fit(X, y).mean_ == "zero"  # no network
    assert linnet.TangentRegressor(model).fit(X, y, source=(X + 1, y)).mean_ == "zero"


def test_limit_of_the_comparison(monkeypatch):
    model = network()
    X, y = close_data(model)
    monkeypatch.setattr(closed_form, "EXACT_ROWS", {"cpu": 13})
    assert linnet.TangentRegressor(model, solver="function").fit(X, y).selection_ is None


def test_heads_have_a_mean_of_zero():
    model = network(5)
    X, y = close_data(model, 40)
    new = linnet.attach_head(model, X, y[:, 0])
    reg = linnet.TangentRegressor(new).fit(X, y[:, 0])
    assert reg.mean_ == "zero" and reg.selection_ is None
    assert linnet.TangentRegressor(new, mean="network").fit(X, y[:, 0] + 1).mean_ == "network"
    labels = (X[:, 0] > 0).long()
    headed = linnet.attach_head(model, X, labels)
    clf = linnet.TangentClassifier(headed, inference="laplace").fit(X, labels)
    assert clf.mean_ == "zero" and clf.refit(X[:20], labels[:20]).mean_ == "zero"
    assert linnet.TangentClassifier(network(2), inference="laplace").fit(X, labels).mean_ == "network"
    counts = linnet.TangentGLM(network(), "poisson", inference="laplace").fit(X, labels)
    assert counts.mean_ == "network" and counts.selection_ is None


def test_ensembles_choose_for_each_network():
    model = network()
    X, y = close_data(model)
    reg = linnet.TangentRegressor([model, shifted(model)]).fit(X, y)
    assert [member.mean_ for member in reg.members_] == ["network", "zero"]
    with pytest.raises(AttributeError, match=r"members_\[0\].mean_"):
        _ = reg.mean_


@pytest.mark.parametrize("door", [linnet.TangentRegressor, linnet.TangentClassifier, linnet.TangentGLM])
def test_unknown_mean(door):
    with pytest.raises(ValueError, match="mean must be one of 'auto', 'network', 'zero'; got 'none'"):
        door(network(), mean="none").fit(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))


def test_weights_of_a_mean_of_zero_are_not_those_of_the_network():
    model = network()
    X, y = close_data(model)
    reg = linnet.TangentRegressor(model, mean="zero").fit(X, y)
    with pytest.warns(UserWarning, match=r"The mean function is zero.*mean='network'"):
        reg.apply()


def test_report_has_the_comparison(tmp_path):
    model = network()
    X, y = close_data(model)
    reg = linnet.TangentRegressor(model).fit(X, y)
    linnet.report.write(tmp_path / "page.html", reg, X, y)
    page = (tmp_path / "page.html").read_text()
    assert "What was compared" in page and "network (chosen)" in page and "leave one out" in page
