"""A direct solve with the rows that carry the curvature, as a preconditioner."""

from __future__ import annotations

import pytest
import torch

from linnet.inference import samples as sampling
from linnet.linalg import LinearOperator, Matrix, WoodburyPreconditioner, woodbury_preconditioner
from linnet.sampling import posterior_samples
from tests.jacobian.test_output_combinations import sure
from tests.support.drawn import normal


def made(
    m: int = 12, p: int = 30, *, coarse: Matrix | None = None, size: float = 1.0
) -> tuple[torch.Tensor, WoodburyPreconditioner]:
    """Phi dense, and the preconditioner of its rows under a prior."""
    R, S = size * normal(m, p), normal(p, seed=1).square()
    P = woodbury_preconditioner(Matrix(R), S, generator=torch.Generator().manual_seed(0), coarse=coarse)
    assert P is not None
    return R * S.sqrt(), P


def test_it_is_the_inverse():
    Phi, P = made()
    V = normal(30, 4, seed=2)
    assert P.tau == pytest.approx(1, abs=1e-9) and (P.m, P.rank) == (30, 12)
    exact = torch.eye(30).double() + Phi.T @ Phi
    torch.testing.assert_close(P.solve(V), torch.linalg.solve(exact, V), rtol=1e-9, atol=1e-9)
    assert float(P.log_det) == pytest.approx(float(torch.logdet(exact)), rel=1e-9)
    draws = P.sample(200_000, torch.Generator().manual_seed(3))
    off = draws @ draws.T / draws.shape[1] - exact
    scale = exact.diagonal().sqrt()
    assert float((off / scale[:, None] / scale).abs().max()) < 0.02
    assert "rows=12" in repr(P)


@pytest.mark.parametrize("bias", [1.0, 0.99])
def test_a_coarse_gram_matrix_costs_iterations_alone(bias):
    R = 100 * normal(12, 30)
    rough = Matrix(bias * R * (1 + 1e-4 * normal(12, 30, seed=7)))
    Phi, P = made(coarse=rough, size=100.0)
    assert P.tau > 1.5  # rounding is worth more than the identity
    H = torch.eye(30).double() + Phi.T @ Phi
    values = torch.linalg.eigvals(P.solve(H)).real
    assert float(values.min()) > 0.3 and float(values.max()) < 2 * P.tau
    assert float(values.max()) < 1e-3 * float(torch.linalg.eigvalsh(H)[-1])


def test_what_is_not_finite_is_said():
    R = normal(3, 5)
    R[0, 0] = float("nan")
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        woodbury_preconditioner(Matrix(R), torch.ones(5).double(), generator=torch.Generator())


def test_no_factor_is_no_preconditioner():
    """A Gram matrix with a large negative eigenvalue."""
    m = 400
    R = torch.eye(m).double()

    class Wrong(LinearOperator):
        def __init__(self) -> None:
            super().__init__((m, m), dtype=torch.float64, device=torch.device("cpu"))

        def _gram(self, other, scale):
            K = torch.eye(m).double()
            K[5, 5] = -1e3
            return K

        def _matmul(self, V):
            return R @ V

        def _rmatmul(self, U):
            return R.T @ U

    found = woodbury_preconditioner(Matrix(R), torch.ones(m).double(), generator=torch.Generator(), coarse=Wrong())
    assert found is None


@pytest.mark.parametrize("probes", [0, 8])
def test_samples_by_way_of_it(probes):
    J, L = sure(4)
    S = torch.full((J.shape[1],), 0.5).double()
    exact = posterior_samples(J, S, L, 3, space="function")
    found = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9, probes=probes)
    assert (
        isinstance(found.preconditioner, WoodburyPreconditioner)
        and found.solution is not None
        and found.solution.iterations <= 12
    )
    torch.testing.assert_close(found.Z, exact.Z, rtol=1e-7, atol=1e-7)
    if probes:
        assert found.log_det == pytest.approx(exact.log_det, abs=6 * found.log_det_error + 1e-6)
    near = posterior_samples(J, 2 * S, L, 3, space="weight", tolerance=1e-9, start=found)
    assert near.preconditioner is found.preconditioner
    torch.testing.assert_close(near.Z, posterior_samples(J, 2 * S, L, 3, space="function").Z, rtol=1e-7, atol=1e-7)
    given = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9, preconditioner=found.preconditioner)
    torch.testing.assert_close(given.Z, exact.Z, rtol=1e-7, atol=1e-7)


def test_a_sketch_where_it_costs_less(monkeypatch):
    J, L = sure(4)
    S = torch.full((J.shape[1],), 0.5).double()
    monkeypatch.setattr(sampling, "woodbury_preconditioner", lambda *given, **more: None)
    exact = posterior_samples(J, S, L, 3, space="function")
    for how in ({}, {"preconditioner": "sketch"}, {"rank": 8}):
        found = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9, **how)
        assert not isinstance(found.preconditioner, WoodburyPreconditioner)
        torch.testing.assert_close(found.Z, exact.Z, rtol=1e-7, atol=1e-7)


def test_where_a_sketch_has_no_memory(monkeypatch):
    """Three columns of a sketch are all there is room for: more rows than it would have are solved directly."""
    J, L = sure(4, unsure=8)
    S = torch.full((J.shape[1],), 0.5).double()
    monkeypatch.setattr(sampling, "find_dense_budget", lambda memory, device: 24 * 30**2)
    columns, limited = sampling._count_columns(J, 3, sampling.SolverSettings(), rows=True)
    assert limited and columns == 3
    found = posterior_samples(J, S, L, 3, space="weight", tolerance=1e-9)
    assert isinstance(found.preconditioner, WoodburyPreconditioner) and columns < found.preconditioner.rank <= 30
    exact = posterior_samples(J, S, L, 3, space="function")
    torch.testing.assert_close(found.Z, exact.Z, rtol=1e-7, atol=1e-7)


def test_what_tau_does():
    """P = I + Phi^T Phi / tau for a tau other than one: the inverse, the determinant and the draws are those of P."""
    Phi, tau = normal(3, 5), 4.0
    P = WoodburyPreconditioner(Matrix(Phi), torch.linalg.cholesky(tau * torch.eye(3).double() + Phi @ Phi.T), tau)
    exact = torch.eye(5).double() + Phi.T @ Phi / tau
    torch.testing.assert_close(P.solve(torch.eye(5).double()), torch.linalg.inv(exact), rtol=1e-10, atol=1e-10)
    assert float(P.log_det) == pytest.approx(float(torch.logdet(exact)), rel=1e-10)
    k = 100_000
    draws = P.sample(k, torch.Generator().manual_seed(3))
    variance = exact.diagonal()
    error = ((exact.square() + torch.outer(variance, variance)) / k).sqrt()
    assert bool(((draws @ draws.T / k - exact).abs() < 5 * error).all())
