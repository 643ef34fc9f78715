r"""Preconditioners of low rank.

.. math:: P = I + U \, \mathrm{diag}(\lambda) \, U^\top

for ``A = I + Phi^T W Phi`` (weight space) and ``A = I + L^T Phi Phi^T L`` (function space), with an operator ``Phi``
(rows, cols) and weights ``W = L L^T`` of its rows. Both builders look at a few rows of Phi only:
`nystrom` at those it is given, `pivoted_cholesky` at those it chooses. A preconditioner changes how fast a solve
converges, never what it converges to, so directions that rounding has spoiled are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linnet.jacobian.jacobian import Jacobian
from linnet.linalg.cholesky import _check_square, _full_precision
from linnet.linalg.matrices import Matrix, Stack
from linnet.linalg.operator import Affine, LinearOperator
from linnet.linalg.operator_checks import check_weight
from linnet.linalg.row_weights import weigh

SPOILED = 64
"""Directions whose eigenvalue is below this many eps of the largest are rounding."""
ENTRIES = 2**24
"""Numbers that a temporary in float64 may hold."""


class Preconditioner:
    r"""``P = I + U diag(lam) U^T``, whose powers and determinant are known.

    Args:
        U: (m, r), orthonormal columns.
        lam: (r,), not negative.

    >>> P = Preconditioner(torch.eye(3)[:, :1], torch.tensor([3.0]))
    >>> P.multiply(torch.ones(3)), P.solve(torch.ones(3))
    (tensor([4., 1., 1.]), tensor([0.2500, 1.0000, 1.0000]))
    >>> P.log_det.exp()
    tensor(4., dtype=torch.float64)
    """

    def __init__(self, U: Tensor, lam: Tensor) -> None:
        if U.ndim != 2 or lam.shape != U.shape[1:] or U.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"A preconditioner needs U (m, r) and lam (r,) of float32 or float64; got {tuple(U.shape)} and "
                f"{tuple(lam.shape)}, {U.dtype}."
            )
        if lam.dtype != U.dtype or lam.device != U.device:
            raise TypeError(f"U is {U.dtype} on {U.device}, so lam must be too; got {lam.dtype} on {lam.device}.")
        if not bool(((lam >= 0) & torch.isfinite(lam)).all()):
            raise ValueError(
                f"lam must be finite and not negative; got {float(lam.min()):.3g} to {float(lam.max()):.3g}."
            )
        self.U, self.lam = U, lam
        # One vector instead of U^T U, which would cost as much as building U.
        v = torch.arange(1, len(lam) + 1, dtype=U.dtype, device=U.device).sqrt().cos()
        with _full_precision(U.device):
            off = torch.linalg.vector_norm(U.T @ (U @ v) - v) / torch.linalg.vector_norm(v).clamp_min(1e-30)
        # Rounding of the two products, as the root of m; of the entries of U; and of what made them orthonormal.
        limit = 4 * torch.finfo(U.dtype).eps * (self.m**0.5 + self.rank)
        limit += self.rank * orthonormality(self.m, self.rank, torch.float64)
        if not float(off) <= limit:
            raise ValueError(f"The columns of U must be orthonormal; U^T U is off the identity by {float(off):.1g}.")

    @staticmethod
    def identity(m: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Preconditioner:
        """P = I, of rank 0."""
        return Preconditioner(torch.zeros(m, 0, dtype=dtype, device=device), torch.zeros(0, dtype=dtype, device=device))

    @property
    def m(self) -> int:
        """Rows and columns of P."""
        return self.U.shape[0]

    @property
    def rank(self) -> int:
        """Columns of U."""
        return self.U.shape[1]

    def power(self, R: Tensor, exponent: float) -> Tensor:
        """``P^exponent R`` for R of shape (m,) or (m, k)."""
        change = torch.expm1(exponent * torch.log1p(self.lam))
        with _full_precision(R.device):
            inner = self.U.T @ R
            return R + self.U @ (change * inner if R.ndim == 1 else change[:, None] * inner)

    def multiply(self, V: Tensor) -> Tensor:
        """``P V``."""
        return self.power(V, 1)

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R``."""
        return self.power(R, -1)

    @property
    def log_det(self) -> Tensor:
        """``log det P``, added up in float64."""
        return torch.log1p(self.lam.double()).sum()

    def sample(self, k: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, P), (m, k), by way of the generator's device: the same on every other."""
        z = torch.randn(self.m, k, dtype=self.U.dtype, device=generator.device, generator=generator)
        return self.power(z.to(self.U.device), 0.5)

    def scaled(self, factor: float) -> Preconditioner:
        """``I + factor U diag(lam) U^T``: the same data under ``factor`` times the prior variance or the precision."""
        return Preconditioner(self.U, self.lam * factor)

    def __repr__(self) -> str:
        return f"Preconditioner(m={self.m}, rank={self.rank}, dtype={self.U.dtype}, device={self.U.device})"


