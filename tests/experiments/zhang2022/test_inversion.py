"""GAN inversion by a linear map, against plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.zhang2022 import inversion
from linnet.fisher import FisherEmbedding
from linnet.scores import gan
from tests.support.drawn import double, normal


class Fixed:
    """An embedding by a fixed matrix, in place of a fitted one."""

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self.lin_ = linnet.linearize(nn.Linear(1, 1))  # for its device and the arguments that it takes

    def transform(self, X: Any) -> Any:
        if isinstance(X, Tensor | np.ndarray):
            return X @ (self.A if isinstance(X, Tensor) else self.A.numpy())
        return torch.cat([batch.args[0] @ self.A for batch in X.batches(16)])


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_a_linear_generator_is_inverted(ridge: float) -> None:
    G, A = normal(3, 6, seed=1), normal(6, 4, seed=2)

    def generator(z: Tensor) -> Tensor:
        return z.double().flatten(1) @ G + 2.0

    found = inversion.invert(Fixed(A), generator, latent=(3, 1), samples=50, ridge=ridge, seed=4)
    h = torch.randn(50, 3, generator=torch.Generator().manual_seed(4)).double()
    e = generator(h) @ A
    centered, mean = e - e.mean(0), h.mean(0)
    W = torch.linalg.solve(centered.T @ centered + ridge * torch.eye(4), centered.T @ (h - mean)) if ridge else None
    x = generator(normal(5, 3, seed=9))
    if W is None:
        assert found.explained == pytest.approx(1.0)
        torch.testing.assert_close(found.latents(x), normal(5, 3, seed=9).view(5, 3, 1), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.reconstruct(x), x)
        assert isinstance(found.reconstruct(x.numpy()), np.ndarray)
    else:
        torch.testing.assert_close(found.W, W)
        assert found.explained < 1


def test_an_inversion_needs_more_samples_than_components() -> None:
    with pytest.raises(ValueError, match="from 4 numbers needs more than as many samples; got 4"):
        inversion.invert(Fixed(normal(3, 4)), lambda z: z.double(), latent=3, samples=4)


def test_inversion_of_a_gan_by_its_discriminator() -> None:
    generator = double(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), seed=1)
    discriminator = double(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2)
    with torch.no_grad():
        real = generator(normal(200, 2, seed=5))
    score = gan(generator, latent=2, samples=200)
    embedding = FisherEmbedding(discriminator, n_components=20, score=score).fit(real)
    found = inversion.invert(embedding, generator, latent=2, samples=300, seed=1)
    assert found.explained > 0.9
    error = (found.reconstruct(real) - real).square().sum() / (real - real.mean(0)).square().sum()
    assert float(error) < 0.1
