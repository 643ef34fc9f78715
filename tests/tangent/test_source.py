"""Fits that are given the data that the network was trained on: the posterior of these is the prior of the task."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import linnet
from linnet import TangentClassifier, TangentGLM, TangentRegressor
from linnet.data import Joined, as_source
from tests.support.drawn import double, normal

X, X0, NEW = normal(9, 3), normal(13, 3, seed=1), normal(5, 3, seed=2)
Y, Y0 = X[:, 0].sin() + 0.3 * normal(9, seed=3), X0[:, 0].sin() + 0.1 * normal(13, seed=4)
LABELS, LABELS0 = (X[:, 0] > 0).long() + (X[:, 1] > 0).long(), (X0[:, 0] > 0).long() + (X0[:, 1] > 0).long()


def net(outputs: int = 1) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(1.0, float(b.abs().max())))


class Pairs(Dataset[Any]):
    def __init__(self, X: Tensor, y: Tensor) -> None:
        self.X, self.y = X, y

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.X[i], self.y[i]


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_source_posterior_is_the_prior_of_the_task(solver: str) -> None:
    """Dense: the Gaussian posterior of the source with mean zero, conditioned on the task by the textbook formula."""
    model = net()
    reg = TangentRegressor(model, prior="shared", solver=solver).fit(X, Y, source=(X0, Y0))
    J, J0, J1 = (linnet.testing.dense_jacobian(model, x) for x in (X, X0, NEW))
    S = torch.diag(reg.prior_variance_)
    v, v0 = reg.noise_, reg.source_noise_
    A0 = torch.linalg.inv(S) + J0.T @ J0 / v0
    m0, C0 = torch.linalg.solve(A0, J0.T @ Y0 / v0), torch.linalg.inv(A0)
    gain = C0 @ J.T @ torch.linalg.inv(J @ C0 @ J.T + v * torch.eye(9))
    m, C = m0 + gain @ (Y - J @ m0), C0 - gain @ J @ C0
    mean, cov = reg.predict(NEW, return_cov=True)
    close(mean, J1 @ m, rtol=1e-8)
    close(cov, J1 @ C @ J1.T, rtol=1e-8)


@pytest.mark.parametrize("solver", ["function", "weight"])
def test_evidence_of_both_data_is_at_its_largest(solver: str) -> None:
    model, A, B = net(), normal(40, 3, seed=5), normal(50, 3, seed=6)
    a, b = A[:, 0].sin() + 0.3 * normal(40, seed=7), B[:, 0].sin() + 0.1 * normal(50, seed=8)
    reg = TangentRegressor(model, prior="shared", solver=solver, noise_floor=0).fit(A, a, source=(B, b))
    J, y, S = linnet.testing.dense_jacobian(model, torch.cat([A, B])), torch.cat([a, b]), reg.prior_variance_
    rows = torch.tensor([reg.noise_] * 40 + [reg.source_noise_] * 50, dtype=torch.float64)

    def evidence(scale: float, first: float, second: float) -> float:
        noise = rows * torch.tensor([first] * 40 + [second] * 50).double()
        K = scale * (J * S) @ J.T + torch.diag(noise)
        return float(torch.distributions.MultivariateNormal(torch.zeros(90).double(), K).log_prob(y))

    best = evidence(1, 1, 1)
    assert reg.log_evidence_ == pytest.approx(best, rel=1e-9)
    for i in range(3):
        for factor in (0.98, 1.02):
            assert evidence(*(factor if j == i else 1 for j in range(3))) < best


def test_solvers_agree_and_an_iterative_one_has_one_noise() -> None:
    options: dict[str, Any] = {"prior": 0.5, "noise": 0.05}
    a = TangentRegressor(net(), solver="function", **options).fit(X, Y, source=(X0, Y0))
    joined = TangentRegressor(net(), mean="zero", **options).fit(torch.cat([X, X0]), torch.cat([Y, Y0]))
    close(a.predict(NEW), joined.predict(NEW))
    for solver in ("weight", "cg-function", "cg-weight"):
        more = {"tolerance": 1e-10, "preconditioner": "none"} if solver.startswith("cg") else {}
        b = TangentRegressor(net(), solver=solver, **options, **more).fit(X, Y, source=(X0, Y0))
        close(a.predict(NEW), b.predict(NEW), rtol=1e-7)
    c = TangentRegressor(net(), prior="shared", solver="cg-weight").fit(X, Y, source=(X0, Y0))
    assert c.noise_ == c.source_noise_


def test_noise_of_task_and_source_are_found() -> None:
    """Of 400 rows each, with noise 0.3 and 0.05; the standard error of a variance is 5 sqrt(2 / 400)."""
    A, B = normal(400, 3), normal(400, 3, seed=1)
    model = net()
    f, g = (model(x)[:, 0].detach() for x in (A, B))
    y, z = f + 0.3 * normal(400, seed=2), g + 0.05 * normal(400, seed=3)
    reg = TangentRegressor(model).fit(A, y, source=(B, z))
    bound = 5 * math.sqrt(2 / 400)
    assert abs(reg.noise_ / 0.09 - 1) < bound and abs(reg.source_noise_ / 0.0025 - 1) < bound
    several = TangentRegressor(net(2), noise="per-output")
    Y2, Z2 = torch.stack([y, 2 * y], 1), torch.stack([z, 2 * z], 1)
    several.fit(A[:60], Y2[:60], source=(B[:60], Z2[:60]))
    assert several.noise_.shape == several.source_noise_.shape == (2,)
    assert several.predict(NEW, return_std=True, noise=True)[1].shape == (5, 2)


@pytest.mark.parametrize("kind", ["arrays", "dataset", "loader", "both streamed", "task streamed", "dict"])
def test_source_may_be_any_data(kind: str) -> None:
    expected = TangentRegressor(net(), solver="weight").fit(X, Y, source=(X0, Y0)).predict(NEW)
    reg = TangentRegressor(net(), solver="weight")
    if kind == "arrays":
        reg.fit(X.numpy(), Y.numpy(), source=(X0.numpy(), Y0.numpy()))
    elif kind == "dataset":
        reg.fit(X, Y, source=Pairs(X0, Y0))
    elif kind == "loader":
        reg.fit(X, Y, source=DataLoader(TensorDataset(X0, Y0), batch_size=4))
    elif kind == "both streamed":
        reg.fit(Pairs(X, Y), source=Pairs(X0, Y0))
    elif kind == "task streamed":
        reg.fit(Pairs(X, Y), source=(X0, Y0))
    else:

        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net()

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.inner(x)
                return out

        reg = TangentRegressor(Named(), solver="weight").fit({"x": X}, Y, source=({"x": X0}, Y0))
        close(reg.predict({"x": NEW}), expected)
        return
    close(reg.predict(NEW), expected)


def test_joined_sources_give_examples_in_order() -> None:
    model = net()
    parts = [as_source(x, model.forward) for x in (X, Pairs(X0, Y0), NEW)]
    joined, whole = Joined(parts), torch.cat([X, X0, NEW])
    assert joined.n == 27
    for start, stop in ((0, 27), (4, 23), (10, 12), (22, 27)):
        batches = list(joined.batches(4, start, stop))
        torch.testing.assert_close(torch.cat([batch.args[0] for batch in batches]), whole[start:stop])
        assert torch.cat([batch.index for batch in batches]).tolist() == list(range(start, stop))
    assert joined.code() == (joined.code(0, 11) + joined.code(11)) % 2**64


def test_weights_are_those_of_the_task() -> None:
    w = torch.tensor([0, 1, 2, 1, 3, 1, 0, 1, 1])
    options: dict[str, Any] = {"prior": 0.5, "noise": 0.05}
    a = TangentRegressor(net(), **options).fit(X, Y, w, source=(X0, Y0))
    b = TangentRegressor(net(), **options).fit(*(t.repeat_interleave(w, 0) for t in (X, Y)), source=(X0, Y0))
    close(a.predict(NEW), b.predict(NEW))
    assert a.log_evidence_ == pytest.approx(b.log_evidence_, rel=1e-9)


def test_leave_one_out_influence_and_more_data_are_about_the_task(tmp_path: Any) -> None:
    options: dict[str, Any] = {"prior": 0.5, "noise": 0.05}
    reg = TangentRegressor(net(), **options).fit(X, Y, source=(X0, Y0))
    assert reg.loo_.mean.shape == reg.loo_.log_score.shape == (9,) and reg.influence(NEW).shape == (5, 9)
    without = TangentRegressor(net(), **options).fit(X[1:], Y[1:], source=(X0, Y0))
    close(reg.loo_.mean[0], without.predict(X[:1])[0])
    close(reg.influence(NEW)[:, 0], reg.predict(NEW) - without.predict(NEW))
    more = without.condition(X[:1], Y[:1])
    close(more.predict(NEW), reg.predict(NEW))
    assert more.loo_.mean.shape == (9,) and more.noise_ == 0.05
    with pytest.raises(NotImplementedError, match="the prior of a fit with source= is the posterior of the source"):
        reg.refit(X, Y)


@pytest.mark.parametrize("noise", ["evidence", "per-output", 0.1])
def test_files_of_regressors_with_a_source(noise: Any, tmp_path: Any) -> None:
    path, model = tmp_path / "a.safetensors", net()
    reg = TangentRegressor(model, noise=noise).fit(X, Y, source=(X0, Y0))
    reg.save(path)
    found = linnet.load(path, model)
    close(found.predict(NEW, return_std=True, noise=True)[1], reg.predict(NEW, return_std=True, noise=True)[1])
    close(found.predict(NEW), reg.predict(NEW))
    assert found.source_noise_ == reg.source_noise_ and found.noise_ == reg.noise_
    assert found.noise_floored_ == reg.noise_floored_ and found.loo_.mean.shape == (9,)
    assert found.condition(NEW, NEW[:, 0]).loo_.mean.shape == (14,)


def test_classifier_has_the_mode_of_both_data(tmp_path: Any) -> None:
    model = net(3)
    clf = TangentClassifier(model, inference="laplace", prior=0.5).fit(X, LABELS, source=(X0, LABELS0))
    J, y = linnet.testing.dense_jacobian(model, torch.cat([X, X0])), torch.cat([LABELS, LABELS0])
    gradient = J.T @ (nn.functional.one_hot(y, 3) - (J @ clf.posterior_.delta).view(22, 3).softmax(1)).flatten()
    close(gradient, clf.posterior_.delta / 0.5, rtol=1e-5)
    path = tmp_path / "c.safetensors"
    clf.save(path)
    close(linnet.load(path, model).predict_proba(NEW), clf.predict_proba(NEW))
    with pytest.raises(NotImplementedError, match="refit keeps the prior"):
        clf.refit(X, LABELS)
    names = np.array(["a", "b", "c"])
    named = TangentClassifier(model, inference="laplace", prior=0.5)
    named.fit(X.numpy(), names[LABELS], source=(X0.numpy(), names[LABELS0]))
    close(named.predict_proba(NEW.numpy()), clf.predict_proba(NEW))
    ignored = torch.cat([LABELS0, torch.tensor([-100] * 5)])
    again = TangentClassifier(model, inference="laplace", prior=0.5).fit(
        X, LABELS, source=(torch.cat([X0, NEW]), ignored)
    )
    close(again.predict_proba(NEW), clf.predict_proba(NEW))
    counts, counts0 = LABELS.double(), LABELS0.double()
    glm = TangentGLM(net(), prior=0.5).fit(X, counts, source=(X0, counts0))
    both = TangentGLM(net(), prior=0.5, mean="zero").fit(torch.cat([X, X0]), torch.cat([counts, counts0]))
    close(glm.predict(NEW), both.predict(NEW), rtol=1e-6)


def test_ensembles_and_top_blocks_take_a_source() -> None:
    reg = TangentRegressor([net(), copy.deepcopy(net())]).fit(X, Y, source=(X0, Y0))
    assert all(one._source is not None for one in reg.members_)
    deep = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    reg = TangentRegressor(deep, top="evidence").fit(X, Y, source=(X0, Y0))
    assert reg._source is not None and reg.top_path_ is not None


def test_errors_name_the_source() -> None:
    reg = TangentRegressor(net())
    with pytest.raises(ValueError, match=r"those of the source need shape \(13,\); got \(13, 2\)"):
        reg.fit(X, Y, source=(X0, torch.stack([Y0, Y0], 1)))
    with pytest.raises(ValueError, match="13 examples in the source and 12 targets"):
        reg.fit(X, Y, source=(X0, Y0[1:]))
    with pytest.raises(TypeError, match=r"or a Dataset or DataLoader of both, or an estimator .*; got a Tensor"):
        reg.fit(X, Y, source=X0)
    with pytest.raises(TypeError, match="got a tuple of length 3"):
        reg.fit(X, Y, source=(X0, Y0, Y0))
    with pytest.raises(ValueError, match="features"):
        reg.fit(X.numpy(), Y.numpy(), source=(X0[:, :2].numpy(), Y0.numpy()))
    with pytest.raises(ValueError, match="pass that network as model="):
        TangentRegressor().fit(X, Y, source=(X0, Y0))
    with pytest.raises(ValueError, match="does not say what noise the source has"):
        TangentRegressor(net(), noise=[0.1] * 9).fit(X, Y, source=(X0, Y0))
    with pytest.raises(ValueError, match="and those of the source of dtype"):
        TangentClassifier(net(3)).fit(X, LABELS.numpy(), source=(X0, LABELS0.numpy().astype(str)))
    with pytest.raises(ValueError, match="There are 5 labels and the network has 3 classes"):
        TangentClassifier(net(3)).fit(X, LABELS, source=(X0, torch.arange(13) % 5))


def test_an_estimator_that_was_fitted_before_is_a_source() -> None:
    model, how = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), 0), {"prior": 0.4, "noise": 0.2}
    X, y = normal(20, 3), normal(20, seed=1)
    first = TangentRegressor(model, mean="network", **how).fit(X[:12], y[:12])
    found = TangentRegressor(model, prior="balanced").fit(X[12:], y[12:], source=first)
    whole = TangentRegressor(model, mean="network", **how).fit(X, y)
    torch.testing.assert_close(found.predict(X), whole.predict(X), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.log_evidence_, whole.log_evidence_, rtol=1e-9, atol=0.0)
    assert found.prior == "balanced" and found.noise_ == 0.2
    with pytest.raises(ValueError, match="around other weights, or over other parameters: 4 tensors there and 2 here"):
        TangentRegressor(model, "2.*").fit(X, y, source=first)
    with pytest.raises(ValueError, match="around other weights"):
        TangentRegressor(double(nn.Linear(3, 1), 0)).fit(X, y, source=first)
    with pytest.raises(TypeError, match="source= of a TangentClassifier is data, or a fitted TangentClassifier"):
        TangentClassifier(model).fit(X, (y > 0).long(), source=first)
    with pytest.raises(ValueError, match="is for one network"):
        TangentRegressor(**how).fit(X, y, source=TangentRegressor(**how).fit(X, y))
    la = linnet.Laplace(model, "regression", "diag", 1.0, noise=1.0).fit(X, y)
    with pytest.raises(NotImplementedError, match=r"is a variance; got a fitted Laplace.* source=earlier"):
        TangentRegressor(model, prior=la).fit(X, y)
