"""Stochastic Lanczos quadrature, exactly where it is exact and statistically where it is an estimate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linnet.linalg import LowRankPreconditioner, Product, cg, lanczos_quadrature, log_det_from_tridiagonals
from linnet.linalg.lanczos import gauss_quadrature
from tests.support.drawn import normal
from tests.support.systems import close, spd, times

M = 60


def preconditioner(A: Tensor, rank: int) -> LowRankPreconditioner:
    """A's largest eigenvalues, slightly wrong."""
    lam, U = torch.linalg.eigh(A)
    lam, U = lam[-rank:], U[:, -rank:]
    return LowRankPreconditioner(U, (lam - 1) * (1 + 0.1 * torch.cos(torch.arange(rank, dtype=A.dtype))))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_det(
    product: Product,
    *,
    generator: torch.Generator,
    preconditioner: LowRankPreconditioner | None = None,
    probes: int = 16,
    tolerance: float = 1e-3,
    iterations: int = 1000,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[float, float]:
    """An estimate of ``log det A`` and its standard error, by conjugate gradients on random right-hand sides."""
    none = torch.zeros(M + 1, 0, dtype=dtype, device=device)
    P = preconditioner or LowRankPreconditioner(none[1:], none[0])
    options = {"tolerance": tolerance, "iterations": iterations, "probes": probes}
    # The quadrature is made of the recurrence: the accuracy of the solution does not matter.
    solved = cg(product, P.sample(probes, generator), preconditioner=P, verify=False, **options).checked("the probes")
    assert solved.tridiagonals is not None
    return log_det_from_tridiagonals(solved.tridiagonals, P, M)


# ---------------------------------------------------------------------------------- log determinants


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 20])
def test_log_det_within_its_standard_error(dtype: torch.dtype, rank: int) -> None:
    A = spd(M, condition=100)
    P = preconditioner(A, rank) if rank else None
    P = P and LowRankPreconditioner(P.U.to(dtype), P.lam.to(dtype))
    wanted, scores = float(torch.logdet(A)), []
    for seed in range(30):
        found, error = log_det(times(A.to(dtype)), preconditioner=P, generator=seeded(seed), dtype=dtype)
        assert abs(found - wanted) < 4 * error
        scores.append((found - wanted) / error)
    # Neither a bias nor a standard error that is too large: scores are close to standard normal.
    assert abs(sum(scores)) / 30**0.5 < 3
    assert 0.6 < float(torch.tensor(scores).std()) < 1.5


def test_the_standard_error_shrinks() -> None:
    A = spd(M)
    few, many = (log_det(times(A), probes=p, generator=seeded(0))[1] for p in (8, 512))
    assert 4 < few / many < 16  # about sqrt(512 / 8) = 8
    Q = torch.linalg.qr(normal(M, M)).Q
    A = torch.eye(M) + Q * 1e4 * torch.exp(-0.3 * torch.arange(M, dtype=torch.float64)) @ Q.T

    def error(rank: int) -> float:
        P = preconditioner(A, rank) if rank else None
        return log_det(times(A), preconditioner=P, probes=64, generator=seeded(0))[1]

    assert error(0) > error(10) > error(20) > 10 * error(40)


def test_an_exact_preconditioner_gives_the_determinant() -> None:
    A = spd(M)
    lam, U = torch.linalg.eigh(A)
    P = LowRankPreconditioner(U, (lam - 1).clamp_min(0))
    found, error = log_det(times(A), preconditioner=P, generator=seeded(0), probes=2)
    assert found == pytest.approx(float(torch.logdet(A)), rel=1e-12) and error < 1e-9


def test_a_multiple_of_the_identity_has_no_error() -> None:
    # u^T log(A) u is the same for every unit vector, while the length of z varies.
    found, error = log_det(lambda V: 5 * V, generator=seeded(0), probes=3)
    assert found == pytest.approx(M * math.log(5)) and error < 1e-9


def test_the_tolerance_bounds_the_quadrature() -> None:
    # Against the exact quadratic forms of the same probes.
    A, P = spd(M), preconditioner(spd(M), 10)
    z = P.sample(4, seeded(1))
    u = P.power(z, -0.5)
    u = u / torch.linalg.vector_norm(u, dim=0)
    half = P.power(torch.eye(M, dtype=torch.float64), -0.5)
    lam, Q = torch.linalg.eigh(half @ A @ half)
    exact = float(P.log_det) + M * float(((Q.T @ u).square() * lam.log()[:, None]).sum(0).mean())
    errors = []
    for tolerance in (1e-1, 1e-3):
        found, _ = log_det(times(A), preconditioner=P, generator=seeded(1), probes=4, tolerance=tolerance)
        errors.append(abs(found - exact) / abs(exact))
    assert errors[0] < 1e-2 and errors[1] < 1e-5


