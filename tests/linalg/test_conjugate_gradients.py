"""Conjugate gradients: solutions, what stops them, and tridiagonals of probes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import LowRankPreconditioner, Solution, cg, cholesky_, cholesky_solve
from linnet.linalg.conjugate_gradients import COARSE
from linnet.linalg.lanczos import gauss_quadrature
from tests.support.drawn import normal
from tests.support.systems import close, spd, times


class Counted:
    """Products with A, and the blocks that were asked for."""

    def __init__(self, A: Tensor) -> None:
        self.A, self.blocks = A, []

    def __call__(self, V: Tensor) -> Tensor:
        self.blocks.append(V.clone())
        return self.A @ V


# ------------------------------------------------------------------------------ conjugate gradients


def close_preconditioner(A: Tensor, rank: int) -> LowRankPreconditioner:
    lam, U = torch.linalg.eigh(A)
    return LowRankPreconditioner(U[:, -rank:], lam[-rank:] - 1)


@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize("rank", [0, 20])
def test_cg_reaches_its_tolerance(k: int | None, rank: int) -> None:
    A, B = spd(50), normal(50, *([] if k is None else [k]), seed=1)
    P = close_preconditioner(A, rank) if rank else None
    found = cg(times(A), B, tolerance=1e-8, preconditioner=P)
    assert found.checked() is found and found.value.shape == B.shape and found.tolerance == 1e-8
    left = torch.linalg.vector_norm(A @ found.value - B, dim=0) / torch.linalg.vector_norm(B, dim=0)
    assert float(left.max()) <= 1e-8 and found.residual == pytest.approx(float(left.max()), rel=1e-4)
    close(found.value, torch.linalg.solve(A, B), rtol=1e-5)
    assert found.tridiagonals is None and not found.breakdown


def test_a_preconditioner_saves_iterations() -> None:
    A, B = spd(60, condition=1e4), normal(60, 2)
    plain = cg(times(A), B).checked().iterations
    better = [cg(times(A), B, preconditioner=close_preconditioner(A, r)).checked().iterations for r in (20, 40, 59)]
    assert plain > better[0] > better[1] > better[2]
    assert better[2] <= 2


def test_one_product_for_all_columns_in_each_iteration() -> None:
    A, B = spd(30), normal(30, 4)
    product = Counted(A)
    found = cg(product, B)
    assert len(product.blocks) == found.iterations + 1
    assert {tuple(V.shape) for V in product.blocks} == {(30, 4)}
    product = Counted(A)
    found = cg(product, B, verify=False)
    assert len(product.blocks) == found.iterations
    assert found.residual <= 1e-6


def test_converged_columns_are_frozen() -> None:
    # An eigenvector is solved in one step; after that its direction is zero and its value stays, bit by bit.
    A = spd(30)
    easy = torch.linalg.eigh(A).eigenvectors[:, :1]
    B = torch.cat([easy, normal(30, 1)], 1)
    product = Counted(A)
    found = cg(product, B, tolerance=1e-10)
    alone = cg(times(A), easy, tolerance=1e-10)
    assert alone.iterations == 1 and found.iterations > 10
    close(found.value[:, :1], alone.value, rtol=1e-14)
    assert all(not V[:, 0].any() for V in product.blocks[1:-1])


def test_columns_do_not_matter_to_each_other() -> None:
    A, B = spd(30), normal(30, 3)
    together = cg(times(A), B, tolerance=1e-9).value
    for j in range(3):
        close(together[:, j], cg(times(A), B[:, j], tolerance=1e-9).value, rtol=1e-8)


def test_zero_columns_give_zero() -> None:
    A, B = spd(20), normal(20, 3)
    B[:, 1] = 0
    found = cg(times(A), B, start=normal(20, 3, seed=4)).checked()
    assert not found.value[:, 1].any()
    close(found.value, torch.linalg.solve(A, B), rtol=1e-4)
    nothing = cg(times(A), torch.zeros_like(B)).checked()
    assert nothing.iterations == 0 and nothing.residual == 0 and not nothing.value.any()


def test_a_start_is_used_and_left_alone() -> None:
    A, B = spd(20), normal(20, 2)
    X = torch.linalg.solve(A, B)
    assert cg(times(A), B, start=X).iterations == 0
    near = X + 1e-8 * normal(20, 2, seed=3)
    before = near.clone()
    assert cg(times(A), B, start=near).iterations < cg(times(A), B).iterations
    assert torch.equal(near, before)


def test_too_few_iterations_are_reported_and_raise() -> None:
    A, B = spd(50, condition=1e6), normal(50, 2)
    found = cg(times(A), B, iterations=5)
    assert not found.converged and found.iterations == 5 and found.residual > 1e-6
    true = (torch.linalg.vector_norm(A @ found.value - B, dim=0) / torch.linalg.vector_norm(B, dim=0)).max()
    assert found.residual == pytest.approx(float(true))
    text = (
        r"have not solved the test: after 5 iterations the largest relative residual is .*, not the 1e-06 asked for\. "
    )
    with pytest.raises(ArithmeticError, match=text + "Try more iterations, a preconditioner of larger rank, a larger"):
        found.checked("the test")


def test_float32_restarts_from_the_true_residual() -> None:
    # The running residual has reached the tolerance, the true one has not.
    A, B = spd(200, condition=3e3, seed=3).float(), normal(200, 3, seed=5).float()

    def true(X: Tensor) -> float:
        left = torch.linalg.vector_norm(B.double() - A.double() @ X.double(), dim=0)
        return float((left / torch.linalg.vector_norm(B, dim=0)).max())

    running = cg(times(A), B, tolerance=1e-4, verify=False)
    assert running.residual <= 1e-4 < true(running.value)
    found = cg(times(A), B, tolerance=1e-4).checked()
    assert found.value.dtype == torch.float32 and found.iterations > running.iterations
    assert true(found.value) <= 1.01e-4


def test_what_rounding_forbids_is_not_called_converged() -> None:
    A, B = spd(200, condition=3e3, seed=3).float(), normal(200, 3, seed=5).float()
    found = cg(times(A), B, tolerance=2e-6, iterations=2000)
    assert not found.converged and not found.breakdown and found.residual > 2e-6
    assert found.iterations < 2000  # it stops when starting again does not help


@pytest.mark.parametrize("trouble", ["indefinite", "singular", "NaN", "infinite"])
def test_breakdown_is_reported_without_nan(trouble: str) -> None:
    A = spd(20)
    A = {
        "indefinite": A - 50 * torch.eye(20, dtype=A.dtype),
        "singular": torch.zeros_like(A),
        "NaN": torch.where(torch.eye(20) > 0, torch.nan, A),
        "infinite": torch.full_like(A, torch.inf),
    }[trouble]
    found = cg(times(A), normal(20, 2))
    assert found.breakdown and not found.converged and not math.isnan(found.residual) and found.residual > 0
    assert torch.isfinite(found.value).all()
    with pytest.raises(ArithmeticError, match=r"direction of no or negative curvature.*not positive definite"):
        found.checked()


def test_breakdown_of_one_column_leaves_the_others() -> None:
    A = torch.block_diag(spd(10), -spd(10))
    B = torch.cat([normal(10, 1), torch.zeros(10, 1, dtype=torch.float64)]), torch.ones(20, 1, dtype=torch.float64)
    found = cg(times(A), torch.cat(B, 1))
    assert found.breakdown and not found.converged
    close(found.value[:10, 0], torch.linalg.solve(A[:10, :10], B[0][:10, 0]), rtol=1e-4)


def test_a_preconditioner_that_is_not_positive() -> None:
    class Negative:
        def solve(self, R: Tensor) -> Tensor:
            return -R

    found = cg(times(spd(10)), normal(10, 1), preconditioner=Negative())
    assert found.breakdown and not found.value.any()


# ------------------------------------------------------------------------------------- tridiagonals


def test_tridiagonals_are_those_of_lanczos() -> None:
    """``e_1^T f(T) e_1 = u^T f(A) u``, with the three-term recurrence's coefficients in T."""
    A, B = spd(8, condition=50), normal(8, 3)
    found = cg(times(A), B, tolerance=1e-9, probes=2)
    assert found.tridiagonals is not None and found.tridiagonals.shape == (2, 8, 8)
    u = B[:, 1:] / torch.linalg.vector_norm(B[:, 1:], dim=0)
    close(found.tridiagonals[:, 0, 0], (u * (A @ u)).sum(0))
    for power in (2, 3, 4):
        moments = (u * (torch.linalg.matrix_power(A, power) @ u)).sum(0)
        close(torch.linalg.matrix_power(found.tridiagonals, power)[:, 0, 0], moments)
    nodes, weights = gauss_quadrature(found.tridiagonals)
    lam, Q = torch.linalg.eigh(A)
    close((weights * nodes.log()).sum(1), ((Q.T @ u).square() * lam.log()[:, None]).sum(0))


