"""What the planner counts: multiply-adds of products and Gram matrices, and examples per chunk."""

from __future__ import annotations

import pytest
import torch

from linnet.jacobian import DenseBlock, autodiff_wins, fused_cost, gram_cost
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.plan import choose, chunk_size

N, C, T, D_IN, D_OUT = 4, 3, 5, 7, 6


def outer(T: int = T) -> OuterProductBlock:
    """A layer whose weight (6, 7) is used T times by each of 4 examples with 3 outputs."""
    return OuterProductBlock(torch.ones(N, 1, T, D_IN), torch.ones(N, C, 1, T, D_OUT), weight=(0, D_IN * D_OUT))


@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("T", [1, 5])
def test_products_count_what_their_engine_does(k, T):
    block, P = outer(T), D_IN * D_OUT
    by_engine = {"bilinear": 2 * T * k * D_OUT * (D_IN + C), "rows": C * (T * P + 2 * P * k)}
    for engine, cost in by_engine.items():
        assert fused_cost(block, k=k, engine=engine) == cost
    assert fused_cost(block, k=k) == by_engine[choose(block, "fused", k=k)]


def test_gram_matrices_count_pairs():
    assert choose(outer(1), "gram", k=1) == "ghost" and gram_cost(outer(1)) == D_IN + C**2 * D_OUT
    assert choose(outer(9), "gram", k=1) == "rows" and gram_cost(outer(9)) == C**2 * D_IN * D_OUT
    assert gram_cost(DenseBlock([(0, 8)], [torch.ones(N, C, 8)])) == C**2 * 8


def test_autodiff_wins_with_few_columns():
    assert autodiff_wins("matmul", k=1, c=9) and not autodiff_wins("matmul", k=9, c=2)
    assert autodiff_wins("rmatmul", k=1, c=1) and not autodiff_wins("rmatmul", k=4, c=1)
    assert autodiff_wins("fused", k=1, c=9) and not autodiff_wins("fused", k=1, c=2)
    assert not autodiff_wins("gram", k=1, c=9)
    # At the bound: 1 + c + min(c, k) passes with captures.
    assert not autodiff_wins("matmul", k=5, c=6) and autodiff_wins("matmul", k=5, c=7)
    assert autodiff_wins("rmatmul", k=6, c=6) and not autodiff_wins("rmatmul", k=7, c=6)
    assert not autodiff_wins("fused", k=2, c=7) and autodiff_wins("fused", k=2, c=8)


def test_chunks_are_about_alike():
    assert [chunk_size(10, 1, limit) for limit in (0, 3, 4, 9, 10, 99)] == [1, 3, 4, 5, 10, 10]
