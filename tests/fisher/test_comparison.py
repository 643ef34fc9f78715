"""Similarity of networks against the dense formulas, and its laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import linnet
from linnet.fisher import similarity
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal

N, D, C = 6, 3, 2


def mlp(seed: int = 0, *, width: int = 5, c: int = C) -> nn.Module:
    return double(nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, c)), seed)


def dense_function(A: Tensor, B: Tensor) -> float:
    K, L = A @ A.T, B @ B.T
    return float(torch.trace(K @ L) / (K.norm() * L.norm()))


def dense_parameters(A: Tensor, B: Tensor) -> float:
    """Equation of Maddox et al. (2021), section 4, for matrices with parameters as rows."""
    A, B = A.T, B.T
    return float(torch.trace(A.T @ B @ B.T @ A) / ((A @ A.T).norm() * (B @ B.T).norm()))


both = pytest.mark.parametrize(
    ("space", "dense"), [("function", dense_function), ("parameters", dense_parameters)], ids=["function", "parameters"]
)


@both
def test_dense(space, dense):
    a, b, x = mlp(0), mlp(1), normal(N, D, seed=2)
    reference = dense(dense_jacobian(a, x), dense_jacobian(b, x))
    assert 0.01 < reference < 0.99
    found = similarity(a, b, x, space=space)
    assert isinstance(found, float)
    assert found == pytest.approx(reference, rel=1e-9)
    assert similarity(linnet.linearize(a), b, x, space=space) == pytest.approx(reference, rel=1e-9)


def test_function_space_compares_any_two_networks():
    wide = double(nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, C)), 3)
    x = normal(N, D, seed=2)
    reference = dense_function(dense_jacobian(mlp(), x), dense_jacobian(wide, x))
    assert similarity(mlp(), wide, x) == pytest.approx(reference, rel=1e-9)


def test_selected_parameters_and_outputs():
    a, b, x = mlp(0), mlp(1), normal(N, D, seed=2)
    index = torch.arange(N) * C
    J, K = (dense_jacobian(m, x, names=["0.weight", "0.bias"])[index] for m in (a, b))
    for space, dense in (("function", dense_function), ("parameters", dense_parameters)):
        found = similarity(a, b, x, space=space, params="0.*", output=lambda out: out[:, 0])
        assert found == pytest.approx(dense(J, K), rel=1e-9)


@both
@settings(max_examples=6, deadline=None)
@given(seeds=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_laws(space, dense, seeds):
    """From 0 to 1, symmetric, and 1 for a network with itself in function space."""
    a, b, x = mlp(seeds[0]), mlp(seeds[1]), normal(N, D, seed=4)
    found = similarity(a, b, x, space=space)
    assert 0 <= found <= 1
    assert found == pytest.approx(similarity(b, a, x, space=space), rel=1e-9)
    assert similarity(a, a, x, space=space) == pytest.approx(1, rel=1e-12)
    assert similarity(a, a, x, space=space) <= 1


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 50))
def test_rotated_parameters(seed):
    """W2 W1 x = (W2 Q^T)(Q W1) x: the same function, an orthogonal change of the parameters."""
    first, second = normal(4, D, seed=seed), normal(C, 4, seed=seed + 1)
    Q = torch.linalg.qr(normal(4, 4, seed=seed + 2))[0]

    def network(one: Tensor, two: Tensor) -> nn.Module:
        model = nn.Sequential(nn.Linear(D, 4, bias=False), nn.Linear(4, C, bias=False)).double()
        model[0].weight.data, model[1].weight.data = one, two
        return model

    a, b, x = network(first, second), network(Q @ first, second @ Q.T), normal(N, D, seed=4)
    assert similarity(a, b, x) == pytest.approx(1, rel=1e-9)
    other = mlp(seed)
    assert similarity(a, other, x) == pytest.approx(similarity(b, other, x), rel=1e-9)
    assert similarity(a, b, x, space="parameters") < 0.999


def test_orthogonal_networks():
    """Two networks that use different parameters: alike as functions, orthogonal in parameters."""

    class Half(nn.Module):
        def __init__(self, used: int) -> None:
            super().__init__()
            self.w, self.used = nn.Parameter(torch.ones(2, D, dtype=torch.float64)), used

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w[self.used]).unsqueeze(1)

    x = normal(N, D, seed=4)
    assert similarity(Half(0), Half(1), x) == pytest.approx(1, rel=1e-12)
    assert similarity(Half(0), Half(1), x, space="parameters") == 0


@both
def test_float32_is_added_up_in_float64(space, dense):
    a, b, x = mlp(0), mlp(1), normal(N, D, seed=2)
    reference = dense(dense_jacobian(a, x), dense_jacobian(b, x))
    found = similarity(a.float(), b.float(), x.float(), space=space)
    assert found == pytest.approx(reference, rel=1e-5)


def test_many_rows():
    a, b, x = mlp(0, c=1), mlp(1, c=1), normal(1300, D, seed=2)  # above the rows of one partial sum
    reference = dense_function(dense_jacobian(a, x), dense_jacobian(b, x))
    assert similarity(a, b, x) == pytest.approx(reference, rel=1e-9)


def test_dtypes_may_differ_in_function_space():
    a, x = mlp(0).float(), normal(N, D, seed=2).float()
    single, twice = linnet.linearize(a), linnet.linearize(a).to(torch.float64)
    assert similarity(single, twice, x) == pytest.approx(1, rel=1e-5)
    with pytest.raises(ValueError, match=r"both networks in one dtype; got torch\.float32 and torch\.float64"):
        similarity(single, twice, x, space="parameters")


def test_memory():
    a, b, x = mlp(0), mlp(1), normal(N, D, seed=2)
    one = (N * C) ** 2 * 8
    for space, grams in (("function", 2), ("parameters", 1)):
        similarity(a, b, x, space=space, memory=grams * one)
        with pytest.raises(MemoryError, match=r"Gram matrices of \(12 x 12\) entries, .* GiB.*Pass memory="):
            similarity(a, b, x, space=space, memory=grams * one - 1)


def test_errors():
    a, b, x = mlp(0), mlp(1), normal(N, D, seed=2)
    with pytest.raises(ValueError, match=r"space must be 'function' or 'parameters'; got 'weights'"):
        similarity(a, b, x, space="weights")
    with pytest.raises(ValueError, match=r"a has 6 examples x 2 outputs and b 6 x 3\. Choose outputs with output="):
        similarity(a, mlp(c=3), x)
    with pytest.raises(ValueError, match=r"parameter by parameter\. .*'0\.weight' is \(5, 3\).*\(4, 3\).*space='func"):
        similarity(a, mlp(width=4), x, space="parameters")
    with pytest.raises(ValueError, match=r"a linearization was given\. Pass both networks"):
        similarity(linnet.linearize(a), b, x, params="0.*")
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module; got a Tensor"):
        similarity(a, x, x)
    flat = mlp(2)
    with torch.no_grad():
        flat[2].weight.zero_()
    with pytest.raises(ValueError, match=r"The Jacobian of b is zero on these data"):
        similarity(a, flat, x, params="0.*")


def test_data_take_the_dtype_of_the_networks():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    x = torch.randn(10, 3)
    for space in ("function", "parameters"):
        expected = similarity(a, b, x, space=space)
        for data in (x.double(), x.double().numpy()):
            assert similarity(a, b, data, space=space) == pytest.approx(expected, rel=1e-6)
