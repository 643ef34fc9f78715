"""Gauss-Newton beyond the tangent, against dense algebra and the gradient of the true objective."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call, jacrev

import linnet
from linnet.tangent.relinearization import Relinearization, find_length, move

PRIOR, NOISE = 0.3, 0.05


def network(outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def points(n, seed=1):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(model, by, seed=2):
    """The network with other weights."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += by * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return other


def numbers(model, n=25, by=0.5):
    """Inputs, and the outputs of the network with other weights, with noise."""
    X = points(n)
    return X, moved(model, by)(X)[:, 0].detach() + math.sqrt(NOISE) * points(n, 3)[:, 0]


def make_regressor(model, X, y, around, **settings):
    reg = linnet.TangentRegressor(model, mean="network", average=False, progress=False, **settings)
    reg._settle(around)
    reg._fit_all([(X, y, None)])
    return reg


def descend(make, steps):
    """Steps that no evidence judges: the tangent at the end, the weights there, and the objectives."""
    at, around, path = make(None), None, []
    for _ in range(steps):
        length, before, after = find_length(at, around)
        path.append((before, after))
        if length == 0:
            break
        around = move(at, length, around)
        at = make(around)
    return at, around, path


def rows(model, X):
    """J (n c, p) by reverse mode, and f (n, c)."""
    theta = {name: p.detach() for name, p in model.named_parameters()}
    found = jacrev(lambda t: functional_call(model, t, (X,)).flatten())(theta)
    return torch.cat([found[name].flatten(1) for name in theta], 1), model(X).detach()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_network_that_is_linear_in_its_parameters_takes_no_step():
    torch.manual_seed(0)
    model, X = nn.Sequential(nn.Tanh(), nn.Linear(2, 1)).double(), points(20)
    y = 3 * X[:, 0].tanh() + 0.1 * points(20, 3)[:, 1]
    plain = linnet.TangentRegressor(model, mean="network", progress=False).fit(X, y)
    reg = linnet.TangentRegressor(model, mean="network", relinearize=3, progress=False).fit(X, y)
    (step,) = reg.relinearized_
    assert step.length == 1 and not step.accepted and step.after < step.before
    assert step.log_evidence == pytest.approx(plain.log_evidence_, rel=1e-9)
    for one, other in zip(plain.predict(X, return_std=True), reg.predict(X, return_std=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    at = make_regressor(model, X, y, None)
    around = move(at, 1.0, None)
    again = make_regressor(model, X, y, around)
    torch.testing.assert_close(again.predict(X), at.predict(X), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(around.network(X)[:, 0].detach(), at.predict(X), rtol=1e-9, atol=1e-12)
    assert float(again.posterior_.delta.norm()) < 1e-6 * float(at.posterior_.delta.norm())
    length, before, after = find_length(again, around)
    assert length == 0 or before - after < 1e-9 * before


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_around_other_weights_it_is_the_posterior_of_dense_algebra(solver):
    model = network()
    X, y = numbers(model)
    settings = {"prior": PRIOR, "noise": NOISE, "solver": solver}
    around = move(make_regressor(model, X, y, None, **settings), 0.5, None)
    reg = make_regressor(model, X, y, around, **settings)
    shift, new = flat(around.network) - flat(model), points(7, 5)
    torch.testing.assert_close(around.shift, shift, rtol=1e-12, atol=1e-14)
    (J, f), (Jx, fx), eye = rows(around.network, X), rows(around.network, new), torch.eye(len(y)).double()
    r, M = y - f[:, 0] + J @ shift, PRIOR * J @ J.T + NOISE * eye
    total = PRIOR * J.T @ torch.linalg.solve(M, r)
    mean, std = reg.predict(new, return_std=True)
    torch.testing.assert_close(mean, fx[:, 0] + Jx @ (total - shift), rtol=1e-9, atol=1e-10)
    cross = PRIOR * Jx @ J.T
    variance = PRIOR * Jx.square().sum(1) - (cross * torch.linalg.solve(M, cross.T).T).sum(1)
    torch.testing.assert_close(std, variance.sqrt(), rtol=1e-8, atol=1e-10)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(r), M).log_prob(r)
    assert reg.log_evidence_ == pytest.approx(float(evidence), rel=1e-9)
    precise = torch.linalg.inv(M)
    left_out = y - precise @ r / precise.diagonal()
    torch.testing.assert_close(torch.as_tensor(reg.loo_.mean), left_out, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.cat([t.flatten() for t in reg.delta_.values()]), total, rtol=1e-8, atol=1e-10)
    shares = total.square() / total.square().sum()
    assert reg.layer_relevance_["0"] == pytest.approx(float(shares[:24].sum()), rel=1e-8)
    torch.testing.assert_close(reg.to_module()(new)[:, 0], mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(flat(reg.apply()) - flat(model), total, rtol=1e-8, atol=1e-10)
    draws = reg.sample(new, 4000)
    assert float((draws.mean(0) - mean).abs().max()) < 0.1 and draws.shape == (4000, 7)


def test_the_fixed_point_has_no_gradient_of_the_true_objective_which_falls_on_the_way():
    model = network()
    X, y = numbers(model)
    _, around, path = descend(lambda a: make_regressor(model, X, y, a, prior=PRIOR, noise=NOISE), 200)
    assert all(after < before for before, after in path[:-1])
    assert all(one[1] == pytest.approx(two[0], rel=1e-9) for one, two in pairwise(path))
    fixed = around.network
    error = y - fixed(X)[:, 0]
    loss = error.square().sum() / (2 * NOISE)
    objective = loss.detach() + around.shift.square().sum() / (2 * PRIOR)
    assert float(objective) == pytest.approx(path[-1][1], rel=1e-9)
    pulled = torch.cat(
        [g.flatten() for g in torch.autograd.grad(error.square().sum() / (2 * NOISE), fixed.parameters())]
    )
    gradient = pulled + around.shift / PRIOR
    # Steps end where rounding hides the objective: 1/2 g^T H^-1 g is eps times the objective.
    J, _ = rows(fixed, X)
    H = J.T @ J / NOISE + torch.eye(J.shape[1]).double() / PRIOR
    left = 0.5 * float(gradient @ torch.linalg.solve(H, gradient))
    assert left < 1e3 * torch.finfo(torch.float64).eps * float(objective)
    assert float(gradient.norm()) < 1e-5 * float(pulled.norm())


def test_steps_are_taken_while_the_evidence_grows():
    model = network()
    X, y = numbers(model, by=1.0)
    before = copy.deepcopy(model.state_dict())
    plain = linnet.TangentRegressor(model, mean="network", average=False, progress=False).fit(X, y)
    reg = linnet.TangentRegressor(model, mean="network", average=False, relinearize=4, progress=False).fit(X, y)
    taken = [step for step in reg.relinearized_ if step.accepted]
    assert taken and len(reg.relinearized_) <= 4 and all(step.accepted for step in reg.relinearized_[:-1])
    evidences = [plain.log_evidence_, *(step.log_evidence for step in taken)]
    assert evidences == sorted(evidences) and reg.log_evidence_ == pytest.approx(evidences[-1], rel=1e-9)
    assert all(step.after < step.before for step in taken)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert reg.model is model
    once = linnet.TangentRegressor(model, mean="network", average=False, relinearize=1, progress=False).fit(X, y)
    assert once.relinearized_ == reg.relinearized_[:1]


def test_a_classifier_around_other_weights_is_at_the_mode():
    model = network(3)
    X = points(30)
    y = moved(model, 2.0)(X).argmax(1)
    settings = {"prior": PRIOR, "inference": "map", "mean": "network", "progress": False}

    def make(around):
        clf = linnet.TangentClassifier(model, **settings)
        clf._settle(around)
        clf._fit_likelihood(X, y, None)
        return clf

    around = move(make(None), 1.0, None)
    clf = make(around)
    J, f = rows(around.network, X)
    step = clf.posterior_.delta
    p = (f + (J @ step).view_as(f)).softmax(1)
    residual = nn.functional.one_hot(y, 3).double() - p
    gradient = J.T @ residual.flatten() - (around.shift + step) / PRIOR
    assert float(gradient.norm()) < 1e-5 * float((around.shift / PRIOR).norm())
    _, _, path = descend(make, 5)
    assert all(after <= before for before, after in path)
    fitted = linnet.TangentClassifier(model, mean="network", relinearize=3, progress=False).fit(X, y)
    assert 1 <= len(fitted.relinearized_) <= 3 and fitted.predict_proba(X).sum(1) == pytest.approx(torch.ones(30))


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_files_hold_the_weights(tmp_path, kind):
    model = network(1 if kind == "numbers" else 3)
    X = points(30)
    if kind == "numbers":
        X, y = numbers(model, by=1.0)
        est = linnet.TangentRegressor(model, mean="network", relinearize=2, progress=False).fit(X, y)
    else:
        est = linnet.TangentClassifier(model, mean="network", relinearize=2, progress=False)
        est = est.fit(X, moved(model, 2.0)(X).argmax(1))
    assert any(step.accepted for step in est.relinearized_)
    est.save(tmp_path / "file")
    given = copy.deepcopy(model)
    loaded = linnet.load(tmp_path / "file", given)
    ask = "predict" if kind == "numbers" else "predict_proba"
    torch.testing.assert_close(getattr(loaded, ask)(X), getattr(est, ask)(X), rtol=1e-9, atol=1e-12)
    assert loaded.relinearized_ == est.relinearized_ and isinstance(loaded.relinearized_[0], Relinearization)
    assert all(torch.equal(loaded.delta_[name], value) for name, value in est.delta_.items())
    assert torch.equal(flat(given), flat(model))
    with pytest.raises(NotImplementedError, match="condition is not known"):
        loaded.condition(X[:2], points(2)[:, 0] if kind == "numbers" else torch.tensor([0, 1]))


def test_files_hold_weights_only_where_these_are_not_the_users_own(tmp_path):
    model = network()
    X, y = numbers(model, by=1.0)
    est = linnet.TangentRegressor(model, mean="network", progress=False)
    for relinearize in (0, 1, 0):
        est.set_params(relinearize=relinearize).fit(X, y)
        assert any(step.accepted for step in est.relinearized_) == bool(relinearize)
        est.save(tmp_path / "file")
        names = {name for name in load_file(tmp_path / "file") if name.startswith("network.")}
        assert names == ({f"network.{name}" for name in model.state_dict()} if relinearize else set())
    with pytest.raises(ValueError, match="other weights"):
        linnet.load(tmp_path / "file", moved(model, 0.1))


def test_what_a_fit_around_other_weights_does_not_take():
    model = network()
    X, y = numbers(model, by=1.0)
    reg = linnet.TangentRegressor(model, mean="network", relinearize=1, progress=False).fit(X, y)
    assert reg.relinearized_[0].accepted
    for name, ask in {
        "condition": lambda: reg.condition(X, y),
        "refit": lambda: reg.refit(X, y),
        "forget": lambda: reg.forget([0]),
        "path": lambda: reg.path(X, 1.0),
        "certificate_": lambda: reg.certificate_,
        "merge": lambda: linnet.merge([reg, reg]),
    }.items():
        with pytest.raises(NotImplementedError, match=rf"{name} is not known .*relinearize=0"):
            ask()
    reg.set_params(relinearize=0).fit(X, y)
    assert reg.relinearized_ == () and reg.condition(X, y).predict(X).shape == y.shape


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"solver": "cg-function"}, "solver='cg-function'"),
        ({"mean": "zero"}, "mean='zero'"),
        ({"inputs": True}, "inputs=True"),
        ({"top": "evidence"}, "top='evidence'"),
        ({"model": None}, "model=None"),
        ({"noise": "heteroscedastic"}, "noise='heteroscedastic'"),
        ({"model": [network(), network()]}, "not for an ensemble"),
    ],
)
def test_settings_that_do_not_go_with_other_weights(settings, match):
    X, y = numbers(network())
    reg = linnet.TangentRegressor(**{"model": network(), "relinearize": 1, "progress": False} | settings)
    with pytest.raises(NotImplementedError, match=match):
        reg.fit(X, y)


