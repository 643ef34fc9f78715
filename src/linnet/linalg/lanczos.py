r"""Stochastic Lanczos quadrature: log determinants and spectra of a matrix that is known by its products.

Lanczos turns A and a unit vector u into a tridiagonal T whose eigenvalues :math:`\theta_j` and squared first
eigenvector entries :math:`w_j` are a Gauss quadrature: :math:`u^\top f(A) u \approx \sum_j w_j f(\theta_j)`, exact for
polynomials of degree up to 2 q - 1. Averaged over random u it gives traces, hence log determinants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet._common import full_precision
from linnet.linalg.cholesky import check_right
from linnet.linalg.conjugate_gradients import Product
from linnet.linalg.preconditioners.low_rank import Preconditioner


def log_det_from_tridiagonals(
    tridiagonals: Tensor, preconditioner: Preconditioner | None, m: int
) -> tuple[float, float]:
    r"""An estimate of ``log det A`` and its standard error, from probes that conjugate gradients have solved.

    .. math:: \log\det A = \log\det P + \mathrm{E}\,[m \, u^\top \log(P^{-1/2} A P^{-1/2}) \, u]

    with u uniform on the sphere: the direction of :math:`P^{-1/2} z`, z from N(0, P). The closer P is to A, the fewer
    iterations and the smaller the standard error, which falls with the square root of the number of probes. The error
    of the quadrature itself is of the order of the squared tolerance of the solve, and is not in the standard error.

    Args:
        tridiagonals: (probes, q, q), from `cg` with ``preconditioner`` and right-hand sides drawn from N(0, P) with
            ``preconditioner.sample``.
        preconditioner: P; None means the identity, with standard normal right-hand sides.
        m: Rows and columns of A.
    """
    if len(tridiagonals) < 2:
        raise ValueError(f"A standard error needs at least 2 probes; got {len(tridiagonals)}.")
    nodes, weights = gauss_quadrature(tridiagonals)
    low = float(nodes.min())
    if not low > 0:
        raise ArithmeticError(
            f"A log determinant needs a positive definite matrix, and the probes found the eigenvalue {low:.3g}. "
            f"Use float64, or a larger noise variance."
        )
    # The direction of a normal vector is independent of its length, so m in place of the squared length is as unbiased
    # and spares its variance.
    each = m * (weights * nodes.log()).sum(1)
    base = 0.0 if preconditioner is None else float(preconditioner.log_det)
    return base + float(each.mean()), float(each.std() / len(each) ** 0.5)


def gauss_quadrature(tridiagonals: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights, both (k, q) in float64, of the quadratures that (k, q, q) tridiagonal matrices stand for.

    >>> nodes, weights = gauss_quadrature(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]))
    >>> nodes.round(), weights
    (tensor([[1., 3.]], dtype=torch.float64), tensor([[0.5000, 0.5000]], dtype=torch.float64))
    """
    nodes, vectors = torch.linalg.eigh(tridiagonals.double())
    return nodes, vectors[:, 0].square()


@torch.no_grad()
def lanczos_quadrature(product: Product, B: Tensor, *, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gauss quadratures of a symmetric A from the columns b of B.

    .. math:: b^\top f(A) \, b \approx \|b\|^2 \sum_j w_j f(\theta_j)

    Every step is one product with all columns. Each column keeps its basis and is orthogonalized against all of it,
    twice, so that the nodes are those of exact arithmetic; that takes k m steps numbers of memory. Where a column spans
    an invariant subspace, its quadrature is exact and ends; it is filled up with nodes of weight zero.

    Args:
        product: ``V`` (m, k) to ``A V``.
        B: (m, k), or (m,) for one column.
        steps: Nodes; never more than m.

    Returns:
        nodes (k, q) and weights (k, q), in float64, and the squared norms of the columns (k,), in float64;
        q is ``steps``, or less where all columns have ended. A column of zeros has the node 1.

    >>> nodes, weights, norms2 = lanczos_quadrature(lambda V: torch.tensor([[1.0], [3.0]]) * V, torch.ones(2), steps=5)
    >>> nodes.round().tolist(), weights.round(decimals=3).tolist(), norms2.round().tolist()
    ([[1.0, 3.0]], [[0.5, 0.5]], [2.0])
    """
    check_right(B, B.shape[0], B)
    if steps < 1:
        raise ValueError(f"lanczos needs at least 1 step; got {steps}.")
    right = B[:, None] if B.ndim == 1 else B
    m, k = right.shape
    steps = min(steps, m)
    norms = torch.linalg.vector_norm(right, dim=0)
    if not bool(torch.isfinite(norms).all()):
        raise ValueError(
            "lanczos needs finite start vectors; B holds NaN, infinity, or numbers whose squares overflow."
        )
    going = norms > 0
    q = torch.where(going, right / norms, 0).T.contiguous()  # (k, m)
    basis = torch.zeros(k, steps, m, dtype=B.dtype, device=B.device)
    main, side = (torch.zeros(k, steps, dtype=torch.float64, device=B.device) for _ in range(2))
    size = torch.zeros(k, dtype=torch.float64, device=B.device)
    made = 0
    with full_precision(B.device):
        while made < steps and bool(going.any()):
            basis[:, made] = q
            w = product(q.T.contiguous()).T[:, :, None]
            known = basis[:, : made + 1]
            for _ in range(2):
                inner = known @ w
                w = w - known.mT @ inner
                main[:, made] += inner[:, -1, 0]
            main[:, made] = torch.where(going, main[:, made], main[:, 0])
            b = torch.linalg.vector_norm(w[:, :, 0], dim=1)
            size = torch.maximum(size, main[:, made].abs() + b)
            # Rounding of products with m terms, and of what is taken away, adds up as a root: less ends a column.
            going = going & (b > (10 + m**0.5) * torch.finfo(B.dtype).eps * size)
            side[:, made] = torch.where(going, b, 0)
            q = torch.where(going[:, None], w[:, :, 0] / b[:, None], 0)
            made += 1
    main, side = torch.where(norms[:, None] > 0, main, 1)[:, : max(made, 1)], side[:, : max(made, 1) - 1]
    if not bool(torch.isfinite(main).all() & torch.isfinite(side).all()):
        raise ArithmeticError(
            "lanczos met NaN or infinity in the products with A. Look at the operator, or use float64."
        )
    T = torch.diag_embed(main) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    nodes, weights = gauss_quadrature(T)
    return nodes, weights, norms.double().square()
