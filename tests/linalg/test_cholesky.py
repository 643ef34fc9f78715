"""Cholesky decomposition in place, and triangular solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.linalg import cholesky, cholesky_, cholesky_solve, log_det_from, solve_lower, solve_upper
from tests.support.drawn import normal
from tests.support.systems import close, spd

# ------------------------------------------------------------------------------------------ Cholesky


@pytest.mark.parametrize("block", ["auto", 1, 7, 16, 40, 100])
def test_cholesky_against_lapack(block: int | str) -> None:
    A = spd(40)
    L = A.clone()
    assert cholesky_(L, block=block) is L
    close(L, torch.linalg.cholesky(A))
    assert torch.equal(L, L.tril())


@pytest.mark.parametrize("block", ["auto", 7])
def test_only_the_lower_triangle_is_read(block: int | str) -> None:
    A = spd(20)
    lower = A.tril() + torch.full_like(A, torch.nan).triu(1)
    close(cholesky_(lower, block=block), torch.linalg.cholesky(A))


@pytest.mark.parametrize("block", ["auto", 7])
def test_a_view_inside_a_larger_matrix(block: int | str) -> None:
    A, whole = spd(20), normal(30, 30)
    before = whole.clone()
    view = whole[3:23, 5:25]
    view.copy_(A)
    cholesky_(view, block=block)
    close(whole[3:23, 5:25], torch.linalg.cholesky(A))
    whole[3:23, 5:25] = before[3:23, 5:25]
    assert torch.equal(whole, before)


class Largest(TorchDispatchMode):
    """The most entries that an operation has put into memory of its own."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.entries = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() != self.known:
                self.entries = max(self.entries, t.untyped_storage().nbytes() // 8)
        return out


@pytest.mark.parametrize("block", ["auto", 8])
def test_no_second_matrix(block: int | str) -> None:
    A = spd(96)
    with Largest(A) as seen:
        cholesky_(A, block=block)
    assert 0 < seen.entries <= 96 * 8


def test_the_panels_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a GPU does with a large matrix, on a small one.
    monkeypatch.setattr(cholesky, "BLOCK", 6)
    A, B = spd(40), normal(40, 3)
    L = cholesky_(A.clone(), block=cholesky.BLOCK)
    close(L, torch.linalg.cholesky(A))
    close(cholesky_solve(L, B), torch.linalg.solve(A, B))


def test_float32_and_empty() -> None:
    A = spd(30, condition=10)
    L = cholesky_(A.float(), block=8)
    assert L.dtype == torch.float32
    close(L.double(), torch.linalg.cholesky(A), rtol=1e-5)
    assert cholesky_(torch.zeros(0, 0)).shape == (0, 0)


def test_inside_inference_mode_and_autocast() -> None:
    A = spd(30, condition=10).float()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        L = cholesky_(A * 1, block=8)
        X = cholesky_solve(L, torch.ones(30))
    close(L.double(), torch.linalg.cholesky(A.double()), rtol=1e-5)
    close(X.double(), torch.linalg.solve(A.double(), torch.ones(30).double()), rtol=1e-4)


@pytest.mark.parametrize("block", ["auto", 4])
def test_not_positive_definite_names_the_row(block: int | str) -> None:
    A = spd(12)
    A[9, 9] = -1.0
    text = r"\(12, 12\) is not positive definite in float64: the pivot of row 9 is not positive; the smallest before"
    with pytest.raises(ArithmeticError, match=text + r".*more noise, use float64, or remove duplicate examples"):
        cholesky_(A.clone(), block=block)
    A[0, 0] = -1.0
    with pytest.raises(ArithmeticError, match="row 0 is not positive; it is the first"):
        cholesky_(A.clone(), block=block)


def test_duplicates_without_noise_are_never_jittered() -> None:
    X = normal(6, 20)
    X[4] = X[1]
    with pytest.raises(ArithmeticError, match="row 4 is not positive"):
        cholesky_(X[:, :6].round() @ X[:, :6].round().T, block="auto")


@pytest.mark.parametrize("block", ["auto", 4])
@pytest.mark.parametrize("where", [(0, 0), (7, 2), (11, 11)])
def test_not_finite(block: int | str, where: tuple[int, int]) -> None:
    A = spd(12)
    A[where] = torch.nan
    with pytest.raises(ArithmeticError, match="holds NaN or infinity"):
        cholesky_(A, block=block)


def test_a_library_that_leaves_nan_at_the_pivot() -> None:
    L = torch.linalg.cholesky(spd(6))
    L[4, 4] = torch.nan
    with pytest.raises(ArithmeticError, match="not positive definite in float64: the pivot of row 4 is not positive"):
        cholesky._check_pivots(L, 3, torch.tensor(2), torch.tensor(9.0))
    with pytest.raises(ArithmeticError, match="holds NaN or infinity at or before row 4"):
        cholesky._check_pivots(L, 3, torch.tensor(0), torch.tensor(9.0))


def test_wrong_matrices() -> None:
    for wrong in (torch.ones(3), torch.ones(2, 3), torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2).bfloat16()):
        with pytest.raises(ValueError, match=r"A matrix \(m, m\) of float32 or float64 is needed; got \("):
            cholesky_(wrong)
    for block in (0, "all", 2.0):
        with pytest.raises(ValueError, match="block must be a positive number of columns or 'auto'"):
            cholesky_(torch.eye(2), block=block)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- triangular solves


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("k", [None, 1, 9])
def test_triangular_solves(monkeypatch: pytest.MonkeyPatch, size: int, k: int | None) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", size)
    A = spd(23)
    L = torch.linalg.cholesky(A) + normal(23, 23).triu(1)  # what is above the diagonal does not matter
    lower, B = L.tril(), normal(23, *([] if k is None else [k]), seed=1)
    before = B.clone()
    close(lower @ solve_lower(L, B), B)
    close(lower.T @ solve_upper(L, B), B)
    close(cholesky_solve(L, B), torch.linalg.solve(A, B))
    assert torch.equal(B, before)
    X = solve_lower(L, B, overwrite=True)
    assert X is B and not torch.equal(B, before)
    close(lower @ X, before)


def test_log_det_of_a_factor() -> None:
    A = spd(23)
    close(log_det_from(torch.linalg.cholesky(A)), torch.logdet(A))
    assert log_det_from(torch.eye(3)).dtype == torch.float64


def test_wrong_right_hand_sides() -> None:
    L = torch.eye(3)
    with pytest.raises(ValueError, match=r"right-hand side \(3,\) or \(3, k\) is needed; got \(4,\)"):
        solve_lower(L, torch.ones(4))
    with pytest.raises(TypeError, match=r"matches torch.float32 on cpu is needed; got torch.float64"):
        solve_upper(L, torch.ones(3).double())


@settings(deadline=None, max_examples=25)
@given(m=st.integers(1, 12), block=st.integers(1, 13), k=st.integers(1, 3), seed=st.integers(0, 1000))
def test_cholesky_laws(m: int, block: int, k: int, seed: int) -> None:
    A, B = spd(m, seed=seed), normal(m, k, seed=seed + 1)
    L = cholesky_(A.clone(), block=block)
    close(L @ L.T, A)
    assert (L.diagonal() > 0).all()
    close(A @ cholesky_solve(L, B), B, rtol=1e-8)
    close(cholesky_(4 * A, block=block), 2 * L)