def test_what_is_no_number_of_steps_and_other_calls():
    model = network()
    X, y = numbers(model)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="largest number of steps"):
            linnet.TangentRegressor(model, relinearize=wrong).fit(X, y)
    reg = linnet.TangentRegressor(model, relinearize=1, progress=False)
    with pytest.raises(NotImplementedError, match="source="):
        reg.fit(X, y, source=(X, y))
    with pytest.raises(NotImplementedError, match="fit_tasks"):
        reg.fit_tasks([(X, y), (X, y)])
    clf = linnet.TangentClassifier(network(2), relinearize=1, solver="adam", inference="map", progress=False)
    with pytest.raises(NotImplementedError, match="solver='adam'"):
        clf.fit(X, (y > 0).long())
    # Where zero is the better mean function, the network's weights are not written over.
    level = linnet.TangentRegressor(moved(model, 5.0), relinearize=1, progress=False).fit(X, y)
    assert (level.mean_ == "zero") == (level.relinearized_ == ())


def test_another_model_that_was_chosen_takes_no_step():
    model = network()
    X = points(60)
    y = (3 * X[:, 0]).sin() * (2 * X[:, 1]).cos()
    reg = linnet.TangentRegressor(model, relinearize=2, progress=False).fit(X, y)
    plain = linnet.TangentRegressor(model, progress=False).fit(X, y)
    assert reg.inputs_ == plain.inputs_ and reg.mean_ == plain.mean_
    assert reg.inputs_ is not None or reg.mean_ == "zero"
    assert reg.relinearized_ == ()
    torch.testing.assert_close(reg.predict(X), plain.predict(X), rtol=1e-12, atol=0)
