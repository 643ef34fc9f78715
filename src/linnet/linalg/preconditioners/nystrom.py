r"""Preconditioners from a few examples, the landmarks.

.. math:: P = I + U \, \mathrm{diag}(\lambda) \, U^\top

for ``A = I + Phi^T W Phi`` (weight space) and ``A = I + L^T Phi Phi^T L`` (function space), with an operator ``Phi``
(rows, cols) and weights ``W = L L^T`` of its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet._common import TEMPORARY
from linnet.linalg.float64 import eigh, find_resolved
from linnet.linalg.operator import LinearOperator, check_weight
from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner
from linnet.linalg.row_weights import find_examples, weigh, weight_from_root


def draw_landmarks(n: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of n examples, uniformly without replacement, ascending: (count,).

    >>> draw_landmarks(5, 5, torch.Generator().manual_seed(0))
    tensor([0, 1, 2, 3, 4])
    """
    if not 1 <= count <= n:
        raise ValueError(f"There are {n} examples, so between 1 and {n} landmarks can be drawn; got {count}.")
    return torch.randperm(n, generator=generator, device=generator.device)[:count].sort().values.cpu()


@torch.no_grad()
def nystrom_preconditioner(
    Phi: LinearOperator,
    *,
    landmarks: LinearOperator,
    weight: Tensor | None = None,
    root: Tensor | None = None,
    space: str = "weight",
    rank: int | None = None,
    least: float = 0.0,
) -> LowRankPreconditioner:
    r"""The Nystrom preconditioner: Phi projected on the row space of its landmarks ``Phi_m`` (mc, cols).

    In function space ``P = I + L^T K_nm K_mm^+ K_mn L``; in weight space ``P = I + Q Q^T Phi^T W Phi Q Q^T`` with
    ``Q Q^T`` the projection. Both have the same eigenvalues. Two Gram matrices are made, ``K_mm`` (mc, mc) and ``K_nm``
    (rows, mc). In weight space ``K_nm`` is never held, and there is one product with ``Phi_m^T``. Eigenproblems are
    solved in float64.

    Args:
        Phi: (rows, cols), for example ``J.scaled(S.sqrt())``.
        landmarks: Phi of the landmark examples, for example ``J.subset(index).scaled(S.sqrt())``.
        weight: W as (rows,), or in weight space also (n, c, c) for blocks; None means ones.
        root: L with ``W = L L^T``, instead of weight; (rows,), or (n, c, c) in either space.
        space: ``"weight"`` gives P (cols, cols), ``"function"`` P (rows, rows).
        rank: Keep at most this many directions, those with the largest eigenvalues.
        least: Leave out directions whose eigenvalue, which stands beside one, is not above this.

    >>> from linnet.linalg.matrices import Matrix
    >>> Phi = Matrix(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    >>> nystrom_preconditioner(Phi, landmarks=Phi).multiply(torch.ones(2))
    tensor([ 2., 10.])
    """
    _check_options(Phi, landmarks, weight, root, space, rank)
    size, V = eigh(landmarks.gram().double())
    kept = find_resolved(size, Phi.dtype)
    M = V[:, kept] / size[kept].sqrt()  # Q = Phi_m^T M

    def find_directions(T: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues of ``M^T T M``, largest first, and ``M E`` of the eigenvectors E; those that matter."""
        lam, E = eigh(M.T @ T @ M)
        matters = (lam > torch.finfo(Phi.dtype).eps * lam[:1].clamp_min(0)) & (lam > least)
        return lam[matters][:rank], M @ E[:, matters][:, :rank]

    if space == "weight":
        W = weight if root is None else weight_from_root(root)
        lam, C = find_directions(Phi.gram_normal(landmarks, W).double())
        U = landmarks.T @ C.to(Phi.dtype) if len(lam) else C.new_zeros(Phi.shape[1], 0, dtype=Phi.dtype)
        return LowRankPreconditioner.from_directions(U, lam)

    L = weight.sqrt() if weight is not None else root
    K = Phi.gram(landmarks)
    c = L.shape[-1] if L is not None and L.ndim == 3 else 1
    step = max(1, TEMPORARY // max(1, K.shape[1]) // c) * c
    chunks = [slice(i, min(i + step, len(K))) for i in range(0, len(K), step)]

    def weigh_rows(X: Tensor, rows: slice) -> Tensor:
        """``L^T X`` in float64 for the rows that X covers; only their weights are converted."""
        return weigh(X, None if L is None else L[find_examples(rows, L)].double(), transpose=True)

    T = torch.zeros(K.shape[1], K.shape[1], dtype=torch.float64, device=K.device)
    for rows in chunks:
        X = weigh_rows(K[rows].double(), rows)
        T += X.T @ X
    lam, C = find_directions(T)
    U = K.new_empty(len(K), len(lam))
    for rows in chunks:
        U[rows] = weigh_rows(K[rows].double() @ (C / lam.sqrt()), rows).to(K.dtype)
    return LowRankPreconditioner.from_directions(U, lam)


def _check_options(
    Phi: LinearOperator,
    landmarks: LinearOperator,
    weight: Tensor | None,
    root: Tensor | None,
    space: str,
    rank: int | None,
) -> None:
    if space not in ("weight", "function"):
        raise ValueError(f"space must be 'weight' or 'function'; got {space!r}.")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    if weight is not None and root is not None:
        raise ValueError("Pass weight W or its root L, not both.")
    check_weight(Phi, weight)
    check_weight(Phi, root)
    if weight is not None and weight.ndim == 3 and space == "function":
        raise ValueError("Blocks of weights in function space need root= (n, c, c), L with W = L L^T, not weight=.")
    if weight is not None and weight.ndim == 1 and bool((weight < 0).any()):
        raise ValueError(f"weight must not be negative; got {float(weight.min()):.3g}.")
    if landmarks.dtype != Phi.dtype or landmarks.device != Phi.device:
        raise TypeError(
            f"Phi is {Phi.dtype} on {Phi.device}, so landmarks must be too; got {landmarks.dtype} on "
            f"{landmarks.device}."
        )
