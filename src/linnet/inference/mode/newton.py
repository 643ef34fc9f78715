r"""The mode and the Laplace evidence of a likelihood on a linear model, by Newton's method.

.. math:: f = m + \Phi u, \qquad u \sim N(0, I), \qquad
          \psi(u) = -\sum_i \log p(y_i \mid f_i) + \tfrac12 u^\top u

with :math:`\Phi = J S^{1/2}` and :math:`K = \Phi \Phi^\top`. The likelihoods are log-concave in f, so the Hessian
:math:`H = I + \Phi^\top B \Phi` is at least the identity and there is one mode, which damped Newton steps reach from
any start. The error of a solution is bounded by its gradient: :math:`\|u - u^*\| \le \|\nabla\psi(u)\|`. Iterations
stop when

.. math:: \|\nabla\psi(u)\| \le \mathrm{tolerance} \cdot \max(\|\nabla\psi(0)\|, 10^{-3}), \qquad
          \nabla\psi(u) = u - \Phi^\top \mathrm{residual}(f),

where 0.001 means a thousandth of a prior standard deviation, for data that the mean function already fits.

The same iteration runs in three spaces: `function_space` on K, where ``u = Phi^T alpha``; `weight_space` on a dense
Phi; `matrix_free` with products of J only. `linnet.inference.evidence.laplace` chooses prior scales by the Laplace
evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from linnet.inference.mode.line_search import Line
from linnet.inference.mode.spaces import (
    Function,
    Nearby,
    Products,
    Renew,
    Space,
    Weights,
    as_weight,
    check_concave,
    check_kind,
    check_mean,
    check_operator,
    inner_matrix,
)
from linnet.linalg.cholesky import Solvable, log_det_from
from linnet.linalg.operator import LinearOperator
from linnet.probability.likelihoods import Bernoulli, Categorical, Likelihood

__all__ = [
    "FLOOR",
    "Line",
    "Mode",
    "as_weight",
    "check_concave",
    "check_kind",
    "check_mean",
    "check_operator",
    "function_space",
    "inner_matrix",
    "matrix_free",
    "terms",
    "weight_space",
]

FLOOR = 1e-3
"""The smallest gradient that others are measured by."""

SHORT = 0.3
"""A step that has to be cut to this part says that the curvature misleads."""


@dataclass(frozen=True)
class Mode:
    r"""The mode of the posterior, and what the Laplace approximation needs there.

    Attributes:
        f: (n, c), the function at the mode.
        alpha: (n c,), with ``u = Phi^T alpha``: from `function_space` such that ``f = m + K alpha`` exactly, from the
            others the likelihood's residual at f, which is the same at the mode.
        u: (p,), whitened weights; None from `function_space`.
        log_likelihood: The sum of log p(y | f).
        penalty: ``u^T u / 2``.
        log_det: ``log det(I + L^T K L) = log det H``; None from `matrix_free`, or where no factor was asked for.
        gradient: Norm of the gradient, relative as the module says.
        iterations: Newton steps.
        passes: Products with J over the data, for `matrix_free`.
        converged: Whether the tolerance was reached.
        root: L at the mode, (n c,) or (n, c, c), with ``B = L L^T``.
        factor: The lower Cholesky factor of M, (n c, n c), or of H, (p, p); None as log_det is.
    """

    f: Tensor
    alpha: Tensor
    u: Tensor | None
    log_likelihood: float
    penalty: float
    log_det: float | None
    gradient: float
    iterations: int
    passes: int
    converged: bool
    root: Tensor
    factor: Tensor | None

    @property
    def objective(self) -> float:
        """What was minimized: psi."""
        return self.penalty - self.log_likelihood

    @property
    def log_evidence(self) -> float:
        """Of the Laplace approximation; exact for Gaussian noise."""
        if self.log_det is None:
            raise ValueError(
                "This mode was found without a factor of its Hessian, so that the evidence lacks its log determinant. "
                "Use function_space or weight_space with factor=True, or estimate it with linnet.linalg.lanczos."
            )
        return -self.objective - 0.5 * self.log_det

    def checked(self) -> Mode:
        """This mode, or an error if the iteration has not converged."""
        if not self.converged:
            raise ArithmeticError(
                f"Newton's method stopped after {self.iterations} steps with a relative gradient of "
                f"{self.gradient:.1e}. Use float64, allow more iterations, or accept a larger tolerance."
            )
        return self


def function_space(
    K: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    scale: float = 1.0,
    start: Tensor | None = None,
    near: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from a dense kernel, by Cholesky decompositions of :math:`M = I + L^\top K L`, (n c, n c).

    The first step takes one; the others do with products while the factor is close enough. Outputs may be coupled in
    any way, and B may be singular (it is for softmax): only its root is used. Memory: one matrix beside K.

    Args:
        K: (n c, n c), row ``i * c + j`` for output j of example i.
        y: Targets, as ``likelihood.targets`` takes them.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        scale: Use ``scale * K`` for K.
        start: alpha to begin with, (n c,); None for zero.
        near: The factor of M at a scale and a mode nearby, which saves decompositions.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        factor: Whether to decompose M once more, at the mode.

    Example:
        >>> import torch
        >>> from linnet.likelihoods import Bernoulli
        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> mode = function_space(K, torch.tensor([1.0, 0.0]), mean=K.new_zeros(2, 1), likelihood=Bernoulli())
        >>> mode.converged, round(mode.log_evidence, 4)
        (True, -1.565)
    """
    m = check_mean(mean)
    if tuple(K.shape) != (m, m):
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so K needs shape ({m}, {m}); got {tuple(K.shape)}.")
    check_kind("K", K, mean)
    space = Function(K, scale, Nearby(near, tolerance))
    found = _iterate(space, y, mean, likelihood, start, tolerance, iterations)
    return _with_factor(space, found) if factor else found


