r"""Probes with few labels, GAN inversion and kernel-target alignment, on embeddings E (n, k) of examples.

The kernel is :math:`K = E E^\top`, and no n x n matrix is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet._estimator import like
from linnet.data import Signature
from linnet.fisher import linear_probe
from linnet.fisher.probes import as_arrays
from linnet.scores.generated_samples import GeneratedSamples, Generator, Latent, draw_latents


@dataclass(frozen=True)
class SemiSupervised:
    """Accuracies of probes that saw few labels.

    Attributes:
        counts: How many labels.
        accuracies: (counts, repeats), on the test data.
    """

    counts: tuple[int, ...]
    accuracies: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Over the repeats, (counts,)."""
        return self.accuracies.mean(1)

    @property
    def std(self) -> np.ndarray:
        """Over the repeats, (counts,)."""
        return self.accuracies.std(1)


def semi_supervised_probe(
    E: Any, y: Any, test: tuple[Any, Any], *, counts: Sequence[int], repeats: int = 5, C: float = 1.0, seed: int = 0
) -> SemiSupervised:
    """Probes that are given the labels of a few examples, as many of each class, of an embedding fitted on all.

    Args:
        E: Embeddings (n, k).
        y: Their labels (n,), from which those given are drawn.
        test: Embeddings and labels that accuracies are measured on.
        counts: Numbers of labels, each at least the number of classes.
        repeats: Draws for each number.
        C: As in `linear_probe`.
        seed: Of the draws.

    Example:
        >>> E = torch.linspace(-1, 1, 40)[:, None]
        >>> y = (E[:, 0] > 0).long()
        >>> semi_supervised_probe(E, y, (E, y), counts=[4, 20], repeats=2).mean.shape
        (2,)
    """
    E, y = as_arrays(E, y)
    there = as_arrays(*test)
    classes, sizes = np.unique(y, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"A probe tells classes apart, and there is one label only: {classes.tolist()}.")
    found = []
    for count in counts:
        each = _shares(count, sizes)
        random = [np.random.default_rng([seed, count, repeat]) for repeat in range(repeats)]
        index = [
            np.concatenate([r.choice(np.flatnonzero(y == c), m, False) for c, m in zip(classes, each, strict=True)])
            for r in random
        ]
        found.append([float(linear_probe(E[i], y[i], C=C).score(*there)) for i in index])
    return SemiSupervised(tuple(counts), np.array(found))


