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
Phi; `matrix_free` with products of J only. `best_scale` and `best_scales` choose prior scales by the Laplace evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor

from linnet.distributed import add_up
from linnet.evidence import Choice
from linnet.likelihoods import Bernoulli, Categorical, Heteroscedastic, Likelihood
from linnet.operators import LinearOperator, Rows, weigh
from linnet.solve import Solvable, cg, cholesky_, cholesky_solve, log_det_from, solve_lower

Terms = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""From f (n, c) to log p (n,), its gradient in f (n, c), and its curvature."""

Residual = Callable[[Tensor, slice], Tensor]
"""From some rows of ``Phi u`` to the gradient of log p in f, both (r,); the rows are those of whole examples."""

FLOOR = 1e-3
"""The smallest gradient that others are measured by."""

SEARCH = 0.1
"""A step is long enough when the slope along it has come down to this part."""

SHORT = 0.3
"""A step that has to be cut to this part says that the curvature misleads."""

BLOCK = 2**24
"""Entries of a kernel that are weighed at once."""

STEP = 4 / 3 * math.log(10.0)
GRID = [i * STEP for i in range(-3, 4)]
"""Logarithms of the scales that are tried first, in units in which data and prior weigh the same on average."""

SPAN = math.log(1e8)
"""Scales of layers are sought this far down from the common one, and half as far up."""


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
                "Use function_space or weight_space with factor=True, or estimate it with linnet.quadrature."
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
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from a dense kernel; each step is a Cholesky decomposition of :math:`M = I + L^\top K L`, (n c, n c).

    Outputs may be coupled in any way, and B may be singular (it is for softmax): only its root is used. Memory: one
    matrix beside K.

    Args:
        K: (n c, n c), row ``i * c + j`` for output j of example i.
        y: Targets, as ``likelihood.targets`` takes them.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        scale: Use ``scale * K`` for K.
        start: alpha to begin with, (n c,); None for zero.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        factor: Whether to decompose M once more, at the mode.

    Example:
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
    space = _Function(K, scale)
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
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from dense features; each step is a Cholesky decomposition of :math:`H = I + \Phi^\top B \Phi`, (p, p).

    Args:
        Phi: (n c, p), the Jacobian with its columns times prior standard deviations.
        y: As for `function_space`, and so are the others but for ``start``.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        scale: Prior variances times this: use ``sqrt(scale) * Phi`` for Phi.
        start: u to begin with, (p,); None for zero.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        factor: Whether to decompose H once more, at the mode.

    Example:
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
    space = _Weights(Phi, scale)
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
        preconditioner: Of H, in whitened weights.
        start: u to begin with, (p,); None for zero.
        tolerance: Of the relative gradient.
        iterations: At most as many steps.
        cg_iterations: At most as many for one step.

    Example:
        >>> from linnet.likelihoods import Bernoulli
        >>> from linnet.operators import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> matrix_free(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given).converged
        True
    """
    m = check_mean(mean)
    check_operator(J, variance, mean, m)
    space = _Products(J.scaled(variance.sqrt()), preconditioner, tolerance, cg_iterations)
    found = _iterate(space, y, mean, likelihood, start, tolerance, iterations)
    return replace(found, passes=space.passes)


# The evidence of prior scales.


