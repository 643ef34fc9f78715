"""Modules with error bars against predictions, for every posterior; torch.export, ONNX, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor
from linnet._estimator.exported import find_form
from linnet.testing.case import Net
from tests.support.drawn import double, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:The network is far from a mode"),
    pytest.mark.filterwarnings("ignore:linnet's layer rules do not reproduce"),  # of forces
]

X, NEW = normal(24, 3), normal(7, 3, seed=5)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
LABELS = torch.stack([CLASSES > 0, CLASSES > 1], 1).double()
NUMBERS = torch.stack([X[:, 0].sin(), X[:, 1] * X[:, 2]], 1)
STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]
HEAD = "2.*"
CHANGED = nn.Sequential(nn.Linear(3, 2), nn.Tanh())


def net(outputs: int, bias: bool = True) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias)), 0)


def numbers(estimator: Any) -> Any:
    return estimator.predict(NEW, return_std=True)


def probabilities(estimator: Any) -> Any:
    return (estimator.predict_proba(NEW),)


def as_tuple(found: Any) -> Any:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("params", "p"), [("2.*", 6), ("0.*", 20), (None, 26)])
def test_a_posterior_of_functions_has_the_smaller_form(params: str | None, p: int) -> None:
    """Products with the training outputs, or with the parameters where there are fewer of these."""
    reg = TangentRegressor(net(1), noise=0.1, prior=0.7, solver="function", params=params).fit(X, NUMBERS[:, 0])
    J = reg.lin_.jacobian(NEW).dense()
    D, A, signs = find_form(reg.posterior_, "auto")
    assert A is not None and signs is not None and A.shape == (p, min(p, len(X)))
    assert (D is None) == (p <= len(X))
    variance = (signs * (J @ A).square()).sum(1) + (0.0 if D is None else (D * J.square()).sum(1))
    torch.testing.assert_close(variance.sqrt(), reg.predict(NEW, return_std=True)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("params", [HEAD, None, "0.*"])
def test_laplace(structure: Any, outputs: int, params: str | None) -> None:
    options: dict[str, Any] = {"prior": 0.7, "params": params, "rank": 4, "size": 5, "tolerance": 1e-8}
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
    "all, function": (lambda: TangentRegressor(net(1), noise=0.3).fit(X[:9], NUMBERS[:9, 0]), numbers),
    "all, weight": (lambda: TangentRegressor(net(2), noise=0.3, solver="weight").fit(X, NUMBERS), numbers),
    "all, many data": (lambda: TangentRegressor(net(2), noise=0.3, solver="function").fit(X, NUMBERS), numbers),
    "all, averaged": (lambda: TangentRegressor(net(1), solver="function").fit(X[:9], NUMBERS[:9, 0]), numbers),
    "all, zero": (lambda: TangentRegressor(net(2), noise=0.3, mean="zero").fit(X[:9], NUMBERS[:9]), numbers),
    "all, vi": (lambda: TangentClassifier(net(3), prior=0.5).fit(X, CLASSES), probabilities),
    "all, one logit": (lambda: TangentClassifier(net(1), prior=0.5).fit(X, CLASSES > 0), probabilities),
    "a bias": (lambda: TangentRegressor(net(2), params="2.bias", noise=0.3).fit(X, NUMBERS), numbers),
    "changed": (lambda: TangentRegressor(double(CHANGED, 0), params="0.*", noise=0.3).fit(X, NUMBERS), numbers),
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


def attend(m: Any, x: Tensor) -> Tensor:
    h = m.norm(m.table(x))
    return m.out(F.scaled_dot_product_attention(m.query(h), h, h).mean(1))


def push(m: Any, x: Tensor) -> Tensor:
    """An energy and its derivatives by the positions."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = m.out(m.first(x).tanh())
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, -slope], 1)


IMAGES, TOKENS = normal(10, 2, 8, 8), torch.randint(0, 7, (10, 5), generator=torch.Generator().manual_seed(1))
NETWORKS: dict[str, tuple[Any, Tensor]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)), X[:10]),
    "images": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(16, 2)),
        ),
        IMAGES,
    ),
    "tokens": (
        lambda: Net(attend, table=nn.Embedding(7, 4), norm=nn.LayerNorm(4), query=nn.Linear(4, 4), out=nn.Linear(4, 2)),
        TOKENS,
    ),
    "forces": (lambda: Net(push, first=nn.Linear(3, 5), out=nn.Linear(5, 1)), X[:10]),
}