def test_probes_beside_other_columns() -> None:
    A, P = spd(M), preconditioner(spd(M), 10)
    B = torch.cat([normal(M, 3), P.sample(16, seeded(0))], 1)
    solved = cg(times(A), B, preconditioner=P, probes=16).checked()
    assert solved.tridiagonals is not None
    found, error = log_det_from_tridiagonals(solved.tridiagonals, P, M)
    assert abs(found - float(torch.logdet(A))) < 4 * error
    alone, _ = log_det(times(A), preconditioner=P, generator=seeded(0))
    assert found == pytest.approx(alone, rel=1e-5)
    plain = cg(times(A), normal(M, 8), probes=8).tridiagonals
    assert plain is not None
    found, error = log_det_from_tridiagonals(plain, None, M)
    assert abs(found - float(torch.logdet(A))) < 4 * error


def test_log_det_errors() -> None:
    A = spd(M, condition=1e6)
    with pytest.raises(ArithmeticError, match="not solved the probes: after 3 iterations"):
        log_det(times(A), generator=seeded(0), iterations=3)
    with pytest.raises(ArithmeticError, match="not positive definite"):
        log_det(times(-A), generator=seeded(0))
    with pytest.raises(ValueError, match="at least 2 probes; got 1"):
        log_det_from_tridiagonals(torch.ones(1, 2, 2), None, M)
    with pytest.raises(ArithmeticError, match="found the eigenvalue -1"):
        log_det_from_tridiagonals(-torch.eye(2).expand(3, 2, 2), None, M)


# ------------------------------------------------------------------------------------------- Lanczos


