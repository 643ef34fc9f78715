r"""The mode and the Laplace evidence of a likelihood on a linear model, by preconditioned quasi-Newton steps.

.. math:: f = m + \Phi u, \qquad u \sim N(0, I), \qquad
          \psi(u) = -\sum_i \log p(y_i \mid f_i) + \tfrac12 u^\top u

with :math:`\Phi = J S^{1/2}` and :math:`K = \Phi \Phi^\top`. The likelihoods are log-concave in f, so the Hessian
:math:`H = I + \Phi^\top B \Phi` is at least the identity and there is one mode, which steps with a line search reach
from any start. The gradient bounds the error of a solution: :math:`\|u - u^*\| \le \|\nabla\psi(u)\|`. Iterations stop
when

.. math:: \|\nabla\psi(u)\| \le \mathrm{tolerance} \cdot \max(\|\nabla\psi(0)\|, 10^{-3}), \qquad
          \nabla\psi(u) = u - \Phi^\top \mathrm{residual}(f),

where 0.001 means a thousandth of a prior standard deviation, for data that the mean function already fits.

One loop runs in three spaces: `function_space` on K, where ``u = Phi^T alpha``; `weight_space` on a dense Phi;
`pass_space` with products of J only. A step goes along :math:`-\hat H^{-1} \nabla\psi`. Here :math:`\hat H` is a
preconditioner for H at an earlier curvature that the gradients since then have corrected (L-BFGS). With an exact
factor of H at the present curvature this is a Newton step. The preconditioner is made anew when the last steps have
left too much of the gradient (`PATIENCE`, `LAG`).

Newton steps that were solved by conjugate gradients took more passes over the data. To a relative gradient of 1e-4,
with a block of ResNet-20 and 400 random images, they took 11 passes and these steps take 6; without a preconditioner 33
and 56, and these steps 22 and 28 (``python -m benchmarks heads --only optimum``).

f is linear along a step, so that the line search needs no product with Phi. The gradient is computed at the end of a
step of the length that was good last time, and once more where the best length is a very different one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from torch import Tensor

from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.spaces import (
    FunctionSpace,
    MakeSolve,
    PassSpace,
    Solve,
    Space,
    WeightSpace,
    check_concave,
    check_kind,
    check_mean,
    check_operator,
)
from linnet.linalg import LinearOperator, as_weight, cholesky_solve, log_det_from, weigh
from linnet.probability import Gaussian, Likelihood, row_curvature, row_root

FLOOR = 1e-3
"""The smallest gradient that others are measured by, in prior standard deviations."""

PATIENCE, LAG = 3, 0.3
"""A preconditioner is made anew where so many steps have left more than this part of the gradient. More patience takes
more steps and fewer preconditioners."""

PAIRS = 60
"""Steps whose gradients correct the preconditioner, or a third of them where all would take more than 4 GiB:
more take more memory, fewer take more steps. Without a preconditioner 60 take half of the passes that 20 take."""

FORMULA = 64
"""Outputs from which on a formula of the curvature of classes is faster than products with its blocks."""


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
        log_det: ``log det(I + L^T K L) = log det H``; None from `pass_space`, or where no factor was asked for.
        gradient: Norm of the gradient, relative as the module says.
        iterations: Steps.
        passes: Passes over the data, for `pass_space`.
        converged: Whether the tolerance was reached.
        root: L at the mode, (n c,) or (n, c, c), with ``B = L L^T``.
        factor: The lower Cholesky factor of M, (n c, n c), or of H, (p, p); None where log_det is None.
        scale: The factor of K, or of the prior variances, that the mode was found with.
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
    scale: float = 1.0

    @property
    def objective(self) -> float:
        """The minimum that was found, psi."""
        return self.penalty - self.log_likelihood

    @property
    def log_evidence(self) -> float:
        """The log evidence of the Laplace approximation; exact for Gaussian noise."""
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
                f"The search for the mode stopped after {self.iterations} steps with a relative gradient of "
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
    near: Mode | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from a dense kernel, by Cholesky decompositions of :math:`M = I + L^\top K L`, (n c, n c).

    Outputs may be coupled in any way, and B may be singular (it is for softmax): only its root is used. Memory: one
    matrix beside K.

    Args:
        K: (n c, n c), row ``i * c + j`` for output j of example i.
        y: Targets, as ``likelihood.targets`` takes them.
        mean: m, (n, c).
        likelihood: Likelihood of the targets given f.
        scale: Use ``scale * K`` for K.
        start: alpha to begin with, (n c,); None for zero.
        near: The mode for the same K and a scale nearby, with its factor, which saves a decomposition.
        tolerance: Largest relative gradient.
        iterations: Largest number of steps.
        factor: Whether to decompose M once more, at the mode.

    Example:
        >>> import torch
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> mode = function_space(K, torch.tensor([1.0, 0.0]), mean=K.new_zeros(2, 1), likelihood=Bernoulli())
        >>> mode.converged, round(mode.log_evidence, 4)
        (True, -1.565)
    """
    m = check_mean(mean)
    if tuple(K.shape) != (m, m):
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so K needs shape ({m}, {m}); got {tuple(K.shape)}.")
    check_kind("K", K, mean)
    return _find_dense(FunctionSpace(K, scale), y, mean, likelihood, start, near, tolerance, iterations, factor)


