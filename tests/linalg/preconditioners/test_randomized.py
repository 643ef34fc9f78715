"""The sketched preconditioner: exact where it sees everything, and how far it is from that elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.linalg import Matrix, cg, sketch
from tests.support.drawn import normal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(Phi, root):
    L = torch.diag(root) if root.ndim == 1 else torch.block_diag(*root)
    return torch.eye(Phi.shape[1], dtype=Phi.dtype) + Phi.T @ L @ L.T @ Phi


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "p"), [(12, 30), (40, 9)])
def test_with_all_directions_it_is_the_matrix(blocks, n, p):
    Phi, root = normal(n, p), normal(n // 2, 2, 2, seed=1) if blocks else normal(n, seed=1)
    P = sketch(Matrix(Phi), root, rank=min(n, p), generator=generator(), least=0.0)
    torch.testing.assert_close(P.multiply(torch.eye(p).double()), dense(Phi, root), rtol=1e-9, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), rank=st.integers(1, 8))
def test_it_never_exceeds_the_matrix(seed, rank):
    Phi, root = normal(10, 14, seed=seed), normal(10, seed=seed + 1)
    P = sketch(Matrix(Phi), root, rank=rank, generator=generator(seed), least=0.0)
    left = torch.linalg.eigvalsh(dense(Phi, root) - P.multiply(torch.eye(14).double()))
    assert P.rank <= rank
    assert left.min() > -1e-8 * left.max()


def test_directions_stay_in_the_range():
    Phi = normal(5, 20)
    P = sketch(Matrix(Phi), torch.ones(5).double(), rank=4, generator=generator())
    Q = torch.linalg.qr(Phi.T).Q
    torch.testing.assert_close(Q @ (Q.T @ P.U), P.U, rtol=1e-9, atol=1e-12)


def test_it_saves_iterations():
    scales = torch.logspace(2, -3, 80, dtype=torch.float64)
    Phi = normal(200, 80) * scales
    root = torch.ones(200).double()
    H, B = dense(Phi, root), normal(80, 4, seed=2)
    P = sketch(Matrix(Phi), root, rank=30, generator=generator())
    plain, better = (cg(lambda V: H @ V, B, preconditioner=Q, tolerance=1e-6).checked() for Q in (None, P))
    assert better.iterations < plain.iterations / 4
    torch.testing.assert_close(better.value, torch.linalg.solve(H, B), rtol=1e-4, atol=1e-5)


def test_small_eigenvalues_and_zero_operators_leave_nothing():
    root = torch.ones(3).double()
    assert sketch(Matrix(1e-3 * normal(3, 5)), root, rank=3, generator=generator()).rank == 0
    assert sketch(Matrix(torch.zeros(3, 5).double()), root, rank=3, generator=generator()).rank == 0


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_other_scales_need_no_pass(seed):
    Phi, root = normal(6, 14, seed=seed), normal(6, seed=seed + 1)
    ratio = normal(14, seed=seed + 2).exp()
    P = sketch(Matrix(Phi), root, rank=6, generator=generator(seed), least=0.0)
    moved = P.rescale(ratio, least=0.0).multiply(torch.eye(14).double())
    torch.testing.assert_close(moved, dense(Phi * ratio, root), rtol=1e-7, atol=1e-7)


def test_errors():
    Phi = Matrix(normal(4, 5))
    with pytest.raises(ValueError, match="at least one column; got rank=0"):
        sketch(Phi, torch.ones(4).double(), rank=0, generator=generator())
    with pytest.raises(ValueError, match=r"weight needs shape \(4,\)"):
        sketch(Phi, torch.ones(3).double(), rank=2, generator=generator())
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        sketch(Matrix(normal(4, 5) / 0), torch.ones(4).double(), rank=2, generator=generator())
    P = sketch(Phi, torch.ones(4).double(), rank=2, generator=generator())
    with pytest.raises(ValueError, match=r"ratio needs shape \(5,\); got \(4,\)"):
        P.rescale(torch.ones(4).double())
