"""Dense Jacobians and J^T W J from the rows of chunks, against products with the identity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from linnet import linearize
from linnet.linalg import LinearOperator, Matrix, add_symmetric_, row_weights
from tests.support.drawn import double, normal


class Tied(nn.Module):
    """One weight used twice, an embedding, and a parameter that no layer rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.words = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        words = self.words((x.abs() * 2).long().clamp(max=4)).mean(1)
        return (self.gain * self.first(torch.tanh(self.first(x))) + words)[:, :3]


NETWORKS = {
    "dense": (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    "convolution": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), (2, 4, 4)),
    "tied": (Tied(), (4,)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("cached", [False, True])
def test_from_rows_as_from_products(name: str, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_weights, "PANEL", 7)
    net, shape = NETWORKS[name]
    J = linearize(double(net)).jacobian(normal(9, *shape), batch_size=4)
    J = J.cached() if cached else J
    rows, p = J.shape
    dense = J @ torch.eye(p, dtype=torch.float64)
    torch.testing.assert_close(J.dense(), dense, rtol=1e-10, atol=1e-12)
    d = 1 + normal(p, seed=1).square()
    torch.testing.assert_close(J.scaled(d).dense(), dense * d, rtol=1e-10, atol=1e-12)
    some = torch.tensor([3, 1])
    torch.testing.assert_close(J.columns(some).centered(d[:2]).dense(), dense[:, some] - d[:2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(J.centered(d).dense(), dense - d, rtol=1e-10, atol=1e-12)
    half = normal(9, J.c, J.c, seed=2)
    for weight in (None, normal(rows, seed=3).square(), half @ half.mT):
        expected = J.normal(torch.eye(p, dtype=torch.float64), weight)
        found = J.normal_matrix(weight)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(found, found.T)
        torch.testing.assert_close(Matrix(dense).normal_matrix(weight), expected, rtol=1e-10, atol=1e-10)


def test_errors() -> None:
    J: LinearOperator = linearize(double(nn.Linear(4, 3))).jacobian(normal(9, 4))
    with pytest.raises(ValueError, match=r"has shape \(27, 15\), 405 entries, and dense\(\) stops at 404"):
        J.dense(limit=404)
    with pytest.raises(ValueError, match=r"has 27 rows, so weight needs shape \(27,\)"):
        J.normal_matrix(normal(26))


@pytest.mark.parametrize("m", [1, 6, 20, 33])
def test_symmetric_products_in_panels(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_weights, "PANEL", 5)
    A, out = normal(11, m), normal(m, m, seed=1)
    w = normal(11, seed=2)[:, None]
    expected = (out + 0.3 * A.T @ (w * A)).tril()
    torch.testing.assert_close(add_symmetric_(out, A, w * A, alpha=0.3).tril(), expected, rtol=1e-12, atol=1e-12)