def step_in_function_space(K: Tensor, y: Tensor, *, f: Tensor, mean: Tensor, likelihood: Likelihood) -> Mode:
    r"""One Newton step from any outputs f, (n, c), that need not be ``m + K alpha``; the factor is that at f.

    .. math:: \alpha = b - L M^{-1} L^\top K b, \qquad b = B (f - m) + \mathrm{residual}(f)

    (Rasmussen and Williams, algorithm 3.1.) The result serves `function_space` as ``near``, and its alpha as ``start``.
    The other arguments are those of `function_space`.
    """
    n, c = mean.shape
    space, root = FunctionSpace(K, 1.0), row_root(likelihood, f, y, most=_most_numbers(c))
    factor, residual = space.factor(root), likelihood.residual(f, y).flatten()
    b = weigh(weigh((f - mean).flatten(), root, transpose=True), root) + residual
    alpha = b - weigh(cholesky_solve(factor, weigh(K @ b, root, transpose=True)), root)
    return Mode(
        f=mean + (K @ alpha).view(n, c),
        alpha=alpha,
        u=None,
        log_likelihood=math.nan,
        penalty=math.nan,
        log_det=None,
        gradient=math.nan,
        iterations=1,
        passes=0,
        converged=False,
        root=root,
        factor=factor,
    )


def weight_space(
    Phi: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    scale: float = 1.0,
    start: Tensor | None = None,
    near: Mode | None = None,
    tolerance: float = 1e-6,
    iterations: int = 200,
    factor: bool = True,
) -> Mode:
    r"""The mode from dense features, by Cholesky decompositions of :math:`H = I + \Phi^\top B \Phi`, (p, p).

    The other arguments are those of `function_space`.

    Args:
        Phi: (n c, p), the Jacobian with its columns times prior standard deviations.
        scale: Factor of the prior variances: use ``sqrt(scale) * Phi`` for Phi.
        start: u to begin with, (p,); None for zero.

    Example:
        >>> import torch
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> Phi = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
        >>> mode = weight_space(Phi, torch.tensor([1.0, 0.0]), mean=Phi.new_zeros(2, 1), likelihood=Bernoulli())
        >>> mode.u.shape, round(mode.log_evidence, 4)
        (torch.Size([3]), -1.565)
    """
    m = check_mean(mean)
    if Phi.ndim != 2 or Phi.shape[0] != m:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so Phi needs shape ({m}, p); got {tuple(Phi.shape)}.")
    check_kind("Phi", Phi, mean)
    return _find_dense(WeightSpace(Phi, scale), y, mean, likelihood, start, near, tolerance, iterations, factor)


