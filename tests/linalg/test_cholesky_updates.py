"""Cholesky factors without rows, and less outer products, against decompositions of the matrices themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.linalg import remove_rows, subtract_outer_products
from tests.support.drawn import normal
from tests.support.systems import close, spd


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 80), count=st.integers(0, 80), seed=st.integers(0, 5))
def test_rows_are_removed(m: int, count: int, seed: int) -> None:
    A, order = spd(m), torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    kept = order[min(count, m - 1) :].sort().values
    L = torch.linalg.cholesky(A) + torch.full_like(A, torch.nan).triu(1)  # which is not read
    found = remove_rows(L, kept)
    close(found, torch.linalg.cholesky(A[kept][:, kept]))
    assert torch.equal(found, found.tril()) and bool((found.diagonal() > 0).all())


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 80), k=st.integers(0, 40), size=st.floats(0.01, 0.99))
def test_outer_products_are_subtracted(m: int, k: int, size: float) -> None:
    L = torch.linalg.cholesky(spd(m))
    Z = normal(m, k, seed=1)
    Z *= size / max(float(torch.linalg.matrix_norm(Z, 2)), 1e-9) if k else 1
    before, X = L.clone(), L @ Z
    found, left = subtract_outer_products(L, X)
    torch.testing.assert_close(found @ found.T, L @ L.T - X @ X.T, rtol=1e-9, atol=1e-11)
    assert torch.equal(found, found.tril()) and bool((found.diagonal() > 0).all()) and torch.equal(L, before)
    assert left == pytest.approx(1 - size**2 if k else 1.0, rel=1e-6)


def test_a_difference_without_digits_is_refused() -> None:
    L, x = torch.eye(3, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    x[0] = (1 - 1e-6) ** 0.5
    assert subtract_outer_products(L, x)[1] == pytest.approx(1e-6, rel=1e-6)
    for size in (1.0, 1 - 1e-12, 1.5):
        x[0] = size**0.5
        with pytest.raises(ArithmeticError, match=r"leaves .* of a posterior precision, and float64 needs 1e-08"):
            subtract_outer_products(L, x)
