"""Preconditioners of low rank, and the Nystrom preconditioner from landmarks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet.linalg import (
    LinearOperator,
    LowRankPreconditioner,
    Matrix,
    cg,
    draw_landmarks,
    float64,
    nystrom_preconditioner,
)
from linnet.linalg.preconditioners import low_rank
from linnet.linalg.preconditioners import nystrom as precondition
from tests.support.counted import Counted
from tests.support.drawn import double, normal

ROWS, COLS, C = 24, 15, 3


def close(found: Tensor, wanted: Tensor, *, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * max(float(wanted.abs().max()), 1e-300))


def matrix(P: LowRankPreconditioner) -> Tensor:
    return P.multiply(torch.eye(P.m, dtype=P.U.dtype, device=P.U.device))


def decaying(rows: int, cols: int, *, seed: int = 0, rate: float = 0.3) -> Tensor:
    """A matrix whose singular values fall by ``exp(-rate)`` each."""
    size = min(rows, cols)
    Q, R = torch.linalg.qr(normal(rows, size, seed=seed)).Q, torch.linalg.qr(normal(cols, size, seed=seed + 1)).Q
    return Q * 30 * torch.exp(-rate * torch.arange(size, dtype=torch.float64)) @ R.T


def roots(kind: str) -> Tensor | None:
    """A root of the weights: none, one per row, or a full block per example."""
    if kind == "none":
        return None
    return normal(ROWS, seed=5).abs() if kind == "rows" else normal(ROWS // C, C, C, seed=6)


def as_matrix(root: Tensor | None) -> Tensor:
    if root is None:
        return torch.eye(ROWS, dtype=torch.float64)
    return torch.diag(root) if root.ndim == 1 else torch.block_diag(*root)


# ------------------------------------------------------------------------------- the preconditioner


@pytest.fixture
def P() -> LowRankPreconditioner:
    return LowRankPreconditioner(torch.linalg.qr(normal(9, 4)).Q, torch.tensor([5.0, 2.0, 0.5, 0.0]).double())


def test_products_powers_and_determinant(P: LowRankPreconditioner) -> None:
    dense = torch.eye(9, dtype=torch.float64) + P.U * P.lam @ P.U.T
    V = normal(9, 3, seed=2)
    close(P.multiply(V), dense @ V)
    close(P.solve(V), torch.linalg.solve(dense, V))
    close(P.solve(V[:, 0]), torch.linalg.solve(dense, V[:, 0]))
    half = P.power(torch.eye(9, dtype=torch.float64), 0.5)
    close(half @ half, dense)
    close(P.power(V, -0.5), torch.linalg.solve(half, V))
    close(P.log_det, torch.logdet(dense))
    times_three = P.rescale(torch.full((9,), 3**0.5, dtype=torch.float64))
    close(matrix(times_three), torch.eye(9, dtype=torch.float64) + 3 * P.U * P.lam @ P.U.T)
    assert (P.m, P.rank) == (9, 4)
    assert repr(P) == "LowRankPreconditioner(m=9, rank=4, dtype=torch.float64, device=cpu)"


def test_samples_have_its_covariance(P: LowRankPreconditioner) -> None:
    count = 40_000
    z = P.sample(count, torch.Generator().manual_seed(0))
    dense = matrix(P)
    # The standard error of an entry of an empirical covariance.
    error = ((dense.square() + torch.outer(dense.diagonal(), dense.diagonal())) / count).sqrt()
    assert z.shape == (9, count)
    assert ((z @ z.T / count - dense).abs() < 4.5 * error).all()
    assert torch.equal(z[:, :3], P.sample(count, torch.Generator().manual_seed(0))[:, :3])


def test_identity() -> None:
    P = LowRankPreconditioner(torch.zeros(4, 0), torch.zeros(0))
    V = torch.ones(4, 2)
    assert torch.equal(P.solve(V), V) and torch.equal(P.multiply(V[:, 0]), V[:, 0])
    assert float(P.log_det) == 0 and P.rank == 0 and P.sample(3, torch.Generator()).shape == (4, 3)


def test_float32_keeps_its_dtype_under_autocast(P: LowRankPreconditioner) -> None:
    single = LowRankPreconditioner(P.U.float(), P.lam.float())
    V = normal(9, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = single.solve(V.float())
    assert found.dtype == torch.float32
    close(found.double(), P.solve(V), rtol=1e-5)


def test_what_is_no_preconditioner() -> None:
    U, lam = torch.eye(4)[:, :2], torch.ones(2)
    with pytest.raises(ValueError, match=r"U \(m, r\) and lam \(r,\) .*; got \(4, 2\) and \(3,\)"):
        LowRankPreconditioner(U, torch.ones(3))
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        LowRankPreconditioner(U.bfloat16(), lam.bfloat16())
    with pytest.raises(TypeError, match=r"U is torch\.float32 on cpu, so lam must be too; got torch\.float64"):
        LowRankPreconditioner(U, lam.double())
    with pytest.raises(ValueError, match="finite and not negative; got -1 to 1"):
        LowRankPreconditioner(U, torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"orthonormal; U\^T U is off the identity by 3"):
        LowRankPreconditioner(2 * U, lam)
    with pytest.raises(ValueError, match="orthonormal"):
        LowRankPreconditioner(U * torch.nan, lam)


# ------------------------------------------------------------------------------------------ Nystrom


@pytest.mark.parametrize("kind", ["none", "rows", "blocks"])
def test_nystrom_in_function_space(kind: str) -> None:
    A, root, index = decaying(ROWS, COLS), roots(kind), torch.tensor([0, 2, 3, 7, 11, 20])
    L = as_matrix(root)
    P = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[index]), root=root, space="function")
    K = A @ A.T
    wanted = L.T @ K[:, index] @ torch.linalg.pinv(K[index][:, index], hermitian=True) @ K[index] @ L
    close(matrix(P) - torch.eye(ROWS), wanted, rtol=1e-8)


@pytest.mark.parametrize("kind", ["none", "rows", "blocks"])
def test_nystrom_in_weight_space(kind: str) -> None:
    A, root, index = decaying(ROWS, COLS), roots(kind), torch.tensor([0, 2, 3, 7, 11, 20])
    W = as_matrix(root) @ as_matrix(root).T
    P = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[index]), root=root)
    Q = torch.linalg.qr(A[index].T).Q
    close(matrix(P) - torch.eye(COLS), Q @ Q.T @ A.T @ W @ A @ Q @ Q.T, rtol=1e-8)


@pytest.mark.parametrize("space", ["weight", "function"])
def test_weights_are_squared_roots(space: str) -> None:
    A, landmarks = Matrix(decaying(ROWS, COLS)), Matrix(decaying(ROWS, COLS)[:7])
    rows, blocks = roots("rows"), roots("blocks")
    assert rows is not None and blocks is not None
    by_root = nystrom_preconditioner(A, landmarks=landmarks, root=rows, space=space)
    close(matrix(nystrom_preconditioner(A, landmarks=landmarks, weight=rows.square(), space=space)), matrix(by_root))
    if space == "weight":
        by_root = nystrom_preconditioner(A, landmarks=landmarks, root=blocks, space=space)
        close(
            matrix(nystrom_preconditioner(A, landmarks=landmarks, weight=blocks @ blocks.mT, space=space)),
            matrix(by_root),
        )


@pytest.mark.parametrize("shape", [(10, 30), (30, 10)])
def test_all_rows_give_the_matrix_itself(shape: tuple[int, int]) -> None:
    A = normal(*shape)
    for space, wanted in (("weight", A.T @ A), ("function", A @ A.T)):
        P = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A), space=space)
        assert P.rank == 10
        close(matrix(P) - torch.eye(P.m), wanted)
        close(P.log_det, torch.logdet(torch.eye(10) + (A @ A.T if shape[0] == 10 else A.T @ A)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("space", ["weight", "function"])
def test_directions_are_orthonormal(dtype: torch.dtype, space: str) -> None:
    # Singular values down to 1e-13, and the same rows twice: most directions are rounding.
    A = torch.cat([decaying(60, 80, rate=0.5), decaying(60, 80, rate=0.5)[:10]]).to(dtype)
    P = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A), space=space)
    off = (P.U.double().T @ P.U.double() - torch.eye(P.rank)).abs().max()
    assert float(off) < (1e-5 if dtype == torch.float32 else 1e-10)
    assert 10 < P.rank < 60
    close(P.lam.sum().double(), A.double().square().sum(), rtol=1e-4)
    V = normal(P.m, 2).to(dtype)
    close(P.solve(P.multiply(V)), V, rtol=1e-3 if dtype == torch.float32 else 1e-9)


def test_both_spaces_have_the_same_eigenvalues() -> None:
    A, root = decaying(ROWS, COLS), roots("blocks")
    spaces = [
        nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:7]), root=root, space=s) for s in ("weight", "function")
    ]
    close(spaces[0].lam, spaces[1].lam)
    close(spaces[0].log_det, spaces[1].log_det)


def test_rank_keeps_the_largest() -> None:
    A = decaying(ROWS, COLS)
    full, cut = (nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:9]), rank=rank) for rank in (None, 4))
    assert full.rank == 9 and cut.rank == 4
    close(cut.lam, full.lam[:4])
    assert (full.lam.diff() <= 0).all()


@pytest.mark.parametrize("space", ["weight", "function"])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    A, root = decaying(ROWS, COLS), roots("blocks")
    whole = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:7]), root=root, space=space)
    for module in (precondition, low_rank, float64):
        monkeypatch.setattr(module, "TEMPORARY", 50)
    close(matrix(nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:7]), root=root, space=space)), matrix(whole))


@pytest.mark.parametrize("space", ["weight", "function"])
def test_nothing_to_explain(space: str) -> None:
    zero = Matrix(torch.zeros(6, 4))
    P = nystrom_preconditioner(zero, landmarks=zero, space=space)
    assert P.rank == 0 and P.m == (4 if space == "weight" else 6)
    assert torch.equal(matrix(P), torch.eye(P.m))


def test_landmarks() -> None:
    index = draw_landmarks(100, 30, torch.Generator().manual_seed(0))
    assert index.shape == (30,) and len(index.unique()) == 30 and index.max() < 100 and index.dtype == torch.int64
    assert torch.equal(index, draw_landmarks(100, 30, torch.Generator().manual_seed(0)))
    draws = torch.stack([draw_landmarks(5, 2, torch.Generator().manual_seed(s)) for s in range(500)])
    counts = draws.flatten().bincount(minlength=5)
    assert ((counts - 200).abs() < 4.5 * (500 * 0.4 * 0.6) ** 0.5).all()
    for count in (0, 101):
        with pytest.raises(ValueError, match=f"between 1 and 100 landmarks can be drawn; got {count}"):
            draw_landmarks(100, count, torch.Generator())


# -------------------------------------------------------------------------------------- a Jacobian


@pytest.fixture(scope="module")
def jacobian() -> linnet.Jacobian:
    model = double(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    return linnet.linearize(model).jacobian(normal(20, 4))


@pytest.mark.parametrize("space", ["weight", "function"])
def test_with_a_jacobian(jacobian: linnet.Jacobian, space: str) -> None:
    d = normal(jacobian.shape[1], seed=3).abs()
    Phi, A = jacobian.scaled(d), jacobian.dense() * d
    index = torch.tensor([1, 4, 6])
    P = nystrom_preconditioner(Phi, landmarks=jacobian.subset(index).scaled(d), space=space)
    rows = (2 * index[:, None] + torch.arange(2)).flatten()
    close(matrix(P), matrix(nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[rows]), space=space)), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preconditioners_speed_up_cg_in_both_spaces(dtype: torch.dtype) -> None:
    A = decaying(80, 60, rate=0.2).to(dtype)
    Phi, landmarks = Matrix(A), Matrix(A[::4])
    for space in ("weight", "function"):
        op = Phi if space == "weight" else Phi.T

        def product(V: Tensor, op: LinearOperator = op) -> Tensor:
            return V + op.normal(V)

        B = normal(op.shape[1], 2).to(dtype)
        plain = cg(product, B, tolerance=1e-4).checked()
        P = nystrom_preconditioner(Phi, landmarks=landmarks, space=space)
        found = cg(product, B, tolerance=1e-4, preconditioner=P).checked()
        assert found.iterations < plain.iterations / 2
        close(found.value, plain.value, rtol=1e-2)


# ---------------------------------------------------------------------------------- laws and errors


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 8), cols=st.integers(1, 8), count=st.integers(1, 8), seed=st.integers(0, 1000))
def test_laws(rows: int, cols: int, count: int, seed: int) -> None:
    """P lies between I and A, more landmarks bring it closer, and its sample space does not matter."""
    A = normal(rows, cols, seed=seed)
    count = min(count, rows)
    for space, wanted in (("weight", A.T @ A), ("function", A @ A.T)):
        low = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:count]), space=space)
        scale = float(wanted.trace())
        assert low.rank <= min(count, cols)
        assert float(low.lam.sum()) <= scale * (1 + 1e-9)
        more = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A), space=space)
        assert float(low.log_det) <= float(more.log_det) + 1e-9
        if space == "function":
            left = wanted - (matrix(low) - torch.eye(rows))
            assert float(torch.linalg.eigvalsh(left).min()) >= -1e-8 * scale


def test_wrong_arguments() -> None:
    A = Matrix(decaying(6, 4))
    with pytest.raises(ValueError, match="space must be 'weight' or 'function'; got 'kernel'"):
        nystrom_preconditioner(A, landmarks=A, space="kernel")
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        nystrom_preconditioner(A, landmarks=A, rank=0)
    with pytest.raises(ValueError, match="weight W or its root L, not both"):
        nystrom_preconditioner(A, landmarks=A, weight=normal(6), root=normal(6))
    with pytest.raises(ValueError, match=r"6 rows, so weight needs shape \(6,\), or"):
        nystrom_preconditioner(A, landmarks=A, weight=normal(5))
    with pytest.raises(ValueError, match="Blocks of weights in function space need root="):
        nystrom_preconditioner(A, landmarks=A, weight=normal(3, 2, 2), space="function")
    with pytest.raises(ValueError, match="weight must not be negative; got -"):
        nystrom_preconditioner(A, landmarks=A, weight=normal(6))
    with pytest.raises(TypeError, match=r"Phi is torch.float64 on cpu, so landmarks must be too; got torch.float32"):
        nystrom_preconditioner(A, landmarks=Matrix(A.A.float()))
    with pytest.raises(ValueError, match="4 columns, so gram needs another operator with as many"):
        nystrom_preconditioner(A, landmarks=Matrix(A.A[:, :2]))


def test_products_that_are_not_finite() -> None:
    class Broken(Counted):
        def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
            return self.A @ self.A.T

        def _rmatmul(self, U: Tensor) -> Tensor:
            return super()._rmatmul(U) * torch.nan

    op = Broken(decaying(6, 4))
    for space in ("weight", "function"):
        nystrom_preconditioner(op, landmarks=Matrix(op.A), space=space)
    with pytest.raises(ArithmeticError, match="products with the operator hold NaN or infinity"):
        nystrom_preconditioner(op, landmarks=op)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("space", ["weight", "function"])
def test_on_a_gpu(dtype: torch.dtype, space: str) -> None:
    A = decaying(200, 150, rate=0.05)
    Phi = Matrix(A.to("cuda", dtype))
    rtol = 1e-4 if dtype == torch.float32 else 1e-8
    found = nystrom_preconditioner(Phi, landmarks=Matrix(Phi.A[:50]), space=space)
    wanted = nystrom_preconditioner(Matrix(A), landmarks=Matrix(A[:50]), space=space)
    assert found.U.device.type == "cuda" and found.U.dtype == dtype
    close(matrix(found).double().cpu(), matrix(wanted), rtol=rtol)
    assert found.sample(2, torch.Generator().manual_seed(0)).device.type == "cuda"


@pytest.mark.parametrize("space", ["weight", "function"])
@pytest.mark.parametrize("kind", ["none", "blocks"])
def test_directions_below_the_least_eigenvalue_are_left_out(space: str, kind: str) -> None:
    A, root = Matrix(decaying(ROWS, COLS)), roots(kind)
    whole = nystrom_preconditioner(A, landmarks=A, root=root, space=space)
    assert whole.rank > 6 and bool((whole.lam.diff() <= 0).all())
    least = float((whole.lam[3] * whole.lam[4]).sqrt())
    some = nystrom_preconditioner(A, landmarks=A, root=root, space=space, least=least)
    assert some.rank == 4
    close(some.lam, whole.lam[:4])
    assert nystrom_preconditioner(A, landmarks=A, root=root, space=space, least=2 * float(whole.lam[0])).rank == 0
