r"""Prior scales with the largest Laplace evidence, for any log-concave likelihood.

.. math:: \log Z(s) = \log p(y \mid f) - \tfrac12 u^\top u - \tfrac12 \log\det(I + L^\top K L),
          \qquad K = \sum_l s_l K_l

at the mode for the scales s (`linnet.inference.mode.newton`). Each value takes a mode and a decomposition, so the
search saves values: a part of the data says where to look, the slopes say where the top is, and every mode starts from
the nearest mode that is known. The search is `linnet.inference.evidence.search.maximize`.

One scale may have a hyperprior, since the evidence of few labels is often flat or largest at no scale. The hyperprior
is log-normal. Its median is the scale at which an average eigenvalue of ``L^T K L`` is one, where K is first centered
over the examples: what moves all examples alike tells no example from another. With t the logarithm of the scale and m
that of the median, the search maximizes

.. math:: \log Z - \tfrac{(t - m)^2}{2 w^2} , \qquad w = 1 .

The hyperprior costs two nats where the outputs vary e times as much as at the median, or 1 / e times. Many labels
outweigh two nats.

The mode moves with the scales, and the curvature B with the mode (Rasmussen and Williams, section 5.5.1, here for any
number of coupled outputs). With :math:`R = L M^{-1} L^\top`, :math:`\Sigma = K - K R K` and
:math:`h = \partial_f \, \mathrm{tr}(\Sigma B(f))` for a fixed :math:`\Sigma`,

.. math:: \partial_{\log s_l} \log Z = \tfrac12 s_l \left(\alpha^\top K_l \alpha - \mathrm{tr}(R K_l)
          - h^\top (I - K R) K_l \alpha\right) .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import Choice
from linnet.inference.evidence.search import Maximum, Slope, maximize
from linnet.inference.mode.newton import Mode, function_space, weight_space
from linnet.linalg import solve_lower
from linnet.probability import Likelihood, Weighted

WIDTH = 1.0
"""w, the standard deviation of the logarithm of the scale in its hyperprior."""

STEP = 4 / 3 * math.log(10.0)
"""Distance of the logarithms of the scales that are tried where nothing is known: shorter costs more modes, longer may
step over a peak."""

WIDE = 28.0
"""The largest distance of the logarithm of a scale from where its search begins: twelve decades."""

PART = 400
"""Rows that are enough to know where to look: fewer mislead, more cost time. Twice as many are searched at once."""


@dataclass(frozen=True)
class _AtMode:
    """The evidence at a mode; the slopes, which cost a triangular solve, when they are asked for."""

    value: float
    make_slopes: Callable[[], list[Slope]]

    @cached_property
    def slopes(self) -> list[Slope]:
        return self.make_slopes()


# One scale.


def choose_scale(
    A: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    space: str = "function",
    gain: float = 1e-5,
    hyperprior: bool = False,
) -> tuple[Choice, Mode]:
    """The factor of all prior variances with the largest Laplace evidence, and the mode there.

    Scales of all magnitudes, in units in which an average eigenvalue of ``L^T K L`` is one, say where the search
    begins. Where there are many rows, an eighth of the examples is searched so first, and all of them from there; only
    where that part asks for next to no scale, or where all of the data then say less than no scale at all, are all
    magnitudes tried on all.

    Args:
        A: K (n c, n c), or Phi (n c, p), both for a scale of one.
        y: As for `linnet.inference.mode.newton.function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        space: ``"function"`` for K, ``"weight"`` for Phi.
        gain: Log evidence that is not worth another mode.
        hyperprior: Whether the hyperprior counts beside the evidence.

    Returns:
        A choice with one scale, and the mode with that scale, without its factor.

    Example:
        >>> from linnet.likelihoods import Bernoulli
        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> choice, _ = choose_scale(K, torch.tensor([1.0, 1.0]), mean=K.new_zeros(2, 1), likelihood=Bernoulli())
        >>> choice.log_evidence > 2 * math.log(0.5)
        True
    """
    if space not in ("function", "weight"):
        raise ValueError(f"space must be 'function' or 'weight'; got {space!r}.")
    n, c = mean.shape
    y = likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device)
    evidence = _ScaleEvidence(A, y, mean, likelihood, space, hyperprior)
    found = evidence.search(gain)
    assert evidence.best is not None
    t, mode = evidence.best
    best = mode.log_evidence + evidence.log_prior(t)
    path = (*(value for value in found.rising if value < best), best)
    return Choice((evidence.scale(t),), (), mode.log_evidence, path), mode


class _ScaleEvidence:
    """The evidence by t, the logarithm of the scale in units of `unit_scale`.

    Attributes:
        best: The t with the largest evidence so far, and its mode.
        last: The last t, and its mode.
        hint: A t and coordinates of a mode where the first mode starts.
    """

    def __init__(
        self, A: Tensor, y: Tensor, mean: Tensor, likelihood: Likelihood, space: str, hyperprior: bool = False
    ) -> None:
        self.hyperprior = hyperprior
        self.A, self.y, self.mean, self.likelihood, self.space = A, y, mean, likelihood, space
        self.unit = math.log(unit_scale(A, y, mean, likelihood, space))
        self.middle = 0.0  # of the hyperprior
        if hyperprior:
            self.middle = math.log(unit_scale(A, y, mean, likelihood, space, centered=True)) - self.unit
        self.best: tuple[float, Mode] | None = None
        self.last: tuple[float, Mode] | None = None
        self.hint: tuple[float, Tensor] | None = None

    def scale(self, t: float) -> float:
        return math.exp(self.unit + t)

    def log_prior(self, t: float) -> float:
        """The logarithm of the hyperprior, up to a constant."""
        return -0.5 * ((t - self.middle) / WIDTH) ** 2 if self.hyperprior else 0.0

    def __call__(self, x: Sequence[float]) -> _AtMode:
        (t,) = x
        start, near = None, None
        known = [(at, _coordinates(mode)) for at, mode in filter(None, (self.last, self.best))]
        known = known or [hint for hint in (self.hint,) if hint is not None]
        if known:
            at, x0 = min(known, key=lambda known: abs(known[0] - t))
            start = x0 * math.exp((at - t) * (1.0 if self.space == "function" else 0.5))  # from the same f
        if self.last is not None and abs(self.last[0] - t) <= STEP / 2:
            near = self.last[1]
        solve = function_space if self.space == "function" else weight_space
        given = {"mean": self.mean, "likelihood": self.likelihood, "scale": self.scale(t)}
        mode = solve(self.A, self.y, start=start, near=near, tolerance=1e-8, **given)  # type: ignore[arg-type]
        # Rounding may stop a mode at a gradient that is small enough.
        mode = mode if mode.gradient <= max(1e-6, torch.finfo(self.mean.dtype).eps ** 0.5) else mode.checked()
        self.last = t, mode
        value = mode.log_evidence + self.log_prior(t)
        if self.best is None or value > self.best[1].log_evidence + self.log_prior(self.best[0]):
            self.best = t, replace(mode, factor=None)
        return _AtMode(value, lambda: [self._add_prior(self._slope(mode, self.scale(t)), t)])

    def _add_prior(self, slope: Slope, t: float) -> Slope:
        """With the slope of the hyperprior, and its curvature."""
        if not self.hyperprior:
            return slope
        more = 2 / WIDTH**2  # half of what both have in common is the curvature
        rest = slope.rest - (t - self.middle) / WIDTH**2
        return slope._replace(up=slope.up + more, down=slope.down + more, rest=rest)

    def search(self, gain: float) -> Maximum:
        climb = partial(maximize, self, bounds=[(-WIDE, WIDE)], gain=gain, longest=STEP / 2)
        first = self.start_by_part()
        if first is not None:
            found = climb([[first]])
            assert self.best is not None
            if self.best[1].log_evidence >= float(self.likelihood.log_prob(self.mean, self.y).sum()):
                return found
        # All magnitudes: a mean that is sure and wrong gives the evidence a dip before its peak.
        return climb([[i * STEP] for i in (-5, -3, -2, -1, 0, 1, 2, 3)])

    def start_by_part(self) -> float | None:
        """Where the evidence of an eighth of the examples is largest; None for few, or where they ask for next to none.

        The mode of the part is where the first mode of all examples starts.
        """
        n, c = self.mean.shape
        if n * c <= 2 * PART:
            return None
        some = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: max(n // 8, PART // c)].sort().values
        some = some.to(self.mean.device)
        rows = (c * some[:, None] + torch.arange(c, device=some.device)).flatten()
        A = self.A[rows][:, rows] if self.space == "function" else self.A[rows]
        try:
            part = _ScaleEvidence(A, self.y[some], self.mean[some], self.likelihood, self.space, self.hyperprior)
            part.search(0.1)
        except (ArithmeticError, ValueError):  # rounding hides the evidence, or the kernel of the part is zero
            return None
        assert part.best is not None
        (top, mode), shift = part.best, part.unit - self.unit
        if top <= -2 * STEP:
            return None
        x = _coordinates(mode)
        if self.space == "function":
            f = self.mean + self.scale(top + shift) * (self.A[:, rows] @ x).view(n, c)
            x = self.likelihood.residual(f, self.y).flatten()
        self.hint = top + shift, x
        return top + shift

    def _slope(self, mode: Mode, s: float) -> Slope:
        """The slope of the evidence in the logarithm of one scale s, from rows of the covariance of f.

        ``Sigma = T^T T`` with ``T = C^-1 Phi^T`` in weight space, and ``K - T^T T`` with ``T = C^-1 L^T K`` in function
        space. The mode moves by ``df = (I - K R) (f - m)``.
        """
        assert mode.factor is not None
        (n, c), C, root = self.mean.shape, mode.factor, mode.root
        moved = (mode.f - self.mean).flatten()
        blocks, pulled = self.mean.new_empty(n, c, c), moved.new_zeros(len(C))
        L = root if root.ndim == 3 else torch.diag_embed(root.view(n, c))
        weighed = torch.einsum("ndc,nd->nc", L, moved.view(n, c))  # L^T (f - m)
        if self.space == "function":
            pulled = solve_lower(C, weighed.reshape(-1, 1))[:, 0]
        step = max(1, 2**24 // (c * len(C)))  # examples at once, for the memory of their rows
        for i in range(0, n, step):
            rows, some = slice(c * i, c * min(i + step, n)), slice(i, i + step)
            if self.space == "function":
                columns = s * torch.einsum("nca,ncd->nad", self.A[:, rows].view(n, c, -1), L)
                T = solve_lower(C, columns.mT.reshape(len(C), -1))
                own = s * self.A[rows, rows].view(-1, c, T.shape[1] // c, c)
                at = torch.arange(len(own), device=own.device)
                Z = T.T.reshape(-1, c, len(C))
                blocks[some] = own[at, :, at] - Z @ Z.mT
                moved[rows] -= T.T @ pulled
            else:
                T = solve_lower(C, math.sqrt(s) * self.A[rows].T)
                Z = T.T.reshape(-1, c, len(C))
                blocks[some] = Z @ Z.mT
                pulled += T @ torch.einsum("ncd,nd->nc", L[some], weighed[some]).flatten()
        if self.space == "weight":
            moved -= math.sqrt(s) * (self.A @ torch.linalg.solve_triangular(C.T, pulled[:, None], upper=True)[:, 0])
        gamma, h = _moving_trace(blocks, mode.f, self.y, self.likelihood)
        return Slope(2 * mode.penalty, gamma, -0.5 * float(h @ moved))


def _coordinates(mode: Mode) -> Tensor:
    return mode.alpha if mode.u is None else mode.u


def _moving_trace(Sigma: Tensor, f: Tensor, y: Tensor, likelihood: Likelihood) -> tuple[float, Tensor]:
    """``tr(Sigma B(f))`` for blocks of Sigma (n, c, c), and its derivative in f (n c,) for a fixed Sigma."""
    Sigma = Sigma.diagonal(dim1=1, dim2=2) if likelihood.diagonal else Sigma
    with torch.enable_grad():
        moving = f.detach().requires_grad_()
        trace = (Sigma * likelihood.observed_curvature(moving, y)).sum()
        h = torch.autograd.grad(trace, moving)[0].flatten() if trace.requires_grad else torch.zeros_like(f).flatten()
    return float(trace.detach()), h


def unit_scale(
    A: Tensor, y: Tensor, mean: Tensor, likelihood: Likelihood, space: str, *, centered: bool = False
) -> float:
    """The scale at which an average eigenvalue of ``L^T K L`` is one, with the larger curvature of f = 0 and f = m.

    An example of weight 2 counts as the same example given twice.

    Args:
        A: K (n c, n c), or Phi (n c, p).
        y: Targets, as the likelihood takes them.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        space: ``"function"`` for K, ``"weight"`` for Phi.
        centered: Whether the rows of all examples are taken less their mean, if that leaves anything.
    """
    n, c = mean.shape
    weight = likelihood.split(y)[1] if isinstance(likelihood, Weighted) else mean.new_ones(n)
    count = float(weight.sum())
    if likelihood.diagonal:
        blocks = (A.diagonal() if space == "function" else A.square().sum(1)).view(n, c)
    elif space == "function":
        at = torch.arange(n, device=A.device)
        blocks = A.view(n, c, n, c)[at, :, at]
    else:
        blocks = A.view(n, c, -1) @ A.view(n, c, -1).mT
    curvatures = [likelihood.observed_curvature(f, y) for f in (torch.zeros_like(mean), mean)]
    largest = max(float((blocks * B).sum()) for B in curvatures)
    if not largest > 0:
        raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
    if centered and count > 1:
        blocks = blocks - _common(A, weight / count, n, c, space, likelihood.diagonal)
        less = max(float((blocks * B).sum()) for B in curvatures) * count / (count - 1)
        largest = less if less > largest * n * c * torch.finfo(A.dtype).eps else largest
    return count * c / largest


def _common(A: Tensor, share: Tensor, n: int, c: int, space: str, diagonal: bool) -> Tensor:
    """The part of the blocks of K that centering removes, (n, c, c), or the diagonals of this part, (n, c).

    Args:
        A: K (n c, n c), or Phi (n c, p).
        share: The weight of each example, (n,); the sum is one.
        n: Examples.
        c: Outputs.
        space: ``"function"`` for K, ``"weight"`` for Phi.
        diagonal: Whether only diagonals are wanted.
    """
    share = share.to(A)
    if space == "function":
        across = torch.einsum("iajb,j->iab", A.view(n, c, n, c), share)
    else:
        center = torch.einsum("jbp,j->bp", A.view(n, c, -1), share)
        across = A.view(n, c, -1) @ center.T
    found = across + across.mT - torch.einsum("iab,i->ab", across, share)
    return found.diagonal(dim1=1, dim2=2) if diagonal else found


# One scale for each layer.


def choose_layer_scales(
    parts: Mapping[str, Tensor],
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    start: Sequence[float] | None = None,
) -> Choice:
    """One scale for each part of ``K = sum_l s_l K_l``, with an evidence that is never below that of the start.

    Args:
        parts: Name to K_l, (n c, n c).
        y: As for `linnet.inference.mode.newton.function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        start: Scales to begin with; None for the scale that `choose_scale` has for the sum, or where that is next to
            nothing, for a scale large enough to find out which parts matter.

    Returns:
        A choice with the scales in the order of the parts.
    """
    kernels = list(parts.values())
    y = likelihood.targets(y, *mean.shape, dtype=mean.dtype, device=mean.device)
    common: Choice | None = None
    if start is None:
        K = add_kernels(kernels, [1.0] * len(kernels))
        common, _ = choose_scale(K, y, mean=mean, likelihood=likelihood)
        start = [max(common.scales[0], 0.01 * unit_scale(K, y, mean, likelihood, "function"))] * len(kernels)
    if len(start) != len(kernels):
        raise ValueError(f"There are {len(kernels)} parts, so start needs as many scales; got {len(start)}.")
    alpha: Tensor | None = None
    # The evidence is off by about the square of the relative gradient, which then is rounding.
    tolerance = torch.finfo(mean.dtype).eps ** 0.5

    def objective(x: list[float]) -> _AtMode:
        nonlocal alpha
        s = [math.exp(t) for t in x]
        K = add_kernels(kernels, s)
        mode = function_space(K, y, mean=mean, likelihood=likelihood, start=alpha, tolerance=tolerance).checked()
        alpha = mode.alpha
        return _AtMode(mode.log_evidence, lambda: scale_slopes(kernels, s, y, mode=mode, likelihood=likelihood))

    x0 = [math.log(s) for s in start]
    found = maximize(objective, [x0], [(t - WIDE, t + WIDE) for t in x0], gain=1e-6)
    if common is not None and common.log_evidence > found.value:
        return replace(common, scales=common.scales * len(kernels))
    return Choice(tuple(math.exp(t) for t in found.x), (), found.value, found.rising)


def scale_slopes(
    parts: Sequence[Tensor], scales: Sequence[float], y: Tensor, *, mode: Mode, likelihood: Likelihood
) -> list[Slope]:
    """The slopes of the Laplace evidence in the logarithms of the scales of ``K = sum_l s_l K_l``.

    Args:
        parts: The K_l, (n c, n c).
        scales: The s_l.
        y: Targets, as the likelihood takes them.
        mode: Of their sum, from `linnet.inference.mode.newton.function_space`.
        likelihood: Of the targets given f.
    """
    if mode.factor is None or mode.u is not None:
        raise ValueError("scale_slopes needs a mode from function_space with factor=True.")
    K, root, (n, c) = add_kernels(parts, scales), mode.root, mode.f.shape
    V = solve_lower(mode.factor, (torch.diag(root) if root.ndim == 1 else torch.block_diag(*root)).T)
    R = V.T @ V
    T = (V @ K).T.reshape(n, c, n * c)
    at = torch.arange(n, device=K.device)
    _, h = _moving_trace(K.view(n, c, n, c)[at, :, at] - T @ T.mT, mode.f, y, likelihood)
    w = h - R @ (K @ h)
    pairs = [(s * (K_l @ mode.alpha), s * float((R * K_l).sum())) for s, K_l in zip(scales, parts, strict=True)]
    return [Slope(float(mode.alpha @ push), gamma, -0.5 * float(w @ push)) for push, gamma in pairs]


def add_kernels(kernels: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """``sum_l s_l K_l``."""
    K = torch.zeros_like(kernels[0])
    for s, K_l in zip(scales, kernels, strict=True):
        K.add_(K_l, alpha=s)
    return K