def best_scale(
    A: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    space: str = "function",
    tolerance: float = 1e-2,
) -> Choice:
    """The factor of all prior variances with the largest Laplace evidence.

    Seven scales from 1e-4 to 1e4 (more if the best is the first or the last) bracket the best one, in units in which
    an average eigenvalue of ``L^T K L`` is one; Brent's method refines it. Each mode is the start of the next.

    Args:
        A: K (n c, n c), or Phi (n c, p), both for a scale of one.
        y: As for `function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        space: ``"function"`` for K, ``"weight"`` for Phi.
        tolerance: Of the logarithm of the scale.

    Returns:
        A choice with one scale; its path has every evaluation that was better than all before.

    Example:
        >>> from linnet.likelihoods import Bernoulli
        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> choice = best_scale(K, torch.tensor([1.0, 1.0]), mean=K.new_zeros(2, 1), likelihood=Bernoulli())
        >>> choice.log_evidence > 2 * math.log(0.5)
        True
    """
    if space not in ("function", "weight"):
        raise ValueError(f"space must be 'function' or 'weight'; got {space!r}.")
    solve = function_space if space == "function" else weight_space
    unit = math.log(_unit(A, mean, likelihood, space))
    tried: dict[float, float] = {}
    path: list[float] = []
    last: tuple[float, Tensor] | None = None

    def evidence(t: float) -> float:
        nonlocal last
        scale = math.exp(unit + t)
        start = None
        if last is not None:  # from the same f
            start = last[1] * (last[0] / scale) ** (1.0 if space == "function" else 0.5)
        try:
            mode = solve(A, y, mean=mean, likelihood=likelihood, scale=scale, start=start).checked()
        except ArithmeticError:  # rounding hides the mode at this scale, so that it is no candidate
            if not path and t == max(GRID):
                raise
            tried[t] = -math.inf
            return tried[t]
        last = scale, mode.alpha if mode.u is None else mode.u
        tried[t] = mode.log_evidence
        if not path or tried[t] > path[-1]:
            path.append(tried[t])
        return tried[t]

    def best() -> float:
        return max(tried, key=tried.__getitem__)

    for t in GRID:
        evidence(t)  # all of them: a mean that is sure and wrong gives the evidence a dip before its peak
    for sign in (-1, 1):
        # A best scale at the end of the grid; further out still the prior or the data count for nothing.
        for _ in range(2):
            end = max(tried, key=lambda t: sign * t)
            if best() == end:
                evidence(end + sign * STEP)
    if min(tried) < best() < max(tried):
        minimize_scalar(
            lambda t: -evidence(float(t)),
            bounds=(best() - STEP, best() + STEP),
            method="bounded",
            options={"xatol": tolerance},
        )
    return Choice((math.exp(unit + best()),), (), tried[best()], tuple(path))


def best_scales(
    parts: Mapping[str, Tensor],
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    start: Sequence[float] | None = None,
    steps: int = 50,
) -> Choice:
    """One scale for each part of ``K = sum_l s_l K_l``, by L-BFGS on their logarithms with the analytic gradient.

    The evidence rises along the path and is never below that of the start.

    Args:
        parts: Name to K_l, (n c, n c).
        y: As for `function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        start: Scales to begin with; None for the `best_scale` of the sum, or where that is next to nothing, for
            one large enough to find out which parts matter.
        steps: At most as many.

    Returns:
        A choice with the scales in the order of the parts.
    """
    kernels = list(parts.values())
    common: Choice | None = None
    if start is None:
        K = _mixed(kernels, [1.0] * len(kernels))
        common = best_scale(K, y, mean=mean, likelihood=likelihood)
        start = [max(common.scales[0], 0.01 * _unit(K, mean, likelihood, "function"))] * len(kernels)
    if len(start) != len(kernels):
        raise ValueError(f"There are {len(kernels)} parts, so start needs as many scales; got {len(start)}.")
    alpha: Tensor | None = None
    path: list[float] = []

    def negative(x: Sequence[float]) -> tuple[float, list[float]]:
        nonlocal alpha
        scales = [math.exp(t) for t in x]
        K = _mixed(kernels, scales)
        try:
            mode = function_space(K, y, mean=mean, likelihood=likelihood, start=alpha, tolerance=1e-8).checked()
        except ArithmeticError:  # rounding hides the mode: a finite wall, at which the line search turns back
            if not path:
                raise
            return 1e100, [0.0] * len(scales)
        alpha = mode.alpha
        if not path:
            path.append(mode.log_evidence)
        return -mode.log_evidence, [-g for g in scale_gradient(kernels, scales, mode=mode, likelihood=likelihood)]

    x0 = [math.log(s) for s in start]
    found = minimize(
        negative,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=[(t - SPAN, t + SPAN / 2) for t in x0],
        options={"maxiter": steps, "ftol": 1e-9, "gtol": 1e-4},
        callback=lambda intermediate_result: path.append(-float(intermediate_result.fun)),
    )
    if common is not None and common.log_evidence > -float(found.fun):
        return replace(common, scales=common.scales * len(kernels))
    return Choice(tuple(math.exp(t) for t in found.x), (), -float(found.fun), tuple(path))


