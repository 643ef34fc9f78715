"""Training with the evidence: MacKay's solution of a linear model, the Laplace evidence, and what is kept."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet._estimator import epoch, shuffle
from linnet.data import as_source
from linnet.laplace import train_with_evidence
from linnet.laplace.training import EvidenceStep
from linnet.probability import Gaussian
from tests.support.drawn import double, normal


def line(n: int = 60, d: int = 4) -> tuple[Tensor, Tensor]:
    X = normal(n, d)
    return X, X @ normal(d, 1, seed=1) + 0.7 + 0.5 * normal(n, 1, seed=2)


def network(seed: int = 0, c: int = 1) -> nn.Module:
    return double(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, c)), seed=seed)


def curve(n: int = 50) -> tuple[Tensor, Tensor]:
    X = normal(n, 2)
    return X, torch.sin(2 * X[:, :1]) + 0.2 * normal(n, 1, seed=3)


def classes(n: int = 60) -> tuple[Tensor, Tensor]:
    X = normal(n, 2)
    return X, (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def lbfgs(parameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        parameters, max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )


def mackay(X: Tensor, y: Tensor, groups: Tensor, steps: int = 400) -> tuple[Tensor, float, Tensor, float]:
    """Precisions, noise, weights and log evidence of a linear model, by MacKay's updates written out."""
    D = torch.cat([X, torch.ones(len(X), 1).double()], 1)
    a, noise = torch.ones(int(groups.max()) + 1).double(), 1.0
    for _ in range(steps):
        H = D.T @ D / noise + torch.diag(a[groups])
        theta = torch.linalg.solve(H, D.T @ y / noise)[:, 0]
        inverse = torch.linalg.inv(H).diagonal()
        gamma = torch.stack([(1 - a[groups] * inverse)[groups == g].sum() for g in range(len(a))])
        a = torch.stack([gamma[g] / theta[groups == g].square().sum() for g in range(len(a))])
        noise = float((y[:, 0] - D @ theta).square().sum() / (len(y) - gamma.sum()))
    Sigma = D @ torch.diag(1 / a[groups]) @ D.T + noise * torch.eye(len(y)).double()
    value = torch.distributions.MultivariateNormal(torch.zeros(len(y)).double(), Sigma).log_prob(y[:, 0])
    return a, noise, theta, float(value)


LOOP = {"burn_in": 0, "batch_size": 60, "optimizer": lbfgs, "keep": "last", "structure": "full"}


@pytest.mark.parametrize("prior", ["shared", "layerwise"])
@pytest.mark.parametrize(("method", "steps"), [("mackay", None), ("mackay", 1), ("gradient", None)])
def test_the_retrain_loop_is_mackays_solution(prior, method, steps):
    X, y = line()
    groups = torch.tensor([0, 0, 0, 0, 0 if prior == "shared" else 1])
    a, noise, theta, value = mackay(X, y, groups)
    model = double(nn.Linear(4, 1))
    found = train_with_evidence(model, (X, y), "regression", prior=prior, epochs=25, method=method, steps=steps, **LOOP)
    assert found.noise == pytest.approx(noise, rel=1e-5)
    assert list(found.best.scales.values()) == pytest.approx((1 / a).tolist(), rel=1e-5)
    torch.testing.assert_close(torch.cat([model.weight[0], model.bias]).detach(), theta, rtol=1e-5, atol=1e-6)
    assert found.log_evidence == pytest.approx(value, rel=1e-7)  # Laplace is exact here
    assert not model.training


def test_gradient_steps_come_to_the_same_place():
    X, y = line()
    _, noise, _, value = mackay(X, y, torch.zeros(5, dtype=torch.long))
    found = train_with_evidence(
        double(nn.Linear(4, 1)), (X, y), "regression", prior="shared", epochs=80, steps=5, rate=0.05, **LOOP
    )
    assert found.log_evidence == pytest.approx(value, rel=1e-4)
    assert found.noise == pytest.approx(noise, rel=0.02)