def fitted(name: str, estimator: str, dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    """A module, what the estimator predicts for nine inputs, and the inputs."""
    make, inputs = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().to(dtype).eval()
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    c = model(inputs[:1]).shape[1]
    targets = normal(10, c, seed=3).to(dtype)
    if estimator == "function":
        reg = TangentRegressor(model, noise=0.3).fit(inputs, targets)
        return reg.to_module(error_bars=True), reg.predict(inputs[:9], return_std=True), inputs[:9]
    if estimator == "classes":
        clf = Laplace(model, "classification", "kron", prior=0.7).fit(inputs, targets.argmax(1))
        return clf.to_module(), clf.predict_proba(inputs[:9]), inputs[:9]
    la = Laplace(model, "regression", estimator, prior=0.7, noise=0.3, rank=4).fit(inputs, targets)  # type: ignore[arg-type]
    return la.to_module(), la.predict(inputs[:9], return_std=True), inputs[:9]


@pytest.mark.parametrize("estimator", ["function", "kron", "diag", "lowrank", "classes"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_float64(name: str, estimator: str) -> None:
    module, expected, inputs = fitted(name, estimator, torch.float64)
    for size in (1, 3, 9):
        for one, other in zip(as_tuple(module(inputs[:size])), as_tuple(expected), strict=True):
            torch.testing.assert_close(one, other[:size], rtol=1e-9, atol=1e-12)


EXPORTED = [("dense", "function"), ("images", "kron"), ("tokens", "classes"), ("forces", "function")]


def head(dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    """A module of the last layer."""
    la = Laplace(net(3).to(dtype), "classification", "kron", prior=0.7, params=HEAD).fit(X.to(dtype), CLASSES)
    return la.to_module(), la.predict_proba(X[:9].to(dtype)), X[:9].to(dtype)


@pytest.mark.parametrize(("name", "estimator"), [*EXPORTED, ("head", "")])
def test_torch_export_with_batches_of_any_size(name: str, estimator: str, tmp_path: Path) -> None:
    dtype = torch.float64
    module, expected, inputs = head(dtype) if name == "head" else fitted(name, estimator, dtype)
    module.export(tmp_path / "m.pt2", inputs)
    program = torch.export.load(tmp_path / "m.pt2").module()
    for size in (1, 3, 9):
        for one, other in zip(as_tuple(program(inputs[:size])), as_tuple(expected), strict=True):
            torch.testing.assert_close(one, other[:size], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "estimator"), [*EXPORTED, ("head", "")])
def test_onnx_with_batches_of_any_size(name: str, estimator: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="ONNX needs the extra linnet[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX needs the extra linnet[onnx]")
    dtype = torch.float32
    module, expected, inputs = head(dtype) if name == "head" else fitted(name, estimator, dtype)
    module.export(tmp_path / "m.onnx", inputs)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    for size in (1, 3, 9):
        found = session.run(None, {session.get_inputs()[0].name: inputs[:size].numpy()})
        for one, other in zip(found, as_tuple(expected), strict=True):
            torch.testing.assert_close(torch.as_tensor(one).double(), other[:size].double(), rtol=1e-5, atol=1e-5)


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = head(torch.float32)
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
    la = Laplace(model := net(2), "regression", "full", params=HEAD, prior=0.7, noise=0.3).fit(X, NUMBERS)
    model[0].weight.data.mul_(1.5)  # leaves no trace but the numbers
    with pytest.raises(RuntimeError, match="has changed"):
        la.to_module()
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


def test_networks_without_a_plain_graph(tmp_path: Path) -> None:
    def fit(forward: Any) -> Any:
        model = double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), 0)
        return TangentRegressor(model, noise=0.3).fit(X, NUMBERS)

    with pytest.raises(NotImplementedError, match=r"nonzero.*params='last_layer'"):
        fit(lambda m, x: m.b(m.a(x)) + (x > 0).nonzero().sum() * 0).to_module(error_bars=True)
    eigenvalues = fit(lambda m, x: torch.linalg.eigvalsh((h := m.a(x).view(-1, 2, 2)) + h.mT)).to_module(
        error_bars=True
    )
    eigenvalues.export(tmp_path / "m.pt2", X)
    pytest.importorskip("onnxscript", reason="ONNX needs the extra linnet[onnx]")
    with pytest.raises(NotImplementedError, match=r"_linalg_eigh.*\.pt2"):
        eigenvalues.export(tmp_path / "m.onnx", X)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


def test_memory() -> None:
    reg = TangentRegressor(net(2), noise=0.3, memory=20_000).fit(X[:4], NUMBERS[:4])
    with pytest.raises(MemoryError, match=r"rows of the Jacobian, 2 x 32 numbers.*last_layer"):
        reg.set_params(memory=1000).to_module(error_bars=True)
