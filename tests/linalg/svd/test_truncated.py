"""Leading components against dense singular value decompositions, pass by pass; interruptions and ranks."""

from __future__ import annotations

import math
import os
import signal
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import linnet
from linnet._common import ALONE, Ranks
from linnet.fisher import fisher_statistics
from linnet.linalg import Decomposition, LinearOperator, LowRank, Matrix, Stack, low_rank, orthonormalize
from linnet.linalg.float64 import orthonormality
from linnet.linalg.svd import block_krylov, truncated
from linnet.linalg.svd.block_krylov import (
    KrylovSpace,
    combine,
    expected_error,
    grow_krylov_space,
    multiply_both,
    shared_inner,
)
from linnet.linalg.svd.truncated import (
    choose_method,
    landmark_block,
    landmark_count,
    mixed_block,
    random_normal,
    squared_norm,
)
from linnet.testing.case import Net
from tests.support.drawn import double, normal

METHODS = ("exact", "krylov", "power", "nystrom")
WORLD = 2


def orthogonal(rows: int, columns: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(rows, columns, seed=seed))[0]


def with_values(s: Tensor, n: int, p: int, seed: int = 0) -> Tensor:
    """A matrix (n, p) with these singular values."""
    return (orthogonal(n, len(s), seed) * s) @ orthogonal(p, len(s), seed + 1).T


def lenet_values(r: int) -> Tensor:
    """Singular values that fall as those of LeNet-5's Fisher vectors on 10,000 digits do."""
    at = np.log([1, 2, 8, 16, 32, 64, 128, 256, 512, 4000])
    eigenvalues = np.log([2.12e7, 1.75e7, 1.1e7, 2.9e6, 1.65e6, 8.7e5, 4.0e5, 1.86e5, 8.3e4, 6e3])
    return torch.from_numpy(np.exp(0.5 * np.interp(np.log(np.arange(1, r + 1)), at, eigenvalues)))


def convolutional() -> nn.Module:
    return Net(
        lambda m, x: m.fc(m.two(torch.relu(m.one(x))).relu().flatten(1)),
        one=nn.Conv2d(1, 4, 3),
        two=nn.Conv2d(4, 6, 3),
        fc=nn.Linear(96, 4),
    )


def fisher(n: int = 60, batch_size: int | str = "auto", data=None) -> LinearOperator:
    """Fisher vectors of a small convolutional network, (n, kept)."""
    lin = linnet.linearize(double(convolutional()), output=lambda f: f.logsumexp(1))
    J = lin.jacobian(normal(n, 1, 8, 8, seed=4) if data is None else data, batch_size)
    return fisher_statistics(J, centered=True).vectors(J)


class Counted(LinearOperator):
    """A dense matrix that counts passes, and can be stopped in the middle of one."""

    def __init__(self, A: Tensor, *, stop: int | None = None) -> None:
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.A, self.passes, self.stop, self.widths = A, 0, stop, []

    def _count(self, X: Tensor) -> None:
        if self.passes == self.stop:
            raise KeyboardInterrupt
        self.passes += 1
        self.widths.append(X.shape[1])

    def _matmul(self, V: Tensor) -> Tensor:
        self._count(V)
        return self.A @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        self._count(U)
        return self.A.T @ U

    def _fused(self, fn, V: Tensor) -> tuple[Tensor, Tensor]:
        self._count(V)
        U = torch.cat([fn(self.A[s] @ V, s) for s in (slice(0, 7), slice(7, len(self.A)))])
        return self.A.T @ U, U.sum(0)


def dense(V: LinearOperator) -> tuple[Tensor, Tensor]:
    """The matrix, and its squared singular values."""
    A = V.dense().double()
    return A, torch.linalg.svdvals(A).square()


def worst(found: Decomposition, expected: Tensor) -> float:
    """The largest relative error of an eigenvalue."""
    expected = expected[: len(found.eigenvalues)]
    return float(((found.eigenvalues.double() - expected) / expected).abs().max())


def check(found: Decomposition, A: Tensor, k: int, *, tolerance: float = 1e-9) -> None:
    """What holds of every decomposition, converged or not."""
    assert found.U.shape == (len(A), k) and found.P.shape == (A.shape[1], k)
    assert found.s.shape == found.eigenvalues.shape == found.residuals.shape == found.errors.shape == (k,)
    P, U, size = found.P.double(), found.U.double(), float(found.s[0])
    assert float((P.T @ P - torch.eye(k)).abs().max()) <= tolerance
    assert float((A.double() @ P - U).abs().max()) <= tolerance * size
    assert float((U.T @ U - torch.diag(found.eigenvalues.double())).abs().max()) <= tolerance * size**2
    assert torch.equal(found.eigenvalues, found.eigenvalues.sort(descending=True).values)
    assert float((found.s.square() - found.eigenvalues).abs().max()) <= tolerance * size**2
    residuals = (A.double().T @ (A.double() @ P) - P * found.eigenvalues).norm(dim=0)
    assert float((residuals - found.residuals * found.eigenvalues).abs().max()) <= tolerance * size**2
    assert abs(found.trace - float(A.double().square().sum())) <= tolerance * found.trace


# Every method.


@pytest.mark.parametrize("method", METHODS)
def test_components_of_a_matrix(method):
    A = with_values(torch.logspace(0, -2, 60, dtype=torch.float64), 80, 120)
    found = low_rank(Matrix(A), 6, method=method)
    check(found, A, 6)
    assert found.method == method and found.explained.sum() < 1
    limit = {"exact": 1e-12, "krylov": 1e-7, "power": 1e-3, "nystrom": 0.5}[method]
    assert worst(found, torch.linalg.svdvals(A).square()) <= limit
    # A restriction never overestimates.
    assert bool((found.eigenvalues <= torch.linalg.svdvals(A).square()[:6] * (1 + 1e-12)).all())


