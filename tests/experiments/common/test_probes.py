"""Probes with few labels, GAN inversion and alignment, against plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from experiments.common import probes
from linnet.fisher import FisherEmbedding
from linnet.scores import gan
from tests.support.drawn import double, normal

E = normal(40, 5)
LABELS = (E[:, 0] + 0.1 * E[:, 1] > 0).long()


def test_semi_supervised_probes_see_as_many_of_each_class() -> None:
    y = torch.arange(40) % 3
    centers = 10 * normal(3, 5, seed=3)
    x = centers[y] + E
    found = probes.semi_supervised_probe(x, y, (x, y), counts=[3, 12], repeats=4)
    assert found.accuracies.shape == (2, 4)
    assert found.mean.min() > 0.9
    assert found.std.shape == (2,)
    again = probes.semi_supervised_probe(x, y, (x, y), counts=[12], repeats=4)
    np.testing.assert_array_equal(again.accuracies[0], found.accuracies[1])
    # One label of each class: never fewer classes than there are.
    assert probes._shares(7, np.array([5, 5, 5])) == [3, 2, 2]


@pytest.mark.parametrize("count", [2, 100])
def test_numbers_of_labels_that_cannot_be(count: int) -> None:
    y = torch.arange(40) % 3
    with pytest.raises(ValueError, match=rf"{count} labels of 3 classes need 1 to 13"):
        probes.semi_supervised_probe(E, y, (E, y), counts=[count])
    with pytest.raises(ValueError, match="one label only"):
        probes.semi_supervised_probe(E, torch.zeros(40), (E, y), counts=[3])


# GAN inversion.


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

    found = probes.invert(Fixed(A), generator, latent=(3, 1), samples=50, ridge=ridge, seed=4)
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
        probes.invert(Fixed(normal(3, 4)), lambda z: z.double(), latent=3, samples=4)


def test_inversion_of_a_gan_by_its_discriminator() -> None:
    generator = double(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), seed=1)
    discriminator = double(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2)
    with torch.no_grad():
        real = generator(normal(200, 2, seed=5))
    score = gan(generator, latent=2, samples=200)
    embedding = FisherEmbedding(discriminator, n_components=20, score=score).fit(real)
    found = probes.invert(embedding, generator, latent=2, samples=300, seed=1)
    assert found.explained > 0.9
    error = (found.reconstruct(real) - real).square().sum() / (real - real.mean(0)).square().sum()
    assert float(error) < 0.1


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", ["labels", "real", "matrix"])
def test_alignment_is_that_of_the_dense_kernels(kind: str, centered: bool) -> None:
    targets = {"labels": LABELS, "real": normal(40, seed=2), "matrix": normal(40, 3, seed=2)}[kind]
    Y = nn.functional.one_hot(LABELS).double() if kind == "labels" else targets.view(40, -1)
    C = torch.eye(40, dtype=torch.float64) - (1 / 40 if centered else 0)
    K, L = C @ E @ E.T @ C, C @ Y @ Y.T @ C
    found = probes.kernel_target_alignment(E, targets, centered=centered)
    assert found.value == pytest.approx(float((K * L).sum() / (K.norm() * L.norm())), rel=1e-10)
    U = torch.linalg.eigh(K)[1].flip(1)[:, :5]
    shares = (U.T @ C @ Y).square().sum(1) / (C @ Y).square().sum()
    torch.testing.assert_close(found.shares, shares, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.cumulative, shares.cumsum(0), rtol=1e-8, atol=1e-10)


def test_alignment_of_the_targets_with_themselves_is_one() -> None:
    names = np.where(LABELS.numpy() == 1, "a", "b")
    found = probes.kernel_target_alignment(np.eye(2)[LABELS.numpy()], names)
    assert found.value == pytest.approx(1.0)
    np.testing.assert_allclose(found.shares, [1.0, 0.0], atol=1e-12)


def test_alignments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="40 embeddings and 39 targets"):
        probes.kernel_target_alignment(E, LABELS[1:])
    with pytest.raises(ValueError, match="targets are all the same"):
        probes.kernel_target_alignment(E, torch.ones(40))
    with pytest.raises(ValueError, match="embeddings are zero"):
        probes.kernel_target_alignment(0 * E, LABELS, centered=False)