# What is trained, and what is kept.


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full", "function"])
def test_the_evidence_is_that_of_laplace(structure):
    X, y = curve()
    model = network()
    found = train_with_evidence(model, (X, y), "regression", structure=structure, epochs=14, burn_in=10, batch_size=20)
    la = linnet.Laplace(model, "regression", structure, prior=found.prior, noise=found.noise)
    with warnings.catch_warnings(action="ignore"):  # few epochs leave it far from a mode
        la.fit(X, y)
    assert la.log_evidence() == pytest.approx(found.log_evidence, rel=1e-9)
    torch.testing.assert_close(la.prior_variance_, found.prior_variance, rtol=1e-12, atol=0)
    assert la.effective_dimension_ == pytest.approx(found.best.dimension, rel=1e-9)


def test_the_best_weights_are_kept():
    X, y = curve()
    common = {"epochs": 20, "burn_in": 5, "batch_size": 20, "every": 3}
    model = network()
    found = train_with_evidence(model, (X, y), "regression", **common)
    assert [step.epoch for step in found.path] == [6, 9, 12, 15, 18]
    assert found.log_evidence == max(step.log_evidence for step in found.path)
    assert len(found.losses) == 20 and found.losses[-1] < found.losses[0]
    last = train_with_evidence(network(), (X, y), "regression", keep="last", **common)
    assert last.best == last.path[-1] and last.path == found.path
    assert isinstance(last.best, EvidenceStep)


def test_the_evidence_rises_and_the_noise_is_found():
    X, y = curve(80)
    found = train_with_evidence(
        network(),
        (X, y),
        "regression",
        epochs=150,
        burn_in=20,
        every=5,
        batch_size=20,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.02),
    )
    assert found.log_evidence > found.path[0].log_evidence + 5
    assert 0.01 < found.noise < 0.2  # 0.04 was drawn
    assert 0 < found.best.dimension < 33


def test_classes_labels_and_heteroscedastic_noise():
    X, y = classes()
    how = {"epochs": 4, "burn_in": 2, "batch_size": 30}
    found = train_with_evidence(network(c=3), (X, y), **how)
    assert found.noise is None and math.isfinite(found.log_evidence)
    on = train_with_evidence(network(), (X, (y > 0).long()), prior="shared", **how)
    assert isinstance(on.prior, float) and on.prior == on.best.scales["all"]
    multi = train_with_evidence(network(c=2), (X, torch.stack([y > 0, y > 1], 1).long()), prior="ntk", **how)
    assert multi.prior is None and multi.prior_variance.shape == (42,)
    X, z = curve()
    both = train_with_evidence(network(c=2), (X, z), "heteroscedastic", structure="diag", **how)
    assert math.isfinite(both.log_evidence) and both.noise is None
    given = train_with_evidence(network(), (X, z), Gaussian(0.3), prior={"0": 2.0, "2": 0.5}, **how)
    assert given.noise == 0.3 and given.prior == {"0": 2.0, "2": 0.5} and given.best.scales == {}
    fixed = train_with_evidence(network(), (X, z), "regression", noise=0.1, **how)
    assert fixed.noise == 0.1 and {step.noise for step in fixed.path} == {0.1}


def test_loaders_schedules_subsets_and_progress():
    X, y = curve()
    seen, made = [], []
    model = network()
    before = model[0].weight.detach().clone()
    loader = DataLoader(TensorDataset(X, y), batch_size=25)
    found = train_with_evidence(
        model,
        loader,
        "regression",
        params="2.*",
        epochs=4,
        burn_in=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        schedule=lambda o: made.append(o) or torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.0),
        progress=seen.append,
    )
    assert made[0].param_groups[0]["lr"] == 0.0
    assert tuple(seen) == found.path and len(seen) == 3
    assert list(found.best.scales) == ["2"] and found.prior_variance.shape == (9,)
    assert not torch.equal(before, model[0].weight)  # without a prior, trained all the same
    # The rate was zero from the second epoch on.
    assert found.losses[2] == pytest.approx(found.losses[3], rel=0.2)