@pytest.mark.parametrize("method", METHODS)
def test_components_of_fisher_vectors(method):
    V = fisher(60, batch_size=13)
    A, values = dense(V)
    found = low_rank(V, 5, method=method)
    check(found, A, 5)
    limit = {"exact": 1e-12, "krylov": 1e-7, "power": 1e-3, "nystrom": 0.6}[method]
    assert worst(found, values) <= limit


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "p"), [(80, 30), (30, 80)])
def test_float32(method, n, p):
    A = with_values(torch.logspace(0, -3, 30, dtype=torch.float64), n, p).float()
    found = low_rank(Matrix(A), 5, method=method)
    assert {t.dtype for t in (found.U, found.s, found.P, found.eigenvalues, found.residuals)} == {torch.float32}
    check(found, A, 5, tolerance=2e-6)
    limit = {"exact": 1e-5, "krylov": 2e-5, "power": 1e-3, "nystrom": 0.5}[method]
    assert worst(found, torch.linalg.svdvals(A.double()).square()) <= limit


@pytest.mark.parametrize("method", ["exact", "krylov", "power"])
def test_all_components_give_the_whole_kernel(method):
    A = with_values(torch.linspace(1, 2, 6, dtype=torch.float64), 9, 14)
    found = low_rank(Matrix(A), 6, method=method)
    assert found.converged
    assert float((found.U @ found.U.T - A @ A.T).abs().max()) < 1e-10
    assert float((found.U @ found.P.T - A).abs().max()) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_one_answer(method):
    V = Matrix(with_values(torch.logspace(0, -2, 60, dtype=torch.float64), 90, 100))
    one, two = (low_rank(V, 4, method=method, seed=3) for _ in range(2))
    assert torch.equal(one.U, two.U) and torch.equal(one.P, two.P)
    other = low_rank(V, 4, method=method, seed=4)
    assert method == "exact" or not torch.equal(one.P, other.P)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_laws_of_scale_and_of_the_transpose(n, p, seed, scale):
    A, k = normal(n, p, seed=seed), min(n, p) - 1
    one, many, turned = (low_rank(Matrix(M), k, method="krylov") for M in (A, scale * A, A.T.contiguous()))
    expected = torch.linalg.svdvals(A).square()
    for found, factor in ((one, 1.0), (many, scale**2), (turned, 1.0)):
        assert float((found.eigenvalues / factor - expected[:k]).abs().max()) <= 1e-6 * float(expected[0])


def test_an_operator_of_blocks_of_rows():
    # A Jacobian of three outputs: landmarks are examples, with all their rows.
    lin = linnet.linearize(double(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))))
    J = lin.jacobian(normal(40, 6), 9)
    A, values = dense(J)
    for method in ("exact", "krylov"):
        found = low_rank(J, 7, method=method)
        check(found, A, 7)
        assert worst(found, values) <= 1e-7


# Krylov.


def test_lenet_spectrum_128_components_in_at_most_five_passes():
    s = lenet_values(1600)
    V = Counted(with_values(s, 1600, 1700))
    found = low_rank(V, 128, method="krylov", trace=float(s.square().sum()))
    assert found.converged and found.passes == V.passes <= 5
    assert worst(found, s.square()) <= 1e-7
    assert float(found.errors.max()) <= 1e-7


def test_each_pass_gains_digits_and_the_estimate_keeps_up():
    s = lenet_values(700)
    A, errors = with_values(s, 700, 800), []
    for passes in (1, 2, 3, 4, 5):
        found = low_rank(Matrix(A), 32, method="krylov", block=64, passes=passes, tolerance=0.0, trace=1.0)
        assert found.passes == passes and not found.converged
        errors.append(worst(found, s.square()))
        if passes > 2:
            assert errors[-1] <= float(found.errors.max()) <= 30 * errors[-1]
    assert all(b < 0.3 * a for a, b in pairwise(errors))
    assert errors[-1] < 1e-7


def test_it_stops_at_the_tolerance():
    s = lenet_values(500)
    A = with_values(s, 500, 600)
    loose, tight = (low_rank(Matrix(A), 10, method="krylov", tolerance=t) for t in (1e-2, 1e-10))
    assert loose.passes < tight.passes
    assert worst(loose, s.square()) <= 1e-2 and worst(tight, s.square()) <= 1e-10


def test_passes_that_do_not_suffice_say_so_or_raise():
    A = with_values(torch.linspace(1, 0.9, 300, dtype=torch.float64), 300, 310)
    found = low_rank(Matrix(A), 20, method="krylov", block=20, passes=2)
    assert not found.converged and found.passes == 3  # one for the trace
    check(found, A, 20)
    with pytest.raises(ArithmeticError, match=r"20 leading components have not converged in 3 passes.*residual"):
        found.checked()
    with pytest.raises(ArithmeticError, match=r"not the 1e-07 asked for. Try a larger block=, fewer components"):
        low_rank(Matrix(A), 4, method="krylov", block=4)


def test_a_space_that_is_too_small_is_not_a_rank():
    with pytest.raises(ArithmeticError, match=r"2 passes with blocks of 3 columns make a space of 6, too few for 8"):
        low_rank(Matrix(normal(30, 40)), 8, method="krylov", block=3, passes=2, trace=1.0)


def test_an_invariant_space_ends_it():
    A = with_values(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), 50, 60)
    V = Counted(A)
    found = low_rank(V, 3, method="krylov", trace=14.0, tolerance=0.0)
    assert found.converged and found.passes == V.passes <= 3
    assert float((found.eigenvalues - torch.tensor([9.0, 4.0, 1.0])).abs().max()) < 1e-12


def test_equal_values_are_all_found():
    s = torch.cat([torch.full((7,), 2.0), torch.logspace(0, -3, 60)]).double()
    found = low_rank(Matrix(with_values(s, 90, 100)), 9, method="krylov")
    assert worst(found, s.square()) <= 1e-7


