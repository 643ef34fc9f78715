"""Modules with error bars against predictions, for every posterior; torch.export, ONNX, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor
from tests.support.drawn import double, normal

pytestmark = pytest.mark.filterwarnings("ignore:The network is far from a mode")

X, NEW = normal(24, 3), normal(7, 3, seed=5)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
LABELS = torch.stack([CLASSES > 0, CLASSES > 1], 1).double()
NUMBERS = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], 1)
STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]
HEAD = "2.*"


def net(outputs: int, bias: bool = True) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias)), 0)


def numbers(estimator: Any) -> Any:
    return estimator.predict(NEW, return_std=True)


def probabilities(estimator: Any) -> Any:
    return (estimator.predict_proba(NEW),)


def as_tuple(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_laplace(structure: Any, outputs: int) -> None:
    options: dict[str, Any] = {"prior": 0.7, "params": HEAD, "rank": 4, "size": 5, "tolerance": 1e-8}
    y = CLASSES if outputs > 1 else (CLASSES > 0).long()
    la = Laplace(net(outputs), "classification", structure, **options).fit(X, y)
    torch.testing.assert_close(la.to_module()(NEW), la.predict_proba(NEW), rtol=1e-9, atol=1e-12)
    y = NUMBERS[:, 0] if outputs == 1 else torch.cat([NUMBERS, X[:, :1]], 1)
    la = Laplace(net(outputs), "regression", structure, noise=0.3, **options).fit(X, y)
    torch.testing.assert_close(la.to_module()(NEW), la.predict(NEW, return_std=True), rtol=1e-9, atol=1e-12)


FITTED: dict[str, tuple[Any, Any]] = {
    "function": (lambda: TangentRegressor(net(1), params=HEAD, noise=0.3).fit(X, NUMBERS[:, 0]), numbers),
    "averaged": (lambda: TangentRegressor(net(1), params=HEAD, solver="function").fit(X, NUMBERS[:, 0]), numbers),
    "weight": (lambda: TangentRegressor(net(2), params=HEAD, noise=0.3, solver="weight").fit(X, NUMBERS), numbers),
    "zero": (lambda: TangentRegressor(net(2), params=HEAD, noise=0.3, mean="zero").fit(X, NUMBERS), numbers),
    "weights alone": (lambda: TangentRegressor(net(2), params="2.weight", noise=0.3).fit(X, NUMBERS), numbers),
    "no bias": (lambda: TangentRegressor(net(2, bias=False), params=HEAD, noise=0.3).fit(X, NUMBERS), numbers),
    "a layer": (lambda: TangentRegressor(double(nn.Linear(3, 2), 0), noise=0.3).fit(X, NUMBERS), numbers),
    "vi": (lambda: TangentClassifier(net(3), params=HEAD, prior=0.5).fit(X, CLASSES), probabilities),
    "one logit": (lambda: TangentClassifier(net(1), params=HEAD, prior=0.5).fit(X, CLASSES > 0), probabilities),
    "labels": (lambda: TangentClassifier(net(2), params=HEAD, prior=0.5).fit(X, LABELS), probabilities),
}


@pytest.mark.parametrize("name", FITTED)
def test_tangent(name: str, tmp_path: Path) -> None:
    make, predict = FITTED[name]
    estimator = make()
    found = as_tuple(estimator.to_module(error_bars=True)(NEW))
    for one, expected in zip(found, predict(estimator), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
    estimator.save(tmp_path / "file")
    again = linnet.load(tmp_path / "file", estimator.model)
    for one, expected in zip(as_tuple(again.to_module(error_bars=True)(NEW)), found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)


def exported(name: str) -> tuple[Any, Any]:
    """A module in float32 and what the estimator predicts."""
    if name == "numbers":
        reg = TangentRegressor(net(2).float(), params=HEAD, noise=0.3).fit(X.float(), NUMBERS.float())
        return reg.to_module(error_bars=True), reg.predict(NEW.float(), return_std=True)
    la = Laplace(net(3).float(), "classification", "kron", prior=0.7, params=HEAD).fit(X.float(), CLASSES)
    return la.to_module(), (la.predict_proba(NEW.float()),)


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_torch_export_with_batches_of_any_size(name: str, tmp_path: Path) -> None:
    module, expected = exported(name)
    module.export(tmp_path / "m.pt2", X.float())
    program = torch.export.load(tmp_path / "m.pt2")
    for one, other in zip(as_tuple(program.module()(NEW.float())), expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    assert len(as_tuple(program.module()(NEW[:1].float()))[0]) == 1


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_onnx_with_batches_of_any_size(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="ONNX needs the extra linnet[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX needs the extra linnet[onnx]")
    module, expected = exported(name)
    module.export(tmp_path / "m.onnx", X.float())
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    found = session.run(None, {session.get_inputs()[0].name: NEW.float().numpy()})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one).double(), other.double(), rtol=1e-5, atol=1e-5)


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = exported("classes")
    with pytest.raises(ValueError, match=r"writes \.pt2 files"):
        module.export(tmp_path / "m.pt", X.float())
    for inputs in ((), (X[:1].float(),), ("text",)):
        with pytest.raises(ValueError, match="two or more examples"):
            module.export(tmp_path / "m.pt2", *inputs)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"linnet\[onnx\]"):
        module.export(tmp_path / "m.onnx", X.float())
    assert not list(tmp_path.iterdir())


def test_the_network_given_stays_as_it_is() -> None:
    model = net(2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    TangentRegressor(model, params=HEAD, noise=0.3).fit(X, NUMBERS).to_module(error_bars=True)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert isinstance(model[2], nn.Linear) and all(p.requires_grad for p in model.parameters())


def test_errors() -> None:
    with pytest.raises(NotImplementedError, match=r"known for the weights of the last layer.*params='head"):
        TangentRegressor(net(2), noise=0.3).fit(X, NUMBERS).to_module(error_bars=True)
    with pytest.raises(NotImplementedError, match="known for the weights of the last layer"):
        TangentRegressor(net(2), params="2.bias", noise=0.3).fit(X, NUMBERS).to_module(error_bars=True)
    changed = double(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), 0)
    with pytest.raises(NotImplementedError, match="not the last of the network"):
        TangentRegressor(changed, noise=0.3).fit(X, NUMBERS).to_module(error_bars=True)
    la = Laplace(model := net(2), "regression", "full", params=HEAD, prior=0.7, noise=0.3).fit(X, NUMBERS)
    model[0].weight.data.mul_(1.5)  # leaves no trace but the numbers
    with pytest.raises(RuntimeError, match="has changed"):
        la.to_module()
    first = TangentRegressor(net(2), params="0.*", noise=0.3).fit(X, NUMBERS)
    with pytest.raises(NotImplementedError, match="not the last of the network"):
        first.to_module(error_bars=True)
    point = TangentClassifier(net(3), params=HEAD, inference="map", prior=0.5).fit(X, CLASSES)
    with pytest.raises(ValueError, match="no error bars"):
        point.to_module(error_bars=True)
    with pytest.raises(NotImplementedError, match="link='mc'"):
        TangentClassifier(net(3), params=HEAD, link="mc", prior=0.5).fit(X, CLASSES).to_module(error_bars=True)
    with pytest.raises(NotImplementedError, match="TangentGLM has neither"):
        TangentGLM(net(1), "poisson", params=HEAD, prior=0.5).fit(X, CLASSES).to_module(error_bars=True)
    counts = Laplace(net(1), "poisson", params=HEAD, prior=0.5).fit(X, CLASSES)
    with pytest.raises(NotImplementedError, match="the likelihood is Poisson"):
        counts.to_module()