def scale_gradient(
    parts: Sequence[Tensor], scales: Sequence[float], *, mode: Mode, likelihood: Likelihood
) -> list[float]:
    r"""Derivatives of the Laplace evidence in the logarithms of the scales of ``K = sum_l s_l K_l``.

    .. math:: \tfrac12 s_l \left((\alpha - w)^\top K_l \alpha - \mathrm{tr}(R K_l)\right), \qquad
              R = L M^{-1} L^\top, \qquad w = (I - R K) h

    where :math:`h = \partial_f \, \mathrm{tr}(\Sigma B(f))`, with the covariance :math:`\Sigma = K - K R K` kept: the
    mode moves with the scales and the curvature with the mode (Rasmussen and Williams, section 5.5.1, for any number
    of coupled outputs).

    Args:
        parts: The K_l, (n c, n c).
        scales: The s_l.
        mode: Of their sum, from `function_space`.
        likelihood: Of the targets given f.
    """
    if mode.factor is None or mode.u is not None:
        raise ValueError("scale_gradient needs a mode from function_space with factor=True.")
    K, root, f = _mixed(parts, scales), mode.root, mode.f
    n, c = f.shape
    dense = torch.diag(root) if root.ndim == 1 else torch.block_diag(*root)
    V = solve_lower(mode.factor, dense.T)
    R = V.T @ V
    T = (V @ K).T.reshape(n, c, n * c)
    at = torch.arange(n, device=K.device)
    Sigma = K.view(n, c, n, c)[at, :, at] - T @ T.mT
    Sigma = Sigma.diagonal(dim1=1, dim2=2) if likelihood.diagonal else Sigma
    with torch.enable_grad():
        moving = f.detach().requires_grad_()
        trace = (Sigma * likelihood.curvature(moving)).sum()
        h = torch.autograd.grad(trace, moving)[0].flatten() if trace.requires_grad else torch.zeros_like(mode.alpha)
    ahead = mode.alpha - h + R @ (K @ h)
    return [0.5 * s * float(ahead @ (K_l @ mode.alpha) - (R * K_l).sum()) for s, K_l in zip(scales, parts, strict=True)]