def test_a_basis_beyond_memory_is_restarted():
    s = lenet_values(400)
    A = with_values(s, 400, 500)
    each = (400 + 500) * 8
    # Room for the basis, three blocks of 30 and 10 results: a basis of 80 columns.
    memory = 2 * each * (80 + 3 * 30 + 10)
    V = Counted(A)
    found = low_rank(V, 10, method="krylov", block=30, memory=memory, trace=1.0, tolerance=1e-9)
    assert worst(found, s.square()) <= 1e-9
    assert max(V.widths) <= 30 and len(found.P.T) == 10
    free = low_rank(Matrix(A), 10, method="krylov", block=30, trace=1.0, tolerance=1e-9)
    assert 3 <= free.passes < found.passes < 12


def test_restarted_residuals_are_right():
    A = with_values(lenet_values(300), 300, 320)
    state = KrylovSpace.start(orthonormalize(normal(320, 20)))
    for _ in range(3):
        found = state.step(Matrix(A))
    state.restart(found, 25)
    assert state.columns == 25
    found = state.step(Matrix(A))
    Q = torch.cat(state.Q, 1)
    assert float((Q.T @ Q - torch.eye(45)).abs().max()) < 1e-12
    P = Q @ found.Y
    residuals = (A.T @ (A @ P) - P * found.theta).norm(dim=0)
    assert float((residuals - found.residuals).abs().max()) < 1e-9 * float(found.theta[0])


@pytest.mark.parametrize(("rank", "converged"), [(5, True), (25, False)])
def test_a_space_that_cannot_grow_has_converged_and_a_space_that_was_stopped_has_not(rank, converged):
    A = with_values(torch.linspace(1, 2, rank, dtype=torch.float64), 30, 40)
    state = KrylovSpace.start(orthonormalize(A.T @ normal(30, 8)))
    given = {"tolerance": 1e-9, "limit": 2, "capacity": 100, "after": lambda *_: None}
    found, wanted, enough = grow_krylov_space(Matrix(A), state, lambda theta: None, **given)
    assert (enough, wanted) == (converged, len(found.theta))
    assert (state.X.shape[1] == 0) == converged


def test_memory_that_no_basis_fits_in():
    with pytest.raises(MemoryError, match=r"needs room for 148 columns of 90 numbers.*holds 69.*smaller block="):
        low_rank(Matrix(normal(40, 50)), 4, method="krylov", block=28, memory=100_000)


def test_a_coarse_operator_does_most_of_the_work():
    s = lenet_values(400)
    A = with_values(s, 400, 500)
    coarse, fine = Counted(A + 1e-3 * normal(400, 500, seed=9)), Counted(A)
    found = low_rank(fine, 10, method="krylov", coarse=coarse, trace=1.0)
    check(replace_trace(found, A), A, 10)
    assert found.converged and worst(found, s.square()) <= 1e-7
    assert found.passes == coarse.passes + fine.passes
    assert fine.passes == 1 and coarse.passes > 1
    rough = Counted(A.bfloat16().double())
    found = low_rank(Counted(A), 10, method="krylov", coarse=rough, trace=1.0)
    assert worst(found, s.square()) <= 1e-7
    limited = low_rank(Matrix(A), 10, method="krylov", coarse=Matrix(A), trace=1.0, passes=2)
    assert limited.passes == 2
    check(replace_trace(limited, A), A, 10)


def test_float32_far_down_the_spectrum():
    # Eigenvalues over six decades: rounding leaves what the estimates, or the products' rounding, say.
    s = torch.logspace(0, -3, 200, dtype=torch.float64)
    A = with_values(s, 300, 310).float()
    exact = torch.linalg.svdvals(A.double()).square()
    found = low_rank(Matrix(A), 120, method="krylov", block=40)
    error = (found.eigenvalues.double() / exact[:120] - 1).abs()
    rounding = 4 * torch.finfo(torch.float32).eps * (exact[0] / exact[:120]).sqrt()
    assert bool((error <= 1e-5 + 3 * found.errors + rounding).all())
    assert found.converged and float(error.max()) < 1e-3


def test_a_block_that_memory_cannot_hold_is_made_smaller():
    A = with_values(lenet_values(300), 300, 400)
    each, V = 700 * 8, Counted(A)
    found = low_rank(V, 10, method="krylov", trace=1.0, memory=2 * each * (2 * 10 + 5 * 23))
    assert set(V.widths) == {23}
    assert worst(found, lenet_values(300).square()) <= 1e-7


def test_progress(capsys):
    A = with_values(lenet_values(100), 100, 110)
    for method in ("krylov", "power"):
        shown, silent = (low_rank(Matrix(A), 3, method=method, progress=p) for p in (True, False))
        assert torch.equal(shown.U, silent.U)
    assert capsys.readouterr().out == ""


def replace_trace(found: Decomposition, A: Tensor) -> Decomposition:
    values = dict(vars(found)) | {"trace": float(A.square().sum())}
    return Decomposition(**values)


# The paper's Algorithm 4.


