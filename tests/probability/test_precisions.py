"""Precisions and their sums against dense matrices; Kronecker coordinates of a sum; which posteriors have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian import Rotation
from linnet.probability import (
    DensePrecision,
    DiagonalPrecision,
    LowRankPrecision,
    PointPosterior,
    Precision,
    SamplePosterior,
    add_precisions,
    precision_from,
    precision_of,
)
from tests.support.drawn import double, normal

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")


@cache
def net() -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)), 0)


P = sum(t.numel() for t in net().parameters())


@cache
def factors(seed: int) -> tuple[Rotation, Tensor]:
    """Kronecker factors of some data: their coordinates, and the diagonal there."""
    J = linnet.linearize(net()).jacobian(normal(20, 3, seed=seed))
    return J.kronecker(None).decomposed()


def rotated(seed: int, more: float = 0.1) -> DiagonalPrecision:
    rotation, values = factors(seed)
    return DiagonalPrecision(values + more, rotation)


def diagonal(seed: int) -> DiagonalPrecision:
    return DiagonalPrecision(normal(P, seed=seed).square() + 0.1)


def dense(seed: int) -> DensePrecision:
    A = normal(P, P + 3, seed=seed)
    return DensePrecision(A @ A.T)


def low(seed: int) -> LowRankPrecision:
    values = normal(P, seed=seed).square() + 1.0
    V = 0.1 * normal(P, 5, seed=seed + 1)
    return LowRankPrecision(values, V, torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]).double())


FORMS: dict[str, Callable[[int], Precision]] = {"rotated": rotated, "diagonal": diagonal, "dense": dense, "low": low}


def close(a: Tensor | float, b: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_every_answer_is_that_of_the_dense_matrix(form: str) -> None:
    one, v = FORMS[form](3), normal(P, seed=9)
    M = one.dense()
    close(M, M.T)
    close(one.multiply(v), M @ v)
    close(one.solve(v), torch.linalg.solve(M, v))
    close(one.log_det(), float(torch.logdet(M)))
    close(one.variances(), torch.linalg.inv(M).diagonal())
    moving = v.clone().requires_grad_()
    value = one.quadratic(moving)
    close(value.detach(), v @ M @ v)
    close(torch.autograd.grad(value, moving)[0], 2 * M @ v)
    layout = linnet.linearize(net()).layout
    close(precision_from(type(one).__name__, one.tensors(), layout=layout).dense(), M)
    posterior = one.posterior(torch.zeros(P).double())
    close(precision_of(posterior).dense(), M)
    J = linnet.linearize(net()).jacobian(normal(4, 3, seed=11))
    close(posterior.covariance(J), J.dense() @ torch.linalg.inv(M) @ J.dense().T)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_sums_are_exact_where_the_forms_allow(first: str, second: str) -> None:
    a, b = FORMS[first](3), FORMS[second](5)
    if {first, second} == {"rotated", "low"}:
        with pytest.raises(ValueError, match="A low rank is not added to Kronecker factors"):
            add_precisions([(2.0, a), (0.5, b)])
        return
    found, exact = add_precisions([(2.0, a), (0.5, b)]).dense(), 2 * a.dense() + 0.5 * b.dense()
    if "rotated" in (first, second) and "dense" not in (first, second):
        close(found.trace(), exact.trace())
    else:
        close(found, exact)
    back = add_precisions([(2.0, a), (0.5, b), (-0.5, b)])
    if "rotated" not in (first, second):
        close(back.dense(), 2 * a.dense())


def test_a_sum_of_kronecker_factors_keeps_the_diagonal_along_the_eigenvectors_of_the_partial_traces() -> None:
    a, b = rotated(3), rotated(5)
    found = add_precisions([(1.0, a), (1.0, b)])
    exact = a.dense() + b.dense()
    assert isinstance(found, DiagonalPrecision) and found.rotation is not None
    layout = linnet.linearize(net()).layout
    # The last layer has no bias: its partial traces are those of the dense block.
    s = layout.slices["3.weight"]
    block = exact[s, s].view(2, 4, 2, 4)
    Qg = torch.linalg.eigh(torch.einsum("gxhx->gh", block))[1]
    Qx = torch.linalg.eigh(torch.einsum("gxgy->xy", block))[1]
    Q = torch.kron(Qg, Qx)
    close(found.values[s], (Q.T @ exact[s, s] @ Q).diagonal())
    close(found.dense()[s, s], Q @ torch.diag((Q.T @ exact[s, s] @ Q).diagonal()) @ Q.T)
    for name in ("2.weight", "2.bias"):  # blocks without two sides
        s = layout.slices[name]
        close(found.dense()[s, s], exact[s, s])
    # A bias turns with its weight, as the columns of a layer do.
    turns = found.rotation.turns
    weight, bias = (turns[s.start, s.stop] for s in (layout.slices["0.weight"], layout.slices["0.bias"]))
    assert torch.equal(weight.Qg.V, bias.Qg.V)
    Q = found.rotation.back(torch.eye(P).double())
    close(found.values, (Q.T @ exact @ Q).diagonal())
    J = linnet.linearize(net()).jacobian(normal(4, 3, seed=11))
    close(J.rotated(found.rotation).column_norms(), (J.dense() @ Q).square().sum(0))


def test_sums_in_equal_coordinates_are_exact() -> None:
    a, rotation = rotated(3), factors(3)[0]
    copy = Rotation.from_tensors(rotation.tensors(), rotation.layout)
    for other in (rotation, copy):
        b = DiagonalPrecision(0.5 * a.values + 0.2, other)
        close(add_precisions([(1.0, a), (1.0, b)]).dense(), a.dense() + b.dense())


@pytest.mark.parametrize("form", ["rotated", "diagonal", "dense", "low"])
def test_relative_eigenvalues(form: str) -> None:
    one = FORMS[form](3)
    if isinstance(one, LowRankPrecision):
        V = normal(P, 4, seed=8)
        G: Precision = LowRankPrecision(torch.zeros(P).double(), V, torch.ones(4).double())
    elif isinstance(one, DiagonalPrecision):
        G = DiagonalPrecision(factors(3)[1], one.rotation)
    else:
        G = dense(8)
    values = one.relative_eigenvalues(G)
    expected = torch.linalg.eigvals(torch.linalg.solve(one.dense(), G.dense())).real
    close(values.log1p().sum(), expected.log1p().sum())


def test_what_is_not_positive_definite_is_refused() -> None:
    for one in (diagonal(3), dense(3), low(3)):
        with pytest.raises(ArithmeticError, match="not positive definite: its smallest eigenvalue is -"):
            add_precisions([(1.0, one), (-3.0, one)]).check_definite()


def test_posteriors_without_a_precision_are_refused() -> None:
    zeros = torch.zeros(P).double()
    for posterior in (PointPosterior(zeros), SamplePosterior(zeros, normal(P, 3))):
        with pytest.raises(NotImplementedError, match=f"{type(posterior).__name__} does not know its precision"):
            precision_of(posterior)
    pinned = linnet.probability.DiagonalPosterior(zeros, zeros)
    with pytest.raises(ValueError, match=f"{P} parameters have a prior variance of zero"):
        precision_of(pinned)


def test_factors_that_are_known_in_leading_directions_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from linnet.jacobian import kronecker

    monkeypatch.setattr(kronecker, "LEADING", 2)
    monkeypatch.setitem(kronecker.CUBES, "cpu", 1)
    model = double(nn.Linear(60, 2), 0)
    with pytest.warns(UserWarning, match="leading directions"):
        rotation, values = linnet.linearize(model).jacobian(normal(80, 60)).kronecker(None).decomposed()
    one = DiagonalPrecision(values + 1, rotation)
    with pytest.raises(NotImplementedError, match="too long to be decomposed whole"):
        add_precisions([(1.0, one), (1.0, DiagonalPrecision(torch.ones(len(values)).double()))])
