"""Every architecture of the zoo, by every engine, against its dense Jacobian."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.network import Layout
from linnet.testing import Case, check_operator, zoo

ENGINES = ("auto", "rows", "bilinear", "ghost", "autodiff")
N, MORE, CHUNK = 3, 5, 2  # the last chunk has one example; with MORE another chunk is as full as the first

FALLBACKS = {
    "read_past_module": r"gradients of head\.weight \(",
    "routing": r"gradients of .*experts\.\d",
    "subclassed_linear": r"gradients of 0\.weight \(",
}
"""Cases in which a rule sees a parameter but cannot serve it, and what the warning names."""

CASES = [pytest.param(case, id=name) for name, case in zoo().items()]


@cache
def reference(case: Case, n: int = N) -> tuple[nn.Module, object, Tensor]:
    """The model, its data and the dense Jacobian, once for all tests."""
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model, data = case.build(), case.data(n, 0)
    return model, data, case.dense(model, data)


@contextmanager
def fallback(case: Case) -> Iterator[None]:
    """The warning of the cases that fall back, and of no other."""
    if case.name not in FALLBACKS:
        yield
        return
    with pytest.warns(UserWarning, match=FALLBACKS[case.name]):
        yield


def jacobian(case: Case, model: nn.Module, data: object, **options) -> linnet.jacobian.jacobian.Jacobian:
    return linnet.linearize(model, output=case.output).jacobian(data, CHUNK, **options)


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def first(data: object, n: int) -> object:
    if isinstance(data, dict):
        return {key: value[:n] for key, value in data.items()}
    return tuple(x[:n] for x in data) if isinstance(data, tuple) else data[:n]


def single(data: object) -> object:
    """The data with its floating tensors in float32."""
    if isinstance(data, dict):
        return {key: single(value) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(single(value) for value in data)
    return data.float() if data.is_floating_point() else data


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_products(case, engine):
    n = MORE if engine == "auto" else N
    model, data, A = reference(case, n)
    with fallback(case):
        check_operator(jacobian(case, model, data, engine=engine), A, blocks=len(A) // n)


@pytest.mark.parametrize("case", CASES)
def test_layer_grams(case):
    model, data, A = reference(case)
    with fallback(case):
        J = jacobian(case, model, data, engine="ghost")
        grams = J.layer_grams()
    layout = J.lin.layout
    assert list(grams) == list(layout.layers)
    size = (A @ A.T).abs().max()
    for layer, names in layout.layers.items():
        block = torch.cat([A[:, layout.slices[name]] for name in names], 1)
        assert (grams[layer] - block @ block.T).abs().max() <= 1e-9 * size, layer
    close(sum(grams.values()), A @ A.T)


@pytest.mark.parametrize("case", CASES)
def test_cross_grams_and_scales(case):
    model, data, A = reference(case)
    elsewhere = case.data(3, 1)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for i, parameter in enumerate(moved.parameters()):
            parameter.add_(0.05 * torch.cos(torch.arange(parameter.numel()) + i).view_as(parameter))
    B, C = case.dense(model, elsewhere), case.dense(moved, elsewhere)
    layout = Layout({name: t for name, t in model.named_parameters() if t.requires_grad})
    level = layout.flatten({name: torch.full(s, 0.5 + i) for i, (name, s) in enumerate(layout.shapes.items())})
    level, ramp = level.double(), torch.linspace(0.1, 2.0, layout.p, dtype=torch.float64)
    with fallback(case):
        J = jacobian(case, model, data)
        other, foreign = jacobian(case, model, elsewhere), jacobian(case, moved, elsewhere, engine="ghost")
        close(J.gram(other), A @ B.T)
        close(foreign.gram(J), C @ A.T)
        close(J.gram(foreign, ramp), (A * ramp) @ C.T)
        close(J.gram(scale=level), (A * level) @ A.T)
        close(foreign.gram(scale=level), (C * level) @ C.T)
        close(foreign.gram_diag(level), (C * C) @ level)


@pytest.mark.parametrize("case", CASES)
def test_one_example_first(case):
    """What one example shows, where the examples lie above all, is not trusted with several."""
    model, data, A = reference(case, MORE)
    lin, c = linnet.linearize(model, output=case.output), len(A) // MORE
    with warnings.catch_warnings():
        if case.name in FALLBACKS:
            warnings.filterwarnings("ignore", "linnet's layer rules")
        close(lin.jacobian(first(data, 1), engine="rows").gram(), A[:c] @ A[:c].T)
        close(lin.jacobian(data, engine="rows").gram(), A @ A.T)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", CASES)
def test_float32(case):
    model, data, A = reference(case)
    with fallback(case):
        J = jacobian(case, copy.deepcopy(model).float(), single(data))
        check_operator(J, A.float(), blocks=len(A) // N, rtol=2e-4)


@pytest.mark.parametrize("name", ["resnet", "unet", "convnext", "batch_norm2d", "densenet"])
def test_channels_last(name: str) -> None:
    case = zoo()[name]
    model, data, dense = reference(case)
    assert isinstance(data, Tensor)
    moved = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for engine in ("auto", "rows", "bilinear"):
        J = jacobian(case, moved, data.to(memory_format=torch.channels_last), engine=engine)
        check_operator(J, dense, blocks=J.c)