def algorithm_4(J: Tensor, K: int, Omega: Tensor, L: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """As printed, with J (parameters, examples); Omega (examples, K + 10)."""
    Omega = J @ Omega
    for _ in range(L):
        Omega = J.T @ Omega
        Omega = J @ Omega
        Omega = torch.linalg.qr(Omega)[0]
    B = J.T @ Omega
    P, Sigma, Qt = torch.linalg.svd(B.T, full_matrices=False)
    return (Omega @ P)[:, :K], Sigma[:K], Qt[:K]


def test_power_is_the_papers_algorithm():
    V = Counted(with_values(lenet_values(200), 200, 240))
    found = low_rank(V, 8, method="power", seed=5, trace=1.0)
    Omega = random_normal(200, 18, Matrix(V.A), seed=5)
    P, Sigma, Qt = algorithm_4(V.A.T, 8, Omega)
    assert float((found.s - Sigma).abs().max()) <= 1e-10 * float(Sigma[0])
    assert float(((found.P * P).sum(0).abs() - 1).abs().max()) <= 1e-6
    assert float((found.U.T @ Qt.T / Sigma).diagonal().abs().min()) > 1 - 1e-6
    # A product before the iterations, ten of both at once, and the last one.
    assert found.passes == V.passes == 12
    assert V.widths == [18] * 12


def test_power_with_other_settings():
    A = with_values(lenet_values(100), 100, 120)
    found = low_rank(Matrix(A), 5, method="power", block=9, passes=5, seed=1)
    expected = algorithm_4(A.T, 5, random_normal(100, 9, Matrix(A), seed=1), L=3)[1]
    assert float((found.s - expected).abs().max()) <= 1e-10 * float(expected[0])
    assert found.passes == 6 and not found.converged


def test_krylov_beats_ten_iterations_in_fewer_passes():
    s = lenet_values(600)
    A = with_values(s, 600, 700)
    power = low_rank(Matrix(A), 32, method="power")
    few = low_rank(Matrix(A), 32, method="krylov", block=42, passes=5)
    assert worst(few, s.square()) < worst(power, s.square())


# Nystrom, and starting from examples.


def test_nystrom_is_the_kernel_through_its_landmarks():
    V = fisher(50)
    A, _ = dense(V)
    found = low_rank(V, 12, method="nystrom", block=12, seed=2)
    index = truncated.draw_landmarks(50, landmark_count(50, 12, 1, 2**40, each=10), torch.Generator().manual_seed(2))
    few = A[index]
    # All landmarks' directions that are kept: the best 12 of their rows' span.
    rows = torch.linalg.svd(few, full_matrices=False)[2][:12].T
    expected = A @ rows
    assert float((found.U @ found.U.T - expected @ expected.T).abs().max()) <= 1e-8 * float(found.eigenvalues[0])
    assert found.passes == 2  # with the trace


def test_nystrom_takes_ten_rows_for_each_column():
    A, count = normal(800, 310), 300  # ten for each of 30, which is more than 256
    found = low_rank(Matrix(A), 30, method="nystrom", block=30, seed=2)
    index = truncated.draw_landmarks(800, count, torch.Generator().manual_seed(2))
    expected = A @ torch.linalg.svd(A[index], full_matrices=False)[2][:30].T
    difference = (found.U @ found.U.T - expected @ expected.T).abs().max()
    assert float(difference) <= 1e-8 * float(found.eigenvalues[0])


def test_nystrom_with_all_directions_of_the_landmarks(monkeypatch):
    monkeypatch.setattr(truncated, "landmark_count", lambda *_, **__: 9)
    A = normal(40, 60)
    found = low_rank(Matrix(A), 9, method="nystrom", block=9, seed=2)
    index = truncated.draw_landmarks(40, 9, torch.Generator().manual_seed(2))
    K = A @ A.T
    expected = K[:, index] @ torch.linalg.solve(K[index][:, index], K[index])
    assert float((found.U @ found.U.T - expected).abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("n", "c", "memory", "count"),
    [
        (10_000, 1, 2**30, 768),  # three rows for each of 256 columns
        (10_000, 10, 2**30, 76),
        (100, 1, 2**30, 50),
        (1, 1, 2**30, 1),
        (10_000, 1, 64 * 100**2, 100),  # 64 bytes for each entry of their kernel
    ],
)
def test_landmarks_are_few_and_fit_in_memory(n, c, memory, count):
    assert landmark_count(n, 256, c, memory) == count


@pytest.mark.parametrize("kind", ["matrix", "fisher", "stream", "stack"])
def test_starts_are_orthonormal_whatever_the_operator_can(kind):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(normal(30, 1, 8, 8, seed=4))

    V = {
        "matrix": lambda: Matrix(normal(30, 40)),
        "fisher": lambda: fisher(30),
        "stream": lambda: fisher(data=Stream()),
        "stack": lambda: Stack([Matrix(normal(10, 40)), Matrix(normal(20, 40, seed=1))]),
    }[kind]()
    X = landmark_block(V, 25, seed=0, memory=2**30)
    assert X.shape == (V.shape[1], 25)
    assert float((X.T @ X - torch.eye(25)).abs().max()) < 1e-12
    A, values = dense(V)
    found = low_rank(V, 3, method="krylov")
    check(found, A, 3)
    assert worst(found, values) <= 1e-7
    quick = low_rank(V, 3, method="nystrom", trace=1.0)
    assert worst(quick, values) <= 0.5
    assert quick.passes == (1 if kind in ("matrix", "fisher") else 2)


def test_components_of_single_examples_are_found():
    # Rows that no others resemble, and none of which is a landmark.
    A = with_values(torch.logspace(0, -3, 200, dtype=torch.float64), 600, 700)
    index = truncated.draw_landmarks(600, landmark_count(600, 22, 1, 2**40), torch.Generator().manual_seed(0))
    others = torch.tensor(sorted(set(range(600)) - set(index.tolist())))[:5]
    A[others] += 0.5 * normal(5, 700, seed=3) / 700**0.5
    found = low_rank(Matrix(A), 10, method="krylov", memory=2**40)
    assert worst(found, torch.linalg.svdvals(A).square()) <= 1e-7


@pytest.mark.parametrize("block", [1, 2, 3, 25])
def test_mixed_starts_are_orthonormal(block):
    V = Matrix(normal(90, 40))
    X = mixed_block(V, block, seed=0, memory=2**30)
    assert X.shape == (40, block)
    assert float((X.T @ X - torch.eye(block)).abs().max()) < 1e-12


def test_a_start_from_rows_of_low_rank_is_filled_up():
    A = with_values(torch.tensor([2.0, 1.0], dtype=torch.float64), 30, 40)
    X = landmark_block(Matrix(A), 5, seed=0, memory=2**30)
    assert X.shape == (40, 5)
    assert float((A - A @ X @ X.T).abs().max()) < 1e-12
    assert float((X.T @ X - torch.eye(5)).abs().max()) < 1e-12


def test_rows_of_operators():
    A, index = normal(6, 5), torch.tensor([2, 0])
    assert torch.equal(Matrix(A).rows(index).dense(), A[index])
    assert torch.equal(Matrix(A, block=2).rows(index).dense(), A[[4, 5, 0, 1]])
    d, z = normal(3, seed=1), normal(3, seed=2)
    V = Matrix(A).columns(torch.tensor([4, 1, 0])).scaled(d).centered(z)
    assert torch.equal(V.rows(index).dense(), V.dense()[index])
    assert LowRank(normal(6, 2), torch.ones(2).double(), normal(5, 2)).rows(index) is None


# Which method.


@pytest.mark.parametrize(
    ("n", "p", "k", "expected"),
    [
        (100, 50_000, 10, "exact"),
        (50_000, 50_000, 10, "krylov"),
        (1797, 58_000, 32, "krylov"),
        (900, 60_000, 128, "exact"),
    ],
)
def test_auto_takes_the_cheaper_method(n, p, k, expected):
    V = Matrix(torch.zeros(1, 1).expand(n, p))
    assert choose_method(V, 3 * k, memory=2**40) == expected


def test_auto_minds_memory_and_what_the_operator_can():
    V = Matrix(torch.zeros(1, 1).expand(100, 50_000))
    assert choose_method(V, 30, memory=100_000) == "krylov"
    assert choose_method(Counted(torch.zeros(100, 500)), 30, memory=2**40) == "krylov"
    A = normal(30, 500)
    assert low_rank(Matrix(A), 3).method == "exact"
    assert low_rank(Counted(A), 3, trace=1.0).method == "krylov"


def test_exact_needs_no_pass_for_the_trace():
    A = normal(20, 30)
    found = low_rank(Matrix(A), 3, method="exact")
    assert found.passes == 3 and abs(found.trace / float(A.square().sum()) - 1) < 1e-13


# Shares of the trace.


@pytest.mark.parametrize("method", ["exact", "krylov"])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_as_many_components_as_explain_a_share(method, share):
    s = torch.logspace(0, -2, 300, dtype=torch.float64)
    found = low_rank(Matrix(with_values(s, 300, 320)), share, method=method, block=40)
    shares = s.square().cumsum(0) / s.square().sum()
    assert len(found.s) == int((shares < share).sum()) + 1
    assert float(found.explained.sum()) >= share - 1e-9
    assert worst(found, s.square()) <= 1e-7


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_a_share_of_all_but_rounding_is_the_rank(method):
    s = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    found = low_rank(Matrix(with_values(s, 20, 30)), 1 - 1e-16, method=method)
    assert len(found.s) == 3


def test_a_share_that_memory_does_not_hold():
    A = with_values(torch.ones(200, dtype=torch.float64) + 0.01 * normal(200), 200, 210)
    with pytest.raises(MemoryError, match=r"is all that memory allows, and more than 60 components are wanted"):
        low_rank(Matrix(A), 0.9, method="krylov", block=10, memory=2 * 410 * 8 * (70 + 40))


@pytest.mark.parametrize("method", ["power", "nystrom"])
def test_a_share_that_is_not_reached(method):
    found = low_rank(Matrix(normal(60, 80)), 0.9, method=method, block=5)
    assert len(found.s) == 5 and not found.converged


# Components that there are not.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_more_components_than_rank(method, dtype):
    A = with_values(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64), 30, 40).to(dtype)
    with pytest.raises(ValueError, match=r"has 5 components .*; 8 were asked for. Ask for at most 5"):
        low_rank(Matrix(A), 8, method=method)
    assert len(low_rank(Matrix(A), 5, method=method).s) == 5


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_centering_takes_one_component(method):
    V = fisher(12)
    with pytest.raises(ValueError, match=r"has 11 components"):
        low_rank(V, 12, method=method)
    assert len(low_rank(V, 11, method=method).s) == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_zeros_have_no_components(method, dtype):
    with pytest.raises(ValueError, match=r"has 0 components"):
        low_rank(Matrix(torch.zeros(30, 40, dtype=dtype)), 2, method=method)