def _shares(count: int, sizes: np.ndarray) -> list[int]:
    """How many labels each class gets: as equal as they can be."""
    each = [count // len(sizes) + (i < count % len(sizes)) for i in range(len(sizes))]
    if min(each) < 1 or any(m > size for m, size in zip(each, sizes, strict=True)):
        raise ValueError(
            f"{count} labels of {len(sizes)} classes need 1 to {int(sizes.min())} of each, as many as the smallest "
            f"class has; {count} makes {min(each)} to {max(each)}."
        )
    return each


# GAN inversion.


@dataclass(frozen=True)
class Inversion:
    """A linear map from embeddings to the latents of a generator.

    Attributes:
        embedding: The fitted `linnet.FisherEmbedding` of the discriminator.
        generator: From latents to samples.
        W: (k, d), and ``b`` (d,): the latent of x is ``E(x) W + b``, flattened.
        b: See W.
        shape: Of one latent.
        explained: Share of the latents' variance that the map explains on the samples it was fitted to.
    """

    embedding: Any
    generator: Generator
    W: Tensor
    b: Tensor
    shape: tuple[int, ...]
    explained: float

    def latents(self, X: Any) -> Any:
        """The latents of examples, (n, *shape)."""
        E = torch.as_tensor(self.embedding.transform(X)).to(self.W)
        return like(X, (E @ self.W + self.b).view(-1, *self.shape))

    def reconstruct(self, X: Any) -> Any:
        """What the generator makes of the latents of examples."""
        h = torch.as_tensor(self.latents(X))
        source = GeneratedSamples(self.generator, h, Signature(lambda x: x), device=self.W.device)
        return like(X, torch.cat([batch.args[0] for batch in source.batches(256)]))


def invert(
    embedding: Any, generator: Generator, *, latent: Latent, samples: int = 10_000, ridge: float = 0.0, seed: int = 0
) -> Inversion:
    r"""Invert a GAN by a linear map from embeddings to latents (Zhang et al. 2022, appendix C.2).

    .. math:: \min_W \sum_i \| h_i - W e(G(h_i)) - b \|^2 + \lambda \|W\|^2

    Args:
        embedding: A fitted `linnet.FisherEmbedding` of the discriminator.
        generator: G.
        latent: What h is drawn from; see `linnet.scores.gan`.
        samples: How many h.
        ridge: lambda.
        seed: Of h.
    """
    h = draw_latents(latent, samples, seed)
    lin = embedding.lin_
    E = embedding.transform(GeneratedSamples(generator, h, Signature(lin.module.forward), device=lin.device)).double()
    H = h.flatten(1).to(E)
    if len(H) <= E.shape[1]:
        raise ValueError(f"A map from {E.shape[1]} numbers needs more than as many samples; got {len(H)}.")
    # Centered, so that the constant is not penalized.
    e, mean = E - E.mean(0), H.mean(0)
    A = torch.cat([e, torch.full((), ridge, dtype=E.dtype).sqrt() * torch.eye(E.shape[1]).to(E)])
    W = torch.linalg.lstsq(A, torch.cat([H - mean, H.new_zeros(E.shape[1], H.shape[1])])).solution
    left = (H - mean - e @ W).square().sum() / (H - mean).square().sum()
    b = mean - E.mean(0) @ W
    return Inversion(embedding, generator, W, b, tuple(h.shape[1:]), 1 - float(left))


# Alignment.


@dataclass(frozen=True)
class Alignment:
    """How well targets lie along the leading components of a kernel.

    Attributes:
        value: Kernel-target alignment, from 0 to 1.
        shares: (k,), the part of the targets' squared length along each eigenvector of the kernel, largest eigenvalue
            first. Where they come early, gradient descent learns the targets fast (appendix B, equation 8).
    """

    value: float
    shares: Any

    @property
    def cumulative(self) -> Any:
        """Running sums of the shares, (k,)."""
        return self.shares.cumsum(0)


def kernel_target_alignment(E: Any, y: Any, *, centered: bool = True) -> Alignment:
    r"""The alignment of :math:`K = E E^\top` with targets, and where they lie in its spectrum (appendix B).

    .. math:: \frac{\langle K, Y Y^\top \rangle}{\|K\|_F \, \|Y Y^\top\|_F}, \qquad
              \text{shares}_j = \|u_j^\top Y\|^2 / \|Y\|^2

    Args:
        E: Embeddings (n, k).
        y: Class labels (n,) of whole numbers, booleans or strings, which become one column for each class; or real
            targets or residuals, (n,) or (n, c).
        centered: Whether kernel and targets are centered first (Cortes et al. 2012).

    Example:
        >>> E = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
        >>> round(kernel_target_alignment(E, [0, 0, 1, 1]).value, 6)
        1.0
    """
    e, Y = torch.as_tensor(E).double(), _columns(y)
    Y = Y.to(e.device)
    if len(e) != len(Y):
        raise ValueError(f"There are {len(e)} embeddings and {len(Y)} targets; give one target for each.")
    if centered:
        e, Y = e - e.mean(0), Y - Y.mean(0)
    norms = float((e.T @ e).norm()), float((Y.T @ Y).norm())
    if 0.0 in norms:
        what, how = "embeddings" if norms[0] == 0 else "targets", "all the same" if centered else "zero"
        raise ValueError(f"The {what} are {how}, so they have no direction to compare.")
    value = float((e.T @ Y).square().sum()) / (norms[0] * norms[1])
    U, s, _ = torch.linalg.svd(e, full_matrices=False)
    shares = (U.T @ Y).square().sum(1) / Y.square().sum()
    # Vectors of zero singular values are no eigenvectors of a component.
    return Alignment(value, like(E, shares.where(s > len(e) * torch.finfo(e.dtype).eps * s[0], 0.0)))


def _columns(y: Any) -> Tensor:
    """Targets as (n, c) in float64; labels as one column for each class."""
    found = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if found.ndim == 1 and found.dtype.kind != "f":
        found = (found[:, None] == np.unique(found)).astype(float)
    return torch.as_tensor(found, dtype=torch.float64).reshape(len(found), -1)
