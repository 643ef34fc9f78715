r"""Which examples of a pool to label next, from the joint covariance of a fitted estimator.

The estimator gives the outputs of the pool a Gaussian, :math:`f \sim N(m, C)`. The likelihood gives a label the
curvature :math:`B_i = L_i L_i^\top` in the outputs of its example. A label of example i, whatever the label is, changes
the covariance to

.. math:: C - C_{\cdot i} L_i N_i^{-1} L_i^\top C_{i \cdot}, \qquad N_i = I + L_i^\top C_{ii} L_i .

So examples are chosen one after another, each with the covariance that the labels of the earlier ones will leave. Two
examples that say the same are not both chosen. For numbers with Gaussian noise all of this is exact. For other
likelihoods the curvature is the Fisher information at the mean of the outputs: the change of the covariance is
Laplace's approximation.

============  ==========================================================================================  ==========
method        score of an example                                                                         jointly
============  ==========================================================================================  ==========
"variance"    sum of the variances of its outputs                                                         yes
"bald"        mutual information of its label and the weights (Houlsby et al. 2011)                       no
"batchbald"   the same given the labels of the examples chosen before (Kirsch et al. 2019)                yes
"bait"        how much its label lowers the variances at the targets, in units of the noise of a label    yes
              (Ash et al. 2021)
"epig"        mutual information of its label and the label of a target, on average over targets          yes
              (Bickford Smith et al. 2023)
============  ==========================================================================================  ==========

Information of a class label is the entropy of the averaged probabilities less the average of the entropies. Information
of other labels, and of pairs of labels, is that of Gaussians: :math:`\tfrac12 \log\det N_i`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from linnet._common import check_fits, messages, show_progress, together
from linnet._estimator import check_inputs, convert_like, example_codes
from linnet.data import Source, as_source
from linnet.jacobian import Jacobian
from linnet.laplace import Laplace
from linnet.probability import (
    Bernoulli,
    Categorical,
    KnownNoise,
    Likelihood,
    Ordinal,
    Posterior,
    Rule,
    Sites,
    average_classes,
    entropy,
    make_rule,
)
from linnet.tangent import TangentClassifier, TangentGLM, TangentRegressor

__all__ = ["Selection", "select"]

Method = Literal["variance", "bald", "batchbald", "bait", "epig"]
Overlap = Literal["raise", "exclude", "allow"]

TARGETS = 200
"""Examples of the pool that stand for all inputs: time and memory against the error of an average over them."""

DRAWS = 128
"""Draws of the logits of an example: time against noise in its score. All examples share the draws."""

ENTRIES = 2**18
"""Numbers that are made at once where draws, or pairs of examples, are many: what fits the cache of a CPU."""


class Selection(NamedTuple):
    """Examples to label next.

    Attributes:
        indices: (n,), positions in the pool, in the order in which the examples were chosen.
        scores: (n,), the score of each example when it was chosen.
    """

    indices: Any
    scores: Any


@together
def select(
    estimator: Any,
    pool: Any,
    n: int,
    method: Method = "batchbald",
    *,
    targets: Any = None,
    overlap: Overlap = "raise",
    seed: int = 0,
) -> Selection:
    """Choose n examples of a pool whose labels say most.

    Args:
        estimator: A fitted `TangentRegressor`, `TangentClassifier`, `TangentGLM` or `Laplace` with error bars.
        pool: Inputs without labels, as the estimator's predict takes them. Examples are read by position.
        n: How many examples.
        method: "variance", "bald", "batchbald", "bait" or "epig"; the table of `linnet.onward.selection` has their
            scores. "bald" scores each example by itself and needs little memory; the others choose the n examples
            jointly.
        targets: Inputs that predictions are for, which "bait" and "epig" score by; None draws up to 200 from the pool.
        overlap: What to do with examples of the pool that the estimator was fitted to: "raise" an error, "exclude" the
            examples, or "allow" them, for targets that are measured again.
        seed: Seed of targets and draws.

    Returns:
        Positions in the pool, in the order of choice, and scores. Arrays for arrays, tensors for tensors.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
        >>> X = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
        >>> reg = TangentRegressor(model, noise=0.01).fit(X[:10], torch.sin(2 * X[:10, 0]))
        >>> indices, scores = select(reg, X[10:], 3)
        >>> bool((scores > 0).all()), int(indices[0])  # the example that is farthest from the data
        (True, 29)
    """
    _check_arguments(estimator, n, method, overlap, seed)
    J = estimator._jacobian(_checked(estimator, pool))
    allowed = _find_allowed(estimator, J._source, overlap)
    if int(allowed.sum()) < n:
        raise ValueError(
            f"n={n} examples are asked for, and the pool has {int(allowed.sum())} to choose from. Ask for fewer, or "
            "give a larger pool."
        )
    posterior, generator = estimator._error_bars, torch.Generator().manual_seed(seed)
    J = J if posterior.D is None and J.by_position else J.cached_if_fits()
    _check_fits(estimator, J, 0 if method == "bald" else n, targets if method in ("bait", "epig") else False)
    if method == "bald":
        candidates = _describe(estimator, J, pool, posterior.blocks(J))
        scores = _information(candidates, _integration(candidates, generator))
        best = torch.where(allowed.to(scores.device), scores, -torch.inf).topk(n)
        return _selection(pool, best.indices, best.values)
    if posterior.known_from_samples and n * J.c > posterior.most_draws(0):
        warnings.warn(
            f"{n} examples with {J.c} outputs are to be chosen from a posterior of {posterior.most_draws(0)} samples, "
            "whose covariances have no larger rank: the last examples are chosen by noise. Choose fewer at a time, or "
            "fit with more samples=.",
            stacklevel=3,
        )
    features = Features(posterior, J)
    candidates = _describe(estimator, J, pool, features.blocks())
    others = None
    if method in ("bait", "epig"):
        others = _find_targets(estimator, features, candidates, targets, generator)
    state = JointCovariance(features, candidates, n, others)
    score: Callable[[], Tensor]
    if method == "variance":
        score = state.variances
    elif method == "batchbald":
        rule = _integration(candidates, generator)
        score = lambda: _information(state.candidates(), rule)  # noqa: E731
    else:
        score = state.lowered_variances if method == "bait" else state.shared_information
    indices, gains = [], []
    with show_progress(n, "examples to label", progress=estimator.progress) as tick:
        left = allowed.to(J.device)
        for k in range(n):
            scores = torch.where(left, score(), -torch.inf)
            i = int(scores.argmax())
            indices.append(i)
            gains.append(float(scores[i]))
            left[i] = False
            if k + 1 < n:
                state.observe(i)
            tick()
    return _selection(pool, torch.tensor(indices), torch.tensor(gains, dtype=J.dtype))


class Candidates(NamedTuple):
    """Gaussian outputs of examples, and what a label says about them.

    Attributes:
        mean: (m, c).
        blocks: (m, c, c), covariances.
        root: (m, c, r), L.
        likelihood: Of a label; None for Gaussian noise.
    """

    mean: Tensor
    blocks: Tensor
    root: Tensor
    likelihood: Likelihood | None


class Features:
    """The posterior covariance of the outputs of some examples: T and rows of J, read once.

    Args:
        posterior: The posterior.
        J: Jacobian of the examples.
        T: (m c, k), where T is known.
    """

    def __init__(self, posterior: Posterior, J: Jacobian, T: Tensor | None = None) -> None:
        self.posterior, self.J = posterior, J
        self.T = posterior.features(J) if T is None else T

    def blocks(self) -> Tensor:
        """The covariance of the outputs of each example, (m, c, c)."""
        T, D = self.T.view(self.J.n, self.J.c, -1), self.posterior.D
        out = (self.posterior.weights * T) @ T.mT
        if D is None:
            return out
        rows = self.posterior._rows_of_squares(self.J)
        return out + rows.gram_blocks(scale=D.to(rows.dtype)).to(out)

    def cross(self, other: Features) -> Tensor:
        """The covariance with the outputs of other examples, (m c, m' c)."""
        out, rows = (self.posterior.weights * self.T) @ other.T.T, self.posterior._rows
        return out if self.posterior.D is None else out + rows(self.J).gram(rows(other.J), scale=self.posterior.D)

    def subset(self, index: Tensor) -> Features:
        """Those of some examples."""
        T = self.T.view(self.J.n, self.J.c, -1)[index.to(self.T.device)].flatten(0, 1)
        return Features(self.posterior, self.J.subset(index), T)


class Targets(NamedTuple):
    """Inputs that predictions are for.

    Attributes:
        features: Their covariance.
        root: (t, c, r), L.
        blocks: (t, c, c), covariances.
    """

    features: Features
    root: Tensor
    blocks: Tensor


class JointCovariance:
    """The joint covariance of a pool, and of the pool with targets, given the labels of some examples.

    The covariance (m c, m c) is never formed: features, and one column of width r for each observed label, give all
    parts of it that scores need.

    Args:
        features: The covariance before any of the labels.
        candidates: Outputs of the pool.
        n: How many labels will be observed.
        targets: Targets, or None.
    """

    def __init__(self, features: Features, candidates: Candidates, n: int, targets: Targets | None) -> None:
        self.features, self.targets = features, targets
        self.mean, self.blocks, self.root, self.likelihood = candidates
        m, c, r = self.root.shape
        self.columns, self.observed = self.blocks.new_empty(m * c, (n - 1) * r), 0
        if targets is not None:
            cross = targets.features.cross(features).view(-1, c, m, c)
            self.shared = torch.einsum("tdmc,tdr->mctr", cross, targets.root).reshape(m * c, -1)
            self.target_blocks = targets.root.mT @ targets.blocks @ targets.root
            self.blocks = self.blocks.clone()  # targets may be views of it

    def candidates(self) -> Candidates:
        """The outputs of the pool, with the covariances that observed labels leave."""
        return Candidates(self.mean, self.blocks, self.root, self.likelihood)

    def observe(self, i: int) -> None:
        """Take the label of example i for known."""
        m, c, r = self.root.shape
        L, own, known = self.root[i], slice(i * c, (i + 1) * c), self.columns[:, : self.observed]
        column = self.features.cross(self.features.subset(torch.tensor([i]))) - known @ known[own].T
        N = torch.linalg.cholesky(_precision(self.blocks[i], L))
        U = torch.linalg.solve_triangular(N, (column @ L).T, upper=False).T  # (m c, r)
        self.columns[:, self.observed : self.observed + r] = U
        self.observed += r
        each = U.view(m, c, r)
        self.blocks -= each @ each.mT
        if self.targets is not None:
            V = torch.linalg.solve_triangular(N, L.T @ self.shared[own], upper=False)  # (r, t r)
            self.shared -= U @ V
            part = V.view(r, -1, r).movedim(0, -1)  # (t, r, r)
            self.target_blocks -= part @ part.mT

    # Scores, (m,).

    def variances(self) -> Tensor:
        """The sum of the variances of the outputs."""
        return self.blocks.diagonal(dim1=1, dim2=2).sum(1)

    def lowered_variances(self) -> Tensor:
        """How much a label lowers the trace of ``L^T C L`` of a target, on average over targets."""
        m, c, r = self.root.shape
        N = torch.linalg.cholesky(_precision(self.blocks, self.root))
        X = self.shared.view(m, c, -1)
        half = torch.linalg.solve_triangular(N, self.root.mT, upper=False)
        return ((half @ (X @ X.mT)) * half).sum((1, 2)) * r / X.shape[2]

    def shared_information(self) -> Tensor:
        """The mutual information of a label and the label of a target, on average over targets."""
        m, c, r = self.root.shape
        t = len(self.target_blocks)
        eye = torch.eye(r, dtype=self.blocks.dtype, device=self.blocks.device)
        N = torch.linalg.cholesky(_precision(self.blocks, self.root))
        Nt = torch.linalg.cholesky(self.target_blocks + eye)  # (t, r, r)
        half = torch.linalg.solve_triangular(N, self.root.mT, upper=False)  # (m, r, c)
        out = []
        for W, X in zip(
            *(x.split(max(1, ENTRIES // (t * r * r))) for x in (half, self.shared.view(m, c, -1))), strict=True
        ):
            R = (W @ X).view(len(W), r, t, r).permute(0, 2, 3, 1)  # (., t, r of the target, r)
            R = torch.linalg.solve_triangular(Nt, R, upper=False)
            # The determinant of what the target's label leaves of the example's.
            left = eye - R.mT @ R
            out.append(-torch.linalg.cholesky(left).diagonal(dim1=-2, dim2=-1).log().sum(-1).mean(1))
        return torch.cat(out)


# Information of one label.


def _integration(candidates: Candidates, generator: torch.Generator) -> Rule | None:
    """How to average over the outputs of classes; None for no need."""
    if not isinstance(candidates.likelihood, Bernoulli | Categorical | Ordinal):
        return None
    mean = candidates.mean
    return make_rule(candidates.likelihood, mean.shape[1], mean, DRAWS, generator)


def _information(candidates: Candidates, rule: Rule | None) -> Tensor:
    """The mutual information of the label of each example and its outputs, (m,), in nats."""
    mean, blocks, root, likelihood = candidates
    if rule is None:
        N = torch.linalg.cholesky(_precision(blocks, root))
        return N.diagonal(dim1=1, dim2=2).log().sum(1)
    assert likelihood is not None
    p, inner = average_classes(likelihood, mean, blocks, rule)
    return entropy(likelihood, p) - inner


def _precision(blocks: Tensor, root: Tensor) -> Tensor:
    """``I + L^T C L``."""
    inner = root.mT @ blocks @ root
    return inner + torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)


# From the estimator and the pool.


def _describe(estimator: Any, J: Jacobian, X: Any, blocks: Tensor) -> Candidates:
    """The outputs at the inputs of J, which are X; blocks are their covariances."""
    if isinstance(estimator, TangentRegressor):
        f = J.outputs()
        return Candidates(f, blocks, torch.diag_embed(estimator._noise_at(f, X).rsqrt()), None)
    likelihood, (f, shift, _) = estimator.likelihood_, estimator.posterior_.predict(J)
    mean = f if isinstance(estimator, Laplace) else estimator._mean_function(f) + shift
    root = likelihood.root(mean)
    return Candidates(mean, blocks, torch.diag_embed(root) if root.ndim == 2 else root, likelihood)


def _find_targets(
    estimator: Any, pool: Features, candidates: Candidates, targets: Any, generator: torch.Generator
) -> Targets:
    """The targets that were given, or some of the pool."""
    if targets is None:
        index = torch.randperm(pool.J.n, generator=generator)[:TARGETS].sort().values
        where = index.to(candidates.root.device)
        return Targets(pool.subset(index), candidates.root[where], candidates.blocks[where])
    J = estimator._jacobian(_checked(estimator, targets)).cached_if_fits()
    features = Features(pool.posterior, J)
    found = _describe(estimator, J, targets, features.blocks())
    return Targets(features, found.root, found.blocks)


def _check_fits(estimator: Any, J: Jacobian, n: int, targets: Any) -> None:
    """Raise where the matrices do not fit memory.

    Args:
        estimator: The estimator.
        J: Jacobian of the pool.
        n: How many examples are chosen jointly; 0 for each by itself.
        targets: The targets, None for some of the pool, or False for none.
    """
    m, c = J.n, J.c
    width, t = 0, 0
    if n:
        width = 2 * estimator._error_bars.features(J.subset(torch.tensor([0]))).shape[1] + n * c
        if targets is not False:
            t = min(m, TARGETS) if targets is None else as_source(targets, estimator.lin_.module.forward).n
    check_fits(
        m * c * (4 * c + width + 3 * t * c) * J.dtype.itemsize,
        estimator.memory,
        J.device,
        what=f"The covariance of {m:,} examples with {c:,} outputs" + (f", {n:,} of them chosen," if n else ""),
        instead="Choose a part of the pool first, with method='bald' and a larger n, and select from that part"
        if n
        else "Give a part of the pool",
    )


def _checked(estimator: Any, X: Any) -> Any:
    flat = getattr(estimator, "model", None) is None
    return check_inputs(estimator, X, reset=False, flat=flat)


def _find_allowed(estimator: Any, pool: Source, overlap: Overlap) -> Tensor:
    """Which examples of the pool may be chosen, (m,) of booleans; the error where the pool has training examples."""
    allowed = torch.ones(pool.n, dtype=torch.bool)
    seen = getattr(estimator, "_train_inputs", [])
    seen = seen if isinstance(seen, list) else [seen]
    if overlap == "allow" or not seen:
        return allowed
    forward = estimator.lin_.module.forward
    known = torch.cat([example_codes(as_source(X, forward)) for X in seen])
    allowed = ~torch.isin(example_codes(pool), known)
    if overlap == "raise" and not bool(allowed.all()):
        first = (~allowed).nonzero()[:, 0]
        raise ValueError(
            f"{len(first):,} of the {pool.n:,} examples of the pool are among those that the estimator was fitted to, "
            f"the first of them example {int(first[0])}. Leave them out of the pool, or pass overlap='exclude'; "
            "overlap='allow' is for targets that can be measured again."
        )
    return allowed


def _selection(pool: Any, indices: Tensor, scores: Tensor) -> Selection:
    return Selection(convert_like(pool, indices.cpu()), convert_like(pool, scores.cpu()))


def _check_arguments(estimator: Any, n: Any, method: Any, overlap: Any, seed: Any) -> None:
    if not isinstance(estimator, TangentRegressor | TangentClassifier | TangentGLM | Laplace):
        raise TypeError(
            "select takes a fitted TangentRegressor, TangentClassifier, TangentGLM or Laplace; got "
            f"{type(estimator).__name__}."
        )
    name = type(estimator).__name__
    check_is_fitted(estimator)
    if estimator.posterior_.is_point:
        raise ValueError(
            f"select needs error bars, and this {name} has a mode alone. Fit it with inference='vi' or 'laplace'."
        )
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n is a number of examples and must be positive; got {n!r}.")
    for value, kind, names in ((method, "method", get_args(Method)), (overlap, "overlap", get_args(Overlap))):
        if value not in names:
            raise ValueError(f"{kind} must be one of {', '.join(map(repr, names))}; got {value!r}.")
    messages.check_seed(seed)
    likelihood = getattr(estimator, "likelihood_", None)
    if isinstance(likelihood, KnownNoise) or getattr(estimator, "_noise_each", False) is True:
        raise ValueError(
            "The fit has a noise for each observation, and it does not know that of the pool. Fit with "
            "noise='evidence', or with one variance for all."
        )
    if isinstance(likelihood, Sites):
        raise NotImplementedError("select is for one label of each example; this fit has a label for each site.")