# Pieces.


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 1000), st.sampled_from([0, 4, 9, 13]))
def test_orthonormal_bases(b, m, seed, decades):
    X = normal(30, b, seed=seed) @ (torch.logspace(0, -decades, b)[:, None].double() * normal(b, b, seed=seed + 1))
    Q = [torch.linalg.qr(normal(30, m, seed=seed + 2))[0]] if m else []
    found = orthonormalize(X.clone(), against=Q)
    assert float((found.T @ found - torch.eye(found.shape[1])).abs().max()) < 1e-13
    inside = torch.cat([*Q, found], 1)
    assert float((X - inside @ (inside.T @ X)).norm()) <= 1e-11 * float(X.norm())
    assert float((inside.T @ inside - torch.eye(inside.shape[1])).abs().max()) < 1e-13


def test_long_inner_products_are_rounded_little():
    X = normal(300_000, 3)
    exact = [[math.fsum((x * y).tolist()) for x in X.T] for y in X.T]
    off = shared_inner(X, X, ALONE) - torch.tensor(exact, dtype=X.dtype)
    assert float(off.abs().max()) <= 4 * torch.finfo(X.dtype).eps * len(X)
    assert orthonormalize(X.clone()).shape == X.shape


def added_otherwise(A: Tensor, B: Tensor, ranks: Ranks) -> Tensor:
    """``A^T B`` with the largest errors that sums in some order may have: m u of the sum of absolute values."""
    u = torch.finfo(torch.float64).eps / 2
    errors = len(A) * u * (A.double().abs().T @ B.double().abs())
    out = A.double().T @ B.double() + errors * torch.sign(normal(*errors.shape, seed=errors.numel()))
    return out if A is not B else 0.5 * (out + out.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decades", [0, 9])
def test_orthonormal_whatever_the_order_of_sums(dtype, decades, monkeypatch):
    X = normal(3000, 60) @ (torch.logspace(0, -decades, 60)[:, None].double() * normal(60, 60, seed=1))
    Q = orthogonal(3000, 20, 2)
    monkeypatch.setattr(block_krylov, "_inner", added_otherwise)
    found = orthonormalize(X.to(dtype), against=[Q.to(dtype)]).double()
    assert found.shape[1] == 60 if decades == 0 else found.shape[1] > 1
    limit = orthonormality(3000, 60, dtype)
    assert float((found.T @ found - torch.eye(found.shape[1])).abs().max()) <= limit
    assert float((Q.T @ found).abs().max()) <= limit


def test_a_basis_that_is_not_orthonormal_is_refused(monkeypatch):
    # Products that lose more digits than float64 rounding explains.
    monkeypatch.setattr(block_krylov, "combine", lambda blocks, Y: (blocks[0].float() @ Y.float()).double())
    with pytest.raises(ArithmeticError, match=r"9 columns and 300 rows could not be made orthonormal in torch.float64"):
        orthonormalize(normal(300, 9))


def test_embeddings_do_not_depend_on_the_order_of_sums(monkeypatch):
    model = double(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)), 0)
    X = normal(200, 6)
    wanted = linnet.FisherEmbedding(model, 5, method="krylov").fit(X).eigenvalues_
    monkeypatch.setattr(block_krylov, "_inner", added_otherwise)
    found = linnet.FisherEmbedding(model, 5, method="krylov").fit(X).eigenvalues_
    assert float((found / wanted - 1).abs().max()) <= 1e-7


