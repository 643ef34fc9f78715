r"""How unsure a classifier is of an input: scores that people know, from a Gaussian over the outputs.

With :math:`f \sim N(m, C)` and :math:`\bar p = E[p(y \mid f)]`:

======================  ===================================================================================
score                   what it is
======================  ===================================================================================
"max_probability"       one less the largest averaged probability :math:`1 - \max_k \bar p_k`
"entropy"               entropy of the averaged probabilities :math:`H(\bar p)`
"expected_entropy"      average of the entropies :math:`E[H(p(y \mid f))]`: the noise of a label
"mutual_information"    the first less the second: what the label would say about the weights (BALD; Houlsby et al.
                        2011)
"relative_variance"     :math:`v / (v + g^2)`, with g the mean of the largest logit less the average of all logits,
                        and v its variance
"energy"                :math:`-\log \sum_k \exp m_k` (Liu et al. 2020); it takes no variance
"moderated_energy"      the same of :math:`g_k / \sqrt{1 + \pi v_k / 8}`, the logits less their average, scaled as for
                        the probit link by their own variances (MacKay 1992)
======================  ===================================================================================

All of them are larger for an input that is less known. A mixture of several Gaussians has the same scores: its
:math:`\bar p` and its average entropy are averages, and v has the part that lies between the Gaussians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from linnet.probability.expectations import Covariance, FactoredCovariance, nodes
from linnet.probability.likelihoods import Bernoulli, Categorical, Likelihood, standard_normal

UncertaintyScore = Literal[
    "max_probability",
    "entropy",
    "expected_entropy",
    "mutual_information",
    "relative_variance",
    "energy",
    "moderated_energy",
]

ENTRIES = 2**18
"""Numbers that are made at once where draws are many: what fits the cache of a CPU."""


class Rule(NamedTuple):
    """How to average over Gaussian outputs.

    Attributes:
        eps: (s, k), standard normal: draws, or for outputs that are apart the nodes of a rule (s, 1).
        weights: (s,).
    """

    eps: Tensor
    weights: Tensor


class ClassBeliefs(NamedTuple):
    """What Gaussian outputs say about the classes of some inputs.

    Attributes:
        likelihood: Of a label.
        probabilities: (n, classes), averaged.
        expected_entropy: (n,), the average of the entropies.
        mean: (n, c), of the outputs.
        centered: (n, c), the mean of each output less the average of all outputs of the input.
        variance: (n, c), of each output less the average of all.
    """

    likelihood: Likelihood
    probabilities: Tensor
    expected_entropy: Tensor
    mean: Tensor
    centered: Tensor
    variance: Tensor


def make_rule(likelihood: Likelihood, width: int, like: Tensor, draws: int, generator: torch.Generator) -> Rule:
    """Nodes for outputs that are apart, else draws with their negatives, the same for all examples.

    Args:
        likelihood: Of a label.
        width: c, or the number of columns of a factor.
        like: A tensor of the dtype and device.
        draws: How many draws.
        generator: Of the draws.
    """
    if likelihood.diagonal:
        z, w = zip(*nodes(), strict=True)
        return Rule(like.new_tensor(z)[:, None], like.new_tensor(w))
    half = standard_normal(((draws + 1) // 2, width), like, generator)
    return Rule(torch.cat([half, -half]), like.new_full((2 * len(half),), 1 / (2 * len(half))))


def average_classes(likelihood: Likelihood, mean: Tensor, cov: Covariance, rule: Rule) -> tuple[Tensor, Tensor]:
    """Averaged probabilities (n, classes), and the averages of their entropies (n,), for outputs N(mean, cov).

    Args:
        likelihood: Of a label.
        mean: (n, c).
        cov: (n, c, c), or factors of that.
        rule: Of the average.
    """
    eps, weights = rule
    parts = cov.T if isinstance(cov, FactoredCovariance) else cov
    step = max(1, ENTRIES // (len(eps) * mean.shape[1]))
    found, inner = [], []
    for m, C in zip(mean.split(step), parts.split(step), strict=True):
        root = C if isinstance(cov, FactoredCovariance) else None
        if likelihood.diagonal:
            v = C.diagonal(dim1=1, dim2=2) if root is None else root.square().sum(-1)
            f = m + v.clamp_min(0).sqrt() * eps[:, :, None]
        else:
            if root is None:
                values, Q = torch.linalg.eigh(C)
                root = (Q * values.clamp_min(0).sqrt()[:, None]) @ Q.mT
            f = m + torch.einsum("mcd,sd->smc", root, eps)
        p = likelihood.mean(f)  # (s, ., classes)
        found.append(torch.tensordot(weights, p, 1))
        inner.append(weights @ entropy(likelihood, p))
    return torch.cat(found), torch.cat(inner)


def entropy(likelihood: Likelihood, p: Tensor) -> Tensor:
    """Of class probabilities (..., classes); labels that are on or off have one each, and their entropies add up."""
    found = torch.special.entr(p)
    return (found + torch.special.entr(1 - p) if isinstance(likelihood, Bernoulli) else found).sum(-1)


def describe_classes(likelihood: Likelihood, mean: Tensor, cov: Covariance | None, rule: Rule) -> ClassBeliefs:
    """What outputs N(mean, cov) say about the classes; None for outputs that are known."""
    together = isinstance(likelihood, Categorical)  # what moves all logits by the same moves no probability
    level = mean.mean(1, keepdim=True) if together else torch.zeros_like(mean[:, :1])
    if cov is None:
        p = likelihood.mean(mean)
        return ClassBeliefs(likelihood, p, entropy(likelihood, p), mean, mean - level, torch.zeros_like(mean))
    p, inner = average_classes(likelihood, mean, cov, rule)
    if isinstance(cov, FactoredCovariance):
        T = cov.T - cov.T.mean(1, keepdim=True) if together else cov.T
        v = T.square().sum(-1)
    else:
        C = cov - cov.mean(1, keepdim=True) if together else cov
        v = (C - C.mean(2, keepdim=True) if together else C).diagonal(dim1=1, dim2=2).clamp_min(0)
    return ClassBeliefs(likelihood, p, inner, mean, mean - level, v)


def mix_beliefs(weights: Sequence[float], parts: Sequence[ClassBeliefs]) -> ClassBeliefs:
    """The beliefs of a mixture of Gaussians."""

    def average(values: Sequence[Tensor]) -> Tensor:
        first, *rest = [w * value for w, value in zip(weights, values, strict=True)]
        return sum(rest, first)

    p, inner, mean, centered = (
        average([part[at] for part in parts])  # type: ignore[misc]
        for at in (1, 2, 3, 4)
    )
    v = average([part.variance + (part.centered - centered).square() for part in parts])
    return ClassBeliefs(parts[0].likelihood, p, inner, mean, centered, v)


def score_uncertainty(score: UncertaintyScore, beliefs: ClassBeliefs) -> Tensor:
    """The score of each input, (n,): larger for an input that is less known; see the table of the module.

    For several labels that are on or off, "max_probability" is that of the most probable set of labels, entropies add
    up, "relative_variance" is the average over the labels, and "moderated_energy" is that of two logits for each label,
    half the logit up and half down, added up.

    >>> f, C = torch.tensor([[4.0, 0.0], [0.4, 0.0]]), torch.eye(2).repeat(2, 1, 1)
    >>> rule = make_rule(Categorical(), 2, f, 1000, torch.Generator().manual_seed(0))
    >>> beliefs = describe_classes(Categorical(), f, C, rule)
    >>> score_uncertainty("relative_variance", beliefs)  # 1/2 / (1/2 + 2^2), and 1/2 / (1/2 + 0.2^2)
    tensor([0.1111, 0.9259])
    """
    likelihood, p, inner, mean, centered, variance = beliefs
    if score == "max_probability":
        labels = isinstance(likelihood, Bernoulli)
        return 1 - (torch.maximum(p, 1 - p).prod(1) if labels else p.amax(1))
    if score in ("entropy", "expected_entropy"):
        return inner if score == "expected_entropy" else entropy(likelihood, p)
    if score == "mutual_information":
        return entropy(likelihood, p) - inner
    if score == "relative_variance":
        share = variance / (variance + centered.square()).clamp_min(torch.finfo(mean.dtype).tiny)
        if isinstance(likelihood, Bernoulli):
            return share.mean(1)
        return share.gather(1, centered.argmax(1, keepdim=True))[:, 0]
    if score == "moderated_energy":
        if isinstance(likelihood, Bernoulli):
            half = centered / 2 / (1 + math.pi / 32 * variance).sqrt()
            return -torch.logaddexp(half, -half).sum(1)
        return -(centered / (1 + math.pi / 8 * variance).sqrt()).logsumexp(1)
    return -mean.logsumexp(1)


def check_score(score: str, likelihood: Likelihood, *, point: bool) -> None:
    """Raise unless the likelihood has the score.

    Args:
        score: Its name.
        likelihood: Of a label.
        point: Whether there are no error bars.
    """
    if score not in get_args(UncertaintyScore):
        raise ValueError(f"score must be one of {', '.join(map(repr, get_args(UncertaintyScore)))}; got {score!r}.")
    if score in ("mutual_information", "relative_variance", "moderated_energy") and point:
        raise ValueError(
            f"score={score!r} needs error bars, and this estimator has a mode alone. Fit it with inference='vi' or "
            "'laplace', or take score='entropy'."
        )
    takes: dict[str, tuple[type[Likelihood], ...]] = {
        "energy": (Categorical,),
        "moderated_energy": (Categorical, Bernoulli),
        "relative_variance": (Categorical, Bernoulli),
    }
    if score in takes and not isinstance(likelihood, takes[score]):
        raise ValueError(
            f"score={score!r} is for classes with a logit each; the likelihood is {likelihood!r}. Take score='entropy'."
        )
