r"""The mode of a linear model by descent: one pass over the data a step, whatever the likelihood.

The objective is that of `linnet.inference.mode.newton`. A Newton step by conjugate gradients solves with a curvature
that the next step finds changed: a network that becomes sure of its labels loses most of it on the way. So no system is
solved here. A step goes along :math:`-H_k^{-1} \nabla\psi`, with a preconditioner for :math:`H` that the last gradients
have corrected (L-BFGS). One pass gives :math:`\Phi u` and the gradient at the end of a step of the length that was good
last time; along a step f is linear, so that the best length is found without a pass, and only where it is another one
does the gradient there take one more.

With the preconditioners of `linnet.inference.mode.by_passes` a block of ResNet-20 and 3,000 digits take 23 passes to a
relative gradient of 1e-4, and 35 with images of clothes (``python -m benchmarks heads --only real --data FOLDER``).
"""

from __future__ import annotations

import math
from functools import partial
from typing import final

from torch import Tensor

from linnet.inference.mode.line_search import Line
from linnet.inference.mode.newton import FLOOR, Mode, check_concave, check_mean, check_operator, mode_at, terms
from linnet.inference.mode.spaces import SLOW, Products, Renew
from linnet.linalg.conjugate_gradients import Solvable
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import as_weight
from linnet.probability.likelihoods import Likelihood

REMEMBERED = 20
"""Steps whose gradients correct the preconditioner."""

WATCHED, LAG = 4, 0.35
"""Descent lags where so many steps have left more than this part of the gradient."""

LONG = 2.0
"""A step of the last length is taken as it is where the best one is no more than this factor longer or shorter."""

VAIN = 5
"""Steps along which the objective is flat to rounding, in a row and without a smaller gradient, that are the last."""

PASSES = 200
"""At most as many; Newton's method goes on from there."""


def descend(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    preconditioner: Solvable,
    renew: Renew | None = None,
    tolerance: float = 1e-6,
    passes: int = PASSES,
) -> Mode:
    """The mode, or how far it came within a number of passes or until rounding let it go no further.

    Args:
        J: (n c, p).
        y: Targets, as ``likelihood.targets`` takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Of the targets given f.
        preconditioner: Of H, in whitened weights, at the mean.
        renew: As for `linnet.inference.mode.newton.matrix_free`.
        tolerance: Of the relative gradient.
        passes: At most as many.

    Example:
        >>> import torch
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> none = LowRankPreconditioner(torch.zeros(3, 0).double(), torch.zeros(0).double())
        >>> descend(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), preconditioner=none, **given).converged
        True
    """
    m = check_mean(mean)
    check_operator(J, variance, mean, m)
    check_concave(likelihood)
    n, c = mean.shape
    y = likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device)
    space = Products(J.scaled(variance.sqrt()), None, tolerance, 1, renew)
    corrected, norms = _Corrected(preconditioner), list[float]()  # and those of gradients since it was made

    def residual(shift: Tensor, rows: slice) -> Tensor:
        part = slice(rows.start // c, rows.stop // c)
        return likelihood.residual(mean[part] + shift.view(-1, c), y[part]).flatten()

    at = partial(space.at, shift=None, residual=residual)
    x, length, best, vain, steps = mean.new_zeros(space.size), 1.0, math.inf, 0, 0
    shift, r, g, _ = at(x)
    reference = max(float(g.norm()), FLOOR)
    while True:
        f, norm = mean + shift.view(n, c), float(g.norm()) / reference
        if norm <= tolerance or space.passes >= passes or not math.isfinite(norm):
            break
        lags = len(norms) >= WATCHED and norm > LAG * norms[-WATCHED]
        fresh = space.refresh(as_weight(likelihood.root(f)), norm, slow=len(norms) >= SLOW, lags=lags)
        if fresh is not None and space.refresh.another:  # what was learned about the one before misleads
            corrected, norms = _Corrected(fresh), []
        elif fresh is not None:
            corrected.base = fresh
        norms.append(norm)
        d = -length * corrected.solve(g)
        there, r_there, g_there, _ = at(x + d)
        products = space.dot(x, x), space.dot(x, d), space.dot(d, d)
        line = Line(partial(terms, likelihood, y), f, df=(there - shift).view(n, c), products=products)
        # Where values are flat to rounding, the slopes at both ends still tell.
        t = _between(space.dot(g, d), space.dot(g_there, d)) if line.flat else line.search()
        vain, best = (0, norm) if norm < best or not line.flat else (vain + 1, best)
        if t == 0 or vain == VAIN:
            break
        if not 1 / LONG <= t <= LONG:
            d = t * d
            there, r_there, g_there, _ = at(x + d)
        corrected.add(d, g_there - g)
        x, shift, r, g = x + d, there, r_there, g_there
        length *= t if line.flat else line.polished(t)
        steps += 1
    return mode_at(space, x, r, f, y, likelihood, gradient=norm, steps=steps, converged=norm <= tolerance)


def _between(slope: float, there: float) -> float:
    """Where a slope that is negative at 0 and another at 1 vanishes, were it straight."""
    return min(slope / (slope - there), 10.0) if slope < 0 and there > slope else 0.0


@final
class _Corrected:
    """A preconditioner that knows what the gradient did along the last steps.

    Args:
        base: P; another may take its place.
    """

    def __init__(self, base: Solvable) -> None:
        self.base = base
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, step: Tensor, change: Tensor) -> None:
        """A step and how the gradient changed along it, (p,) and (p,)."""
        product = step @ change
        if float(product) > 0:  # else it is rounding
            self._pairs = [*self._pairs, (step, change, product)][-REMEMBERED:]

    def solve(self, g: Tensor) -> Tensor:
        """Nearly ``H^-1 g``, (p,)."""
        q, sizes = g.clone(), []
        for step, change, product in reversed(self._pairs):
            sizes.append((step @ q) / product)
            q -= sizes[-1] * change
        z = self.base.solve(q[:, None])[:, 0]
        for (step, change, product), size in zip(self._pairs, reversed(sizes), strict=True):
            z = z + (size - (change @ z) / product) * step
        return z