def test_orthonormal_leaves_out_what_is_not_there():
    x = normal(20, 3)
    assert orthonormalize(torch.cat([x, x], 1)).shape == (20, 3)
    assert orthonormalize(torch.cat([x, x], 1).float()).shape == (20, 3)
    assert orthonormalize(torch.zeros(20, 3).double()).shape == (20, 0)
    assert orthonormalize(x.clone(), against=[torch.linalg.qr(x)[0]], noise=1e-10).shape == (20, 0)
    small = torch.cat([x, 1e-6 * normal(20, 1, seed=5)], 1)
    assert orthonormalize(small.clone()).shape == (20, 4)
    assert orthonormalize(small.clone(), noise=1e-3).shape == (20, 3)


def test_products_that_are_not_finite():
    A = normal(20, 30)
    A[3, 4] = float("nan")
    with pytest.raises(ArithmeticError, match=r"hold NaN or infinity"):
        low_rank(Matrix(A), 2, method="krylov", trace=1.0)


def test_both_products_in_one_pass():
    V = Counted(normal(20, 30))
    X = normal(30, 4)
    U, W = multiply_both(V, X)
    assert V.passes == 1
    assert torch.allclose(U, V.A @ X, rtol=1e-12) and torch.allclose(W, V.A.T @ V.A @ X, rtol=1e-12)


