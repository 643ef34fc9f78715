"""Blocks of parameters that several calls use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian.blocks.composite import SumBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.testing import check_operator, dense_jacobian


class Tied(nn.Module):
    """A language model whose last layer is its table of tokens; padded tokens do not count."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=0)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.table(ids) * mask[..., None]
        h = torch.tanh(self.mix(h.cumsum(1)))
        return self.head(h)


def sentences(n: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, length + 1, (n, 1), generator=random)
    mask = (torch.arange(length) < lengths).long()
    return {"ids": torch.randint(1, vocabulary, (n, length), generator=random) * mask, "mask": mask}


ANSWERS = torch.tensor([3, 17, 4])


def answers(logits: Tensor) -> Tensor:
    return logits[:, -1, ANSWERS]


def likelihood(logits: Tensor) -> Tensor:
    return logits.log_softmax(2)[:, -1, :2]


@pytest.mark.parametrize(("output", "kind"), [(answers, EmbeddingBlock), (likelihood, SumBlock)])
def test_a_table_that_is_also_the_last_layer(output, kind) -> None:
    """Few outputs of the last layer make few rows of the table; all outputs stay an outer product."""
    torch.manual_seed(0)
    model, X = Tied(20, 5).double(), sentences(7, 6, 20)
    A = dense_jacobian(model, X, output=output)
    for engine in ("auto", "rows", "bilinear", "ghost"):
        J = linnet.linearize(model, output=output).jacobian(X, 3, engine=engine)
        check_operator(J, A, blocks=J.c)
    blocks = {block.ranges[0]: block for block in J.passes.chunks.first.blocks}
    assert isinstance(blocks[0, 100], kind)
    grams = J.layer_grams()
    torch.testing.assert_close(grams["table"], A[:, :100] @ A[:, :100].T, rtol=1e-9, atol=1e-9)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.table.weight.add_(0.1)
    other = linnet.linearize(moved, output=output).jacobian(X)
    torch.testing.assert_close(J.gram(other), A @ dense_jacobian(moved, X, output=output).T, rtol=1e-9, atol=1e-9)
    kept = J.cached()
    check_operator(kept, A, blocks=J.c)
    index = torch.tensor([6, 0, 4])
    torch.testing.assert_close(
        kept.subset(index).gram(),
        A.view(7, -1, J.shape[1])[index].flatten(0, 1).matmul(A.view(7, -1, J.shape[1])[index].flatten(0, 1).T),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("output", [answers, likelihood])
@pytest.mark.parametrize("engine", ["auto", "rows", "bilinear", "ghost"])
def test_a_table_in_half_precision(engine: str, output) -> None:
    model, X = Tied(20, 5).bfloat16(), sentences(7, 6, 20)
    J = linnet.linearize(model, output=output).jacobian(X, 3, engine=engine)
    A = J.dense()
    check_operator(J, A, blocks=J.c, rtol=1e-5)
    check_operator(J.cached(), A, blocks=J.c, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_fifty_thousand_rows_is_never_a_dense_block(dtype: torch.dtype) -> None:
    model, X = Tied(50_000, 8).to(dtype), sentences(6, 5, 50_000)
    lin = linnet.linearize(model, output=answers)
    J = lin.jacobian(X)
    held = sum(block.bytes for block in J.passes.chunks.first.blocks)
    assert 1000 * held < 3 * 3 * lin.p * 4  # rows of three examples with three outputs
    assert {line.layer: line.gram for line in J.plan.lines}["table"] == "ghost"
    v, u = torch.randn(lin.p), torch.randn(J.shape[0])
    left, right = u @ (J @ v), (J.T @ u) @ v
    assert abs(left - right) <= 1e-5 * u.norm() * (J @ v).norm()
    product = J.normal(v[:, None])[:, 0]
    torch.testing.assert_close(J.gram() @ u, J @ (J.T @ u), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product, J.T @ (J @ v), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(J.column_norms().sum(), J.gram_diag().sum(), rtol=1e-4, atol=0)