def _find_dense(
    space: FunctionSpace | WeightSpace,
    y: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    start: Tensor | None,
    near: Mode | None,
    tolerance: float,
    iterations: int,
    factor: bool,
) -> Mode:
    held = list[Tensor]()  # the last factor alone

    def solve_with(factor: Tensor, root: Tensor, scale: float) -> Solve:
        held.append(factor)
        return lambda q: space.solve(q, held[0], root, scale)

    def make(root: Tensor) -> Solve:
        held.clear()  # the memory of the last factor first
        return solve_with(space.factor(root), root, space.scale)

    known = near is not None and near.factor is not None
    first = solve_with(near.factor, near.root, near.scale) if known else None  # type: ignore[union-attr, arg-type]
    # Steps cost next to nothing beside a decomposition, so that the last ones go further than they have to.
    found = _minimize(space, y, mean, likelihood, start, first, make, 0.01 * tolerance, iterations)
    found = replace(found, converged=found.gradient <= tolerance)
    function = isinstance(space, FunctionSpace)
    found = replace(found, alpha=found.u if function else found.alpha, u=None if function else found.u)  # type: ignore[arg-type]
    found = replace(found, scale=space.scale)
    held.clear()
    if not factor:
        return found
    n, c = mean.shape
    y = likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device)
    last = space.factor(row_root(likelihood, found.f, y, most=_most_numbers(c)))
    return replace(found, factor=last, log_det=float(log_det_from(last)))


def pass_space(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    solve: Solve | None = None,
    make: MakeSolve | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-6,
    iterations: int = 1000,
) -> Mode:
    """The mode from products with J. A step takes one pass over the data, or two where its length is a new one.

    The other arguments are those of `function_space`.

    Args:
        J: (n c, p).
        variance: S, (p,).
        solve: From g (p,) to about ``H^-1 g`` at the mean, in whitened weights; None for no preconditioner.
        make: From a root of the curvature, (n c,) or (n, c, c), to such a solve there, or to None where there is none
            better than the last. It is asked where steps lag. None keeps the first solve.
        start: u to begin with, (p,); None for zero.

    Example:
        >>> import torch
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> pass_space(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given).converged
        True
    """
    check_operator(J, variance, mean, check_mean(mean))
    space = PassSpace(J.scaled(variance.sqrt()))
    first = solve if solve is not None else lambda q: q
    found = _minimize(space, y, mean, likelihood, start, first, make or (lambda _: None), tolerance, iterations)
    return replace(found, passes=space.passes)


# The loop.