def test_tridiagonals_with_a_preconditioner() -> None:
    A = spd(8, condition=50)
    P = close_preconditioner(spd(8, condition=50, seed=1), 3)
    z = P.sample(2, torch.Generator().manual_seed(0))
    found = cg(times(A), z, preconditioner=P, tolerance=1e-9, probes=2)
    assert found.tridiagonals is not None
    half = P.power(torch.eye(8, dtype=torch.float64), -0.5)
    u = half @ z / torch.linalg.vector_norm(half @ z, dim=0)
    nodes, weights = gauss_quadrature(found.tridiagonals)
    lam, Q = torch.linalg.eigh(half @ A @ half)
    close((weights * nodes.log()).sum(1), ((Q.T @ u).square() * lam.log()[:, None]).sum(0))


def test_a_probe_that_converges_early_goes_on_as_the_identity() -> None:
    A = spd(20)
    lam, Q = torch.linalg.eigh(A)
    B = torch.stack([normal(20), Q[:, 3] + Q[:, 17]], 1)
    found = cg(times(A), B, probes=2, tolerance=1e-9)
    T = found.tridiagonals
    assert T is not None and T.shape == (2, found.iterations, found.iterations) and found.iterations > 10
    close(torch.linalg.eigvalsh(T[1, :2, :2]), lam[[3, 17]])
    assert not T[1, 1, 2:].any() and torch.equal(T[1, 2:, 2:], torch.eye(found.iterations - 2, dtype=T.dtype))
    nodes, weights = gauss_quadrature(T)
    close((weights[1] * nodes[1].log()).sum(), lam[[3, 17]].log().mean())