def test_all_steps_give_the_spectrum() -> None:
    A, B = spd(12), normal(12, 3)
    nodes, weights, norms2 = lanczos_quadrature(times(A), B, steps=20)
    lam, Q = torch.linalg.eigh(A)
    assert nodes.shape == weights.shape == (3, 12) and nodes.dtype == torch.float64
    close(nodes, lam.expand(3, 12))
    close(norms2, B.square().sum(0))
    close(norms2[:, None] * weights, (Q.T @ B).square().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_steps_are_exact_for_polynomials(dtype: torch.dtype) -> None:
    A, B = spd(40, condition=30), normal(40, 3)
    nodes, weights, norms2 = lanczos_quadrature(times(A.to(dtype)), B.to(dtype), steps=4)
    assert nodes.shape == (3, 4)
    for degree in range(8):
        wanted = (B * (torch.linalg.matrix_power(A, degree) @ B)).sum(0)
        rtol = 1e-10 if dtype == torch.float64 else 1e-4
        close(norms2 * (weights * nodes**degree).sum(1), wanted, rtol=rtol)


def test_orthogonality_is_kept() -> None:
    # One eigenvalue far from the others is found at once; without reorthogonalization it would come again.
    A = torch.diag(torch.cat([torch.linspace(1, 2, 59, dtype=torch.float64), torch.tensor([1e6]).double()]))
    nodes, weights, _ = lanczos_quadrature(times(A), normal(60, 2), steps=50)
    assert ((nodes > 1e5).sum(1) == 1).all()
    assert (nodes.min(1).values >= 1 - 1e-9).all()
    close(weights.sum(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invariant_subspaces_end_a_column_exactly(dtype: torch.dtype) -> None:
    lam, Q = torch.linalg.eigh(spd(20, condition=50))
    B = torch.stack([Q[:, 5], Q[:, 2] + 2 * Q[:, 9] + Q[:, 19], normal(20)], 1)
    nodes, weights, norms2 = lanczos_quadrature(times((Q * lam @ Q.T).to(dtype)), B.to(dtype), steps=10)
    assert nodes.shape == (3, 10)
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    for f in (torch.log, torch.reciprocal, torch.exp):
        found = norms2 * (weights * f(nodes)).sum(1)
        close(found[:2], torch.stack([f(lam[5]), f(lam[2]) + 4 * f(lam[9]) + f(lam[19])]), rtol=rtol)
    assert torch.isfinite(nodes).all() and (nodes > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invariant_subspaces_end_a_column_whatever_the_order_of_sums(dtype: torch.dtype) -> None:
    m, eps = 900, torch.finfo(dtype).eps
    Q = torch.linalg.qr(normal(m, 3))[0]
    lam = torch.tensor([1.0, 2.0, 5.0]).double()
    calls = 0

    def product(V: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = Q * lam @ (Q.T @ V.double())
        noise = normal(*out.shape, seed=calls)
        return (out + 0.1 * m**0.5 * eps * out.norm(dim=0) * noise / noise.norm(dim=0)).to(dtype)

    nodes, weights, norms2 = lanczos_quadrature(product, Q.sum(1, keepdim=True).to(dtype), steps=10)
    assert calls == nodes.shape[1] == 3
    close(norms2 * (weights * nodes.log()).sum(1), lam.log().sum()[None], rtol=m**0.5 * eps)


def test_it_stops_when_all_columns_have_ended() -> None:
    calls = []

    def product(V: Tensor) -> Tensor:
        calls.append(tuple(V.shape))
        return 3 * V

    nodes, weights, norms2 = lanczos_quadrature(product, normal(20, 2), steps=10)
    assert calls == [(20, 2)]
    close(nodes, torch.full((2, 1), 3.0, dtype=torch.float64))
    close(weights, torch.ones(2, 1, dtype=torch.float64))
    close(norms2, normal(20, 2).square().sum(0))


def test_singular_matrices_and_zero_columns() -> None:
    A = normal(20, 3)
    B = normal(20, 2)
    B[:, 1] = 0
    nodes, weights, norms2 = lanczos_quadrature(lambda V: A @ (A.T @ V), B, steps=10)
    assert nodes.shape[1] <= 5 and torch.isfinite(nodes).all()
    assert norms2[1] == 0 and (nodes[1] == 1).all()
    exact = B[:, 0] @ torch.linalg.solve(torch.eye(20) + A @ A.T, B[:, 0])
    close(norms2[0] * (weights[0] / (1 + nodes[0])).sum(), exact)
    nodes, weights, norms2 = lanczos_quadrature(times(A), torch.zeros(20, 1).double(), steps=3)
    assert nodes.tolist() == [[1.0]] and weights.tolist() == [[1.0]] and norms2.tolist() == [0.0]


def test_one_block_product_for_each_step() -> None:
    A, calls = spd(20), []

    def product(V: Tensor) -> Tensor:
        calls.append(tuple(V.shape))
        return A @ V

    lanczos_quadrature(product, normal(20, 3), steps=7)
    assert calls == [(20, 3)] * 7


def test_a_vector_is_one_column() -> None:
    A, b = spd(10), normal(10)
    for one, other in zip(
        lanczos_quadrature(times(A), b, steps=4), lanczos_quadrature(times(A), b[:, None], steps=4), strict=True
    ):
        assert torch.equal(one, other)


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 10), k=st.integers(1, 3), steps=st.integers(1, 12), seed=st.integers(0, 1000))
def test_lanczos_laws(m: int, k: int, steps: int, seed: int) -> None:
    """Weights are a distribution, nodes lie in the spectrum, and a shift of A shifts the nodes alone."""
    A, B = spd(m, seed=seed, condition=50), normal(m, k, seed=seed + 1)
    nodes, weights, norms2 = lanczos_quadrature(times(A), B, steps=steps)
    close(weights.sum(1), torch.ones(k, dtype=torch.float64))
    assert (weights >= 0).all() and nodes.min() > 1 - 1e-8 and nodes.max() < 50 * (1 + 1e-8) + (m == 1)
    close(norms2 * (weights * nodes).sum(1), (B * (A @ B)).sum(0))
    shifted = lanczos_quadrature(lambda V: A @ V + 2 * V, B, steps=steps)
    close((shifted[1] * (shifted[0] - 2)).sum(1), (weights * nodes).sum(1), rtol=1e-8)


def test_lanczos_errors() -> None:
    A, B = spd(5), normal(5, 2)
    with pytest.raises(ValueError, match="at least 1 step; got 0"):
        lanczos_quadrature(times(A), B, steps=0)
    with pytest.raises(ValueError, match="finite start vectors"):
        lanczos_quadrature(times(A), B / 0, steps=2)
    with pytest.raises(ArithmeticError, match="NaN or infinity in the products"):
        lanczos_quadrature(times(A * torch.nan), B, steps=2)
    with pytest.raises(TypeError, match="float32 or float64"):
        lanczos_quadrature(times(A), B.half(), steps=2)


def test_gauss_of_padded_tridiagonals() -> None:
    T = torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.eye(3)).expand(4, 5, 5)
    nodes, weights = gauss_quadrature(T)
    close((weights * nodes.log()).sum(1), torch.full((4,), 0.5 * math.log(3), dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    A = spd(M, condition=100).to("cuda", dtype)
    found, error = log_det(times(A), generator=seeded(0), dtype=dtype, device="cuda")
    assert abs(found - float(torch.logdet(A.double()))) < 4 * error
    nodes, weights, norms2 = lanczos_quadrature(times(A), normal(M, 2).to("cuda", dtype), steps=5)
    assert nodes.device.type == "cuda"
    wanted = lanczos_quadrature(times(A.cpu().double()), normal(M, 2), steps=5)
    for one, other in zip((nodes, weights, norms2), wanted, strict=True):
        close(one.cpu(), other, rtol=1e-8 if dtype == torch.float64 else 1e-3)


def test_the_estimate_and_its_standard_error_by_hand() -> None:
    """Probes that ended after one step: each says m log t, and three of them have a mean and a standard error."""
    t = torch.tensor([2.0, 3.0, 5.0]).double()
    each = 7 * t.log()
    found, error = log_det_from_tridiagonals(t[:, None, None], None, 7)
    assert found == pytest.approx(float(each.mean()), rel=1e-12)
    assert error == pytest.approx(float(((each - each.mean()).square().sum() / 2 / 3).sqrt()), rel=1e-12)
    P = LowRankPreconditioner(torch.eye(7, 1).double(), torch.tensor([3.0]).double())
    shifted, same = log_det_from_tridiagonals(t[:, None, None], P, 7)
    assert shifted == pytest.approx(found + math.log(4), rel=1e-12) and same == error
