"""Where subspace methods start: at the components of a few examples, or at random."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.jacobian.jacobian import Jacobian
from linnet.linalg.matrices import Matrix
from linnet.linalg.operator import Affine, LinearOperator
from linnet.linalg.preconditioners.nystrom import landmark_index
from linnet.linalg.svd.block_krylov import eigh, orthonormal


def rows_of(V: LinearOperator, index: Tensor) -> LinearOperator | None:
    """The rows of the examples at ``index`` (m,), or None where V cannot choose; an example has ``V.block`` rows.

    >>> rows_of(Matrix(torch.eye(3)), torch.tensor([2])).dense()
    tensor([[0., 0., 1.]])
    """
    if isinstance(V, Affine):
        base = rows_of(V.base, index)
        return None if base is None else Affine(base, index=V.index, d=V.d, z=V.z)
    if isinstance(V, Jacobian):
        return V.subset(index) if V.by_position else None
    if isinstance(V, Matrix):
        c = V.block or 1
        rows = (index[:, None] * c + torch.arange(c)).flatten()
        return Matrix(V.A[rows.to(V.device)], block=V.block)
    return None


def random_normal(rows: int, columns: int, V: LinearOperator, *, seed: int) -> Tensor:
    """Standard normal numbers of V's kind, drawn on its device: a block may have very many."""
    generator = torch.Generator(V.device).manual_seed(seed)
    return torch.randn(rows, columns, dtype=V.dtype, device=V.device, generator=generator)


def landmark_count(n: int, block: int, c: int, memory: int, *, each: int = 3) -> int:
    """Examples for a start of ``block`` columns: ``each`` rows a column, but no more than half, or than memory allows.

    >>> landmark_count(10_000, 256, 1, 2**30)
    768
    """
    most = min(4096, int((memory / 64) ** 0.5))
    return max(1, min(n // 2, min(most, max(each * block, 256)) // c))


def mixed_block(V: LinearOperator, block: int, *, seed: int, memory: int) -> Tensor:
    """Orthonormal columns (p, block) to start from: two thirds from a few examples, one third random.

    Examples alone know nothing of components that belong to single others, as Fisher vectors have them, and random
    columns see every component but none well. Largest relative errors of LeNet-5's 32 leading eigenvalues on 10,000
    digits, with 96 columns:

    ============  ======  ======  ======  ======
    pass          2       3       4       5
    ============  ======  ======  ======  ======
    examples      5e-2    2e-2    7e-4    9e-7
    random        1e-1    3e-3    2e-5    4e-8
    both          6e-2    2e-3    1e-5    2e-8
    ============  ======  ======  ======  ======
    """
    X = landmark_block(V, max(1, block - block // 3), seed=seed, memory=memory)
    if X.shape[1] == block:
        return X
    return torch.cat([X, orthonormal(random_normal(V.shape[1], block - X.shape[1], V, seed=seed), against=[X])], 1)


def landmark_block(V: LinearOperator, block: int, *, seed: int, memory: int, each: int = 3) -> Tensor:
    """Orthonormal columns (p, block): right singular vectors of some rows of V, filled up with random ones."""
    c = V.block or 1
    n = V.shape[0] // c
    generator = torch.Generator().manual_seed(seed)
    few = rows_of(V, landmark_index(n, landmark_count(n, block, c, memory, each=each), generator))
    found: list[Tensor] = []
    if few is not None and has_gram(few):
        theta, E = eigh(few.gram().double())
        theta, E = theta[:block], E[:, :block]
        kept = theta > 64 * torch.finfo(V.dtype).eps * theta[:1].clamp_min(0)
        if bool(kept.any()):
            found.append(orthonormal(few._rmatmul((E[:, kept] / theta[kept].sqrt()).to(V.dtype))))
    missing = block - sum(X.shape[1] for X in found)
    if missing:
        found.append(orthonormal(random_normal(V.shape[1], missing, V, seed=seed + 1), against=found))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def has_gram(V: LinearOperator) -> bool:
    """Whether the operator can make its dense V V^T."""
    base = V.base if isinstance(V, Affine) else V
    return type(base)._gram is not LinearOperator._gram
