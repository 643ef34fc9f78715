"""Networks that are trained together are those that are trained alone."""

import math

import pytest
import torch

from experiments.common.ensembles import Search, find_noise, fit_networks, forward, initial, module, train
from tests.support.drawn import normal

WIDTHS = (2, 5, 4, 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def networks(m, widths=WIDTHS):
    return initial(m, widths, generator=generator(), dtype=torch.float64)


# Networks trained together.


def test_batched_networks_are_torch_modules():
    theta, X = networks(3), normal(3, 7, 2)
    f = forward(theta, X, WIDTHS)
    for i in range(3):
        torch.testing.assert_close(module(theta[i], WIDTHS)(X[i]).squeeze(-1), f[i], rtol=1e-12, atol=1e-12)


def test_training_together_is_training_alone():
    theta, X, y = networks(3), normal(3, 40, 2), normal(3, 40, seed=1)
    rate, decay = torch.tensor([1e-2, 1e-3, 3e-3]), torch.tensor([0.0, 0.1, 0.5])
    valid = (normal(3, 9, 2, seed=2), normal(3, 9, seed=3))

    def run(i):
        return train(
            theta[i],
            X[i],
            y[i],
            WIDTHS,
            rate=rate[i],
            decay=decay[i],
            steps=30,
            batch=16,
            every=5,
            valid=(valid[0][i], valid[1][i]),
            generator=generator(4),
        )

    both = run(slice(None))
    for i in range(3):
        alone = run(slice(i, i + 1))
        torch.testing.assert_close(alone.theta[0], both.theta[i], rtol=1e-9, atol=1e-12)
        assert alone.steps[0] == both.steps[i]


def test_training_matches_torch_adam():
    theta, X, y = networks(1), normal(1, 20, 2), normal(1, 20, seed=1)
    stop = torch.tensor([10])
    ours = train(theta, X, y, WIDTHS, rate=torch.tensor([1e-2]), steps=25, stop=stop, generator=generator())
    model = module(theta[0], WIDTHS).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 25))
        optimizer.zero_grad()
        (model(X[0]).squeeze(-1) - y[0]).square().mean().backward()
        optimizer.step()
    again = module(ours.theta[0], WIDTHS)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-9)


def test_the_best_step_is_kept_even_if_it_is_the_start():
    X = normal(1, 20, 2)
    theta = networks(1)
    y = forward(theta, X, WIDTHS)
    found = train(theta, X, -y, WIDTHS, rate=torch.tensor([1e-2]), steps=20, valid=(X, y), generator=generator())
    assert int(found.steps) == 0 and float(found.loss) == 0
    assert torch.equal(found.theta, theta)


def test_training_needs_one_way_to_stop():
    with pytest.raises(ValueError, match="either validation data"):
        train(networks(1), normal(1, 3, 2), normal(1, 3), WIDTHS, rate=torch.ones(1), steps=1, generator=generator())


def test_an_ensemble_adds_its_disagreement_to_the_noise():
    X = normal(2, 60, 2)
    y = X.sum(-1) + 0.1 * normal(2, 60, seed=1)
    search = Search(steps=60, rates=(1e-2, 1e-3), decays=(0.0,))
    one, five = fit_networks(X, y, WIDTHS, members=3, search=search, generator=generator())
    at = normal(2, 11, 2, seed=2)
    f = torch.stack([forward(five.theta[:, k], at, WIDTHS) for k in range(3)])
    found = five.predict(at, WIDTHS)
    torch.testing.assert_close(found.mean, f.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.variance, f.var(0, unbiased=False) + five.noise[:, None], rtol=1e-9, atol=1e-9)
    assert torch.equal(one.theta[:, 0], five.theta[:, 0])
    torch.testing.assert_close(one.predict(at, WIDTHS).mean, f[0], rtol=1e-9, atol=1e-9)


def test_the_likeliest_noise_takes_the_disagreement_off():
    y = normal(1, 4000)
    found = find_noise(torch.zeros(1, 4000).double(), torch.full((1, 4000), 0.4).double(), y)
    assert float(found) == pytest.approx(0.6, abs=0.06)