def weight_space(
    Phi: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    scale: float = 1.0,
    start: Tensor | None = None,
    near: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from dense features, by Cholesky decompositions of :math:`H = I + \Phi^\top B \Phi`, (p, p).

    Args:
        Phi: (n c, p), the Jacobian with its columns times prior standard deviations.
        y: As for `function_space`, and so are the others but for ``start``.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        scale: Prior variances times this: use ``sqrt(scale) * Phi`` for Phi.
        start: u to begin with, (p,); None for zero.
        near: The factor of H at a scale and a mode nearby, which saves decompositions.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        factor: Whether to decompose H once more, at the mode.

    Example:
        >>> import torch
        >>> from linnet.likelihoods import Bernoulli
        >>> Phi = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
        >>> mode = weight_space(Phi, torch.tensor([1.0, 0.0]), mean=Phi.new_zeros(2, 1), likelihood=Bernoulli())
        >>> mode.u.shape, round(mode.log_evidence, 4)
        (torch.Size([3]), -1.565)
    """
    m = check_mean(mean)
    if Phi.ndim != 2 or Phi.shape[0] != m:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so Phi needs shape ({m}, p); got {tuple(Phi.shape)}.")
    check_kind("Phi", Phi, mean)
    space = Weights(Phi, scale, Nearby(near, tolerance))
    found = _iterate(space, y, mean, likelihood, start, tolerance, iterations)
    return _with_factor(space, found) if factor else found


def matrix_free(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    preconditioner: Solvable | None = None,
    renew: Renew | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
    cg_iterations: int = 2000,
) -> Mode:
    """The mode from products with J: Newton steps by conjugate gradients, only as accurate as they are useful.

    A step takes one pass over the data for its gradient and one for each CG iteration; the line search takes none.

    Args:
        J: (n c, p).
        y: As for `function_space`, and so are the others but for these.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Of the targets given f.
        preconditioner: Of H, in whitened weights, at the mean.
        renew: From a root of the curvature, (n c,) or (n, c, c), and how many better ones than the first have been
            asked for, to what makes the preconditioner there and nearby, and whose passes are counted; asked where the
            curvature has become another, and after steps of many passes. None keeps the first one.
        start: u to begin with, (p,); None for zero.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        cg_iterations: At most as many for one step.

    Example:
        >>> import torch
        >>> from linnet.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> matrix_free(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given).converged
        True
    """
    m = check_mean(mean)
    check_operator(J, variance, mean, m)
    space = Products(J.scaled(variance.sqrt()), preconditioner, tolerance, cg_iterations, renew)
    return _iterate(space, y, mean, likelihood, start, tolerance, iterations)


# The iteration.


def _iterate(
    space: Space,
    y: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    start: Tensor | None,
    tolerance: float,
    iterations: int,
) -> Mode:
    n, c = mean.shape
    check_concave(likelihood)
    y = likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device)
    model: Likelihood | _Softened = likelihood

    def residual(shift: Tensor, rows: slice) -> Tensor:
        part = slice(rows.start // c, rows.stop // c)
        return model.residual(mean[part] + shift.view(-1, c), y[part]).flatten()

    x = mean.new_zeros(space.size)
    shift, r, g, fresh = space.at(x, None, residual)
    reference = max(math.sqrt(max(space.dot(g, g), 0.0)), FLOOR)
    if start is not None:
        if tuple(start.shape) != (space.size,):
            raise ValueError(f"start needs shape ({space.size},); got {tuple(start.shape)}.")
        x = start.clone()
        shift, r, g, fresh = space.at(x, None, residual)

    steps, stuck, softened, last = 0, False, False, math.inf
    while True:
        f = mean + shift.view(n, c)
        # Below zero only by rounding, where g lies in the null space of K.
        norm = math.sqrt(max(space.dot(g, g), 0.0)) / reference
        small = norm <= tolerance and model is likelihood
        if small and not fresh:  # sums of steps carry rounding of the largest
            shift, r, g, fresh = space.at(x, None, residual)
            continue
        if small or stuck or steps == iterations or not math.isfinite(norm):
            break
        d, df = space.step(g, as_weight(model.root(f)), norm)
        products = space.dot(x, x), space.dot(x, d), space.dot(d, d)
        line = Line(partial(terms, model, y), f, df=df.view(n, c), products=products)
        t = line.search()
        x, steps = x + t * d, steps + 1
        if isinstance(model, _Softened):
            if t == 0 or (t >= 0.5 and float(df.abs().max()) <= 8 * model.width):
                model = model.harder()
        else:
            # Where the objective is flat to rounding and the gradient does not fall either, nothing will help.
            stuck = t == 0 or (line.flat and norm > 0.5 * last)
            last = norm
            if t < SHORT and not softened:
                model, softened = _soften(likelihood, f), True
        shift, r, g, fresh = space.at(x, shift + t * df, residual)
    return mode_at(space, x, r, mean + shift.view(n, c), y, likelihood, gradient=norm, steps=steps, converged=small)


def mode_at(
    space: Space,
    x: Tensor,
    r: Tensor,
    f: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    *,
    gradient: float,
    steps: int,
    converged: bool,
) -> Mode:
    """What was found at coordinates x, with the residual r (n c,), f (n, c) and targets as the likelihood has them."""
    return Mode(
        f=f,
        alpha=x if isinstance(space, Function) else r,
        u=None if isinstance(space, Function) else x,
        log_likelihood=float(likelihood.log_prob(f, y).sum()),
        penalty=0.5 * space.dot(x, x),
        log_det=None,
        gradient=gradient,
        iterations=steps,
        passes=space.passes if isinstance(space, Products) else 0,
        converged=converged,
        root=as_weight(likelihood.root(f)),
        factor=None,
    )


class _Softened:
    r"""A likelihood of logits with its bend spread over a width: :math:`w \log p(y \mid f / w)`, still concave.

    Where logits are large and wrong, log p is a fold with a sharp edge, and Newton steps that start on one side know
    nothing of the other. Wide edges first and narrower ones from there take a few steps each.
    """

    def __init__(self, likelihood: Likelihood, width: float) -> None:
        self.likelihood, self.width = likelihood, width

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.width * self.likelihood.log_prob(f / self.width, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.likelihood.residual(f / self.width, y)

    def curvature(self, f: Tensor) -> Tensor:
        return self.likelihood.curvature(f / self.width) / self.width

    def root(self, f: Tensor) -> Tensor:
        return self.likelihood.root(f / self.width) / math.sqrt(self.width)

    def harder(self) -> Likelihood | _Softened:
        return _Softened(self.likelihood, self.width / 4) if self.width > 4 else self.likelihood


def _soften(likelihood: Likelihood, f: Tensor) -> Likelihood | _Softened:
    width = 0.1 * float(f.abs().max())
    logits = isinstance(likelihood, Bernoulli | Categorical)
    return _Softened(likelihood, width) if logits and width > 1 else likelihood


def terms(model: Likelihood | _Softened, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a `Line` takes of a likelihood with targets y at f (n, c)."""
    return model.log_prob(f, y), model.residual(f, y), model.curvature(f)


def _with_factor(space: Function | Weights, mode: Mode) -> Mode:
    space.near.factor = None  # its memory first
    factor = space.factor(mode.root)
    return replace(mode, factor=factor, log_det=float(log_det_from(factor)))
