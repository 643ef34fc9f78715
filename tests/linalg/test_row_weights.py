"""Weights on rows, their roots, and products with them."""

from __future__ import annotations

import pytest
import torch

from linnet.linalg import ClassBlocks, as_weight, inner_matrix, weigh, weight_from_root
from tests.support.drawn import normal

N, C = 4, 3


def test_weigh_without_a_weight_is_the_identity() -> None:
    U = normal(4, 2)
    assert weigh(U, None, slice(0, 4)) is U


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("columns", [(), (0,), (1,), (5,)])
@pytest.mark.parametrize("blocks", [False, True])
def test_weigh_is_the_product(blocks: bool, columns: tuple[int, ...], transpose: bool) -> None:
    """Also with a vector, and where there is no column."""
    U, W = normal(N * C, *columns), normal(N, C, C, seed=1) if blocks else normal(N * C, seed=2)
    whole = torch.block_diag(*W) if blocks else torch.diag(W)
    whole = whole.T if transpose else whole
    torch.testing.assert_close(weigh(U, W, transpose=transpose), whole @ U)
    for rows in (slice(C, 3 * C), torch.arange(N * C).view(N, C)[[3, 0]].flatten()):
        torch.testing.assert_close(weigh(U[rows], W, rows, transpose=transpose), whole[rows][:, rows] @ U[rows])


def test_a_chunk_never_cuts_a_block() -> None:
    with pytest.raises(ValueError, match=r"blocks of 3 rows, and a chunk of rows 1 to 3 cuts through one"):
        weigh(normal(2, 1), normal(N, C, C), slice(1, 3))


def test_weights_from_roots() -> None:
    d, L = normal(N, C), normal(N, C, C)
    torch.testing.assert_close(weight_from_root(d), d.flatten().square())
    assert torch.equal(weight_from_root(d), weight_from_root(d.flatten())) and torch.equal(as_weight(d), d.flatten())
    torch.testing.assert_close(torch.block_diag(*weight_from_root(L)), torch.block_diag(*L) @ torch.block_diag(*L).T)
    assert as_weight(L) is L


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_classes_in_float64(weighted: bool) -> None:
    root = ClassBlocks(normal(N, C).softmax(1).float(), w=normal(N, seed=1).float() if weighted else None)
    found = root.double()
    assert found.dtype == torch.float64 and found.form == "root"
    torch.testing.assert_close(found.dense(), root.dense().double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["diagonal", "blocks", "classes"])
def test_the_inner_matrix(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("linnet.linalg.row_weights.TEMPORARY", 2 * C * N * C)  # two examples at a time
    A = normal(N * C, 5)
    if kind == "classes":
        root = ClassBlocks(normal(N, C, seed=3).softmax(1), w=normal(N, seed=4).abs())
        L = torch.block_diag(*root.dense())
    else:
        root = normal(N * C, seed=2) if kind == "diagonal" else normal(N, C, C, seed=1)
        L = torch.diag(root) if kind == "diagonal" else torch.block_diag(*root)
    wanted = torch.eye(N * C) + 0.3 * L.T @ A @ A.T @ L
    torch.testing.assert_close(inner_matrix(A @ A.T, root, scale=0.3), wanted, rtol=1e-9, atol=1e-12)