def _minimize(
    space: Space,
    y: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    start: Tensor | None,
    solve: Solve | None,
    make: MakeSolve,
    tolerance: float,
    iterations: int,
) -> Mode:
    """The mode, with ``u`` the coordinates of the space, ``alpha`` the residual, and no factor.

    ``solve`` is the first preconditioner; where it is None, ``make`` makes the first one at the start.
    """
    n, c = mean.shape
    check_concave(likelihood)
    y = likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device)

    def residual(shift: Tensor, rows: slice) -> Tensor:
        part = slice(rows.start // c, rows.stop // c)
        return likelihood.residual(mean[part] + shift.view(-1, c), y[part]).flatten()

    def terms(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return likelihood.log_prob(f, y), likelihood.residual(f, y), row_curvature(likelihood, f, y, most=most)

    most = _most_numbers(c)

    evaluate = partial(space.evaluate, residual=residual)
    x, shift, r, g = evaluate(space.vector(mean.new_zeros(space.size)))
    reference = max(_norm(space, g), FLOOR)
    if start is not None:
        if tuple(start.shape) != (space.size,):
            raise ValueError(f"start needs shape ({space.size},); got {tuple(start.shape)}.")
        x, shift, r, g = evaluate(space.vector(start))

    corrected = None if solve is None else _CorrectedSolve(space, solve)
    norms = list[float]()  # of the gradients since the preconditioner was made
    length, steps, best, vain, flat = 1.0, 0, math.inf, 0, False
    while True:
        f, norm = mean + shift.view(n, c), _norm(space, g) / reference
        if norm <= tolerance or steps == iterations or not math.isfinite(norm):
            break
        lags = not flat and len(norms) >= PATIENCE and norm > LAG * norms[-PATIENCE]
        if corrected is None or lags or length > space.longest:
            fresh = make(row_root(likelihood, f, y, most=most))
            if fresh is not None:
                corrected, norms, length = _CorrectedSolve(space, fresh), [], 1.0
        assert corrected is not None
        norms.append(norm)
        end = evaluate(x - length * corrected.solve(g))
        d = end[0] - x
        products = space.dot(x, x), space.dot(x, d), space.dot(d, d)
        line = LineSearch(terms, f, df=(end[1] - shift).view(n, c), products=products)
        flat = line.flat
        # Where values are flat to rounding, the slopes at both ends still tell.
        t = _vanishing(space.dot(g, d), space.dot(end[3], d)) if flat else line.find_length()
        # Five steps along which rounding hides the objective, without a smaller gradient, say that nothing will help.
        vain, best = (0, norm) if norm < best or not flat else (vain + 1, best)
        if t == 0 or vain == 5:
            break
        if isinstance(likelihood, Gaussian):  # the gradient is linear in u: the best length needs no pass
            t = t if flat else line.polish(t)
            end = x.lerp(end[0], t), shift.lerp(end[1], t), r.lerp(end[2], t), g.lerp(end[3], t)
        elif not 0.5 <= t <= 2 and length * t <= space.longest:
            end = evaluate(x + t * d)
        corrected.add(end[0] - x, end[3] - g)
        (x, shift, r, g), steps = end, steps + 1
        length *= t if flat else line.polish(t)
    return Mode(
        f=f,
        alpha=r,
        u=space.coordinates(x),
        log_likelihood=float(likelihood.log_prob(f, y).sum()),
        penalty=0.5 * space.dot(x, x),
        log_det=None,
        gradient=norm,
        iterations=steps,
        passes=0,
        converged=norm <= tolerance,
        # Matrices of the dense spaces are larger than the blocks of all examples.
        root=row_root(likelihood, f, y) if isinstance(space, PassSpace) else as_weight(likelihood.observed_root(f, y)),
        factor=None,
    )


def _most_numbers(c: int) -> int | None:
    """How many numbers blocks of c outputs may have, for `row_root`; classes in more have a formula."""
    return None if c <= FORMULA else 0


def _norm(space: Space, g: Tensor) -> float:
    return math.sqrt(max(space.dot(g, g), 0.0))  # below zero only by rounding, where g lies in the null space of K


def _vanishing(slope: float, there: float) -> float:
    """Where a straight line from a negative slope at 0 to the slope ``there`` at 1 is zero."""
    return min(slope / (slope - there), 10.0) if slope < 0 and there > slope else 0.0


@final
class _CorrectedSolve:
    """A preconditioner with what the gradient did along the last steps: the two loops of L-BFGS.

    Args:
        space: The space of its vectors.
        base: The preconditioner.
    """

    def __init__(self, space: Space, base: Solve) -> None:
        self._dot, self._base = space.dot, base
        self._pairs: list[tuple[Tensor, Tensor, float]] = []

    def add(self, step: Tensor, change: Tensor) -> None:
        """Learn from a step and the change of the gradient along it."""
        product = self._dot(step, change)
        if product >= 0.5 * self._dot(step, step) > 0:  # H is at least the identity: else it is rounding
            large = 2 * PAIRS * step.numel() * step.element_size() > 2**32
            self._pairs = [*self._pairs, (step, change, product)][-(PAIRS // 3 if large else PAIRS) :]

    def solve(self, g: Tensor) -> Tensor:
        """About ``H^-1 g``."""
        q, sizes = g, list[float]()
        for step, change, product in reversed(self._pairs):
            sizes.append(self._dot(step, q) / product)
            q = q - sizes[-1] * change
        z = self._base(q)
        for (step, change, product), size in zip(self._pairs, reversed(sizes), strict=True):
            z = z + (size - self._dot(change, z) / product) * step
        return z
