"""The Gaussian processes to compare with are the closed form."""

import pytest
import torch

from experiments.common.ensembles import initial, module
from experiments.common.processes import Features, Process
from tests.support.drawn import normal

WIDTHS = (2, 5, 4, 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def networks(m, widths=WIDTHS):
    return initial(m, widths, generator=generator(), dtype=torch.float64)


def closed_form(K, k, k0, y, noise):
    solve = torch.linalg.solve(K + noise * torch.eye(len(K)), torch.cat([y[:, None], k], 1))
    return k.T @ solve[:, 0], k0 - (k * solve[:, 1:]).sum(0) + noise


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_processes_are_the_closed_form(kernel):
    X, y, at = normal(12, 2), normal(12, seed=1), normal(5, 2, seed=2)
    features = Features(module(networks(1)[0], WIDTHS))
    process = Process(X, y, kernel=kernel, features=features)
    process.fit(iterations=5, starts=False)
    mean, variance = process.predict(at)
    Z, W = features(X).detach(), features(at).detach()
    scale, noise = process.kernel.outputscale.item(), process.likelihood.noise.item()
    if kernel == "linear":
        K, k, k0 = scale * Z @ Z.T, scale * Z @ W.T, scale * W.square().sum(1)
    else:
        length = process.kernel.base_kernel.lengthscale.item()
        K, k = (scale * torch.exp(-torch.cdist(Z, V).square() / (2 * length**2)) for V in (Z, W))
        k0 = torch.full((5,), scale, dtype=torch.float64)
    expected = closed_form(K, k, k0, y, noise)
    torch.testing.assert_close(mean, expected[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(variance, expected[1], rtol=1e-6, atol=1e-8)


def test_own_hyperparameters_have_the_larger_evidence():
    X, y = normal(3, 8, 1), normal(3, 8, seed=1) * torch.tensor([[0.1], [1.0], [5.0]])
    shared, own = (Process(X, y, kernel="rbf", own=own) for own in (False, True))
    together, apart = (process.fit(iterations=15, starts=False) for process in (shared, own))
    assert apart > together + 1
    assert own.likelihood.noise.shape == (3, 1)


def test_hyperparameters_travel():
    X, y = normal(8, 1), normal(8, seed=1)
    first = Process(X, y, kernel="rbf")
    first.fit(starts=False)
    second = Process(normal(2, 5, 1), normal(2, 5), kernel="rbf")
    second.load_hyperparameters(first.hyperparameter_state())
    assert second.likelihood.noise.item() == first.likelihood.noise.item()
