"""Networks in the dtypes that they have: half precision, several dtypes at once, and forwards that name a dtype."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.testing import Case, check_operator, dense_jacobian, zoo
from tests.support.adapters import Network

N, CHUNK = 3, 2
HALF = (torch.bfloat16, torch.float16)

CASES = [
    pytest.param(case, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, case in zoo().items()
    for dtype in HALF
]


def converted(data: object, dtype: torch.dtype) -> object:
    if isinstance(data, dict):
        return {key: converted(value, dtype) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(converted(value, dtype) for value in data)
    return data.to(dtype) if data.is_floating_point() else data


def convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def check_rows(J: Tensor, same: Tensor, exact: Tensor, layout: linnet.network.Layout, eps: float) -> None:
    """Rows beside those of reverse mode in the same dtype and in float64: as good as reverse mode, up to chance.

    Args:
        J: The rows in question.
        same: By reverse mode in the dtype of the network, example by example.
        exact: The same in float64.
        layout: Places of the parameters.
        eps: Rounding of the dtype.
    """
    J, same = J.double(), same.double()
    size = exact.norm()
    error = (same - exact).norm()
    assert (J - exact).norm() <= 2 * error
    assert (J - same).norm() <= 2 * error  # both are this far from the truth
    for name, where in layout.slices.items():
        # One parameter alone can be lucky, and where a gradient is zero by symmetry there is nothing but rounding.
        own = 4 * (same - exact)[:, where].norm() + eps * exact[:, where].norm() + eps**2 * size
        assert (J - exact)[:, where].norm() <= own, name


@pytest.mark.parametrize(("case", "dtype"), CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_half_precision_is_as_exact_as_reverse_mode(case: Case, dtype: torch.dtype) -> None:
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model = case.build().to(dtype)
    if convolves(model):
        pytest.skip("half-precision convolutions crash some CPUs")
    data = converted(case.data(N, 0), dtype)
    same = case.dense(model, data)
    exact = case.dense(copy.deepcopy(model).double(), converted(data, torch.float64))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "linnet's layer rules")
        lin = linnet.linearize(model, output=case.output)
        J = lin.jacobian(data, CHUNK)
        A = J.dense()
        assert A.dtype == J.dtype == lin.dtype == torch.float32
        check_rows(A, same, exact, lin.layout, torch.finfo(dtype).eps)
        V, U = torch.randn(lin.p, 2), torch.randn(len(A), 2)
        for product, reference in ((J @ V, A @ V), (J.T @ U, A.T @ U), (J.gram(), A @ A.T)):
            assert (product - reference).abs().max() <= 1e-5 * reference.abs().max()


MIXES = {
    "half base": (torch.bfloat16, torch.float32, torch.float32),
    "float16 base": (torch.float16, torch.float32, torch.float32),
    "half head": (torch.bfloat16, torch.float32, torch.bfloat16),
    "both halves": (torch.float16, torch.float32, torch.bfloat16),
    "half adapters": (torch.float32, torch.bfloat16, torch.float32),
    "double head": (torch.float32, torch.float32, torch.float64),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("engine", ["auto", "rows", "ghost", "autodiff"])
def test_selected_parameters_of_several_dtypes(mix: str, engine: str) -> None:
    dtypes = MIXES[mix]
    model = Network(6, *dtypes)
    X = torch.randn(7, 6, dtype=dtypes[0])
    before = {name: (t.dtype, t.data_ptr(), t._version) for name, t in model.named_parameters()}
    lin = linnet.linearize(model)
    assert [t.dtype for t in lin.theta.values()] == [*[dtypes[1]] * 4, *[dtypes[2]] * 2]
    assert lin.dtype == (torch.float64 if torch.float64 in dtypes[1:] else torch.float32)
    same, exact = dense_jacobian(model, X), dense_jacobian(copy.deepcopy(model).double(), X.double())
    J = lin.jacobian(X, CHUNK, engine=engine)
    A = J.dense()
    check_rows(A, same, exact, lin.layout, max(torch.finfo(dtype).eps for dtype in dtypes))
    check_operator(J, A, blocks=3, rtol=1e-5)
    assert {name: (t.dtype, t.data_ptr(), t._version) for name, t in model.named_parameters()} == before


def test_products_of_a_half_precision_base_are_products_of_one_matrix() -> None:
    """J^T u by reverse mode would sum over examples and round u to half precision."""
    model = Network(6, torch.bfloat16, torch.float32, torch.bfloat16)
    J = linnet.linearize(model).jacobian(torch.randn(40, 6, dtype=torch.bfloat16))
    u, v = torch.randn(J.shape[0]), torch.randn(J.shape[1])
    left, right = u @ (J @ v), (J.T @ u) @ v
    assert abs(left - right) <= 1e-5 * (u.norm() * (J @ v).norm())


def test_a_float32_head_on_a_half_precision_base_is_differentiated_in_float32() -> None:
    """Nothing that depends on the head is rounded to half precision, so both modes of autodiff serve."""
    model = Network(6, torch.bfloat16, torch.float32, torch.float32)
    X = torch.randn(7, 6, dtype=torch.bfloat16)
    lin = linnet.linearize(model, "head.*")
    A = lin.jacobian(X).dense()
    assert not lin.rules.differentiates_in_half
    features = torch.cat([model.body(X).float(), torch.ones(7, 1)], 1).detach()
    blocks = torch.stack([torch.block_diag(*row.expand(3, -1)) for row in features[:, :-1]])
    assert torch.allclose(A[:, :18], blocks.flatten(0, 1), rtol=1e-6)
    check_operator(lin.jacobian(X), A, blocks=3, rtol=1e-6)