def test_batch_norm_keeps_its_statistics():
    X, y = curve()
    model = double(nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
    found = train_with_evidence(model, (X, y), "regression", structure="diag", epochs=6, burn_in=3, batch_size=25)
    assert int(model[1].num_batches_tracked) == 2 * found.best.epoch
    assert not model.training


def test_the_same_seed_is_the_same_training():
    X, y = curve()
    how = {"epochs": 3, "burn_in": 1, "batch_size": 10}
    a, b, c = (train_with_evidence(network(), (X, y), "regression", seed=seed, **how) for seed in (0, 0, 1))
    assert a.losses == b.losses and a.path == b.path
    assert a.losses != c.losses


def test_the_penalty_is_the_prior():
    """Without any data fit, weights shrink as weight decay would have them."""
    X, y = line()
    models = [double(nn.Linear(4, 1)) for _ in range(2)]
    train_with_evidence(
        models[0],
        (X, y),
        "regression",
        prior=0.25,
        noise=2.0,
        epochs=1,
        burn_in=0,
        batch_size=60,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1, weight_decay=2.0 * 4 / 60)
    (0.5 * (models[1](X) - y).square().mean()).backward()
    optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(models[0].bias, models[1].bias, rtol=1e-9, atol=1e-12)


# Steps over data.


def test_epochs_cover_the_data():
    X = torch.arange(7.0)[:, None]
    source = as_source((X, X), nn.Linear(1, 1))
    generator = torch.Generator().manual_seed(0)
    orders = [[batch.rest.flatten().tolist() for batch, _ in shuffle(source, 3, generator)] for _ in range(2)]
    assert [len(part) for part in orders[0]] == [3, 3, 1]
    assert all(sorted(itertools.chain(*order)) == X.flatten().tolist() for order in orders)
    assert orders[0] != orders[1]
    w = torch.zeros(1, requires_grad=True)
    mean = epoch(lambda x: (w - x).square().sum(), [(torch.ones(1), 3)], torch.optim.SGD([w], lr=0.5))
    assert mean == 1.0 and float(w.detach()) == 1.0


def test_errors():
    X, y = curve()
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="prior='balanced' is made from the Jacobian"):
        train_with_evidence(model, (X, y), "regression", prior="balanced")
    with pytest.raises(ValueError, match="likelihood must be one of 'classification', 'regression'"):
        train_with_evidence(model, (X, y), "gamma")
    with pytest.raises(ValueError, match=r"so that Weibull\(\) needs its parameters from the start"):
        train_with_evidence(model, (X, y), "weibull")
    with pytest.raises(ValueError, match=r"noise is a positive variance, and for 'regression'; got 0\.1"):
        train_with_evidence(model, (X, y), noise=0.1)
    with pytest.raises(ValueError, match=r"structure must be one of 'kron', .*; got 'samples'"):
        train_with_evidence(model, (X, y), "regression", structure="samples")
    with pytest.raises(ValueError, match="method must be 'gradient' or 'mackay'; got 'em'"):
        train_with_evidence(model, (X, y), "regression", method="em")
    with pytest.raises(ValueError, match="keep must be 'best' or 'last'; got 'first'"):
        train_with_evidence(model, (X, y), "regression", keep="first")
    with pytest.raises(ValueError, match="every must be a positive number; got 0"):
        train_with_evidence(model, (X, y), "regression", every=0)
    with pytest.raises(ValueError, match="from 0 to 4; got 5"):
        train_with_evidence(model, (X, y), "regression", epochs=5, burn_in=5)
    with pytest.raises(ValueError, match="rate must be positive; got 0"):
        train_with_evidence(model, (X, y), "regression", rate=0)
    with pytest.raises(ValueError, match="the target y is None"):
        train_with_evidence(model, X, "regression")
    counts = torch.ones(50, 1)
    counts[-1] = -1.0  # in a later batch
    with pytest.raises(ValueError, match="Poisson needs counts"):
        train_with_evidence(model, (X, counts), linnet.likelihoods.Poisson(), burn_in=0, epochs=1, batch_size=5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # before any step
    with pytest.raises(ArithmeticError, match=r"in epoch .*: the steps are too long"):
        train_with_evidence(model, (X, y), "regression", burn_in=90, optimizer=lambda p: torch.optim.SGD(p, lr=1e6))
    exact = double(nn.Linear(2, 1))
    with torch.no_grad():
        perfect = exact(X)
    with pytest.raises(ValueError, match="The targets equal the network's outputs exactly"):
        frozen = {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-300), "burn_in": 0, "epochs": 1}
        train_with_evidence(exact, (X, perfect), "regression", **frozen)