def _mixed(kernels: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    K = torch.zeros_like(kernels[0])
    for s, K_l in zip(scales, kernels, strict=True):
        K.add_(K_l, alpha=s)
    return K


def _unit(A: Tensor, mean: Tensor, likelihood: Likelihood, space: str) -> float:
    """The scale at which an average eigenvalue of ``L^T K L`` is one, with the larger curvature of f = 0 and f = m."""
    n, c = mean.shape
    largest = 0.0
    for f in (torch.zeros_like(mean), mean):
        B = as_weight(likelihood.curvature(f))
        if space == "weight":
            total = (A * weigh(A, B, slice(0, n * c))).sum()
        elif B.ndim == 1:
            total = A.diagonal() @ B
        else:
            at = torch.arange(n, device=A.device)
            total = (A.view(n, c, n, c)[at, :, at] * B).sum()
        largest = max(largest, float(total))
    if not largest > 0:
        raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
    return n * c / largest


# The iteration.


class _Space(Protocol):
    """Coordinates x of u: alpha or u itself."""

    size: int

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The inner product of two u."""

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        """``Phi u`` (n c,), which may be known but for rounding, the residual there, coordinates of
        ``u - Phi^T residual``, and whether ``Phi u`` was computed anew."""

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        """Coordinates of a step ``-H^-1 g``, where the norm of g is ``ratio`` times the reference, and Phi times it."""


def _iterate(
    space: _Space,
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
        line = Line(partial(_terms, model, y), f, df=df.view(n, c), products=products)
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
    f = mean + shift.view(n, c)
    return Mode(
        f=f,
        alpha=x if isinstance(space, _Function) else r,
        u=None if isinstance(space, _Function) else x,
        log_likelihood=float(likelihood.log_prob(f, y).sum()),
        penalty=0.5 * space.dot(x, x),
        log_det=None,
        gradient=norm,
        iterations=steps,
        passes=0,
        converged=small,
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


def _terms(model: Likelihood | _Softened, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return model.log_prob(f, y), model.residual(f, y), model.curvature(f)


class Line:
    """The objective along a step, ``psi(u + t d)``: it needs no products with Phi.

    Args:
        terms: From f (n, c) to log p (n,), its gradient in f (n, c), and its curvature.
        f: (n, c).
        df: ``Phi d``, (n, c).
        products: ``u^T u``, ``u^T d``, ``d^T d``.
    """

    def __init__(self, terms: Terms, f: Tensor, *, df: Tensor, products: tuple[float, float, float]) -> None:
        self.terms, self.f, self.df, self.products = terms, f, df, products
        self.value, self.slope, _ = self.at(0.0)
        rounding = 64 * torch.finfo(f.dtype).eps * abs(self.value)
        self.highest = self.value + rounding
        self.flat = -self.slope < rounding

    def at(self, t: float) -> tuple[float, float, float]:
        """Value, first and second derivative."""
        uu, ud, dd = self.products
        log_prob, residual, curvature = self.terms(self.f + t * self.df)
        rows = self.df.reshape(-1, 1)
        bend = rows * weigh(rows, as_weight(curvature), slice(0, len(rows)))
        value = 0.5 * (uu + 2 * t * ud + t * t * dd) - float(log_prob.sum())
        slope = ud + t * dd - float((residual * self.df).sum())
        return value, slope, dd + float(bend.sum())

    def search(self) -> float:
        """A length at which the slope has come down to a tenth: 1 close to the mode. 0 where there is no descent."""
        if not self.slope < 0:
            return 0.0
        low, high, t = 0.0, math.inf, 1.0
        for _ in range(100):
            value, slope, bend = self.at(t)
            lower = value <= self.highest
            if lower and abs(slope) <= -SEARCH * self.slope:
                return t
            if lower and slope < 0:
                low = t
            else:
                high = t
            newton = t - slope / bend if bend > 0 else math.inf
            if high == math.inf:
                t = min(max(newton, 2 * t), 10 * t)
            elif low < newton < high and not math.isclose(newton, t):
                t = newton
            else:
                t = 0.5 * (low + high)
        return low


# The spaces.


class _Function:
    r"""``u = Phi^T alpha``: alpha is a coordinate up to the null space of K, which no inner product sees."""

    def __init__(self, K: Tensor, scale: float) -> None:
        self.K, self.scale, self.size = K, scale, len(K)

    def push(self, x: Tensor) -> Tensor:
        return self.scale * (self.K @ x)

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ self.push(b))

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        there = self.push(x) if shift is None else shift
        r = residual(there, slice(0, len(there)))
        return there, r, x - r, shift is None

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        # H^-1 Phi^T g = Phi^T (g - L M^-1 L^T K g), the matrix inversion lemma.
        inner = _by_root(root, self.push(g), transpose=True)
        d = _by_root(root, cholesky_solve(self.factor(root), inner)) - g
        return d, self.push(d)

    def factor(self, root: Tensor) -> Tensor:
        return cholesky_(inner_matrix(self.K, root, scale=self.scale))


class _Weights:
    """u itself, with dense features."""

    def __init__(self, Phi: Tensor, scale: float) -> None:
        self.Phi, self.scale, self.size = Phi, scale, Phi.shape[1]

    def push(self, x: Tensor) -> Tensor:
        return math.sqrt(self.scale) * (self.Phi @ x)

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        there = self.push(x) if shift is None else shift
        r = residual(there, slice(0, len(there)))
        return there, r, x - math.sqrt(self.scale) * (self.Phi.T @ r), shift is None

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        d = -cholesky_solve(self.factor(root), g)
        return d, self.push(d)

    def factor(self, root: Tensor) -> Tensor:
        A = _by_root(root, self.Phi, transpose=True)
        H = (A.T @ A).mul_(self.scale)
        H.diagonal().add_(1)
        return cholesky_(H)


class _Products:
    """u itself, with products only."""

    def __init__(self, Phi: LinearOperator, preconditioner: Solvable | None, tolerance: float, iterations: int) -> None:
        self.Phi, self.preconditioner, self.tolerance, self.iterations = Phi, preconditioner, tolerance, iterations
        self.size, self.passes = Phi.shape[1], 0

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        # Phi u comes with the gradient, in the same pass, so that it need not be known.
        there, r, pulled = self._pass(residual, x)
        return there, r, x - pulled, True

    def _pass(self, fn: Residual, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``Phi x``, ``fn(Phi x)`` and ``Phi^T fn(Phi x)`` in one pass over the data."""
        self.passes += 1
        there, found, seen = x.new_zeros(3, self.Phi.shape[0]).unbind()

        def note(out: Tensor, rows: Rows) -> Tensor:
            assert isinstance(rows, slice)
            there[rows], found[rows], seen[rows] = out[:, 0], fn(out[:, 0], rows), 1
            return found[rows][:, None]

        pulled = self.Phi.fused(note, x[:, None])[:, 0]
        add_up(there, found, seen)  # each rank has seen its own rows, or all of them
        return there / seen, found / seen, pulled

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        B = root.square() if root.ndim == 1 else root @ root.mT
        df, lengths = g.new_zeros(self.Phi.shape[0]), list[Tensor]()
        ahead = df  # Phi times the direction that was multiplied last

        def product(V: Tensor) -> Tensor:
            nonlocal ahead
            if lengths:  # of the direction before, which is known by now
                df.addcmul_(ahead, lengths[-1])
            ahead, _, pulled = self._pass(lambda out, rows: weigh(out[:, None], B, rows)[:, 0], V[:, 0])
            return V + pulled[:, None]

        # Superlinear in the end, cheap at first, and never more accurate than the last step needs to be. CG stopped
        # early still gives a direction of descent.
        forcing = max(min(0.25, math.sqrt(ratio)), min(0.25, 0.5 * self.tolerance / ratio))
        found = cg(
            product,
            -g[:, None],
            preconditioner=self.preconditioner,
            tolerance=forcing,
            iterations=self.iterations,
            verify=False,
            lengths=lengths,
            progress=False,
        )
        if lengths:
            df.addcmul_(ahead, lengths[-1])
        return found.value[:, 0], df


def inner_matrix(K: Tensor, root: Tensor, *, scale: float = 1.0) -> Tensor:
    """``M = I + scale L^T K L``, with one matrix of memory and no more.

    Args:
        K: (n c, n c).
        root: L, (n c,) or (n, c, c).
        scale: Of K.

    >>> inner_matrix(torch.ones(2, 2), torch.tensor([1.0, 2.0]))
    tensor([[2., 2.],
            [2., 5.]])
    """
    if root.ndim == 1:
        M = (K * (scale * root)).mul_(root[:, None])
    else:
        M, (n, c, _) = K.new_empty(K.shape), root.shape
        step = max(1, BLOCK // (c * len(K)))
        for start in range(0, n, step):
            rows = slice(c * start, c * min(start + step, n))
            right = torch.einsum("anc,ncd->and", K[rows].reshape(-1, n, c), root).reshape(-1, len(K))
            M[rows] = scale * weigh(right, root.mT[start : start + step], slice(0, len(right)))
    M.diagonal().add_(1)
    return M


def _with_factor(space: _Function | _Weights, mode: Mode) -> Mode:
    factor = space.factor(mode.root)
    return replace(mode, factor=factor, log_det=float(log_det_from(factor)))


def _by_root(root: Tensor, X: Tensor, *, transpose: bool = False) -> Tensor:
    """``L X`` or ``L^T X`` for X (n c,) or (n c, k)."""
    root = root.mT if transpose and root.ndim == 3 else root
    out = weigh(X if X.ndim == 2 else X[:, None], root, slice(0, len(X)))
    return out if X.ndim == 2 else out[:, 0]


def as_weight(blocks: Tensor) -> Tensor:
    """A weight as operators take it: (n, c) to (n c,), (n, c, c) as it is."""
    return blocks.flatten() if blocks.ndim == 2 else blocks


def check_concave(likelihood: Likelihood) -> None:
    """Raise where log p is not concave in all outputs together, so that there may be several modes."""
    if isinstance(likelihood, Heteroscedastic):
        raise TypeError(
            "Heteroscedastic is not log-concave in means and log variances together, so its mode need not be unique. "
            "Linearize the mean alone (output=) and use Gaussian noise with the variances that the network predicts."
        )


def check_mean(mean: Tensor) -> int:
    """The number of outputs of all examples; raise unless ``mean`` has shape (n, c) and is finite."""
    if mean.ndim != 2:
        raise ValueError(f"mean needs shape (n, c); got {tuple(mean.shape)}.")
    if not bool(torch.isfinite(mean).all()):
        i = int((~torch.isfinite(mean)).any(1).nonzero()[0])
        raise ValueError(f"mean must be finite; example {i} has {mean[i].tolist()[:4]}. Check the network's outputs.")
    return mean.numel()


def check_operator(J: LinearOperator, variance: Tensor, mean: Tensor, rows: int) -> None:
    """Raise unless J (rows, p) and variance (p,) go with each other and with ``mean``."""
    if J.shape[0] != rows:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so J needs {rows} rows; got shape {J.shape}.")
    if tuple(variance.shape) != (J.shape[1],):
        raise ValueError(
            f"J has shape {J.shape}, so variance needs shape ({J.shape[1]},); got {tuple(variance.shape)}."
        )
    check_kind("J", J, mean)
    check_kind("variance", variance, mean)
    if not bool(((variance >= 0) & torch.isfinite(variance)).all()):
        raise ValueError("Prior variances must be finite and not negative; some are not.")


def check_kind(name: str, given: Tensor | LinearOperator, mean: Tensor) -> None:
    """Raise unless ``given`` has the dtype and device of ``mean``."""
    if given.dtype != mean.dtype or given.device != mean.device:
        raise TypeError(
            f"{name} is {given.dtype} on {given.device} and mean is {mean.dtype} on {mean.device}; convert one of them."
        )