def test_probes_of_a_restarted_solve_keep_the_first_run() -> None:
    A, B = spd(200, condition=3e3, seed=3).float(), normal(200, 2, seed=5).float()
    found = cg(times(A), B, tolerance=2e-5, probes=1)
    assert found.tridiagonals is not None and found.tridiagonals.dtype == torch.float64
    assert found.tridiagonals.shape[-1] <= found.iterations
    assert torch.linalg.eigvalsh(found.tridiagonals).min() > 0.5


# ------------------------------------------------------------------------------- errors and manners


def test_wrong_arguments() -> None:
    A, B = spd(5), normal(5, 2)
    with pytest.raises(ValueError, match=r"tolerance > 0 and at least 1 iteration; got 0 and 1000"):
        cg(times(A), B, tolerance=0)
    with pytest.raises(ValueError, match="got 1e-06 and 0"):
        cg(times(A), B, iterations=0)
    with pytest.raises(ValueError, match=r"B has 2 columns, so probes must be between 0 and 2; got 3"):
        cg(times(A), B, probes=3)
    with pytest.raises(ValueError, match=r"start like B, \(5, 2\) of torch.float64 on cpu; got \(5,\)"):
        cg(times(A), B, start=B[:, 0])
    with pytest.raises(ValueError, match="last 1 columns are probes, which start from zero"):
        cg(times(A), B, start=B, probes=1)
    with pytest.raises(ValueError, match="finite right-hand side; B holds NaN"):
        cg(times(A), B + torch.inf)
    with pytest.raises(ValueError, match=r"needed; got \(5, 2, 1\)"):
        cg(times(A), B[..., None])
    with pytest.raises(TypeError, match="float32 or float64"):
        cg(times(A), B.bfloat16())
    with pytest.raises(ArithmeticError, match="no tridiagonal for its probes: all of them are zero"):
        cg(times(A), torch.zeros_like(B), probes=1)


def test_a_start_with_zero_probes() -> None:
    A, B = spd(10), normal(10, 2)
    start = torch.stack([torch.linalg.solve(A, B[:, 0]), torch.zeros(10, dtype=torch.float64)], 1)
    found = cg(times(A), B, start=start, probes=1, tolerance=1e-12)
    assert found.tridiagonals is not None
    nodes, weights = gauss_quadrature(found.tridiagonals)
    lam, Q = torch.linalg.eigh(A)
    wanted = ((Q.T @ B[:, 1]).square() * lam.log()).sum() / B[:, 1].square().sum()
    close((weights * nodes.log()).sum(), wanted, rtol=1e-7)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    A, B = spd(5), normal(5)
    for progress in (None, False, True):
        assert cg(times(A), B, progress=progress).converged
    assert capsys.readouterr().out == ""