def landmark_index(n: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of n examples, uniformly without replacement, ascending: (count,).

    >>> landmark_index(5, 5, torch.Generator().manual_seed(0))
    tensor([0, 1, 2, 3, 4])
    """
    if not 1 <= count <= n:
        raise ValueError(f"There are {n} examples, so between 1 and {n} landmarks can be drawn; got {count}.")
    return torch.randperm(n, generator=generator, device=generator.device)[:count].sort().values.cpu()


@torch.no_grad()
def nystrom(
    Phi: LinearOperator,
    *,
    landmarks: LinearOperator,
    weight: Tensor | None = None,
    root: Tensor | None = None,
    space: str = "weight",
    rank: int | None = None,
    least: float = 0.0,
) -> Preconditioner:
    r"""The Nystrom preconditioner: Phi projected on the row space of its landmarks ``Phi_m`` (mc, cols).

    In function space ``P = I + L^T K_nm K_mm^+ K_mn L``; in weight space ``P = I + Q Q^T Phi^T W Phi Q Q^T`` with
    ``Q Q^T`` the projection. Both have the same eigenvalues. It takes two Gram matrices, ``K_mm`` (mc, mc) and ``K_nm``
    (rows, mc); in weight space the second is never held, and there is one product with ``Phi_m^T``. Eigenproblems are
    float64.

    Args:
        Phi: (rows, cols), for example ``J.scaled(S.sqrt())``.
        landmarks: Phi of the landmark examples, for example ``J.subset(index).scaled(S.sqrt())``.
        weight: W as (rows,), or in weight space also (n, c, c) for blocks; None means ones.
        root: L with ``W = L L^T``, instead of weight; (rows,), or (n, c, c) in either space.
        space: ``"weight"`` gives P (cols, cols), ``"function"`` P (rows, rows).
        rank: Keep at most this many directions, those with the largest eigenvalues.
        least: Leave out directions whose eigenvalue, which stands beside one, is not above this.

    >>> Phi = Matrix(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    >>> nystrom(Phi, landmarks=Phi).multiply(torch.ones(2))
    tensor([ 2., 10.])
    """
    _check_options(Phi, weight, root, space, rank)
    if landmarks.dtype != Phi.dtype or landmarks.device != Phi.device:
        raise TypeError(
            f"Phi is {Phi.dtype} on {Phi.device}, so landmarks must be too; got {landmarks.dtype} on "
            f"{landmarks.device}."
        )
    size, V = _eigh(landmarks.gram().double())
    kept = size > SPOILED * torch.finfo(Phi.dtype).eps * size[-1].clamp_min(0)
    M = V[:, kept] / size[kept].sqrt()  # Q = Phi_m^T M

    def lift(C: Tensor) -> Tensor:
        return landmarks.T @ C.to(Phi.dtype)

    if space == "weight" and (root is None or root.ndim == 1):
        W = weight if root is None else root.square()
        lam, C = _directions(M, Phi.gram_normal(landmarks, W).double(), rank, least, Phi.dtype)
        U = lift(C) if len(lam) else torch.zeros(Phi.shape[1], 0, dtype=Phi.dtype, device=Phi.device)
        U, lam = _orthonormal(U, lam)
        return Preconditioner(U, lam.to(U.dtype))
    return _build(Phi.gram(landmarks), M, weight, root, space, rank, least, lift=lift, cols=Phi.shape[1])


@torch.no_grad()
def pivoted_cholesky(
    Phi: LinearOperator | Tensor,
    rank: int,
    *,
    weight: Tensor | None = None,
    root: Tensor | None = None,
    space: str = "function",
) -> Preconditioner:
    r"""The partial Cholesky preconditioner: as `nystrom`, with ``rank`` rows chosen greedily.

    The next row is always the one whose squared norm the rows before explain least, whatever the weights. The
    decomposition is linear_operator's. For an operator each row is one Gram row, **one pass over the data** (two where
    single rows cannot be read), and weight space takes one more product with ``Phi^T``; a dense K costs no pass.

    Args:
        Phi: (rows, cols), or ``K = Phi Phi^T`` as a tensor (rows, rows), for function space.
        rank: Number of rows; fewer are taken where these leave nothing but rounding.
        weight: As for `nystrom`.
        root: As for `nystrom`.
        space: ``"function"`` or ``"weight"``.

    >>> pivoted_cholesky(torch.diag(torch.tensor([1.0, 3.0])), 1).multiply(torch.ones(2))
    tensor([1., 4.])
    """
    if isinstance(Phi, Tensor):
        _check_square(Phi)
        op: LinearOperator = Matrix(Phi)
        diagonal = Phi.diagonal()
    else:
        op = Phi
        diagonal = Phi.gram_diag()
    _check_options(op, weight, root, space, rank)
    if isinstance(Phi, Tensor) and space == "weight":
        raise ValueError("A kernel matrix knows nothing of weight space; pass the operator Phi for space='weight'.")
    rows, cols = op.shape
    if not float(_finite(diagonal).max()) > 0:
        return Preconditioner.identity(rows if space == "function" else cols, dtype=op.dtype, device=op.device)
    import linear_operator  # here, since torch 2.13 warns when it is imported

    K = linear_operator.to_linear_operator(Phi) if isinstance(Phi, Tensor) else _kernel(Phi, diagonal)
    tolerance = SPOILED * torch.finfo(op.dtype).eps
    R, order = K.pivoted_cholesky(rank, error_tol=tolerance, return_pivots=True)
    pivots = order[: R.shape[1]]
    corner = R[pivots].double()
    # Rows in the span of those before leave a pivot of rounding, or the root of a negative one.
    fine = corner.diagonal().square() > tolerance * diagonal.max()
    count = int(fine.cumprod(0).sum())
    R, pivots, corner = R[:, :count], pivots[:count], corner[:count, :count]

    def lift(C: Tensor) -> Tensor:
        # Phi_s = corner Q^T for the chosen rows s, so Q = Phi_s^T corner^-T
        M = torch.linalg.solve_triangular(corner.mT, C, upper=True)
        return _rows_transposed(op, pivots, M.to(op.dtype))

    eye = torch.eye(count, dtype=torch.float64, device=op.device)
    return _build(R, eye, weight, root, space, None, 0.0, lift=lift, cols=cols)


def _build(
    K: Tensor,
    M: Tensor,
    weight: Tensor | None,
    root: Tensor | None,
    space: str,
    rank: int | None,
    least: float,
    *,
    lift: Callable[[Tensor], Tensor],
    cols: int,
) -> Preconditioner:
    """The preconditioner from ``Phi Q = K M``, for K (rows, q) and M (q, r) in float64; ``lift(M E)`` is ``Q E``."""
    root = weight.sqrt() if root is None and weight is not None and weight.ndim == 1 else root
    given = weight if root is None else root
    c = given.shape[-1] if given is not None and given.ndim == 3 else 1
    step = max(1, ENTRIES // max(1, K.shape[1]) // c) * c
    chunks = [slice(i, min(i + step, len(K))) for i in range(0, len(K), step)]
    transposed = root if root is None or root.ndim == 1 else root.mT

    T = torch.zeros(K.shape[1], K.shape[1], dtype=torch.float64, device=K.device)
    for rows in chunks:
        X = K[rows].double()
        if root is None:
            T += X.T @ _weighed(X, weight, rows)
        else:
            X = _weighed(X, transposed, rows)
            T += X.T @ X
    lam, C = _directions(M, T, rank, least, K.dtype)
    if space == "weight":
        U = lift(C) if len(lam) else K.new_zeros(cols, 0)
    else:
        C = C / lam.sqrt()
        U = K.new_empty(len(K), len(lam))
        for rows in chunks:
            U[rows] = _weighed(K[rows].double() @ C, transposed, rows).to(K.dtype)
    U, lam = _orthonormal(U, lam)
    return Preconditioner(U, lam.to(U.dtype))


def _directions(M: Tensor, T: Tensor, rank: int | None, least: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Eigenvalues of ``M^T T M``, largest first, and ``M E`` of the eigenvectors E; those that matter."""
    lam, E = _eigh(M.T @ T @ M)
    lam, E = lam.flip(0), E.flip(1)
    kept = (lam > torch.finfo(dtype).eps * lam[:1].clamp_min(0)) & (lam > least)
    return lam[kept][:rank], M @ E[:, kept][:, :rank]


def _weighed(X: Tensor, weight: Tensor | None, rows: slice) -> Tensor:
    """``W X`` in float64 for the rows that X covers; only their weights are converted."""
    if weight is None:
        return X
    c = 1 if weight.ndim == 1 else weight.shape[-1]
    return weigh(X, weight[rows.start // c : rows.stop // c].double(), slice(0, len(X)))


def orthonormality(m: int, r: int, dtype: torch.dtype) -> float:
    r"""How far rounding may take an entry of ``U^T U`` from the identity, for U (m, r) made orthonormal in a dtype.

    ``U = X C`` adds up r terms, so that a column of U is off by at most ``(r + 1) u |X|_F |c|``, ``u = eps / 2``, which
    is ``(r + 1)^(3/2) eps`` where the condition of ``X^T X`` is at most 3, and an entry of ``U^T U`` by twice as much;
    the eigenvectors behind C are allowed the same again. ``U^T U``, and ``X^T X`` behind C, add up m terms in float64,
    which leaves at most ``m u`` each (Higham 2002, section 3.1), here times the condition. The bounds hold for every
    order of the sums.

    >>> orthonormality(4000, 100, torch.float64) < 3e-12
    True
    """
    return 4 * torch.finfo(dtype).eps * (r + 1) ** 1.5 + 2 * torch.finfo(torch.float64).eps * m


def _orthonormal(U: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """``U diag(lam) U^T`` with nearly orthonormal U (m, r), written with orthonormal ones; overwrites U."""
    for _ in range(5):
        chunks = U.split(max(1, ENTRIES // max(1, U.shape[1])))
        G = torch.zeros(U.shape[1], U.shape[1], dtype=torch.float64, device=U.device)
        for part in chunks:
            G += part.double().T @ part.double()
        eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
        # Products are in float64; then the entries of U are rounded, which takes at most eps from an inner product.
        close = torch.finfo(U.dtype).eps + orthonormality(len(U), len(G), torch.float64)
        if not len(G) or float((G - eye).abs().max()) <= close:
            return U, lam
        # U = Y (g^(1/2) V^T) with Y orthonormal: diagonalize what stands between Y and Y^T.
        g, V = _eigh(G)
        g, V = g[g > 0.01], V[:, g > 0.01]
        inner = g.sqrt()[:, None] * V.T
        lam, E = _eigh(inner * lam @ inner.T)
        lam, E = lam.flip(0).clamp_min(0), E.flip(1)
        C = V / g.sqrt() @ E
        for part in chunks:
            part[:, : len(g)] = (part.double() @ C).to(U.dtype)
        U = U[:, : len(g)].contiguous()
    raise ArithmeticError(
        f"The directions of a preconditioner {tuple(U.shape)} could not be made orthonormal in {U.dtype}. Use float64, "
        f"or fewer landmarks."
    )


def _eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(_finite(A))
    return values, vectors


def _finite(A: Tensor) -> Tensor:
    if not bool(torch.isfinite(A).all()):
        raise ArithmeticError(
            "The products with Phi hold NaN or infinity, so no preconditioner can be made of them. Look at the "
            "operator, the weights and the prior variances."
        )
    return A


# Single rows of an operator.


def _rows_transposed(Phi: LinearOperator, index: Tensor, M: Tensor) -> Tensor:
    """``Phi[index]^T M``, (cols, k), for M (len(index), k); reads only those rows where the operator can."""
    if isinstance(Phi, Affine):
        X = Phi._pull(_rows_transposed(Phi.base, index, M))
        return X if Phi.z is None else X - torch.outer(Phi.z, M.sum(0))
    if isinstance(Phi, Matrix):
        return Phi.A[index].T @ M
    if isinstance(Phi, Stack):
        total = M.new_zeros(Phi.shape[1], M.shape[1])
        for part, rows in Phi.placed():
            here = (index >= rows.start) & (index < rows.stop)
            if bool(here.any()):
                total += _rows_transposed(part, index[here] - rows.start, M[here])
        return total
    if isinstance(Phi, Jacobian) and Phi.by_position:
        examples, place = torch.unique(index // Phi.c, return_inverse=True)
        part = Phi.subset(examples.cpu())
        rows = place * Phi.c + index % Phi.c
        return part._rmatmul(M.new_zeros(part.shape[0], M.shape[1]).index_add(0, rows, M))
    return Phi._rmatmul(M.new_zeros(Phi.shape[0], M.shape[1]).index_add(0, index, M))


def _kernel(Phi: LinearOperator, diagonal: Tensor) -> Any:
    """``Phi Phi^T`` for linear_operator: it asks for the diagonal once, and for one row at a time."""
    import linear_operator

    class Kernel(linear_operator.LinearOperator):
        def __init__(self, diagonal: Tensor, *, Phi: LinearOperator) -> None:
            super().__init__(diagonal, Phi=Phi)
            self.diagonal_, self.Phi = diagonal, Phi

        def _matmul(self, rhs: Tensor) -> Tensor:
            return self.Phi @ (self.Phi.T @ rhs)

        def _size(self) -> torch.Size:
            return torch.Size((len(self.diagonal_), len(self.diagonal_)))

        def _transpose_nonbatch(self) -> Kernel:
            return self

        def _diagonal(self) -> Tensor:
            return self.diagonal_

        def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
            rows, place = torch.unique(row_index, return_inverse=True)
            one = torch.eye(len(rows), dtype=self.Phi.dtype, device=self.Phi.device)
            return (self.Phi @ _rows_transposed(self.Phi, rows, one))[col_index, place]

    return Kernel(diagonal, Phi=Phi)


# Checks.


def _check_options(
    Phi: LinearOperator, weight: Tensor | None, root: Tensor | None, space: str, rank: int | None
) -> None:
    if space not in ("weight", "function"):
        raise ValueError(f"space must be 'weight' or 'function'; got {space!r}.")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    if weight is not None and root is not None:
        raise ValueError("Pass weight W or its root L, not both.")
    check_weight(Phi, weight)
    check_weight(Phi, root)
    if weight is None:
        return
    if weight.ndim == 3 and space == "function":
        raise ValueError("Blocks of weights in function space need root= (n, c, c), L with W = L L^T, not weight=.")
    if weight.ndim == 1 and bool((weight < 0).any()):
        raise ValueError(f"weight must not be negative; got {float(weight.min()):.3g}.")
