"""A linearization in another dtype: the same model, the same data, the module untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.testing import check_operator, zoo
from linnet.testing.case import Net
from tests.support.drawn import double, normal

N, D, C = 5, 4, 3
NAMES = ("mlp", "weight_norm", "dict_inputs", "tied_weights", "batch_norm2d", "attention", "embedding_padding", "lstm")


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def converted(data: object, dtype: torch.dtype) -> object:
    if isinstance(data, dict):
        return {key: converted(value, dtype) for key, value in data.items()}
    return data.to(dtype) if data.is_floating_point() else data


def state(model: nn.Module) -> list[tuple]:
    return [(name, t.dtype, t.data_ptr(), t._version, t.requires_grad) for name, t in model.state_dict().items()]


@pytest.fixture
def model() -> nn.Module:
    return double(nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C))).float()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_numbers_as_a_model_of_that_dtype(name):
    """A float32 model and float32 data in float64, against the dense Jacobian of the model converted."""
    case = zoo()[name]
    small = case.build().float()
    large = copy.deepcopy(small).double()
    data = converted(case.data(N, 0), torch.float32)
    exact = converted(data, torch.float64)
    A = case.dense(large, exact)
    before = state(small)
    lin = linnet.linearize(small, output=case.output)
    there = lin.to(torch.float64)
    assert there.layout == lin.layout
    assert there.dtype == there.model_dtype == torch.float64
    assert all(torch.equal(there.theta[name], t.double()) for name, t in lin.theta.items())
    close(there(data), case.outputs(large, exact).detach())
    check_operator(there.jacobian(data, 2), A, blocks=len(A) // N)
    assert state(small) == before
    assert lin.dtype == torch.float32
    assert lin(data).dtype == torch.float32


def test_down_to_float32(model):
    model = model.double()
    x = normal(N, D)
    lin = linnet.linearize(model).to(torch.float32)
    J = lin.jacobian(x)
    assert J.dtype == lin(x).dtype == torch.float32
    close(J.gram(), linnet.linearize(model).jacobian(x).gram().float(), rtol=1e-4)


def test_its_own_dtype_casts_inputs_and_shares_the_weights(model):
    lin = linnet.linearize(model)
    same = lin.to(torch.float32)
    assert same.theta["0.weight"].data_ptr() == model[0].weight.data_ptr()
    x = normal(N, D).float()
    assert torch.equal(same(x.double()), lin(x))
    with pytest.raises(RuntimeError) as caught:
        lin(x.double())
    assert "Convert the data" in caught.value.__notes__[0]


def test_there_and_back(model):
    lin = linnet.linearize(model)
    back = lin.to(torch.float64).to(torch.float32)
    assert all(torch.equal(back.theta[name], t) for name, t in lin.theta.items())


def test_half_precision_models_become_whole():
    model = double(nn.Linear(D, C)).bfloat16()
    lin = linnet.linearize(model)
    x = normal(N, D)
    assert lin.model_dtype == torch.bfloat16
    assert lin.to(torch.float64).model_dtype == torch.float64
    close(lin.to(torch.float64)(x), x @ model.weight.detach().double().T + model.bias.detach().double())


def test_selection_and_output_stay(model):
    model[0].weight.requires_grad_(False)

    def output(out: Tensor) -> Tensor:
        return out[:, :2]

    lin = linnet.linearize(model, lambda name, t: name.startswith("0.") and t.dtype == torch.float32, output)
    there = lin.to(torch.float64)
    assert list(there.theta) == ["0.weight", "0.bias"]
    assert there(normal(N, D).float()).shape == (N, 2)
    assert not there.module[0].weight.requires_grad
    assert not there.module[3].weight.requires_grad  # not selected: no graph is made for it
    assert model[3].weight.requires_grad


def test_inputs_of_every_kind():
    """Floating tensors are cast wherever they are; integers, masks, numbers and the targets are not."""
    seen = []

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.scale = nn.Embedding(5, D), nn.Linear(D, 1)

        def forward(self, ids, parts, keep, shift=0.0):
            seen.append([ids.dtype, parts["x"].dtype, keep.dtype, shift.dtype if isinstance(shift, Tensor) else shift])
            return self.scale(torch.where(keep[:, None], self.table(ids) + parts["x"], 0)) + shift

    lin = linnet.linearize(Kinds()).to(torch.float64)
    ids, keep = torch.arange(N), torch.arange(N) > 1
    data = {"ids": ids, "parts": {"x": torch.ones(N, D)}, "keep": keep, "shift": torch.tensor(1.0), "y": torch.ones(N)}
    J = lin.jacobian(data)
    assert all(kinds == [torch.int64, torch.float64, torch.bool, torch.float64] for kinds in seen)
    rest = []
    J.fused(lambda JV, batch: rest.append(batch.rest["y"].dtype) or JV, torch.zeros(lin.p, dtype=torch.float64))
    assert rest == [torch.float32]


def test_buffers_are_cast_and_complex_ones_stay_complex():
    model = Net(lambda m, x: m.fc(x + torch.view_as_real(m.phase).sum() + m.shift.to(x.dtype)), fc=nn.Linear(D, C))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("shift", torch.ones(1, dtype=torch.int64))
    there = linnet.linearize(model).to(torch.float64)
    assert there.module.phase.dtype == torch.complex128
    assert there.module.shift.dtype == torch.int64
    assert model.phase.dtype == torch.complex64
    assert there(torch.ones(N, D)).dtype == torch.float64


def test_changes_of_the_module_are_noticed(model):
    lin = linnet.linearize(model)
    there = lin.to(torch.float64)
    J = there.jacobian(torch.ones(N, D))
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"'3\.weight' has changed"):
        J.gram()
    with pytest.raises(RuntimeError, match=r"'3\.weight' has changed"):
        lin.to(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64, "float64"])
def test_other_dtypes_are_refused_by_name(model, dtype):
    with pytest.raises(ValueError, match=rf"torch\.float32 or torch\.float64; got {dtype}"):
        linnet.linearize(model).to(dtype)