@pytest.mark.parametrize("kind", ["matrix", "jacobian", "scaled", "centered", "fisher"])
def test_squared_norms(kind):
    J = linnet.linearize(double(nn.Linear(5, 2))).jacobian(normal(9, 5), 4)
    V = {
        "matrix": lambda: Matrix(normal(9, 5)),
        "jacobian": lambda: J,
        "scaled": lambda: J.scaled(normal(12)),
        "centered": lambda: J.columns(torch.tensor([3, 3, 1])).centered(normal(3)),
        "fisher": lambda: fisher(20),
    }[kind]()
    assert abs(squared_norm(V) / float(V.dense().square().sum()) - 1) < 1e-12


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"k": 0}, ValueError, r"k must be a positive whole number.*got 0"),
        ({"k": 1.5}, ValueError, r"share of the trace to explain, between 0 and 1; got 1.5"),
        ({"k": True}, ValueError, r"got True"),
        ({"k": 21}, ValueError, r"at most 20 components; 21 were asked for"),
        ({"method": "svd"}, ValueError, r"method must be one of 'auto', 'krylov'.*got 'svd'"),
        ({"block": 0}, ValueError, r"block must be a whole number, at least 1 here; got 0"),
        ({"block": 2, "method": "nystrom"}, ValueError, r"block must be a whole number, at least 3 here; got 2"),
        ({"passes": 0}, ValueError, r"passes must be a whole number, at least 1 here; got 0"),
        ({"passes": 1, "method": "power"}, ValueError, r"passes must be a whole number, at least 2 here"),
        ({"tolerance": -1.0}, ValueError, r"tolerance must not be negative"),
        ({"coarse": Matrix(torch.ones(2, 2))}, ValueError, r"coarse serves .* with an operator like V, \(20, 30\)"),
        ({"memory": "much"}, ValueError, r"memory must be a number of bytes or 'auto'"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        low_rank(Matrix(normal(20, 30)), **({"k": 3} | arguments))


def test_bad_operators():
    with pytest.raises(TypeError, match=r"needs a linear operator; got Tensor. For a tensor use Matrix"):
        low_rank(normal(3, 3), 1)
    with pytest.raises(TypeError, match=r"float32 or float64; got torch.float16"):
        low_rank(Matrix(torch.ones(3, 3, dtype=torch.float16)), 1)


# Checkpoints.


def test_what_the_next_step_should_leave():
    A = with_values(torch.logspace(0, -2, 300, dtype=torch.float64), 300, 400)
    exact = torch.linalg.svdvals(A).square()[:10]
    state = KrylovSpace.start(mixed_block(Matrix(A), 30, seed=0, memory=2**40))
    before = math.inf
    for step in range(4):
        found = state.step(Matrix(A))
        now = float(((found.theta[:10] - exact) / exact).abs().max())
        assert now <= before
        before = expected_error(found, 10, 30)
        assert math.isinf(before) == (step == 0)
        if step:
            assert before < 0.5 * float(found.errors[:10].max())


def test_no_coarse_passes_where_memory_has_no_room_for_their_wider_block():
    A = with_values(lenet_values(400), 400, 500)
    coarse, given = Counted(A), {"method": "krylov", "coarse": Counted(A), "block": 20, "trace": 1.0}
    column = (400 + 500) * 8
    found = low_rank(Counted(A), 10, **given | {"coarse": coarse}, memory=2 * 150 * column)
    check(replace_trace(found, A), A, 10)
    assert coarse.passes == 0 and found.converged
    low_rank(Counted(A), 10, **given | {"coarse": coarse}, memory=2 * 250 * column)
    assert coarse.passes > 0
    with pytest.raises(MemoryError, match=r"needs room for 120 columns of 900 numbers.*holds 110"):
        low_rank(Counted(A), 10, **given, memory=2 * 110 * column)


def test_the_full_precision_continues_from_the_coarse_space():
    s = lenet_values(400)
    A = with_values(s, 400, 500)
    rough = Matrix(
        A * (1 - 1e-3 * torch.rand(400, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    )
    state = KrylovSpace.start(mixed_block(rough, 30, seed=0, memory=2**40))
    for _ in range(3):
        found = state.step(rough)
    alone = KrylovSpace.start(orthonormalize(combine(state.Q, found.Y[:, :30]))).step(Matrix(A), grow=False)
    both_ = state.refine(found, 30).step(Matrix(A), grow=False)
    errors = [float((one.theta[:10] / s[:10].square() - 1).abs().max()) for one in (alone, both_)]
    assert errors[1] < 0.1 * errors[0]
    assert errors[1] <= float(both_.errors[:10].max()) < 100 * errors[1] + 1e-9


@pytest.mark.parametrize(
    ("method", "stop"),
    [
        ("krylov", 0),
        ("krylov", 1),
        ("krylov", 3),
        ("power", 1),
        ("power", 4),
        ("power", 11),
        ("coarse", 0),
        ("coarse", 1),
    ],
)
def test_a_stopped_computation_goes_on(tmp_path, method, stop):
    A, file = with_values(lenet_values(200), 200, 210), tmp_path / "state.safetensors"

    rough = Counted(A.bfloat16().double())

    def run(V: Counted, **more: object) -> Decomposition:
        coarse = rough if method == "coarse" else None
        chosen = "krylov" if method == "coarse" else method
        return low_rank(V, 8, method=chosen, trace=1.0, coarse=coarse, tolerance=1e-12, **more)

    whole = Counted(A)
    expected = run(whole)
    stopped = Counted(A, stop=stop)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, checkpoint=file)
    assert file.exists() == (stop > 0 or method == "coarse")
    rest, before = Counted(A), rough.passes
    found = run(rest, checkpoint=file)
    assert rough.passes == before  # what the coarse operator gave is in the file
    assert rest.passes == whole.passes - stop
    assert found.passes == expected.passes and found.converged == expected.converged
    # To rounding: what was read from a file may lie otherwise in memory, which some processors sum up otherwise.
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-12, atol=0)
    for one, other in ((found.P, expected.P), (found.U, expected.U)):
        assert float((one - other).norm() / other.norm()) <= 1e-9
    assert not file.exists()


def test_what_has_not_converged_can_be_taken_up(tmp_path):
    file = tmp_path / "state.safetensors"
    A = with_values(torch.linspace(1, 0.9, 300, dtype=torch.float64), 300, 310)
    first, more = Counted(A), Counted(A)
    with pytest.raises(ArithmeticError, match="have not converged in 12 passes"):
        low_rank(first, 4, method="krylov", block=4, trace=1.0, checkpoint=file)
    assert file.exists()
    found = low_rank(more, 4, method="krylov", block=4, trace=1.0, checkpoint=file, passes=14)
    assert found.passes == 14 and more.passes == 3
    assert not file.exists()


def test_a_file_of_another_computation_is_refused(tmp_path):
    file = tmp_path / "state.safetensors"
    x = normal(40, 1, 8, 8, seed=4)

    class Stops(Exception):
        pass

    def run(data: Tensor, *, seed: int = 0, weights: int = 0, stop: bool = False) -> Decomposition:
        lin = linnet.linearize(double(convolutional(), seed=weights), output=lambda f: f.logsumexp(1))
        J = lin.jacobian(data)
        V = fisher_statistics(J, centered=True).vectors(J)
        if stop:
            step = KrylovSpace.step

            def third(self: KrylovSpace, *args: object, **kwargs: object) -> object:
                if self.passes == 2:
                    raise Stops
                return step(self, *args, **kwargs)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(Stops):
                patch.setattr(KrylovSpace, "step", third)
                run_on(V, seed)
        return run_on(V, seed) if not stop else None

    def run_on(V: LinearOperator, seed: int) -> Decomposition:
        return low_rank(V, 3, method="krylov", block=4, seed=seed, checkpoint=file)

    run(x, stop=True)
    assert file.exists()
    with pytest.raises(ValueError, match=r"belongs to another computation.*settings have changed"):
        run(x, seed=1)
    with pytest.raises(ValueError, match=r"belongs to another computation: .*the weights have changed"):
        run(x, weights=1)
    other = x.clone()
    other[20] += 0.1
    with pytest.raises(ValueError, match=r"belongs to another computation: the data have changed"):
        run(other)
    with pytest.raises(ValueError, match=r"belongs to another computation"):
        run(x[:39])
    found = run(x)
    assert worst(found, dense(fisher(data=x))[1]) <= 1e-7


def killed(file: str) -> None:
    """A process that is killed in its third pass."""
    torch.set_num_threads(1)
    V = Counted(with_values(lenet_values(200), 200, 210), stop=2)
    try:
        low_rank(V, 8, method="krylov", trace=1.0, tolerance=1e-12, checkpoint=file)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_killed_process_is_taken_over(tmp_path):
    file = tmp_path / "state.safetensors"
    process = mp.get_context("spawn").Process(target=killed, args=(str(file),))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    A = with_values(lenet_values(200), 200, 210)
    whole, rest = Counted(A), Counted(A)
    expected = low_rank(whole, 8, method="krylov", trace=1.0, tolerance=1e-12)
    found = low_rank(rest, 8, method="krylov", trace=1.0, tolerance=1e-12, checkpoint=file)
    assert rest.passes == whole.passes - 2
    assert float((found.eigenvalues - expected.eigenvalues).abs().max()) <= 1e-12 * float(expected.eigenvalues[0])


# Ranks.


def results(folder: str | None = None) -> dict[str, Tensor]:
    """Statistics and components; what a rank computes is what a process alone computes."""
    found = {}
    for n in (31, 7):
        V = fisher(n, batch_size=4)
        J = V.base
        for centered in (True, False):
            statistics = fisher_statistics(J, centered=centered)
            found |= {f"{n} {centered} Z": statistics.Z, f"{n} {centered} I": statistics.I}
            found[f"{n} {centered} kept"] = statistics.kept.double()
        for method in METHODS:
            part = low_rank(V, 4, method=method)
            found[f"{n} {method} eigenvalues"] = part.eigenvalues
            found[f"{n} {method} kernel"] = part.U @ part.U.T
            found[f"{n} {method} residuals"] = part.residuals * part.eigenvalues
            found[f"{n} {method} passes"] = torch.tensor(float(part.passes))
    X = normal(V.shape[1], 2)
    found["both U"], found["both W"] = multiply_both(V, X)
    # An operator that is not spread over the ranks.
    A = Matrix(normal(12, 15))
    found["matrix U"], found["matrix W"] = multiply_both(A, normal(15, 2, seed=1))
    if folder is not None:
        file = Path(folder) / "state.safetensors"
        early = low_rank(V, 2, method="krylov", block=2, passes=2, tolerance=0.0, checkpoint=file)
        found["checkpoint"] = early.eigenvalues
        dist.barrier()
        found["checkpoint left"] = torch.tensor(float(file.exists()))
    return found


def work(rank: int, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(results(folder), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Tensor]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    mp.spawn(work, args=(folder,), nprocs=WORLD, join=True)
    return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_two_ranks_give_the_answer_of_one(ranks):
    alone = results()
    for found in ranks:
        for name, value in alone.items():
            scale = alone[name.replace("residuals", "eigenvalues")].abs().max()
            assert float((found[name] - value).abs().max()) <= 1e-10 * float(scale), name
        for name in alone:
            if "eigenvalues" in name:
                assert float((found[name] / alone[name] - 1).abs().max()) <= 1e-10, name


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_ranks_agree_to_the_last_bit_and_share_a_checkpoint(ranks):
    for name, value in ranks[0].items():
        assert torch.equal(value, ranks[1][name]), name
    assert float(ranks[0]["checkpoint left"]) == 0


# LeNet-5.


def lenet() -> nn.Module:
    """LeNet-5 with ReLU, as the stored weights have it."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        x = pool(m.convnet["c3"](pool(m.convnet["c1"](x).relu(), 2)).relu(), 2)
        return m.fc["f7"](m.fc["f6"](m.convnet["c5"](x).relu().flatten(1)).relu())

    return Net(
        forward,
        convnet=nn.ModuleDict({"c1": nn.Conv2d(1, 6, 5), "c3": nn.Conv2d(6, 16, 5), "c5": nn.Conv2d(16, 120, 5)}),
        fc=nn.ModuleDict({"f6": nn.Linear(120, 84), "f7": nn.Linear(84, 10)}),
    )


@pytest.mark.parametrize("weights", ["drawn", "trained"])
def test_lenet(weights):
    n = 220
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = lenet()
    x = normal(n, 1, 32, 32).abs()
    if weights == "trained":
        from safetensors.torch import load_file

        default = Path(__file__).resolve().parents[4] / "shared" / "data"
        folder = Path(os.environ.get("LINNET_DATA", default))
        files = folder / "weights" / "lenet5_mnist.safetensors", folder / "mnist.npz"
        if not all(file.exists() for file in files):
            pytest.skip(f"{files[0]} and {files[1]} are not there; name their folder with LINNET_DATA")
        net.load_state_dict(load_file(files[0]))
        images = torch.from_numpy(np.load(files[1])["x_train"][:n]).double() / 255
        x = nn.functional.interpolate(images[:, None], (32, 32), mode="bilinear", align_corners=False)
    J = linnet.linearize(net.double(), output=lambda f: f.logsumexp(1)).jacobian(x)
    statistics = fisher_statistics(J, centered=True)
    V = statistics.vectors(J)
    exact = low_rank(V, 12, method="exact", trace=statistics.trace)
    found = low_rank(V, 12, method="krylov", trace=statistics.trace)
    assert found.passes <= 5 and found.converged
    assert worst(found, exact.eigenvalues) <= 1e-7
    assert float(exact.residuals.max()) <= 1e-10
    assert float((V @ found.P - found.U).abs().max()) <= 1e-10 * float(found.s[0])