def test_solutions_without_a_tolerance() -> None:
    with pytest.raises(ArithmeticError, match=r"solved the system: after 3 iterations .* is 0\.5\. Try more"):
        Solution(torch.ones(1), False, 3, 0.5).checked()


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 10), k=st.integers(1, 3), seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_cg_laws(m: int, k: int, seed: int, scale: float) -> None:
    """The answer is Cholesky's, and scales with the right-hand side and against the matrix."""
    A, B = spd(m, seed=seed, condition=100), normal(m, k, seed=seed + 1)
    X = cg(times(A), B, tolerance=1e-10).checked().value
    close(X, cholesky_solve(cholesky_(A.clone()), B), rtol=1e-7)
    close(cg(times(A), scale * B, tolerance=1e-10).checked().value, scale * X, rtol=1e-7)
    close(cg(times(scale * A), B, tolerance=1e-10).checked().value, X / scale, rtol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    A, B = spd(300).to("cuda", dtype), normal(300, 3).to("cuda", dtype)
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    for block in ("auto", 64):
        L = cholesky_(A.clone(), block=block)
        close(L.double(), torch.linalg.cholesky(A.double()), rtol=rtol)
        close(A @ cholesky_solve(L, B), B, rtol=rtol)
    assert cg(times(A), B, tolerance=1e-4).checked().value.device.type == "cuda"
    with pytest.raises(ArithmeticError, match="row 0 is not positive"):
        cholesky_(-A)


# Coarse products.


def test_coarse_products_slow_cg_down_and_spoil_nothing() -> None:
    A, B = spd(60, condition=50.0), normal(60, 3, seed=1)
    rough = A.bfloat16().double()
    spoiled = cg(times(rough), B, tolerance=1e-8).value
    assert float(((B - A @ spoiled).norm(dim=0) / B.norm(dim=0)).max()) > 1e-4
    found = cg(times(rough), B, tolerance=1e-8, exact=times(A)).checked()
    close(found.value, torch.linalg.solve(A, B), rtol=1e-6)
    assert found.residual <= 1e-8
    assert float(((B - A @ found.value).norm(dim=0) / B.norm(dim=0)).max()) <= 1e-8


def test_products_too_coarse_are_not_called_a_solution() -> None:
    A, B = spd(60, condition=1e6), normal(60, 2, seed=1)
    found = cg(times(A.bfloat16().double()), B, tolerance=1e-10, exact=times(A), iterations=200)
    assert not found.converged
    with pytest.raises(ArithmeticError, match="have not solved"):
        found.checked()


def test_exact_products_are_for_solves_alone() -> None:
    A, B = spd(5), normal(5, 2, seed=1)
    for other in ({"probes": 1}, {"verify": False}):
        with pytest.raises(ValueError, match="without probes"):
            cg(times(A), B, exact=times(A), **other)


@pytest.mark.parametrize("rank", [0, 1])
def test_cg_ends_after_as_many_steps_as_there_are_eigenvalues(rank: int) -> None:
    """Directions are conjugate, so that no step undoes another; descent along gradients alone takes many more."""
    values = torch.tensor([1.0, 3.0, 10.0, 40.0, 100.0]).double().repeat(6)
    Q = torch.linalg.qr(normal(30, 30)).Q
    A = Q * values @ Q.T
    P = LowRankPreconditioner(Q[:, 4::5], torch.full((6,), 99.0).double()) if rank else None
    found = cg(times(A), normal(30, 2, seed=1), tolerance=1e-10, preconditioner=P)
    assert found.converged and found.iterations == 5 - rank


@pytest.mark.parametrize("coarse", [False, True])
def test_the_size_of_a_right_hand_side_changes_no_iteration(coarse: bool) -> None:
    A, B = spd(40), normal(40, 2, seed=1)
    B[:, 1] *= 1e-5
    exact = {"exact": times(A)} if coarse else {}
    counts = [cg(times(A), size * B, tolerance=1e-9, **exact).checked().iterations for size in (1.0, 2.0**-40, 2.0**40)]
    assert counts[0] == counts[1] == counts[2]


def test_coarse_products_are_compared_with_exact_ones_on_the_way() -> None:
    A, B = spd(40), normal(40, 2, seed=1)
    exact = Counted(A)
    found = cg(times(A), B, tolerance=1e-9, exact=exact).checked()
    plain = cg(times(A), B, tolerance=1e-9).checked()
    looks = math.ceil(math.log(1e-9) / math.log(COARSE))
    assert looks - 1 <= len(exact.blocks) <= looks + 2 and looks > 1
    assert plain.iterations <= found.iterations


@pytest.mark.parametrize("trouble", ["rough", "indefinite"])
def test_exact_products_finish_what_coarse_ones_cannot(trouble: str) -> None:
    """Products that are far off stall, or stop a column at once; the exact ones take over, for all columns."""
    A = spd(30)
    lam, Q = torch.linalg.eigh(A)
    B = normal(30, 2, seed=1)
    if trouble == "rough":
        E = normal(30, 30, seed=2)
        coarse = A + 0.2 * lam[0] * (E + E.T)
    else:
        coarse = A - 1.1 * lam[-1] * torch.outer(Q[:, -1], Q[:, -1])
        B[:, 0], B[:, 1] = Q[:, -1], Q[:, :6].sum(1)
    found = cg(times(coarse), B, exact=times(A), tolerance=1e-10).checked()
    assert not found.breakdown
    close(found.value, torch.linalg.solve(A, B), rtol=1e-8)
