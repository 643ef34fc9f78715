r"""Samples from the posterior of a linearized network, by sample-then-optimize (Antoran, Padhy et al. 2023).

The posterior of the parameters around their trained values is :math:`N(0, H^{-1})`, :math:`H = J^\top B J + A`, with
the curvature :math:`B = L L^\top` of the likelihood and prior precisions :math:`A = S^{-1}`. A solution of

.. math:: H z = J^\top L \, e + A^{1/2} h, \qquad e \sim N(0, I), \quad h \sim N(0, I)

is a draw from it, since the right-hand side has covariance H. All samples are columns of one system, so that an
iteration of conjugate gradients is one fused pass. Written with whitened weights :math:`z = S^{1/2} u` and
:math:`\Phi = J S^{1/2}`, the system is :math:`(I + \Phi^\top B \Phi) u = \Phi^\top L e + h`, whose solution differs
from h in the range of :math:`\Phi^\top` only: iterations start at ``u = h`` and leave all other directions exact.

A pass over all rows of J takes c backward passes for each example. A network that is sure of most labels has nearly all
of its curvature in a few rows (`linnet.jacobian.informative_rows`). With these rows alone there are two ways to save
passes over all rows:

* a direct solve (`linnet.linalg.preconditioners.woodbury`) as the preconditioner of iterations over all rows, where the
  Gram matrix of the few rows is no more work than a randomized preconditioner, or where there is no memory for one;
* a randomized preconditioner of the few rows (`linnet.linalg.preconditioners.randomized`), and iterations over the few
  rows too, which start again from the residuals of all rows.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from linnet._common import Checkpoint, check_folder, find_dense_budget, tensor_code
from linnet.inference.iterative_solves import preconditioner_of, probes_of
from linnet.inference.problem import SolverSettings
from linnet.jacobian import Jacobian, autodiff_wins, informative_rows
from linnet.linalg import (
    REFINED,
    ClassBlocks,
    LinearOperator,
    Preconditioner,
    Product,
    Solution,
    Stack,
    WoodburyPreconditioner,
    as_weight,
    cg,
    cholesky_,
    cholesky_solve,
    inner_matrix,
    log_det_from_tridiagonals,
    sketch,
    square_sums,
    weigh,
    weight_from_root,
    woodbury_preconditioner,
)
from linnet.linalg import log_det_from as dense_log_det
from linnet.network import Layout
from linnet.probability import SamplePosterior

Space = Literal["auto", "weight", "function"]
Kind = Literal["auto", "sketch", "nystrom", "pivoted-cholesky", "none"]

SKETCHED = 4096
"""Columns of a randomized preconditioner on a GPU that forms rows: more take memory, fewer take iterations. With these
64 samples of ResNet-20 take ten iterations."""

LEFT = {False: (1e-4, 1e-3), True: (0.005, 0.03)}
"""Share of the curvature's trace that a direct solve leaves to iterations over all rows, and the largest share that it
may leave; the second pair where a randomized preconditioner has no memory. A larger share takes fewer rows and more
iterations."""


@dataclass(frozen=True)
class Samples:
    """Draws from the posterior of the parameters, less their mean.

    Attributes:
        Z: (p, k), displacements of theta, of mean zero.
        variance: S, (p,).
        seed: Of the draws.
        space: Where they were solved for, "weight" or "function".
        solution: Of the whitened system; ``residual`` is relative to ``||S^(1/2) J^T L e||``. In function space without
            its value, and its iterations are refinements; None there in float64.
        log_det: ``log det(I + S^(1/2) J^T B J S^(1/2))``; None in weight space without probes.
        log_det_error: Its standard error; 0 where exact.
        preconditioner: What the solve used, for the next one with nearly the same data and prior.
        curvature: The mean over the examples of the squares of L, by which the next one tells another noise.
    """

    Z: Tensor
    variance: Tensor
    seed: int
    space: str
    solution: Solution | None = field(default=None, repr=False)
    log_det: float | None = None
    log_det_error: float = 0.0
    preconditioner: Preconditioner | None = field(default=None, repr=False)
    curvature: float = 0.0

    @property
    def k(self) -> int:
        """How many there are."""
        return self.Z.shape[1]

    def posterior(self, delta: Tensor | None = None) -> SamplePosterior:
        """What they say about f at other inputs: variances, joint covariances, joint samples.

        Args:
            delta: (p,), the mean of the displacement; None means zero.
        """
        return SamplePosterior(torch.zeros_like(self.variance) if delta is None else delta, self.Z)

    def effective_dimensions(self, layout: Layout) -> dict[str, tuple[float, float]]:
        r"""How many parameters of each layer the data determines, with standard errors, from the samples alone.

        .. math:: \gamma_l = p_l - \mathrm{tr}[H^{-1} A]_{ll} = \mathrm{E} \, [h_l^\top (h_l - u_l)]

        Since u differs from h where the data speaks only, the standard error is about :math:`\sqrt{3 \gamma_l / k}`;
        that of :math:`p_l - a_l \|z_l\|^2`, which has the same expectation, is :math:`\sqrt{2 p_l / k}`.

        Args:
            layout: Of the parameters, ``lin.layout``.
        """
        if layout.p != len(self.Z):
            raise ValueError(f"The samples have {len(self.Z)} parameters and the layout {layout.p}: pass lin.layout.")
        _check_two(self.k)
        h = _draws(len(self.Z), self.k, self.Z, SolverSettings(seed=self.seed).generator(4))
        d = self.variance.sqrt()[:, None]
        part = h * (h - torch.where(d > 0, self.Z / d, h))
        out = {}
        for layer, names in layout.layers.items():
            each = sum((part[layout.slices[name]].double().sum(0) for name in names), torch.zeros(()))
            assert isinstance(each, Tensor)
            out[layer] = _estimate(each)
        return out


@torch.no_grad()
def posterior_samples(
    J: Jacobian,
    S: Tensor,
    L: Any,
    k: int,
    *,
    tolerance: float = 1e-2,
    iterations: int = 1000,
    seed: int = 0,
    start: Samples | None = None,
    space: Space = "auto",
    preconditioner: Kind | Preconditioner = "auto",
    rank: int | str = "auto",
    probes: int = 0,
    memory: float | str = "auto",
    coarse: Jacobian | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    progress: bool | None = None,
) -> Samples:
    """k draws from the posterior, all in one solve.

    In weight space every iteration is one fused pass with ``k + probes`` columns; beside them it holds about nine
    blocks (p, k), and ``rank`` directions of the preconditioner. Function space takes the Gram matrix (n c, n c), is
    exact, and gives the same draws: it is chosen where n c is small.

    Args:
        J: The Jacobian of the training data, (n c, p).
        S: Prior variances, (p,); zero keeps a parameter where it is.
        L: A root of the curvature, (n, c) or (n, c, c): ``likelihood.root(f)``; for many classes
            `linnet.probability.row_root`.
        k: How many draws.
        tolerance: Largest residual of a column, relative to the part of its right-hand side that comes from the data:
            however many parameters the data says nothing about, they do not count.
        iterations: At most this many.
        seed: The same seed gives the same e and h, also for another S.
        start: Samples from the same seed to start from, for another S, another noise or other weights. Where none of
            them has changed much, their preconditioner serves again (unless another is asked for).
        space: "weight", "function", or "auto".
        preconditioner: "sketch" (`linnet.linalg.preconditioners.randomized`), "nystrom"
            (`linnet.linalg.preconditioners.nystrom`), "none", or one that is made already. "pivoted-cholesky", of
            earlier versions, means "nystrom" where examples can be chosen. "auto" is a direct solve
            with the rows that carry the curvature (`linnet.linalg.preconditioners.woodbury`) where these are few or a
            sketch has no memory, and else a sketch.
        rank: Columns of the sketch, or landmark examples; "auto" goes by memory, and by what a column costs.
        probes: Columns more for the log determinant, at least 2, or 0 for none.
        memory: Bytes that dense matrices and preconditioners may take, or "auto".
        coarse: The same Jacobian in a cheaper precision, ``lin.jacobian(X, precision="high")``, for the iterations in
            weight space and their preconditioner. Right-hand sides and residuals stay J's, and so does the tolerance.
            None takes the rows that carry the curvature, where they are few
            (`linnet.jacobian.output_combinations.informative_rows`); with probes for the preconditioner only.
        checkpoint: A folder for the state of the solve in weight space after each iteration. A call with the same
            arguments goes on from the state, with any number of ranks, all of which must see the folder. The folder is
            removed at the end.
        progress: None shows a bar on a terminal only, False never, True always.

    Raises:
        ArithmeticError: The solve did not converge.

    Example:
        >>> from linnet import linearize
        >>> from linnet.probability.likelihoods import Gaussian
        >>> J = linearize(torch.nn.Linear(3, 1)).jacobian(torch.eye(3))
        >>> samples = posterior_samples(J, torch.ones(4), Gaussian(0.1).root(J.outputs()), 64)
        >>> samples.Z.shape, samples.posterior().variance(J).shape
        (torch.Size([4, 64]), torch.Size([3, 1]))
    """
    L = _check(J, S, L, k, probes, space)
    if coarse is not None and (coarse.shape != J.shape or probes):
        raise ValueError(
            f"coarse= must be J {J.shape} in another precision, and no probes can go with it; got {coarse.shape} and "
            f"{probes} probes."
        )
    kind = _kind(preconditioner)
    settings = SolverSettings(
        tolerance=tolerance,
        iterations=iterations,
        preconditioner="auto" if kind == "sketch" else kind,  # type: ignore[arg-type]
        rank=rank,
        probes=max(probes, 1),
        seed=seed,
        memory=memory,
        progress=progress,
    )
    if start is not None and (start.Z.shape != (len(S), k) or start.seed != seed):
        raise ValueError(
            f"start needs {k} samples of {len(S)} parameters from seed {seed}, since it is their e and h that make a "
            f"start worth while; got {start.k} of {len(start.Z)} from seed {start.seed}."
        )
    kept = (
        checkpoint if isinstance(checkpoint, Checkpoint) else _checkpoint(checkpoint, J, S, settings, k, kind, probes)
    )
    e = _draws(J.shape[0], k, S, settings.generator(3))
    h = _draws(J.shape[1], k, S, settings.generator(4))
    if (choose_space(J, k, memory) if space == "auto" else space) == "function":
        return _function(J, S, L, e, h, seed, tolerance)
    J, d = J.steady(), S.sqrt()
    Phi = J.scaled(d)
    data = Phi.T @ weigh(e, L)
    del e
    B = data + h
    # A share of the whole right-hand side could be met by h alone, where there are many more parameters than data.
    share = float((torch.linalg.vector_norm(data, dim=0) / torch.linalg.vector_norm(B, dim=0).clamp_min(1e-30)).min())
    del data
    if share == 0:
        return Samples(d[:, None] * h, S, seed, "weight", Solution(h, True, 0, 0.0, tolerance=tolerance), 0.0)
    P: Preconditioner | None = None if isinstance(preconditioner, str) else preconditioner
    if preconditioner == "auto" and rank == "auto" and start is not None and start.preconditioner is not None:
        P = reuse_preconditioner(start.preconditioner, start.variance, S, _mean_square(L, J.n) / start.curvature)
    system = make_system(J, S, L, k, settings, kind=kind, coarse=coarse, preconditioner=P, probes=probes)
    P = system.preconditioner
    first = h if start is None else _started(start, h, d)
    if probes:
        more = probes_of(P, J.shape[1], J, settings)
        B, first = torch.cat([B, more], 1), torch.cat([first, torch.zeros_like(more)], 1)
        del more
    solution = cg(
        system.product,
        B,
        exact=system.exact,
        preconditioner=P,
        tolerance=tolerance * share,
        iterations=iterations,
        start=first,
        probes=probes,
        checkpoint=kept,
        progress=progress,
    )
    solution = replace(solution, residual=solution.residual / share, tolerance=tolerance)
    solution.checked("the system of the posterior samples")
    log_det, error = (None, 0.0) if not probes else _log_det(solution, P, J.shape[1])
    if kept is not None and kept is not checkpoint:
        kept.remove()
    Z = d[:, None] * solution.value[:, :k]
    return Samples(Z, S, seed, "weight", solution, log_det, error, P, _mean_square(L, J.n))


@torch.no_grad()
def solve_posterior(
    J: Jacobian,
    S: Tensor,
    L: Any,
    V: Tensor,
    *,
    tolerance: float = 1e-6,
    iterations: int = 1000,
    space: Space = "auto",
    seed: int = 0,
    memory: float | str = "auto",
    progress: bool | None = None,
) -> Tensor:
    r"""``H^-1 V``, (p, k), for ``H = J^T L L^T J + S^-1``: the covariance of the posterior times V, without draws.

    Args:
        J: The Jacobian of the training data, (n c, p).
        S: Prior variances, (p,).
        L: A root of the curvature, as for `posterior_samples`.
        V: (p, k).
        tolerance: Largest residual of a column in weight space, relative to ``S^(1/2) V``.
        iterations: At most this many.
        space: "weight", "function" (exact), or "auto".
        seed: Of the preconditioner.
        memory: As for `posterior_samples`.
        progress: As for `posterior_samples`.

    Raises:
        ArithmeticError: The solve did not converge.

    Example:
        >>> from linnet import linearize
        >>> J = linearize(torch.nn.Linear(3, 1)).jacobian(torch.eye(3))
        >>> solve_posterior(J, torch.ones(4), torch.ones(3, 1), torch.ones(4, 2)).shape
        torch.Size([4, 2])
    """
    k = V.shape[1]
    L = _check(J, S, L, k, 0, space)
    if (choose_space(J, k, memory) if space == "auto" else space) == "function":
        M = inner_matrix(J.gram(scale=S), L).double()
        factor, X = cholesky_(M), S[:, None] * V
        left = cholesky_solve(factor, weigh(J @ X, L, transpose=True).double())
        return X - S[:, None] * (J.T @ weigh(left.to(X.dtype), L))
    settings = SolverSettings(
        tolerance=tolerance, iterations=iterations, seed=seed, memory=memory, progress=progress, samples=k
    )
    J, d = J.steady(), S.sqrt()[:, None]
    system = make_system(J, S, L, k, settings)
    options: dict[str, Any] = {"exact": system.exact, "preconditioner": system.preconditioner, "progress": progress}
    solution = cg(system.product, d * V, tolerance=tolerance, iterations=iterations, **options)
    return d * solution.checked("the system of the posterior's covariance").value


def choose_space(J: Jacobian, k: int, memory: float | str = "auto") -> str:
    """Function space while its matrices fit memory and cost no more than some dozens of passes; else weight space.

    Its (n c)^2 p is worth while where n c is below 128 times the columns of a pass, 2 k + 64.

    Args:
        J: (n c, p).
        k: Columns.
        memory: Bytes, or "auto".
    """
    rows, p = J.shape
    fits = (24 if J.dtype == torch.float64 else 20) * rows**2 <= find_dense_budget(memory, J.device)
    return "function" if fits and rows <= 128 * (2 * k + 64) and rows < 4 * p else "weight"


@torch.no_grad()
def effective_dimension(J: Jacobian, L: Tensor, Z: Tensor) -> tuple[float, float]:
    r"""How many parameters the data determines, and the standard error of that estimate; one pass.

    .. math:: \gamma = \mathrm{tr}(H^{-1} J^\top B J) = \mathrm{E} \, \|L^\top J z\|^2

    The standard error is at most about :math:`\sqrt{2 \gamma / k}`. For each layer of its own, and without a pass:
    `Samples.effective_dimensions`.

    Args:
        J: (n c, p), of the data that the samples were made with.
        L: A root of the curvature, (n, c) or (n, c, c).
        Z: Posterior samples, (p, k).

    Example:
        >>> from linnet import linearize
        >>> J, L = linearize(torch.nn.Linear(2, 1)).jacobian(torch.eye(2)), torch.full((2, 1), 30.0)
        >>> gamma, error = effective_dimension(J, L, posterior_samples(J, torch.ones(3), L, 256).Z)
        >>> bool(abs(gamma - 2) < 4 * error)
        True
    """
    _check_two(Z.shape[1])
    return _estimate(weigh(J @ Z, as_weight(L), transpose=True).double().square().sum(0))


# The two spaces.


def _function(J: Jacobian, S: Tensor, L: Tensor, e: Tensor, h: Tensor, seed: int, tolerance: float) -> Samples:
    """``u = h + Phi^T L M^-1 (e - L^T Phi h)``, which is the weight-space solution for the same e and h.

    Rounding of M in float32 is measured by eigenvalues that may be millions beside the one of its identity: there the
    true residual, ``Phi^T L (e - L^T Phi u - a)``, is looked at, and refined as long as it has to be.
    """
    d = S.sqrt()[:, None]
    M = inner_matrix(J.gram(scale=S), L)
    if J.device.type == "cpu" or 8 * M.numel() <= REFINED:
        M = M.double()
    factor = cholesky_(M)
    log_det = float(dense_log_det(factor))

    def solved(right: Tensor) -> Tensor:
        return cholesky_solve(factor, right.to(factor.dtype), overwrite=True).to(right.dtype)

    def lifted(a: Tensor) -> Tensor:
        return d * (J.T @ weigh(a, L))

    def left(u: Tensor, a: Tensor) -> Tensor:
        return e - weigh(J @ (d * u), L, transpose=True) - a

    a = solved(left(h, torch.zeros_like(e)))
    u = h + lifted(a)
    if J.eps == torch.finfo(torch.float64).eps:
        return Samples(d * u, S, seed, "function", None, log_det)
    size = torch.linalg.vector_norm(lifted(e), dim=0).clamp_min(1e-30)
    before, rounds = math.inf, 0
    while True:
        rest = left(u, a)
        worst = float((torch.linalg.vector_norm(lifted(rest), dim=0) / size).nan_to_num(nan=math.inf).max())
        if worst <= tolerance or worst > 0.5 * before:
            break
        before, rounds, step = worst, rounds + 1, solved(rest)
        a += step
        u += lifted(step)
    solution = Solution(u, worst <= tolerance, rounds, worst, tolerance=tolerance)
    solution.checked("the system of the posterior samples")
    return Samples(d * u, S, seed, "function", replace(solution, value=u[:0]), log_det)


def _started(start: Samples, h: Tensor, d: Tensor) -> Tensor:
    """Where to start with other prior variances: h, and what the data changed about it before, moved to the new range.

    ``u - h = S^(1/2) J^T a`` for some a, which another S leaves nearly parallel; its length changes much less than S.
    """
    old = start.variance.sqrt()[:, None]
    change = torch.where(old > 0, start.Z / old - h, 0)
    moved = torch.where(old > 0, d[:, None] / old * change, 0)
    before, after = (torch.linalg.vector_norm(x, dim=0) for x in (change, moved))
    return h + moved * torch.where(after > 0, before / after, 0)


def _log_det(solution: Solution, P: Preconditioner | None, p: int) -> tuple[float, float]:
    assert solution.tridiagonals is not None
    return log_det_from_tridiagonals(solution.tridiagonals, P, p)


def _mean_square(L: Any, n: int) -> float:
    """The mean over the examples of the squares of L."""
    return float(square_sums(L, n).mean())


def _draws(rows: int, k: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, k, dtype=like.dtype, generator=generator).to(like.device)


def _estimate(each: Tensor) -> tuple[float, float]:
    return float(each.mean()), float(each.std() / len(each) ** 0.5)


# The system in weight space.


@dataclass(frozen=True)
class _System:
    """The system in weight space, as `linnet.linalg.cholesky.cg` takes it.

    Attributes:
        product: V (p, k) to ``H V``.
        exact: The same for residuals, where the product is a coarser one.
        preconditioner: P.
    """

    product: Product
    exact: Product | None
    preconditioner: Preconditioner | WoodburyPreconditioner | None


def make_system(
    J: Jacobian,
    S: Tensor,
    L: Tensor,
    k: int,
    settings: SolverSettings,
    *,
    kind: str = "auto",
    coarse: Jacobian | None = None,
    preconditioner: Preconditioner | WoodburyPreconditioner | None = None,
    probes: int = 0,
) -> _System:
    """The system of posterior samples in weight space.

    Args:
        J: (n c, p), steady: rows that one pass has made meet products of others.
        S: Prior variances, (p,).
        L: The root of B, (n c,) or (n, c, c).
        k: Columns of the solve, without probes.
        settings: Of the solve.
        kind: "auto", "sketch", "nystrom", "pivoted-cholesky" or "none".
        coarse: J in a cheaper precision, for products.
        preconditioner: One that is made already.
        probes: Columns whose tridiagonals are wanted, which only an exact product has.
    """
    d, weight = S.sqrt(), weight_from_root(L)

    def of(op: LinearOperator, weight: Tensor | None) -> Product:
        Phi = op.scaled(d)
        return lambda V: V + Phi.normal(V, weight)

    exact = of(J, weight)
    if coarse is not None:
        P = preconditioner or _precondition_all_rows(coarse, d, L, k, settings, kind)
        return _System(of(coarse, weight), exact, P)
    if (
        kind not in ("auto", "sketch")
        or isinstance(preconditioner, WoodburyPreconditioner)
        or (preconditioner and probes)
    ):
        return _System(exact, None, preconditioner or _precondition_all_rows(J, d, L, k, settings, kind))
    if preconditioner is None and kind == "auto" and isinstance(settings.rank, str):
        found = _make_direct(J, S, L, k, settings)
        if found is not None:
            return _System(exact, None, found)
    few = informative_rows(J, L)
    if few is None:
        return _System(exact, None, preconditioner or _precondition_all_rows(J, d, L, k, settings, kind))
    few = _with_tf32_products(few)
    if preconditioner is None:
        ones = torch.ones(few.shape[0], dtype=J.dtype, device=J.device)
        preconditioner = sketch(
            few.scaled(d), ones, rank=_count_columns(J, k, settings, rows=True)[0], generator=settings.generator(2)
        )
    if probes:
        return _System(exact, None, preconditioner)
    return _System(of(few, None), exact, preconditioner)


def reuse_preconditioner(
    P: Preconditioner | WoodburyPreconditioner, old: Tensor, new: Tensor, noise: float
) -> Preconditioner | WoodburyPreconditioner | None:
    """The preconditioner of another solve for this prior and noise.

    None where a prior variance, in units of the noise, has changed by more than a factor of ten.

    Args:
        P: Of the other solve.
        old: Its prior variances, (p,).
        new: Those of this one.
        noise: How many times as large the curvature is now.
    """
    ratio = torch.where(old > 0, new / old, 1.0) * noise
    if bool((ratio > 10).any() | (ratio < 0.1).any() | ((old > 0) != (new > 0)).any()):
        return None
    if isinstance(P, WoodburyPreconditioner):  # as it is: another costs a Gram matrix, and this one some iterations
        return P
    return P.rescale(ratio.sqrt())


def _count_columns(J: Jacobian, k: int, settings: SolverSettings, *, rows: bool) -> tuple[int, bool]:
    """How many a sketch of a few rows has, or of all; and whether it is for want of memory that it has not more."""
    if not isinstance(settings.rank, str):
        return max(1, settings.rank), False
    fits = int(0.5 * find_dense_budget(settings.memory, J.device)) // (4 * J.shape[1] * J.dtype.itemsize)
    # Where rows are formed anyway, many more columns cost little more.
    wanted = SKETCHED if J.device.type == "cuda" else max(128, 4 * k)
    if not rows and _goes_by_column(J, k):  # each costs as much as one of the samples in an iteration
        wanted = min(wanted, 4 * k)
    return max(1, min(wanted, fits)), fits < wanted


def _goes_by_column(J: Jacobian, k: int) -> bool:
    return autodiff_wins("fused", k=k, c=J.c)


def _make_direct(J: Jacobian, S: Tensor, L: Tensor, k: int, settings: SolverSettings) -> WoodburyPreconditioner | None:
    """A direct solve with a few rows, where it is worth its Gram matrix (m, m)."""
    columns, limited = _count_columns(J, k, settings, rows=True)
    fits = math.isqrt(find_dense_budget(settings.memory, J.device) // 24)
    if not limited:
        # On a CPU its m^2 p is then no more than the 4 m p r of a sketch, which leaves more iterations; on a GPU
        # iterations over the few rows take no time beside those over all.
        fits = min(fits, columns if J.device.type == "cuda" else 4 * columns)
    share, largest = LEFT[limited]
    R = informative_rows(J, L, share=share, most=fits, largest=largest)
    if R is None:
        return None
    return woodbury_preconditioner(R, S, generator=settings.generator(2), coarse=_with_tf32_products(R))


def _with_tf32_products(R: Stack) -> Stack:
    """On a GPU with products in tf32, of rows of the network itself.

    Those of a network that runs in tf32 are another matrix, by a percent or two.
    """
    if R.device.type != "cuda":
        return R
    return Stack([part.in_precision("products") for part in R.parts if isinstance(part, Jacobian)])


def _precondition_all_rows(
    J: Jacobian, d: Tensor, L: Tensor, k: int, settings: SolverSettings, kind: str
) -> Preconditioner | None:
    """A preconditioner from all rows, of a kind."""
    if kind == "none":
        return None
    if kind not in ("auto", "sketch"):
        return preconditioner_of(J.scaled(d), J, weight_from_root(L), settings, "weight")
    columns, _ = _count_columns(J, k, settings, rows=False)
    if J.device.type == "cuda" and not _goes_by_column(J, k):
        J = J.in_precision("products")
    return sketch(J.scaled(d), L, rank=columns, generator=settings.generator(2))


# Checks.


def _checkpoint(
    path: str | os.PathLike[str] | None,
    J: Jacobian,
    S: Tensor,
    settings: SolverSettings,
    k: int,
    kind: str,
    probes: int,
) -> Checkpoint | None:
    """The checkpoint of a solve; the root of the curvature is compared by the right-hand sides, to rounding."""
    if path is None:
        return None
    check_folder(path, "checkpoint")
    said = f"{k} {kind} {settings.rank} {settings.tolerance} {settings.seed} {probes}"

    def identity() -> dict[str, str]:
        return {"the prior variances": f"{int(tensor_code(S)):x}", **J.identity(said)}

    return Checkpoint(path, kind="posterior samples", identity=identity, ranks=J.ranks)


def _kind(preconditioner: Kind | Preconditioner) -> str:
    if isinstance(preconditioner, Preconditioner):
        return "none"
    if preconditioner not in get_args(Kind):
        raise ValueError(
            f"preconditioner must be a Preconditioner or one of {', '.join(map(repr, get_args(Kind)))}; "
            f"got {preconditioner!r}."
        )
    return str(preconditioner)


def _check(J: Jacobian, S: Tensor, L: Tensor | ClassBlocks, k: int, probes: int, space: str) -> Tensor:
    """L as operators take it."""
    if space not in get_args(Space):
        raise ValueError(f"space must be one of {', '.join(map(repr, get_args(Space)))}; got {space!r}.")
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"The number of samples must be a positive integer; got {k!r}.")
    if probes < 0 or probes == 1:
        raise ValueError(
            f"A log determinant with a standard error needs at least 2 probes, or 0 for none; got {probes}."
        )
    if tuple(S.shape) != (J.shape[1],):
        raise ValueError(f"J has shape {J.shape}, so S needs shape ({J.shape[1]},); got {tuple(S.shape)}.")
    if not isinstance(L, ClassBlocks) and tuple(L.shape) not in ((J.n, J.c), (J.n, J.c, J.c)):
        raise ValueError(
            f"J has {J.n} examples with {J.c} outputs, so L needs shape ({J.n}, {J.c}) or ({J.n}, {J.c}, {J.c}), as "
            f"likelihood.root(f) gives it; got {tuple(L.shape)}."
        )
    for name, given in (("S", S), ("L", L)):
        if given.dtype != J.dtype or given.device != J.device:
            raise TypeError(
                f"J is {J.dtype} on {J.device}, so {name} must be too; got {given.dtype} on {given.device}."
            )
    if not bool(((S >= 0) & torch.isfinite(S)).all()):
        raise ValueError("S holds prior variances, which must be finite and not negative; some are not.")
    if not bool(torch.isfinite(L.pi if isinstance(L, ClassBlocks) else L).all()):
        raise ValueError("L, the root of the likelihood's curvature, holds NaN or infinity.")
    return as_weight(L)


def _check_two(k: int) -> None:
    if k < 2:
        raise ValueError(f"A standard error needs at least 2 samples; got {k}.")
